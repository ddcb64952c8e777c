package discovery

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestDecode(t *testing.T) {
	const list = `
- address: "10.0.0.1:8001"
  labels: {model.aibrix.ai/name: m, model.aibrix.ai/engine: sglang, other: "1"}
  pod: p
- &b {address: 10.0.0.2}
- address: "[fd00::1]:9000"
  labels: {model.aibrix.ai/engine: other, model.aibrix.ai/metric-port: "9001"}
`
	want := []pool.Target{
		{Addr: netip.MustParseAddrPort("10.0.0.1:8001"), Pod: "p", Model: "m", Engine: pool.EngineSGLang, EngineLabel: "sglang", MetricPort: 8000, Source: "file"},
		{Addr: netip.MustParseAddrPort("10.0.0.2:8000"), Engine: pool.EngineVLLM, MetricPort: 8000, Source: "file"},
		// An unknown engine is refused in static only.
		{Addr: netip.MustParseAddrPort("[fd00::1]:9000"), Engine: pool.EngineUnknown, EngineLabel: "other", MetricPort: 9001, Source: "file"},
	}
	for name, doc := range map[string]string{
		"list":   list,
		"static": "static:\n" + list,
		"json":   `{"static":[{"address":"10.0.0.1:8001","labels":{"model.aibrix.ai/name":"m","model.aibrix.ai/engine":"sglang"},"pod":"p"},{"address":"10.0.0.2"},{"address":"[fd00::1]:9000","labels":{"model.aibrix.ai/engine":"other","model.aibrix.ai/metric-port":"9001"}}]}`,
	} {
		got, err := decode([]byte(doc))
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got %v, %v, want %v", name, got, err, want)
		}
	}
	if got, err := decode([]byte("[]")); err != nil || len(got) != 0 {
		t.Errorf("[]: got %v, %v", got, err)
	}
}

func TestDecodeRefuses(t *testing.T) {
	for _, c := range []struct {
		name, doc string
		want      []string // lines, each a substring
	}{
		{"empty", "", []string{"is empty; write []"}},
		{"comment", "# nothing\n", []string{"is empty; write []"}},
		{"null", "~", []string{"line 1: is not a list of endpoints"}},
		{"syntax", "- {address: ", []string{"not YAML or JSON: near line 1: "}},
		{"tab", "- address: 10.0.0.1\n\tpod: x", []string{"line 2: has a tab before its text: indent with spaces ("}},
		{"tab first", "\t- address: 10.0.0.1", []string{"line 1: has a tab before its text"}},
		{"tab after the dash", "[]\n-\taddress: 10.0.0.1", []string{"line 2: has a tab before its text"}},
		{"tab elsewhere", "- address: 10.0.0.1 # a\tb\n- {address: ", []string{"not YAML or JSON: near line"}},
		{"control character", "- address: 10.0.0.1\n  pod: a\x01", []string{"line 2: has the control character 0x1"}},
		{"binary", "\x7fELF\x02\x01", []string{"line 1: has the control character 0x2"}},
		{"no anchor", "- address: *a", []string{"unknown anchor 'a' referenced: an anchor is written &NAME"}},
		{"latin-1", "- address: 10.0.0.1\n  pod: \xe9", []string{"line 2: is not UTF-8"}},
		{"two documents", "[]\n---\n[]\n", []string{"more than one YAML document"}},
		{"unknown root key", "statics: []", []string{"line 1: statics: is unknown, valid: static"}},
		{"no list", "{}", []string{"line 1: static: is missing"}},
		{"scalar list", "static: 5", []string{"line 1: static: is not a list"}},
		{"scalar entry", "- a", []string{"line 1: [0]: is not an endpoint"}},
		{"unknown field", "static:\n- adress: 10.0.0.1", []string{"line 2: static[0].adress: is unknown, valid: address, labels, pod"}},
		{"duplicate field", "- address: 10.0.0.1\n  address: 10.0.0.2", []string{"line 2: [0].address: is given twice"}},
		{"duplicate label", "- address: 10.0.0.1\n  labels:\n    a: b\n    a: c", []string{"line 4: [0].labels.a: is given twice"}},
		{"missing address", "- pod: x", []string{"line 1: [0].address: is missing"}},
		{"host name", "- address: engine-1", []string{`line 1: [0].address: "engine-1" is not an IP (names go under dns)`}},
		{"number label", "- address: 10.0.0.1\n  labels: {model.aibrix.ai/port: 8000}", []string{`line 2: [0].labels["model.aibrix.ai/port"]: 8000 is not a string; write it in quotes`}},
		{"list label", "- address: 10.0.0.1\n  labels: {a: [b]}", []string{`[0].labels["a"]: is not a string`}},
		{"labels list", "- address: 10.0.0.1\n  labels: [b]", []string{`[0].labels: is not a mapping`}},
		{"bad port label", "- address: 10.0.0.1\n  labels:\n    model.aibrix.ai/port: \"0\"", []string{`line 3: [0].labels["model.aibrix.ai/port"]: "0" is not a port`}},
		{"same address", "- address: 10.0.0.1\n- address: 10.0.0.1:8000", []string{"line 2: [1].address: 10.0.0.1:8000 is at [0] already"}},
		{"all at once", "- address: a\n- address: b\n- {c: d}", []string{"line 1: [0].address", "line 2: [1].address", "line 3: [2].c: is unknown"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := decode([]byte(c.doc))
			if err == nil {
				t.Fatalf("accepted as %v", got)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(c.want) {
				t.Fatalf("got %d problems, want %d:\n%v", len(lines), len(c.want), err)
			}
			for i, want := range c.want {
				if !strings.Contains(lines[i], want) {
					t.Errorf("problem %d is %q, want %q in it", i, lines[i], want)
				}
			}
		})
	}
}

func TestReadFileNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	if _, err := ReadFile(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a missing file gives %v", err)
	}
	for doc, want := range map[string]string{"- {}": path + ": line 1: [0].address: is missing", strings.Repeat("#", maxFile+1): "is larger than"} {
		if err := os.WriteFile(path, []byte(doc), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadFile(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("static:\n- &a {address: 10.0.0.1, labels: {a: b}, pod: c}\n- *a\n"))
	f.Add([]byte("&a [*a]"))
	f.Add([]byte("- address: 10.0.0.1\n  <<: {pod: x}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		targets, err := decode(data)
		if err != nil && targets != nil {
			t.Fatal("targets beside an error")
		}
		seen := map[netip.AddrPort]bool{}
		for _, target := range targets {
			if !target.Addr.IsValid() || target.Addr.Port() == 0 || target.MetricPort == 0 || seen[target.Addr] {
				t.Fatalf("bad target %+v", target)
			}
			seen[target.Addr] = true
		}
	})
}
