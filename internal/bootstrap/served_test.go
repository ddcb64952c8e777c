package bootstrap

import (
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/config"
)

// TestCheckServed: the key of a route's config, and the clusters that shunt's
// routes lead to.
func TestCheckServed(t *testing.T) {
	const routesAt = "static_resources.listeners[0].filter_chains[0].filters[0].typed_config.route_config.virtual_hosts[0].routes"
	const stateOff = "      \"@type\": type.googleapis.com/envoy.config.route.v3.FilterConfig\n      disabled: true\n"
	const comment = "\n            # A route finds"
	const named = "name: shunt" + comment
	const canary = "- name: canary\n  type: STATIC\n  connect_timeout: 1s\n"
	toCanary := func(action string) string { return "- match: {prefix: /x}\n  route: {" + action + ", timeout: 0s}\n" }
	replace := func(pairs ...string) func(string) string {
		return func(text string) string { return strings.NewReplacer(pairs...).Replace(text) }
	}
	twice := func(more string) func(string) string {
		return func(text string) string {
			const router = "          - name: envoy.filters.http.router"
			return strings.Replace(text, router, strings.Replace(filterIn(text, "          "), "- name: shunt\n", "- name: again\n"+more, 1)+router, 1)
		}
	}
	tests := []struct {
		name   string
		routes string
		edit   func(string) string
		want   string // the one problem
		warn   string // the one warning
	}{
		{name: "good", routes: perRoute("StringValue", `"policy: random"`)},
		{
			name: "wrong key", routes: strings.Replace(perRoute("StringValue", `"policy: random"`), "    shunt:\n", "    shnt:\n", 1),
			want: `routes[0].typed_per_filter_config.shnt (line `,
		},
		{
			name: "renamed filter", routes: perRoute("StringValue", `"policy: random"`),
			edit: replace(named, "name: picker"+comment),
			want: `no filter of shunt's has the name "shunt", so Envoy ignores this: the key is the filter's name, here picker`,
		},
		{
			name: "filter that is discovered", routes: perRoute("StringValue", `"policy: random"`),
			edit: func(text string) string {
				const router = "- name: envoy.filters.http.router"
				text = strings.Replace(text, named, "name: picker"+comment, 1)
				return strings.Replace(text, router, "- {name: shunt, config_discovery: {config_source: {ads: {}}}}\n          "+router, 1)
			},
		},
		{name: "wrapped in a FilterConfig under a wrong key", routes: "- match: {prefix: /x}\n  route: {cluster: shunt_engines, timeout: 0s}\n  typed_per_filter_config:\n    other:\n" +
			"      \"@type\": type.googleapis.com/envoy.config.route.v3.FilterConfig\n      config:\n        \"@type\": " + typePrefix + typeModuleRoute +
			"\n        dynamic_module_config: {do_not_close: true}\n        filter_name: shunt\n        filter_config: {\"@type\": type.googleapis.com/google.protobuf.StringValue, value: \"policy: random\"}\n", want: "typed_per_filter_config.other"},
		{name: "no header", edit: replace("use_http_header: true", "use_http_header: false"), want: "static_resources.clusters[0].original_dst_lb_config (line "},
		{name: "no lb config", edit: replace("original_dst_lb_config", "x"), want: "static_resources.clusters[0].original_dst_lb_config (line "},
		{name: "another header", edit: replace("http_header_name: x-gateway-destination-endpoint", "http_header_name: x-other"), want: routesAt + "[0].route.cluster"},
		{name: "said once a cluster", routes: toCanary("cluster: shunt_engines"), edit: replace("use_http_header: true", "use_http_header: false"), want: routesAt + "[0].route.cluster"},
		{name: "header in capitals", edit: replace("http_header_name: x-gateway-destination-endpoint", "http_header_name: X-Gateway-Destination-Endpoint")},
		{name: "another cluster", routes: toCanary("cluster: canary"), warn: routesAt + "[0].route.cluster (line "},
		{name: "EDS that nobody keeps", edit: replace("    type: ORIGINAL_DST\n", "    type: EDS\n    x: {\"@type\": "+typePrefix+"envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost}\n"), warn: "keeps no file of endpoints"},
		{name: "unknown cluster", routes: toCanary("cluster: elsewhere")},
		{name: "cluster of a header", routes: toCanary("cluster_header: x")},
		{name: "weighted", routes: toCanary("weighted_clusters: {clusters: [{name: shunt_engines, weight: 1}, {name: canary, weight: 1}]}"), warn: routesAt + "[0].route.weighted_clusters.clusters[1].name (line "},
		{name: "disabled by shunt", routes: perRoute("StringValue", `"disabled: true"`), warn: "shunt is disabled here, and cluster shunt_engines answers 503"},
		{name: "disabled by Envoy", routes: toCanary("cluster: shunt_engines") + "  typed_per_filter_config:\n    shunt:\n" + stateOff, warn: "shunt is disabled here"},
		{name: "disabled and elsewhere", routes: toCanary("cluster: canary") + "  typed_per_filter_config:\n    shunt:\n" + stateOff},
		{
			name: "disabled above, and not on the route", routes: perRoute("StringValue", `"policy: random"`),
			edit: replace("domains: [\"*\"]\n", "domains: [\"*\"]\n              typed_per_filter_config: {shunt: {\"@type\": type.googleapis.com/envoy.config.route.v3.FilterConfig, disabled: true}}\n"),
			warn: routesAt + "[1].route.cluster (line ",
		},
		{name: "twice in a chain", edit: twice(""), warn: "http_filters[1] (line "},
		{name: "twice, but one of them disabled", edit: twice("            disabled: true\n")},
		{
			name: "in an upstream chain", edit: func(text string) string {
				const options = "        explicit_http_config:\n"
				return strings.Replace(text, options, "        http_filters:\n"+filterIn(text, "        ")+options, 1)
			},
			warn: "typed_extension_protocol_options.envoy.extensions.upstreams.http.v3.HttpProtocolOptions.http_filters[0] (line ",
		},
		{
			name: "in the router's chain",
			edit: func(text string) string {
				const router = `{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router`
				return strings.Replace(text, router+"}", "\n              \"@type\": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router\n              upstream_http_filters:\n"+filterIn(text, "              "), 1)
			},
			warn: "typed_config.upstream_http_filters[0] (line ",
		},
		{name: "disabled in the chain", edit: replace(named, "name: shunt\n            disabled: true"+comment, "use_http_header: true", "use_http_header: false")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := options(minimal)
			o.ExtraRoutes, o.ExtraClusters = tt.routes, canary
			text, err := Generate(o)
			if err != nil {
				t.Fatal(err)
			}
			if tt.edit != nil {
				edited := tt.edit(string(text))
				if edited == string(text) {
					t.Fatal("nothing to replace")
				}
				text = []byte(edited)
			}
			report, err := Check(text, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, got := range []struct {
				what, want string
				config.Problems
			}{{"problems", tt.want, report.Problems}, {"warnings", tt.warn, report.Warnings}} {
				if len(got.Problems) != min(len(got.want), 1) || !strings.Contains(got.Error(), got.want) {
					t.Errorf("%s are\n%s\nwant %q", got.what, got.Error(), got.want)
				}
			}
		})
	}
}

// TestCheckRoutesAlone: a file of routes has no filter whose name could be wrong.
func TestCheckRoutesAlone(t *testing.T) {
	report, err := Check([]byte("resources:\n"+perRoute("StringValue", `"pool: chat"`)), nil)
	if err != nil || report.Routes != 1 || len(report.Problems)+len(report.Warnings) > 0 {
		t.Errorf("%+v, %v", report, err)
	}
}

// filterIn is shunt's filter as it is in a bootstrap, at another depth.
func filterIn(text, indent string) string {
	const depth = "          "
	_, filter, _ := strings.Cut(text, "http_filters:\n")
	lines := strings.SplitAfter(filter, "\n")
	var out strings.Builder
	for i, line := range lines {
		if i > 0 && !strings.HasPrefix(line, depth+"  ") {
			break
		}
		out.WriteString(indent + strings.TrimPrefix(line, depth))
	}
	return out.String()
}
