package simulate

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestReadTrace(t *testing.T) {
	for _, c := range []struct {
		format, text string
		at           []time.Duration
		prompt       []int
		dropped      int
	}{
		{"mooncake", `{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 4000, "input_length": 1100, "output_length": 6, "hash_ids": [0, 2, 3]}

{"timestamp": 4000, "input_length": 10, "output_length": 0, "hash_ids": [9]}
`, []time.Duration{0, 3 * time.Second}, []int{600, 1100}, 1},
		{"azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n", []time.Duration{0, 52 * time.Millisecond}, []int{4808, 3180}, 0},
		{"azure", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-05-10 00:00:01.5+00:00,7,10\r\n2024-05-10 00:00:00+00:00,3,8\r\n", []time.Duration{0, 1500 * time.Millisecond}, []int{3, 7}, 0},
		{"burstgpt", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45.5,ChatGPT,1087,230,1317,Conversation log\n46,GPT-4,20,0,20,API log\n", []time.Duration{0, 40500 * time.Millisecond}, []int{472, 1087}, 1},
	} {
		var packed bytes.Buffer
		zip := gzip.NewWriter(&packed)
		_, _ = zip.Write([]byte("\ufeff" + strings.ReplaceAll(c.text, "\n", "\r\n\r\n")))
		_ = zip.Close()
		w, err := ReadTrace(strings.NewReader(c.text), c.format)
		same, err2 := ReadTrace(&packed, c.format)
		if err = errors.Join(err, err2); err != nil {
			t.Errorf("%s: %v", c.format, err)
			continue
		}
		if !reflect.DeepEqual(w, same) {
			t.Errorf("%s: compressed, with a byte order mark, empty lines and CRLF it has %d requests, not %d", c.format, len(same.Requests), len(w.Requests))
		}
		var at []time.Duration
		var prompt []int
		for _, r := range w.Requests {
			at, prompt = append(at, r.At), append(prompt, r.Prompt)
			if len(r.Blocks) != r.Prompt/BlockTokens {
				t.Errorf("%s: %d blocks of %d tokens", c.format, len(r.Blocks), r.Prompt)
			}
		}
		if !slices.Equal(at, c.at) || !slices.Equal(prompt, c.prompt) || w.Dropped != c.dropped {
			t.Errorf("%s: at %v, prompts %v, %d dropped", c.format, at, prompt, w.Dropped)
		}
		if c.format == "mooncake" { // the first 512 tokens are shared, and no more
			a, b := w.Requests[0].Blocks, w.Requests[1].Blocks
			if !slices.Equal(a[:8], b[:8]) || a[8] == b[8] {
				t.Errorf("blocks %x and %x", a, b)
			}
		}
	}
}

func TestReadTraceErrors(t *testing.T) {
	for _, c := range []struct{ format, text, want string }{
		{"csv", "x", "valid: mooncake, azure, burstgpt"},
		{"mooncake", "", "no request"},
		{"mooncake", "{\"timestamp\": 1}\n", "line 1"},
		{"mooncake", "{\"timestamp\": 1, \"input_length\": -4, \"output_length\": 1}\n", "line 1"},
		{"azure", "a,b,c\n", `no column "TIMESTAMP"`},
		{"azure", "", `is empty: a header with the columns "TIMESTAMP", "ContextTokens", "GeneratedTokens"`},
		{"azure", `{"timestamp": 0}`, "is no CSV with the columns"},
		{"azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2"},
		{"azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,x,1\n", `line 2: ContextTokens: "x" is not a whole number`},
		{"azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n\n\n9024-05-10 00:00:00,1,1\n", "line 4"},
		{"mooncake", "[{}]", "line 1: an object with timestamp"},
		{"mooncake", "\x1f\x8b\x08", "EOF"},
		{"burstgpt", "Timestamp,Request tokens,Response tokens\n1,2\n", "line 2"},
	} {
		if _, err := ReadTrace(strings.NewReader(c.text), c.format); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %q: error %v, want %q", c.format, c.text, err, c.want)
		}
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add("mooncake", `{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`)
	f.Add("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
	f.Add("burstgpt", "Timestamp,Request tokens,Response tokens\n1,2,3\n")
	f.Fuzz(func(t *testing.T, format, text string) {
		w, err := ReadTrace(strings.NewReader(text), format)
		if err != nil {
			return
		}
		for i, r := range w.Requests {
			if r.Prompt < 1 || r.Output < 1 || r.At < 0 || i > 0 && r.At < w.Requests[i-1].At || len(r.Blocks) > r.Prompt/BlockTokens {
				t.Fatalf("request %d: %+v", i, r)
			}
		}
	})
}

func TestSmoothedAndFaster(t *testing.T) {
	w := &Workload{}
	for i := range 100 {
		w.Requests = append(w.Requests, unique(uint64(i), time.Duration(i/20)*3*time.Second, 100, 1))
	}
	s := w.Smoothed(1)
	moved := 0
	for i, r := range s.Requests {
		if i > 0 && r.At < s.Requests[i-1].At {
			t.Fatal("out of order")
		}
		if i < 80 && r.At/(3*time.Second) != time.Duration(i/20) {
			t.Errorf("request %d of tick %d at %v", i, i/20, r.At)
		}
		if r.At%(3*time.Second) != 0 {
			moved++
		}
	}
	if moved < 70 || s.Requests[99].At != 12*time.Second {
		t.Errorf("%d moved, the last to %v", moved, s.Requests[99].At)
	}
	if got := w.WithSpeed(3).Requests[99].At; got != 4*time.Second {
		t.Errorf("at three times the speed: %v", got)
	}
	if w.Requests[99].At != 12*time.Second {
		t.Error("the workload itself has changed")
	}
}

func TestBuiltins(t *testing.T) {
	for _, name := range Builtins() {
		w, err := Generate(name, 4, 2000, 1)
		if err != nil {
			t.Fatal(err)
		}
		if len(w.Requests) != 2000 || AboutBuiltin(name) == "" {
			t.Errorf("%s: %d requests", name, len(w.Requests))
		}
		for i, r := range w.Requests {
			if r.At < 0 || i > 0 && r.At < w.Requests[i-1].At || r.Prompt < 1 || r.Output < 1 || len(r.prompt()) != r.Prompt/BlockTokens {
				t.Fatalf("%s: request %d: %+v", name, i, r)
			}
		}
		rate := float64(len(w.Requests)) / w.Requests[len(w.Requests)-1].At.Seconds()
		at := slices.IndexFunc(builtins, func(b builtin) bool { return b.name == name })
		if want := builtins[at].rate * 4; math.Abs(rate/want-1) > 0.25 {
			t.Errorf("%s: %.1f requests/s, want %.1f", name, rate, want)
		}
		if again, _ := Generate(name, 4, 2000, 1); !slices.EqualFunc(w.Requests, again.Requests, func(a, b Request) bool {
			return a.At == b.At && a.Prompt == b.Prompt && slices.Equal(a.Blocks, b.Blocks)
		}) {
			t.Errorf("%s: another workload of the same seed", name)
		}
	}
}

func TestPercentiles(t *testing.T) {
	var v []float64
	for i := range 200 {
		v = append(v, float64(200-i))
	}
	if p := percentiles(v); p != (Percentiles{100.5, 100, 180, 198}) {
		t.Errorf("%+v", p)
	}
	if p := percentiles(nil); p != (Percentiles{}) {
		t.Errorf("of nothing: %+v", p)
	}
}

func TestPlanRows(t *testing.T) {
	p := Plan{
		Workloads: []Source{func(seed uint64) (*Workload, error) { return Generate("bursts", 2, 50, seed) }},
		Policies:  []string{"round-robin", "least-request"}, Speeds: []float64{1, 2}, Envoys: []int{1, 4}, Seed: 1, Seeds: 2,
		Config: Config{Endpoints: 2}, Parallel: 2,
	}
	rows, err := p.Run()
	if err != nil || len(rows) != 8 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	one, err := Run(mustGenerate(t, "bursts", 2, 50, 2).WithSpeed(2), "least-request", Config{Endpoints: 2, Envoys: 4, Seed: 2})
	if err != nil {
		t.Fatal(err)
	}
	two, err := Run(mustGenerate(t, "bursts", 2, 50, 1).WithSpeed(2), "least-request", Config{Endpoints: 2, Envoys: 4, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	last := rows[7]
	if last.Policy != "least-request" || last.Speed != 2 || last.Envoys != 4 || last.Requests != 100 || math.Abs(last.TTFT.Mean-(one.TTFT.Mean+two.TTFT.Mean)/2) > 1e-9 {
		t.Errorf("the last row is %+v", last)
	}

	var out bytes.Buffer
	if err := WriteJSON(&out, rows); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Rows []map[string]any `json:"rows"`
	}
	if err := json.Unmarshal(out.Bytes(), &doc); err != nil || len(doc.Rows) != 8 {
		t.Fatal(err, len(doc.Rows))
	}
	for _, field := range []string{"policy", "ttft_ms", "tpot_ms", "hit_rate", "throughput_tok_s", "imbalance", "slo_attainment"} {
		if _, ok := doc.Rows[0][field]; !ok {
			t.Errorf("rows have no %s", field)
		}
	}
	for _, p := range []string{"p50", "p90", "p99"} {
		if _, ok := doc.Rows[0]["ttft_ms"].(map[string]any)[p].(float64); !ok {
			t.Errorf("ttft_ms has no %s", p)
		}
	}

	out.Reset()
	if err := WritePlot(&out, rows); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "<svg") || strings.Contains(out.String(), "NaN") {
		t.Error("no plot")
	}
	for dec := xml.NewDecoder(&out); ; {
		if _, err := dec.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	out.Reset()
	if err := WriteTable(&out, rows); err != nil || strings.Count(out.String(), "least-request") != 4 {
		t.Errorf("%v, %s", err, out.String())
	}
}

func mustGenerate(t *testing.T, name string, endpoints, requests int, seed uint64) *Workload {
	t.Helper()
	w, err := Generate(name, endpoints, requests, seed)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestCapacity(t *testing.T) {
	// 30 ms of service each, one each 100 ms for 200 s: over speed 3.33 a queue grows.
	// At speed v the last waits 2000·(30−100/v) ms, and 98 % may wait 2 s.
	w := &Workload{}
	for i := range 2000 {
		w.Requests = append(w.Requests, unique(uint64(i), time.Duration(i)*100*time.Millisecond, 200, 1))
	}
	got, err := Capacity(w, "round-robin", Config{Endpoints: 1, Engine: oneByOne()})
	if err != nil {
		t.Fatal(err)
	}
	want := 100 / (30 - 1970/1960.0)
	if got > want || got < want/1.04 {
		t.Errorf("capacity %v, want %v", got, want)
	}
}

// TestBelieved compares what rivals remember with a slow form of it.
func TestBelieved(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	const endpoints, capacity = 70, 30
	for _, lrus := range []int{endpoints, 1} {
		b := newBelieved(endpoints, lrus, capacity)
		type entry struct {
			hash uint64
			at   int
		}
		uses := make([][]entry, lrus)
		sets := map[entry]bool{}
		match, count := make([]int, endpoints), make([]int, endpoints)
		for step := range 4000 {
			blocks := chain(chain(nil, uint64(rng.IntN(5)+1), rng.IntN(4)), uint64(rng.IntN(9)+1), rng.IntN(8))
			b.longest(blocks, match)
			b.count(blocks, count)
			for i := range endpoints {
				n := 0
				for n < len(blocks) && sets[entry{blocks[n], i}] {
					n++
				}
				if match[i] != n {
					t.Fatalf("step %d: endpoint %d matches %d, want %d", step, i, match[i], n)
				}
				if count[i] < n || n == 0 && len(blocks) > 0 && count[i] > len(blocks) {
					t.Fatalf("step %d: endpoint %d counts %d of %d", step, i, count[i], n)
				}
			}
			to := rng.IntN(4) * 20
			b.add(to, blocks)
			own := 0
			if lrus > 1 {
				own = to
			}
			for k := len(blocks) - 1; k >= 0; k-- {
				uses[own] = slices.DeleteFunc(uses[own], func(e entry) bool { return e.hash == blocks[k] })
				uses[own] = append(uses[own], entry{blocks[k], to})
				sets[entry{blocks[k], to}] = true
				if len(uses[own]) > capacity {
					old := uses[own][0].hash
					uses[own] = uses[own][1:]
					for i := range endpoints {
						if lrus == 1 || i == to {
							delete(sets, entry{old, i})
						}
					}
				}
			}
		}
	}
}
