package metricsync

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// tokenPage is a page of vLLM: tokens generated, and observations of the time to
// first token of half a second each, or of two seconds.
func tokenPage(tokens, short, long int) string {
	const name = "vllm:time_to_first_token_seconds"
	return fmt.Sprintf("vllm:generation_tokens_total %d\n%s_bucket{le=\"1.0\"} %d\n%s_bucket{le=\"4.0\"} %d\n%s_bucket{le=\"+Inf\"} %d\n%s_count %d\n%s_sum %v\n",
		tokens, name, short, name, short+long, name, short+long, name, short+long, name, 0.5*float64(short)+2*float64(long))
}

func TestHistory(t *testing.T) {
	p := newParser(testTables.of(pool.EngineVLLM))
	var h history
	start := time.Unix(1000, 0)
	feed := func(at int, page string) *pool.Metrics {
		t.Helper()
		now := start.Add(time.Duration(at) * time.Second)
		p.noBuckets = !h.due(now)
		if _, err := p.parse(strings.NewReader(page), 1<<20); err != nil {
			t.Fatal(err)
		}
		p.reading.reduce(&p.page, anyModel)
		h.observe(&p.reading, !p.noBuckets, now)
		return p.columns(&h, adapters{}, now)
	}
	want := func(m *pool.Metrics, rate, mean, p95 float64) {
		t.Helper()
		for name, w := range map[pool.Metric]float64{pool.GenerationTokenRate: rate, pool.TimeToFirstToken: mean, pool.TimeToFirstTokenP95: p95} {
			g, ok := m.Get(name)
			if ok == math.IsNaN(w) || ok && math.Abs(g-w) > 1e-9 {
				t.Errorf("%v is %v (%v), want %v", name, g, ok, w)
			}
		}
	}
	none := math.NaN()
	want(feed(0, tokenPage(1000, 100, 0)), none, 0.5, 0.95) // of all time, and no rate yet
	want(feed(1, tokenPage(1050, 100, 0)), 50, 0.5, 0.95)
	want(feed(2, tokenPage(1050, 100, 100)), 25, 2, 0.95) // the mean of the window; buckets are read each 10 s
	want(feed(10, tokenPage(1500, 100, 100)), 50, 2, 3.85)
	for at := 20; at <= 120; at += 10 {
		feed(at, tokenPage(1500+10*(at-10), 100, 100))
	}
	want(feed(121, tokenPage(2610, 100, 100)), 610.0/61, 1.25, 3.7) // nothing within a minute: of all time
	want(feed(122, tokenPage(10, 1, 0)), none, 0.5, none)           // restarted
	want(feed(123, tokenPage(30, 1, 1)), 20, 2, 3.7)                // and its buckets are read at once
	want(feed(124, "vllm:generation_tokens_total NaN\n"), none, none, none)
	want(feed(125, tokenPage(40, 1, 1)), 10, 2, 3.7)
}

func TestRestartOfTheProcess(t *testing.T) {
	p := newParser(testTables.of(pool.EngineVLLM))
	var h history
	for i, c := range []struct {
		started string
		rate    float64
	}{{"5", math.NaN()}, {"5", 100}, {"6", math.NaN()}, {"6", 100}} {
		page := fmt.Sprintf("process_start_time_seconds %s\nvllm:generation_tokens_total %d\n", c.started, 100*(i+1))
		if _, err := p.parse(strings.NewReader(page), 1<<20); err != nil {
			t.Fatal(err)
		}
		p.reading.reduce(&p.page, anyModel)
		h.observe(&p.reading, true, time.Unix(int64(i), 0))
		if got := h.rate(generationTokens); got != c.rate && !(math.IsNaN(got) && math.IsNaN(c.rate)) {
			t.Errorf("page %d: rate %v, want %v", i, got, c.rate)
		}
	}
}

// TestHitRate: that of the last minute, not of the engine's life.
func TestHitRate(t *testing.T) {
	p := newParser(testTables.of(pool.EngineVLLM))
	var h history
	for i, c := range []struct {
		queries, hits int
		want          float64
	}{{1000, 900, 0.9}, {1100, 910, 0.1}, {1100, 910, 0.1}} {
		page := fmt.Sprintf("vllm:prefix_cache_queries_total %d\nvllm:prefix_cache_hits_total %d\n", c.queries, c.hits)
		if _, err := p.parse(strings.NewReader(page), 1<<20); err != nil {
			t.Fatal(err)
		}
		p.reading.reduce(&p.page, anyModel)
		h.observe(&p.reading, true, time.Unix(int64(i), 0))
		m := p.columns(&h, adapters{}, time.Unix(int64(i), 0))
		if got, _ := m.Get(pool.KVCacheHitRate); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("page %d: hit rate %v, want %v", i, got, c.want)
		}
	}
}

// TestMeanIsNeverNegative: a sum that falls while its count rises is a counter
// that went wrong, and no endpoint is the fastest by it.
func TestMeanIsNeverNegative(t *testing.T) {
	p := newParser(testTables.of(pool.EngineVLLM))
	var h history
	for i, page := range []string{
		"vllm:time_to_first_token_seconds_sum 1e308\nvllm:time_to_first_token_seconds_count 2\n",
		"vllm:time_to_first_token_seconds_sum 6\nvllm:time_to_first_token_seconds_count 3\n",
		"vllm:time_to_first_token_seconds_sum 6\nvllm:time_to_first_token_seconds_count 1e-320\n",
	} {
		if _, err := p.parse(strings.NewReader(page), 1<<20); err != nil {
			t.Fatal(err)
		}
		p.reading.reduce(&p.page, anyModel)
		h.observe(&p.reading, true, time.Unix(int64(i), 0))
		v, ok := p.columns(&h, adapters{}, time.Unix(int64(i), 0)).Get(pool.TimeToFirstToken)
		if want := []float64{5e307, 2, 0}[i]; ok != (i < 2) || v != want {
			t.Errorf("page %d: a mean of %v, %v, want %v", i, v, ok, want)
		}
	}
}

func TestPercentile(t *testing.T) {
	inf := math.Inf(1)
	for _, c := range []struct {
		bounds, counts []float64
		q, want        float64
	}{
		{[]float64{1, 2, inf}, []float64{0, 10, 10}, 0.5, 1.5},
		{[]float64{1, 2, inf}, []float64{10, 10, 10}, 0.5, 0.5},
		{[]float64{1, 2, inf}, []float64{0, 0, 10}, 0.5, 2},         // above the last bound
		{[]float64{0, 1, inf}, []float64{5, 10, 10}, 0.25, 0},       // SGLang's first bound is 0
		{[]float64{1, 2}, []float64{5, 5}, 0.99, 0.99},              // no +Inf
		{[]float64{1, 2, inf}, []float64{0, 0, 0}, 0.5, math.NaN()}, // no observation
		{nil, nil, 0.5, math.NaN()},
		{[]float64{inf}, []float64{3}, 0.5, math.NaN()},
	} {
		total := 0.0
		if n := len(c.counts); n > 0 {
			total = c.counts[n-1]
		}
		got := percentile(c.bounds, c.counts, total, c.q)
		if got != c.want && !(math.IsNaN(got) && math.IsNaN(c.want)) {
			t.Errorf("%+v: got %v", c, got)
		}
	}
}

// TestModelsOfOnePage: one that has its own series reads them, else the pod's.
func TestModelsOfOnePage(t *testing.T) {
	const text = "vllm:num_requests_running{model_name=\"base\"} 3\nvllm:num_requests_running{model_name=\"lora\"} 4\n" +
		"vllm:num_requests_waiting{model_name=\"base\"} 5\nvllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running{model_name=\"undefined\"} 1\n"
	got := parsePage(t, pool.EngineVLLM, text)
	if show(got.metrics) != "8 5 0.5" || len(got.metrics.Models) != 2 {
		t.Fatalf("%s, %+v", show(got.metrics), got.metrics.Models)
	}
	for i, want := range []string{"base 3 5 -", "lora 4 - -"} {
		m := got.metrics.Models[i]
		if have := m.Model + " " + show(&pool.Metrics{Values: m.Values}); have != want {
			t.Errorf("got %s, want %s", have, want)
		}
	}
	// The labels of the page before are known again, and are still those of a model.
	p := newParser(testTables.of(pool.EngineVLLM))
	for range 3 {
		if _, err := p.parse(strings.NewReader(text), 1<<20); err != nil {
			t.Fatal(err)
		}
		if again := p.look(nil); !reflect.DeepEqual(again.metrics, got.metrics) {
			t.Errorf("%+v, want %+v", again.metrics, got.metrics)
		}
	}
	if one := parsePage(t, pool.EngineVLLM, strings.ReplaceAll(text, "lora", "base")); one.metrics.Models != nil {
		t.Errorf("one model has readings of its own: %+v", one.metrics.Models)
	}
}
