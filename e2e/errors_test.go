package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
)

// errorRow is a request that shunt or Envoy answers, and what it says.
type errorRow struct {
	name   string
	query  call
	text   string // the body
	test   string // x-shunt-test
	status int
	code   string
	kind   string
	param  string
	reason string // x-llm-d-request-dropped-reason
	grpc   string // grpc-status that a gRPC client would get
	early  bool   // answered at the headers, so that an HTTP/1.1 connection can't go on
}

func errorRows() []errorRow {
	const invalid = "invalid_request_error"
	return []errorRow{
		{name: "not JSON", text: "{not JSON", status: 400, code: "invalid_json", kind: invalid, grpc: "3"},
		{name: "no body", text: "", status: 400, code: "invalid_json", kind: invalid, grpc: "3"},
		{name: "no model", text: `{"messages":[{"role":"user","content":"x"}]}`, status: 400, code: "missing_required_parameter", kind: invalid, param: "model", grpc: "3"},
		{name: "model is a number", text: `{"model":1,"messages":[{"role":"user","content":"x"}]}`, status: 400, code: "invalid_value", kind: invalid, param: "model", grpc: "3"},
		{name: "two models", text: strings.Replace(chat, "{", `{"model":"m",`, 1), status: 400, code: "duplicate_parameter", kind: invalid, param: "model", grpc: "3"},
		{name: "no messages", text: `{"model":"m"}`, status: 400, code: "missing_required_parameter", kind: invalid, param: "messages", grpc: "3"},
		{name: "unknown model", text: strings.Replace(chat, `"m"`, `"nobody"`, 1), status: 400, code: "model_not_found", kind: invalid, param: "model", grpc: "3"},
		{name: "strategy that is not allowed", text: chat, query: call{header: header("routing-strategy", "fastest")}, early: true, status: 400, code: "invalid_routing_strategy", kind: invalid, grpc: "3"},
		{name: "too large", text: chatOf(limit + 1), early: true, status: 413, code: "request_too_large", kind: invalid, grpc: "3"},
		{name: "waited too long", text: chat, test: "wait-1ms", status: 429, code: "rejected-ttl-expired", kind: "rate_limit_error", reason: "rejected-ttl-expired", grpc: "8"},
		{name: "internal", text: chat, test: "panic-body", status: 500, code: "rejected-internal", kind: "api_error", reason: "rejected-internal", grpc: "13"},
		{name: "known model that nobody serves", text: strings.Replace(chat, `"m"`, `"known"`, 1), status: 503, code: "rejected-no-endpoints", kind: "overloaded_error", reason: "rejected-no-endpoints", grpc: "14"},
		{name: "every pod of the model killed", text: strings.Replace(chat, `"m"`, `"dead"`, 1), status: 503, code: "rejected-no-endpoints", kind: "overloaded_error", reason: "rejected-no-endpoints", grpc: "14"},
		{name: "unknown model, said by the header's name", text: strings.Replace(chat, `"m"`, `"m\"\n\u0000<"`, 1), status: 400, code: "model_not_found", kind: invalid, param: "model", grpc: "3"},
	}
}

const errorConfig = "models: {known: [{name: known}]}\nallowedPolicies: [random]\n"

// startWithDead is a world in which the engines of model dead are killed.
func startWithDead(t *testing.T, d door) *world {
	dead := startEngine(t, sim.Config{Models: []string{"dead"}})
	w := prepareWorld(t, d, setup{engines: 1, config: errorConfig, expect: panicLines})
	var all []any
	for _, list := range []string{endpoints("m", w.engines...), endpoints("dead", dead)} {
		var some []any
		if err := json.Unmarshal([]byte(list), &some); err != nil {
			t.Fatal(err)
		}
		all = append(all, some...)
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	w.setup.pools = "pools: {default: {static: " + string(text) + "}}\n"
	w.options.Document = []byte(w.document(errorConfig))
	w.run(t)
	w.waitState(t, dead, "ready")
	_ = dead.Close()
	w.waitState(t, dead, "not-ready")
	return w
}

// TestErrors is what clients, access logs and metadata see of each error, and
// that the client's connection lives on.
func TestErrors(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := startWithDead(t, d)
		t.Run("h1, all on one connection", func(t *testing.T) {
			c := w.dial(t)
			for _, row := range errorRows() {
				if row.early {
					continue
				}
				id := newID()
				h := "x-test-id: " + id + "\r\n"
				for k, v := range row.query.header {
					h += k + ": " + v[0] + "\r\n"
				}
				if row.test != "" {
					h += "x-shunt-test: " + row.test + "\r\n"
				}
				c.send(t, rawRequest("POST", "/v1/chat/completions", h, row.text))
				r := c.read(t)
				r.id = id
				if r.header.Get("Connection") == "close" {
					t.Fatalf("%s: the connection is closed: %v", row.name, r)
				}
				w.checkError(t, row, r)
				c.send(t, rawRequest("POST", "/v1/chat/completions", "", chat))
				if r := c.read(t); r.status != 200 {
					t.Fatalf("after %s: %v", row.name, r)
				}
			}
		})
		for _, row := range errorRows() {
			t.Run("h2 "+row.name, func(t *testing.T) {
				q := row.query
				q.header = q.header.Clone()
				if q.header == nil {
					q.header = http.Header{}
				}
				q.header.Set("X-Shunt-Test", row.test)
				q.body = strings.NewReader(row.text)
				w.checkError(t, row, w.must(t, w.h2, q))
			})
			t.Run("gRPC "+row.name, func(t *testing.T) {
				q := row.query
				q.header = q.header.Clone()
				if q.header == nil {
					q.header = http.Header{}
				}
				q.header.Set("Content-Type", "application/grpc+json")
				q.header.Set("X-Shunt-Test", row.test)
				q.body = strings.NewReader(row.text)
				r := w.must(t, w.h2, q)
				h := r.header
				if r.status != 200 || len(r.body) != 0 || h.Get("Grpc-Status") != row.grpc || h.Get("Grpc-Message") == "" || h.Get("Content-Type") != "application/grpc" {
					t.Errorf("%v", r)
				}
				if h.Get("X-Llm-D-Request-Dropped-Reason") != row.reason {
					t.Errorf("drop reason %q, want %q", h.Get("X-Llm-D-Request-Dropped-Reason"), row.reason)
				}
				a := w.access(t, r.id)
				if a.at("shunt", "reason") != row.code {
					t.Errorf("metadata reason %v", a.at("shunt", "reason"))
				}
				if want := "shunt_" + row.code; a["details"] != want {
					t.Errorf("details %v, want %s", a["details"], want)
				}
			})
		}
		w.waitLoad(t, 0, 0)
		drops, refusals := 0.0, 0.0
		for _, row := range errorRows() {
			n := 3.0
			if row.early {
				n = 2
			}
			if row.reason != "" {
				drops += n
			} else {
				refusals += n
			}
		}
		if n := w.metric(t, "shunt_drops_total"); n != drops {
			t.Errorf("shunt_drops_total %v, want %v", n, drops)
		}
		if n := w.metric(t, "shunt_refusals_total"); n != refusals {
			t.Errorf("shunt_refusals_total %v, want %v", n, refusals)
		}
	})
}

func (w *world) checkError(t *testing.T, row errorRow, r reply) {
	t.Helper()
	e := errorOf(t, r).Error
	param := ""
	if e.Param != nil {
		param = *e.Param
	}
	if r.status != row.status || e.Code != row.code || e.Type != row.kind || param != row.param {
		t.Errorf("%s: %v", row.name, r)
	}
	if got := r.header["X-Llm-D-Request-Dropped-Reason"]; strings.Join(got, "|") != row.reason {
		t.Errorf("%s: drop reason %q, want %q", row.name, got, row.reason)
	}
	after := r.header.Get("Retry-After")
	if wanted := row.reason != "" && row.code != "rejected-internal"; wanted {
		if n, err := strconv.Atoi(after); err != nil || n < 1 || n > 3 {
			t.Errorf("%s: retry-after %q, want 1 to 3", row.name, after)
		}
	} else if after != "" {
		t.Errorf("%s: retry-after %q, want none", row.name, after)
	}
	a := w.access(t, r.id)
	if a["details"] != "shunt_"+row.code || a.at("shunt", "reason") != row.code {
		t.Errorf("%s: access log details %v, reason %v", row.name, a["details"], a.at("shunt", "reason"))
	}
	if a["upstream"] != nil || a.at("shunt", "endpoint") != nil {
		t.Errorf("%s: access log names an endpoint: %v", row.name, a)
	}
}

// TestAllEndpointsGone is what requests without a model get then, gRPC ones
// too.
func TestAllEndpointsGone(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1})
		_ = w.engines[0].Close()
		w.waitState(t, w.engines[0], "not-ready")
		for proto, c := range w.protocols() {
			for _, q := range []call{{method: "GET", path: "/version"}, {path: "/x", body: strings.NewReader("y")}, {body: strings.NewReader(chat)}} {
				r := w.must(t, c, q)
				if e := errorOf(t, r).Error; r.status != 503 || e.Code != "rejected-no-endpoints" {
					t.Errorf("%s %s: %v", proto, q.path, r)
				}
			}
		}
		r := w.must(t, w.h2, call{path: "/inference.GRPC/Generate", body: bytes.NewReader([]byte{0, 0, 0, 0, 0}), header: header("content-type", "application/grpc")})
		if r.status != 200 || r.header.Get("Grpc-Status") != "14" || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "rejected-no-endpoints" {
			t.Errorf("gRPC: %v", r)
		}
	})
}

// messageless takes Envoy's own words out of an error object.
var messageless = regexp.MustCompile(`"message":"[^"]*"`)

// TestEnvoysOwnErrors come as OpenAI error objects too, on Anthropic's paths as
// Anthropic's, and for gRPC clients as Envoy makes them.
func TestEnvoysOwnErrors(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, edit: func(b doc) {
			routes := b.virtualHost()["routes"].([]any)
			routes[len(routes)-1].(doc)["match"] = doc{"prefix": "/v1"}
		}, routes: `- match: {path: /short}
  route: {cluster: shunt_engines, timeout: 0.05s}
- match: {path: /short/v1/messages}
  route: {cluster: shunt_engines, timeout: 0.05s}
- match: {prefix: /refused/, headers: [{name: status, string_match: {exact: "401"}}]}
  direct_response: {status: 401}
- match: {prefix: /refused/, headers: [{name: status, string_match: {exact: "403"}}]}
  direct_response: {status: 403}
- match: {prefix: /refused/, headers: [{name: status, string_match: {exact: "413"}}]}
  direct_response: {status: 413}
- match: {prefix: /refused/, headers: [{name: status, string_match: {exact: "422"}}]}
  direct_response: {status: 422}
- match: {prefix: /refused/, headers: [{name: status, string_match: {exact: "429"}}]}
  direct_response: {status: 429}
- match: {prefix: /refused/, headers: [{name: status, string_match: {exact: "503"}}]}
  direct_response: {status: 503}
`})
		w.engines[0].SetHold(true)
		for proto, c := range w.protocols() {
			for _, row := range []struct {
				name, path string
				status     int
				code, kind string
			}{
				{"no route", "/nowhere", 404, "route_not_found", "invalid_request_error"},
				{"timeout", "/short", 504, "response_timeout", "api_error"},
			} {
				t.Run(fmt.Sprint(proto, " ", row.name), func(t *testing.T) {
					r := w.must(t, c, call{path: row.path, body: strings.NewReader("x")})
					if e := errorOf(t, r).Error; r.status != row.status || !strings.HasPrefix(e.Code, row.code) || e.Type != row.kind || e.Param != nil {
						t.Errorf("%v", r)
					}
					if r.header.Get("X-Llm-D-Request-Dropped-Reason") != "" {
						t.Errorf("a drop reason on Envoy's own error: %v", r.header)
					}
				})
			}
			for _, row := range []struct {
				path, sent string
				status     int
				kind       string
			}{
				{"/nowhere/v1/messages", "", 404, "not_found_error"},
				{"/nowhere/v1/messages/count_tokens/?beta=true", "", 404, "not_found_error"},
				{"/short/v1/messages", "", 504, "api_error"},
				{"/refused/v1/messages?beta=true", "401", 401, "authentication_error"},
				{"/refused/v1/messages/", "403", 403, "permission_error"},
				{"/refused/v1/messages", "413", 413, "request_too_large"},
				{"/refused/v1/messages", "422", 422, "invalid_request_error"},
				{"/refused/v1/messages/count_tokens", "429", 429, "rate_limit_error"},
				{"/refused/v1/messages", "503", 503, "overloaded_error"},
			} {
				r := w.must(t, c, call{path: row.path, body: strings.NewReader("x"), header: header("status", row.sent)})
				want := fmt.Sprintf(`{"error":{"message":"","type":%q},"type":"error"}`, row.kind)
				if got := messageless.ReplaceAllString(strings.TrimSpace(string(r.body)), `"message":""`); r.status != row.status || got != want {
					t.Errorf("%s %s: %v, want %d %s", proto, row.path, r, row.status, want)
				}
			}
			// The path decides, and not its query.
			r := w.must(t, c, call{path: "/nowhere?at=/v1/messages"})
			if e := errorOf(t, r).Error; r.status != 404 || e.Type != "invalid_request_error" {
				t.Errorf("%s: %v", proto, r)
			}
		}
		r := w.must(t, w.h2, call{path: "/nowhere", header: header("content-type", "application/grpc")})
		if r.status != 200 || r.header.Get("Grpc-Status") != "12" || strings.Contains(r.header.Get("Grpc-Message"), "{") {
			t.Errorf("gRPC: %v", r)
		}
		w.waitLoad(t, 0, 0)
		// What took too long is not held against the engine.
		if n := w.metric(t, "shunt_endpoint_faults_total"); n != 0 {
			t.Errorf("%v faults", n)
		}
	})
}
