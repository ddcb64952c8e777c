package filter

import (
	"strconv"
	"sync/atomic"
)

// unsizedHold is what a body of unknown length may hold at first.
const unsizedHold = 64 << 10

// heldBodies counts the bodies that Envoy holds in this process because shunt
// has not decided about their requests yet. Any worker uses it.
type heldBodies struct {
	bytes, limit atomic.Int64
}

// take asks for room for n more bytes.
func (h *heldBodies) take(n int64) bool {
	if h.bytes.Add(n) <= h.limit.Load() {
		return true
	}
	h.bytes.Add(-n)
	return false
}

// takeBody asks for room for the body that the headers announce, or for the
// beginning of one of unknown length, and answers where there is none.
func (r *Request) takeBody(h *Head, limit int64, v *Verdict) {
	v.Action, v.BodyLimit = NeedBody, limit
	if h.Whole {
		return // it is here, and decided about before anything else happens
	}
	n := h.ContentLength
	if n < 0 {
		n = min(unsizedHold, limit)
	}
	r.takeRoom(n, v)
}

// More asks for room for a body that has grown to size bytes, over
// Verdict.BodyRoom. It is called on the request's worker, before Body.
func (r *Request) More(size int64, v *Verdict) {
	v.Reset()
	defer r.guard("more", v)
	inject(r.test, "more")
	limit := int64(r.set.cfg.Limits.RequestBody)
	v.Action, v.BodyLimit = NeedBody, limit
	r.takeRoom(min(max(size, 2*r.bodyRoom), limit)-r.bodyRoom, v)
}

func (r *Request) takeRoom(n int64, v *Verdict) {
	if held := &r.gen.runtime.bodies; !held.take(n) {
		r.drop(DropSaturated, "the bodies of requests in this process fill limits.heldBodies, "+
			strconv.FormatInt(held.limit.Load(), 10)+" bytes", v)
		return
	}
	r.bodyRoom += n
	v.BodyRoom = r.bodyRoom
}

// releaseRoom gives back the room of a body that Envoy need not hold any longer, or
// the part of it that was not needed.
func (r *Request) releaseRoom(v *Verdict) {
	if r.bodyRoom == 0 {
		return
	}
	keep := int64(0)
	if v != nil && v.Action == Wait {
		keep = min(r.size, r.bodyRoom)
	}
	r.gen.runtime.bodies.bytes.Add(keep - r.bodyRoom)
	r.bodyRoom = keep
}
