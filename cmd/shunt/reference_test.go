package main

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the reference bootstrap, envoy.yaml")

// TestReferenceBootstrap: envoy.yaml at the root is what this command prints, byte
// for byte.
func TestReferenceBootstrap(t *testing.T) {
	const file = "../../envoy.yaml"
	args := strings.Fields("envoy-config --door contrib --config ../../build/compose/shunt.yaml")
	code, want, stderr := shunt(t, "", args...)
	if code != 0 {
		t.Fatal(stderr)
	}
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil || string(got) != want {
		t.Errorf("%s differs from what the CLI prints (%v): go test ./cmd/shunt -update", file, err)
	}
	code, stdout, stderr := shunt(t, "", "check", file)
	if code != 0 || !strings.Contains(stdout, "ok: 1 filter config,") {
		t.Errorf("check says %d: %s%s", code, stdout, stderr)
	}
}
