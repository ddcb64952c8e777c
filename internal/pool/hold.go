package pool

// Hold takes a slot for a request that is about to be picked for, and is no
// pick: others see the endpoint that much fuller. The caller gives it back by
// Unhold.
func (l *Live) Hold() { l.inFlight.Add(1) }

// Unhold gives back what Hold took.
func (l *Live) Unhold() { l.inFlight.Add(-1) }
