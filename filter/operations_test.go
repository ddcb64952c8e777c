package filter

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestOperationsPage holds the page of metrics and what is exported together.
func TestOperationsPage(t *testing.T) {
	page, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	golden, err := os.ReadFile("testdata/metrics.golden")
	if err != nil {
		t.Fatal(err)
	}
	exported := make(map[string]bool)
	for _, m := range regexp.MustCompile(`\bshunt_[a-z_]+`).FindAllString(string(golden), -1) {
		exported[m] = true
	}
	if len(exported) < 20 {
		t.Fatalf("only %d metrics in testdata/metrics.golden", len(exported))
	}
	for name := range exported {
		if !strings.Contains(string(page), "`"+name+"`") {
			t.Errorf("docs/operations.md does not name %s", name)
		}
	}
	source := ""
	for _, file := range []string{"metrics.go", "queries.go", "flowmetrics.go", "resources.go"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source += string(text)
	}
	for _, m := range regexp.MustCompile("`(shunt_[a-z_]+)`").FindAllStringSubmatch(string(page), -1) {
		short := strings.TrimPrefix(m[1], "shunt_")
		defined := false
		for _, name := range []string{m[1], short, strings.TrimPrefix(short, "endpoint_"), strings.TrimPrefix(short, "queue_"), strings.TrimPrefix(short, "flow_")} {
			defined = defined || strings.Contains(source, `"`+name+`"`)
		}
		if !exported[m[1]] && !defined {
			t.Errorf("docs/operations.md names %s, which is not exported", m[1])
		}
	}
}
