package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// says are phrases of docs/api.md behind sentences that advise users.
var says = map[string]string{
	"mixed versions": "In a fleet of mixed versions, older routers know only the aliases: send both until all are new",
	"releases":       "see llm-d Router's releases for which version a router is",
	"temporary":      "the aliases are temporary, though no date for their end is known",
	"big images":     "raise it for them",
	"sglang only":    "Send these only to models on SGLang (`model.aibrix.ai/engine: sglang`)",
	"jev-latest":     "tell them your model's name",
	"whitespace":     "the routing text differs from its prompt by whitespace",
	"retries":        "each retry is a request of its own, so counts and token usage include the retries",
	"chat template":  "SGLang serves the path only for models with a Jinja chat template",
}

func TestPageSays(t *testing.T) {
	page, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	words := strings.Join(strings.Fields(string(page)), " ")
	for name, phrase := range says {
		t.Run(name, func(t *testing.T) {
			if !strings.Contains(words, phrase) {
				t.Errorf("docs/api.md does not say: %s", phrase)
			}
		})
	}
}

// TestExamplesUseCanonicalNames: what users copy has no deprecated name in it.
func TestExamplesUseCanonicalNames(t *testing.T) {
	root := os.DirFS("../..")
	seen := 0
	err := fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); name == ".git" || name == "out" || name == ".cache" || name == "testdata" || path == "e2e" {
				return fs.SkipDir
			}
			return nil
		}
		switch filepath.Ext(path) {
		case ".md", ".yaml", ".tmpl", ".json":
		default:
			return nil
		}
		text, err := fs.ReadFile(root, path)
		if err != nil {
			return err
		}
		for i, line := range strings.Split(string(text), "\n") {
			for _, alias := range []string{"x-gateway-inference-", "x-gateway-model-name-rewrite", "x-slo-t"} {
				if !strings.Contains(line, alias) {
					continue
				}
				if path == "docs/api.md" && strings.HasPrefix(line, "| `"+alias) {
					seen++ // the table of aliases
					continue
				}
				t.Errorf("%s:%d has a deprecated name: %s", path, i+1, line)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen != 5 {
		t.Errorf("the table of aliases has %d rows, want 5", seen)
	}
}

// TestSentences: what is typed is well formed, and each test is one that the
// results can hold.
func TestSentences(t *testing.T) {
	pages, err := sentences()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, p := range pages {
		for _, s := range p.Sentences {
			if key := p.Page + s.Says; s.Says == "" || seen[key] {
				t.Errorf("%q is empty, or there twice", s.Says)
			} else {
				seen[key] = true
			}
		}
	}
	if len(seen) < 70 {
		t.Errorf("%d sentences", len(seen))
	}
}

func TestJudge(t *testing.T) {
	results := map[string]string{
		"./e2e TestA/stock": "pass", "./e2e TestA/contrib": "pass", "./e2e TestB/stock/one_two": "pass", "./e2e TestB/contrib/one_two": "fail",
		"./e2e TestC/stock": "pass", "./e2e TestD/stock": "pass", "./e2e TestD/contrib": "skip", "./filter TestE": "pass", "./filter TestE/one_two": "pass",
	}
	for test, want := range map[string]bool{
		"": false, "TestA": true, "TestB/one two": false, "TestC": false, "TestD": false, "./filter TestE": true, "./filter TestE/one two": true, "./filter TestF": false,
	} {
		s := sentence{Says: "x"}
		if test != "" {
			s.Tests = []string{test}
		}
		if lines, ok := judge(s, results); ok != want {
			t.Errorf("%q: %v, %q", test, ok, lines)
		}
	}
}
