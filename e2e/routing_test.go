package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
)

// TestPickedEndpointGotTheRequest compares what shunt says with what engines
// say, for many requests at once.
func TestPickedEndpointGotTheRequest(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 3})
		for proto, c := range w.protocols() {
			t.Run(proto, func(t *testing.T) {
				const workers, each = 10, 30
				replies := make([][]reply, workers)
				bodies := make([][]string, workers)
				var wg sync.WaitGroup
				for i := range workers {
					wg.Go(func() {
						for j := range each {
							body := chatOf(60 + rand.IntN(20_000))
							if j%3 == 0 {
								body = strings.Replace(body, `{`, `{"stream":true,`, 1)
							}
							r, err := w.do(t.Context(), c, call{body: strings.NewReader(body), header: header("x-shunt-explain", "1")})
							if err != nil || r.status != 200 || r.err != nil {
								t.Errorf("%v %v", err, r)
								return
							}
							replies[i], bodies[i] = append(replies[i], r), append(bodies[i], body)
						}
					})
				}
				wg.Wait()
				if t.Failed() {
					return
				}
				got := map[string]sim.Received{}
				by := map[string]string{}
				for _, e := range w.engines {
					for _, r := range e.Requests("") {
						id := r.Headers.Get("X-Test-Id")
						if id == "" {
							continue // shunt's own, for /v1/models
						}
						if _, twice := got[id]; twice {
							t.Errorf("request %s arrived twice", id)
						}
						got[id], by[id] = r, e.Addr()
					}
				}
				picks := map[string]int{}
				for i := range replies {
					for j, r := range replies[i] {
						picked := r.header.Get("X-Shunt-Endpoint")
						picks[picked]++
						if by[r.id] != picked || got[r.id].Headers.Get("X-Gateway-Destination-Endpoint") != picked {
							t.Errorf("picked %s, served by %s, header %q", picked, by[r.id], got[r.id].Headers["X-Gateway-Destination-Endpoint"])
						}
						if got[r.id].BodySHA256 != sum(bodies[i][j]) {
							t.Errorf("request %s: another body arrived, of %d bytes instead of %d", r.id, got[r.id].BodyLen, len(bodies[i][j]))
						}
						if p := r.header.Get("X-Shunt-Policy"); p != "least-request" {
							t.Errorf("policy %q", p)
						}
					}
				}
				if len(picks) != 3 {
					t.Errorf("picks by endpoint: %v; all three were wanted", picks)
				}
				for i := range replies {
					for _, r := range replies[i] {
						a := w.access(t, r.id)
						if e, up := a.at("shunt", "endpoint"), a["upstream"]; e != r.header.Get("X-Shunt-Endpoint") || up != e {
							t.Errorf("access log: endpoint %v, upstream %v, header %s", e, up, r.header.Get("X-Shunt-Endpoint"))
						}
					}
				}
			})
		}
		w.waitLoad(t, 0, 0)
		const all = 2 * 10 * 30
		if n := w.metric(t, "shunt_picks_total", "policy", "least-request"); n != all {
			t.Errorf("shunt_picks_total %v, want %d", n, all)
		}
		if n := w.metric(t, "shunt_first_byte_seconds"); n != all {
			t.Errorf("%v first bytes timed, want %d", n, all)
		}
	})
}

// TestMetadataAndDebugHeaders is what an access log and a client see of a pick.
func TestMetadataAndDebugHeaders(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1})
		r := w.must(t, w.h1, call{body: strings.NewReader(chat)})
		if h := r.header; h.Get("X-Shunt-Endpoint") != "" || h.Get("X-Shunt-Policy") != "" {
			t.Errorf("debug headers nobody asked for: %v", h)
		}
		a := w.access(t, r.id)
		for key, want := range map[string]any{
			"model": "m", "target_model": "m", "endpoint": w.engines[0].Addr(), "policy": "least-request", "reason": nil, "fallback": nil,
		} {
			if got := a.at("shunt", key); got != want {
				t.Errorf("metadata %s is %v, want %v", key, got, want)
			}
		}
		for _, key := range []string{"pick_us", "ttft_ms"} {
			if _, ok := a.at("shunt", key).(float64); !ok {
				t.Errorf("metadata %s is %v, want a number", key, a.at("shunt", key))
			}
		}
		if a["details"] != "via_upstream" || a["upstream"] != w.engines[0].Addr() {
			t.Errorf("access log: %v", a)
		}
		_, got := w.received(t, r.id)
		if h := got.Headers; h.Get("X-Gateway-Destination-Endpoint") != w.engines[0].Addr() {
			t.Errorf("destination header at the engine: %q", h["X-Gateway-Destination-Endpoint"])
		}
		// Control headers speak to shunt, not to the engine.
		r = w.must(t, w.h1, call{body: strings.NewReader(chat), header: header(
			"x-llm-d-inference-objective", "o", "x-llm-d-inference-fairness-id", "f", "x-llm-d-slo-ttft-ms", "1", "x-slo-tpot-ms", "2",
			"x-llm-d-inference-ttl", "5s", "routing-strategy", "random", "x-shunt-explain", "1", "x-other", "stays")})
		_, got = w.received(t, r.id)
		for name := range got.Headers {
			if strings.HasPrefix(name, "X-Llm-D-") || strings.HasPrefix(name, "X-Slo-") || name == "Routing-Strategy" || name == "X-Shunt-Explain" {
				t.Errorf("%s reached the engine", name)
			}
		}
		if got.Headers.Get("X-Other") != "stays" {
			t.Error("x-other was lost")
		}
	})
}

// TestPathsWithoutPayloadSignals are those on which nothing but the endpoint is
// shunt's business.
func TestPathsWithoutPayloadSignals(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		for proto, c := range w.protocols() {
			for _, q := range []call{
				{method: "GET", path: "/version"},
				{method: "GET", path: "/nothing/known?x=1"},
				{method: "DELETE", path: "/v1/files/f"},
				{method: "OPTIONS", path: "/v1/chat/completions"},
				{method: "HEAD", path: "/v1/models"},
				{method: "POST", path: "/custom", body: strings.NewReader("not JSON \x00\xff")},
				{method: "POST", path: "/custom", body: &pieces{strings.Repeat("y", 100_000), 1000}},
				{method: "PUT", path: "/v1/chat/completions", body: strings.NewReader(`{"model":1}`)},
				{method: "GET", path: "/with/a/body", body: strings.NewReader("body")},
			} {
				t.Run(fmt.Sprint(proto, " ", q.method, " ", q.path), func(t *testing.T) {
					want := ""
					switch b := q.body.(type) {
					case *strings.Reader:
						text := make([]byte, b.Len())
						_, _ = b.ReadAt(text, 0)
						want = string(text)
					case *pieces:
						want = b.text
					}
					r := w.must(t, c, q)
					e, got := w.received(t, r.id)
					path, _, _ := strings.Cut(q.path, "?")
					if got.Method != q.method || got.Path != path || got.BodySHA256 != sum(want) || got.Headers.Get("X-Gateway-Destination-Endpoint") != e.Addr() {
						t.Errorf("arrived as %+v; answered %v", got, r)
					}
					if r.status != got.Status {
						t.Errorf("the engine answered %d, the client saw %d", got.Status, r.status)
					}
					if a := w.access(t, r.id); a.at("shunt", "model") != nil || a.at("shunt", "policy") != "least-request" {
						t.Errorf("metadata: %v", a["shunt"])
					}
				})
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestUpgradesAndCONNECT must not be held for a body that never ends.
func TestUpgradesAndCONNECT(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1})
		t.Run("websocket", func(t *testing.T) {
			engine := startEcho(t)
			w := start(t, d, setup{pools: "pools: {default: {static: [{address: \"" + engine + "\", labels: {model.aibrix.ai/name: m}}]}}\n"})
			// A POST to a path whose body would be read, too: it never ends.
			for _, line := range []string{"GET /v1/realtime?model=m", "GET /v1/chat/completions", "POST /v1/chat/completions"} {
				c := w.dial(t)
				c.send(t, line+" HTTP/1.1\r\nhost: e2e\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
				head := readHead(t, c)
				if !strings.HasPrefix(head, "HTTP/1.1 101 ") {
					t.Fatalf("no upgrade: %q", head)
				}
				w.waitLoad(t, 1, 0)
				c.send(t, "ping")
				echo := make([]byte, 4)
				if _, err := io.ReadFull(c.r, echo); err != nil || string(echo) != "ping" {
					t.Errorf("through the tunnel came %q, %v", echo, err)
				}
				_ = c.Close()
				w.waitLoad(t, 0, 0)
			}
		})
		t.Run("CONNECT", func(t *testing.T) {
			c := w.dial(t)
			c.send(t, "CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: 127.0.0.1:1\r\n\r\n")
			if r := c.read(t); r.status < 400 {
				t.Errorf("CONNECT: %v", r)
			}
		})
		t.Run("an upgrade header that asks for none", func(t *testing.T) {
			// curl sends one with every --http2 request; it must not hide a body.
			c := w.dial(t)
			c.send(t, rawRequest("POST", "/v1/chat/completions", "upgrade: h2c\r\n", strings.Replace(chat, `"m"`, `"unknown"`, 1)))
			if r := c.read(t); r.status != 400 || errorOf(t, r).Error.Code != "model_not_found" {
				t.Errorf("the body was not looked at: %v", r)
			}
		})
		t.Run("an upgrade that is none of Envoy's", func(t *testing.T) {
			c := w.dial(t)
			c.send(t, rawRequest("POST", "/v1/chat/completions", "connection: upgrade\r\nupgrade: other\r\n", strings.Replace(chat, `"m"`, `"unknown"`, 1)))
			if r := c.read(t); r.status < 400 {
				t.Errorf("%v", r)
			}
		})
		w.waitLoad(t, 0, 0)
	})
}

// TestPerRoute is a route's own pool, policy and switch.
func TestPerRoute(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		other := startEngine(t, sim.Config{Models: []string{"o"}})
		w := prepareWorld(t, d, setup{
			routes: d.route("/other", "shunt_engines", "{pool: other, policy: random}") +
				d.route("/v1/completions", "shunt_engines", "policy: random") +
				d.route("/missing", "shunt_engines", "pool: nobody") +
				d.route("/off", "plain", "disabled: true"),
			clusters: plainCluster(other.Addr()),
			expect:   []string{`shunt: ` + d.unknownPool},
		})
		w.setup.pools = "pools:\n  default: {static: " + w.static(w.engines...) + "}\n  other: {static: " + endpoints("o", other) + "}\n"
		w.options.Document = []byte(w.document(""))
		w.run(t)
		explain := header("x-shunt-explain", "1")

		r := w.must(t, w.h1, call{path: "/other/x", header: explain})
		if r.status != 200 || r.header.Get("X-Shunt-Endpoint") != other.Addr() {
			t.Errorf("pool other: %v", r)
		}
		r = w.must(t, w.h1, call{body: strings.NewReader(chat), header: explain})
		if r.status != 200 || r.header.Get("X-Shunt-Endpoint") == other.Addr() {
			t.Errorf("the first pool: %v", r)
		}
		r = w.must(t, w.h1, call{path: "/v1/completions", body: strings.NewReader(`{"model":"m","prompt":"x"}`), header: explain})
		if r.status != 200 || r.header.Get("X-Shunt-Policy") != "random" {
			t.Errorf("the route's policy: %v", r)
		}
		if !d.lateRoutes {
			w.waitLog(t, `\[error\].*shunt: `+d.unknownPool)
		}
		for _, c := range w.protocols() {
			r = w.must(t, c, call{path: "/missing"})
			if e := errorOf(t, r).Error; r.status != 503 || e.Code != "rejected-no-endpoints" || e.Message != d.unknownPoolReply {
				t.Errorf("unknown pool: %v", r)
			}
		}
		w.waitLog(t, `\[error\].*shunt: `+d.unknownPool)
		r = w.must(t, w.h1, call{path: "/off", header: header("x-shunt-explain", "1", "x-llm-d-inference-objective", "o")})
		if r.status != 200 || r.header.Get("X-Shunt-Endpoint") != "" || len(other.Requests("/off")) != 1 {
			t.Errorf("disabled: %v", r)
		}
		if h := other.Requests("/off")[0].Headers; h.Get("X-Llm-D-Inference-Objective") == "" {
			t.Errorf("a disabled route changed control headers: %v", h)
		}
	})
}

// plainCluster is one that knows its only host, named plain.
func plainCluster(addr string) string {
	host, port, _ := strings.Cut(addr, ":")
	return `- name: plain
  type: STATIC
  typed_extension_protocol_options:
    envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
      "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
      explicit_http_config: {http_protocol_options: {enable_trailers: true}}
  load_assignment: {cluster_name: plain, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: ` + host + `, port_value: ` + port + `}}}}]}]}`
}

// TestLeastKVCacheFollowsTheLoad changes which engine is loaded and wants the
// picks to follow once three scrapes of each have been answered.
func TestLeastKVCacheFollowsTheLoad(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 3, config: "policy: least-kv-cache\nscrape: {interval: 50ms, staleAfter: 1h}\n"})
		for round := range 6 {
			idle := round % 3
			for i, e := range w.engines {
				usage := 0.8
				if i == idle {
					usage = 0.1
				}
				e.SetLoad(sim.Load{KVUsage: usage})
			}
			for _, e := range w.engines {
				before := e.Counters().Scrapes
				// An engine's next scrape begins when the answer of the last was
				// taken in: four begun are three followed.
				wait(t, e, func(c sim.Counters) bool { return c.Scrapes >= before+4 })
			}
			// Snapshots are published a little after they are taken in.
			seq := w.status(t).Pools[0].Snapshot
			eventually(t, "a newer snapshot", func() string {
				if s := w.status(t).Pools[0].Snapshot; s <= seq {
					return fmt.Sprint(s)
				}
				return ""
			})
			for range 30 {
				r := w.must(t, w.h2, call{body: strings.NewReader(chat), header: header("x-shunt-explain", "1")})
				if got := r.header.Get("X-Shunt-Endpoint"); got != w.engines[idle].Addr() || r.header.Get("X-Shunt-Fallback") != "" {
					t.Fatalf("round %d: %s was picked, but %s is idle; fallback %q", round, got, w.engines[idle].Addr(), r.header.Get("X-Shunt-Fallback"))
				}
			}
		}
	})
}

// TestFallbackIsSaid: a policy that can score nobody picks at random.
func TestFallbackIsSaid(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{config: "policy: least-kv-cache\n"})
		for _, e := range w.engines {
			if err := e.SetMetricsFault(sim.MetricsFault{Kind: sim.MetricsEmpty}); err != nil {
				t.Fatal(err)
			}
		}
		w.run(t)
		r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: header("x-shunt-explain", "1")})
		if r.status != 200 || r.header.Get("X-Shunt-Fallback") != "random" || w.access(t, r.id).at("shunt", "fallback") != "random" {
			t.Errorf("%v", r)
		}
		if n := w.metric(t, "shunt_fallbacks_total", "policy", "least-kv-cache"); n != 1 {
			t.Errorf("shunt_fallbacks_total %v", n)
		}
	})
}

// TestStreamsPassAsTheyCome compares a streamed answer with the engine's own.
func TestStreamsPassAsTheyCome(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1})
		body := `{"model":"m","stream":true,"max_tokens":200,"messages":[{"role":"user","content":"hi"}]}`
		for proto, c := range w.protocols() {
			r := w.must(t, c, call{body: strings.NewReader(body)})
			if r.status != 200 || r.err != nil || !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
				t.Fatalf("%s: %v", proto, r)
			}
			events := bytes.Count(r.body, []byte("data: "))
			if !bytes.HasSuffix(r.body, []byte("data: [DONE]\n\n")) || events < 200 {
				t.Errorf("%s: %d events, end %q", proto, events, r.body[max(0, len(r.body)-40):])
			}
			for event := range bytes.SplitSeq(r.body, []byte("\n\n")) {
				text, ok := bytes.CutPrefix(event, []byte("data: "))
				if ok && !bytes.Equal(text, []byte("[DONE]")) && !json.Valid(text) {
					t.Errorf("%s: event %q", proto, event)
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}
