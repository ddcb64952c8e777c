package pool

import "time"

// Hold takes a slot for a request that is about to be picked for, and is no
// pick: others see the endpoint that much fuller. The caller gives it back by
// Unhold.
func (l *Live) Hold(now time.Time) {
	if l.inFlight.Add(1) == 1 { // as a reservation that finds it idle does
		l.sign.Store(Stamp(now))
		l.windowStart.Store(Stamp(now))
	}
}

// Unhold gives back what Hold took.
func (l *Live) Unhold() { l.inFlight.Add(-1) }
