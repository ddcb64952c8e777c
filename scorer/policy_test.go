package scorer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

var now = time.Unix(1000, 0)

const absent = -1 // in kv: no reading

// world makes a snapshot of len(inFlight) ready endpoints; kv may be nil.
func world(tb testing.TB, inFlight []int, kv []float64, age time.Duration) (*pool.Snapshot, []int32) {
	tb.Helper()
	var in pool.Input
	in.Now, in.StaleAfter = now, 5*time.Second
	for i, n := range inFlight {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 8000)
		e := pool.Endpoint{
			Target: pool.Target{Addr: addr, Model: "m"},
			Live:   &pool.Live{Addr: addr.String()}, Ready: true,
		}
		for range n {
			e.Live.Reserve(pool.Load{}, now)
		}
		if kv != nil {
			m := &pool.Metrics{Taken: now.Add(-age)}
			if kv[i] != absent {
				m.Set(pool.KVCacheUsagePerc, kv[i])
			}
			in.Metrics = append(in.Metrics, m)
		}
		in.Endpoints = append(in.Endpoints, e)
	}
	s := pool.NewSnapshot(in)
	return s, s.ForModel("m").Index
}

func TestPick(t *testing.T) {
	nan := math.NaN()
	for _, tc := range []struct {
		name     string
		policy   Policy
		inFlight []int
		kv       []float64
		age      time.Duration
		want     []int32 // any of them, and over many seeds all of them
		fallback bool
	}{
		{name: "random takes any", policy: Random, inFlight: []int{9, 0, 5}, want: []int32{0, 1, 2}},
		{name: "least-request takes the emptiest", policy: LeastRequest, inFlight: []int{3, 1, 2}, want: []int32{1}},
		{name: "least-request breaks ties at random", policy: LeastRequest, inFlight: []int{1, 3, 1, 1}, want: []int32{0, 2, 3}},
		{name: "least-request ignores metrics", policy: LeastRequest, inFlight: []int{0, 1}, kv: []float64{.9, .1}, want: []int32{0}},
		{name: "one endpoint", policy: LeastRequest, inFlight: []int{7}, want: []int32{0}},
		{name: "least-kv-cache takes the smallest", policy: LeastKVCache, inFlight: []int{0, 9, 0}, kv: []float64{.5, .1, .2}, want: []int32{1}},
		{name: "zero is a reading", policy: LeastKVCache, inFlight: []int{0, 0}, kv: []float64{.5, 0}, want: []int32{1}},
		{name: "absent is not zero", policy: LeastKVCache, inFlight: []int{0, 0}, kv: []float64{.5, absent}, want: []int32{0}},
		{name: "NaN is absent", policy: LeastKVCache, inFlight: []int{0, 0}, kv: []float64{.5, nan}, want: []int32{0}},
		{name: "kv ties at random", policy: LeastKVCache, inFlight: []int{0, 0, 0}, kv: []float64{.2, .5, .2}, want: []int32{0, 2}},
		{name: "at the staleness limit is fresh", policy: LeastKVCache, inFlight: []int{0, 0}, kv: []float64{.2, .1}, age: 5 * time.Second, want: []int32{1}},
		{name: "all stale is random and says so", policy: LeastKVCache, inFlight: []int{0, 0}, kv: []float64{.2, .1}, age: 6 * time.Second, want: []int32{0, 1}, fallback: true},
		{name: "none scraped is random and says so", policy: LeastKVCache, inFlight: []int{0, 0}, want: []int32{0, 1}, fallback: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, candidates := world(t, tc.inFlight, tc.kv, tc.age)
			seen := map[int32]bool{}
			for seed := range uint64(200) {
				c := tc.policy.Pick(s, candidates, now, seed)
				if c.Fallback != tc.fallback {
					t.Fatalf("fallback %v, want %v", c.Fallback, tc.fallback)
				}
				seen[c.Index] = true
			}
			want := map[int32]bool{}
			for _, i := range tc.want {
				want[i] = true
			}
			if fmt.Sprint(seen) != fmt.Sprint(want) {
				t.Fatalf("picked %v, want %v", seen, want)
			}
		})
	}
}

// TestPickAgainstDumb compares with an implementation that sorts nothing out:
// collect all scores, take the minimum, list who has it.
func TestPickAgainstDumb(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		n := 1 + rng.IntN(12)
		inFlight, kv := make([]int, n), make([]float64, n)
		for i := range n {
			inFlight[i] = rng.IntN(4)
			kv[i] = float64(rng.IntN(5)-1) / 4
			if kv[i] < 0 {
				kv[i] = absent
			}
		}
		s, candidates := world(t, inFlight, kv, 0)
		for _, p := range []Policy{LeastRequest, LeastKVCache} {
			best, winners := math.Inf(1), map[int32]bool{}
			for _, i := range candidates {
				score := float64(inFlight[i])
				if p == LeastKVCache {
					if score = kv[i]; score == absent {
						continue
					}
				}
				if score < best {
					best, winners = score, map[int32]bool{}
				}
				if score == best {
					winners[i] = true
				}
			}
			c := p.Pick(s, candidates, now, rng.Uint64())
			if c.Fallback != (len(winners) == 0) || (!c.Fallback && !winners[c.Index]) {
				t.Fatalf("%v over in-flight %v, kv %v picked %d (fallback %v), want one of %v", p, inFlight, kv, c.Index, c.Fallback, winners)
			}
		}
	}
}

// TestBurstSpreads sends equal requests from several goroutines, which release
// none: the counts of equal endpoints may differ by one.
func TestBurstSpreads(t *testing.T) {
	const workers, each, endpoints = 4, 1000, 8
	s, candidates := world(t, make([]int, endpoints), nil, 0)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				LeastRequest.PickAndReserve(s, candidates, now, uint64(w*each+i))
			}
		})
	}
	wg.Wait()
	lowest, highest, sum := int64(math.MaxInt64), int64(0), int64(0)
	for i := range s.Endpoints {
		n := s.Endpoints[i].Live.InFlight()
		lowest, highest, sum = min(lowest, n), max(highest, n), sum+n
	}
	if sum != workers*each || highest-lowest > 1 {
		t.Fatalf("in flight from %d to %d, %d in all; want %d within one", lowest, highest, sum, workers*each)
	}
}

func TestParse(t *testing.T) {
	for _, name := range Names() {
		p, err := Parse(name)
		if err != nil || p.String() != name {
			t.Errorf("Parse(%q) = %v, %v", name, p, err)
		}
	}
	if _, err := Parse("round-robin"); err == nil || !strings.Contains(err.Error(), `unknown policy "round-robin", valid: random, `) {
		t.Errorf("error %v does not list the valid names", err)
	}
}

func TestPickAllocatesNothing(t *testing.T) {
	s, candidates := world(t, make([]int, 100), make([]float64, 100), 0)
	for _, name := range Names() {
		p, _ := Parse(name)
		if n := testing.AllocsPerRun(100, func() { p.PickAndReserve(s, candidates, now, 7) }); n != 0 {
			t.Errorf("%s allocates %v times a pick", name, n)
		}
	}
}

func BenchmarkPick(b *testing.B) {
	for _, name := range Names() {
		for _, n := range []int{10, 100, 1000, 10000} {
			p, _ := Parse(name)
			s, candidates := world(b, make([]int, n), make([]float64, n), 0)
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for i := range uint64(b.N) {
					c := p.PickAndReserve(s, candidates, now, i)
					c.Reservation.Release(now, true)
				}
			})
		}
	}
}
