package sim

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// scrape reads the page of a running server.
func scrape(t testing.TB, s *Server) (*http.Response, string) {
	t.Helper()
	r, err := client(t, false).Get("http://" + s.Addr() + "/metrics")
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

var requestLabels = regexp.MustCompile(`(handler|method|status)="[^"]*"`)

// shape is a page without its values, and without what depends on the requests that came: a series of the HTTP
// families counts once whatever its labels say.
func shape(page string) []string {
	var out []string
	for line := range strings.Lines(page) {
		line = strings.TrimSuffix(line, "\n")
		if !strings.HasPrefix(line, "#") {
			line = line[:strings.LastIndexByte(line, ' ')]
		}
		if strings.HasPrefix(line, "http_") {
			line = requestLabels.ReplaceAllString(line, `$1=""`)
			if slices.Contains(out, line) {
				continue
			}
		}
		if strings.HasPrefix(line, "vllm:lora_requests_info{") {
			line = regexp.MustCompile(`adapters="[^"]*"`).ReplaceAllString(line, `adapters=""`)
			if slices.Contains(out, line) {
				continue
			}
		}
		out = append(out, line)
	}
	return out
}

// The page has every line of a real one, in its order: names, help, types, labels in order, buckets.
func TestPageIsLikeTheReal(t *testing.T) {
	for _, tc := range []struct {
		sample   string
		adapters []string
	}{
		{"vllm_v1.prom", nil},
		{"vllm_lora.prom", []string{"sql-lora", "chat-lora"}},
	} {
		t.Run(tc.sample, func(t *testing.T) {
			const name = "meta-llama/Llama-3.1-8B-Instruct"
			s := startServer(t, Config{Models: []string{name}, Adapters: tc.adapters, MaxModelLen: 8192})
			ask := name
			if len(tc.adapters) > 0 {
				ask = tc.adapters[0]
			}
			if status, body, err := post(client(t, false), s, "/v1/chat/completions", `{"model":"`+ask+`","messages":[{"role":"user","content":"hi"}]}`); err != nil || status != 200 {
				t.Fatal(status, body, err)
			}
			if err := s.Wait(within(t), func(c Counters) bool { return c.InFlight == 0 }); err != nil {
				t.Fatal(err)
			}
			sample, err := os.ReadFile("testdata/" + tc.sample)
			if err != nil {
				t.Fatal(err)
			}
			r, page := scrape(t, s)
			if got := r.Header.Get("Content-Type"); got != "text/plain; version=1.0.0; charset=utf-8" {
				t.Errorf("content type %q", got)
			}
			want, got := shape(string(sample)), shape(page)
			for i := range max(len(want), len(got)) {
				if i >= len(want) || i >= len(got) || want[i] != got[i] {
					t.Fatalf("line %d differs:\nwant %s\ngot  %s", i, at(want, i), at(got, i))
				}
			}
			value := regexp.MustCompile(`^(NaN|[+-]Inf|-?\d+\.\d+(e[+-]\d\d)?|\de[+-]\d\d)$`)
			for line := range strings.Lines(page) {
				if v := strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]); line[0] != '#' && !value.MatchString(v) {
					t.Errorf("%q is not how Python writes a float: %s", v, line)
				}
			}
			p := expfmt.NewTextParser(model.LegacyValidation)
			if _, err := p.TextToMetricFamilies(strings.NewReader(page)); err != nil {
				t.Error(err)
			}
		})
	}
}

func at(s []string, i int) string {
	if i < len(s) {
		return s[i]
	}
	return "nothing"
}

func TestPageShowsTheState(t *testing.T) {
	s := startServer(t, Config{Models: []string{`a"b`}, Adapters: []string{"x", "y"}, Load: Load{Running: 3, Waiting: 4, KVUsage: 0.25}})
	s.SetLoad(Load{Running: 5, Waiting: 4, KVUsage: 0.25, RunningAdapters: []string{"x"}, WaitingAdapters: []string{"y"}})
	s.SetAsleep(true)
	_, page := scrape(t, s)
	for _, line := range []string{
		`vllm:num_requests_running{engine="0",model_name="a\"b"} 5.0`,
		`vllm:num_requests_waiting{engine="0",model_name="a\"b"} 4.0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="a\"b"} 0.25`,
		`vllm:engine_sleep_state{engine="0",model_name="a\"b",sleep_state="awake"} 0.0`,
		`vllm:lora_requests_info{max_lora="4",running_lora_adapters="x",waiting_lora_adapters="y"} 1`,
	} {
		if !strings.Contains(page, "\n"+line) {
			t.Errorf("no line %s", line)
		}
	}
	if s.Counters().Scrapes != 1 || s.Counters().Received != 0 {
		t.Errorf("%+v", s.Counters())
	}
}

func TestMetricsFaults(t *testing.T) {
	s := startServer(t, Config{})
	set := func(f MetricsFault) {
		t.Helper()
		if err := s.SetMetricsFault(f); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		fault  MetricsFault
		status int
		ok     func(string) bool
	}{
		{MetricsFault{Kind: MetricsStatus, Status: 404}, 404, func(b string) bool { return !strings.Contains(b, "vllm:") }},
		{MetricsFault{Kind: MetricsEmpty}, 200, func(b string) bool { return b == "" }},
		{MetricsFault{Kind: MetricsGarbage}, 200, func(b string) bool { return strings.Contains(b, "oops") }},
		{MetricsFault{Kind: MetricsJSON}, 200, func(b string) bool { return b == "[]" }},
		{MetricsFault{Kind: MetricsSlow, Delay: Duration(time.Millisecond)}, 200, func(b string) bool { return strings.Contains(b, "vllm:") }},
		{MetricsFault{Kind: MetricsHuge, Bytes: 1 << 20}, 200, func(b string) bool { return len(b) > 1<<20 && strings.Contains(b, "vllm:") }},
		{MetricsFault{}, 200, func(b string) bool { return len(b) < 1<<20 && strings.Contains(b, "vllm:") }},
	} {
		set(tc.fault)
		r, b := scrape(t, s)
		if r.StatusCode != tc.status || !tc.ok(b) {
			t.Errorf("%+v: status %d, %d bytes", tc.fault, r.StatusCode, len(b))
		}
	}
	set(MetricsFault{Kind: MetricsFrozen})
	s.SetLoad(Load{Running: 77})
	if _, b := scrape(t, s); strings.Contains(b, " 77.0") {
		t.Error("a frozen page moved")
	}
	set(MetricsFault{})
	if _, b := scrape(t, s); !strings.Contains(b, " 77.0") {
		t.Error("the page stayed frozen")
	}
	set(MetricsFault{Kind: MetricsReset})
	if r, err := client(t, false).Get("http://" + s.Addr() + "/metrics"); err == nil {
		_ = r.Body.Close()
		t.Error("no reset")
	}
}

// Values and text of Python 3.11 with prometheus_client's floatToGoString.
func TestPyFloat(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0.0", 3: "3.0", 0.1372549: "0.1372549", 0.001: "0.001", 0.0001: "0.0001", 0.00001: "1e-05", 999999: "999999.0", 1000000: "1e+06",
		1234567.5: "1.2345675e+06", 208224256: "2.08224256e+08", 1.7959870417471797e9: "1.7959870417471797e+09", 2560: "2560.0", -1: "-1.0",
		1e16: "1e+16", 0.6200000000000001: "0.6200000000000001", 100000: "100000.0", 12345678: "1.2345678e+07",
	} {
		if got := string(appendPyFloat(nil, v)); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
	if got := fmt.Sprintf("%s %s %s", appendPyFloat(nil, math.Inf(1)), appendPyFloat(nil, math.Inf(-1)), appendPyFloat(nil, math.NaN())); got != "+Inf -Inf NaN" {
		t.Error(got)
	}
}

func BenchmarkPage(b *testing.B) {
	s := startServer(b, Config{})
	b.ReportAllocs()
	for b.Loop() {
		if !bytes.Contains(s.page(), []byte("vllm:")) {
			b.Fatal("no page")
		}
	}
}
