package scorer

import (
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Guards are rules around every policy: they take candidates out before it
// ranks them. One that would leave no candidate is ignored.
type Guards struct {
	// Doubted leaves out endpoints that failed a request and have not answered
	// since.
	Doubted bool
	// Wedged leaves out endpoints with work and without a sign of life.
	Wedged bool
	// Pushback lowers the share of an endpoint that answered 429 or 503 in the last
	// second to a quarter.
	Pushback bool
	// OverloadVeto leaves out endpoints that are overloaded in absolute terms.
	OverloadVeto bool
	// WarmUp sends one in warmUpShare of the requests that no endpoint holds a
	// prefix of to those that hold little: policies on prefixes would starve them.
	WarmUp bool
	// SlowStart is the time over which the share of an endpoint that joined the
	// others grows from nothing to its full size; 0 is off.
	SlowStart time.Duration
}

// Guard is one of them.
type Guard uint8

// The guards, in the order in which they are asked.
const (
	GuardDoubted Guard = iota
	GuardWedged
	GuardOverload
	GuardPushback
	GuardSlowStart
	GuardWarmUp
	GuardSLO // Input.Admission
	// NumGuards is how many there are.
	NumGuards
)

// String returns the name in explain and in metrics.
func (g Guard) String() string {
	switch g {
	case GuardDoubted:
		return "doubted"
	case GuardWedged:
		return "wedged"
	case GuardOverload:
		return "overload-veto"
	case GuardPushback:
		return "pushback"
	case GuardSlowStart:
		return "slow-start"
	case GuardWarmUp:
		return "warm-up"
	case GuardSLO:
		return "slo"
	default:
		return "unknown"
	}
}

// GuardSet is a set of guards.
type GuardSet uint8

// Has reports whether a guard is in the set.
func (s GuardSet) Has(g Guard) bool { return s>>g&1 == 1 }

const (
	// pushbackPasses of pushbackOf requests still go to an endpoint that pushed
	// back: it alone knows when it has room again.
	pushbackPasses, pushbackOf = 1, 4
	// warmUpShare: one in so many of the requests that hit nobody.
	warmUpShare = 8
	// coldShare: an endpoint is cold below this share of the blocks that the mean
	// candidate holds.
	coldShare = 4
)

// guard sets w.cand to the candidates that the guards on their health leave.
func (w *pick) guard() {
	in := &w.in
	w.cand, w.guards, w.hits = in.Candidates, 0, w.hits[:0]
	g, s := in.Guards, in.Snapshot
	troubled := (g.Doubted || g.Wedged || g.Pushback) && s.Troubled(in.Candidates, in.Now)
	if !troubled && !g.OverloadVeto {
		return
	}
	found, now := GuardSet(0), pool.Stamp(in.Now)
	for k, i := range in.Candidates {
		hit := GuardSet(0)
		if g.OverloadVeto && s.Overloaded(i, in.Now) {
			hit |= 1 << GuardOverload
		}
		if troubled {
			live := s.Live(i)
			if g.Doubted && live.Doubted(in.Now) {
				hit |= 1 << GuardDoubted
			}
			if g.Wedged && live.Wedged(now) {
				hit |= 1 << GuardWedged
			}
			if g.Pushback && live.PushedBack(in.Now) && below(mix(in.Seed+2*uint64(k)+1), pushbackOf) >= pushbackPasses {
				hit |= 1 << GuardPushback
			}
		}
		if hit == 0 {
			continue
		}
		w.needHits()
		found |= hit
		w.hits[k] = uint8(hit)
	}
	if found != 0 {
		w.takeOut(found)
	}
}

func (w *pick) needHits() {
	if len(w.hits) == 0 {
		w.hits = resize(w.hits, len(w.in.Candidates))
		clear(w.hits)
	}
}

// takeOut applies the guards in w.hits one after another, each unless it would
// leave nobody.
func (w *pick) takeOut(found GuardSet) {
	in := &w.in
	left := func(set GuardSet) (n int) {
		for _, hit := range w.hits {
			if GuardSet(hit)&set == 0 {
				n++
			}
		}
		return n
	}
	before := len(in.Candidates)
	for g := range NumGuards {
		if !found.Has(g) {
			continue
		}
		n := left(w.guards | 1<<g)
		if n == 0 || n == before {
			continue
		}
		w.guards |= 1 << g
		before = n
	}
	w.held = w.held[:0]
	for k, hit := range w.hits {
		if GuardSet(hit)&w.guards == 0 {
			w.held = append(w.held, in.Candidates[k])
		}
	}
	w.cand = w.held
}

// skippedBy names the guard that took a candidate out, by position in
// in.Candidates, "" if none did.
func (w *pick) skippedBy(k int) string {
	if (w.slo == SLONarrowed || w.slo == SLORefused) && len(w.missing) > 0 && w.missing[k] != "" {
		return w.missing[k]
	}
	if len(w.hits) == 0 {
		return ""
	}
	for g := range NumGuards {
		if hit := GuardSet(w.hits[k]) & w.guards; hit.Has(g) {
			return g.String()
		}
	}
	return ""
}

// join settles what endpoints that are new, or hold little, get of this request:
// a share of those that hit nobody, which is the floor, or else no more than
// their age allows.
func (w *pick) join() {
	g, s, in := w.in.Guards, w.in.Snapshot, &w.in
	if g.WarmUp && w.match != nil && below(mix(^in.Seed), warmUpShare) == 0 && w.warmUp() {
		return
	}
	first, last := s.ReadySpan()
	if g.SlowStart <= 0 || in.Now.Sub(last) >= g.SlowStart || last.Sub(first) < g.SlowStart {
		return
	}
	oldest := in.Now
	for _, i := range w.cand {
		if since := s.Endpoints[i].ReadySince; since.Before(oldest) {
			oldest = since
		}
	}
	n := len(w.cand)
	w.narrow(GuardSlowStart, func(_ int, i int32) bool {
		// However empty an endpoint is that joined the others later, it takes part in
		// no more picks than its fair share, times its age over SlowStart.
		since := s.Endpoints[i].ReadySince
		age := in.Now.Sub(since)
		if age >= g.SlowStart || since.Sub(oldest) < g.SlowStart {
			return true
		}
		const parts = 1 << 16
		share := float64(max(0, age)) / float64(g.SlowStart) / float64(n)
		return below(mix(in.Seed^s.AddrHash(i)), parts) < int(share*parts)
	})
}

// warmUp narrows the candidates of a request that hits nobody to those that
// hold little, and reports whether it did.
func (w *pick) warmUp() bool {
	for _, m := range w.match {
		if m > 0 {
			return false
		}
	}
	sum := 0
	for k := range w.cand {
		sum += w.in.Index.Len(w.live(k))
	}
	n := len(w.cand)
	return w.narrow(GuardWarmUp, func(_ int, i int32) bool { return w.in.Index.Len(w.in.Snapshot.Live(i))*coldShare*n < sum })
}

// narrow leaves those candidates that keep wants, by their position in w.cand and
// in the snapshot, unless it wants none, and reports whether it took any out.
func (w *pick) narrow(g Guard, keep func(k int, i int32) bool) bool {
	n := 0
	for k, i := range w.cand {
		if keep(k, i) {
			n++
		}
	}
	if n == 0 || n == len(w.cand) {
		return false
	}
	w.needHits()
	w.guards |= 1 << g
	w.held = resize(w.held, len(w.cand))
	kept, from := 0, 0
	for k, i := range w.cand { // held may be the same memory: kept is never past k
		for w.in.Candidates[from] != i {
			from++
		}
		if !keep(k, i) {
			w.hits[from] |= 1 << g
			continue
		}
		w.held[kept] = i
		if w.match != nil {
			w.match[kept] = w.match[k]
		}
		kept++
	}
	w.cand = w.held[:kept]
	if w.match != nil {
		w.match = w.match[:kept]
	}
	return true
}
