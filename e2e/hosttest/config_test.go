package hosttest

import (
	"encoding/json"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
)

// routed is a route whose config is a list of levels, outermost first.
func routed(t *testing.T, path string, names ...string) string {
	t.Helper()
	var levels []string
	for _, n := range names {
		levels = append(levels, serialized(t, map[string]any{"name": n}))
	}
	settings, err := json.Marshal(map[string]any{"plugin_name": "misuse", "plugin_config": levels})
	if err != nil {
		t.Fatal(err)
	}
	return `- name: ` + path + `
  match: {prefix: /` + path + `}
  route: {cluster: up}
  typed_per_filter_config:
    golanghost:
      "@type": type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilterPerRoute
      dynamic_module_config: {module: {local: {filename: "` + hostModule + `"}}, do_not_close: true, load_globally: true}
      per_route_config_name: golanghost
      filter_config: {"@type": type.googleapis.com/google.protobuf.Struct, value: ` + string(settings) + `}
`
}

// A route's config is merged into the filter's, level by level; without one the filter's is used.
func TestRoutes(t *testing.T) {
	r := setup{name: "f", workers: 2, routes: routed(t, "one", "r") + routed(t, "two", "v", "r")}.start(t)
	for path, want := range map[string]string{"one": "f>r", "two": "f>v>r", "other": "f"} {
		for range 5 {
			if got := r.do(t, call{path: path}).Header.Get("x-config"); got != want {
				t.Errorf("%s: config %q, want %q", path, got, want)
			}
		}
	}
	if err := r.Stop(); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"f", "r", "v", "f>r", "f>v", "f>v>r"} {
		r.waitLog(t, "misuse: config "+name+" destroyed")
	}
}

// A route's config that Parse refuses at its first request is what contrib's RELEASE_ASSERT ends Envoy for.
func TestBadRoute(t *testing.T) {
	r := setup{name: "f", routes: routed(t, "bad", "bad")}.start(t)
	r.dies = true
	if resp, err := r.send(t.Context(), call{path: "bad"}); err == nil {
		_ = resp.Body.Close()
		t.Errorf("answered %d", resp.StatusCode)
	}
	r.wantEnd(t, `MISUSE: Parse of a route's config fails at its first request`)
}

func TestRefused(t *testing.T) {
	tests := []struct {
		name  string
		setup setup
		want  string
	}{
		{"config", setup{name: "bad"}, `failed to parse golang plugin config: name: "bad" is not allowed`},
		{"library", setup{settings: map[string]any{"library_path": "/nowhere/libnone.so"}}, `cannot load : /nowhere/libnone.so`},
		{"no plugin", setup{settings: map[string]any{"library_path": hostModule}}, `cannot find symbol: envoyGoFilterNewHttpPluginConfig`},
		{"setting", setup{settings: map[string]any{"librarypath": "x"}}, `librarypath is unknown or wrong; valid: library_id`},
		{"base64", setup{settings: map[string]any{"plugin_config": "?"}}, `plugin_config is not base64`},
		{"missing", setup{settings: map[string]any{"plugin_config": []any{}}}, `plugin_name and plugin_config are needed`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e, err := tt.setup.try(t, "127.0.0.1:1")
			var start *envoyrun.StartError
			if !errors.As(err, &start) {
				if e != nil {
					_ = e.Stop()
				}
				t.Fatalf("started: %v", err)
			}
			if log := strings.Join(start.Log, "\n"); !strings.Contains(log, tt.want) {
				t.Errorf("no %q in\n%s", tt.want, log)
			}
		})
	}
}

// Where the executable has the golang filter itself, the plugin would call that one with our memory.
func TestRefusedInContrib(t *testing.T) {
	envoy := filepath.Join(scratch, "contrib")
	if err := compile(envoy, []string{filepath.Join(root, "e2e", "hosttest", "testdata", "contrib.c")}, "-rdynamic"); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(envoy, hostModule).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(string(out), "golanghost: refused: ") || !strings.HasSuffix(string(out), "refused\n") {
		t.Errorf("said %q", out)
	}
}
