package filter

import (
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
)

func rewriterOf(t testing.TB, yaml string) *rewriter {
	t.Helper()
	cfg, err := config.Parse([]byte("pools: {default: {static: []}}\n" + yaml))
	if err != nil {
		t.Fatal(err)
	}
	return newRewriter(cfg)
}

func TestRewriterOrder(t *testing.T) {
	const rules = `
models: {known: [{name: m, aliases: [m-latest, alias]}, {name: n, aliases: [n-latest]}]}
rewrites:
- {targets: [{model: generic}]}
- {matches: [{model: a}, {model: m}], targets: [{model: exact}]}
- {matches: [{model: b}], targets: [{model: n-latest}]}
`
	for _, c := range []struct {
		name, yaml, asked, header, want string
		supplies                        bool
	}{
		{"nothing to do", "", "a", "", "a", false},
		{"no model, nothing to do", "", "", "", "", false},
		{"the header", "", "a", "x", "x", true},
		{"the header supplies a missing model", "", "", "x", "x", true},
		{"a rule for the model beats the one for all", rules, "a", "", "exact", true},
		{"the rule for all", rules, "z", "", "generic", true},
		{"the rule for all supplies a missing model", rules, "", "", "generic", true},
		{"the header beats an exact rule", rules, "a", "x", "x", true},
		{"the header beats the rule for all", rules, "z", "x", "x", true},
		{"an alias is its model, and has its rule", rules, "alias", "", "exact", true},
		{"an alias without a rule of its model has the rule for all", rules, "n-latest", "", "generic", true},
		{"a target may be an alias", rules, "b", "", "n", true},
		{"the header may be an alias", rules, "b", "m-latest", "m", true},
		{"an alias alone", "models: {known: [{name: m, aliases: [x]}]}", "x", "", "m", false},
		{"a name is no alias", "models: {known: [{name: m, aliases: [x]}]}", "m", "", "m", false},
		{"an exact rule supplies nothing", "rewrites: [{matches: [{model: a}], targets: [{model: b}]}]", "", "", "", false},
		{"a rule for another model", "rewrites: [{matches: [{model: a}], targets: [{model: b}]}]", "A", "", "A", false},
	} {
		w := rewriterOf(t, c.yaml)
		for chance := range uint64(8) {
			if got := w.target(c.asked, c.header, chance<<61); got != c.want {
				t.Errorf("%s: got %q, want %q", c.name, got, c.want)
			}
		}
		if w.supplies(c.header) != c.supplies {
			t.Errorf("%s: supplies is %v", c.name, !c.supplies)
		}
	}
}

// TestRewriterWeights: each target gets its share, and none but its share.
func TestRewriterWeights(t *testing.T) {
	for _, c := range []struct {
		targets string
		want    map[string]float64
	}{
		{"[{model: a, weight: 90}, {model: b, weight: 10}]", map[string]float64{"a": 0.9, "b": 0.1}},
		{"[{model: a, weight: 1}, {model: b, weight: 1000000}]", map[string]float64{"a": 1.0 / 1000001, "b": 1000000.0 / 1000001}},
		{"[{model: a}, {model: b}, {model: c}, {model: a}]", map[string]float64{"a": 0.5, "b": 0.25, "c": 0.25}},
		{"[{model: a, weight: 7}]", map[string]float64{"a": 1}},
	} {
		w := rewriterOf(t, "rewrites: [{targets: "+c.targets+"}]")
		rng := rand.New(rand.NewPCG(1, 2))
		const n = 200_000
		got := map[string]float64{}
		for range n {
			got[w.target("x", "", rng.Uint64())]++
		}
		for name, want := range c.want {
			if sigma := math.Sqrt(want*(1-want)/n) + 1e-6; math.Abs(got[name]/n-want) > 5*sigma {
				t.Errorf("%s: %s has a share of %v, want %v", c.targets, name, got[name]/n, want)
			}
			delete(got, name)
		}
		if len(got) != 0 {
			t.Errorf("%s: also %v", c.targets, got)
		}
	}
	// Every number below the sum, and each target as often as it weighs.
	w := rewriterOf(t, "rewrites: [{targets: [{model: a, weight: 2}, {model: b, weight: 3}, {model: c, weight: 1}]}]")
	got := ""
	for chance := range uint64(6) {
		got += w.target("", "", chance)
	}
	if got != "aabbbc" {
		t.Errorf("got %s", got)
	}
}

// TestRulesComeInBetween: rules of an InferencePool come and go while bodies are
// read. A compressed body is sent as it came, or decoded and rewritten as a whole.
func TestRulesComeInBetween(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m", "n"))
	p := w.pool("default")
	rules := newResources(discovery.Resources{Rewrites: []discovery.Rewrite{{Models: []string{"m"}, Targets: []discovery.RewriteTarget{{Model: "n"}}}}})
	text := `{"messages":[{"role":"user","content":"` + strings.Repeat("some text ", 2000) + `"}],"model":"m"}`
	body := packed(t, "gzip", text)
	var done atomic.Bool
	var flipping sync.WaitGroup
	flipping.Go(func() {
		for !done.Load() {
			p.resources.Store(rules)
			p.resources.Store(nil)
		}
	})
	rewritten := 0
	for range 2000 {
		s := w.stream()
		v := s.send(t, post(chatPath, "content-encoding", "gzip"), nil, string(body))
		switch e := &v.Body; {
		case v.Action != Continue:
			t.Errorf("got %s", show(v))
		case e.With == nil:
		case e.Length != int64(len(body)) || !strings.HasSuffix(string(e.With), `"model":"n"}`):
			t.Errorf("of %d bytes, %d at %d are replaced by %d", len(body), e.Length, e.Offset, len(e.With))
		default:
			rewritten++
		}
		s.finish(End{})
		if t.Failed() {
			break
		}
	}
	done.Store(true)
	flipping.Wait()
	if rewritten == 0 {
		t.Error("no body was rewritten")
	}
}
