package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEndpoints(t *testing.T) {
	list := filepath.Join(t.TempDir(), "list.yaml")
	if err := os.WriteFile(list, []byte(`[{address: "10.0.0.1:8000", pod: again}, {address: "10.0.0.2", pod: two, labels: {model.aibrix.ai/engine: other}}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := `
pools:
  a:
    static: [{address: "10.0.0.1:8000", pod: one, labels: {model.aibrix.ai/name: m, model.aibrix.ai/engine: sglang}}]
    file: {path: ` + list + `}
  b: {static: [{address: "[fd00::1]:9000"}]}
`
	const header = "POOL  ENDPOINT        POD  MODEL  ENGINE           READY  SOURCE\n"
	code, stdout, stderr := shunt(t, cfg, "endpoints", "--config", "-")
	want := header +
		"a     10.0.0.1:8000   one  m      sglang           yes    static\n" +
		"a     10.0.0.2:8000   two  -      other (unknown)  yes    file\n" +
		"b     [fd00::1]:9000  -    -      vllm             yes    static\n"
	if code != 0 || stdout != want || stderr != "" {
		t.Errorf("code %d, stderr %q, stdout:\n%s", code, stderr, stdout)
	}
	if code, stdout, _ = shunt(t, cfg, "endpoints", "--config", "-", "--pool", "b"); code != 0 || strings.Contains(stdout, "10.0.0.1") {
		t.Errorf("code %d, stdout:\n%s", code, stdout)
	}
	if code, _, stderr = shunt(t, cfg, "endpoints", "--config", "-", "--pool", "c"); code != 1 || !strings.Contains(stderr, "the config has a, b") {
		t.Errorf("code %d, stderr %q", code, stderr)
	}
	if err := os.WriteFile(list, []byte("- {adress: x}\n- {address: y}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr = shunt(t, cfg, "endpoints", "--config", "-"); code != 1 || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, "; line 2: [1].address") {
		t.Errorf("a broken file: code %d, stderr %q", code, stderr)
	}
	// A server that nobody runs: port 1 of loopback.
	silent := `pools: {a: {dns: {names: [{name: engines.test}], servers: ["127.0.0.1:1"]}}}`
	if code, _, stderr = shunt(t, silent, "endpoints", "--config", "-", "--timeout", "300ms"); code != 1 || !strings.Contains(stderr, "pool a: dns: engines.test") {
		t.Errorf("code %d, stderr %q", code, stderr)
	}
	missing := `pools: {a: {kubernetes: {kubeconfig: /nonexistent}}}`
	if code, _, stderr = shunt(t, missing, "endpoints", "--config", "-", "--timeout", "300ms"); code != 1 || !strings.Contains(stderr, "pool a: kubernetes: kubeconfig: ") {
		t.Errorf("code %d, stderr %q", code, stderr)
	}
}
