package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/bootstrap"
)

// TestSubsetMetadata: the list that a filter before shunt puts into
// envoy.lb.subset_hint bounds the pick; no client can write it, and no option is
// needed.
func TestSubsetMetadata(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		s := setup{engines: 3}
		if d.host == bootstrap.HostGolanghost { // which asks for each type in turn
			s.expect = []string{`key x-gateway-destination-endpoint-subset is not a (string|number|bool)`}
		}
		w := prepareWorld(t, d, s)
		one, two := w.engines[0].Addr(), w.engines[1].Addr()
		cases := []struct {
			name string
			hint any
			want []string // nil for 503
		}{
			{"one", []any{"127.0.0.1:1", one}, []string{one}},
			{"two", []any{one, two}, []string{one, two}},
			{"ip", []any{"127.0.0.1"}, []string{one, two, w.engines[2].Addr()}},
			{"empty", []any{}, nil},
			{"strangers", []any{"127.0.0.1:1", "127.0.0.2", ""}, nil},
			{"text", one, []string{one, two, w.engines[2].Addr()}}, // no list: it says nothing
		}
		var routes strings.Builder
		var filters []any
		for _, c := range cases {
			name := "hint-" + c.name
			filters = append(filters, doc{"name": name, "disabled": true, "typed_config": doc{
				"@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
				"metadata": []any{doc{"metadata_namespace": "envoy.lb.subset_hint", "value": doc{
					"x-gateway-destination-endpoint-subset": c.hint,
				}}},
			}})
			fmt.Fprintf(&routes, `- match: {prefix: /, headers: [{name: x-case, string_match: {exact: %s}}]}
  route: {cluster: shunt_engines, timeout: 0s}
  typed_per_filter_config:
    %s: {"@type": type.googleapis.com/envoy.config.route.v3.FilterConfig, config: {}}
`, c.name, name)
		}
		w.options.ExtraRoutes = routes.String()
		w.setup.edit = func(b doc) { b.hcm()["http_filters"] = append(filters, b.hcm()["http_filters"].([]any)...) }
		w.run(t)
		for _, c := range cases {
			got := map[string]int{}
			for n := 0; n < 30 || len(got) < len(c.want) && n < 300; n++ { // of equals any is picked
				r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: header(
					"x-case", c.name, "x-shunt-explain", "1", "x-gateway-destination-endpoint-subset", w.engines[2].Addr())})
				switch {
				case r.status == 200:
					got[r.header.Get("X-Shunt-Endpoint")]++
				case c.want != nil || r.status != 503 || errorOf(t, r).Error.Code != "rejected-no-endpoints":
					t.Fatalf("%s: %v", c.name, r)
				}
			}
			if len(got) != len(c.want) {
				t.Errorf("%s: picked %v, want %v", c.name, got, c.want)
			}
			for _, e := range c.want {
				if got[e] == 0 {
					t.Errorf("%s: picked %v, want %v", c.name, got, c.want)
				}
			}
		}
	})
}
