package scorer

import (
	"math"

	"github.com/shuntproxy/shunt/internal/pool"
)

// The policies in this file price the prompt. All read what this process tracks
// and its own prefix index: with U the uncached prompt tokens of this request on
// an endpoint, P those sent to it whose first token is not back yet, R its
// requests in flight and k the share of its KV cache in use.

// uncached is U.
func (w *pick) uncached(k int) float64 { return float64(w.in.Request.Prompt - w.cached(k)) }

// tokenLoad is llm-d's token-load-scorer: 1 − min(P + U, T)/T.
func (w *pick) tokenLoad(pt *part) {
	threshold := pt.p[0]
	for k := range w.raw {
		w.raw[k] = 1 - min(float64(w.live(k).Prefill())+w.uncached(k), threshold)/threshold
	}
}

// kvUse is k: from the tokens in flight where the engine says how much room it
// has, else as scraped, else 0.
func (w *pick) kvUse(readings pool.Readings, k int) float64 {
	i := w.cand[k]
	if room := w.in.Snapshot.KVTokens(i); room > 0 {
		return min(1, float64(w.live(k).Tokens())/room)
	}
	if v, ok := readings.At(i); ok {
		return min(1, max(0, v))
	}
	return 0
}

// speeds fills w.speed with how fast each candidate reads prompts, 1 being the
// mean; an endpoint that has not been measured is taken for the mean. Rates near
// it count as equal: what is measured is noisier than most hardware is uneven.
//
// It reports whether any is not 1: most pools are of one kind of hardware.
func (w *pick) speeds() (uneven bool) {
	w.speed = resize(w.speed, len(w.cand))
	sum, known, slowest, fastest := 0.0, 0, math.Inf(1), 0.0
	for k := range w.speed {
		rate := w.live(k).PrefillRate()
		w.speed[k] = rate
		if rate > 0 {
			sum += rate
			known++
			slowest, fastest = min(slowest, rate), max(fastest, rate)
		}
	}
	mean := sum / float64(max(1, known))
	if known < 2 || slowest > (1-evenSpeed)*mean && fastest < (1+evenSpeed)*mean {
		for k := range w.speed {
			w.speed[k] = 1
		}
		return false
	}
	for k, rate := range w.speed {
		v := 1.0
		if rate > 0 {
			v = rate / mean
		}
		switch {
		case v > 1-evenSpeed && v < 1+evenSpeed:
			v = 1
		default:
			v = min(maxSpeed, max(1/maxSpeed, v))
		}
		w.speed[k] = v
	}
	return true
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
	sum := 0.0
	for k := range w.raw {
		w.raw[k] = float64(w.live(k).Prefill())
		sum += w.raw[k]
	}
	alpha := 1 + backlog*sum/float64(len(w.cand))/batch
	usage := w.in.Snapshot.ReadingsFor(w.in.Request.Model, pool.KVCacheUsagePerc, w.in.Now)
	speed = speed && w.speeds()
	for k := range w.raw {
		cost := w.raw[k] + alpha*w.uncached(k)
		if speed {
			cost /= w.speed[k]
		}
		if kv {
			cost *= 1 + w.kvUse(usage, k)
		}
		w.raw[k] = cost
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
	usage := w.in.Snapshot.ReadingsFor(w.in.Request.Model, pool.KVCacheUsagePerc, w.in.Now)
	between := w.in.Snapshot.ReadingsFor(w.in.Request.Model, pool.InterTokenLatency, w.in.Now)
	w.speeds()
	sum, known := 0.0, 0
	for k := range w.cand {
		if v := w.live(k).PrefillRate(); v > 0 {
			sum += v
			known++
		}
	}
	if known > 0 {
		rate = sum / float64(known)
	}
	for k, i := range w.cand {
		todo := float64(w.live(k).Prefill()) + w.uncached(k)
		decode, ok := between.At(i)
		if !ok {
			decode = step * (1 + w.kvUse(usage, k)) / w.speed[k]
		}
		w.raw[k] = todo/(rate*w.speed[k]) + math.Ceil(todo/batch)*decode
	}
	w.byRequests = true
}

// lmetric is LMetric's product, (P + U)·(R + 1) (arXiv 2603.15202).
func (w *pick) lmetric() {
	for k := range w.raw {
		live := w.live(k)
		w.raw[k] = (float64(live.Prefill()) + w.uncached(k)) * float64(w.flight[k]+1)
	}
	w.byRequests = true
}

// preble is Preble's E2 (arXiv 2407.00023): a request of which more is cached
// than not goes to the endpoint that holds the most, unless that is the hottest
// and has more than hotFactor times the mean load; any other goes where P + U and
// the work of decoding are least.
func (w *pick) preble(pt *part) {
	decode, hot := pt.p[0], pt.p[1]
	sum, highest, best := 0.0, 0.0, -1
	load := func(k int) float64 {
		live := w.live(k)
		return float64(live.Prefill()) + decode*float64(w.flight[k])
	}
	for k := range w.raw {
		l := load(k)
		sum += l
		highest = max(highest, l)
		w.raw[k] = l + w.uncached(k)
		if w.cached(k) > 0 && (best < 0 || w.cached(k) > w.cached(best) || w.cached(k) == w.cached(best) && w.raw[k] < w.raw[best]) {
			best = k
		}
	}
	w.byRequests = true
	if best < 0 || w.uncached(best) >= float64(w.cached(best)) {
		return
	}
	if l := load(best); l >= highest && l > hot*sum/float64(len(w.cand)) && len(w.cand) > 1 {
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
