package pool

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
)

func TestQueriesHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for q := range NumQueries {
		if n := q.String(); n == "unknown" || seen[n] {
			t.Errorf("query %d is named %q", q, n)
		}
		seen[q.String()] = true
	}
	if NumQueries.String() != "unknown" {
		t.Error("a name for what is none")
	}
}

func queriedEndpoint(addr string, metricPort uint16, model, pod string) Endpoint {
	a := netip.MustParseAddrPort(addr)
	return Endpoint{Target: Target{Addr: a, MetricPort: metricPort, Model: model, Pod: pod}, Live: &Live{Addr: addr}}
}

// Whose series an endpoint reads for a model.
func TestQueriedReadings(t *testing.T) {
	now := time.Unix(1000, 0)
	q := NewQueried()
	for i := range NumQueries {
		q.Answered(i, now.Add(time.Minute))
	}
	add := func(query Query, name, model string, v float64) { q.Add(query, name, model, v) }
	add(P95TTFT5m, "10.0.0.1:9000", "base", 1)
	add(P95TTFT5m, "10.0.0.1:9000", "adapter", 2)
	add(P95TTFT5mPod, "10.0.0.1:9000", "", 3)
	add(P95TTFT5m, "[::ffff:10.0.0.2]:9000", "other-name", 4)
	add(P95TTFT5m, "10.0.0.3:9000", "undefined", 5)
	add(P95TTFT5m, "pod-4", "base", 6)
	add(P95TTFT5m, "10.0.0.5:8000", "base", 7) // its serving port, not its metrics page
	add(P95TTFT5m, "10.0.0.6:9000", "base", math.NaN())
	add(P95TTFT5m, "10.0.0.6:9000", "base", math.Inf(1))
	add(DrainRate1m, "10.0.0.7:9000", "x", 8) // x and y, and the label is neither
	add(DrainRate1m, "10.0.0.7:9000", "y", 9)
	add(DrainRate1m, "[fd00::8]:9000", "", 10)
	add(P95TTFT5m, "", "base", 11)
	h := NewHolder()
	h.SetQueried(q)
	h.Publish(NewSnapshot(Input{Now: now, Endpoints: []Endpoint{
		queriedEndpoint("10.0.0.1:8000", 9000, "base", ""),
		queriedEndpoint("10.0.0.2:8000", 9000, "base", ""),
		queriedEndpoint("10.0.0.3:8000", 9000, "base", ""),
		queriedEndpoint("10.0.0.4:8000", 9000, "base", "pod-4"),
		queriedEndpoint("10.0.0.5:8000", 9000, "base", ""),
		queriedEndpoint("10.0.0.6:8000", 9000, "base", ""),
		queriedEndpoint("10.0.0.7:8000", 9000, "base", ""),
		queriedEndpoint("[fd00::8]:8000", 9000, "base", ""),
	}}))
	s := h.Load()
	for _, c := range []struct {
		query Query
		model string
		want  []float64
	}{
		{P95TTFT5m, "base", []float64{1, 4, 5, 6, -1, -1, -1, -1}},
		{P95TTFT5m, "adapter", []float64{2, 4, 5, 6, -1, -1, -1, -1}},
		{P95TTFT5m, "adapter-without-series", []float64{1, 4, 5, 6, -1, -1, -1, -1}},
		{P95TTFT5m, "", []float64{1, 4, 5, 6, -1, -1, -1, -1}},
		{P95TTFT5mPod, "adapter", []float64{3, -1, -1, -1, -1, -1, -1, -1}},
		{DrainRate1m, "y", []float64{-1, -1, -1, -1, -1, -1, 9, 10}},
		{DrainRate1m, "base", []float64{-1, -1, -1, -1, -1, -1, -1, 10}},
		{AvgTPOT5mPod, "base", []float64{-1, -1, -1, -1, -1, -1, -1, -1}},
	} {
		for i, want := range c.want {
			v, ok := s.Queried(c.query, c.model, now).At(int32(i))
			if ok != (want >= 0) || ok && v != want {
				t.Errorf("%s of %q at %s: %v %v, want %v", c.query, c.model, s.Endpoints[i].Key, v, ok, want)
			}
		}
	}
	if _, ok := s.Queried(P95TTFT5m, "base", now.Add(time.Minute)).At(0); !ok {
		t.Error("stale too early")
	}
	if _, ok := s.Queried(P95TTFT5m, "base", now.Add(time.Minute+1)).At(0); ok {
		t.Error("a stale reading counts")
	}
}

func TestQueriedIsAbsentUntilSet(t *testing.T) {
	h, now := NewHolder(), time.Unix(1000, 0)
	one := func() *Snapshot {
		return NewSnapshot(Input{Now: now, Endpoints: []Endpoint{queriedEndpoint("10.0.0.1:8000", 9000, "m", "")}})
	}
	value := func() (float64, bool) { return h.Load().Queried(AvgE2ELatencyPod, "m", now).At(0) }
	h.Publish(one())
	if _, ok := value(); ok {
		t.Error("a reading before there was any")
	}
	q := NewQueried()
	q.Add(AvgE2ELatencyPod, "10.0.0.1:9000", "", 1)
	h.SetQueried(q)
	if _, ok := value(); ok {
		t.Error("a published snapshot changed")
	}
	h.Publish(one())
	if _, ok := value(); ok {
		t.Error("a reading of a query that was not answered")
	}
	q = NewQueried()
	q.Answered(AvgE2ELatencyPod, now)
	q.Add(AvgE2ELatencyPod, "10.0.0.1:9000", "", 1)
	h.SetQueried(q)
	h.Publish(one())
	if v, ok := value(); !ok || v != 1 {
		t.Error(v, ok)
	}
	h.SetQueried(nil)
	h.Publish(one())
	if _, ok := value(); ok {
		t.Error("a reading after they were taken away")
	}
}

// Keeping every query of an earlier answer changes no reading and no end.
func TestQueriedKeep(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	now := time.Unix(1000, 0)
	for range 200 {
		old := NewQueried()
		for q := range NumQueries {
			if rng.IntN(4) > 0 {
				old.Answered(q, now.Add(time.Duration(rng.IntN(3)-1)*time.Second))
			}
			for range rng.IntN(6) {
				old.Add(q, []string{"10.0.0.1:9000", "10.0.0.2:9000", "pod-3"}[rng.IntN(3)], []string{"", "a", "b"}[rng.IntN(3)], float64(rng.IntN(9)))
			}
		}
		kept := NewQueried()
		for q := range NumQueries {
			kept.Keep(q, old)
			kept.Keep(q, nil)
		}
		show := func(q *Queried) string {
			h := NewHolder()
			h.SetQueried(q)
			h.Publish(NewSnapshot(Input{Now: now, Endpoints: []Endpoint{
				queriedEndpoint("10.0.0.1:1", 9000, "a", ""), queriedEndpoint("10.0.0.2:1", 9000, "", ""), queriedEndpoint("10.0.0.3:1", 9000, "c", "pod-3"),
			}}))
			text := ""
			for query := range NumQueries {
				for _, model := range []string{"", "a", "b", "c"} {
					for i := range int32(3) {
						v, ok := h.Load().Queried(query, model, now).At(i)
						text += fmt.Sprintln(query, model, i, v, ok)
					}
				}
			}
			return text
		}
		if a, b := show(old), show(kept); a != b {
			t.Fatalf("before:\n%s\nkept:\n%s", a, b)
		}
	}
}

// A snapshot of other endpoints never reads the rows of the one before.
func TestQueriedRowsFollowTheEndpoints(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	now := time.Unix(1000, 0)
	q := NewQueried()
	q.Answered(P95TTFT5m, now)
	for i := range 6 {
		q.Add(P95TTFT5m, fmt.Sprintf("10.0.0.%d:9000", i), "a", float64(i))
		q.Add(P95TTFT5m, fmt.Sprintf("10.0.0.%d:9000", i), "b", float64(10+i))
	}
	h := NewHolder()
	h.SetQueried(q)
	for range 300 {
		var endpoints []Endpoint
		for i := range 6 {
			if rng.IntN(3) > 0 {
				endpoints = append(endpoints, queriedEndpoint(fmt.Sprintf("10.0.0.%d:8000", i), 9000+uint16(rng.IntN(8)/7), []string{"a", "b"}[rng.IntN(2)], ""))
			}
		}
		h.Publish(NewSnapshot(Input{Now: now, Endpoints: endpoints}))
		s := h.Load()
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			want := float64(e.Addr.Addr().As4()[3])
			if e.Model == "b" {
				want += 10
			}
			if v, ok := s.Queried(P95TTFT5m, "c", now).At(int32(i)); ok != (e.MetricPort == 9000) || ok && v != want {
				t.Fatalf("%s of %s: %v %v, want %v", e.Key, e.Model, v, ok, want)
			}
		}
	}
}

func TestQueriedReadingCostsNoMemory(t *testing.T) {
	now := time.Unix(1000, 0)
	q := NewQueried()
	q.Answered(P95TTFT5m, now)
	q.Add(P95TTFT5m, "10.0.0.1:9000", "a", 1)
	h := NewHolder()
	h.SetQueried(q)
	h.Publish(NewSnapshot(Input{Now: now, Endpoints: []Endpoint{queriedEndpoint("10.0.0.1:8000", 9000, "a", "")}}))
	s := h.Load()
	if n := testing.AllocsPerRun(100, func() {
		if _, ok := s.Queried(P95TTFT5m, "a", now).At(0); !ok {
			t.Error("no reading")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
