package pool

import "time"

// began is when the process did, by both of its clocks.
var began = time.Now()

// Stamp is a time as a number, in nanoseconds: since 1970 by the clock as it was
// when the process began. It follows no later step of the wall clock, by which an
// endpoint would be silent for an hour, or have pushed back for one.
func Stamp(t time.Time) int64 { return began.UnixNano() + int64(t.Sub(began)) }
