package bootstrap

import (
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/config"
)

func perRoute(kind, value string) string {
	return "- match: {prefix: /x}\n  route: {cluster: shunt_engines, timeout: 0s}\n  typed_per_filter_config:\n" +
		"    shunt:\n" +
		"      \"@type\": type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilterPerRoute\n" +
		"      dynamic_module_config: {name: shunt, do_not_close: true}\n      filter_name: shunt\n" +
		"      filter_config: {\"@type\": type.googleapis.com/google.protobuf." + kind + ", value: " + value + "}\n"
}

func TestCheck(t *testing.T) {
	const at = "static_resources.listeners[0].filter_chains[0].filters[0].typed_config."
	const routeAt = at + "route_config.virtual_hosts[0].routes[0].typed_per_filter_config.shunt.filter_config"
	tests := []struct {
		name   string
		routes string
		edit   func(string) string
		want   []string // problems
		warn   string
	}{
		{name: "good"},
		{name: "route", routes: perRoute("StringValue", `"pool: default"`)},
		{name: "route names no pool", routes: perRoute("StringValue", `"policy: random"`)},
		{name: "struct", routes: perRoute("Struct", `{pool: default}`), warn: "Envoy 1.38"},
		{
			name: "pool", routes: perRoute("StringValue", `"pool: chat"`),
			want: []string{routeAt + ".pool", `no filter config defines pool "chat"; there are: default`},
		},
		{
			name: "route shape", routes: perRoute("StringValue", `"pol: chat"`),
			want: []string{routeAt + ": pol", "did you mean pool?"},
		},
		{name: "route type", routes: perRoute("Duration", `1s`), want: []string{routeAt, `is a "google.protobuf.Duration"`}},
		{
			name: "filter", routes: perRoute("StringValue", `"pool: chat"`),
			edit: func(s string) string { return strings.Replace(s, "10.0.0.1:8000", "engine-1", 1) },
			want: []string{at + "http_filters[0].typed_config.filter_config: pools.default.static[0].address", "names go under dns"},
		},
	}
	noFile := func(string) (*config.Config, error) { t.Error("a file is read"); return nil, nil }
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := options(minimal)
			o.ExtraRoutes = tt.routes
			text, err := Generate(o)
			if err != nil {
				t.Fatal(err)
			}
			if !IsEnvoy(text) || IsEnvoy([]byte(minimal+"\nadmin: {address: \"127.0.0.1:1\"}")) {
				t.Error("IsEnvoy is wrong")
			}
			if tt.edit != nil {
				text = []byte(tt.edit(string(text)))
			}
			report, err := Check(text, noFile)
			if err != nil {
				t.Fatal(err)
			}
			if report.Filters != 1 || (tt.routes == "") != (report.Routes == 0) {
				t.Errorf("%d filters and %d routes", report.Filters, report.Routes)
			}
			wantProblems := min(len(tt.want), 1)
			if len(report.Problems) != wantProblems {
				t.Fatalf("%d problems, want %d:\n%v", len(report.Problems), wantProblems, report.Problems)
			}
			for _, want := range tt.want {
				if got := report.Problems.Error(); !strings.Contains(got, want) {
					t.Errorf("problems are\n%s\nwant %q", got, want)
				}
			}
			if got := report.Warnings.Error(); (tt.warn == "") != (got == "") || !strings.Contains(got, tt.warn) {
				t.Errorf("warnings are %q, want %q", got, tt.warn)
			}
		})
	}
}

func TestCheckConfigFile(t *testing.T) {
	o := options(minimal)
	o.ConfigFile = "/etc/shunt.yaml"
	o.ExtraRoutes = perRoute("StringValue", `"pool: batch"`)
	text, err := Generate(o)
	if err != nil {
		t.Fatal(err)
	}
	for document, want := range map[string]string{
		"pools: {a: {static: []}, batch: {static: []}}": "",
		"pools: {a: {static: []}}":                      `no filter config defines pool "batch"; there are: a`,
		"polcy: x":                                      "configFile(/etc/shunt.yaml): polcy (line 1)",
	} {
		report, err := Check(text, func(path string) (*config.Config, error) {
			if path != o.ConfigFile {
				t.Errorf("reads %s", path)
			}
			return config.Parse([]byte(document))
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := report.Problems.Error(); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%s: problems are %q, want %q", document, got, want)
		}
	}
}

func TestCheckFindsNothing(t *testing.T) {
	for text, want := range map[string]string{
		"static_resources: {}": "no shunt filter in it",
		"":                     "empty",
		"a: {":                 "not YAML",
	} {
		if _, err := Check([]byte(text), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error is %v, want %q", text, err, want)
		}
	}
}
