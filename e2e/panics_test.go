package e2e

import (
	"encoding/json"
	"strings"
	"testing"
)

// panicLines are those of a contained panic: what and where, and the stack.
var panicLines = []string{`shunt: internal error in [\w ]+: injected`, `shunt: (goroutine|\S+\(|\s|created by|panic\(|runtime)`}

// TestPanics injects a panic into each callback: the client gets 500, or by
// config a pick, and Envoy goes on.
func TestPanics(t *testing.T) {
	rows := []struct {
		where     string
		query     call
		trailers  bool
		undecided bool // nothing is decided there: the request goes on, whatever the config
		final     bool // there is nothing to route
	}{
		{where: "headers", query: call{method: "GET", path: "/version"}},
		{where: "headers"},
		{where: "body"},
		{where: "body", trailers: true},
		{where: "trailers", trailers: true, undecided: true},
		{where: "too large", query: call{path: "/v1/completions"}, final: true},
		{where: "response", undecided: true},
		{where: "response body", undecided: true},
		{where: "finish", undecided: true},
	}
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		for _, onError := range []string{"reject", "route"} {
			t.Run(onError, func(t *testing.T) {
				w := start(t, d, setup{config: "onInternalError: " + onError + "\n", expect: panicLines})
				for _, row := range rows {
					for proto, c := range w.protocols() {
						t.Run(row.where+" "+proto, func(t *testing.T) {
							before := w.metric(t, "shunt_internal_errors_total", "where", row.where)
							drops := w.metric(t, "shunt_drops_total", "reason", "rejected-internal")
							q := row.query
							q.header = header("x-shunt-test", "panic-"+row.where, "x-shunt-explain", "1",
								"x-gateway-destination-endpoint", "127.0.0.1:1")
							if q.method == "" {
								q.body = &pieces{chat, 10}
							}
							if row.final {
								q.body, q.length = &pieces{chatOf(limit + 1), block}, -1
							}
							if row.trailers {
								q.trailer = header("x-checksum", "kept", "x-gateway-destination-endpoint", "127.0.0.1:1")
								q.length = -1
							}
							r := w.must(t, c, q)
							rejected := row.final || onError == "reject" && !row.undecided
							switch {
							case rejected:
								e := errorOf(t, r).Error
								if r.status != 500 || e.Code != "rejected-internal" || e.Type != "api_error" || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "rejected-internal" {
									t.Errorf("%v", r)
								}
								if r.header.Get("Retry-After") != "" {
									t.Errorf("retry-after %s", r.header.Get("Retry-After"))
								}
								a := w.access(t, r.id)
								if a["details"] != "shunt_rejected-internal" || a.at("shunt", "reason") != "rejected-internal" {
									t.Errorf("access log: %v", a)
								}
							default:
								if r.status != 200 || r.header.Get("X-Shunt-Endpoint") == "" && row.where != "headers" {
									t.Errorf("%v", r)
								}
								e, got := w.received(t, r.id)
								if v := got.Headers["X-Gateway-Destination-Endpoint"]; len(v) != 1 || v[0] != e.Addr() {
									t.Errorf("destination header %q at %s", v, e.Addr())
								}
								if !json.Valid(r.body) || r.err != nil {
									t.Errorf("the engine's answer was changed: %v", r)
								}
								if v := got.Trailers.Get("X-Gateway-Destination-Endpoint"); v != "" {
									t.Errorf("destination trailer %q", v)
								}
							}
							eventually(t, "the fault is counted", func() string {
								if n := w.metric(t, "shunt_internal_errors_total", "where", row.where); n != before+1 {
									return "no"
								}
								return ""
							})
							want := drops
							if rejected {
								want++
							}
							if n := w.metric(t, "shunt_drops_total", "reason", "rejected-internal"); n != want {
								t.Errorf("%v drops counted, want %v", n-drops, want-drops)
							}
							w.waitLoad(t, 0, 0)
							if r := w.must(t, c, call{body: strings.NewReader(chat)}); r.status != 200 {
								t.Errorf("the next request: %v", r)
							}
						})
					}
				}
				w.waitLog(t, panicLines[0])
			})
		}
	})
}

// TestPanicAfterWaiting: the panic comes when a request that waited for the
// pool's start is decided.
func TestPanicAfterWaiting(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		for onError, want := range map[string]int{"reject": 500, "route": 200} {
			t.Run(onError, func(t *testing.T) {
				w, hole := startCold(t, d, "onInternalError: "+onError+"\n", panicLines)
				var all []*background
				for _, c := range w.protocols() {
					h := header("x-shunt-test", "panic-resume")
					all = append(all, w.begin(t, c, call{body: strings.NewReader(chat), header: h}),
						w.begin(t, c, call{method: "GET", path: "/x", header: h}))
				}
				w.waitLoad(t, 0, len(all))
				hole.open()
				for _, b := range all {
					r, err := b.wait()
					if err != nil || r.status != want || (want == 500) != (r.header.Get("X-Llm-D-Request-Dropped-Reason") == "rejected-internal") {
						t.Errorf("%v %v", err, r)
					}
				}
				w.waitLoad(t, 0, 0)
				if n := w.metric(t, "shunt_internal_errors_total", "where", "resume"); n != float64(len(all)) {
					t.Errorf("%v faults counted", n)
				}
				if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
					t.Errorf("the next request: %v", r)
				}
			})
		}
	})
}
