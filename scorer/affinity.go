package scorer

import (
	"math"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// bound is the number of requests in flight above which an endpoint is not
// chosen on affinity: slack over the mean of all candidates, or factor standard
// deviations over it (of a sample, as AIBrix has it) where that is more. slack
// keeps a few requests on a quiet pool from counting as an imbalance.
func bound(inFlight []int64, factor, slack float64) float64 {
	n, sum := float64(len(inFlight)), int64(0)
	for _, v := range inFlight {
		sum += v
	}
	mean, spread := float64(sum)/n, 0.0
	for _, v := range inFlight {
		spread += (float64(v) - mean) * (float64(v) - mean)
	}
	if n > 1 {
		spread = math.Sqrt(spread / (n - 1))
	}
	return mean + max(slack, factor*spread)
}

// prefixCache goes to the endpoint that holds the most of the prompt. An
// overloaded one (see bound) counts as holding nothing. Equals, and so a prompt
// that nobody holds, go where the fewest requests are in flight.
//
// As a part, the score is the share of the prompt's blocks that is held:
// w·min(1, tokens/scaleTokens)² + (1−w)·share, w being matchLengthWeight, as in
// llm-d's prefix-cache-scorer.
func (w *pick) prefixCache(pt *part) {
	factor, slack, byLength, scale := pt.p[0], pt.p[1], pt.p[2], pt.p[3]
	total := float64(len(w.in.Request.Blocks))
	w.byRequests = true
	clear(w.raw)
	if w.match == nil || total == 0 {
		return
	}
	bound := bound(w.flight, factor, slack)
	byShare := (1 - byLength) / total
	perBlock := w.in.Request.BlockTokens / scale
	raw, flight := w.raw, w.flight[:len(w.raw)]
	for k, m := range w.match[:len(raw)] {
		if m == 0 || float64(flight[k]) > bound {
			continue
		}
		v := float64(m) * byShare
		if byLength > 0 {
			length := min(1, float64(m)*perBlock)
			v += byLength * length * length
		}
		raw[k] = min(1, v) // which rounding may have passed
	}
}

// pinTTL is for how long a session stays where it was sent.
func (p *Policy) pinTTL() time.Duration {
	for i := range p.parts {
		if p.parts[i].kind == kindSessionAffinity {
			return time.Duration(p.parts[i].p[2] * float64(time.Second))
		}
	}
	return 0
}

// sessionAffinity keeps a session where it was last sent, for ttlSeconds, and
// places a new one by rendezvous hashing, on which Envoys that share nothing
// agree: when endpoints come and go, only the sessions of those move. The pin is
// soft: an endpoint with more than slack requests over factor times the mean gives
// way to the next in rank.
func (w *pick) sessionAffinity(pt *part) {
	slack, factor := pt.p[0], pt.p[1]
	session := w.in.Request.Session
	if session == 0 {
		for k := range w.raw {
			w.raw[k] = none
		}
		return
	}
	sum := int64(0)
	for k := range w.cand {
		sum += w.flight[k]
	}
	most := slack + factor*float64(sum)/float64(len(w.cand))
	pinned := 0
	if w.in.Pins != nil {
		pinned = w.in.Pins.get(session, w.in.Now)
	}
	best, rank := -1, uint64(0)
	for k, i := range w.cand {
		w.raw[k] = 0
		r := mix(session ^ w.in.Snapshot.AddrHash(i))
		if pinned != 0 && w.in.Snapshot.Live(i).Slot == pinned {
			r = math.MaxUint64
		}
		if (best < 0 || r > rank) && float64(w.flight[k]) <= most {
			best, rank = k, r
		}
	}
	w.raw[best] = 1 // the emptiest is never over the bound
}

// loraAffinity is llm-d's lora-affinity-scorer: an endpoint on which the adapter
// is in use scores 1, one with room for another adapter 0.8, one on which it
// waits 0.6, others 0. An endpoint that says nothing of adapters can't be scored.
func (w *pick) loraAffinity() {
	adapters := w.in.Snapshot.Adapters(w.in.Request.Model, w.in.Now)
	for k, i := range w.cand {
		w.raw[k] = loraScores[adapters.At(i)]
	}
}

// loraScores are llm-d's, by pool.AdapterState.
var loraScores = [...]float64{
	pool.AdapterUnknown: none, pool.AdapterRunning: 1, pool.AdapterRoom: 0.8, pool.AdapterWaiting: 0.6, pool.AdapterNone: 0,
}
