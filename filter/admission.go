package filter

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// waiting is what a request needs to wait for room.
type waiting struct {
	waiter  flowcontrol.Waiter  // its queue's
	outcome flowcontrol.Outcome // written before the word becomes granted
	granted *pool.Live          // where a grant holds a slot; as outcome

	// of the worker
	inBand    bool              // it waits for room, and not for the pool's start
	objective *config.Objective // that the request names, nil for none
	drain     time.Duration     // what a retry should add to its wait
}

// admission judges the endpoints of one pick. It is reused by later ones.
type admission struct {
	view flowcontrol.View
	hold *pool.Live // the caller's own slot, or nil
	// strict is whether a slot that another worker took in between counts: where
	// slots are counted, nobody gets one too many.
	strict bool
	open   []int32
}

var admissions = sync.Pool{New: func() any { return new(admission) }}

func newAdmission(d *flowcontrol.Detector, snap *pool.Snapshot, now time.Time) *admission {
	a := admissions.Get().(*admission)
	a.view, a.strict = d.View(snap, now), d.Saturation == flowcontrol.Concurrency
	return a
}

func (a *admission) free() {
	a.view, a.hold = flowcontrol.View{}, nil
	admissions.Put(a)
}

// Full implements scorer.Admitter: a doubted endpoint counts as full.
func (a *admission) Full(i int32, own int64) bool {
	if a.hold != nil && a.view.Live(i) == a.hold || own > 0 && !a.strict {
		return false
	}
	return !a.view.Open(i, own)
}

// withRoom are the candidates that are not full.
func (a *admission) withRoom(candidates []int32) []int32 {
	a.open = a.open[:0]
	for _, i := range candidates {
		if !a.Full(i, 0) {
			a.open = append(a.open, i)
		}
	}
	return a.open
}

// prioritize finds the objective that the request names.
func (r *Request) prioritize() {
	if r.identity.wishes().objective == "" {
		return
	}
	if r.wait.objective = r.objectiveOf(r.identity.wishes().objective); r.wait.objective == nil {
		r.gen.runtime.metrics.unknownObjectives.Inc()
	}
}

// priority is the request's band: below 0 it is sheddable.
func (r *Request) priority() int {
	if r.wait.objective == nil {
		return 0
	}
	return r.wait.objective.Priority
}

// goal is the request's own for its first token, or its objective's, 0 for none.
func (r *Request) goal() time.Duration {
	if ttft := r.identity.wishes().ttft; ttft > 0 || r.wait.objective == nil {
		return ttft
	}
	return r.wait.objective.TTFT()
}

// tellPriority writes metadata.
func (r *Request) tellPriority(v *Verdict) {
	if r.wait.objective != nil || r.set.flow.Enabled {
		v.number("priority", float64(r.priority()))
	}
}

// queues reports whether flow control is for this request: what an engine
// answers without working on a model is not.
func (r *Request) queues() bool { return r.set.flow.Enabled && r.model != "" }

// maxAdmissions bounds how often a request looks again that lost every slot it
// saw to another worker.
const maxAdmissions = 16

// admit sends a request to one of candidates, lets it wait for room, or answers.
// Without anybody waiting it takes no lock.
func (r *Request) admit(snap *pool.Snapshot, index []int32, now time.Time, v *Verdict) {
	switch {
	case r.queues():
	case r.priority() < 0 && r.model != "":
		a := newAdmission(&r.set.flow.Detector, snap, now)
		full := !a.view.Any(index)
		a.free()
		if full {
			r.drop(DropSaturated, "every endpoint of the model is full, and the request's priority is below 0", v)
			return
		}
		r.send(snap, r.pick(snap, index, now, nil), now, v)
		return
	default:
		r.send(snap, r.pick(snap, index, now, nil), now, v)
		return
	}
	ahead := r.pool.flow.Waiting() > 0 // somebody may be before it
	for range maxAdmissions {
		if !ahead && r.take(snap, index, now, v) {
			return
		}
		result, drain := r.enter(v)
		switch result {
		case flowcontrol.Queued:
			return
		case flowcontrol.Over:
			r.wait.drain = drain
			r.drop(DropSaturated, "too many requests of its priority wait", v)
			return
		case flowcontrol.Closing:
			r.shutDown(v)
			return
		}
		ahead = false
		snap = r.pool.holder.Load()
		if index = r.candidates(snap); len(index) == 0 {
			r.decide(now, v)
			return
		}
	}
	r.pool.counters.overfull.Inc()
	r.send(snap, r.pick(snap, index, now, nil), now, v)
}

// take sends the request to a candidate with room, and reports whether there
// was one.
func (r *Request) take(snap *pool.Snapshot, index []int32, now time.Time, v *Verdict) bool {
	a := newAdmission(&r.set.flow.Detector, snap, now)
	defer a.free()
	c := r.pick(snap, index, now, a)
	if c.Full {
		if index = a.withRoom(index); len(index) == 0 {
			return false
		}
		if c = r.pick(snap, index, now, a); c.Full {
			return false
		}
	}
	r.send(snap, c, now, v)
	return true
}

// redeem sends a request for which a slot of hold is held, and reports whether
// it could: the endpoint may have gone meanwhile, or be doubted. It may go elsewhere, if there
// is room beside what others hold.
func (r *Request) redeem(snap *pool.Snapshot, index []int32, hold *pool.Live, now time.Time, v *Verdict) bool {
	a := newAdmission(&r.set.flow.Detector, snap, now)
	defer a.free()
	a.hold = hold
	var held int32
	a.open, held = r.pool.flow.Open(snap, index, hold, a.open[:0])
	var c scorer.Choice
	if len(a.open) > 0 {
		c = r.pick(snap, a.open, now, a)
	}
	if len(a.open) == 0 || c.Full {
		if held < 0 {
			return false
		}
		a.open = append(a.open[:0], held)
		c = r.pick(snap, a.open, now, nil)
	}
	r.send(snap, c, now, v)
	return true
}

// enter puts the request in line, unless it may pass.
func (r *Request) enter(v *Verdict) (flowcontrol.Result, time.Duration) {
	ask := flowcontrol.Ask{
		Model: r.model, Subset: r.keepsTo(), Flow: r.identity.fairnessID(), Priority: r.priority(),
		Bytes: r.size, Cost: r.prompt, TTL: r.identity.wishes().ttl, TTFT: r.goal(),
	}
	if r.wait.objective != nil && r.wait.objective.TTL > 0 && (ask.TTL == 0 || r.wait.objective.TTL < ask.TTL) {
		ask.TTL = r.wait.objective.TTL
	}
	r.host.PrepareWait()
	r.decided = r.gen.runtime.now()
	r.wait.inBand = true
	r.word.Store(stateWaiting) // before Enter: the grant may come at once
	result, drain := r.pool.flow.Enter(&r.wait.waiter, r, &ask)
	if result != flowcontrol.Queued {
		r.wait.inBand = false
		r.word.Store(stateNew)
		return result, drain
	}
	v.Action = Wait
	return result, 0
}

// waitsForEndpoint puts a request in line whose model no endpoint serves now,
// and reports whether it did, or did something else about it.
func (r *Request) waitsForEndpoint(now time.Time, v *Verdict) bool {
	if !r.queues() || r.set.flow.EmptyPoolTTL == 0 && !r.wait.waiter.Again() {
		return false
	}
	result, drain := r.enter(v)
	switch result {
	case flowcontrol.Queued:
	case flowcontrol.Over:
		r.wait.drain = drain
		r.drop(DropSaturated, "too many requests of its priority wait", v)
	case flowcontrol.Closing:
		r.shutDown(v)
	case flowcontrol.Pass: // one came meanwhile
		snap := r.pool.holder.Load()
		index := r.candidates(snap)
		if len(index) == 0 {
			return false
		}
		r.admit(snap, index, now, v)
	default:
		return false
	}
	return true
}

// Wake is called by a queue, from any goroutine.
func (r *Request) Wake(o flowcontrol.Outcome, hold *pool.Live) {
	defer r.guard("wake", nil)
	r.wait.outcome, r.wait.granted = o, hold
	if r.word.CompareAndSwap(stateWaiting, stateGranted) {
		r.host.Post()
		return
	}
	if hold != nil { // it has ended: the slot goes on
		r.pool.flow.Return(hold)
	}
}

// woken answers a request whose wait for room ended otherwise than with room,
// and reports whether it did.
func (r *Request) woken(v *Verdict) bool {
	if !r.wait.inBand {
		if r.wait.outcome == flowcontrol.Drained {
			r.shutDown(v)
			return true
		}
		return false
	}
	r.wait.inBand = false
	r.pool.counters.waited(r.priority(), r.wait.outcome, r.waited)
	switch r.wait.outcome {
	case flowcontrol.Expired:
		r.wait.drain = r.pool.flow.DrainTime(r.priority())
		r.drop(DropTTLExpired, fmt.Sprintf("the request waited %s for room, which is its time to live", r.waited.Round(time.Millisecond)), v)
	case flowcontrol.ExpiredEmpty:
		r.drop(DropNoEndpoints, "the request waited "+r.waited.Round(time.Millisecond).String()+" and no endpoint of its model is ready", v)
	case flowcontrol.Displaced:
		r.wait.drain = r.pool.flow.DrainTime(r.priority())
		r.drop(DropSaturated, "a request of a higher priority took its place in the queue", v)
	case flowcontrol.Drained:
		r.shutDown(v)
	default:
		return false
	}
	return true
}

// shutDown answers a request that comes too late, or waited too long, for an
// Envoy that drains.
func (r *Request) shutDown(v *Verdict) {
	r.drop(DropShuttingDown, "this proxy is shutting down", v)
}

// resumeWith decides about a request for which a slot is held. The slot is given
// back once the request has another, or before it is decided about without one.
func (r *Request) resumeWith(hold *pool.Live, now time.Time, v *Verdict) {
	defer func() {
		if hold != nil {
			r.pool.flow.Return(hold)
		}
	}()
	inject(r.test, "redeem")
	snap := r.pool.holder.Load()
	index := r.candidates(snap)
	if len(index) > 0 && !r.gen.runtime.room.Draining() && r.redeem(snap, index, hold, now, v) {
		return
	}
	r.pool.flow.Return(hold)
	hold = nil
	r.decideOn(snap, now, v)
}

// giveUp gives on what a grant brought that nobody will use.
func (r *Request) giveUp() {
	if hold := r.wait.granted; hold != nil {
		r.wait.granted = nil
		r.pool.flow.Return(hold)
	}
}

// freed sends what waits where a request has ended.
func (r *Request) freed(live *pool.Live) { r.pool.flow.Released(live) }

// laneCandidates are a request's endpoints, for flow control.
func laneCandidates(snap *pool.Snapshot, model, subset string) []int32 {
	candidates := snap.All()
	if model != "" {
		candidates = snap.ForModel(model)
	}
	if candidates == nil {
		return nil
	}
	if subset != "" {
		return inSubset(snap, candidates.Index, subset)
	}
	return candidates.Index
}

func (r *Request) candidates(snap *pool.Snapshot) []int32 {
	return laneCandidates(snap, r.model, r.keepsTo())
}

// objectives are a configuration's, by name.
func objectives(cfg *config.Config) map[string]*config.Objective {
	m := make(map[string]*config.Objective, len(cfg.Objectives))
	for i := range cfg.Objectives {
		m[cfg.Objectives[i].Name] = &cfg.Objectives[i]
	}
	return m
}

// control applies a validated configuration to the pool's flow control.
func (p *Pool) control(cfg *config.Config) {
	flow, err := cfg.FlowControl.Compile()
	if err != nil {
		return
	}
	flow.Priorities = priorities(cfg)
	p.flow.Apply(flow)
}

// priorities are 0 and those that a configuration names.
func priorities(cfg *config.Config) []int {
	list := []int{0}
	for i := range cfg.Objectives {
		list = append(list, cfg.Objectives[i].Priority)
	}
	for i := range cfg.FlowControl.Bands {
		list = append(list, cfg.FlowControl.Bands[i].Priority)
	}
	slices.Sort(list)
	return slices.Compact(list)
}
