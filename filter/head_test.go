package filter

import (
	"slices"
	"strings"
	"testing"
)

var (
	spoofNames = []string{
		"x-envoy-original-dst-host", "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-served",
		"x-gateway-destination-endpoint-subset", "x-llm-d-request-dropped-reason",
	}
	controlNames = []string{
		"routing-strategy", "x-gateway-inference-fairness-id", "x-gateway-inference-objective", "x-gateway-model-name-rewrite",
		"x-llm-d-inference-fairness-id", "x-llm-d-inference-objective", "x-llm-d-inference-ttl",
		"x-llm-d-model-name-rewrite", "x-llm-d-slo-tpot-ms", "x-llm-d-slo-ttft-ms",
		"x-shunt-explain", "x-slo-tpot-ms", "x-slo-ttft-ms",
	}
)

// everyHeader has each known header twice, one that looks like them, and one
// with no value.
func everyHeader(pairs ...string) []string {
	for _, name := range append(slices.Clone(spoofNames), controlNames...) {
		pairs = append(pairs, name, "1", name, "2")
	}
	return append(pairs, "x-gateway-destination-endpoints", "1", "x-llm-d-inference-ttl", "", "authorization", "secret")
}

func TestRemovals(t *testing.T) {
	without := func(names []string, name string) []string {
		return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == name })
	}
	const subset = "x-gateway-destination-endpoint-subset"
	for _, c := range []struct {
		name, config string
		route        *Route
		want         []string
	}{
		{"default", "", nil, slices.Concat(spoofNames, controlNames)},
		{"control headers are forwarded", "forwardControlHeaders: true", nil, spoofNames},
		{"the subset is trusted", "subsetHeader: true", nil, slices.Concat(without(spoofNames, subset), controlNames)},
		{"both", "subsetHeader: true\nforwardControlHeaders: true", nil, without(spoofNames, subset)},
		{"a disabled route", "", disabledRoute(), spoofNames},
		{"a disabled route where the subset is trusted", "subsetHeader: true", disabledRoute(), without(spoofNames, subset)},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.config)
			w.publish("default", ep(2, "m"))
			w.publish("other")
			want := slices.Sorted(slices.Values(c.want))
			for path, send := range map[string]func(s *stream){
				"body":    func(s *stream) { s.Headers(post(chatPath, everyHeader()...), false, c.route, &s.v) },
				"no body": func(s *stream) { s.Headers(head(everyHeader(":method", "GET", ":path", "/x")...), true, c.route, &s.v) },
				"tunnel":  func(s *stream) { s.Headers(head(everyHeader(":method", "CONNECT")...), false, c.route, &s.v) },
			} {
				s := w.stream()
				send(s)
				if got := slices.Sorted(slices.Values(s.v.Remove)); !slices.Equal(got, want) {
					t.Errorf("%s: removed %v, want %v", path, got, want)
				}
				s.Trailers(head(everyHeader()...), &s.v)
				if got := slices.Sorted(slices.Values(s.v.Remove)); !slices.Equal(got, spoofNames) || s.v.Action != Continue {
					t.Errorf("%s: trailers %s, removed %v, want %v", path, s.v.Action, got, spoofNames)
				}
				s.finish(End{})
			}
			if n := w.counterValue(t, "shunt_spoofed_headers_total"); n != 3 {
				t.Errorf("%v spoofed requests counted, want 3", n)
			}
		})
	}
}

func disabledRoute() *Route { r := new(Route); r.Disabled = true; return r }

func TestDisabledRouteIsLeftAlone(t *testing.T) {
	w := newWorld(t, "")
	s := w.stream()
	s.Headers(post(chatPath), false, disabledRoute(), &s.v)
	if got := show(&s.v); got != "continue" {
		t.Errorf("got %q", got)
	}
	if got := show(s.finish(End{Details: "upstream_reset_before_response_started{connection_termination}"})); got != "continue" {
		t.Errorf("its end: %q", got)
	}
}

func TestSpoofedOnlyWhereRemoved(t *testing.T) {
	w := newWorld(t, "subsetHeader: true")
	w.publish("default", ep(1))
	for i, name := range []string{"x-gateway-destination-endpoint-subset", "x-shunt-explain", "authorization"} {
		w.stream().get(name, "10.0.0.1:8000")
		if n := w.counterValue(t, "shunt_spoofed_headers_total"); n != 0 {
			t.Errorf("case %d: counted %v", i, n)
		}
	}
}

func TestLookupHeader(t *testing.T) {
	if len(spoofNames)+len(controlNames) != int(numHeaders) {
		t.Fatalf("the test knows %d headers, the filter %d", len(spoofNames)+len(controlNames), numHeaders)
	}
	for _, name := range slices.Concat(spoofNames, controlNames) {
		h, ok := lookupHeader(name)
		if !ok || headerNames[h] != name {
			t.Errorf("%s is not known", name)
		}
		if spoof := spoofable>>h&1 == 1; spoof != slices.Contains(spoofNames, name) {
			t.Errorf("%s is in the wrong class", name)
		}
		for _, other := range []string{name + "x", name[:len(name)-1], "y" + name[1:], strings.ToUpper(name)} {
			if _, ok := lookupHeader(other); ok {
				t.Errorf("%s is known", other)
			}
		}
	}
}

func TestHeadValues(t *testing.T) {
	for _, c := range []struct {
		name   string
		values []string
		want   string
		seen   bool
	}{
		{"absent", nil, "", false},
		{"one", []string{"a"}, "a", true},
		{"the last of duplicates", []string{"a", "b"}, "b", true},
		{"empty is absent, and still removed", []string{""}, "", true},
		{"empty does not undo", []string{"a", ""}, "a", true},
		{"empty first", []string{"", "b"}, "b", true},
	} {
		var pairs []string
		for _, v := range c.values {
			pairs = append(pairs, "routing-strategy", v)
		}
		h := head(pairs...)
		if got, seen := h.value(hdrRoutingStrategy), h.seen != 0; got != c.want || seen != c.seen {
			t.Errorf("%s: %q, seen %v", c.name, got, seen)
		}
	}
}

func TestHeadFields(t *testing.T) {
	for _, c := range []struct {
		pairs  []string
		length int64
		tunnel bool
		grpc   bool
	}{
		{nil, -1, false, false},
		{[]string{"content-length", "0"}, 0, false, false},
		{[]string{"content-length", "4194305"}, 4194305, false, false},
		{[]string{"content-length", "-1"}, -1, false, false},
		{[]string{"content-length", "9223372036854775808"}, -1, false, false},
		{[]string{"content-length", "1e3"}, -1, false, false},
		{[]string{":method", "CONNECT"}, -1, true, false},
		{[]string{"upgrade", "websocket", ":method", "GET"}, -1, true, false},
		{[]string{"content-type", "application/grpc"}, -1, false, true},
		{[]string{"content-type", "application/grpc-web+json"}, -1, false, true},
		{[]string{"content-type", "application/json"}, -1, false, false},
	} {
		h := head(c.pairs...)
		if h.ContentLength != c.length || h.Tunnel != c.tunnel || h.grpc() != c.grpc {
			t.Errorf("%v: length %d, tunnel %v, grpc %v", c.pairs, h.ContentLength, h.Tunnel, h.grpc())
		}
		h.Reset()
		if h.ContentLength != -1 || h.Tunnel || h.seen != 0 || h.ContentType != "" {
			t.Errorf("%v: Reset left %+v", c.pairs, h)
		}
	}
}
