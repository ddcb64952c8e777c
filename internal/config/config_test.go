package config

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the expected files")

func read(t *testing.T, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// documents lists the documents of one folder of testdata.
func documents(t *testing.T, folder string) []string {
	t.Helper()
	var files []string
	for _, pattern := range []string{"*.yaml", "*.json"} {
		found, err := filepath.Glob(filepath.Join("testdata", folder, pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	if len(files) == 0 {
		t.Fatalf("testdata/%s has no documents", folder)
	}
	return files
}

func TestGood(t *testing.T) {
	for _, file := range documents(t, "good") {
		if _, err := Parse(read(t, file)); err != nil {
			t.Errorf("%s:\n%v", file, err)
		}
	}
	for _, file := range documents(t, "route-good") {
		if _, err := ParseRoute(read(t, file)); err != nil {
			t.Errorf("%s:\n%v", file, err)
		}
	}
}

// TestBad compares the problems of each bad document with the .txt beside it.
func TestBad(t *testing.T) {
	parse := func(text []byte) error { _, err := Parse(text); return err }
	parseRoute := func(text []byte) error { _, err := ParseRoute(text); return err }
	for folder, parse := range map[string]func([]byte) error{"bad": parse, "route-bad": parseRoute} {
		for _, file := range documents(t, folder) {
			t.Run(folder+"/"+filepath.Base(file), func(t *testing.T) {
				err := parse(read(t, file))
				var problems Problems
				if !errors.As(err, &problems) || len(problems) == 0 {
					t.Fatalf("error is %v, want problems", err)
				}
				got, expected := err.Error()+"\n", file+".txt"
				if *update {
					if err := os.WriteFile(expected, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				if diff := cmp.Diff(string(read(t, expected)), got); diff != "" {
					t.Errorf("problems (-want +got):\n%s", diff)
				}
			})
		}
	}
}

func mustParse(t *testing.T, text string) *Config {
	t.Helper()
	cfg, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func TestDefaults(t *testing.T) {
	got := mustParse(t, "pools: {default: {static: []}}")
	want := &Config{
		Pools:      Pools{{Name: "default", Static: []Endpoint{}}},
		Paths:      Paths{Prefixes: []string{"/openai"}, Unknown: "route"},
		Models:     Models{Discover: true, List: true, Memory: 10 * time.Minute, NotFoundStatus: 400},
		Policy:     Policy{Text: "least-request"},
		Guards:     Guards{Doubted: true, Wedged: true, Pushback: true, WarmUp: "auto"},
		SlowStart:  10 * time.Second,
		Scrape:     Scrape{Interval: time.Second, Timeout: time.Second, StaleAfter: 5 * time.Second, MaxBytes: 16 << 20, Jitter: 1, MaxBackOff: 30 * time.Second},
		Prometheus: Prometheus{Interval: 15 * time.Second, Timeout: 2 * time.Second, Labels: PrometheusLabels{Instance: "instance", Model: "model_name"}},
		Limits:     Limits{RequestBody: 4 << 20, JSONDepth: 512},
		FlowControl: FlowControl{
			Saturation: "utilization", QueueThreshold: 5, KVThreshold: 0.8, MaxConcurrency: 100, TTL: time.Minute,
			Fairness: "round-robin", Order: "fcfs", BandRequests: 5000, BandBytes: 1e9, FlowLabels: 100,
		},
		Drain:            Drain{Grace: 15 * time.Second},
		Runtime:          Runtime{Yield: true},
		RestoreModelName: true,
		Health:           Health{Interval: 5 * time.Second, Timeout: 2 * time.Second},
		StartupHold:      5 * time.Second,
		Destination:      "original_dst",
		OnInternalError:  "reject",
		Admin:            Admin{Address: "127.0.0.1:9902"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	defaults, err := Default()
	if err != nil {
		t.Fatal(err)
	}
	want.Pools = nil
	if diff := cmp.Diff(want, defaults); diff != "" {
		t.Errorf("Default (-want +got):\n%s", diff)
	}
}

// TestFullSetsEveryField keeps the example with every field complete.
func TestFullSetsEveryField(t *testing.T) {
	dec := decodeDocument(read(t, "testdata/good/full.yaml"), &Config{})
	// What can't stand beside a field that the example sets.
	other := []string{"configFile", "pools.chat.kubernetes.selector", "pools.chat.kubernetes.targetPorts"}
	var walk func(typ reflect.Type, path string)
	walk = func(typ reflect.Type, path string) {
		if typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		if typ == reflect.TypeFor[Pools]() {
			typ, path = reflect.TypeFor[Pool](), path+".chat"
		}
		if typ == reflect.TypeFor[Policy]() {
			typ, path = reflect.TypeFor[PolicyPart](), path+"[0]"
		}
		if typ.Kind() == reflect.Slice && typ.Elem().Kind() == reflect.Struct {
			typ, path = typ.Elem(), path+"[0]"
		}
		if path != "" && !slices.Contains(other, path) && !dec.has(path) {
			t.Errorf("full.yaml does not set %s", path)
		}
		if typ.Kind() != reflect.Struct {
			return
		}
		for i := range typ.NumField() {
			if name := fieldName(typ.Field(i)); name != "" {
				walk(typ.Field(i).Type, fieldPath(path, name))
			}
		}
	}
	walk(reflect.TypeFor[Config](), "")
}

func TestPoolOrder(t *testing.T) {
	yaml := mustParse(t, "pools: {zebra: {static: []}, default: {static: []}, apple: {static: []}}")
	if got := yaml.Pools.Names(); !slices.Equal(got, []string{"zebra", "default", "apple"}) {
		t.Errorf("YAML: pools are %v, want the document's order", got)
	}
	json := mustParse(t, `{"pools": {"zebra": {"static": []}, "default": {"static": []}, "apple": {"static": []}}}`)
	if got := json.Pools.Names(); !slices.Equal(got, []string{"default", "apple", "zebra"}) {
		t.Errorf("JSON: pools are %v, want default, then by name", got)
	}
	for name, want := range map[string]string{"": "zebra", "apple": "apple"} {
		if pool, ok := yaml.Pools.Lookup(name); !ok || pool.Name != want {
			t.Errorf("Lookup(%q) is %v, %v; want %s", name, pool, ok, want)
		}
	}
	if _, ok := yaml.Pools.Lookup("nope"); ok {
		t.Error("Lookup finds a pool that does not exist")
	}
}

// TestFromEnvoy reads what Envoy makes of a YAML Struct: numbers as strings.
func TestFromEnvoy(t *testing.T) {
	cfg := mustParse(t, string(read(t, "testdata/good/from-envoy.json")))
	if cfg.Limits != (Limits{RequestBody: 4294967, HeldBodies: 1_500_000_000, JSONDepth: 256}) {
		t.Errorf("limits are %+v", cfg.Limits)
	}
	if cfg.Models.Known[0].Name != "llama-🦙" {
		t.Errorf("known model is %q", cfg.Models.Known[0].Name)
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "4096": 4096, "4MiB": 4 << 20, "1GB": 1e9, "1.5KiB": 1536, "2 kB": 2000, "1e9": 1e9, "12B": 12, "3GiB": 3 << 30,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "-1", "1TB", "MiB", "0x10", "1_000", "010", "1.5", "inf", "nan", "1e99", "--1"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("parseSize(%q) = %d, want an error", text, got)
		}
	}
	for size, want := range map[Size]string{0: "0", 4 << 20: "4MiB", 1536: "1536", 3 << 30: "3GiB", 2048: "2KiB"} {
		if got := size.String(); got != want {
			t.Errorf("Size(%d) is %q, want %q", int64(size), got, want)
		}
	}
}

func TestFloatFields(t *testing.T) {
	for _, text := range []string{"f: 0.8", `{"f": "0.8"}`, `{"f": 0.8}`, "f: '0.8'"} {
		var into struct {
			F float64 `json:"f"`
		}
		if dec := decodeDocument([]byte(text), &into); len(dec.problems) > 0 || into.F != 0.8 {
			t.Errorf("%s is %v, %v", text, into.F, dec.problems)
		}
	}
}

func TestResolvedLimits(t *testing.T) {
	tests := []struct {
		cgroup, held, wantHeld, limit, wantLimit int64
	}{
		{cgroup: 0, wantHeld: 1 << 30, wantLimit: 0},
		{cgroup: 2 << 30, wantHeld: 512 << 20, wantLimit: 512 << 20},
		{cgroup: 8 << 30, wantHeld: 1 << 30, wantLimit: 2 << 30},
		{cgroup: 256 << 20, wantHeld: 64 << 20, wantLimit: 256 << 20},
		{cgroup: 8 << 20, wantHeld: 4 << 20, wantLimit: 256 << 20},
		{cgroup: 2 << 30, held: 100 << 20, wantHeld: 100 << 20, limit: 64 << 20, wantLimit: 64 << 20},
	}
	for _, tt := range tests {
		limits := Limits{RequestBody: 4 << 20, HeldBodies: Size(tt.held)}
		if got := limits.HeldBodiesIn(tt.cgroup); got != tt.wantHeld {
			t.Errorf("HeldBodiesIn(%d) with %d = %d, want %d", tt.cgroup, tt.held, got, tt.wantHeld)
		}
		if got := (Runtime{MemoryLimit: Size(tt.limit)}).MemoryLimitIn(tt.cgroup); got != tt.wantLimit {
			t.Errorf("MemoryLimitIn(%d) with %d = %d, want %d", tt.cgroup, tt.limit, got, tt.wantLimit)
		}
	}
}

func TestParseFile(t *testing.T) {
	cfg, err := ParseFile("testdata/good/full.yaml")
	if err != nil || len(cfg.Policy.Parts) != 3 || cfg.Policy.Parts[0].Params["slack"] != "16" || cfg.Policy.Parts[1].Weight != 1 {
		t.Errorf("full.yaml: %v", err)
	}
	for file, want := range map[string]string{
		"testdata/none.yaml":             "can't be read",
		"testdata/good/config-file.yaml": "names a configFile itself",
		"testdata/bad/fallbacks.yaml":    "fallbacks (line 2)",
	} {
		if _, err := ParseFile(file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseFile(%s): error is %v, want %q", file, err, want)
		}
	}
}

// TestAliasBomb: aliases must not make a small text cost a great deal.
func TestAliasBomb(t *testing.T) {
	adapters := strings.TrimSuffix(strings.Repeat("x,", 1500), ",")
	aliases := strings.TrimSuffix(strings.Repeat("*k,", 1500), ",")
	_, err := Parse([]byte("models: {known: [&k {name: a, adapters: [" + adapters + "]}, " + aliases + "]}\n"))
	if err == nil || !strings.Contains(err.Error(), "the document is too large") {
		t.Errorf("no error about the size")
	}
}

func TestProblemsAreCapped(t *testing.T) {
	entries := strings.TrimSuffix(strings.Repeat("x,", 1000), ",")
	_, err := Parse([]byte("pools: {default: {static: [{address: 10.0.0.1}]}}\nallowedPolicies: [" + entries + "]"))
	var problems Problems
	if !errors.As(err, &problems) || len(problems) != maxProblems+1 || problems[maxProblems].Message != "and 800 more problems" {
		t.Errorf("%d problems: %v", len(problems), problems[len(problems)-1:])
	}
}

func FuzzParse(f *testing.F) {
	for _, folder := range []string{"good", "bad"} {
		files, _ := filepath.Glob(filepath.Join("testdata", folder, "*"))
		for _, file := range files {
			if text, err := os.ReadFile(file); err == nil {
				f.Add(text)
			}
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		cfg, err := Parse(text)
		if (cfg == nil) == (err == nil) {
			t.Fatalf("config is %v and error is %v: want one of them", cfg, err)
		}
		if _, err := ParseRoute(text); err != nil && err.Error() == "" {
			t.Fatal("an error says nothing")
		}
	})
}

// TestProblemsAreShort: a value of any length is not logged whole.
func TestProblemsAreShort(t *testing.T) {
	for _, text := range []string{
		"scrape: {interval: " + strings.Repeat("9", 1<<20) + "}",
		strings.Repeat("é", 1<<20) + ": 1",
		"policy: [{policy: " + strings.Repeat("x", 1<<20) + "}]",
		"pools: {default: {static: [{address: " + strings.Repeat("a", 1<<20) + "}]}}",
	} {
		_, err := Parse([]byte(text))
		var problems Problems
		if !errors.As(err, &problems) {
			t.Fatalf("%v", err)
		}
		for _, p := range problems {
			if s := p.String(); len(s) > 3*maxText || !utf8.ValidString(s) {
				t.Errorf("%d bytes: %.100s", len(s), s)
			}
		}
	}
}
