package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
)

// TestClientAborts: a client that leaves, whenever that is, leaves nothing
// behind.
func TestClientAborts(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, config: "models: {discover: false}\n"}) // a list that is cut off is counted too
		engine := w.engines[0]
		for proto, c := range w.protocols() {
			t.Run(proto+" while the body is sent", func(t *testing.T) {
				before := w.requestsOf(engine, "/v1/chat/completions")
				body, feed := io.Pipe()
				b := w.begin(t, c, call{body: body, length: 1000})
				if _, err := io.WriteString(feed, `{"model":"m",`); err != nil {
					t.Fatal(err)
				}
				w.waitStat(t, "http.shunt.downstream_rq_active", func(n int64) bool { return n == 1 })
				b.cancel()
				_ = feed.Close()
				if r, err := b.wait(); err == nil {
					t.Errorf("answered: %v", r)
				}
				w.waitStat(t, "http.shunt.downstream_rq_active", func(n int64) bool { return n == 0 })
				w.waitLoad(t, 0, 0)
				if n := w.requestsOf(engine, "/v1/chat/completions"); n != before {
					t.Errorf("the engine got %d requests", n-before)
				}
			})
			t.Run(proto+" while it waits", func(t *testing.T) {
				before := w.requestsOf(engine, "/v1/chat/completions")
				cancelled := w.metric(t, "shunt_drops_total", "reason", "rejected-context-cancelled")
				b := w.begin(t, c, call{body: strings.NewReader(chat), header: header("x-shunt-test", "wait-10m")})
				w.waitLoad(t, 0, 1)
				b.cancel()
				_, _ = b.wait()
				w.waitLoad(t, 0, 0)
				if n := w.metric(t, "shunt_drops_total", "reason", "rejected-context-cancelled"); n != cancelled+1 {
					t.Errorf("counted %v times as cancelled", n-cancelled)
				}
				if a := w.accessWhere(t, "rejected-context-cancelled", b.reply.id); a.at("shunt", "reason") != "rejected-context-cancelled" {
					t.Errorf("access log: %v", a)
				}
				if n := w.requestsOf(engine, "/v1/chat/completions"); n != before {
					t.Errorf("the engine got %d requests", n-before)
				}
			})
			t.Run(proto+" while it waits without a body", func(t *testing.T) {
				b := w.begin(t, c, call{method: "GET", path: "/version", header: header("x-shunt-test", "wait-10m")})
				w.waitLoad(t, 0, 1)
				b.cancel()
				_, _ = b.wait()
				w.waitLoad(t, 0, 0)
			})
			t.Run(proto+" after the pick", func(t *testing.T) {
				aborted := engine.Counters().Aborted
				engine.SetHold(true)
				defer engine.SetHold(false)
				b := w.begin(t, c, call{body: strings.NewReader(chat)})
				wait(t, engine, func(c sim.Counters) bool { return c.Held == 1 })
				w.waitLoad(t, 1, 0)
				b.cancel()
				_, _ = b.wait()
				wait(t, engine, func(c sim.Counters) bool { return c.Aborted == aborted+1 && c.Held == 0 })
				w.waitLoad(t, 0, 0)
			})
			t.Run(proto+" in the middle of a stream", func(t *testing.T) {
				aborted := engine.Counters().Aborted
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				req, err := http.NewRequestWithContext(ctx, "POST", "http://"+w.addr+"/v1/chat/completions",
					strings.NewReader(`{"model":"m","stream":true,"max_tokens":100000,"messages":[{"role":"user","content":"hi"}]}`))
				if err != nil {
					t.Fatal(err)
				}
				engine.SetDelays(sim.Delays{BetweenTokens: sim.Duration(1e6)})
				defer engine.SetDelays(sim.Delays{})
				resp, err := c.Do(req)
				if err != nil || resp.StatusCode != 200 {
					t.Fatal(resp, err)
				}
				if _, err := io.ReadFull(resp.Body, make([]byte, 1000)); err != nil {
					t.Fatal(err)
				}
				w.waitLoad(t, 1, 0)
				cancel()
				_ = resp.Body.Close()
				wait(t, engine, func(c sim.Counters) bool { return c.Aborted == aborted+1 })
				w.waitLoad(t, 0, 0)
			})
		}
		// None of that is an engine's fault.
		if n := w.metric(t, "shunt_endpoint_faults_total"); n != 0 {
			t.Errorf("%v faults counted against the engine", n)
		}
		if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
			t.Errorf("afterwards: %v", r)
		}
	})
}

func (w *world) requestsOf(e *sim.Server, path string) int { return len(e.Requests(path)) }

// accessWhere is the access log's record of a request whose id the test may
// not know: the newest that holds a text.
func (w *world) accessWhere(t *testing.T, text, id string) doc {
	t.Helper()
	if id != "" {
		return w.access(t, id)
	}
	line := w.waitLog(t, `"`+text+`".*"test_id":"t\d+t"`)
	_, rest, _ := strings.Cut(line, `"test_id":"`)
	id, _, _ = strings.Cut(rest, `"`)
	return w.access(t, id)
}

// TestEngineFaults is what a client sees when its engine fails, and what is
// counted.
func TestEngineFaults(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		// Its page is another's, so that shunt learns that it refuses from the
		// request that is refused.
		w := prepareWorld(t, d, setup{engines: 1})
		engine := w.engines[0]
		_, page, _ := net.SplitHostPort(startEngine(t, sim.Config{}).Addr())
		w.setup.pools = fmt.Sprintf("pools: {default: {static: [{address: %q, labels: {model.aibrix.ai/name: m, model.aibrix.ai/metric-port: %q}}]}}\n", engine.Addr(), page)
		w.options.Document = []byte(w.document(""))
		w.run(t)
		stream := strings.Replace(chat, "{", `{"stream":true,"max_tokens":50,`, 1)
		for proto, c := range w.protocols() {
			for _, row := range []struct {
				name   string
				fault  sim.Fault
				body   string
				status int
				cut    bool // the body doesn't come to its end
				code   string
				faults float64
			}{
				{"reset before the headers", sim.Fault{Kind: sim.FaultReset, Count: 1}, chat, 503, false, "upstream_reset_before_response_started{connection_termination}", 1},
				{"reset in the middle of an answer", sim.Fault{Kind: sim.FaultResetMid, Count: 1}, chat, 200, true, "", 1},
				{"reset in the middle of a stream", sim.Fault{Kind: sim.FaultResetMid, Count: 1, AfterTokens: 5}, stream, 200, true, "", 1},
				{"500", sim.Fault{Kind: sim.FaultStatus, Count: 1, Status: 500, Body: "engine's own \x00 words"}, chat, 500, false, "", 0},
				{"503", sim.Fault{Kind: sim.FaultStatus, Count: 1, Status: 503}, chat, 503, false, "", 0},
				{"429 before the body is read", sim.Fault{Kind: sim.FaultEarlyStatus, Count: 1, Status: 429, Body: "slow down",
					Headers: map[string]string{"Retry-After": "17", "X-Llm-D-Request-Dropped-Reason": "evicted"}}, chat, 429, false, "", 0},
				{"404", sim.Fault{Kind: sim.FaultStatus, Count: 1, Status: 404, Body: `{"detail":"Not Found"}`}, stream, 404, false, "", 0},
			} {
				t.Run(proto+" "+row.name, func(t *testing.T) {
					if err := engine.SetFaults(row.fault); err != nil {
						t.Fatal(err)
					}
					kind := "reset"
					if row.cut {
						kind = "cut"
					}
					before := w.metric(t, "shunt_endpoint_faults_total", "kind", kind)
					r := w.must(t, c, call{body: strings.NewReader(row.body)})
					if r.status != row.status || (r.err != nil) != row.cut {
						t.Fatalf("%v", r)
					}
					if row.code != "" {
						if e := errorOf(t, r).Error; e.Code != row.code || e.Type != "overloaded_error" || e.Param != nil {
							t.Errorf("%+v", e)
						}
					} else if !row.cut && row.fault.Body != "" && string(r.body) != row.fault.Body {
						t.Errorf("the engine's body was changed: %q", r.body)
					}
					if v, ok := row.fault.Headers["Retry-After"]; ok && r.header.Get("Retry-After") != v {
						t.Errorf("retry-after %q", r.header.Get("Retry-After"))
					}
					if v := r.header.Get("X-Llm-D-Request-Dropped-Reason"); v != "" {
						t.Errorf("an engine's drop reason came through: %q", v)
					}
					w.waitLoad(t, 0, 0)
					if n := w.metric(t, "shunt_endpoint_faults_total", "kind", kind); n != before+row.faults {
						t.Errorf("%v faults counted, want %v", n-before, row.faults)
					}
				})
			}
		}
		t.Run("refused connection", func(t *testing.T) {
			engine.Refuse(true, 0) // it stays ready until two probes have failed
			w.waitStat(t, "cluster.shunt_engines.upstream_cx_active", func(n int64) bool { return n == 0 })
			r := w.must(t, w.h1, call{body: strings.NewReader(chat)})
			if e := errorOf(t, r).Error; r.status != 503 || e.Type != "overloaded_error" || !strings.Contains(e.Code, "connection_failure") {
				t.Errorf("%v", r)
			}
			if n := w.metric(t, "shunt_endpoint_faults_total", "kind", "connect"); n != 1 {
				t.Errorf("%v refused connections counted", n)
			}
			w.waitState(t, engine, "not-ready")
			r = w.must(t, w.h1, call{body: strings.NewReader(chat)})
			if e := errorOf(t, r).Error; r.status != 503 || e.Code != "rejected-no-endpoints" {
				t.Errorf("%v", r)
			}
			if err := engine.Accept(); err != nil {
				t.Fatal(err)
			}
			w.waitState(t, engine, "ready")
			if r = w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
				t.Errorf("%v", r)
			}
		})
		// The last: it is shown as set aside for 10 s.
		t.Run("the only engine is not set aside", func(t *testing.T) {
			if err := engine.SetFaults(sim.Fault{Kind: sim.FaultReset, Count: 5}); err != nil {
				t.Fatal(err)
			}
			for range 5 {
				if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 503 || errorOf(t, r).Error.Code == "rejected-no-endpoints" {
					t.Errorf("%v", r)
				}
			}
			if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
				t.Errorf("%v", r)
			}
		})
		w.waitLoad(t, 0, 0)
	})
}

// TestFailingEngineIsAvoided: resets set an engine aside, refused connections
// make it unready, and another takes over.
func TestFailingEngineIsAvoided(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		for _, row := range []struct {
			name, state string
			fail        func(t *testing.T, e *sim.Server)
		}{
			{"resets", "set-aside", func(t *testing.T, e *sim.Server) {
				if err := e.SetFaults(sim.Fault{Kind: sim.FaultReset}); err != nil {
					t.Fatal(err)
				}
			}},
			{"refuses", "not-ready", func(_ *testing.T, e *sim.Server) { e.Refuse(true, 0) }},
		} {
			t.Run(row.name, func(t *testing.T) {
				w := start(t, d, setup{engines: 2})
				bad, good := w.engines[0], w.engines[1]
				row.fail(t, bad)
				failed := 0
				avoided := func() {
					eventually(t, bad.Addr()+" is "+row.state, func() string {
						if r := w.must(t, w.h2, call{body: strings.NewReader(chat)}); r.status != 200 {
							failed++
						}
						p := endpoint(w.status(t), bad)
						if p.State == row.state {
							return ""
						}
						return p.State
					})
				}
				avoided()
				if row.state == "set-aside" && failed < 3 {
					t.Errorf("set aside after %d resets", failed)
				}
				for n := 0; n < 50; n++ {
					r := w.must(t, w.h2, call{body: strings.NewReader(chat), header: header("x-shunt-explain", "1")})
					if r.status == 200 && r.header.Get("X-Shunt-Endpoint") == good.Addr() {
						continue
					}
					if row.state != "set-aside" || endpoint(w.status(t), bad).State == row.state {
						t.Fatalf("%v", r)
					}
					avoided() // its 10 s were over, so long did 50 requests take
				}
				if p := endpoint(w.status(t), good); p.State != "ready" {
					t.Errorf("the good one is %s", p.State)
				}
				w.waitLoad(t, 0, 0)
			})
		}
	})
}

// TestManyStreams holds 2,000 requests at the engines at once, in each protocol.
func TestManyStreams(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 4})
		const n = 2000
		for proto, c := range w.protocols() {
			t.Run(proto, func(t *testing.T) {
				w.must(t, c, call{method: "GET"}) // opens the one connection of HTTP/2
				for _, e := range w.engines {
					e.SetHold(true)
				}
				var all []*background
				for range n {
					all = append(all, w.begin(t, c, call{body: strings.NewReader(chat)}))
				}
				w.waitLoad(t, n, 0)
				eventually(t, "all are held", func() string {
					held := 0
					for _, e := range w.engines {
						held += e.Counters().Held
					}
					if held == n {
						return ""
					}
					return fmt.Sprint(held)
				})
				// The reservation is made with the pick, so nothing piles up.
				for _, e := range endpointsOf(w, t) {
					if e.InFlight < n/4-n/40 || e.InFlight > n/4+n/40 {
						t.Errorf("%s has %d of %d", e.Endpoint, e.InFlight, n)
					}
				}
				for _, e := range w.engines {
					e.SetHold(false)
				}
				for _, b := range all {
					if r, err := b.wait(); err != nil || r.status != 200 || r.err != nil {
						t.Fatalf("%v %v", err, r)
					}
				}
				w.waitLoad(t, 0, 0)
			})
		}
	})
}

type endpointStatus struct {
	Endpoint string
	InFlight int64
}

func endpointsOf(w *world, t *testing.T) (all []endpointStatus) {
	for _, p := range w.status(t).Pools {
		for _, e := range p.Endpoints {
			all = append(all, endpointStatus{e.Endpoint, e.InFlight})
		}
	}
	return all
}

// TestWaiting lets 2,000 requests wait at once: a third is granted, the clients
// of a third leave, and the time of a third runs out.
func TestWaiting(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{config: "models: {discover: false}\n"}) // a question for models is a request too
		const third = 667
		kinds := []call{
			{header: header("x-shunt-explain", "1")},
			{method: "GET", path: "/version", header: header("x-shunt-explain", "1")}, // waits at its headers
		}
		begin := func(c func(i int) *http.Client, wait string) (all []*background) {
			for i := range third {
				q := kinds[0]
				if i%4 == 3 {
					q = kinds[1]
				} else {
					q.body = strings.NewReader(chatOf(1000 + i))
				}
				q.header = q.header.Clone()
				q.header.Set("X-Shunt-Test", wait)
				all = append(all, w.begin(t, c(i), q))
			}
			return all
		}
		for proto, client := range w.protocols() {
			t.Run(proto, func(t *testing.T) {
				c := func(int) *http.Client { return client }
				leaving := c
				if proto == "h2" {
					// Envoy takes 500 streams that are reset soon after their start
					// for an attack and closes their connection.
					clients := []*http.Client{client2(t), client2(t), client2(t)}
					leaving = func(i int) *http.Client { return clients[i%len(clients)] }
				}
				received := w.engines[0].Counters().Received + w.engines[1].Counters().Received
				before := w.drops(t, "rejected-ttl-expired")
				granted := begin(c, "wait-10m") // first, and grants go by age
				w.waitLoad(t, 0, third)
				aborted := begin(leaving, "wait-10m")
				w.waitLoad(t, 0, 2*third)
				expired := begin(c, "wait-12s")
				eventually(t, "all have come to wait", func() string { // and on a slow machine the time of some has run out
					_, waiting := w.load(t)
					if over := int(w.drops(t, "rejected-ttl-expired") - before); waiting+over < 3*third {
						return fmt.Sprint(waiting, " wait, the time of ", over, " is over")
					}
					return ""
				})
				if status, body := w.adminDo("POST", fmt.Sprint("/test/grant?n=", third)); status != 200 || strings.TrimSpace(body) != fmt.Sprint(third) {
					t.Fatalf("grant: %d %s", status, body)
				}
				for _, b := range aborted {
					b.cancel()
				}
				for _, b := range granted {
					if r, err := b.wait(); err != nil || r.status != 200 || r.header.Get("X-Shunt-Endpoint") == "" {
						t.Fatalf("granted: %v %v", err, r)
					}
				}
				for _, b := range aborted {
					if r, err := b.wait(); err == nil {
						t.Fatalf("aborted, but answered: %v", r)
					}
				}
				for _, b := range expired {
					r, err := b.wait()
					if err != nil || r.status != 429 || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "rejected-ttl-expired" {
						t.Fatalf("expired: %v %v", err, r)
					}
				}
				w.waitLoad(t, 0, 0)
				got := w.engines[0].Counters().Received + w.engines[1].Counters().Received - received
				if got != third {
					t.Errorf("the engines got %d requests, want %d", got, third)
				}
				if a := w.access(t, granted[0].reply.id); a.at("shunt", "queue_ms") == nil {
					t.Errorf("metadata queue_ms is missing: %v", a["shunt"])
				}
			})
		}
	})
}

// TestWaitsAtHeaders: what has to wait before its body is there goes on with the
// body, empty or not, and with its trailers, whichever comes first.
func TestWaitsAtHeaders(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		wait := header("x-shunt-test", "wait-10m")
		trailer := func() http.Header {
			return http.Header{"X-Checksum": {"kept"}, "X-Gateway-Destination-Endpoint": {"127.0.0.1:1"}}
		}
		grant := func(t *testing.T) {
			t.Helper()
			if status, n := w.adminDo("POST", "/test/grant?n=1"); status != 200 || strings.TrimSpace(n) != "1" {
				t.Fatalf("grant: %d %s", status, n)
			}
		}
		arrived := func(t *testing.T, b *background, body string, trailers bool) {
			t.Helper()
			r, err := b.wait()
			if err != nil || r.status != 200 {
				t.Fatalf("%v %v", err, r)
			}
			_, got := w.received(t, r.id)
			if got.BodySHA256 != sum(body) || (got.Trailers.Get("X-Checksum") == "kept") != trailers || got.Trailers.Get("X-Gateway-Destination-Endpoint") != "" {
				t.Errorf("%d bytes arrived, trailers %v", got.BodyLen, got.Trailers)
			}
		}
		for proto, c := range w.protocols() {
			for name, body := range map[string]string{"empty": "", "a byte": "x", "long": strings.Repeat("x", 1<<20)} {
				t.Run(proto+" "+name, func(t *testing.T) {
					b := w.begin(t, c, call{path: "/unknown", header: wait, body: &pieces{body, 997}, length: -1, trailer: trailer()})
					w.waitLoad(t, 0, 1)
					grant(t)
					arrived(t, b, body, true)
				})
				t.Run(proto+" "+name+", granted first", func(t *testing.T) {
					sent, feed := io.Pipe()
					b := w.begin(t, c, call{path: "/unknown", header: wait, body: sent, length: -1})
					w.waitLoad(t, 0, 1)
					grant(t)
					w.waitStat(t, "http.shunt.downstream_rq_active", func(n int64) bool { return n == 1 })
					if _, err := io.WriteString(feed, body); err != nil {
						t.Fatal(err)
					}
					_ = feed.Close()
					arrived(t, b, body, false)
				})
			}
			t.Run(proto+" leaves after the grant", func(t *testing.T) {
				sent, feed := io.Pipe()
				b := w.begin(t, c, call{path: "/unknown", header: wait, body: sent, length: -1})
				w.waitLoad(t, 0, 1)
				grant(t)
				b.cancel()
				_ = feed.Close()
				_, _ = b.wait()
				w.waitStat(t, "http.shunt.downstream_rq_active", func(n int64) bool { return n == 0 })
			})
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestGrantsMeetAborts lets grants and clients that leave race for the same
// requests: each of them ends, and nothing is left.
func TestGrantsMeetAborts(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		for proto := range w.protocols() {
			t.Run(proto, func(t *testing.T) {
				const n = 300 // a client: more resets would look like an attack to Envoy
				for range 3 {
					c := map[string]func(*testing.T) *http.Client{"h1": client1, "h2": client2}[proto](t)
					var all []*background
					for range n {
						all = append(all, w.begin(t, c, call{body: strings.NewReader(chat), header: header("x-shunt-test", "wait-10m")}))
					}
					w.waitLoad(t, 0, n)
					granted := make(chan struct{})
					go func() {
						defer close(granted)
						for range n / 10 {
							w.adminDo("POST", "/test/grant?n=10")
						}
					}()
					for i := range all {
						all[(i*7)%n].cancel()
					}
					<-granted
					for _, b := range all {
						if r, err := b.wait(); err == nil && r.status != 200 {
							t.Fatalf("%v", r)
						}
					}
					w.waitLoad(t, 0, 0)
				}
				if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
					t.Errorf("%v", r)
				}
			})
		}
	})
}
