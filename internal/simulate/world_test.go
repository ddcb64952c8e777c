package simulate

import (
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
)

// unique is a prompt that shares nothing.
func unique(id uint64, at time.Duration, prompt, output int) Request {
	return Request{At: at, Prompt: prompt, Output: output, Blocks: chain(nil, mix(id)|1, prompt/BlockTokens)}
}

// oneByOne is an engine that serves one request at a time, each step of a prompt of
// p tokens lasting p/10000 s and a hundredth.
func oneByOne() sim.Params {
	return sim.Params{MaxRunning: 1, PrefillRate: 10_000, DecodeRate: 100, KVSlowdown: 1e-12, BatchSlowdown: 1e-12, Blocks: 1000}
}

func TestOneServerIsMD1(t *testing.T) {
	const n, prompt, rate = 20_000, 200, 20.0 // 30 ms of service each: 0.6 busy
	rng := rand.New(rand.NewPCG(1, 2))
	w := &Workload{}
	at := time.Duration(0)
	for i := range n {
		at += time.Duration(rng.ExpFloat64() / rate * 1e9)
		w.Requests = append(w.Requests, unique(uint64(i), at, prompt, 1))
	}
	for _, policy := range []string{"least-request"} {
		r, err := Run(w, policy, Config{Endpoints: 1, Engine: oneByOne()})
		if err != nil {
			t.Fatal(err)
		}
		const service, busy = 30.0, 0.6
		want := service + busy*service/(2*(1-busy)) // Pollaczek and Khinchine
		if math.Abs(r.TTFT.Mean/want-1) > 0.03 {
			t.Errorf("%s: TTFT %.2f ms, want %.2f", policy, r.TTFT.Mean, want)
		}
		if r.HitRate != 0 || r.Attainment != 1 || r.Requests != n || r.Broken+r.Refused != 0 {
			t.Errorf("%s: %+v", policy, r)
		}
	}
}

func TestEvenArrivalsAtManyServers(t *testing.T) {
	// A request each 10 ms, 30 ms of service, 4 servers: none waits under any rule
	// that knows who is idle.
	w := &Workload{}
	for i := range 1000 {
		w.Requests = append(w.Requests, unique(uint64(i), time.Duration(i)*10*time.Millisecond, 200, 1))
	}
	for _, policy := range []string{"round-robin", "least-request", "prefill-cost", "lmetric", "preble", "expected-ttft", "dynamo-kv", "sglang-cache-aware", "aibrix"} {
		r, err := Run(w, policy, Config{Endpoints: 4, Engine: oneByOne()})
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(r.TTFT.P99-30) > 0.01 || math.Abs(r.Imbalance-1) > 0.34 {
			t.Errorf("%s: TTFT p99 %v, imbalance %v", policy, r.TTFT.P99, r.Imbalance)
		}
	}
}

func TestKnownPrefixHits(t *testing.T) {
	// Two families of prompts, apart in time, over two endpoints. 650 tokens are 10
	// whole blocks and 10 tokens.
	w := &Workload{}
	for i := range 20 {
		r := unique(uint64(i%2), time.Duration(i)*time.Second, 650, 2)
		w.Requests = append(w.Requests, r)
	}
	affine := (20.0 - 2) / 20 * 640 / 650 // each family is read once
	for policy, want := range map[string]float64{
		"prefix-cache": affine, "prefill-cost": affine, "preble": affine, "lmetric": affine, "prefix-hrw": affine,
		"dynamo-kv": affine, "llm-d": affine, "aibrix": affine, "aibrix-prefix-cache": affine, "sglang-cache-aware": affine,
		"round-robin": affine, // by the turn of the two families
	} {
		r, err := Run(w, policy, Config{Endpoints: 2, Engine: oneByOne()})
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(r.HitRate-want) > 1e-9 {
			t.Errorf("%s: hit rate %v, want %v", policy, r.HitRate, want)
		}
	}
}

func TestPolicyWithoutMemoryMisses(t *testing.T) {
	// Three families in turn over two endpoints: round robin reads each on both.
	w := &Workload{}
	for i := range 30 {
		w.Requests = append(w.Requests, unique(uint64(i%3), time.Duration(i)*time.Second, 640, 2))
	}
	r, err := Run(w, "round-robin", Config{Endpoints: 2, Engine: oneByOne()})
	if err != nil {
		t.Fatal(err)
	}
	// The last token of a prompt is always computed: 9 of 10 blocks.
	if want := (30.0 - 6) / 30 * 576 / 640; math.Abs(r.HitRate-want) > 1e-9 {
		t.Errorf("hit rate %v, want %v", r.HitRate, want)
	}
}

func TestRunsAreReproducible(t *testing.T) {
	w, err := Generate("pod-loss", 4, 60, 3)
	if err != nil {
		t.Fatal(err)
	}
	for _, policy := range Policies() {
		run := func(seed uint64) *Result {
			r, err := Run(w, policy, Config{Endpoints: 4, Envoys: 3, Seed: seed})
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		first := run(5)
		if again := run(5); !reflect.DeepEqual(first, again) {
			t.Errorf("%s: %+v, then %+v", policy, first, again)
		}
		if reflect.DeepEqual(first, run(6)) {
			t.Errorf("%s: another seed changes nothing", policy)
		}
	}
}

// TestNothingIsLeft runs a fleet that loses and gains endpoints and looks at the
// books afterwards.
func TestNothingIsLeft(t *testing.T) {
	w, err := Generate("pod-loss", 3, 100, 1)
	if err != nil {
		t.Fatal(err)
	}
	w = w.WithSpeed(4)
	for _, policy := range Policies() {
		cfg := Config{Endpoints: 3, Envoys: 2}
		s := ran(t, w, policy, cfg)
		states := map[jobState]int{}
		for i := range s.jobs {
			j := &s.jobs[i]
			states[j.state]++
			if j.state == completed && (j.seq.Output != j.req.Output || j.first < j.arrival || j.end < j.first) {
				t.Errorf("%s: %+v", policy, j)
			}
		}
		if states[completed]+states[broken] != len(s.jobs) || states[completed] < len(s.jobs)*4/5 {
			t.Errorf("%s: ends %v of %d", policy, states, len(s.jobs))
		}
		for i, e := range s.engines {
			if len(e.jobs) > 0 || e.up == (i == 0) {
				t.Errorf("%s: endpoint %d: up %v, %d jobs", policy, i, e.up, len(e.jobs))
			}
		}
		for _, e := range s.envoys {
			switch p := e.picker.(type) {
			case *shunt:
				for i, l := range p.lives {
					if (l == nil) != (i == 0) || l != nil && (l.InFlight() != 0 || l.Tokens() != 0 || l.Prefill() != 0 || l.Cost() != 0) {
						t.Errorf("%s: live load of %d: %+v", policy, i, l)
					}
				}
			case *rivalPicker:
				for i := range p.running {
					if p.running[i] != 0 || p.prefill[i] != 0 || p.active != nil && p.active.total[i] != 0 {
						t.Errorf("%s: counts of %d: %d, %d", policy, i, p.running[i], p.prefill[i])
					}
				}
			}
		}
	}
}

func TestJoiningAndSlowEndpoints(t *testing.T) {
	w := &Workload{Changes: []Change{{At: 2 * time.Second, Kind: Slow, Endpoint: 0, Factor: 10}, {At: 20 * time.Second, Kind: Join}}}
	for i := range 400 {
		w.Requests = append(w.Requests, unique(uint64(i), time.Duration(i)*100*time.Millisecond, 200, 1))
	}
	cfg := Config{Endpoints: 1, Engine: oneByOne(), SlowStart: -1}
	if err := cfg.setDefaults(); err != nil {
		t.Fatal(err)
	}
	s, err := newWorld(w, "least-request", cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	at := func(i int) time.Duration { return (s.jobs[i].first - s.jobs[i].arrival).Round(time.Millisecond) }
	if at(10) != 30*time.Millisecond || at(100) < 300*time.Millisecond || at(399) != 30*time.Millisecond && at(398) != 30*time.Millisecond {
		t.Errorf("TTFT %v at 1 s, %v at 10 s, %v, %v at 40 s", at(10), at(100), at(398), at(399))
	}
	if n := s.engines[1].model.Stats().RequestPrompt.N; n < 150 {
		t.Errorf("the endpoint that joined served %d", n)
	}
}

func TestScrapesComeLate(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	s := newScrapes(rng, 2, 3, time.Second, 300*time.Millisecond)
	read := map[[2]int][]time.Duration{}
	told := map[[2]int][]time.Duration{}
	for s.next() < 3*time.Second {
		at := s.next()
		e, i, r := s.take()
		if r {
			read[[2]int{e, i}] = append(read[[2]int{e, i}], at)
		} else {
			told[[2]int{e, i}] = append(told[[2]int{e, i}], at)
		}
	}
	if len(read) != 6 {
		t.Fatalf("%d are read", len(read))
	}
	for who, ats := range read {
		for k, at := range ats {
			if k > 0 && at-ats[k-1] != time.Second {
				t.Errorf("%v is read at %v", who, ats)
			}
			if k < len(told[who]) && told[who][k]-at != 300*time.Millisecond {
				t.Errorf("%v is read at %v and known at %v", who, ats, told[who])
			}
		}
	}
}

func TestErrors(t *testing.T) {
	w := &Workload{Requests: []Request{unique(1, 0, 100, 1)}}
	for name, run := range map[string]func() error{
		"policy":    func() error { _, err := Run(w, "least-requests", Config{}); return err },
		"bracket":   func() error { _, err := Run(w, "prefill-cost(kv=false", Config{}); return err },
		"parameter": func() error { _, err := Run(w, "prefill-cost(nope=1)", Config{}); return err },
		"endpoints": func() error { _, err := Run(w, "random", Config{Endpoints: -1}); return err },
		"delay":     func() error { _, err := Run(w, "random", Config{ScrapeDelay: time.Minute}); return err },
		"workload":  func() error { _, err := Generate("nope", 1, 1, 1); return err },
		"change": func() error {
			_, err := Run(&Workload{Requests: w.Requests, Changes: []Change{{Endpoint: 9}}}, "random", Config{})
			return err
		},
	} {
		if run() == nil {
			t.Errorf("%s: no error", name)
		}
	}
	r, err := Run(&Workload{Requests: []Request{unique(1, 0, 2_000_000, 1)}}, "random", Config{})
	if err != nil || r.Refused != 1 {
		t.Errorf("a prompt larger than the cache: %+v, %v", r, err)
	}
}

// ran is a world that has run a workload under a policy.
func ran(t *testing.T, w *Workload, policy string, cfg Config) *world {
	t.Helper()
	if err := cfg.setDefaults(); err != nil {
		t.Fatal(err)
	}
	s, err := newWorld(w, policy, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	return s
}
