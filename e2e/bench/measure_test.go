package main

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestScheduleIgnoresStalls(t *testing.T) {
	s := schedule{rate: 1000}
	if at, ok := s.take(0); !ok || at != 0 {
		t.Fatalf("first: %v, %v", at, ok)
	}
	if at, ok := s.take(999 * time.Microsecond); ok {
		t.Fatalf("early: %v", at)
	}
	// A second passes before anyone asks again: a thousand requests are due, each at its own time.
	for i := 1; i <= 1000; i++ {
		at, ok := s.take(time.Second)
		if want := time.Duration(i) * time.Millisecond; !ok || at.Round(time.Microsecond) != want {
			t.Fatalf("request %d: %v, %v, want %v", i, at, ok, want)
		}
	}
	if at, ok := s.take(time.Second); ok {
		t.Fatalf("one too many: %v", at)
	}
}

func TestScheduleDoesNotDrift(t *testing.T) {
	s := schedule{rate: 4533.7, next: 4533.7 * 1000}
	if got := s.due(); (got - 1000*time.Second).Abs() > time.Millisecond {
		t.Errorf("after 1,000 s of requests: %v", got)
	}
}

func TestPercentileAgainstCounting(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		v := make([]time.Duration, 1+rng.IntN(250))
		for i := range v {
			v[i] = time.Duration(rng.IntN(40))
		}
		slices.Sort(v)
		percent := 1 + rng.IntN(100)
		// The smallest value that at least percent of all don't exceed.
		var want time.Duration
		for _, candidate := range v {
			covered := 0
			for _, x := range v {
				if x <= candidate {
					covered++
				}
			}
			if covered*100 >= percent*len(v) {
				want = candidate
				break
			}
		}
		if got := percentile(v, float64(percent)/100); got != want {
			t.Fatalf("p%d of %v = %v, want %v", percent, v, got, want)
		}
	}
	if got := percentile(nil, 0.5); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		in   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 9, 2}, 3}} {
		if got := median(c.in); got != c.want {
			t.Errorf("median(%v) = %v, want %v", c.in, got, c.want)
		}
	}
	if !math.IsNaN(median(nil)) {
		t.Error("median of nothing is a number")
	}
}

func TestSummarize(t *testing.T) {
	lat := make([]time.Duration, 100)
	for i := range lat {
		lat[99-i] = time.Duration(i+1) * time.Millisecond
	}
	got := summarize(500, 2*time.Second, 50*time.Millisecond, lat)
	if want := (sample{rps: 250, cpuUs: 100, p50Ms: 50, p99Ms: 99}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestWindowIsHalfOpen(t *testing.T) {
	w := window{10, 20}
	for at, want := range map[time.Duration]bool{9: false, 10: true, 19: true, 20: false} {
		if w.has(at) != want {
			t.Errorf("has(%d) = %v", at, !want)
		}
	}
}

func TestParseBusy(t *testing.T) {
	got, err := parseBusy([]byte("cpu  100 10 50 9999 888 7 3 30 77 66\ncpu0 1 1 1\n"))
	if err != nil || got != 2*time.Second {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := parseBusy([]byte("intr 1")); err == nil {
		t.Error("no error")
	}
}

func row(caseName, load string, rps, cpu, p50, p99 float64) result {
	return result{Case: caseName, Body: "1k", Load: load, Reps: 5, RPS: rps, CPU: cpu, P50: p50, P99: p99}
}

func TestCombine(t *testing.T) {
	got := combine("bare", "1k", "sat", []sample{{10, 5, 1, 9, 0}, {30, 3, 2, 7, 0}, {20, 4, 3, 8, 0}})
	want := result{"bare", "1k", "sat", 3, 20, 10, 30, 4, 3, 5, 2, 8, 0}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestBudgets(t *testing.T) {
	results := []result{
		row("bare", "sat", 1000, 90, 1, 2), row("floor", "sat", 800, 110, 1, 2),
		row("floor", "rate", 1000, 300, 1, 2), row("bare", "half", 500, 100, 1.0, 2.0), row("bare", "low", 30, 500, 1, 2),
	}
	for name, c := range map[string]struct {
		stock  []result
		missed int
		over   []string
	}{
		"within": {[]result{row("stock", "sat", 760, 110, 1, 2), row("stock", "rate", 1000, 300, 1, 2)}, 0, nil},
		"CPU":    {[]result{row("stock", "sat", 800, 111, 1, 2), row("stock", "rate", 1000, 301, 1, 2)}, 2, []string{"1k sat: CPU / floor's", "1k rate: CPU / floor's"}},
		"rps":    {[]result{row("stock", "sat", 759, 100, 1, 2)}, 1, []string{"1k sat: requests/s / floor's"}},
		"reported only": {[]result{row("stock", "half", 500, 100, 1.09, 2.41), row("stock", "low", 30, 1001, 1, 2)}, 0,
			[]string{"1k low: CPU / bare's", "1k half: p50 / bare's", "1k half: p99 / bare's"}},
		"no stock": {nil, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			list := budgets(append(slices.Clone(results), c.stock...))
			var out bytes.Buffer
			if missed := printBudgets(&out, list); missed != c.missed {
				t.Errorf("missed %d, want %d", missed, c.missed)
			}
			var over []string
			for _, b := range list {
				if !b.met() {
					over = append(over, b.what)
				}
			}
			if !slices.Equal(over, c.over) {
				t.Errorf("over %q, want %q", over, c.over)
			}
			if strings.Count(out.String(), "OVER") != len(c.over) {
				t.Errorf("printed:\n%s", &out)
			}
		})
	}
}

func TestJSONShape(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bench.json")
	if err := writeJSON(path, []result{{"stock", "256k", "half", 5, 1, 2, 3, 4, 5, 6, 7, 8, 0}}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, b); err != nil {
		t.Fatal(err)
	}
	want := `{"results":[{"case":"stock","body":"256k","load":"half","reps":5,"rps":1,"rps_min":2,"rps_max":3,` +
		`"cpu_us":4,"cpu_us_min":5,"cpu_us_max":6,"p50_ms":7,"p99_ms":8}]}`
	if compact.String() != want {
		t.Errorf("got %s", &compact)
	}
}

func TestTableHasEveryRow(t *testing.T) {
	var out bytes.Buffer
	if err := printTable(&out, []result{row("bare", "sat", 1000, 90, 1, 2), row("floor", "sat", 800, 108, 1, 2)}); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || !strings.Contains(lines[2], "0.80") || !strings.Contains(lines[2], "1.20") || !strings.Contains(lines[2], "+18") {
		t.Errorf("table:\n%s", &out)
	}
}
