package filter

import (
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
)

// eviction is what a sheddable request in flight needs to be ended for one of a
// higher priority.
type eviction struct {
	asked  atomic.Bool         // to end, by flow control
	flight *flowcontrol.Flight // of the worker; nil where it may not be asked
}

// fly tells flow control of a request that was sent, if it may be ended.
func (r *Request) fly() {
	if injecting {
		r.injectEvict()
	}
	if r.priority() < 0 && r.queues() && r.pool.flow.Evicting() && r.host.Evictable(r.streams) {
		r.eviction.flight = r.pool.flow.Fly(r, r.priority(), r.held.Live())
	}
}

// Evict implements flowcontrol.Victim.
func (r *Request) Evict() {
	defer r.guard("evict", nil)
	r.eviction.asked.Store(true)
	r.host.PostEvict()
}

// Evicting reports whether Evicted has something to do. It may be called from
// any goroutine.
func (r *Request) Evicting() bool { return r.eviction.asked.Load() }

// Evicted ends a request in flight that flow control has asked to end; of
// another, and of one whose response is complete, the verdict's action is not
// Reply. Where end says that the response has begun, a door resets the stream in
// place of the reply. The request is released, and what comes of it is of no
// interest any more.
func (r *Request) Evicted(end End, v *Verdict) {
	v.Reset()
	defer r.guard("evicted", v)
	if !r.Evicting() || end.Complete {
		return
	}
	inject(r.test, "evicted")
	if !r.word.CompareAndSwap(stateRouted, stateDone) {
		return
	}
	how := flowcontrol.EvictedReply
	if end.Answered {
		how = flowcontrol.EvictedReset
	}
	r.leave(end, r.gen.runtime.now(), false, how, v)
	r.drop(DropEvicted, "a request of a higher priority took its place", v)
}

// leave ends a routed request: what its response said is told, its place goes to
// what waits. completed is whether the endpoint answered.
func (r *Request) leave(end End, now time.Time, completed bool, how flowcontrol.Landing, v *Verdict) {
	r.settle(end, now, v)
	r.giveBack(now, completed, how)
	if end.FirstByte > 0 {
		r.pool.counters.firstByte.Observe(end.FirstByte.Seconds())
		if !v.has("ttft_ms") {
			v.number("ttft_ms", float64(end.FirstByte)/float64(time.Millisecond))
		}
	}
}

// giveBack releases a routed request.
func (r *Request) giveBack(now time.Time, completed bool, how flowcontrol.Landing) {
	live := r.held.Live()
	r.held.Release(now, completed)
	r.gen.runtime.flights.add(-1)
	if f := r.eviction.flight; f != nil {
		r.eviction.flight = nil
		r.pool.flow.Land(f, how)
	}
	if live != nil {
		r.freed(live)
	}
}
