package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/sim"
)

// curls are the commands of docs/api.md, each with the status it gets.
func curls(t *testing.T) [][2]string {
	t.Helper()
	page, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	var all [][2]string
	for _, m := range regexp.MustCompile("(?s)```sh\n# (\\d{3})\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		all = append(all, [2]string{m[1], m[2]})
	}
	if n := strings.Count(string(page), "```sh"); n != len(all) || n < 25 {
		t.Fatalf("%d of %d commands have a status", len(all), n)
	}
	for _, e := range openai.Endpoints() {
		if !strings.Contains(string(page), strings.TrimSuffix(e.Path, "/")) && !strings.Contains(string(page), strings.TrimPrefix(e.Path, "/v1")) {
			t.Errorf("docs/api.md does not name %s", e.Path)
		}
	}
	return all
}

// TestAPIPage runs the commands of docs/api.md.
func TestAPIPage(t *testing.T) {
	commands := curls(t)
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engine: sim.Config{Output: 3}, config: "models: {known: [{name: asleep}]}\n"})
		for i, c := range commands {
			t.Run(fmt.Sprint(i, " ", strings.Fields(c[1][strings.Index(c[1], "http://"):])[0]), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				script := `curl() { command curl -sS -o "$OUT" -w '%{http_code}' "$@"; }` + "\n" +
					strings.ReplaceAll(c[1], "http://127.0.0.1:8080", "http://"+w.addr)
				out := w.file(fmt.Sprint("curl", i))
				cmd := exec.CommandContext(ctx, "bash", "-c", script)
				cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "OUT=" + out}
				status, err := cmd.CombinedOutput()
				if err != nil || string(status) != c[0] {
					body, _ := os.ReadFile(out) //nolint:gosec // a file of this test's
					t.Errorf("%v, status %s, want %s: %s\n%s", err, status, c[0], c[1], body)
				}
			})
		}
		w.waitLoad(t, 0, 0)
	})
}
