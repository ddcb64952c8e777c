package e2e

import (
	"strings"
	"testing"
)

// TestPanics injects a panic into each callback: the client gets 500, or by
// config a pick, and Envoy goes on.
func TestPanics(t *testing.T) {
	const line = `internal error in \w+: injected`
	rows := []struct {
		where     string
		query     call
		trailers  bool
		wait      bool
		undecided bool // nothing is decided there: the request goes on, whatever the config
	}{
		{where: "headers", query: call{method: "GET", path: "/v1/models"}},
		{where: "headers"},
		{where: "body"},
		{where: "body", trailers: true},
		{where: "trailers", trailers: true, undecided: true},
		{where: "resume", wait: true},
		{where: "finish", undecided: true},
	}
	eachDoor(t, func(t *testing.T, d door) {
		for _, onError := range []string{"reject", "route"} {
			t.Run(onError, func(t *testing.T) {
				w := start(t, d, setup{config: "onInternalError: " + onError + "\n", expect: []string{line, `^shunt: `, `\[error\].*shunt: (goroutine|\S+\(|\s|created by|panic\(|runtime)`}})
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
							if row.trailers {
								q.trailer = header("x-checksum", "kept", "x-gateway-destination-endpoint", "127.0.0.1:1")
								q.length = -1
							}
							r := w.must(t, c, q)
							rejected := onError == "reject" && !row.undecided
							switch {
							case row.where == "resume":
								// A request waits only for a test's wait, which is the other
								// value of the same header: see TestPanicAfterWaiting.
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
								if v := got.Trailers.Get("X-Gateway-Destination-Endpoint"); v != "" {
									t.Errorf("destination trailer %q", v)
								}
							}
							if row.where == "resume" {
								return
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
				w.waitLog(t, line)
			})
		}
	})
}
