package dynmod

import (
	"runtime"
	"time"

	"github.com/shuntproxy/shunt/filter"
)

// Once a thread has only had callbacks for 10 ms, the Go scheduler's monitor
// takes its P back every 20 µs, and every callback pays to get one again. A
// Gosched in between tells the monitor that the thread is alive. Ungated, it
// costs more than it saves at low rates: a request alone takes four callbacks
// (ADR 0022).
const (
	yieldEvery = 8 * time.Millisecond
	yieldCalls = 16
)

// yielder is one worker's.
type yielder struct {
	calls int
	since time.Time
}

func (y *yielder) maybe(rt *filter.Runtime) {
	y.calls++
	if y.calls < yieldCalls {
		return
	}
	now := time.Now()
	if now.Sub(y.since) < yieldEvery {
		return
	}
	y.calls, y.since = 0, now
	if rt.Yield() {
		runtime.Gosched()
	}
}
