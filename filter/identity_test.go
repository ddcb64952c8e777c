package filter

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// headersOf sends a request that is routed by its headers, and returns it.
func headersOf(w *world, metadata map[string]string, pairs ...string) *stream {
	s := w.stream()
	s.metadata = metadata
	s.at("GET", "/version", pairs...)
	return s
}

// TestCanonicalHeadersAndAliases: each control header counts by its canonical
// and its deprecated name; the canonical one wins, the last of duplicates
// counts, and an empty value is none.
func TestCanonicalHeadersAndAliases(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m", "n"))
	for _, h := range []struct {
		canonical, alias string
		a, b             string // values
		read             func(s *stream) string
		none             string
	}{
		{"x-llm-d-inference-objective", "x-gateway-inference-objective", "gold", "lead", func(s *stream) string { return s.identity.wishes().objective }, ""},
		{"x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id", "team a", "team b", func(s *stream) string { return s.identity.fairnessID() }, "default-flow"},
		{"x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "200ms", "1.5ms", func(s *stream) string { return s.identity.wishes().ttft.String() }, "0s"},
		{"x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", "20ms", "30ms", func(s *stream) string { return s.identity.wishes().tpot.String() }, "0s"},
		{"x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite", "n", "m", func(s *stream) string { return s.identity.wishes().rewrite }, ""},
	} {
		a, b := strings.TrimSuffix(h.a, "ms"), strings.TrimSuffix(h.b, "ms")
		for _, c := range []struct {
			name  string
			pairs []string
			want  string
			alias float64 // counted
			twice []string
		}{
			{"none", nil, h.none, 0, nil},
			{"canonical", []string{h.canonical, a}, h.a, 0, nil},
			{"alias", []string{h.alias, a}, h.a, 1, nil},
			{"canonical first", []string{h.canonical, a, h.alias, b}, h.a, 0, nil},
			{"alias first", []string{h.alias, b, h.canonical, a}, h.a, 0, nil},
			{"empty", []string{h.canonical, ""}, h.none, 0, nil},
			{"both empty", []string{h.canonical, "", h.alias, ""}, h.none, 0, nil},
			{"canonical empty", []string{h.canonical, "", h.alias, b}, h.b, 1, nil},
			{"twice", []string{h.canonical, b, h.canonical, a}, h.a, 0, []string{h.canonical}},
			{"alias three times", []string{h.alias, b, h.alias, b, h.alias, a}, h.a, 1, []string{h.alias}},
			{"twice, the last one empty", []string{h.canonical, a, h.canonical, ""}, h.a, 0, []string{h.canonical}},
			{"both twice", []string{h.canonical, a, h.alias, b, h.alias, b, h.canonical, b}, h.b, 0, []string{h.canonical, h.alias}},
		} {
			aliases := w.counterValue(t, "shunt_alias_headers_total", "header", h.alias)
			duplicates := map[string]float64{}
			for _, name := range []string{h.canonical, h.alias} {
				duplicates[name] = w.counterValue(t, "shunt_duplicate_headers_total", "header", name)
			}
			s := w.stream()
			s.Headers(post(chatPath, c.pairs...), false, nil, &s.v)
			if got := h.read(s); got != c.want {
				t.Errorf("%s, %s: got %q, want %q", h.canonical, c.name, got, c.want)
			}
			if n := w.counterValue(t, "shunt_alias_headers_total", "header", h.alias) - aliases; n != c.alias {
				t.Errorf("%s, %s: the alias is counted %v times, want %v", h.canonical, c.name, n, c.alias)
			}
			for _, name := range []string{h.canonical, h.alias} {
				want := 0.0
				if slices.Contains(c.twice, name) {
					want = 1
				}
				if n := w.counterValue(t, "shunt_duplicate_headers_total", "header", name) - duplicates[name]; n != want {
					t.Errorf("%s, %s: duplicates of %s are counted %v times, want %v", h.canonical, c.name, name, n, want)
				}
			}
			s.finish(End{})
		}
	}
}

// TestGoals: what can be read as a goal, and what is ignored and counted.
func TestGoals(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"0": 0, "0.0": 0, "200": 200 * time.Millisecond, "0.25": 250 * time.Microsecond, ".5": 500 * time.Microsecond, "7.": 7 * time.Millisecond,
		"86400000": 24 * time.Hour, "86400001": -1, "1e3": -1, "-1": -1, "+1": -1, "1_0": -1, "0x10": -1, "inf": -1, "NaN": -1, "1.2.3": -1,
		"200ms": -1, " 1": -1, ".": -1, "1,5": -1, strings.Repeat("9", 400): -1,
	} {
		for _, name := range []string{"x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"} {
			w := newWorld(t, "")
			w.publish("default", ep(1, "m"))
			s := headersOf(w, nil, name, text)
			got := s.identity.wishes().ttft
			if strings.Contains(name, "tpot") {
				got = s.identity.wishes().tpot
			}
			malformed := w.counterValue(t, "shunt_malformed_headers_total", "header", name)
			if got != max(want, 0) || (malformed == 1) != (want < 0) || s.v.Action != Continue {
				t.Errorf("%s: %q is %v, malformed %v: %s", name, text, got, malformed, show(&s.v))
			}
		}
	}
	for text, want := range map[string]time.Duration{"2s": 2 * time.Second, "1m30s": 90 * time.Second, "0": 0, "0s": 0, "-1s": -1, "2": -1, "soon": -1} {
		w := newWorld(t, "")
		w.publish("default", ep(1, "m"))
		s := headersOf(w, nil, "x-llm-d-inference-ttl", text)
		malformed := w.counterValue(t, "shunt_malformed_headers_total", "header", "x-llm-d-inference-ttl")
		if s.identity.wishes().ttl != max(want, 0) || (malformed == 1) != (want < 0) {
			t.Errorf("ttl %q is %v, malformed %v", text, s.identity.wishes().ttl, malformed)
		}
	}
}

// TestTrustedMetadata: where a filter before us says who the client is, the
// client can't.
func TestTrustedMetadata(t *testing.T) {
	const trust = "trustMetadata: auth"
	sent := []string{
		"x-llm-d-inference-objective", "client", "x-gateway-inference-objective", "client", "x-llm-d-inference-fairness-id", "client",
		"x-gateway-inference-fairness-id", "client", "x-llm-d-slo-ttft-ms", "5",
	}
	metadata := map[string]string{"auth objective": "gold", "auth fairness_id": "tenant", "other objective": "no"}
	for _, c := range []struct {
		name, config        string
		metadata            map[string]string
		objective, fairness string
		removed             bool
	}{
		{"headers count", "forwardControlHeaders: true", metadata, "client", "client", false},
		{"metadata counts", trust, metadata, "gold", "tenant", true},
		{"even where control headers are forwarded", trust + "\nforwardControlHeaders: true", metadata, "gold", "tenant", true},
		{"no metadata", trust, nil, "", "default-flow", true},
		{"one of them", trust, map[string]string{"auth fairness_id": "tenant"}, "", "tenant", true},
	} {
		w := newWorld(t, c.config)
		w.publish("default", ep(1, "m"))
		s := headersOf(w, c.metadata, sent...)
		if s.identity.wishes().objective != c.objective || s.identity.fairnessID() != c.fairness || s.identity.wishes().ttft != 5*time.Millisecond {
			t.Errorf("%s: objective %q, fairness %q, ttft %v", c.name, s.identity.wishes().objective, s.identity.fairnessID(), s.identity.wishes().ttft)
		}
		if s.v.meta("objective") != c.objective || s.v.meta("fairness_id") != c.fairness {
			t.Errorf("%s: %s", c.name, show(&s.v))
		}
		for _, name := range []string{sent[0], sent[2], sent[4], sent[6]} {
			if slices.Contains(s.v.Remove, name) != c.removed {
				t.Errorf("%s: %s is removed: %v", c.name, name, !c.removed)
			}
		}
	}
}

// TestIdentityIsNotBorrowed: it outlives the headers.
func TestIdentityIsNotBorrowed(t *testing.T) {
	for _, n := range []int{1, 38, 39, 40, 256, 257} {
		w := newWorld(t, "")
		w.publish("default", ep(1, "m"))
		memory := []byte(strings.Repeat("a", n))
		s := headersOf(w, nil, "x-llm-d-inference-objective", borrowed(memory), "x-llm-d-inference-fairness-id", borrowed(memory))
		want, fairness := string(memory), string(memory)
		if n > 256 {
			want, fairness = "", "default-flow"
		}
		for i := range memory {
			memory[i] = '!'
		}
		if s.identity.wishes().objective != want || s.identity.fairnessID() != fairness {
			t.Errorf("%d bytes: objective %q, fairness id %q", n, s.identity.wishes().objective, s.identity.fairnessID())
		}
	}
}
