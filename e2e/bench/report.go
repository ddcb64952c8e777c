package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
)

// result is one row: the medians, and for two of them the extremes, over the repetitions.
type result struct {
	Case   string  `json:"case"`
	Body   string  `json:"body"`
	Load   string  `json:"load"`
	Reps   int     `json:"reps"`
	RPS    float64 `json:"rps"`
	RPSMin float64 `json:"rps_min"`
	RPSMax float64 `json:"rps_max"`
	CPU    float64 `json:"cpu_us"`
	CPUMin float64 `json:"cpu_us_min"`
	CPUMax float64 `json:"cpu_us_max"`
	P50    float64 `json:"p50_ms"`
	P99    float64 `json:"p99_ms"`
	// Crossings are calls between Envoy and the Go module per request, where the case counts them.
	Crossings float64 `json:"crossings,omitempty"`
}

func combine(caseName, body, loadName string, samples []sample) result {
	each := func(get func(sample) float64) []float64 {
		values := make([]float64, len(samples))
		for i, s := range samples {
			values[i] = get(s)
		}
		return values
	}
	rps := each(func(s sample) float64 { return s.rps })
	cpu := each(func(s sample) float64 { return s.cpuUs })
	return result{
		Case: caseName, Body: body, Load: loadName, Reps: len(samples),
		RPS: median(rps), RPSMin: slices.Min(rps), RPSMax: slices.Max(rps),
		CPU: median(cpu), CPUMin: slices.Min(cpu), CPUMax: slices.Max(cpu),
		P50: median(each(func(s sample) float64 { return s.p50Ms })),
		P99: median(each(func(s sample) float64 { return s.p99Ms })), Crossings: median(each(func(s sample) float64 { return s.crossings })),
	}
}

// find returns the row of a case for one body and load.
func find(results []result, caseName, body, loadName string) (result, bool) {
	i := slices.IndexFunc(results, func(r result) bool { return r.Case == caseName && r.Body == body && r.Load == loadName })
	if i < 0 {
		return result{}, false
	}
	return results[i], true
}

// printTable writes the rows with their ratios to bare Envoy and to the floor.
func printTable(w io.Writer, results []result) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "body\tload\tcase\treq/s\t(min–max)\tCPU µs/req\t(min–max)\tp50 ms\tp99 ms\t│ req/s\tCPU\t+µs\tp50\tp99 ×bare\t│ req/s\tCPU ×floor\t│ crossings\t")
	for _, r := range results {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%.0f\t(%.0f–%.0f)\t%.1f\t(%.1f–%.1f)\t%.2f\t%.2f\t", r.Body, r.Load, r.Case,
			r.RPS, r.RPSMin, r.RPSMax, r.CPU, r.CPUMin, r.CPUMax, r.P50, r.P99)
		if b, ok := find(results, "bare", r.Body, r.Load); ok {
			fmt.Fprintf(tw, "│ %.2f\t%.2f\t%+.0f\t%.2f\t%.2f\t", r.RPS/b.RPS, r.CPU/b.CPU, r.CPU-b.CPU, r.P50/b.P50, r.P99/b.P99)
		} else {
			fmt.Fprint(tw, "│\t\t\t\t\t")
		}
		if f, ok := find(results, "floor", r.Body, r.Load); ok {
			fmt.Fprintf(tw, "│ %.2f\t%.2f\t", r.RPS/f.RPS, r.CPU/f.CPU)
		} else {
			fmt.Fprint(tw, "│\t\t")
		}
		if r.Crossings > 0 {
			fmt.Fprintf(tw, "│ %.1f\t", r.Crossings)
		} else {
			fmt.Fprint(tw, "│\t")
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

func writeJSON(path string, results []result) error {
	b, err := json.MarshalIndent(struct {
		Results []result `json:"results"`
	}{results}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// budget is one promise about shunt in stock Envoy, as a ratio of medians.
type budget struct {
	what  string
	value float64
	limit float64
	least bool // limit is the least allowed, not the most
	gated bool // -gate fails on it
}

func (b budget) met() bool {
	if b.least {
		return b.value >= b.limit
	}
	return b.value <= b.limit
}

// budgets compares the case stock with bare and floor, as far as the results have them.
func budgets(results []result) []budget {
	var out []budget
	for _, body := range bodies {
		if body.stream {
			s, ok := find(results, "stock", body.name, "half")
			o, ok2 := find(results, "bare", body.name, "half")
			if ok && ok2 {
				out = append(out, budget{what: body.name + " half: first event, ms over bare's", value: s.P50 - o.P50, limit: 0.5})
			}
			continue
		}
		compare := func(loadName, with, what string, get func(result) float64, limit float64, least, gated bool) {
			s, ok := find(results, "stock", body.name, loadName)
			o, ok2 := find(results, with, body.name, loadName)
			if ok && ok2 {
				out = append(out, budget{fmt.Sprintf("%s %s: %s / %s's", body.name, loadName, what, with), get(s) / get(o), limit, least, gated})
			}
		}
		cpu := func(r result) float64 { return r.CPU }
		compare("sat", "floor", "CPU", cpu, 1, false, true)
		compare("rate", "floor", "CPU", cpu, 1, false, true)
		compare("sat", "floor", "requests/s", func(r result) float64 { return r.RPS }, 0.95, true, true)
		compare("low", "bare", "CPU", cpu, 2, false, false)
		compare("half", "bare", "p50", func(r result) float64 { return r.P50 }, 1.08, false, false)
		compare("half", "bare", "p99", func(r result) float64 { return r.P99 }, 1.2, false, false)
	}
	return out
}

// printBudgets writes them and returns how many gated ones are missed.
func printBudgets(w io.Writer, list []budget) (missed int) {
	for _, b := range list {
		verdict, sign := "ok  ", "≤"
		if b.least {
			sign = "≥"
		}
		if !b.met() {
			verdict = "OVER"
			if b.gated {
				missed++
			}
		}
		kind := "gated"
		if !b.gated {
			kind = "reported"
		}
		fmt.Fprintf(w, "%s  %-40s %.3f (%s %.2f, %s)\n", verdict, b.what, b.value, sign, b.limit, kind)
	}
	return missed
}
