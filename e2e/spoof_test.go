package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/shuntproxy/shunt/internal/sim"
)

// spoofs are headers by which a client might choose where its request goes.
func spoofs(target string) map[string][][2]string {
	return map[string][][2]string{
		"destination":        {{"x-gateway-destination-endpoint", target}},
		"in capitals":        {{"X-GATEWAY-Destination-Endpoint", target}},
		"twice":              {{"x-gateway-destination-endpoint", target}, {"x-gateway-destination-endpoint", target}},
		"good and bad":       {{"x-gateway-destination-endpoint", "127.0.0.1:1"}, {"x-gateway-destination-endpoint", target}},
		"a list":             {{"x-gateway-destination-endpoint", target + ", " + target}},
		"not an address":     {{"x-gateway-destination-endpoint", "a, b"}},
		"empty, then filled": {{"x-gateway-destination-endpoint", ""}, {"x-gateway-destination-endpoint", target}},
		"all of them": {{"x-gateway-destination-endpoint", target}, {"x-gateway-destination-endpoint-served", target},
			{"x-gateway-destination-endpoint-subset", target}, {"x-envoy-original-dst-host", target},
			{"x-llm-d-request-dropped-reason", "evicted"}},
	}
}

// spoofNames are the headers that no engine and no host may ever get from a
// client.
var spoofNames = []string{"X-Gateway-Destination-Endpoint-Served", "X-Gateway-Destination-Endpoint-Subset",
	"X-Envoy-Original-Dst-Host", "X-Llm-D-Request-Dropped-Reason"}

// TestSpoofedDestinations sends each spoof on each kind of path, with both
// locks and with the bootstrap's taken out, where shunt runs.
func TestSpoofedDestinations(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		for _, locks := range []string{"both locks", "shunt alone"} {
			t.Run(locks, func(t *testing.T) {
				trap := startCanary(t)
				safe := startEngine(t, sim.Config{})
				s := setup{
					routes: d.route("/off", "plain", "disabled: true") + d.route("/unpicked", "shunt_engines", "disabled: true") +
						d.bypassed("/bypassed", "plain"),
					clusters: plainCluster(safe.Addr()),
				}
				if locks == "shunt alone" {
					s.edit = func(b doc) { delete(b.hcm(), "early_header_mutation_extensions") }
				} else {
					s.routes += d.bypassed("/skipped", "shunt_engines")
				}
				w := start(t, d, s)
				paths := []struct {
					method, path, body string
					status             int
				}{
					{"POST", "/v1/chat/completions", chat, 200},
					{"POST", "/v1/chat/completions", "{not JSON", 400},
					{"POST", "/v1/chat/completions", "", 400},
					{"POST", "/v1/chat/completions", strings.Replace(chat, `"m"`, `"nobody"`, 1), 400},
					{"POST", "/v1/completions", `{"model":"m","prompt":"x"}`, 200},
					{"GET", "/v1/models", "", 200},
					{"GET", "/unknown", "", 200},
					{"DELETE", "/unknown", "", 200},
					{"POST", "/unknown", "body", 200},
					{"POST", "/off", "body", 200},
					{"GET", "/off", "", 200},
					{"POST", "/unpicked", "body", 503},
					{"GET", "/unpicked", "", 503},
					{"POST", "/bypassed", "body", 200},
					{"POST", "/skipped", "body", 503},
				}
				engines := append([]*sim.Server{safe}, w.engines...)
				for _, p := range paths {
					if p.path == "/skipped" && locks != "both locks" {
						continue // nothing of shunt's runs there: only the other lock holds
					}
					for name, spoof := range spoofs(trap.addr) {
						for _, proto := range []string{"h1", "h2"} {
							t.Run(fmt.Sprint(p.method, " ", p.path, " ", p.body[:min(9, len(p.body))], " ", name, " ", proto), func(t *testing.T) {
								id := newID()
								var status int
								if proto == "h1" {
									status = w.spoof1(t, id, p.method, p.path, p.body, spoof)
								} else {
									status = w.spoof2(t, id, p.method, p.path, p.body, spoof, nil)
								}
								if status != p.status {
									t.Errorf("status %d, want %d", status, p.status)
								}
								trap.check(t)
								bypassed := p.path == "/bypassed" && locks != "both locks"
								for _, e := range engines {
									for _, r := range e.Requests(p.path) {
										if r.Headers.Get("X-Test-Id") == id && !bypassed {
											checkClean(t, e, r, e == safe)
										}
									}
								}
							})
						}
					}
				}
				// A route that leads to the engines without a pick warns about it.
				for _, l := range w.envoy.Log() {
					if strings.Contains(l, trap.addr) {
						t.Errorf("the canary's address is in the log: %s", l)
					}
				}
				w.waitLoad(t, 0, 0)
				if n := w.metric(t, "shunt_spoofed_headers_total"); (n > 0) != (locks == "shunt alone") {
					t.Errorf("shunt_spoofed_headers_total is %v with %s", n, locks)
				}
			})
		}
	})
}

// checkClean looks at what an engine got: no header of a client's that steers.
func checkClean(t *testing.T, e *sim.Server, r sim.Received, unpicked bool) {
	t.Helper()
	for _, name := range spoofNames {
		if v, ok := r.Headers[name]; ok {
			t.Errorf("%s: %q reached the engine", name, v)
		}
	}
	got := r.Headers["X-Gateway-Destination-Endpoint"]
	if want := []string{e.Addr()}; unpicked && len(got) > 0 || !unpicked && strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("destination header at the engine %s: %q", e.Addr(), got)
	}
}

// spoof1 sends headers as they are over HTTP/1.1.
func (w *world) spoof1(t *testing.T, id, method, path, body string, spoof [][2]string) int {
	t.Helper()
	var h strings.Builder
	h.WriteString("x-test-id: " + id + "\r\n")
	for _, kv := range spoof {
		h.WriteString(kv[0] + ": " + kv[1] + "\r\n")
	}
	c := w.dial(t)
	c.send(t, rawRequest(method, path, h.String(), body))
	return c.read(t).status
}

// spoof2 sends headers as they are over HTTP/2, which net/http would join or
// refuse, and trailers. Names are made lower case: others are malformed.
func (w *world) spoof2(t *testing.T, id, method, path, body string, spoof, trailers [][2]string) int {
	t.Helper()
	c := w.dial(t)
	c.send(t, http2.ClientPreface)
	fr := http2.NewFramer(c, c.r)
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(fr.WriteSettings())
	block := func(fields [][2]string) []byte {
		var b bytes.Buffer
		enc := hpack.NewEncoder(&b)
		enc.SetMaxDynamicTableSize(0)
		for _, kv := range fields {
			must(enc.WriteField(hpack.HeaderField{Name: strings.ToLower(kv[0]), Value: kv[1]}))
		}
		return b.Bytes()
	}
	head := append([][2]string{{":method", method}, {":path", path}, {":scheme", "http"}, {":authority", "e2e"},
		{"content-type", "application/json"}, {"x-test-id", id}}, spoof...)
	must(fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(head), EndHeaders: true, EndStream: body == "" && trailers == nil}))
	if body != "" {
		must(fr.WriteData(1, trailers == nil, []byte(body)))
	}
	if trailers != nil {
		must(fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(trailers), EndHeaders: true, EndStream: true}))
	}
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	status := ""
	for {
		f, err := fr.ReadFrame()
		must(err)
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			if v := f.PseudoValue("status"); v != "" {
				status = v
			}
		case *http2.RSTStreamFrame:
			t.Fatalf("the stream was reset: %v, status %s", f.ErrCode, status)
		case *http2.GoAwayFrame:
			t.Fatalf("go away: %v", f.ErrCode)
		}
		if h := f.Header(); h.StreamID == 1 && h.Flags.Has(http2.FlagDataEndStream) {
			break
		}
	}
	n := 0
	_, _ = fmt.Sscan(status, &n)
	return n
}

// TestSpoofedTrailers: the same names as trailers, which steer nothing, but
// must not reach an engine that might believe them.
func TestSpoofedTrailers(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		trap := startCanary(t)
		safe := startEngine(t, sim.Config{})
		w := start(t, d, setup{routes: d.route("/off", "plain", "disabled: true"), clusters: plainCluster(safe.Addr())})
		names := append([]string{"X-Gateway-Destination-Endpoint"}, spoofNames...)
		for _, p := range []struct{ path, body string }{
			{"/v1/chat/completions", chat}, {"/unknown", "body"}, {"/off", "body"},
		} {
			for _, wait := range []string{"", "wait-1ms"} {
				if wait != "" && p.path == "/off" {
					continue
				}
				var trailers [][2]string
				text := ""
				for _, n := range names {
					trailers = append(trailers, [2]string{n, trap.addr})
					text += n + ": " + trap.addr + "\r\n"
				}
				trailers = append(trailers, [2]string{"x-checksum", "kept"})
				for _, proto := range []string{"h1", "h2"} {
					t.Run(fmt.Sprint(p.path, " ", proto, " ", wait), func(t *testing.T) {
						id := newID()
						var status int
						if proto == "h1" {
							c := w.dial(t)
							c.send(t, "POST "+p.path+" HTTP/1.1\r\nhost: e2e\r\nx-test-id: "+id+"\r\nx-shunt-test: "+wait+
								"\r\ntransfer-encoding: chunked\r\ntrailer: x-checksum\r\n\r\n"+chunked(p.body, 7, text+"x-checksum: kept\r\n"))
							status = c.read(t).status
						} else {
							status = w.spoof2(t, id, "POST", p.path, p.body, [][2]string{{"x-shunt-test", wait}, {"trailer", "x-checksum"}}, trailers)
						}
						if wait != "" {
							if status != 429 { // its wait ran out
								t.Errorf("status %d", status)
							}
							return
						}
						if status != 200 {
							t.Fatalf("status %d", status)
						}
						for _, e := range append([]*sim.Server{safe}, w.engines...) {
							for _, r := range e.Requests(p.path) {
								if r.Headers.Get("X-Test-Id") != id {
									continue
								}
								if r.Trailers.Get("X-Checksum") != "kept" || r.BodySHA256 != sum(p.body) {
									t.Errorf("trailers %v, body of %d bytes", r.Trailers, r.BodyLen)
								}
								for _, n := range names {
									if v := r.Trailers[http.CanonicalHeaderKey(n)]; len(v) > 0 {
										t.Errorf("trailer %s: %q reached the engine", n, v)
									}
								}
							}
						}
					})
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestSubsetHeader is what a trusted hop may say, if the config lets it.
func TestSubsetHeader(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 3, config: "subsetHeader: true\n"})
		for i := range 30 {
			want := w.engines[i%3]
			r := w.must(t, w.h1, call{body: strings.NewReader(chat),
				header: header("x-shunt-explain", "1", "x-gateway-destination-endpoint-subset", "127.0.0.1:1, "+want.Addr())})
			if got := r.header.Get("X-Shunt-Endpoint"); r.status != 200 || got != want.Addr() {
				t.Errorf("%s is not in the subset %s: %v", got, want.Addr(), r)
			}
		}
		r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: header("x-gateway-destination-endpoint-subset", "127.0.0.1:1")})
		if r.status != 503 || errorOf(t, r).Error.Code != "rejected-no-endpoints" {
			t.Errorf("a subset of strangers: %v", r)
		}
	})
}
