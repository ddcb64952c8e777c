package metricsync

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/pool"
)

var update = flag.Bool("update", false, "rewrite the golden files and docs/metrics.md; review the diff")

var allEngines = []pool.Engine{pool.EngineVLLM, pool.EngineSGLang, pool.EngineTRTLLM, pool.EngineXLLM}

func rowOf(t *table, m metric) *row {
	for i := range t.rows {
		if t.rows[i].metric == m {
			return &t.rows[i]
		}
	}
	return nil
}

// TestAIBrixTable: every row of AIBrix's table is there under its name, in its
// order, and each cell is the first name that the engine's table tries.
func TestAIBrixTable(t *testing.T) {
	data, err := os.ReadFile("testdata/aibrix.txt")
	if err != nil {
		t.Fatal(err)
	}
	n := metric(0)
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		cells := strings.Fields(line)
		if len(cells) != 5 {
			t.Fatalf("%q has %d cells", line, len(cells))
		}
		if n >= numDefinitions || n.String() != cells[0] {
			t.Fatalf("row %d is %s, want %s", n, n, cells[0])
		}
		for i, e := range allEngines {
			row, want := rowOf(testTables.of(e), n), cells[1+i]
			switch {
			case want == "N/A" && row != nil && row.spec != "":
				t.Errorf("%s, %s: spec name %s, want none", n, e, row.spec)
			case want != "N/A" && (row == nil || row.spec != want || row.names()[0] != want):
				t.Errorf("%s, %s: %+v, want the first name %s", n, e, row, want)
			}
		}
		n++
	}
	if n != 47 || blockSize != 47 {
		t.Errorf("%d rows, want 47, and then %s", n, blockSize)
	}
}

func TestTablesAreWhole(t *testing.T) {
	for _, e := range allEngines {
		table := testTables.of(e)
		if table == nil || len(table.paths) == 0 || table.engine != e || len(table.families) > 255 {
			t.Fatalf("%v: %+v", e, table)
		}
		seen := map[metric]bool{}
		forms := map[string]string{}
		for i, r := range table.rows {
			if seen[r.metric] || len(r.names()) == 0 || len(table.choices[i]) != len(r.names()) {
				t.Errorf("%v: row %s is there twice, or has no name", e, r.metric)
			}
			seen[r.metric] = true
			for _, name := range r.names() {
				form := fmt.Sprint(table.family(name, &r).form, r.where, r.unit)
				if before, ok := forms[name]; ok && before != form {
					t.Errorf("%v: %s is read in two ways", e, name)
				}
				forms[name] = form
			}
		}
		for _, m := range []metric{numRequestsRunning, numRequestsWaiting, kvCacheUsage} {
			if !seen[m] {
				t.Errorf("%v has no row for %v", e, m)
			}
		}
	}
	if testTables.of(pool.EngineUnknown) != nil || testTables.of(pool.EngineXLLM+1) != nil {
		t.Error("an unknown engine has a table")
	}
	for m := pool.Metric(0); m < pool.NumMetrics; m++ {
		if m.String() == "" || m.String() == "unknown" {
			t.Errorf("metric %d has no name", m)
		}
	}
}

const metricsHead = `# Metrics

<!-- Generated from the tables in metricsync: go test ./metricsync -run MetricsPage -update -->

What shunt reads of an engine's metrics page. Policies know a metric by its abstract name alone, which is the same on every
engine. In each cell the first name is the one in AIBrix's table, in bold; behind it are the names that versions of the engine
really export. They are tried in that order, and the first that has a value counts.

` + "`shunt metrics --engine vllm http://10.0.0.1:8000`" + ` prints what is read of one engine, what is missing, and why; with
` + "`--output json`" + ` as one object. It ends with 0 if the page tells the engine's load (` + "`num_requests_running`, `num_requests_waiting`" + ` or
` + "`kv_cache_usage_perc`" + `), with 2 if it does not, and with 1 if there is no page to read. The page may be a URL, a file, or - for stdin.

## Where

| engine label | path | where there are no metrics |
|---|---|---|
`

const metricsTail = `
## Several series

- *sum*: counts. Each data-parallel rank, model, and finish reason has its own series.
- *mean*: ratios of ranks that share the load. *largest*: settings that are the same everywhere, and ratios where the series of
  a dead process may linger. *smallest*: flags; one rank that is asleep is enough, and then the endpoint is not ready.
- *newest*: of the series of ` + "`vllm:lora_requests_info`" + ` the one with the largest value, whatever its age.
- Histograms add up by bound, counters by series.
- SGLang's series that differ in ` + "`tp_rank`, `pp_rank`, `moe_ep_rank` or `pid`" + ` alone are the same requests seen again: the largest
  counts. Those with a ` + "`priority`" + ` are parts of the one whose priority is empty, and count where that is not there.
- Where a page has several models, requests for one of them read its own series; a metric that has none is the pod's. A series
  without a model, and one of the model ` + "`undefined`" + `, is the pod's.
- A series that is there twice counts once, with the larger value. A value below 0 is none: switched off, or nonsense; so is what is infinite,
  or adds up to that. Absent, not a number, stale and zero are four different things: only zero is a value.

## Derived

- Means and percentiles of histograms: of the last minute, or of all time where the last minute had no request.
- Rates of counters over the last minute. A counter that fell, or another ` + "`process_start_time_seconds`" + `, begins the minute anew.
- ` + "`kv_cache_hit_rate`" + ` of vLLM: hits over queries of the last minute.
- xLLM has gauges of a recent window in place of histograms (` + "`_latency`, `_latency_80`, `_latency_90`, `_latency_99`, `_count`" + `), in
  milliseconds: the mean and these percentiles are read, and there is no sum.
`

// metricsPage renders the tables.
func metricsPage() []byte {
	var b bytes.Buffer
	b.WriteString(metricsHead)
	for _, e := range allEngines {
		t := testTables.of(e)
		fmt.Fprintf(&b, "| %s | `%s` | %s |\n", e, strings.Join(t.paths, "`, then `"), t.hint)
	}
	b.WriteString("\n## Names\n\n| metric | kind, unit | vllm | sglang | trtllm | xllm |\n|---|---|---|---|---|---|\n")
	for m := range numDefinitions {
		d := definitions[m]
		fmt.Fprintf(&b, "| `%s` | %s, %s |", d.name, d.kind, d.unit)
		for _, e := range allEngines {
			fmt.Fprintf(&b, " %s |", cell(rowOf(testTables.of(e), m)))
		}
		b.WriteByte('\n')
	}
	b.WriteString(metricsTail)
	return b.Bytes()
}

func cell(r *row) string {
	if r == nil {
		return "–"
	}
	var names []string
	for i, name := range r.names() {
		switch {
		case r.label != "":
			name = "`" + name + "{" + r.label + "}`"
		case r.where.name != "":
			name = fmt.Sprintf("`%s{%s=%q}`", name, r.where.name, r.where.value)
		default:
			name = "`" + name + "`"
		}
		if i == 0 && r.spec != "" {
			name = "**" + name + "**"
		}
		names = append(names, name)
	}
	text := strings.Join(names, ", ")
	if r.rule != sum {
		text += "; " + r.rule.String()
	}
	return text
}

func TestMetricsPage(t *testing.T) {
	checkFile(t, "../docs/metrics.md", metricsPage())
}

// checkFile compares a generated file, or writes it.
func checkFile(t *testing.T, path string, want []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(got, want) {
		return
	}
	have, wanted := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i, line := range wanted {
		if !slices.Contains(have, line) {
			t.Errorf("%s, line %d: the code says\n%s", path, i+1, line)
		}
	}
	t.Errorf("%s is not what the code says: run with -update and review the diff", path)
}
