package bootstrap

import (
	"regexp"
	"strings"
	"testing"
)

// TestCheckMust takes out, one by one, what a configuration must have.
func TestCheckMust(t *testing.T) {
	const manager = "static_resources.listeners[0].filter_chains[0].filters[0].typed_config"
	const host = manager + ".route_config.virtual_hosts[0]"
	const cluster = "static_resources.clusters[0]"
	for _, tt := range []struct {
		name, door string
		cut        string // a regular expression
		put        string
		want       string // the one warning begins with it
	}{
		{name: "early removal", cut: `remove: x-gateway-destination-endpoint\n`, put: "remove: x-other\n", want: manager + ".early_header_mutation_extensions (line "},
		{name: "all early removals", cut: `(?s)\n *early_header_mutation_extensions:.*?x-llm-d-request-dropped-reason`, want: manager + ".early_header_mutation_extensions (line "},
		{name: "capitals", cut: `remove: x-gateway-destination-endpoint\n`, put: "remove: X-Gateway-Destination-Endpoint\n"},
		{name: "idle streams", cut: ` stream_idle_timeout: 3600s`, want: manager + ".stream_idle_timeout (line "},
		{name: "longer idle streams", cut: `stream_idle_timeout: 3600s`, put: "stream_idle_timeout: 0s"},
		{name: "timeout", cut: ` timeout: 0s`, want: host + ".routes[0].route.timeout (line "},
		{name: "a timeout that is meant", cut: ` timeout: 0s`, put: " timeout: 60s"},
		{name: "circuit breakers", cut: `(?s)circuit_breakers:.*?HIGH[^\n]*\n`, want: cluster + ".circuit_breakers (line "},
		{name: "idle connections", cut: ` idle_timeout: 4s`, put: " max_connection_duration: 1s", want: cluster + ".typed_extension_protocol_options (line "},
		{name: "module", cut: `do_not_close: true`, put: "do_not_close: false", want: manager + ".http_filters[0].typed_config.dynamic_module_config.do_not_close (line "},
		{name: "module without a word", cut: `\n *do_not_close: true`, want: manager + ".http_filters[0].typed_config.dynamic_module_config.do_not_close (line "},
		{name: "bodies, which the stock door raises itself", cut: `request_body_buffer_limit: \d+`, put: "request_body_buffer_limit: 1"},
		{name: "bodies", door: DoorContrib, cut: `request_body_buffer_limit: \d+`, put: "request_body_buffer_limit: 4194304", want: host + ".request_body_buffer_limit (line "},
		{name: "no word of bodies", door: DoorContrib, cut: `\n *request_body_buffer_limit: \d+`, want: host + ".request_body_buffer_limit (line "},
		{name: "bodies on the route", door: DoorContrib, cut: `request_body_buffer_limit: \d+\n( *)routes:\n( *)- `, put: "routes:\n$2- request_body_buffer_limit: 9999999\n$2  "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := options(minimal)
			o.Door = tt.door
			text, err := Generate(o)
			if err != nil {
				t.Fatal(err)
			}
			edited := regexp.MustCompile(tt.cut).ReplaceAllString(string(text), tt.put)
			if edited == string(text) {
				t.Fatal("nothing to replace")
			}
			report, err := Check([]byte(edited), nil)
			if err != nil || len(report.Problems) > 0 {
				t.Fatalf("%+v, %v", report, err)
			}
			if len(report.Warnings) != min(len(tt.want), 1) || !strings.HasPrefix(report.Warnings.Error(), tt.want) {
				t.Errorf("warnings are\n%s\nwant %q", report.Warnings.Error(), tt.want)
			}
		})
	}
}
