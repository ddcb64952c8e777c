package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/shuntproxy/shunt/scorer"
)

// TestMutantsFit: each mutant's text is in the code once, and each policy and
// guard has one.
func TestMutantsFit(t *testing.T) {
	have := map[string]bool{}
	for _, m := range mutants() {
		text, err := os.ReadFile(filepath.Join("..", "..", m.file))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.apply(string(text)); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
		have[m.of] = true
	}
	for _, name := range scorer.Names() {
		if !have[name] {
			t.Errorf("no mutant of %s", name)
		}
	}
	for g := range scorer.NumGuards {
		if !have[g.String()] {
			t.Errorf("no mutant of the guard %s", g)
		}
	}
}
