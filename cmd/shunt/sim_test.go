package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSim(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "t.jsonl")
	if err := os.WriteFile(trace, []byte(`{"timestamp": 0, "input_length": 6758, "output_length": 50, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
{"timestamp": 3000, "input_length": 6758, "output_length": 50, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	plot := filepath.Join(t.TempDir(), "out.svg")
	var out, problems bytes.Buffer
	code := run([]string{"sim", "--trace", trace, "--format", "mooncake", "--endpoints", "2", "--speed", "1.5", "--policy", "prefix-cache",
		"--policy", "queue:2,kv-cache:2,prefix-cache:3", "--policy", "round-robin,random", "--seed", "3", "--output", "json", "--plot", plot}, nil, &out, &problems)
	if code != 0 {
		t.Fatal(problems.String())
	}
	var doc struct {
		Rows []struct {
			Policy  string
			HitRate float64 `json:"hit_rate"`
			TTFT    struct {
				P99 float64
			} `json:"ttft_ms"`
		}
	}
	if err := json.Unmarshal(out.Bytes(), &doc); err != nil || len(doc.Rows) != 4 {
		t.Fatal(err, out.String())
	}
	hit := float64(6758/64*64) / (2 * 6758)
	for i, want := range []float64{hit, hit, 0} { // round robin takes the other
		if got := doc.Rows[i].HitRate; got != want || doc.Rows[i].TTFT.P99 <= 0 {
			t.Errorf("%s: hit rate %v, want %v", doc.Rows[i].Policy, got, want)
		}
	}
	if svg, err := os.ReadFile(plot); err != nil || !strings.Contains(string(svg), "round-robin") {
		t.Error("no plot", err)
	}
}

func TestSimByObjective(t *testing.T) {
	args := []string{"sim", "--workload", "steady", "--endpoints", "2", "--requests", "200", "--speed", "3", "--max-concurrency", "4", "--policy", "least-request",
		"--objectives", "high=10:0.25,low=-1:0.75"}
	for _, format := range []string{"text", "json"} {
		var out, problems bytes.Buffer
		if code := run(append(args, "--output", format), nil, &out, &problems); code != 0 {
			t.Fatal(problems.String())
		}
		wants := []string{"OBJECTIVE", "high", "low", "RATIO"}
		if format == "json" {
			wants = []string{`"name":"high","priority":10`, `"name":"low","priority":-1`, `"ttft_alone_ms":{"mean":`}
		}
		for _, want := range wants {
			if !strings.Contains(out.String(), want) {
				t.Errorf("no %q in %s", want, &out)
			}
		}
	}
}

func TestSimSaysWhatIsWrong(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--policy nope", `"nope"`},
		{"--trace /no/such/file", "--trace"},
		{"--workload nope", "valid: shared-prefix"},
		{"--workload steady --trace t.jsonl", "--workload beside --trace"},
		{"--format azure", "give one with --trace"},
		{"--smooth", "give one with --trace"},
		{"--output xml", "valid: text, json"},
		{"--speed 0", "speed 0"},
		{"--requests -1", "--requests -1: 0 or more is wanted"},
		{"--decode-rate 0", "--decode-rate 0: more than 0 is wanted"},
		{"--prefill-rate NaN", "--prefill-rate NaN: more than 0 is wanted"},
		{"--scrape-interval 0s", "--scrape-interval 0s: more than 0 is wanted"},
		{"--slo-ttft -1s", "--slo-ttft -1s: more than 0 is wanted"},
		{"--kv-slowdown -1", "--kv-slowdown -1: 0 or more is wanted"},
		{"--kv-tokens 1", "--kv-tokens 1: at least a block of 64 is wanted"},
		{"--ttl 1s", "give them with --objectives"},
		{"--max-concurrency 1", "give them with --objectives"},
		{"--endpoints -3", "endpoints"},
		{"--envoys 0", "Envoys"},
		{"--seeds 0", "seeds"},
		{"--objectives high", "name=priority:share"},
		{"--objectives high=1", "name=priority:share"},
		{"--objectives high=x:1", "name=priority:share"},
		{"--objectives high=1:0", "objective high"},
		{"--objectives high=1:1,high=2:1", "objective"},
		{"--objectives high=1:1 --capacity", "capacity"},
	} {
		var out, problems bytes.Buffer
		if code := run(append([]string{"sim"}, strings.Fields(c.args)...), nil, &out, &problems); code != 1 || !strings.Contains(problems.String(), c.want) {
			t.Errorf("%s: exit code %d, %q", c.args, code, problems.String())
		}
	}
}

// TestSimOfNothing: 0 is none, not the default.
func TestSimOfNothing(t *testing.T) {
	sim := func(flags ...string) string {
		t.Helper()
		var out, problems bytes.Buffer
		args := append([]string{"sim", "--workload", "steady", "--endpoints", "2", "--requests", "100", "--speed", "5", "--policy", "least-request", "--output", "json"}, flags...)
		if code := run(args, nil, &out, &problems); code != 0 {
			t.Fatal(problems.String())
		}
		return out.String()
	}
	none := sim("--batch-slowdown", "0", "--kv-slowdown", "0", "--scrape-delay", "0s")
	if next := sim("--batch-slowdown", "1e-12", "--kv-slowdown", "1e-12", "--scrape-delay", "1ns"); none != next {
		t.Errorf("0 gives\n%s\nand next to 0\n%s", none, next)
	}
	for _, other := range []string{sim(), sim("--batch-slowdown", "0"), sim("--kv-slowdown", "0")} {
		if none == other {
			t.Errorf("no slowdown makes no difference: %s", none)
		}
	}
}
