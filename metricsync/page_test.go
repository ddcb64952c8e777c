package metricsync

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

var testTables = newTables()

var readings = []pool.Metric{pool.NumRequestsRunning, pool.NumRequestsWaiting, pool.KVCacheUsagePerc}

// engineOf tells the engine of a sample by its name.
func engineOf(t testing.TB, path string) pool.Engine {
	t.Helper()
	name, _, _ := strings.Cut(strings.TrimSuffix(filepath.Base(path), ".prom"), "_")
	e, err := pool.ParseEngine(name)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// read is a page as tests look at it.
type read struct {
	metrics  *pool.Metrics
	adapters adapters
	asleep   bool
	json     bool
}

func (p *parser) look(h *history) read {
	p.reading.reduce(&p.page, anyModel)
	a := p.reading.adapters(adapters{})
	return read{p.columns(h, a, time.Time{}), a, p.reading.asleep(), p.json()}
}

func parsed(t testing.TB, e pool.Engine, text string) *parser {
	t.Helper()
	p := newParser(testTables.of(e))
	n, err := p.parse(strings.NewReader(text), math.MaxInt64)
	if err != nil || n != int64(len(text)) {
		t.Fatalf("read %d of %d bytes, %v", n, len(text), err)
	}
	return p
}

func parsePage(t testing.TB, e pool.Engine, text string) read {
	t.Helper()
	return parsed(t, e, text).look(nil)
}

// show renders readings, "-" for none.
func show(m *pool.Metrics) string {
	var parts []string
	for _, name := range readings {
		if v, ok := m.Get(name); ok {
			parts = append(parts, fmt.Sprint(v))
		} else {
			parts = append(parts, "-")
		}
	}
	return strings.Join(parts, " ")
}

func samples(t testing.TB) []string {
	t.Helper()
	paths, err := filepath.Glob("testdata/*.prom")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no samples: %v", err)
	}
	return paths
}

func TestParse(t *testing.T) {
	const running, waiting, kv = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
	for _, c := range []struct {
		name   string
		engine pool.Engine
		text   string
		want   string
	}{
		{"empty", pool.EngineVLLM, "", "- - -"},
		{"no label", pool.EngineVLLM, running + " 3", "3 - -"},
		{"empty labels", pool.EngineVLLM, running + "{} 3", "3 - -"},
		{"trailing comma", pool.EngineVLLM, running + `{a="b",} 3`, "3 - -"},
		{"blanks", pool.EngineVLLM, running + " \t{ a = \"b\" , c=\"d\" }  3  ", "3 - -"},
		{"escapes", pool.EngineVLLM, running + `{a="\"} 7 \\",b="\n"} 3`, "3 - -"},
		{"timestamp", pool.EngineVLLM, running + " 3 -17", "3 - -"},
		{"zero is a reading", pool.EngineVLLM, running + " 0.0\n" + waiting + " 0", "0 0 -"},
		{"NaN is none", pool.EngineVLLM, running + " NaN", "- - -"},
		{"NaN of one rank", pool.EngineVLLM, kv + "{engine=\"0\"} NaN\n" + kv + "{engine=\"1\"} 0.5", "- - 0.5"},
		{"infinity is none", pool.EngineVLLM, running + " +Inf", "- - -"},
		{"exponent", pool.EngineVLLM, running + " 1.5e+02", "150 - -"},
		{"negative share is switched off", pool.EngineVLLM, kv + " -1", "- - -"},
		{"a negative count is none", pool.EngineVLLM, waiting + " -1\n" + running + " 2", "2 - -"},
		{"overflow is none", pool.EngineVLLM, waiting + " 1e999\n" + running + " -1e999\n" + kv + " 1e-999", "- - 0"},
		{"NUL in a name, a label and a value", pool.EngineVLLM, waiting + "\x00 1\n" + running + "{a=\"\x00\"} 2\n" + kv + " 0.5\x00", "2 - -"},
		{"twice counts once", pool.EngineVLLM, running + "{engine=\"0\"} 3\n" + waiting + " 1\n" + running + "{engine=\"0\"} 3", "3 1 -"},
		{"ranks", pool.EngineVLLM, running + "{engine=\"0\"} 1\n" + running + "{engine=\"1\"} 2", "3 - -"},
		{"spec name first", pool.EngineVLLM, "vllm:gpu_cache_usage_perc 0.9\n" + kv + " 0.1", "- - 0.1"},
		{"alternate", pool.EngineVLLM, kv + " NaN\nvllm:gpu_cache_usage_perc 0.9", "- - 0.9"},
		{"the larger of two values of one series", pool.EngineVLLM, running + "{engine=\"0\"} 4\n" + running + "{engine=\"0\"} 3", "4 - -"},
		{"beyond a float", pool.EngineVLLM, running + "{engine=\"0\"} 1e308\n" + running + "{engine=\"1\"} 1e308\n" + kv + " 1e308", "- - 1e+308"},
		{"beyond a float, and an alternate", pool.EngineVLLM, kv + "{engine=\"0\"} 1e308\n" + kv + "{engine=\"1\"} 1e308\nvllm:gpu_cache_usage_perc 0.5", "- - 0.5"},
		{"byte order mark", pool.EngineVLLM, "\xef\xbb\xbf" + running + " 3\n", "3 - -"},
		{"byte order mark alone", pool.EngineVLLM, "\xef\xbb\xbf\n" + running + " 3\n", "3 - -"},
		{"longer name", pool.EngineVLLM, waiting + "_by_reason 9", "- - -"},
		{"shorter name", pool.EngineVLLM, "vllm:num_requests 9", "- - -"},
		{"name after its longer form", pool.EngineVLLM, waiting + "_by_reason 9\n" + waiting + " 1", "- 1 -"},
		{"name after its shorter form", pool.EngineVLLM, "vllm:num_requests 9\n" + waiting + " 1\n", "- 1 -"},
		{"bad lines between", pool.EngineVLLM, running + "{ 1\n" + running + "{a=b} 1\n" + running + "{a=\"b\" 1\n" + running + "\n" +
			running + " x\n" + running + " 1 x\n" + running + " 1 2 3\n" + running + "{,} 1\n" + running + "{a=\"b\"c=\"d\"} 1\n" + running + " 0x1p4\n" + running + " 1_0\n" + running + " 3\n", "3 - -"},
		{"duplicate TYPE", pool.EngineVLLM, "# TYPE " + running + " gauge\n# TYPE " + running + " gauge\n" + running + " 3", "3 - -"},
		{"other engine's", pool.EngineSGLang, running + " 3", "- - -"},
		{"tensor ranks count once", pool.EngineSGLang, "sglang:num_running_reqs{tp_rank=\"0\"} 4\nsglang:num_running_reqs{tp_rank=\"1\"} 5", "5 - -"},
		{"tensor ranks, their labels in any order", pool.EngineSGLang, "sglang:num_running_reqs{dp_rank=\"1\",a=\"b\",tp_rank=\"0\"} 4\nsglang:num_running_reqs{a=\"b\",tp_rank=\"1\",dp_rank=\"1\"} 5", "5 - -"},
		{"data ranks sum", pool.EngineSGLang, "sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"0\"} 4\nsglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"1\"} 5\n" +
			"sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"2\"} 3", "9 - -"},
		{"mean of data ranks", pool.EngineSGLang, "sglang:token_usage{dp_rank=\"0\"} 0.25\nsglang:token_usage{dp_rank=\"1\"} 0.75", "- - 0.5"},
		{"breakdown by priority", pool.EngineSGLang, "sglang:num_queue_reqs{priority=\"\"} 5\nsglang:num_queue_reqs{priority=\"1\"} 9\nsglang:num_queue_reqs{priority=\"None\"} 2", "- 5 -"},
		{"breakdown without a total", pool.EngineSGLang, "sglang:num_queue_reqs{priority=\"1\"} 9\nsglang:num_queue_reqs{priority=\"None\"} 2", "- 11 -"},
		{"breakdown and a total that is NaN", pool.EngineSGLang, "sglang:num_queue_reqs{priority=\"\"} NaN\nsglang:num_queue_reqs{priority=\"1\"} 9", "- 9 -"},
		{"a dead process", pool.EngineTRTLLM, "trtllm_kv_cache_utilization{pid=\"1\"} 0.2\ntrtllm_kv_cache_utilization{pid=\"2\"} 0.6", "- - 0.6"},
		{"quantile avg", pool.EngineXLLM, "x{quantile=\"avg\"} 1\nnum_running_requests 2\nkv_cache_utilization_perc 0.5", "2 - 0.5"},
		{"JSON", pool.EngineTRTLLM, "[]", "- - -"},
	} {
		got := parsePage(t, c.engine, c.text)
		if show(got.metrics) != c.want {
			t.Errorf("%s: %s, want %s", c.name, show(got.metrics), c.want)
		}
		if got.json != (c.name == "JSON") {
			t.Errorf("%s: json is %v", c.name, got.json)
		}
	}
}

func TestParserForgets(t *testing.T) {
	vllm, sglang := newParser(testTables.of(pool.EngineVLLM)), newParser(testTables.of(pool.EngineSGLang))
	feed := func(p *parser, text string) read {
		if _, err := p.parse(strings.NewReader(text), 1<<20); err != nil {
			t.Fatal(err)
		}
		return p.look(nil)
	}
	feed(vllm, "vllm:num_requests_running 1\nvllm:lora_requests_info{running_lora_adapters=\"a\"} 9\nvllm:engine_sleep_state{sleep_state=\"awake\"} 0\n"+
		"vllm:time_to_first_token_seconds_bucket{le=\"1\",model_name=\"x\"} 5\nvllm:time_to_first_token_seconds_bucket{le=\"7\",model_name=\"y\"} 5\n[")
	got := feed(vllm, "{\nvllm:num_requests_waiting 2\nvllm:time_to_first_token_seconds_bucket{le=\"2\"} 4\n")
	if show(got.metrics) != "- 2 -" || got.adapters.running != nil || got.asleep || !got.json || len(got.metrics.Models) > 0 {
		t.Errorf("got %s, %+v", show(got.metrics), got)
	}
	if d := vllm.reading.of(timeToFirstToken); d == nil || !slices.Equal(d.bounds, []float64{2}) || !slices.Equal(d.counts, []float64{4}) {
		t.Errorf("got %+v", d)
	}
	vllm = newParser(testTables.of(pool.EngineVLLM))
	feed(vllm, "vllm:time_to_first_token_seconds_bucket{le=\"1\"} 1\nvllm:time_to_first_token_seconds_bucket{le=\"2\"} 2\n")
	feed(vllm, "vllm:time_to_first_token_seconds_bucket{le=\"2\"} 2\n")
	if d := vllm.reading.of(timeToFirstToken); d == nil || !slices.Equal(d.bounds, []float64{2}) || !slices.Equal(d.counts, []float64{2}) {
		t.Errorf("got %+v", d)
	}
	feed(vllm, "vllm:num_requests 1\n")
	if got := feed(vllm, "vllm:num_requests_waiting 2\n"); show(got.metrics) != "- 2 -" {
		t.Errorf("a longer name in the place of a shorter one: got %s", show(got.metrics))
	}
	vllm = newParser(testTables.of(pool.EngineVLLM))
	feed(vllm, "vllm:num_requests_waiting{engine=\"0\"} 1\nvllm:num_requests_waiting{engine=\"1\"} 2\n")
	if got := feed(vllm, strings.Repeat("vllm:num_requests_waiting{engine=\"7\"} 4\n", 2)); show(got.metrics) != "- 4 -" {
		t.Errorf("one series in the places of two: got %s", show(got.metrics))
	}
	const bucket = "vllm:time_to_first_token_seconds_bucket"
	feed(vllm, bucket+"{le=\"1\",model_name=\"a\"} 1\n"+bucket+"{le=\"2\",model_name=\"a\"} 1\n")
	feed(vllm, bucket+"{le=\"1\",model_name=\"a\"} 1\n"+bucket+"{le=\"2\",model_name=\"b\"} 5\n"+bucket+"{le=\"2\",model_name=\"a\"} 3\n")
	if d := vllm.reading.of(timeToFirstToken); d == nil || !slices.Equal(d.counts, []float64{1, 8}) {
		t.Errorf("buckets of two models: got %+v", d)
	}
	feed(sglang, "sglang:num_running_reqs{dp_rank=\"0\"} 3")
	if got := feed(sglang, "sglang:num_running_reqs{dp_rank=\"0\"} 1"); show(got.metrics) != "1 - -" {
		t.Errorf("got %s", show(got.metrics))
	}
}

func TestAdapters(t *testing.T) {
	line := func(running, waiting, value string) string {
		return `vllm:lora_requests_info{max_lora="4",running_lora_adapters="` + running + `",waiting_lora_adapters="` + waiting + `"} ` + value + "\n"
	}
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"none", "", nil},
		{"idle", line("", "", "1.7e9"), nil},
		{"newest by value", line("old", "", "1.0e9") + line("a,b", "c", "3.0e9") + line("older", "", "2.0e9"), []string{"a", "b", "c"}},
		{"NaN is not newest", line("a", "", "NaN") + line("b", "", "1"), []string{"b"}},
		{"both lists", line("a,a", "a, b", "1"), []string{"a", "a", "b"}},
		{"escaped", line(`a\"b`, `c\\d`, "1"), []string{`a"b`, `c\d`}},
	} {
		got := parsePage(t, pool.EngineVLLM, c.text)
		names := slices.Concat(got.adapters.running, got.adapters.waiting)
		if !slices.Equal(names, c.want) || (got.metrics.LoRA.Max == 4) != (c.text != "") {
			t.Errorf("%s: %q, want %q; %+v", c.name, names, c.want, got.metrics.LoRA)
		}
	}
}

func TestSleepState(t *testing.T) {
	line := func(engine, state, v string) string {
		return `vllm:engine_sleep_state{engine="` + engine + `",sleep_state="` + state + `"} ` + v + "\n"
	}
	for text, want := range map[string]bool{
		"":                        false,
		line("0", "awake", "1.0"): false,
		line("0", "awake", "0.0"): true,
		line("0", "discard_all", "0.0") + line("0", "awake", "1.0"): false,
		line("0", "awake", "1.0") + line("1", "awake", "0.0"):       true,
	} {
		if got := parsePage(t, pool.EngineVLLM, text); got.asleep != want {
			t.Errorf("%q: asleep is %v", text, got.asleep)
		}
	}
}

func TestParseStopsAtTheLimit(t *testing.T) {
	text := strings.Repeat("vllm:num_requests_running 1\n", 10000)
	p := newParser(testTables.of(pool.EngineVLLM))
	n, err := p.parse(strings.NewReader(text), 50000)
	if !errors.Is(err, errTooLarge) || n > 50000+bufferSize {
		t.Errorf("read %d, %v", n, err)
	}
	if _, err := p.parse(strings.NewReader(text), int64(len(text))); err != nil {
		t.Errorf("a page of just the limit: %v", err)
	}
	// A line without end costs no more than maxLine.
	if _, err := p.parse(io.LimitReader(endless{}, 8*maxLine), math.MaxInt64); err != nil || len(p.buf) > maxLine {
		t.Errorf("%d bytes of buffer, %v", len(p.buf), err)
	}
	if _, err := p.parse(iotest.ErrReader(io.ErrUnexpectedEOF), 10); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a broken connection gives %v", err)
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = 'v'
	}
	return len(b), nil
}

// TestParseAllocates: what a scrape does with a page, but for the connection.
func TestParseAllocates(t *testing.T) {
	for _, path := range samples(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		p := newParser(testTables.of(engineOf(t, path)))
		r := bytes.NewReader(data)
		var h history
		var a adapters
		now := time.Now()
		if n := testing.AllocsPerRun(100, func() { oneScrape(t, p, r, data, true, &h, &a, &now) }); n > 4 {
			t.Errorf("%s: %v allocations a page", path, n)
		}
	}
}

func oneScrape(t testing.TB, p *parser, r *bytes.Reader, data []byte, buckets bool, h *history, a *adapters, now *time.Time) {
	r.Reset(data)
	p.noBuckets = !buckets
	if _, err := p.parse(r, 1<<24); err != nil {
		t.Fatal(err)
	}
	*now = now.Add(time.Second)
	p.reading.reduce(&p.page, anyModel)
	*a = p.reading.adapters(*a)
	h.observe(&p.reading, buckets, *now)
	if p.columns(h, *a, *now).Empty() {
		t.Fatal("empty")
	}
}

// BenchmarkParse is what a scrape does with a page, but for the connection. One
// scrape in ten or so reads the buckets of histograms (history.due).
func BenchmarkParse(b *testing.B) {
	for _, path := range samples(b) {
		data, err := os.ReadFile(path)
		if err != nil {
			b.Fatal(err)
		}
		for name, buckets := range map[string]bool{"with-buckets": true, "without": false} {
			b.Run(filepath.Base(path)+"/"+name, func(b *testing.B) {
				p := newParser(testTables.of(engineOf(b, path)))
				r := bytes.NewReader(data)
				var h history
				var a adapters
				now := time.Now()
				b.SetBytes(int64(len(data)))
				used := cpu(b)
				b.ReportAllocs()
				for b.Loop() {
					oneScrape(b, p, r, data, buckets, &h, &a, &now)
				}
				b.ReportMetric(float64((cpu(b)-used).Nanoseconds())/1e3/float64(b.N), "cpu-us/op")
			})
		}
	}
}
