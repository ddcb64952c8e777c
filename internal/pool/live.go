package pool

import (
	"sync/atomic"
	"time"
)

// Live is what this process itself knows of the load on one incarnation of an
// endpoint. It outlives snapshots, config generations and metric gaps; the
// counters are changed by any worker, one atomic operation each. A Live is on
// cache lines of its own, so that two hot endpoints do not slow each other.
type Live struct {
	_        [64]byte
	inFlight atomic.Int64
	picks    atomic.Uint64
	_        [48]byte

	// Addr is the endpoint's ip:port, for whoever holds only the Live.
	Addr string
}

// InFlight is the number of requests reserved and not yet released.
func (l *Live) InFlight() int64 { return l.inFlight.Load() }

// Picks is the number of reservations ever made.
func (l *Live) Picks() uint64 { return l.picks.Load() }

// TryReserve takes one slot if the in-flight count still is what the pick saw,
// and reports whether it did. Of two workers that saw the same least loaded
// endpoint, one has to look again, so a burst does not pile up on it.
func (l *Live) TryReserve(seen int64) bool {
	if !l.inFlight.CompareAndSwap(seen, seen+1) {
		return false
	}
	l.picks.Add(1)
	return true
}

// Reserve takes one slot whatever the count is.
func (l *Live) Reserve() {
	l.inFlight.Add(1)
	l.picks.Add(1)
}

// Release gives one slot back. The caller releases each reservation exactly
// once.
func (l *Live) Release() { l.inFlight.Add(-1) }

// FaultKind is a way in which an endpoint failed a request.
type FaultKind uint8

// The faults that count against an endpoint.
const (
	// FaultReset is a reset before response headers that neither the client
	// nor a timeout caused.
	FaultReset FaultKind = iota
	// FaultConnect is a request that could not connect.
	FaultConnect
)

// Fault is one failure of an endpoint, seen by the request path.
type Fault struct {
	Live *Live
	Kind FaultKind
	At   time.Time
}
