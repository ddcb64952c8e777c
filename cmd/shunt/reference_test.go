package main

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the reference bootstraps: envoy.yaml, build/kubernetes/*/bootstrap.yaml")

// TestReferenceBootstraps: envoy.yaml at the root, and those in build/kubernetes,
// are what this command prints, byte for byte.
func TestReferenceBootstraps(t *testing.T) {
	const kubernetes = "--config ../../build/kubernetes/base/shunt.yaml --config-path /etc/shunt/shunt.yaml "
	for file, args := range map[string]string{
		"../../envoy.yaml": "--door contrib --config ../../build/compose/shunt.yaml",
		"../../build/kubernetes/stock/bootstrap.yaml":   kubernetes + "--door stock --module /opt/shunt/libshunt.so",
		"../../build/kubernetes/contrib/bootstrap.yaml": kubernetes + "--door contrib --module /opt/shunt/libshunt_contrib.so",
	} {
		code, want, stderr := shunt(t, "", append([]string{"envoy-config"}, strings.Fields(args)...)...)
		if code != 0 {
			t.Fatal(stderr)
		}
		if *update {
			if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%s differs from what the CLI prints (%v): go test ./cmd/shunt -update", file, err)
		}
	}
	code, stdout, stderr := shunt(t, "", "check", "../../envoy.yaml")
	if code != 0 || !strings.Contains(stdout, "ok: 1 filter config,") {
		t.Errorf("check says %d: %s%s", code, stdout, stderr)
	}
}
