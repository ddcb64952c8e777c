package pool

import (
	"sync/atomic"
	"time"
)

const (
	// pushbackSpan is for how long a 429 or 503 lowers an endpoint's share.
	pushbackSpan = time.Second
	// doubtSpan is for how long an endpoint is doubted at most. The probe that a
	// fault asks for says sooner what became of it; should none come, it is tried
	// again.
	doubtSpan = 10 * time.Second
)

// Pushback records that the endpoint refused a request for want of room: 429 or
// 503. It is no fault.
func (l *Live) Pushback(now time.Time) {
	until := Stamp(now.Add(pushbackSpan))
	raise(&l.trouble, until) // as in Doubt
	raise(&l.pushedBack, until)
}

// PushedBack reports whether the endpoint pushed back a moment ago.
func (l *Live) PushedBack(now time.Time) bool {
	until := l.pushedBack.Load()
	return until != 0 && until > Stamp(now)
}

// Doubt records a fault at a time: the endpoint may be gone, and a slot that
// became free there is none.
func (l *Live) Doubt(at time.Time) {
	stamp := Stamp(at)
	raise(&l.trouble, stamp+int64(doubtSpan)) // first, or a pick would not look
	raise(&l.doubted, stamp)                  // a worker that comes late hides no newer fault
}

// Doubted reports whether the endpoint had a fault and has not answered since.
func (l *Live) Doubted(now time.Time) bool {
	at := l.doubted.Load()
	return at != 0 && Stamp(now)-at < int64(doubtSpan)
}

// Trust records that the endpoint answered somebody who asked it at a time, and
// reports whether it was doubted and is no more.
func (l *Live) Trust(asked time.Time) bool {
	at := l.doubted.Load()
	return at != 0 && at <= Stamp(asked) && l.doubted.CompareAndSwap(at, 0)
}

// raise sets a to stamp unless it is later already.
func raise(a *atomic.Int64, stamp int64) {
	for {
		old := a.Load()
		if old >= stamp || a.CompareAndSwap(old, stamp) {
			return
		}
	}
}
