package simulate

import (
	"reflect"
	"testing"
	"time"
)

var twoBands = []Objective{{"high", 10, 0.2}, {"low", -1, 0.8}}

// TestHighBandHolds: more comes than four engines can serve, and who is of the
// high band hardly notices. Without a bound on what runs it does.
func TestHighBandHolds(t *testing.T) {
	run := func(concurrency int) *Result {
		t.Helper()
		w, err := Generate("steady", 4, 2000, 1)
		if err != nil {
			t.Fatal(err)
		}
		r, err := runObjectives(w.WithSpeed(3), "prefill-cost", Config{Endpoints: 4, Flow: Flow{Objectives: twoBands, MaxConcurrency: concurrency}})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := run(8)
	high, low := r.Objectives[0], r.Objectives[1]
	if ratio := high.TTFT.P99 / high.Alone.P99; ratio > 1.3 || low.TTFT.P99 < 10*high.TTFT.P99 {
		t.Errorf("p99 of the high band is %.2f times that without the low one's load: %+v, alone %+v, low %+v", ratio, high.TTFT, *high.Alone, low.TTFT)
	}
	if high.Requests+low.Requests != 2000 || high.Dropped != 0 || low.Dropped != r.Dropped || r.Broken+r.Refused != 0 || low.Alone != nil {
		t.Errorf("%+v", r)
	}
	if again := run(8); !reflect.DeepEqual(r, again) {
		t.Errorf("%+v, then %+v", r, again)
	}
	r = run(1_000_000)
	if high := r.Objectives[0]; high.TTFT.P99 < 4*high.Alone.P99 {
		t.Errorf("where nothing is ever full: %+v, alone %+v", high.TTFT, *high.Alone)
	}
}

// TestFlowControlEndsAllRequests: with several Envoys, an endpoint that is lost,
// and times to live that run out, each request ends once, and nothing is left.
func TestFlowControlEndsAllRequests(t *testing.T) {
	for _, concurrency := range []int{0, 3} {
		w := mustGenerate(t, "pod-loss", 3, 600, 1).WithSpeed(25).withObjectives(twoBands, 1)
		cfg := Config{Endpoints: 3, Envoys: 2, Flow: Flow{Objectives: twoBands, MaxConcurrency: concurrency, TTL: 500 * time.Millisecond}}
		s := ran(t, w, "prefill-cost", cfg)
		states := map[jobState]int{}
		for i := range s.jobs {
			j := &s.jobs[i]
			states[j.state]++
			if j.state == completed && (j.seq.Output != j.req.Output || j.first < j.arrival) || j.state == dropped && j.seq != nil && j.first >= 0 {
				t.Errorf("%+v", j)
			}
		}
		if states[completed]+states[dropped]+states[broken] != len(s.jobs) || states[dropped] == 0 || states[completed] == 0 {
			t.Errorf("concurrency %d: ends %v of %d", concurrency, states, len(s.jobs))
		}
		for _, e := range s.envoys {
			p := e.picker.(*shunt)
			if n := p.gate.ctl.Waiting(); n != 0 {
				t.Errorf("%d wait", n)
			}
			for i, l := range p.lives {
				if l != nil && (l.InFlight() != 0 || l.Tokens() != 0 || l.Prefill() != 0) {
					t.Errorf("live load of %d: %d in flight", i, l.InFlight())
				}
			}
		}
	}
}

func TestObjectives(t *testing.T) {
	w := mustGenerate(t, "steady", 2, 4000, 1)
	drawn := w.withObjectives([]Objective{{"a", 1, 1}, {"b", 0, 3}}, 7)
	if n := len(drawn.only(0).Requests); n < 900 || n > 1100 || len(drawn.only(0).Requests)+len(drawn.only(1).Requests) != 4000 {
		t.Errorf("%d of 4000 are of the first", n)
	}
	if !reflect.DeepEqual(drawn, w.withObjectives([]Objective{{"a", 1, 1}, {"b", 0, 3}}, 7)) {
		t.Error("another lot from the same seed")
	}
	for name, f := range map[string]Flow{
		"no name":     {Objectives: []Objective{{"", 1, 1}}},
		"twice":       {Objectives: []Objective{{"a", 1, 1}, {"a", 2, 1}}},
		"no share":    {Objectives: []Objective{{"a", 1, 0}}},
		"concurrency": {MaxConcurrency: -1},
	} {
		if _, err := Run(w, "random", Config{Flow: f}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	mean := Mean([]*Result{
		{Objectives: []ObjectiveResult{{Requests: 1, TTFT: Percentiles{P99: 10}, Alone: &Percentiles{P99: 5}}}},
		{Objectives: []ObjectiveResult{{Requests: 2, Dropped: 1, TTFT: Percentiles{P99: 20}, Alone: &Percentiles{P99: 7}}}},
	}).Objectives[0]
	if mean.Requests != 3 || mean.Dropped != 1 || mean.TTFT.P99 != 15 || mean.Alone.P99 != 6 {
		t.Errorf("%+v", mean)
	}
}
