package bootstrap

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/config"
)

func TestCheckEndpoints(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		file := filepath.Join(folder, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	good := write("good.yaml", `[{address: "10.0.0.9:9000", labels: {model.aibrix.ai/metric-port: "9000"}}]`)
	below := write("below.yaml", `static: [{address: "10.0.0.9:9000"}]`)
	engines := write("engines.yaml", `[{address: 10.0.0.1, labels: {model.aibrix.ai/engine: vlm}}]`)
	broken := write("broken.yaml", "- {address: engine-1}\n- {adress: 10.0.0.1}\n")
	const named = `{address: "127.0.0.1:8001", labels: {model.aibrix.ai/metric-port: "8001"}}`
	tests := []struct {
		name     string
		document string
		problems []string
		warnings []string
	}{
		{name: "good", document: `pools: {a: {static: [{address: 10.0.0.1}, {address: "10.0.0.2:8000"}, ` + named + `]}}`},
		{
			name: "metrics are not on 8000", document: `pools: {a: {static: [{address: "10.0.0.1:9000"}]}}`,
			warnings: []string{`pools.a.static[0]: serves on port 9000 and its metrics are looked for on port 8000`},
		},
		{
			name: "the port is a label", document: `pools: {a: {static: [{address: 10.0.0.1, labels: {model.aibrix.ai/port: "9000"}}]}}`,
			warnings: []string{`pools.a.static[0]: serves on port 9000`},
		},
		{name: "it is meant", document: `pools: {a: {static: [{address: "10.0.0.1:9000", labels: {model.aibrix.ai/metric-port: "8000"}}]}}`},
		{
			name:     "shared",
			document: `pools: {a: {static: [` + named + `]}, b: {static: [` + named + `, {address: "127.0.0.1:8002", labels: {model.aibrix.ai/metric-port: "8001"}}]}}`,
			warnings: []string{`pools.b.static[1]: has its metrics at 127.0.0.1:8001, where pools.a.static[0] has them`},
		},
		{
			name: "label", document: `pools: {a.b: {static: [{address: 10.0.0.1, labels: {model.aibrix.ai/nam: m, team: x}}]}}`,
			warnings: []string{`pools["a.b"].static[0].labels["model.aibrix.ai/nam"]: is not read; these are: model.aibrix.ai/name`},
		},
		{name: "label for profiles", document: `pools: {a: {static: [{address: 10.0.0.1, labels: {model.aibrix.ai/hardware: h100}}]}}`},
		{
			name: "file with an engine that is unknown", document: "pools: {a: {file: {path: " + engines + "}}}",
			warnings: []string{"pools.a.file.path(" + engines + `)[0].labels["model.aibrix.ai/engine"]: unknown engine "vlm", valid: `},
		},
		{name: "file", document: "pools: {a: {file: {path: " + good + "}}}"},
		{
			name: "file with the list below static", document: "pools: {a: {file: {path: " + below + "}}}",
			warnings: []string{"pools.a.file.path(" + below + ")[0]: serves on port 9000"},
		},
		{
			name: "file that is not there", document: "pools: {a: {file: {path: " + folder + "/none.yaml}}}",
			warnings: []string{"pools.a.file.path: " + folder + "/none.yaml does not exist here"},
		},
		{
			name: "files that are not there",
			document: "pools: {a: {kubernetes: {kubeconfig: /none/kube}}}\ndestination: eds\neds: {path: /none/eds.json}\n" +
				"scrape: {bearerTokenFile: /none/token, tls: {enabled: true, caFile: /none/ca}}\n" +
				"prometheus: {url: https://p, tls: {caFile: /none/pca, certFile: /none/cert, keyFile: /none/key}, basicAuth: {username: u, passwordFile: /none/password}}",
			warnings: []string{
				"pools.a.kubernetes.kubeconfig: /none/kube does not exist here: where it does not exist when Envoy starts, the config is refused",
				"eds.path: /none does not exist here: where",
				"scrape.tls.caFile: /none/ca does not exist here: no engine's metrics are read until it does",
				"scrape.bearerTokenFile: /none/token",
				"prometheus.tls.caFile: /none/pca does not exist here: the server is not asked until it does",
				"prometheus.tls.certFile: /none/cert", "prometheus.tls.keyFile: /none/key", "prometheus.basicAuth.passwordFile: /none/password",
			},
		},
		{
			name: "files that are there", document: "pools: {a: {static: []}}\ndestination: eds\neds: {path: " + folder + "/eds.json}\nscrape: {bearerTokenFile: " + good + "}\n" +
				"prometheus: {url: http://p, bearerTokenFile: " + good + "}",
		},
		{
			name: "broken file", document: "pools: {a: {file: {path: " + broken + "}}}",
			problems: []string{"pools.a.file.path(" + broken + "): line 1: [0].address", "pools.a.file.path(" + broken + "): line 2: "},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg, err := config.Parse([]byte(tt.document))
			if err != nil {
				t.Fatal(err)
			}
			problems, warnings := CheckEndpoints(cfg)
			compare(t, "problems", problems, tt.problems)
			compare(t, "warnings", warnings, tt.warnings)

			text, err := Generate(options(tt.document))
			if err != nil {
				t.Fatal(err)
			}
			report, err := Check(text, nil)
			if err != nil || len(report.Problems) != len(problems) || len(report.Warnings) != len(warnings) {
				t.Errorf("of the bootstrap: %+v, %v", report, err)
			}
		})
	}
}

func compare(t *testing.T, what string, got config.Problems, want []string) {
	t.Helper()
	for i, p := range got {
		if i >= len(want) || !strings.HasPrefix(p.String(), want[i]) {
			t.Errorf("%s[%d] is\n%s\nwant %q", what, i, p, want)
		}
	}
	if len(got) < len(want) {
		t.Errorf("%d %s, want %q", len(got), what, want)
	}
}
