package scorer

import (
	"math"
	"slices"
	"time"
)

// overloaded finds the number of requests in flight above which an endpoint is
// not chosen on affinity: slack over the mean of all candidates, and factor
// standard deviations over it (of a sample, as AIBrix has it). slack keeps a few
// requests on a quiet pool from counting as an imbalance.
func (w *pick) bound(factor, slack float64) float64 {
	n, mean := float64(len(w.cand)), 0.0
	for k := range w.cand {
		mean += float64(w.live(k).InFlight())
	}
	mean /= n
	spread := 0.0
	for k := range w.cand {
		d := float64(w.live(k).InFlight()) - mean
		spread += d * d
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
	w.tieByRequests()
	total := float64(len(w.in.Request.Blocks))
	if w.match == nil || total == 0 {
		clear(w.raw)
		return
	}
	bound := w.bound(factor, slack)
	for k := range w.raw {
		w.raw[k] = 0
		if m := float64(w.match[k]); m > 0 && w.tie[k] <= bound {
			length := min(1, m*w.in.Request.BlockTokens/scale)
			w.raw[k] = byLength*length*length + (1-byLength)*m/total
		}
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
		sum += w.live(k).InFlight()
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
		if (best < 0 || r > rank) && float64(w.live(k).InFlight()) <= most {
			best, rank = k, r
		}
	}
	w.raw[best] = 1 // the emptiest is never over the bound
}

// loraAffinity is llm-d's lora-affinity-scorer: an endpoint on which the adapter
// is in use scores 1, one with room for another adapter 0.8, one on which it
// waits 0.6, others 0. An endpoint that says nothing of adapters can't be scored.
func (w *pick) loraAffinity() {
	s, model := w.in.Snapshot, w.in.Request.Model
	for k, i := range w.cand {
		w.raw[k] = none
		m := s.Metrics(i)
		if m == nil || m.LoRA.Max == 0 && len(m.LoRA.Running) == 0 && len(m.LoRA.Waiting) == 0 || w.in.Now.Sub(m.Taken) > s.StaleAfter {
			continue
		}
		switch {
		case slices.Contains(m.LoRA.Running, model):
			w.raw[k] = 1
		case len(m.LoRA.Running)+len(m.LoRA.Waiting) < m.LoRA.Max:
			w.raw[k] = 0.8
		case slices.Contains(m.LoRA.Waiting, model):
			w.raw[k] = 0.6
		default:
			w.raw[k] = 0
		}
	}
}
