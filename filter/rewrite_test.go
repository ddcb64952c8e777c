package filter

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/shuntproxy/shunt/internal/config"
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
