package flowcontrol

import (
	"container/heap"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Fairness is how the flows of a band share its dispatches.
type Fairness uint8

// The kinds of fairness.
const (
	// RoundRobin gives each flow one request in turn.
	RoundRobin Fairness = iota
	// Weighted gives each flow tokens in turn, by its weight.
	Weighted
	// GlobalFCFS knows no flows: the band is one line.
	GlobalFCFS
)

// ParseFairness reads a configuration name.
func ParseFairness(name string) (Fairness, error) {
	switch name {
	case "round-robin":
		return RoundRobin, nil
	case "weighted":
		return Weighted, nil
	case "global-fcfs":
		return GlobalFCFS, nil
	default:
		return 0, fmt.Errorf("unknown fairness %q, valid: round-robin, weighted, global-fcfs", name)
	}
}

// Order is the order of the requests of one flow.
type Order uint8

// The orders.
const (
	// FCFS is first come, first served.
	FCFS Order = iota
	// EDF is earliest deadline first: a request's arrival plus its time to first
	// token, or where it has none its time to live.
	EDF
)

// ParseOrder reads a configuration name.
func ParseOrder(name string) (Order, error) {
	switch name {
	case "fcfs":
		return FCFS, nil
	case "edf":
		return EDF, nil
	default:
		return 0, fmt.Errorf("unknown order %q, valid: fcfs, edf", name)
	}
}

// quantum is the tokens that a flow of weight 1 gets in its turn.
const quantum = 512

// lane is the requests with one set of candidates: they are held up together.
type lane struct {
	controller    *Controller
	model, subset string

	snapshot uint64 // whose positions index has; 0 before the first
	index    []int32
	empty    bool // no candidates
	waiting  int
}

// band is the requests of one priority.
type band struct {
	priority int
	limit    Limit
	ttl      int64 // 0 is the configuration's

	flows    map[string]*flow
	line     *flow // of all, by fairness GlobalFCFS
	lanes    map[*lane]*bandLane
	list     []*bandLane // of lanes
	waiters  line
	requests int
	bytes    int64

	// Turns. A flow is due in a round; in a round, flows go by turn. This is
	// deficit round robin (Shreedhar and Varghese, 1995) with the rounds in which
	// a flow only saves up left out, so that what it costs does not depend on the
	// number of flows or on the size of requests.
	round int64
	turn  uint64

	pace  pace
	since int64 // that it has been empty
	stats BandStats
}

// bandLane is the flows of a band with requests in one lane.
type bandLane struct {
	lane *lane
	subs []*sub // a heap, the next one first
	// since when nothing has come free for them: that they wait, the last grant, or
	// the last time that a request in flight was asked to end.
	since int64
	// futile is Controller.changes when nobody was found who could be asked.
	futile uint64
}

// flow is the requests of one fairness id at one priority.
type flow struct {
	band     *band
	name     string
	requests int
	bytes    int64
	stats    *FlowStats

	subs    []*sub // those with requests
	share   int64  // of a round
	unit    bool   // a request counts as one token
	deficit int64  // what it may use in round
	round   int64
	turn    uint64
}

// sub is the requests of one flow in one lane.
type sub struct {
	flow *flow
	lane *lane
	in   *bandLane

	waiters line   // by order fcfs
	heap    urgent // by order edf
	length  int
	due     int64 // round of the flow's next turn here
	index   int   // in in.subs
}

func (s *sub) head() *Waiter {
	if len(s.heap) > 0 {
		return s.heap[0]
	}
	return s.waiters.first
}

// before says which of two subs is next.
func (s *sub) before(o *sub) bool {
	switch {
	case s.due != o.due:
		return s.due < o.due
	case s.flow != o.flow:
		return s.flow.turn < o.flow.turn
	default: // one flow in two lanes
		return s.head().before(o.head())
	}
}

func (w *Waiter) before(o *Waiter) bool {
	if w.urgency != o.urgency {
		return w.urgency < o.urgency
	}
	return w.seq < o.seq
}

// reckon finds the round in which the head of a sub is due.
func (f *flow) reckon(s *sub) {
	s.due = f.round
	if need := f.cost(s.head()) - f.deficit; need > 0 {
		s.due += (need + f.share - 1) / f.share
	}
}

func (f *flow) cost(w *Waiter) int64 {
	if f.unit {
		return 1
	}
	return w.cost
}

// served takes the cost of w, which goes now, from what its flow may use.
func (f *flow) served(w *Waiter) {
	s := w.sub
	f.deficit += (s.due-f.round)*f.share - f.cost(w)
	f.round = max(s.due, f.band.round)
	f.band.round = f.round
}

// turned gives the flow its next turn, after served and once the head is gone.
func (f *flow) turned() {
	for _, s := range f.subs {
		f.reckon(s)
	}
	if !slices.ContainsFunc(f.subs, func(s *sub) bool { return s.due == f.round }) {
		f.band.turn++
		f.turn = f.band.turn
	}
	for _, s := range f.subs {
		heap.Fix((*turns)(&s.in.subs), s.index)
	}
}

// addLocked puts a waiter, whose flow and order are set, into its sub.
func (b *band) addLocked(f *flow, ln *lane, order Order, w *Waiter, now int64) {
	s := b.subOf(f, ln, now)
	w.sub = s
	if order == EDF {
		heap.Push(&s.heap, w)
	} else {
		s.waiters.insert(w)
	}
	s.length++
	ln.waiting++
	if s.length == 1 {
		f.subs = append(f.subs, s)
		f.reckon(s)
		heap.Push((*turns)(&s.in.subs), s)
	} else if s.head() == w {
		f.reckon(s)
		heap.Fix((*turns)(&s.in.subs), s.index)
	}
	b.waiters.insert(w)
	b.requests++
	b.bytes += w.bytes
	w.flow.requests++
	w.flow.bytes += w.bytes
}

// removeLocked takes a waiter out of its band; the caller has seen to the
// flow's turn if it was served.
func (b *band) removeLocked(w *Waiter, served bool) {
	s, f := w.sub, w.sub.flow
	wasHead := s.head() == w
	if len(s.heap) > 0 {
		heap.Remove(&s.heap, int(w.rank))
	} else {
		s.waiters.remove(w)
	}
	s.length--
	s.lane.waiting--
	b.waiters.remove(w)
	b.requests--
	b.bytes -= w.bytes
	w.flow.requests--
	w.flow.bytes -= w.bytes
	if s.length == 0 {
		heap.Remove((*turns)(&s.in.subs), s.index)
		f.subs = slices.DeleteFunc(f.subs, func(x *sub) bool { return x == s })
		if len(s.in.subs) == 0 {
			delete(b.lanes, s.lane)
			b.list = slices.DeleteFunc(b.list, func(x *bandLane) bool { return x == s.in })
		}
	} else if wasHead && !served {
		f.reckon(s)
		heap.Fix((*turns)(&s.in.subs), s.index)
	}
	if served && len(f.subs) > 0 {
		f.turned()
	}
	if w.flow.requests == 0 {
		delete(b.flows, w.flow.name) // what it saved up goes with it
	}
	if f == b.line && len(f.subs) == 0 {
		b.line = nil
	}
}

func (b *band) subOf(f *flow, ln *lane, now int64) *sub {
	for _, s := range f.subs {
		if s.lane == ln {
			return s
		}
	}
	in := b.lanes[ln]
	if in == nil {
		in = &bandLane{lane: ln, since: now}
		b.lanes[ln] = in
		b.list = append(b.list, in)
	}
	return &sub{flow: f, lane: ln, in: in}
}

// newFlow returns a flow that takes its turn after all that wait.
func (b *band) newFlow(name string, share int64, unit bool) *flow {
	b.turn++
	return &flow{band: b, name: strings.Clone(name), // the caller's ends with its request
		share: share, unit: unit, round: b.round, turn: b.turn}
}

// turns is a heap of subs, the next one first.
type turns []*sub

func (t turns) Len() int           { return len(t) }
func (t turns) Less(i, j int) bool { return t[i].before(t[j]) }
func (t turns) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].index, t[j].index = i, j
}
func (t *turns) Push(x any) {
	s := x.(*sub)
	s.index = len(*t)
	*t = append(*t, s)
}
func (t *turns) Pop() any {
	old := *t
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*t = old[:len(old)-1]
	return s
}

// urgent is a heap of waiters by urgency.
type urgent []*Waiter

func (u urgent) Len() int           { return len(u) }
func (u urgent) Less(i, j int) bool { return u[i].before(u[j]) }
func (u urgent) Swap(i, j int) {
	u[i], u[j] = u[j], u[i]
	u[i].rank, u[j].rank = int32(i), int32(j)
}
func (u *urgent) Push(x any) {
	w := x.(*Waiter)
	w.rank = int32(len(*u))
	*u = append(*u, w)
}
func (u *urgent) Pop() any {
	old := *u
	w := old[len(old)-1]
	old[len(old)-1] = nil
	*u = old[:len(old)-1]
	return w
}

// pace is how fast a band is served: dispatches a second, averaged over about
// paceSpan.
type pace struct {
	rate float64
	at   int64
}

const paceSpan = 5e9 // nanoseconds

func (p *pace) add(now int64) {
	p.rate = p.per(now) + 1e9/paceSpan
	p.at = now
}

func (p *pace) per(now int64) float64 {
	return p.rate * math.Exp(-float64(now-p.at)/paceSpan)
}
