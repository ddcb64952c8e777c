package scorer

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// busyWorld has n endpoints that differ in everything, and a prompt of which
// they hold different shares.
func busyWorld(tb testing.TB, n, blocks int) *Input {
	tb.Helper()
	ws := &worldSpec{request: requestSpec{prompt: blocks*blockTokens + 10, output: 100, blocks: blocks, session: 7}}
	ws.guards = Guards{Wedged: true, Pushback: true, OverloadVeto: true, WarmUp: true, SlowStart: 10 * time.Second}
	for i := range n {
		e := endpointSpec{
			inFlight: 1 + i%7, prefill: 100 * (i % 11), tokens: 1000 * (i % 13), cost: float64(i%17) / 20,
			outputRate: float64(100 + i%5), readRate: float64(1000 * (1 + i%19)), holds: i % (blocks + 1),
			metrics: map[pool.Metric]float64{}, avgPrompt: float64(100 + i%9), avgOutput: float64(50 + i%8),
			loraMax: 4, running: []string{"x", "y"}, waiting: []string{"z"}, kvTokens: 100000,
		}
		for m := range pool.NumMetrics {
			e.metrics[m] = float64(i%10) / 12
		}
		ws.endpoints = append(ws.endpoints, e)
	}
	return ws.build(tb)
}

// everyPolicy are all names, and sums of several.
func everyPolicy() []string {
	return append(Names(), "queue:2,kv-cache:2,prefix-cache:3", "prefix-cache:2,least-request:1")
}

func TestPickAllocatesNothing(t *testing.T) {
	in := busyWorld(t, 100, 20)
	for _, name := range everyPolicy() {
		p := must(t, name)
		run := func() {
			in.Seed++
			c := p.PickAndReserve(in)
			c.Reservation.Release(now, true)
		}
		run() // its memory grows
		if n := testing.AllocsPerRun(100, run); n != 0 && !raceEnabled {
			t.Errorf("%s allocates %v times a pick", name, n)
		}
	}
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) != nil {
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// BenchmarkPick is one pick and its release. Policies on prefixes look 20 blocks
// up, and add them to the winner's. cpu-ns/op says what it costs where other
// processes have the machine, too.
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{10, 100, 1000, 10000} {
		in := busyWorld(b, n, 20)
		for _, name := range everyPolicy() {
			p := must(b, name)
			for _, workers := range []int{1, 2} {
				b.Run(fmt.Sprintf("%s/%d/%d", name, n, workers), func(b *testing.B) {
					b.ReportAllocs()
					start := cpuTime()
					var wg sync.WaitGroup
					for w := range workers {
						wg.Go(func() {
							in := *in
							for i := range b.N / workers {
								in.Seed = uint64(w)<<40 + uint64(i)
								c := p.PickAndReserve(&in)
								c.Reservation.Release(now, true)
							}
						})
					}
					wg.Wait()
					b.ReportMetric(float64(cpuTime()-start)/float64(b.N), "cpu-ns/op")
				})
			}
		}
	}
}
