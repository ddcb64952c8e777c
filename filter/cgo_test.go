package filter_test

import (
	"os/exec"
	"strings"
	"testing"
)

// TestCgoStaysInDoors keeps "C" out of everything that must build and test
// without Envoy. depguard can't see it: it reads what cgo made of the files.
func TestCgoStaysInDoors(t *testing.T) {
	list := exec.Command("go", "list", "-f", "{{if .CgoFiles}}{{.ImportPath}}{{end}}", "./...")
	list.Dir = ".."
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	const module = "github.com/shuntproxy/shunt/"
	found := 0
	for _, pkg := range strings.Fields(string(out)) {
		found++
		rel := strings.TrimPrefix(pkg, module)
		if rel != "filter/dynmod" && rel != "filter/golang" && !strings.HasPrefix(rel, "build/") {
			t.Errorf("%s uses cgo; only doors and build/ may", pkg)
		}
	}
	if found == 0 {
		t.Error("no package uses cgo: the list is not what this test thinks it is")
	}
}
