package e2e

import (
	"net/http"
	"strings"
	"testing"
)

// TestIdentityHeaders: objective and fairness id, by either name, are in the
// metadata, and not at the engine.
func TestIdentityHeaders(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		const (
			objective, oldObjective = "x-llm-d-inference-objective", "x-gateway-inference-objective"
			fairness, oldFairness   = "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"
		)
		for _, c := range []struct {
			name      string
			pairs     []string
			objective any
			fairness  string
		}{
			{"none", nil, nil, "default-flow"},
			{"canonical", []string{objective, "gold", fairness, "team"}, "gold", "team"},
			{"aliases", []string{oldObjective, "gold", oldFairness, "team"}, "gold", "team"},
			{"canonical wins", []string{oldObjective, "old", objective, "gold", fairness, "team", oldFairness, "old"}, "gold", "team"},
			{"empty is absent", []string{objective, "", fairness, ""}, nil, "default-flow"},
			{"the last of duplicates", []string{fairness, "a", fairness, "b"}, nil, "b"},
		} {
			for proto, client := range w.protocols() {
				r := w.must(t, client, call{header: header(c.pairs...), body: strings.NewReader(chat)})
				if a := w.access(t, r.id); r.status != 200 || a.at("shunt", "objective") != c.objective || a.at("shunt", "fairness_id") != c.fairness {
					t.Errorf("%s %s: %v, log %v", proto, c.name, r, a.at("shunt"))
				}
				_, got := w.received(t, r.id)
				for _, name := range []string{objective, oldObjective, fairness, oldFairness} {
					if v, ok := got.Headers[http.CanonicalHeaderKey(name)]; ok {
						t.Errorf("%s %s: %s %v arrived", proto, c.name, name, v)
					}
				}
			}
		}
		id := newID()
		c := w.dial(t)
		c.send(t, rawRequest("POST", "/v1/chat/completions", "X-Llm-D-INFERENCE-Fairness-ID: Team\r\nx-test-id: "+id+"\r\n", chat))
		if r := c.read(t); r.status != 200 || w.access(t, id).at("shunt", "fairness_id") != "Team" {
			t.Errorf("any case: %v", r)
		}
		for name, want := range map[string]float64{oldObjective: 2, oldFairness: 2} {
			if n := w.metric(t, "shunt_alias_headers_total", "header", name); n != want {
				t.Errorf("%s is counted %v times, want %v", name, n, want)
			}
		}
		if n := w.metric(t, "shunt_duplicate_headers_total", "header", fairness); n != 2 {
			t.Errorf("duplicates are counted %v times", n)
		}
	})
}

// TestTrustedMetadata: what a filter before shunt says of the client counts, and
// what the client says does not.
func TestTrustedMetadata(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{config: "trustMetadata: auth\nforwardControlHeaders: true\n", edit: func(b doc) {
			filters := b.hcm()["http_filters"].([]any)
			auth := doc{"name": "auth", "typed_config": doc{
				"@type":    "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
				"metadata": []any{doc{"metadata_namespace": "auth", "value": doc{"objective": "gold", "fairness_id": "tenant"}}},
			}}
			b.hcm()["http_filters"] = append([]any{auth}, filters...)
		}})
		pairs := []string{
			"x-llm-d-inference-objective", "mine", "x-gateway-inference-objective", "mine",
			"x-llm-d-inference-fairness-id", "mine", "x-gateway-inference-fairness-id", "mine", "x-llm-d-slo-ttft-ms", "100",
		}
		for proto, client := range w.protocols() {
			r := w.must(t, client, call{header: header(pairs...), body: strings.NewReader(chat)})
			if a := w.access(t, r.id); r.status != 200 || a.at("shunt", "objective") != "gold" || a.at("shunt", "fairness_id") != "tenant" {
				t.Errorf("%s: %v, log %v", proto, r, a.at("shunt"))
			}
			_, got := w.received(t, r.id)
			for i := 0; i < 8; i += 2 {
				if v, ok := got.Headers[http.CanonicalHeaderKey(pairs[i])]; ok {
					t.Errorf("%s: %s %v arrived", proto, pairs[i], v)
				}
			}
			if got.Headers.Get("X-Llm-D-Slo-Ttft-Ms") != "100" {
				t.Errorf("%s: a header that is forwarded is %v", proto, got.Headers)
			}
		}
	})
}
