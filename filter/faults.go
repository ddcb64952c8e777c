package filter

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// fault counts and logs what a guard caught.
func (rt *Runtime) fault(where string, cause any, stack []byte) {
	rt.metrics.internalErrors.WithLabelValues(where).Inc()
	if write, left := rt.faults.take(rt.now()); write {
		rt.log(slog.LevelError, fmt.Sprintf("internal error in %s: %v (%d more since the last such line)\n%s", where, cause, left, stack))
	}
}

// Where background work catches panics of its own.
const (
	whereScraping = "scraping"
	whereQuerying = "querying"
	whereWaiting  = "waiting"
)

// faultIn is fault at one place.
func (rt *Runtime) faultIn(where string) func(cause any, stack []byte) {
	return func(cause any, stack []byte) { rt.fault(where, cause, stack) }
}

// faultPause is how long after a panic what has to go on begins anew.
const faultPause = 2 * time.Second

// outlive runs f until it returns or, after a panic, ctx has ended; again is true
// after one.
func (rt *Runtime) outlive(ctx context.Context, where string, f func(again bool)) {
	pause := time.NewTimer(faultPause)
	defer pause.Stop()
	run := func(again bool) (ended bool) {
		defer rt.contain(where)
		f(again)
		return true
	}
	for again := false; !run(again); again = true {
		pause.Reset(faultPause)
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
	}
}

// contain is deferred by goroutines: a panic ends their work, not Envoy.
func (rt *Runtime) contain(where string) {
	if cause := recover(); cause != nil {
		rt.fault(where, cause, debug.Stack())
	}
}

// faultLog keeps a storm of faults from filling the log: one line a second, and
// how many were left out.
type faultLog struct {
	mu   sync.Mutex
	last time.Time // protected by mu
	left atomic.Uint64
}

// take reports whether a line may be written now, and how many were not.
func (f *faultLog) take(now time.Time) (bool, uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now.Sub(f.last) < time.Second {
		f.left.Add(1)
		return false, 0
	}
	f.last = now
	return true, f.left.Swap(0)
}
