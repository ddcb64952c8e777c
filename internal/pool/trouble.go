package pool

import "time"

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
	l.pushedBack.Store(until)
	l.troubled(until)
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
	l.doubted.Store(stamp)
	l.troubled(stamp + int64(doubtSpan))
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

// troubled keeps the quick answer of Snapshot.Troubled. It may say yes for too
// long, and never no too early.
func (l *Live) troubled(until int64) {
	for {
		old := l.trouble.Load()
		if old >= until || l.trouble.CompareAndSwap(old, until) {
			return
		}
	}
}
