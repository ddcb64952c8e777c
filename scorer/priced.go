package scorer

import (
	"math"

	"github.com/shuntproxy/shunt/internal/pool"
)

// The policies in this file price the prompt. All read what this process tracks
// and its own prefix index: with U the uncached prompt tokens of this request on
// an endpoint, P those sent to it whose first token is not back yet, R its
// requests in flight and k the share of its KV cache in use.

// prompts fills w.todo with U of each candidate, that is the prompt less cached.
func (w *pick) prompts() {
	w.todo = resize(w.todo, len(w.cand))
	todo, prompt, blockTokens := w.todo, w.in.Request.Prompt, w.in.Request.BlockTokens
	if w.match == nil {
		for k := range todo {
			todo[k] = float64(prompt)
		}
		return
	}
	for k, m := range w.match[:len(todo)] {
		cached := int64(0)
		if m != 0 {
			cached = max(0, min(int64(float64(m)*blockTokens), prompt-1))
		}
		todo[k] = float64(prompt - cached)
	}
}

// prefills fills w.raw with P of each candidate and returns their sum.
func (w *pick) prefills() (sum float64) {
	raw, lives := w.raw, w.in.Snapshot.Lives()
	for k, i := range w.cand {
		v := float64(lives[i].Prefill())
		raw[k] = v
		sum += v
	}
	return sum
}

// tokenLoad is llm-d's token-load-scorer: 1 − min(P + U, T)/T.
func (w *pick) tokenLoad(pt *part) {
	threshold := pt.p[0]
	w.prefills()
	w.prompts()
	for k, p := range w.raw {
		v := p + w.todo[k]
		if v > threshold {
			v = threshold
		}
		w.raw[k] = 1 - v/threshold
	}
}

// kvUses fills w.a with k of each candidate: from the tokens in flight where the
// engine says how much room it has, else as scraped, else 0.
func (w *pick) kvUses() {
	w.a = resize(w.a, len(w.cand))
	uses, s := w.a, w.in.Snapshot
	lives, rooms := s.Lives(), s.KVRoom()
	readings := s.ReadingsFor(w.in.Request.Model, pool.KVCacheUsagePerc, w.in.Now)
	for k, i := range w.cand {
		v := 0.0
		if room := rooms[i]; room > 0 {
			v = float64(lives[i].Tokens()) / room
		} else if read, ok := readings.At(i); ok {
			v = read
		}
		if v > 1 {
			v = 1
		}
		uses[k] = v // which is never below 0
	}
}

// slowness fills w.slow with how long each candidate takes for a token of a prompt,
// 1 being the mean speed's; an endpoint that has not been measured is taken for the
// mean. Rates near it count as equal: what is measured is noisier than most hardware
// is uneven. It returns the mean rate, 0 where none is known, and whether any is not
// 1: most pools are of one kind of hardware.
func (w *pick) slowness() (mean float64, uneven bool) {
	w.slow = resize(w.slow, len(w.cand))
	slow, lives := w.slow, w.in.Snapshot.Lives()
	sum, known, slowest, fastest := 0.0, 0, math.Inf(1), 0.0
	for k, i := range w.cand {
		rate := lives[i].PrefillRate()
		slow[k] = rate
		if rate <= 0 {
			continue
		}
		sum += rate
		known++
		if rate < slowest {
			slowest = rate
		}
		if rate > fastest {
			fastest = rate
		}
	}
	mean = sum / float64(max(1, known))
	low, high := (1-evenSpeed)*mean, (1+evenSpeed)*mean
	if known < 2 || slowest > low && fastest < high {
		for k := range slow {
			slow[k] = 1
		}
		return mean, false
	}
	for k, rate := range slow {
		v := 1.0
		if rate > 0 && (rate <= low || rate >= high) {
			v = min(maxSpeed, max(1/maxSpeed, mean/rate))
		}
		slow[k] = v
	}
	return mean, true
}

const (
	// evenSpeed is how far from the mean a prefill rate may be and count as it.
	evenSpeed = 0.25
	// maxSpeed bounds how much faster or slower than the mean one can count.
	maxSpeed = 8.0
)

// priced is priced prefill, (P + α·U)/speed × (1 + k), α = 1 + backlogWeight ·
// mean(P) / batchTokens: the longer the queues, the more a hit is worth.
// backlogWeight, batchTokens, kv and speed begin at params[from].
func (w *pick) priced(pt *part, from int) {
	backlog, batch, kv, speed := pt.p[from], pt.p[from+1], pt.p[from+2] != 0, pt.p[from+3] != 0
	sum := w.prefills()
	w.prompts()
	alpha := 1 + backlog*sum/float64(len(w.cand))/batch
	raw := w.raw
	for k, todo := range w.todo {
		raw[k] += alpha * todo
	}
	if speed {
		if _, uneven := w.slowness(); uneven {
			for k, slow := range w.slow {
				raw[k] *= slow
			}
		}
	}
	if kv {
		w.kvUses()
		for k, use := range w.a {
			raw[k] *= 1 + use
		}
	}
}

// prefillCost is priced prefill over all candidates.
func (w *pick) prefillCost(pt *part) {
	w.priced(pt, 0)
	w.byRequests = true
}

// expectedTTFT is the time until the first token, in seconds: (P + U) at the
// measured prefill rate, and a decode step for each batch that this takes. A step
// takes longer the fuller the KV cache is.
func (w *pick) expectedTTFT(pt *part) {
	batch, rate, step := pt.p[0], pt.p[1], pt.p[2]
	between := w.in.Snapshot.ReadingsFor(w.in.Request.Model, pool.InterTokenLatency, w.in.Now)
	w.prefills()
	w.prompts()
	w.kvUses()
	if mean, _ := w.slowness(); mean > 0 {
		rate = mean
	}
	for k, i := range w.cand {
		todo, slow := w.raw[k]+w.todo[k], w.slow[k]
		decode, ok := between.At(i)
		if !ok {
			decode = step * (1 + w.a[k]) * slow
		}
		batches := 1.0
		if todo > batch {
			batches = math.Ceil(todo / batch)
		} else if todo <= 0 {
			batches = 0
		}
		w.raw[k] = todo*slow/rate + batches*decode
	}
	w.byRequests = true
}

// lmetric is LMetric's product, (P + U)·(R + 1) (arXiv 2603.15202).
func (w *pick) lmetric() {
	w.prefills()
	w.prompts()
	for k, p := range w.raw {
		w.raw[k] = (p + w.todo[k]) * float64(w.flight[k]+1)
	}
	w.byRequests = true
}

// preble is Preble's E2 (arXiv 2407.00023): a request of which more is cached
// than not goes to the endpoint that holds the most, unless that is the hottest
// and has more than hotFactor times the mean load; any other goes where P + U and
// the work of decoding are least.
func (w *pick) preble(pt *part) {
	decode, hot := pt.p[0], pt.p[1]
	w.prefills()
	w.prompts()
	w.byRequests = true
	sum, highest, best, least, load := 0.0, 0.0, -1, 0.0, 0.0 // least is U of best, load its load
	prompt := float64(w.in.Request.Prompt)
	for k, p := range w.raw {
		l, todo := p+decode*float64(w.flight[k]), w.todo[k]
		sum += l
		if l > highest {
			highest = l
		}
		w.raw[k] = l + todo
		if todo < prompt && (best < 0 || todo < least || todo == least && l < load) {
			best, least, load = k, todo, l
		}
	}
	if best < 0 || least >= prompt-least {
		return
	}
	if load >= highest && load > hot*sum/float64(len(w.cand)) && len(w.cand) > 1 {
		return
	}
	w.raw[best] = -1
}

// hrwCandidates is how many endpoints prefix-hrw favours for a prefix.
const hrwCandidates = 3

// prefixHRW favours the three endpoints that rank first in rendezvous hashing of
// who is asking, where that is known, else of the prompt's first keyTokens, and of
// these the first: priced prefill, times
// homeFactor at the first and awayFactor at those that are not among the three.
// Envoys that share nothing agree on the three; that they are not the only ones
// keeps a prefix which many prompts share, such as a system prompt longer than
// keyTokens, from filling three endpoints while the others are idle. A prompt of
// less than a block is priced on all alike.
func (w *pick) prefixHRW(pt *part) {
	home, away, keyTokens := pt.p[0], pt.p[1], pt.p[2]
	w.priced(pt, 4)
	w.byRequests = true
	key, ok := w.affinityKey(keyTokens, pt.p[3] != 0)
	if !ok || len(w.cand) <= 1 {
		return
	}
	var top [hrwCandidates]int
	var rank [hrwCandidates]uint64
	n := 0
	for k, i := range w.cand {
		r := mix(key ^ w.in.Snapshot.AddrHash(i))
		at := n
		for at > 0 && r > rank[at-1] {
			at--
		}
		if at == hrwCandidates {
			continue
		}
		n = min(n+1, hrwCandidates)
		copy(top[at+1:n], top[at:n-1])
		copy(rank[at+1:n], rank[at:n-1])
		top[at], rank[at] = k, r
	}
	var kept [hrwCandidates]float64
	for j := range n {
		kept[j] = w.raw[top[j]]
	}
	kept[0] *= home
	for k := range w.raw {
		w.raw[k] *= away
	}
	for j := range n {
		w.raw[top[j]] = kept[j]
	}
}

// affinityKey is what a request shares with those that it should be with: the
// session, or the first keyTokens of the prompt, or all of a shorter one. ok is
// false where it has neither session nor block.
func (w *pick) affinityKey(keyTokens float64, bySession bool) (key uint64, ok bool) {
	r := &w.in.Request
	if bySession && r.Session != 0 {
		return r.Session, true
	}
	if len(r.Blocks) == 0 {
		return 0, false
	}
	at := len(r.Blocks) - 1
	if r.BlockTokens > 0 {
		at = max(0, min(at, int(keyTokens/r.BlockTokens)-1))
	}
	return r.Blocks[at], true
}
