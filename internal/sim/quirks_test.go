package sim

import (
	"compress/gzip"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Each quirk changes what it says, and the totals stay those of the engine.
func TestQuirks(t *testing.T) {
	gz := func(b bool) *bool { return &b }
	load := Load{Running: 7, Waiting: 5, KVUsage: 0.25}
	sum := func(name string, want float64, series int, parts ...string) func(*testing.T, string) {
		return func(t *testing.T, page string) {
			t.Helper()
			if got, n := total(page, name, parts...); got != want || n != series {
				t.Errorf("%s %q: %v in %d series, want %v in %d", name, parts, got, n, want, series)
			}
		}
	}
	all := func(checks ...func(*testing.T, string)) func(*testing.T, string) {
		return func(t *testing.T, page string) {
			t.Helper()
			for _, c := range checks {
				c(t, page)
			}
		}
	}
	has := func(text string) func(*testing.T, string) {
		return func(t *testing.T, page string) {
			t.Helper()
			if !strings.Contains(page, text) {
				t.Errorf("no %q", text)
			}
		}
	}
	hasNot := func(text string) func(*testing.T, string) {
		return func(t *testing.T, page string) {
			t.Helper()
			if strings.Contains(page, text) {
				t.Errorf("%q is there", text)
			}
		}
	}
	for name, c := range map[string]struct {
		engine   string
		adapters []string
		quirks   Quirks
		check    func(*testing.T, string)
	}{
		"ranks of vllm": {"vllm", nil, Quirks{Ranks: 3}, all(
			sum("vllm:num_requests_running", 7, 3), sum("vllm:num_requests_waiting", 5, 3), sum("vllm:kv_cache_usage_perc", 0.75, 3),
			sum("vllm:num_requests_running", 3, 1, `engine="0"`), sum("vllm:num_requests_running", 2, 1, `engine="2"`),
			sum("vllm:request_success_total", 1, 15), sum("vllm:e2e_request_latency_seconds_count", 1, 3),
			sum("vllm:engine_sleep_state", 3, 3, `sleep_state="awake"`), sum("vllm:cache_config_info", 3, 3),
			sum("vllm:kv_cache_usage_perc", 0.375, 1, `engine="0"`), sum("vllm:kv_cache_usage_perc", 0.125, 1, `engine="1"`))},
		"ranks of sglang": {"sglang", nil, Quirks{Ranks: 2}, all(
			sum("sglang:num_running_reqs", 7, 2), sum("sglang:num_running_reqs", 4, 1, `dp_rank="0"`, `tp_rank="0"`), sum("sglang:num_running_reqs", 3, 1, `dp_rank="1"`, `tp_rank="1"`),
			sum("sglang:token_usage", 0.5, 2), sum("sglang:num_requests_total", 1, 2), sum("sglang:page_size", 32, 2),
			func(t *testing.T, page string) {
				if strings.Index(page, `sglang:num_running_reqs{dp_rank="1"`) > strings.Index(page, `sglang:num_running_reqs{dp_rank="0"`) {
					t.Error("rank 0 comes first")
				}
			})},
		"tensor-parallel duplicates": {"sglang", nil, Quirks{TPRanks: 2}, all(
			sum("sglang:num_running_reqs", 14, 2), sum("sglang:num_running_reqs", 7, 1, `tp_rank="1"`), hasNot(`dp_rank="`))},
		"both kinds of ranks": {"sglang", nil, Quirks{Ranks: 2, TPRanks: 2}, all(
			sum("sglang:num_queue_reqs", 10, 4), sum("sglang:num_queue_reqs", 2, 1, `dp_rank="1"`, `tp_rank="3"`))},
		"priorities": {"sglang", nil, Quirks{Priority: true}, all(
			sum("sglang:num_running_reqs", 14, 3), sum("sglang:num_running_reqs", 7, 1, `priority=""`), sum("sglang:num_running_reqs", 2, 1, `priority="5"`),
			sum("sglang:token_usage", 0.25, 1))},
		"undefined labels": {"trtllm", nil, Quirks{Undefined: true}, all(
			has(`trtllm_num_requests_running{engine_type="undefined",model_name="undefined",pid="12163"} 7.0`), hasNot(`model_name="m"`))},
		"no model label": {"vllm", nil, Quirks{NoModel: true}, all(hasNot("model_name"), has("\nvllm:num_requests_running{engine=\"0\"} 7.0\n"))},
		"processes": {"vllm", nil, Quirks{PID: true, DeadPIDs: 2}, all(
			sum("vllm:num_requests_running", 7, 3), sum("vllm:num_requests_running", 7, 1, `pid="12163"`), sum("vllm:request_success_total", 0, 0, "pid="))},
		"dead processes of trtllm": {"trtllm", nil, Quirks{DeadPIDs: 1}, sum("trtllm_num_requests_waiting", 5, 2)},
		"NaN":                      {"vllm", nil, Quirks{NaN: []string{"vllm:kv_cache_usage_perc"}}, has(`vllm:kv_cache_usage_perc{engine="0",model_name="m"} NaN`)},
		"renamed": {"vllm", nil, Quirks{Rename: map[string]string{"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc", "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds"}}, all(
			has("# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc{"), hasNot("vllm:kv_cache_usage_perc"),
			has("# TYPE vllm:time_per_output_token_seconds histogram\nvllm:time_per_output_token_seconds_bucket{"), hasNot("vllm:inter_token_latency_seconds_bucket"))},
		"missing": {"xllm", nil, Quirks{Missing: []string{"kv_cache_utilization_perc"}}, all(hasNot("kv_cache_utilization_perc"), has("num_running_requests 7"))},
		"extra":   {"xllm", nil, Quirks{Extra: map[string]string{"engine_utilization": "0.5", `x{a="b=c"}`: "2"}}, all(has("# TYPE engine_utilization gauge\nengine_utilization 0.5\n"), has("x{a=\"b=c\"} 2\n"))},
		"several API processes": {"vllm", []string{"x"}, Quirks{Multiproc: true}, all(
			hasNot("_created"), hasNot("python_"), hasNot("process_"), has("# TYPE vllm:time_to_first_token_seconds histogram\nvllm:time_to_first_token_seconds_sum{"),
			func(t *testing.T, page string) {
				if v, n := total(page, "vllm:lora_requests_info"); n == 0 || v/float64(n) < 3e9 {
					t.Errorf("timestamps %v in %d series are not summed", v, n)
				}
			})},
		"sidecar": {"vllm", nil, Quirks{Sidecar: true, Ranks: 2}, all(
			sum("aibrix:num_requests_running", 7, 2), sum("vllm:num_requests_running", 7, 2), sum("aibrix:e2e_request_latency_seconds_count", 1, 2), hasNot("aibrix:vllm"))},
		"CRLF": {"vllm", nil, Quirks{CRLF: true}, has("model_name=\"m\"} 7.0\r\n")},
		"no newline": {"trtllm", nil, Quirks{Cut: true}, func(t *testing.T, page string) {
			if strings.HasSuffix(page, "\n") || !strings.HasSuffix(page, " 1.0") {
				t.Errorf("ends in %q", page[len(page)-9:])
			}
		}},
		"two types": {"vllm", nil, Quirks{TwoTypes: true}, func(t *testing.T, page string) {
			if n := strings.Count(page, "# TYPE vllm:num_requests_running gauge\n"); n != 2 {
				t.Errorf("%d TYPE lines", n)
			}
		}},
		"a page elsewhere": {"vllm", nil, Quirks{Gzip: gz(false), Paths: []string{"/m", "/n"}}, has("7.0")},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, Config{Engine: c.engine, Models: []string{"m"}, Adapters: c.adapters, Quirks: c.quirks, MaxModelLen: 8000})
			ask := "m"
			if len(c.adapters) > 0 {
				ask = c.adapters[0]
			}
			if status, body, err := post(client(t, false), s, "/v1/completions", `{"model":"`+ask+`","prompt":"hi","max_tokens":1}`); err != nil || status != 200 {
				t.Fatal(status, body, err)
			}
			s.drv.ask(func(time.Duration) { s.drv.model.ClearCache() })
			s.SetLoad(load)
			page := pageOf(t, s)
			c.check(t, page)
			checkHistograms(t, page)
			if err := s.SetQuirks(Quirks{}); err != nil {
				t.Fatal(err)
			}
			plain := pageOf(t, s)
			if v, _ := total(plain, map[string]string{"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs", "trtllm": "trtllm_num_requests_running", "xllm": "num_running_requests"}[c.engine]); v != 7 {
				t.Errorf("without quirks %v are running", v)
			}
		})
	}
}

func TestQuirksThatAreRefused(t *testing.T) {
	for engine, q := range map[string]Quirks{
		"vllm": {TPRanks: 2}, "sglang": {Multiproc: true}, "trtllm": {Ranks: 2}, "xllm": {Priority: true},
	} {
		if _, err := NewServer(Config{Engine: engine, Quirks: q}); err == nil || !strings.Contains(err.Error(), engine+" has none, only") {
			t.Errorf("%s: %v", engine, err)
		}
	}
	s := startServer(t, Config{})
	for _, q := range []Quirks{{Ranks: -1}, {Ranks: 5000}, {Paths: []string{"x"}}, {Extra: map[string]string{"a": "b"}}} {
		if err := s.SetQuirks(q); err == nil {
			t.Errorf("%+v was taken", q)
		}
	}
	if _, err := NewServer(Config{Metrics: MetricsFault{Kind: MetricsFrozen}}); err == nil {
		t.Error("a page frozen before there is one was taken")
	}
}

// What is odd about the way to the page.
func TestPageDelivery(t *testing.T) {
	raw := func(t *testing.T, s *Server, path, accept string) (*http.Response, string) {
		t.Helper()
		req, err := http.NewRequest("GET", "http://"+s.Addr()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept-Encoding", accept)
		c := client(t, false)
		c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		r, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r, string(b)
	}
	on, off := true, false
	for name, c := range map[string]struct {
		engine string
		gzip   *bool
		accept string
		packed bool
	}{
		"vllm": {"vllm", nil, "gzip", false}, "vllm made to": {"vllm", &on, "gzip", true}, "vllm made to, not accepted": {"vllm", &on, "identity", false},
		"sglang": {"sglang", nil, "deflate, gzip", true}, "sglang kept from it": {"sglang", &off, "gzip", false}, "trtllm": {"trtllm", nil, "gzip", true}, "xllm": {"xllm", nil, "gzip", false},
	} {
		s := startServer(t, Config{Engine: c.engine, Quirks: Quirks{Gzip: c.gzip}})
		r, body := raw(t, s, metricsPath[c.engine], c.accept)
		if got := r.Header.Get("Content-Encoding") == "gzip"; got != c.packed {
			t.Errorf("%s: packed %v", name, got)
			continue
		}
		if c.packed {
			z, err := gzip.NewReader(strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(z)
			if err != nil {
				t.Fatal(err)
			}
			body = string(b)
		}
		if len(body) < 1000 || body[0] != '#' {
			t.Errorf("%s: %.30q", name, body)
		}
	}

	s := startServer(t, Config{Engine: "trtllm", Quirks: Quirks{Paths: []string{"/m"}, Cold: true}, Metrics: MetricsFault{Kind: MetricsMoved}})
	if r, _ := raw(t, s, "/m", ""); r.StatusCode != 307 || r.Header.Get("Location") != "http://"+s.Addr()+"/m/" {
		t.Errorf("%d %v", r.StatusCode, r.Header)
	}
	if r, body := raw(t, s, "/m/", ""); r.StatusCode != 200 || body != "" {
		t.Errorf("cold: %d %.30q", r.StatusCode, body)
	}
	if _, _, err := post(client(t, false), s, "/v1/completions", `{"model":"sim-model","prompt":"hi","max_tokens":1}`); err != nil {
		t.Fatal(err)
	}
	if _, body := raw(t, s, "/m/", ""); !strings.Contains(body, "trtllm_num_requests_running") {
		t.Errorf("warm: %.30q", body)
	}
	if r, body := raw(t, s, "/prometheus/metrics", ""); strings.Contains(body, "trtllm_") {
		t.Errorf("the page is where it was: %d", r.StatusCode)
	}
}

func TestQuantile(t *testing.T) {
	h := newHistogram([]float64{1, 2, 4})
	if h.quantile(0.5) != 0 || h.mean() != 0 {
		t.Error("of nothing")
	}
	for _, v := range []float64{0.5, 1.5, 1.5, 3, 9} {
		h.observe(v)
	}
	for q, want := range map[float64]float64{0.2: 1, 0.6: 2, 0.8: 4, 1: 4, 0.4: 1.5} {
		if got := h.quantile(q); math.Abs(got-want) > 1e-9 {
			t.Errorf("%v: %v, want %v", q, got, want)
		}
	}
}

func BenchmarkQuirkyPage(b *testing.B) {
	for name, c := range map[string]Config{
		"vllm": {Quirks: Quirks{Ranks: 2, Sidecar: true}}, "sglang": {Engine: "sglang", Quirks: Quirks{Ranks: 2, TPRanks: 2, Priority: true}},
		"trtllm": {Engine: "trtllm", Quirks: Quirks{Undefined: true}}, "xllm": {Engine: "xllm"},
	} {
		b.Run(name, func(b *testing.B) {
			s := startServer(b, c)
			b.ReportAllocs()
			for b.Loop() {
				if len(s.page()) == 0 {
					b.Fatal("no page")
				}
			}
		})
	}
}
