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

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

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

func parsePage(t testing.TB, e pool.Engine, text string) page {
	t.Helper()
	out, n, err := new(parser).parse(testTables.of(e), strings.NewReader(text), math.MaxInt64, "")
	if err != nil || n != int64(len(text)) {
		t.Fatalf("read %d of %d bytes, %v", n, len(text), err)
	}
	return out
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

func TestSamples(t *testing.T) {
	// Read by eye from the files.
	want := map[string]string{
		"vllm_v0.prom":     "4 1 0.0873",
		"vllm_v1.prom":     "3 1 0.1372549",
		"vllm_v1_dp2.prom": "11 5 0.2922549", // (0.1372549 + 0.4472549) / 2
		"vllm_lora.prom":   "3 1 0.1372549",
		"sglang.prom":      "4 1 0.11",
		"trtllm.prom":      "5 2 0.21875",
		"xllm.prom":        "4 2 0.137255",
	}
	for _, path := range samples(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(path)
		got := parsePage(t, engineOf(t, path), string(data))
		if show(&got.metrics) != want[name] {
			t.Errorf("%s: %s, want %s", name, show(&got.metrics), want[name])
		}
		if got.asleep || got.json {
			t.Errorf("%s: asleep %v, json %v", name, got.asleep, got.json)
		}
		adapters := splitAdapters(got.adapters)
		if name == "vllm_lora.prom" {
			if !slices.Equal(adapters, []string{"sql-lora", "chat-lora", "code-lora"}) {
				t.Errorf("%s: adapters %v", name, adapters)
			}
		} else if len(adapters) != 0 {
			t.Errorf("%s: adapters %v", name, adapters)
		}
	}
}

// TestSamplesAgainstOracle compares with prometheus/common's parser on each
// sample, as it is and disfigured.
func TestSamplesAgainstOracle(t *testing.T) {
	for _, path := range samples(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		engine := engineOf(t, path)
		// The oracle gives up at brpc's quantile="avg".
		var plain []string
		for line := range strings.SplitSeq(strings.TrimSuffix(string(data), "\n"), "\n") {
			if !strings.Contains(line, `quantile="avg"`) {
				plain = append(plain, line)
			}
		}
		want, ok := oracle(engine, strings.Join(plain, "\n")+"\n")
		if !ok || want.Empty() {
			t.Fatalf("%s: the oracle refuses it", path)
		}
		backward := slices.Clone(plain)
		slices.Reverse(backward)
		for how, text := range map[string]string{
			"as it is":               string(data),
			"CRLF":                   strings.ReplaceAll(string(data), "\n", "\r\n"),
			"no final newline":       strings.TrimSuffix(string(data), "\n"),
			"backward":               strings.Join(backward, "\n"),
			"twice as many families": strings.ReplaceAll(string(data), "\n", "\nother_family{a=\"b\"} 1\n"),
			"indented":               "  " + strings.ReplaceAll(string(data), "\n", "\n\t "),
			"timestamps":             strings.Join(stamp(plain), "\n"),
			"long line":              "# " + strings.Repeat("x", 3*maxLine) + "\n" + string(data),
		} {
			got := parsePage(t, engine, text)
			if show(&got.metrics) != show(want) {
				t.Errorf("%s, %s: %s, want %s", path, how, show(&got.metrics), show(want))
			}
		}
		for _, r := range []io.Reader{iotest.OneByteReader(bytes.NewReader(data)), iotest.DataErrReader(bytes.NewReader(data)), iotest.HalfReader(bytes.NewReader(data))} {
			got, _, err := new(parser).parse(newTables().of(engine), r, math.MaxInt64, "")
			if err != nil || show(&got.metrics) != show(want) {
				t.Errorf("%s: in pieces %s, %v, want %s", path, show(&got.metrics), err, show(want))
			}
		}
	}
}

func stamp(lines []string) []string {
	out := slices.Clone(lines)
	for i, l := range out {
		if !strings.HasPrefix(l, "#") {
			out[i] = l + " 1700000000000"
		}
	}
	return out
}

// oracle reads a page the slow way; ok is false where it refuses it.
func oracle(e pool.Engine, text string) (m *pool.Metrics, ok bool) {
	p := expfmt.NewTextParser(model.LegacyValidation)
	families, err := p.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		return nil, false
	}
	t := testTables.of(e)
	m = &pool.Metrics{}
	for _, r := range t.rows {
		for _, name := range r.names {
			if v, ok := oracleValue(t, r.rule, families[name]); ok {
				m.Set(r.metric, v)
				break
			}
		}
	}
	return m, true
}

func oracleValue(t *table, r rule, f *dto.MetricFamily) (float64, bool) {
	byRank := map[string][]float64{}
	var order []string
	for i, s := range f.GetMetric() {
		labels := map[string]string{}
		for _, l := range s.GetLabel() {
			labels[l.GetName()] = l.GetValue()
		}
		v := s.GetGauge().GetValue() + s.GetCounter().GetValue() + s.GetUntyped().GetValue()
		if math.IsNaN(v) || math.IsInf(v, 0) || t.totalLabel != "" && labels[t.totalLabel] != "" {
			continue
		}
		rank := fmt.Sprint(i)
		if t.rankLabel != "" {
			rank = labels[t.rankLabel]
		}
		if byRank[rank] == nil {
			order = append(order, rank)
		}
		byRank[rank] = append(byRank[rank], v)
	}
	var total, most float64
	for i, rank := range order {
		v := slices.Max(byRank[rank])
		total += v
		if i == 0 || v > most {
			most = v
		}
	}
	switch {
	case len(order) == 0:
		return 0, false
	case r == mean:
		return total / float64(len(order)), true
	case r == peak:
		return most, true
	default:
		return total, true
	}
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
		{"negative", pool.EngineVLLM, kv + " -1", "- - -1"},
		{"ranks", pool.EngineVLLM, running + "{engine=\"0\"} 1\n" + running + "{engine=\"1\"} 2", "3 - -"},
		{"spec name first", pool.EngineVLLM, "vllm:gpu_cache_usage_perc 0.9\n" + kv + " 0.1", "- - 0.1"},
		{"alternate", pool.EngineVLLM, kv + " NaN\nvllm:gpu_cache_usage_perc 0.9", "- - 0.9"},
		{"longer name", pool.EngineVLLM, waiting + "_by_reason 9", "- - -"},
		{"shorter name", pool.EngineVLLM, "vllm:num_requests 9", "- - -"},
		{"name after its longer form", pool.EngineVLLM, waiting + "_by_reason 9\n" + waiting + " 1", "- 1 -"},
		{"bad lines between", pool.EngineVLLM, running + "{ 1\n" + running + "{a=b} 1\n" + running + "{a=\"b\" 1\n" + running + "\n" +
			running + " x\n" + running + " 1 x\n" + running + " 1 2 3\n" + running + "{,} 1\n" + running + "{a=\"b\"c=\"d\"} 1\n" + running + " 0x1p4\n" + running + " 1_0\n" + running + " 3\n", "3 - -"},
		{"duplicate TYPE", pool.EngineVLLM, "# TYPE " + running + " gauge\n# TYPE " + running + " gauge\n" + running + " 3", "3 - -"},
		{"other engine's", pool.EngineSGLang, running + " 3", "- - -"},
		{"tensor ranks count once", pool.EngineSGLang, "sglang:num_running_reqs{tp_rank=\"0\"} 4\nsglang:num_running_reqs{tp_rank=\"1\"} 5", "5 - -"},
		{"data ranks sum", pool.EngineSGLang, "sglang:num_running_reqs{dp_rank=\"0\",tp_rank=\"0\"} 4\nsglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"1\"} 5\n" +
			"sglang:num_running_reqs{dp_rank=\"1\",tp_rank=\"2\"} 3", "9 - -"},
		{"mean of data ranks", pool.EngineSGLang, "sglang:token_usage{dp_rank=\"0\"} 0.25\nsglang:token_usage{dp_rank=\"1\"} 0.75", "- - 0.5"},
		{"breakdown by priority", pool.EngineSGLang, "sglang:num_queue_reqs{priority=\"\"} 5\nsglang:num_queue_reqs{priority=\"1\"} 9\nsglang:num_queue_reqs{priority=\"None\"} 2", "- 5 -"},
		{"a dead process", pool.EngineTRTLLM, "trtllm_kv_cache_utilization{pid=\"1\"} 0.2\ntrtllm_kv_cache_utilization{pid=\"2\"} 0.6", "- - 0.6"},
		{"quantile avg", pool.EngineXLLM, "x{quantile=\"avg\"} 1\nnum_running_requests 2\nkv_cache_utilization_perc 0.5", "2 - 0.5"},
		{"JSON", pool.EngineTRTLLM, "[]", "- - -"},
	} {
		got := parsePage(t, c.engine, c.text)
		if show(&got.metrics) != c.want {
			t.Errorf("%s: %s, want %s", c.name, show(&got.metrics), c.want)
		}
		if got.json != (c.name == "JSON") {
			t.Errorf("%s: json is %v", c.name, got.json)
		}
	}
}

func TestParserForgets(t *testing.T) {
	tables := newTables()
	var p parser
	feed := func(e pool.Engine, text string) page {
		out, _, err := p.parse(tables.of(e), strings.NewReader(text), 1<<20, "")
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	feed(pool.EngineVLLM, "vllm:num_requests_running 1\nvllm:lora_requests_info{running_lora_adapters=\"a\"} 9\nvllm:engine_sleep_state{sleep_state=\"awake\"} 0\n[")
	feed(pool.EngineSGLang, "sglang:num_running_reqs{dp_rank=\"0\"} 3")
	got := feed(pool.EngineVLLM, "{\nvllm:num_requests_waiting 2")
	if show(&got.metrics) != "- 2 -" || got.hasLoRA || got.asleep || !got.json {
		t.Errorf("got %s, %+v", show(&got.metrics), got)
	}
	if got := feed(pool.EngineSGLang, "sglang:num_running_reqs{dp_rank=\"0\"} 1"); show(&got.metrics) != "1 - -" {
		t.Errorf("got %s", show(&got.metrics))
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
		{"both lists", line("a", "a, b", "1"), []string{"a", "b"}},
		{"escaped", line(`a\"b`, `c\\d`, "1"), []string{`a"b`, `c\d`}},
	} {
		got := parsePage(t, pool.EngineVLLM, c.text)
		if names := splitAdapters(got.adapters); !slices.Equal(names, c.want) || got.hasLoRA != (c.text != "") {
			t.Errorf("%s: %q, want %q", c.name, names, c.want)
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
	var p parser
	_, n, err := p.parse(newTables().of(pool.EngineVLLM), strings.NewReader(text), 50000, "")
	if !errors.Is(err, errTooLarge) || n > 50000+bufferSize {
		t.Errorf("read %d, %v", n, err)
	}
	if _, _, err := p.parse(newTables().of(pool.EngineVLLM), strings.NewReader(text), int64(len(text)), ""); err != nil {
		t.Errorf("a page of just the limit: %v", err)
	}
	// A line without end costs no more than maxLine.
	if _, _, err := p.parse(newTables().of(pool.EngineVLLM), io.LimitReader(endless{}, 8*maxLine), math.MaxInt64, ""); err != nil || len(p.buf) > maxLine {
		t.Errorf("%d bytes of buffer, %v", len(p.buf), err)
	}
	if _, _, err := p.parse(newTables().of(pool.EngineVLLM), iotest.ErrReader(io.ErrUnexpectedEOF), 10, ""); !errors.Is(err, io.ErrUnexpectedEOF) {
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

func TestTablesAreWhole(t *testing.T) {
	tables := newTables()
	for e := pool.EngineVLLM; e <= pool.EngineXLLM; e++ {
		table := tables.of(e)
		if table == nil || len(table.paths) == 0 || len(table.families) < table.size() {
			t.Fatalf("%v: %+v", e, table)
		}
		for _, m := range readings {
			if !slices.ContainsFunc(table.rows, func(r row) bool { return r.metric == m }) {
				t.Errorf("%v has no row for %v", e, m)
			}
		}
	}
	if tables.of(pool.EngineUnknown) != nil || tables.of(pool.EngineXLLM+1) != nil {
		t.Error("an unknown engine has a table")
	}
}

func TestParseAllocates(t *testing.T) {
	data, err := os.ReadFile("testdata/vllm_v1.prom")
	if err != nil {
		t.Fatal(err)
	}
	var p parser
	table := newTables().of(pool.EngineVLLM)
	r := bytes.NewReader(data)
	if n := testing.AllocsPerRun(100, func() {
		r.Reset(data)
		if _, _, err := p.parse(table, r, 1<<20, ""); err != nil {
			t.Fatal(err)
		}
	}); n > 4 {
		t.Errorf("%v allocations a page", n)
	}
}

func FuzzParse(f *testing.F) {
	for _, path := range samples(f) {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		table := newTables().of(engineOf(f, path))
		var wanted []string // few enough for the fuzzer to move them about
		for line := range strings.Lines(string(data)) {
			for name := range table.families {
				if strings.Contains(line, name) {
					wanted = append(wanted, line)
				}
			}
		}
		f.Add(uint8(engineOf(f, path)), strings.Join(wanted, ""))
	}
	f.Add(uint8(1), "vllm:num_requests_running{a=\"\\\"}\\n\",} NaN 1\r\nvllm:num_requests_running 1e999")
	f.Fuzz(func(t *testing.T, engine uint8, text string) {
		e := pool.EngineVLLM + pool.Engine(engine)%(pool.EngineXLLM)
		got := parsePage(t, e, text)
		want, ok := oracle(e, text)
		if !ok || differs(e, text) {
			return
		}
		for _, m := range readings {
			g, gok := got.metrics.Get(m)
			w, wok := want.Get(m)
			if gok != wok || gok && math.Abs(g-w) > 1e-9*math.Abs(w) {
				t.Errorf("%v: got %s, want %s", m, show(&got.metrics), show(want))
			}
		}
	})
}

// differs tells what the oracle reads in another way on purpose: UTF-8 names,
// and wanted names that are declared to be what they are not.
func differs(e pool.Engine, text string) bool {
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimLeft(line, " \t")
		if strings.HasPrefix(line, "{") || strings.Contains(line, `{"`) || strings.Contains(line, `,"`) {
			return true
		}
		if strings.HasPrefix(line, "#") && (strings.Contains(line, "histogram") || strings.Contains(line, "summary")) {
			return true
		}
	}
	return false
}

func BenchmarkParse(b *testing.B) {
	for _, path := range samples(b) {
		data, err := os.ReadFile(path)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(filepath.Base(path), func(b *testing.B) {
			var p parser
			table := newTables().of(engineOf(b, path))
			r := bytes.NewReader(data)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				r.Reset(data)
				if _, _, err := p.parse(table, r, 1<<24, ""); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
