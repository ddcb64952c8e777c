package flowcontrol

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// still is a request that does nothing when it is woken but give its slot back,
// and say so.
type still struct {
	Waiter
	woken func(*still)
}

func (r *still) Wake(_ Outcome, hold *pool.Live) {
	if hold != nil {
		hold.Unhold()
	}
	if r.woken != nil {
		r.woken(r)
	}
}

func benchWorld(endpoints int, saturation Saturation) *world {
	config := defaultConfig()
	config.Detector.Saturation = saturation
	config.TTL = time.Hour
	w := newWorld(config)
	var names []string
	for i := range endpoints {
		name := fmt.Sprintf("e%d", i)
		names = append(names, name)
		w.models[name] = []string{"m"}
		m := &pool.Metrics{Taken: w.clock}
		m.Set(pool.NumRequestsWaiting, 1)
		m.Set(pool.KVCacheUsagePerc, 0.5)
		w.metrics[name] = m
	}
	w.setEndpoints(names)
	return w
}

// BenchmarkAdmit is all that flow control adds to a request with room: whether
// anybody waits, and whether the endpoint that was picked is full.
func BenchmarkAdmit(b *testing.B) {
	for _, saturation := range []Saturation{Utilization, Concurrency} {
		b.Run([]string{"utilization", "concurrency"}[saturation], func(b *testing.B) {
			w := benchWorld(100, saturation)
			now := w.clock
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for i := int32(0); pb.Next(); i = (i + 1) % 100 {
					if w.ctl.Waiting() > 0 {
						b.Error("somebody waits")
					}
					if view := w.config.Detector.View(w.snap, now); !view.Open(i, 1) {
						b.Error("it is full")
					}
				}
			})
		})
	}
}

// BenchmarkQueue is a request's way through a queue of 10,000 in 1,000 flows.
func BenchmarkQueue(b *testing.B) {
	for _, fairness := range []Fairness{RoundRobin, Weighted, GlobalFCFS} {
		b.Run([]string{"round-robin", "weighted", "global-fcfs"}[fairness], func(b *testing.B) {
			w := benchWorld(1, Concurrency)
			w.config.Fairness = fairness
			w.ctl.Apply(w.config)
			live := w.live["e0"]
			slot := live.Reserve(pool.Load{}, w.clock)
			requests := make([]still, 10_000)
			asks := make([]Ask, len(requests))
			var gone *still
			for i := range requests {
				requests[i].woken = func(r *still) { gone = r }
				asks[i] = Ask{Model: "m", Flow: fmt.Sprintf("flow-%d", i%1000), Bytes: 1, Cost: int64(i % 2000)}
				if got, _ := w.ctl.Enter(&requests[i].Waiter, &requests[i], &asks[i]); got != Queued {
					b.Fatal(got)
				}
			}
			index := make(map[*still]*Ask, len(requests))
			for i := range requests {
				index[&requests[i]] = &asks[i]
			}
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				slot.Release(w.clock, true)
				w.ctl.Released(live)
				slot = live.Reserve(pool.Load{}, w.clock)
				gone.Waiter = Waiter{} // it comes again, as another
				w.ctl.Enter(&gone.Waiter, gone, index[gone])
			}
		})
	}
}

// BenchmarkWaiters is what 100,000 waiting requests take, and what a garbage
// collection costs with them.
func BenchmarkWaiters(b *testing.B) {
	const n = 100_000
	for range b.N {
		w := benchWorld(1, Concurrency)
		_ = w.live["e0"].Reserve(pool.Load{}, w.clock)
		flows := make([]string, 1000)
		for i := range flows {
			flows[i] = fmt.Sprintf("flow-%d", i)
		}
		requests := make([]*still, n)
		var before, after, stats runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for i := range requests {
			requests[i] = new(still)
			w.ctl.Enter(&requests[i].Waiter, requests[i], &Ask{Model: "m", Flow: flows[i%1000], Bytes: 1})
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		start := time.Now()
		runtime.GC()
		took := time.Since(start)
		runtime.ReadMemStats(&stats)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B/waiter")
		b.ReportMetric(float64(stats.PauseNs[(stats.NumGC+255)%256])/1e3, "µs-pause")
		b.ReportMetric(float64(took.Microseconds())/1e3, "ms-gc")
		if w.ctl.Waiting() != n {
			b.Fatal(w.ctl.Waiting())
		}
		runtime.KeepAlive(requests)
	}
}

// BenchmarkExpiry is how late the last of 100 requests is answered that expire
// at the same time while 100,000 others wait.
func BenchmarkExpiry(b *testing.B) {
	const n, due = 100_000, 100
	worst := time.Duration(0)
	for range b.N {
		snap := benchWorld(1, Concurrency)
		_ = snap.live["e0"].Reserve(pool.Load{}, snap.clock)
		room := NewRoom(0, 1<<40, time.Now)
		ctl := room.NewController(Options{Snapshot: func() *pool.Snapshot { return snap.snap }, Candidates: candidates})
		ctl.Apply(snap.config)
		room.Start(nil)
		others := make([]still, n)
		for i := range others {
			ctl.Enter(&others[i].Waiter, &others[i], &Ask{Model: "m", Flow: fmt.Sprint(i % 1000)})
		}
		late := make(chan time.Duration, due)
		deadline := time.Now().Add(200 * time.Millisecond)
		for range due {
			r := &timedOut{deadline: deadline, late: late}
			ctl.Enter(&r.Waiter, r, &Ask{Model: "m", Flow: "x", TTL: time.Until(deadline)})
		}
		for range due {
			worst = max(worst, <-late)
		}
		room.Stop()
	}
	b.ReportMetric(float64(worst.Microseconds())/1e3, "ms-late")
}

type timedOut struct {
	Waiter
	deadline time.Time
	late     chan time.Duration
}

func (r *timedOut) Wake(Outcome, *pool.Live) { r.late <- time.Since(r.deadline) }
