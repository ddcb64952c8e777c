package sim

import (
	"io"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// metricsPath is where an engine has its page.
var metricsPath = map[string]string{"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics", "xllm": "/brpc_metrics"}

func pageOf(t testing.TB, s *Server) string {
	t.Helper()
	return string(s.page())
}

// value finds one sample by the start of its line, name and labels.
func value(t testing.TB, page, series string) float64 {
	t.Helper()
	found := math.NaN()
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			if found == found {
				t.Errorf("%s twice", series)
			}
			found, _ = strconv.ParseFloat(strings.TrimSpace(rest), 64)
		}
	}
	return found
}

// total adds up a family's samples that hold all parts.
func total(page, name string, parts ...string) (sum float64, n int) {
	for _, f := range parseFamilies(page) {
		for i := range f.samples {
			text := string(f.samples[i].append(nil))
			if f.samples[i].name == name && !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) }) {
				sum += f.samples[i].float()
				n++
			}
		}
	}
	return sum, n
}

// A page read and written again is the same, byte by byte.
func TestFamiliesRoundTrip(t *testing.T) {
	pages := map[string]string{"sglang": sglangPage, "trtllm": trtllmPage, "xllm": xllmPage}
	for _, name := range []string{"vllm_v1.prom", "vllm_lora.prom"} {
		b, err := os.ReadFile("testdata/" + name)
		if err != nil {
			t.Fatal(err)
		}
		pages[name] = string(b)
	}
	for name, page := range pages {
		if got := string(appendFamilies(nil, parseFamilies(page))); got != page {
			t.Errorf("%s changed", name)
		}
	}
	odd := "# TYPE a gauge\na{x=\"1\\\"2,}\",y=\"\"} 1\n# HELP b\n# TYPE b gauge\nb 2\n"
	if got := string(appendFamilies(nil, parseFamilies(odd))); got != odd {
		t.Errorf("%q became %q", odd, got)
	}
}

// Each engine's page has the real one's lines, in their order: names, help,
// types, labels and buckets.
func TestEnginePagesAreLikeTheReal(t *testing.T) {
	for engine, real := range map[string]string{"sglang": sglangPage, "trtllm": trtllmPage, "xllm": xllmPage} {
		t.Run(engine, func(t *testing.T) {
			name := "Qwen/Qwen3-8B"
			if engine == "trtllm" {
				name = "Qwen3-8B"
			}
			s := startServer(t, Config{Engine: engine, Models: []string{name}})
			if status, body, err := post(client(t, false), s, "/v1/completions", `{"model":"`+name+`","prompt":"hi","max_tokens":3}`); err != nil || status != 200 {
				t.Fatal(status, body, err)
			}
			r, err := client(t, false).Get("http://" + s.Addr() + metricsPath[engine])
			if err != nil {
				t.Fatal(err)
			}
			_ = r.Body.Close()
			want := "text/plain; version=1.0.0; charset=utf-8"
			if engine == "xllm" {
				want = "text/plain"
			}
			if got := r.Header.Get("Content-Type"); got != want || r.StatusCode != 200 {
				t.Errorf("status %d, content type %q", r.StatusCode, got)
			}
			page := pageOf(t, s)
			lines := func(page string) []string {
				var out []string
				for line := range strings.Lines(page) {
					if !strings.HasPrefix(line, "#") {
						line = line[:strings.LastIndexByte(line, ' ')]
					}
					out = append(out, strings.TrimSpace(line))
				}
				return out
			}
			a, b := lines(real), lines(page)
			for i := range max(len(a), len(b)) {
				if at(a, i) != at(b, i) {
					t.Fatalf("line %d differs:\nwant %s\ngot  %s", i, at(a, i), at(b, i))
				}
			}
			p := expfmt.NewTextParser(model.LegacyValidation)
			if _, err = p.TextToMetricFamilies(strings.NewReader(page)); (err != nil) != (engine == "xllm") {
				t.Errorf("a strict parser says %v", err) // it stumbles over brpc's quantile="avg"
			}
			checkHistograms(t, page)
		})
	}
}

// checkHistograms: buckets never fall, and the last is the count.
func checkHistograms(t *testing.T, page string) {
	t.Helper()
	for _, f := range parseFamilies(page) {
		if f.kind != "histogram" {
			continue
		}
		last := map[string]float64{}
		for i := range f.samples {
			p := &f.samples[i]
			var key []string
			for _, l := range p.labels {
				if l.name != "le" {
					key = append(key, l.name+l.value)
				}
			}
			id := strings.Join(key, ",")
			if strings.HasSuffix(p.name, "_bucket") {
				if p.float() < last[id] {
					t.Errorf("%s falls: %s", p.name, p.append(nil))
				}
				last[id] = p.float()
			}
			if strings.HasSuffix(p.name, "_count") && len(last) > 0 && p.float() != last[id] {
				t.Errorf("%s is %v, the last bucket %v", p.name, p.float(), last[id])
			}
		}
	}
}

// The values are the engine's: those it pretends to have, and those of what it
// served.
func TestEnginePagesShowTheState(t *testing.T) {
	const sg = `{engine_type="unified",model_name="a\"b",moe_ep_rank="0",pp_rank="0",tp_rank="0"}`
	const trt, pid = `{engine_type="trtllm",model_name="a\"b"}`, `{engine_type="trtllm",model_name="a\"b",pid="12163"}`
	for engine, want := range map[string]map[string]float64{
		"sglang": {
			"sglang:num_running_reqs" + sg: 7, "sglang:num_queue_reqs" + sg: 3, "sglang:token_usage" + sg: 0.25, "sglang:page_size" + sg: 16,
			"sglang:max_total_num_tokens" + sg: 16000, "sglang:fwd_occupancy" + sg: math.NaN(),
			`sglang:num_requests_total{engine_type="unified",is_streaming="false",model_name="a\"b"}`:                                         1,
			`sglang:num_requests_total{engine_type="unified",is_streaming="true",model_name="a\"b"}`:                                          2,
			`sglang:e2e_request_latency_seconds_count{engine_type="unified",is_streaming="true",model_name="a\"b"}`:                           2,
			`sglang:prompt_tokens_histogram_count{engine_type="unified",model_name="a\"b"}`:                                                   3,
			`sglang:generation_tokens_histogram_bucket{engine_type="unified",le="100.0",model_name="a\"b"}`:                                   3,
			`sglang:generation_tokens_histogram_sum{engine_type="unified",model_name="a\"b"}`:                                                 15,
			`sglang:http_requests_total{endpoint="/v1/chat/completions",method="POST"}`:                                                       3,
			`sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="a\"b"}`:                                     10,
			`sglang:routing_key_all_req_count{engine_type="unified",gt="0",le="1",model_name="a\"b",moe_ep_rank="0",pp_rank="0",tp_rank="0"}`: 0,
		},
		"trtllm": {
			"trtllm_num_requests_running" + pid: 7, "trtllm_num_requests_waiting" + pid: 3, "trtllm_kv_cache_utilization" + pid: 0.25,
			"trtllm_kv_cache_max_blocks" + pid: 1000, "trtllm_kv_cache_used_blocks" + pid: 250, "trtllm_kv_cache_free_blocks" + pid: 750, "trtllm_kv_cache_tokens_per_block" + pid: 16,
			`trtllm_request_success_total{engine_type="trtllm",finished_reason="length",model_name="a\"b"}`: 3,
			"trtllm_generation_tokens_total" + trt:                                                          15, "trtllm_time_to_first_token_seconds_count" + trt: 3, "trtllm_request_prefill_time_seconds_count" + trt: 3,
		},
		"xllm": {
			"num_running_requests": 7, "num_waiting_requests": 3, "kv_cache_utilization_perc": 0.25, "num_free_blocks": 750, "num_used_blocks": 250,
			"request_status_total_ok": 3, "num_processing_tokens_total_generated": 15, "end_2_end_latency_milliseconds_count": 3,
			"num_generated_tokens_per_request_latency": 5, "server_request_in_total": 3,
		},
	} {
		t.Run(engine, func(t *testing.T) {
			s := startServer(t, Config{Engine: engine, Models: []string{`a"b`}, MaxModelLen: 8000, Params: Params{Blocks: 1000}})
			for range 3 {
				if status, body, err := post(client(t, false), s, "/v1/chat/completions", `{"model":"a\"b","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}`); err != nil || status != 200 {
					t.Fatal(status, body, err)
				}
			}
			if err := s.Wait(within(t), func(c Counters) bool { return c.InFlight == 0 }); err != nil {
				t.Fatal(err)
			}
			s.drv.ask(func(time.Duration) { s.drv.model.ClearCache() })
			s.SetLoad(Load{Running: 7, Waiting: 3, KVUsage: 0.25})
			page := pageOf(t, s)
			for series, v := range want {
				if got := value(t, page, series); got != v && !(math.IsNaN(got) && math.IsNaN(v) && strings.Contains(page, series+" NaN")) {
					t.Errorf("%s is %v, want %v", series, got, v)
				}
			}
		})
	}
}

func TestCppFormat(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.25: "0.25", 0.137254902: "0.137255", 483920: "483920", 1234500: "1.2345e+06", 100000: "100000", 41900000: "4.19e+07", 0.00001: "1e-05"} {
		if got := cppFormat(v, reader{double: true}); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
	if got := cppFormat(8123473920, reader{}); got != "8123473920" {
		t.Error(got)
	}
}

// TensorRT-LLM's other page, model lists and errors in each engine's form.
func TestEnginesDiffer(t *testing.T) {
	for engine, want := range map[string]struct{ owner, failure string }{
		"vllm": {"vllm", `{"error":{`}, "sglang": {"sglang", `"object":"error"`}, "trtllm": {"tensorrt_llm", `"object":"error"`}, "xllm": {"xllm", "[E404]"},
	} {
		s := startServer(t, Config{Engine: engine})
		c := client(t, false)
		if _, body, err := get(c, "http://"+s.Addr()+"/v1/models"); err != nil || !strings.Contains(body, `"owned_by":"`+want.owner+`"`) {
			t.Errorf("%s: %s %v", engine, body, err)
		}
		if status, body, err := post(c, s, "/v1/completions", `{"model":"nope","prompt":"x"}`); err != nil || status != 404 || !strings.Contains(body, want.failure) {
			t.Errorf("%s: %d %s %v", engine, status, body, err)
		}
		r, body, err := get(c, "http://"+s.Addr()+"/metrics")
		switch {
		case err != nil:
			t.Error(err)
		case engine == "trtllm" && (body != "[]" || r.Header.Get("Content-Type") != "application/json"):
			t.Errorf("trtllm: /metrics is %q", body)
		case engine == "xllm" && r.StatusCode != 404:
			t.Errorf("xllm: /metrics is %d %.40q", r.StatusCode, body)
		}
	}
	if _, err := NewServer(Config{Engine: "tgi"}); err == nil || !strings.Contains(err.Error(), `unknown engine "tgi", valid: vllm, sglang, trtllm, xllm`) {
		t.Error(err)
	}
}

func get(c *http.Client, url string) (*http.Response, string, error) {
	r, err := c.Get(url)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	return r, string(b), err
}
