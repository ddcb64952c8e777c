package pool

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// first lets a request wait so long for its first token, behind that many tokens.
func first(l *Live, tokens int64, took time.Duration, at time.Time) {
	r := l.Reserve(Load{Prompt: tokens, Uncached: tokens, Talks: true}, at.Add(-took))
	r.FirstToken(at)
	r.Release(at, false)
}

// stream lets a request's tokens come at a pace, all tokens of it told at once.
func stream(l *Live, tokens int64, pace time.Duration, at time.Time) {
	began := at.Add(-time.Duration(tokens) * pace)
	var other Live
	r := other.Reserve(Load{Talks: true}, began)
	r.Move(l, began) // it says nothing of first tokens here
	r.FirstToken(began)
	r.Progress(1, began)
	r.Progress(1+tokens, at)
	r.Release(at, false)
}

// one is a snapshot of one endpoint with a page of that age.
func one(l *Live, age time.Duration, values map[Metric]float64) *Snapshot {
	m := &Metrics{Taken: start.Add(-age)}
	for name, v := range values {
		m.Set(name, v)
	}
	return NewSnapshot(Input{
		Now: start, StaleAfter: 5 * time.Second, Endpoints: []Endpoint{{Target: Target{Model: "m"}, Live: l, Ready: true}}, Metrics: []*Metrics{m},
	})
}

func TestPredictionByWhatWasSeen(t *testing.T) {
	const none = -1.0
	ms := time.Millisecond
	line := func(l *Live) { // 20 ms and 50 µs a token
		for i := range 200 {
			n := int64(500 + 90*i)
			first(l, n, 20*ms+time.Duration(n)*50*time.Microsecond, start.Add(time.Duration(i-200)*10*ms))
		}
	}
	for _, c := range []struct {
		name        string
		seen        func(l *Live)
		uncached    float64
		first, pace float64 // seconds; none is unknown
		off         float64 // what first may be off by, as a share
	}{
		{name: "nothing", first: none, pace: none, uncached: 1},
		{"one prompt", func(l *Live) { first(l, 1000, 100*ms, start) }, 1000, 0.1, none, 0},
		{"one prompt tells a price", func(l *Live) { first(l, 1000, 100*ms, start) }, 3000, 0.3, none, 0},
		{"a step is no part of the price", func(l *Live) {
			stream(l, 20, 20*ms, start)
			first(l, 1000, 100*ms, start)
		}, 3000, 0.26, 0.02, 1e-9},
		{"a line", line, 5000, 0.27, none, 0.03},
		{"a line, far out", line, 100_000, 5.02, none, 0.05},
		{"a line, near", line, 600, 0.05, none, 0.2},
		{"short prompts wait for a step", func(l *Live) {
			first(l, 10, 30*ms, start)
			first(l, 50, 50*ms, start)
		}, 100, 0.04, none, 1e-9},
		{"short prompts tell no price", func(l *Live) { first(l, 50, 50*ms, start) }, 600, none, none, 0},
		{"what waits there", func(l *Live) {
			first(l, 1000, 100*ms, start)
			l.Reserve(Load{Prompt: 9000, Uncached: 5000}, start)
		}, 1000, 0.6, none, 0},
		{"the newest count most", func(l *Live) {
			for i := range 50 {
				first(l, 1000, 100*ms, start.Add(time.Duration(i)*10*ms-50*time.Second))
			}
			first(l, 1000, 400*ms, start)
		}, 1000, 0.4, none, 0.3},
		{"for a minute", func(l *Live) {
			first(l, 1000, 100*ms, start.Add(-time.Minute))
			stream(l, 20, 20*ms, start.Add(-time.Minute))
		}, 1000, 0.1, 0.02, 0},
		{"and no longer", func(l *Live) {
			first(l, 1000, 100*ms, start.Add(-time.Minute-1))
			stream(l, 20, 20*ms, start.Add(-time.Minute-1))
		}, 1000, none, none, 0},
		{"a request that another endpoint kept waiting", func(l *Live) {
			var other Live
			r := other.Reserve(Load{Prompt: 1000, Uncached: 1000}, start)
			r.Move(l, start)
			r.FirstToken(start.Add(ms))
		}, 1000, none, none, 0},
		{"paces are weighed by their tokens", func(l *Live) {
			stream(l, 300, 10*ms, start)
			stream(l, 100, 30*ms, start)
		}, 1, none, 0.015, 0},
		{"what came with the first token came at no pace", func(l *Live) {
			var other Live
			r := other.Reserve(Load{}, start)
			r.Move(l, start)
			r.FirstToken(start)
			r.Progress(40, start)
			r.Progress(60, start.Add(400*ms))
			r.Release(start.Add(400*ms), false)
		}, 1, none, 0.02, 0},
		{"a short answer counts at its end", func(l *Live) {
			var other Live
			r := other.Reserve(Load{}, start)
			r.Move(l, start)
			r.FirstToken(start)
			r.Progress(1, start)
			r.Progress(5, start.Add(80*ms))
			r.Release(start.Add(100*ms), true)
		}, 1, none, 0.025, 0},
		{"an answer that shows no tokens has no pace", func(l *Live) {
			r := l.Reserve(Load{Prompt: 10}, start.Add(-time.Second))
			r.Progress(100, start)
			r.Release(start, true)
		}, 1, none, none, 0},
		{"the engine's count mends ours", func(l *Live) { // it sent four tokens in an event
			var other Live
			r := other.Reserve(Load{}, start)
			r.Move(l, start)
			r.FirstToken(start)
			r.Progress(1, start)
			r.Progress(101, start.Add(time.Second))
			r.Progress(401, start.Add(time.Second))
			r.Release(start.Add(time.Second), true)
		}, 1, none, 0.0025, 0},
	} {
		l := new(Live)
		if c.seen != nil {
			c.seen(l)
		}
		p := one(l, 0, nil).Predictor("m", false, start)
		var got Latency
		p.Predict(0, &got)
		ttft := got.TTFT(c.uncached)
		if (ttft != ttft) != (c.first == none) || math.Abs(ttft-c.first) > c.off*c.first+1e-9 {
			t.Errorf("%s: first token after %v s, want %v", c.name, ttft, c.first)
		}
		if (got.Between != got.Between) != (c.pace == none) || math.Abs(got.Between-c.pace) > 1e-9 {
			t.Errorf("%s: %v s from token to token, want %v", c.name, got.Between, c.pace)
		}
	}
}

func TestPredictionByPages(t *testing.T) {
	const none = -1.0
	running, waiting, rate := NumRequestsRunning, NumRequestsWaiting, RequestRate
	prefill, step, mean, prompt, hit := RequestPrefillTime, InterTokenLatency, TimeToFirstToken, PromptTokensPerRequest, KVCacheHitRate
	for _, c := range []struct {
		name        string
		page        map[Metric]float64
		age         time.Duration
		whole       bool
		inFlight    int
		uncached    float64
		first, pace float64
	}{
		{name: "a mean prompt", page: map[Metric]float64{running: 1, prefill: 0.22, step: 0.02, prompt: 1000}, uncached: 1000, first: 0.22, pace: 0.02},
		{name: "thrice that", page: map[Metric]float64{running: 1, prefill: 0.22, step: 0.02, prompt: 1000}, uncached: 3000, first: 0.62, pace: 0.02},
		{name: "half was cached", page: map[Metric]float64{running: 1, prefill: 0.22, step: 0.02, prompt: 2000, hit: 0.5}, uncached: 3000, first: 0.62, pace: 0.02},
		{name: "nobody knows of what", page: map[Metric]float64{running: 1, prefill: 0.22, step: 0.02, prompt: 2000, hit: 0.5}, whole: true, uncached: 3000, first: 0.32, pace: 0.02},
		{name: "prefill below a step", page: map[Metric]float64{running: 1, prefill: 0.01, step: 0.02, prompt: 1000}, uncached: 3000, first: 0.01, pace: 0.02},
		{name: "others wait", page: map[Metric]float64{running: 2, waiting: 3, prefill: 0.22, step: 0.02, prompt: 1000}, inFlight: 2, uncached: 1000, first: 0.82, pace: 0.02},
		{name: "those that wait are ours", page: map[Metric]float64{running: 2, waiting: 3, prefill: 0.22, step: 0.02, prompt: 1000}, inFlight: 5, uncached: 1000, first: 0.22, pace: 0.02},
		{name: "no prefill time", page: map[Metric]float64{rate: 1, mean: 0.3, prompt: 1000}, uncached: 2000, first: 0.3, pace: none},
		{name: "no prefill time, and twice the usual", page: map[Metric]float64{rate: 1, mean: 0.3, prompt: 1000}, uncached: 2001, first: none, pace: none},
		{name: "short prompts tell no price", page: map[Metric]float64{running: 1, mean: 0.3, prefill: 0.2, step: 0.01, prompt: 500}, uncached: 512, first: 0.3, pace: 0.01},
		{name: "nor of longer ones", page: map[Metric]float64{running: 1, mean: 0.3, prefill: 0.2, step: 0.01, prompt: 500}, uncached: 513, first: none, pace: 0.01},
		{name: "no first tokens", page: map[Metric]float64{running: 1, step: 0.01}, uncached: 1, first: none, pace: 0.01},
		{name: "stale", page: map[Metric]float64{running: 1, prefill: 0.22, step: 0.02, prompt: 1000}, age: 5*time.Second + 1, uncached: 1, first: none, pace: none},
		{name: "idle for a minute", page: map[Metric]float64{running: 0, waiting: 0, rate: 0, prefill: 0.22, step: 0.02, prompt: 1000}, uncached: 1, first: none, pace: none},
		{name: "idle, not for a minute", page: map[Metric]float64{running: 0, waiting: 0, rate: 0.1, prefill: 0.22, step: 0.02, prompt: 1000}, uncached: 1000, first: 0.22, pace: 0.02},
		{name: "nothing", uncached: 1, first: none, pace: none},
	} {
		l := new(Live)
		for range c.inFlight {
			l.Reserve(Load{}, start)
		}
		p := one(l, c.age, c.page).Predictor("m", c.whole, start)
		var got Latency
		p.Predict(0, &got)
		ttft := got.TTFT(c.uncached)
		if (ttft != ttft) != (c.first == none) || math.Abs(ttft-c.first) > 1e-9 && c.first != none {
			t.Errorf("%s: first token after %v s, want %v", c.name, ttft, c.first)
		}
		if (got.Between != got.Between) != (c.pace == none) || math.Abs(got.Between-c.pace) > 1e-9 && c.pace != none {
			t.Errorf("%s: %v s from token to token, want %v", c.name, got.Between, c.pace)
		}
	}
}

// TestPredictionPrefersWhatWasSeen, each by itself: an engine's page fills in what
// streams have not told.
func TestPredictionPrefersWhatWasSeen(t *testing.T) {
	page := map[Metric]float64{NumRequestsRunning: 1, RequestPrefillTime: 0.22, InterTokenLatency: 0.02, PromptTokensPerRequest: 1000}
	a, b := new(Live), new(Live)
	first(a, 1000, 50*time.Millisecond, start)
	stream(b, 100, 5*time.Millisecond, start)
	pa := one(a, 0, page).Predictor("m", false, start)
	pb := one(b, 0, page).Predictor("m", false, start)
	var l Latency
	if pa.Predict(0, &l); math.Abs(l.TTFT(1000)-0.05) > 1e-9 || l.Between != 0.02 {
		t.Errorf("%+v", l)
	}
	if pb.Predict(0, &l); math.Abs(l.TTFT(1000)-0.22) > 1e-9 || math.Abs(l.Between-0.005) > 1e-9 {
		t.Errorf("%+v", l)
	}
}

// TestPredictionOfOneModel reads the model's own means, where the page has them.
func TestPredictionOfOneModel(t *testing.T) {
	m := &Metrics{Taken: start}
	m.Set(NumRequestsRunning, 1)
	m.Set(InterTokenLatency, 0.02)
	m.Models = []ModelMetrics{{Model: "m"}}
	m.Models[0].Set(InterTokenLatency, 0.07)
	s := NewSnapshot(Input{
		Now: start, StaleAfter: 5 * time.Second, Endpoints: []Endpoint{{Target: Target{Model: "m"}, Live: new(Live), Ready: true}}, Metrics: []*Metrics{m},
	})
	for model, want := range map[string]float64{"m": 0.07, "other": 0.02, "": 0.02} {
		p := s.Predictor(model, false, start)
		var l Latency
		if p.Predict(0, &l); l.Between != want {
			t.Errorf("%q: %v", model, l.Between)
		}
	}
}

// TestLearningUnderContention: whatever comes from many workers at once, what is
// learned stays between the least and the most that was seen.
func TestLearningUnderContention(t *testing.T) {
	var l Live
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(3, uint64(w)))
			at := start
			for range 2000 {
				at = at.Add(time.Duration(rng.IntN(5)-1) * time.Millisecond)
				n := 600 + rng.Int64N(10_000)
				l.learned.learnFirst(n, n*(20_000+rng.Int64N(20_000)), at.UnixNano()) // 20 to 40 µs a token
				l.learned.learnBetween(16, 16*(10_000_000+rng.Int64N(10_000_000)), at.UnixNano())
				base, perToken, most, ok := l.learned.first(at.UnixNano())
				pace, known := l.learned.tokenTime(at.UnixNano())
				if !ok || !known || base < 0 || perToken < 0 || perToken > 45e-6 || !(most > 1e6) || pace < 0.01 || pace > 0.02 {
					t.Errorf("base %v, %v a token, up to %v, pace %v", base, perToken, most, pace)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestPredictAllocatesNothing(t *testing.T) {
	l := new(Live)
	s := one(l, 0, map[Metric]float64{NumRequestsRunning: 1, RequestPrefillTime: 0.22, InterTokenLatency: 0.02, PromptTokensPerRequest: 1000})
	var sum float64
	if n := testing.AllocsPerRun(100, func() {
		p := s.Predictor("m", false, start)
		var latency Latency
		p.Predict(0, &latency)
		sum += latency.TTFT(10)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if n := testing.AllocsPerRun(100, func() { first(l, 1000, time.Second, start) }); n != 0 {
		t.Errorf("%v allocations to learn", n)
	}
}

func BenchmarkPredict(b *testing.B) {
	for name, seen := range map[string]bool{"seen": true, "pages": false} {
		b.Run(name, func(b *testing.B) {
			l := new(Live)
			s := one(l, 0, map[Metric]float64{NumRequestsRunning: 1, RequestPrefillTime: 0.22, InterTokenLatency: 0.02, PromptTokensPerRequest: 1000})
			if seen {
				first(l, 1000, time.Second, start)
				stream(l, 100, 10*time.Millisecond, start)
			}
			p := s.Predictor("m", false, start)
			sum := 0.0
			for b.Loop() {
				var latency Latency
				p.Predict(0, &latency)
				sum += latency.TTFT(100)
			}
		})
	}
}
