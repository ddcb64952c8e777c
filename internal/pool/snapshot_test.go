package pool

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// ep makes an endpoint 10.0.0.n:8000 that is ready and serves models, the
// first by its label.
func ep(n int, models ...string) Endpoint {
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 8000)
	e := Endpoint{Target: Target{Addr: addr}, Live: &Live{Addr: addr.String()}, Judged: true, Ready: true}
	if len(models) > 0 {
		e.Model, e.Models = models[0], models[1:]
	} else {
		e.AnyModel = true
	}
	return e
}

func notReady(e Endpoint) Endpoint { e.Ready = false; return e }
func prefill(e Endpoint) Endpoint  { e.PrefillOnly = true; return e }
func aside(e Endpoint, since time.Duration) Endpoint {
	e.SetAsideSince, e.SetAsideUntil = start.Add(-since), start.Add(time.Second)
	return e
}

func snap(eps ...Endpoint) *Snapshot {
	return NewSnapshot(Input{Now: start, Complete: true, Fresh: true, Endpoints: eps})
}

// keys names the candidates' last address bytes.
func keys(s *Snapshot, c *Candidates) string {
	if c == nil {
		return "none"
	}
	out := ""
	for _, i := range c.Index {
		out += fmt.Sprint(s.Endpoints[i].Addr.Addr().As4()[3], " ")
	}
	return out
}

func TestCandidates(t *testing.T) {
	s := snap(ep(3, "a"), ep(1, "a", "b"), notReady(ep(2, "a", "c")), prefill(ep(4, "a")), ep(5, "b", "b"))
	for model, want := range map[string]string{"a": "1 3 ", "b": "1 5 ", "c": "", "d": "none"} {
		if got := keys(s, s.ForModel(model)); got != want {
			t.Errorf("%s: %q, want %q", model, got, want)
		}
	}
	if got := keys(s, s.All()); got != "1 3 5 " {
		t.Errorf("all: %q", got)
	}
	if s.ForModel("a").Model != "a" || s.Endpoints[0].Key != "10.0.0.1:8000" {
		t.Error("names are missing")
	}
	if got := s.ModelNames(); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("names %v", got)
	}
}

func TestWildcard(t *testing.T) {
	s := snap(ep(1, "a"), ep(2), notReady(ep(3)), ep(4, "b"), notReady(ep(5, "c")))
	for model, want := range map[string]string{"a": "1 2 ", "b": "2 4 ", "c": "2 ", "d": "2 "} {
		if got := keys(s, s.ForModel(model)); got != want {
			t.Errorf("%s: %q, want %q", model, got, want)
		}
	}
	if s := snap(notReady(ep(1))); s.ForModel("a") != nil {
		t.Error("a wildcard that is not ready serves")
	}
}

func TestKnown(t *testing.T) {
	s := NewSnapshot(Input{Now: start, Known: []string{"k"}, Endpoints: []Endpoint{notReady(ep(1, "a")), prefill(ep(2, "p"))}})
	for model, want := range map[string]bool{"k": true, "a": true, "p": true, "x": false} {
		if s.Known(model) != want {
			t.Errorf("%s: known is %v", model, !want)
		}
	}
	if s.ForModel("k") != nil || s.ForModel("a") == nil {
		t.Error("known and served are mixed up")
	}
}

func TestAtMostHalfIsSetAside(t *testing.T) {
	for _, c := range []struct {
		eps    []Endpoint
		want   string
		passed string
	}{
		{[]Endpoint{aside(ep(1, "a"), 1)}, "1 ", ""},
		{[]Endpoint{aside(ep(1, "a"), 1), ep(2, "a")}, "2 ", "1 "},
		{[]Endpoint{aside(ep(1, "a"), 1), aside(ep(2, "a"), 2)}, "1 ", "2 "}, // the longest first
		{[]Endpoint{aside(ep(1, "a"), 3), aside(ep(2, "a"), 2), aside(ep(3, "a"), 1)}, "2 3 ", "1 "},
		{[]Endpoint{aside(ep(1, "a"), 1), aside(ep(2, "a"), 1), ep(3, "a"), ep(4, "a")}, "3 4 ", "1 2 "},
		// Those that are not ready count for nothing.
		{[]Endpoint{aside(ep(1, "a"), 1), notReady(ep(2, "a")), notReady(ep(3, "a"))}, "1 ", ""},
		{[]Endpoint{aside(notReady(ep(1, "a")), 1), aside(ep(2, "a"), 1), ep(3, "a")}, "3 ", "1 2 "},
	} {
		s := snap(c.eps...)
		if got := keys(s, s.ForModel("a")); got != c.want {
			t.Errorf("%d endpoints: candidates %q, want %q", len(c.eps), got, c.want)
		}
		passed := ""
		for i, e := range s.Endpoints {
			if e.Passed {
				passed += fmt.Sprint(i+1, " ")
			}
		}
		if passed != c.passed {
			t.Errorf("%d endpoints: passed %q, want %q", len(c.eps), passed, c.passed)
		}
	}
	// One that a request for any other model may get is not passed over.
	wild := snap(aside(ep(1), 2), aside(ep(2, "a"), 1), ep(3, "a"))
	if keys(wild, wild.ForModel("x")) != "1 " || wild.Endpoints[0].Passed {
		t.Errorf("x: %q, passed %v", keys(wild, wild.ForModel("x")), wild.Endpoints[0].Passed)
	}
	over := ep(1, "a")
	over.SetAsideSince, over.SetAsideUntil = start.Add(-time.Minute), start
	if s := snap(over, ep(2, "a")); keys(s, s.ForModel("a")) != "1 2 " {
		t.Error("a setting-aside that ended still counts")
	}
	// The half is of each model, so one of these still serves b.
	s := snap(aside(ep(1, "a", "b"), 1), ep(2, "a"))
	if keys(s, s.ForModel("a")) != "2 " || keys(s, s.ForModel("b")) != "1 " || s.Endpoints[0].Passed {
		t.Errorf("a: %q, b: %q", keys(s, s.ForModel("a")), keys(s, s.ForModel("b")))
	}
}

func TestJudgedAndComplete(t *testing.T) {
	unjudged := ep(1, "a")
	unjudged.Judged = false
	for _, c := range []struct {
		in   Input
		want bool
	}{
		{Input{}, false},
		{Input{Complete: true}, true},
		{Input{Complete: true, Endpoints: []Endpoint{ep(2, "a")}}, true},
		{Input{Complete: true, Endpoints: []Endpoint{ep(2, "a"), unjudged}}, false},
		{Input{Endpoints: []Endpoint{ep(2, "a")}}, false},
	} {
		if got := NewSnapshot(c.in).Judged; got != c.want {
			t.Errorf("%+v: judged %v", c.in, got)
		}
	}
}

func TestReadings(t *testing.T) {
	var m Metrics
	if !m.Empty() {
		t.Error("zero is not empty")
	}
	m.Set(KVCacheUsagePerc, math.NaN())
	if !m.Empty() {
		t.Error("NaN is a reading")
	}
	m.Set(NumRequestsWaiting, 0)
	m.Taken = start
	s := NewSnapshot(Input{
		Now: start.Add(time.Second), StaleAfter: 5 * time.Second,
		Endpoints: []Endpoint{ep(2, "a"), ep(1, "a")}, Metrics: []*Metrics{&m, nil},
	})
	if s.Metrics(0) != nil || s.Metrics(1) != &m {
		t.Error("the readings are not sorted with their endpoints")
	}
	for _, c := range []struct {
		metric   Metric
		endpoint int32
		age      time.Duration
		ok       bool
	}{
		{NumRequestsWaiting, 1, 0, true},                  // zero is a reading
		{NumRequestsWaiting, 1, 5 * time.Second, true},    // still fresh
		{NumRequestsWaiting, 1, 5*time.Second + 1, false}, // stale
		{NumRequestsRunning, 1, 0, false},                 // absent from the page
		{KVCacheUsagePerc, 1, 0, false},                   // NaN
		{NumRequestsWaiting, 0, 0, false},                 // before the first scrape
	} {
		v, ok := s.Readings(c.metric, start.Add(c.age)).At(c.endpoint)
		if ok != c.ok || ok && v != 0 {
			t.Errorf("%+v: got %v, %v", c, v, ok)
		}
	}
}

func TestByKey(t *testing.T) {
	s := snap(ep(2, "a"), ep(1, "b"))
	if e := s.ByKey("10.0.0.2:8000"); e == nil || e.Model != "a" {
		t.Errorf("got %+v", e)
	}
	if s.ByKey("10.0.0.3:8000") != nil {
		t.Error("found what is not there")
	}
}

func TestUncertain(t *testing.T) {
	unasked := ep(1)
	unasked.AnyModel = false
	listed := ep(1)
	listed.AnyModel, listed.Models = false, []string{"b"}
	for _, c := range []struct {
		name string
		e    Endpoint
		want bool
	}{
		{"label", ep(1, "a"), false}, {"not ready, label", notReady(ep(1, "a")), false},
		{"not asked yet", unasked, true}, {"lists some", listed, false},
		{"any model", ep(1), false}, {"any model, not ready", notReady(ep(1)), true},
	} {
		if got := snap(ep(2, "x"), c.e).Uncertain; got != c.want {
			t.Errorf("%s: uncertain is %v", c.name, got)
		}
	}
}

// TestSnapshotAgainstDefinition compares the index with the definition of a
// candidate, on random pools.
func TestSnapshotAgainstDefinition(t *testing.T) {
	models := []string{"a", "b", "c"}
	for seed := range uint64(500) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var eps []Endpoint
		for n := range rng.IntN(12) {
			e := ep(n)
			if rng.IntN(5) > 0 {
				e = ep(n, models[rng.IntN(3)], models[rng.IntN(3)])
			}
			e.Ready, e.PrefillOnly = rng.IntN(4) > 0, rng.IntN(6) == 0
			if rng.IntN(3) == 0 {
				e = aside(e, time.Duration(rng.IntN(1000)+n*1000))
			}
			eps = append(eps, e)
		}
		rng.Shuffle(len(eps), func(i, j int) { eps[i], eps[j] = eps[j], eps[i] })
		s := snap(slices.Clone(eps)...)
		for _, m := range models {
			serves := func(e *Endpoint) bool { return e.AnyModel || e.Model == m || slices.Contains(e.Models, m) }
			check(t, seed, s, s.ForModel(m), serves, slices.ContainsFunc(eps, func(e Endpoint) bool { return !e.AnyModel && serves(&e) }))
		}
		check(t, seed, s, s.All(), func(*Endpoint) bool { return true }, true)
	}
}

func check(t *testing.T, seed uint64, s *Snapshot, c *Candidates, serves func(*Endpoint) bool, listed bool) {
	t.Helper()
	var ready, asideNow []int32
	for i := range s.Endpoints {
		if e := &s.Endpoints[i]; serves(e) && e.Ready && !e.PrefillOnly {
			ready = append(ready, int32(i))
			if start.Before(e.SetAsideUntil) {
				asideNow = append(asideNow, int32(i))
			}
		}
	}
	for len(asideNow) > len(ready)/2 { // the latest comes back
		latest := slices.MaxFunc(asideNow, func(a, b int32) int {
			return s.Endpoints[a].SetAsideSince.Compare(s.Endpoints[b].SetAsideSince)
		})
		asideNow = slices.DeleteFunc(asideNow, func(i int32) bool { return i == latest })
	}
	want := slices.DeleteFunc(ready, func(i int32) bool { return slices.Contains(asideNow, i) })
	switch {
	case c == nil:
		if listed || len(want) > 0 {
			t.Fatalf("seed %d: no candidates, want %v", seed, want)
		}
	case !slices.Equal(c.Index, want):
		t.Fatalf("seed %d: candidates %v, want %v", seed, c.Index, want)
	}
}

func BenchmarkNewSnapshot(b *testing.B) {
	for _, n := range []int{100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			eps := make([]Endpoint, n)
			for i := range eps {
				eps[i] = ep(i, "model-"+fmt.Sprint(i%4))
			}
			b.ReportAllocs()
			for b.Loop() {
				NewSnapshot(Input{Now: start, Complete: true, Endpoints: slices.Clone(eps)})
			}
		})
	}
}

// BenchmarkWithReadings is a snapshot in which 20 readings are new.
func BenchmarkWithReadings(b *testing.B) {
	for _, n := range []int{100, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			eps := make([]Endpoint, n)
			read := &Metrics{Taken: start}
			for m := range NumMetrics {
				read.Set(m, 1)
			}
			for i := range eps {
				eps[i] = ep(i, "model-"+fmt.Sprint(i%4))
			}
			h := NewHolder()
			s := NewSnapshot(Input{Now: start, Complete: true, Endpoints: eps, Metrics: slices.Repeat([]*Metrics{read}, n)})
			var changes []Change
			for i := range 20 {
				changes = append(changes, Change{int32(i * n / 20), read})
			}
			b.ReportAllocs()
			for b.Loop() {
				s = s.WithReadings(start, s.Seq+1, changes)
				h.Publish(s)
			}
		})
	}
}

// TestWithReadings compares with a snapshot made from nothing, on random changes.
func TestWithReadings(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var eps []Endpoint
		for n := range 1 + rng.IntN(8) {
			eps = append(eps, ep(n, "a", "b"))
		}
		random := func(at time.Duration) *Metrics {
			m := &Metrics{Taken: start.Add(at)}
			for name := range NumMetrics {
				switch rng.IntN(4) {
				case 0:
					m.Set(name, float64(rng.IntN(3)))
				case 1:
					m.Set(name, math.NaN())
				}
			}
			if rng.IntN(6) == 0 {
				m.Models = []ModelMetrics{{Model: "b"}}
				m.Models[0].Set(KVCacheUsagePerc, 9)
			}
			return m
		}
		read := make([]*Metrics, len(eps))
		s := NewSnapshot(Input{Now: start, StaleAfter: 5 * time.Second, Endpoints: slices.Clone(eps)})
		for round := range 6 {
			now := start.Add(time.Duration(round+1) * time.Second)
			var changes []Change
			for range rng.IntN(4) {
				c := Change{int32(rng.IntN(len(eps))), random(time.Duration(rng.IntN(8)) * time.Second)}
				changes = append(changes, c)
				read[c.Index] = c.Metrics
			}
			before := *s
			s = s.WithReadings(now, uint64(round), changes)
			want := NewSnapshot(Input{Now: now, Seq: uint64(round), StaleAfter: 5 * time.Second, Endpoints: slices.Clone(eps), Metrics: slices.Clone(read)})
			if s.Seq != want.Seq || s.Built != want.Built || before.Endpoints[0].Live != s.Endpoints[0].Live {
				t.Fatalf("seed %d: %+v", seed, s)
			}
			for _, age := range []time.Duration{0, 3 * time.Second, 20 * time.Second} {
				for m := range NumMetrics {
					for i := range eps {
						for _, model := range []string{"a", "b"} {
							g, w := s.ReadingsFor(model, m, now.Add(age)), want.ReadingsFor(model, m, now.Add(age))
							gv, gok := g.At(int32(i))
							wv, wok := w.At(int32(i))
							if gok != wok || gok && gv != wv || g.Known(int32(i)) != w.Known(int32(i)) || gok != (g.Known(int32(i)) == Fresh) {
								t.Fatalf("seed %d, round %d, %v of %d for %s: %v %v, want %v %v", seed, round, m, i, model, gv, g.Known(int32(i)), wv, w.Known(int32(i)))
							}
						}
					}
				}
			}
		}
	}
}

// TestFourThings: absent, not a number, stale and zero are four things.
func TestFourThings(t *testing.T) {
	m := &Metrics{Taken: start}
	m.Set(NumRequestsRunning, 0)
	m.Set(KVCacheUsagePerc, math.NaN())
	m.Models = []ModelMetrics{{Model: "lora"}}
	m.Models[0].Set(NumRequestsRunning, 7)
	s := NewSnapshot(Input{Now: start, StaleAfter: time.Second, Endpoints: []Endpoint{ep(1, "a", "lora")}, Metrics: []*Metrics{m}})
	for _, c := range []struct {
		metric Metric
		age    time.Duration
		model  string
		want   Known
		value  float64
	}{
		{NumRequestsRunning, 0, "a", Fresh, 0},
		{NumRequestsRunning, 2 * time.Second, "a", Stale, 0},
		{NumRequestsRunning, 0, "lora", Fresh, 7},
		{NumRequestsWaiting, 0, "a", Absent, 0},
		{KVCacheUsagePerc, 0, "a", NotNumber, 0},
		{KVCacheUsagePerc, 0, "lora", NotNumber, 0},
	} {
		r := s.ReadingsFor(c.model, c.metric, start.Add(c.age))
		v, ok := r.At(0)
		if r.Known(0) != c.want || ok != (c.want == Fresh) || ok && v != c.value {
			t.Errorf("%+v: %v, %v, %v", c, r.Known(0), v, ok)
		}
	}
}
