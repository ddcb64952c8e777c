package filter

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

func route(t testing.TB, w *world, yaml string) *Route {
	t.Helper()
	r, err := w.LoadRoute([]byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestChoices is what decides about a request beside its body.
func TestChoices(t *testing.T) {
	const one, other = "10.0.0.1:8000", "10.0.0.9:8000"
	picked := func(to, pod, policy string) string {
		return "continue to=" + to + " model=m target_model=m fairness_id=default-flow endpoint=" + to + " pod=" + pod + " policy=" + policy
	}
	first := picked(one, "pod-1", "least-request")
	const allow = "allowedPolicies: [random, least-kv-cache]\nforwardControlHeaders: true"
	const gone = `reply reason=rejected-no-endpoints fairness_id=default-flow status=503 details=shunt_rejected-no-endpoints ` +
		`<x-llm-d-request-dropped-reason:rejected-no-endpoints> <retry-after:N> <content-type:application/json> `
	for _, c := range []struct {
		name, config, route string
		headers             []string
		want                string
	}{
		{"the first pool and the policy", "", "", nil, first},
		{"the configured policy", "policy: random", "", nil, picked(one, "pod-1", "random")},
		{"the route's pool", "", "pool: other", nil, picked(other, "pod-9", "least-request")},
		{"the route's policy", "", "policy: random", nil, picked(one, "pod-1", "random")},
		{"the route's pool and policy", "", "{pool: other, policy: random}", nil, picked(other, "pod-9", "random")},
		{"the route's pool is not defined", "", "pool: nobodys", nil,
			gone + `{"error":{"message":"the route names pool nobodys, which no configuration defines","type":"overloaded_error","code":"rejected-no-endpoints","param":null}}`},
		{"routing-strategy is ignored while none is allowed", "forwardControlHeaders: true", "", []string{"routing-strategy", "nonsense"}, first},
		{"an allowed routing-strategy", allow, "", []string{"routing-strategy", "random"}, picked(one, "pod-1", "random")},
		{"it beats the route's", allow, "policy: least-request", []string{"routing-strategy", "random"}, picked(one, "pod-1", "random")},
		{"the last routing-strategy counts", allow, "", []string{"routing-strategy", "nonsense", "routing-strategy", "random"}, picked(one, "pod-1", "random")},
		{"an empty routing-strategy", allow, "", []string{"routing-strategy", ""}, first},
		{"another routing-strategy", allow, "", []string{"routing-strategy", "least-request"},
			`reply reason=invalid_routing_strategy fairness_id=default-flow status=400 details=shunt_invalid_routing_strategy <content-type:application/json> ` +
				`{"error":{"message":"routing-strategy \"least-request\" is not allowed here; allowed: random, least-kv-cache","type":"invalid_request_error","code":"invalid_routing_strategy","param":null}}`},
		{"a policy that can score nothing says so", "policy: least-kv-cache", "", nil, picked(one, "pod-1", "least-kv-cache") + " fallback=random"},
		{"explained", "policy: least-kv-cache\nexplain: {header: true}\nforwardControlHeaders: true", "", []string{"x-shunt-explain", "1"},
			picked(one, "pod-1", "least-kv-cache") + " fallback=random +x-shunt-endpoint:10.0.0.1:8000 +x-shunt-policy:least-kv-cache +x-shunt-fallback:random"},
		{"explained without a fallback", "explain: {header: true}\nforwardControlHeaders: true", "", []string{"x-shunt-explain", "1"},
			first + " +x-shunt-endpoint:10.0.0.1:8000 +x-shunt-policy:least-request"},
		{"not asked to explain", "explain: {header: true}\nforwardControlHeaders: true", "", []string{"x-shunt-explain", "true"}, first},
		{"may not explain", "forwardControlHeaders: true", "", []string{"x-shunt-explain", "1"}, first},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.config)
			w.publish("default", ep(1, "m"))
			w.publish("other", ep(9, "m"))
			var r *Route
			if c.route != "" {
				r = route(t, w, c.route)
			}
			s := w.stream()
			s.send(t, post(chatPath, c.headers...), r, chatBody)
			if got := show(&s.v); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
			if s.v.Action == Continue && !(s.v.has("pick_us") && s.held.Live().InFlight() == 1) {
				t.Errorf("no pick_us or no reservation: %+v", s.v)
			}
			s.finish(End{})
			if load(w.pool("default"))+load(w.pool("other")) != 0 {
				t.Error("load is left")
			}
		})
	}
}

func TestSubset(t *testing.T) {
	w := newWorld(t, "subsetHeader: true")
	six := ep(6, "m")
	six.Addr = mustAddr("[fd00::6]:9000")
	six.Live.Addr = "[fd00::6]:9000"
	w.publish("default", ep(1, "m"), ep(2, "m"), six)
	for subset, want := range map[string]string{
		"":                                "rejected-no-endpoints",
		",":                               "rejected-no-endpoints",
		"fd00:0::6":                       "[fd00::6]:9000",
		"[fd00:0:0::6]:9000":              "[fd00::6]:9000",
		"::ffff:10.0.0.2":                 "10.0.0.2:8000",
		"10.0.0.2:8000":                   "10.0.0.2:8000",
		"10.0.0.2":                        "10.0.0.2:8000",
		" 10.0.0.1:8000 ,10.0.0.2:8000":   "10.0.0.1:8000 10.0.0.2:8000",
		"[fd00::6]:9000":                  "[fd00::6]:9000",
		"fd00::6":                         "[fd00::6]:9000",
		"[fd00::6]":                       "[fd00::6]:9000",
		"10.0.0.2:8001":                   "rejected-no-endpoints",
		"10.0.0.22, ,10.0.0":              "rejected-no-endpoints",
		"example.com, 10.0.0.1:8000:8000": "rejected-no-endpoints",
	} {
		seen := map[string]bool{}
		for range 100 {
			s := w.stream()
			v := s.chat(t, chatBody, "x-gateway-destination-endpoint-subset", subset)
			if v.Action == Reply {
				seen[v.meta("reason")] = true
			} else {
				seen[v.Destination] = true
			}
			s.finish(End{})
		}
		var got []string
		for k := range seen {
			got = append(got, k)
		}
		slices.Sort(got)
		if strings.Join(got, " ") != want {
			t.Errorf("%q: %v, want %s", subset, got, want)
		}
	}
}

// TestSubsetMetadata: a list of a filter before shunt counts, beats the header
// and needs no option.
func TestSubsetMetadata(t *testing.T) {
	for _, c := range []struct {
		name, config string
		list         []string // nil for no list
		header, want string
	}{
		{"no list", "", nil, "10.0.0.1:8000", "10.0.0.1:8000 10.0.0.2:8000"},
		{"no list but a header", "subsetHeader: true", nil, "10.0.0.1:8000", "10.0.0.1:8000"},
		{"ip:port", "", []string{"10.0.0.9:8000", "10.0.0.2:8000"}, "10.0.0.1:8000", "10.0.0.2:8000"},
		{"ip", "", []string{"10.0.0.2"}, "", "10.0.0.2:8000"},
		{"both", "", []string{"10.0.0.2", "10.0.0.1:8000"}, "", "10.0.0.1:8000 10.0.0.2:8000"},
		{"beats the header", "subsetHeader: true", []string{"10.0.0.2:8000"}, "10.0.0.1:8000", "10.0.0.2:8000"},
		{"empty", "", []string{}, "10.0.0.1:8000", "rejected-no-endpoints"},
		{"strangers", "", []string{"10.0.0.9", "10.0.0.1:1", ""}, "", "rejected-no-endpoints"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.config)
			w.publish("default", ep(1, "m"), ep(2, "m"))
			seen := map[string]bool{}
			for range 100 {
				s := w.stream()
				if c.list != nil {
					s.hint = c.list
				}
				v := s.chat(t, chatBody, "x-gateway-destination-endpoint-subset", c.header)
				if v.Action == Reply {
					seen[v.meta("reason")] = true
				} else {
					seen[v.Destination] = true
				}
				s.finish(End{})
			}
			if got := strings.Join(slices.Sorted(maps.Keys(seen)), " "); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// TestSubsetMetadataIsBorrowed: what a request keeps while it waits is not the
// list's memory, which may be another's by the time that it is woken.
func TestSubsetMetadataIsBorrowed(t *testing.T) {
	w := newWorld(t, oneAtATime)
	w.publish("default", ep(1, "m"), ep(2, "m"))
	running := []*stream{w.asks(t, ""), w.asks(t, "")}
	entry := []byte("10.0.0.2:8000")
	s := w.stream()
	s.hint = []string{unsafe.String(&entry[0], len(entry))}
	if v := s.chat(t, chatBody); v.Action != Wait {
		t.Fatalf("got %s", show(v))
	}
	copy(entry, "10.0.0.1:8000")
	for _, r := range running {
		r.finish(End{})
	}
	if v := s.resume(t); v.Destination != "10.0.0.2:8000" {
		t.Errorf("got %s", show(v))
	}
	s.finish(End{})
	w.idle(t)
}

// TestWhoNeedsABody is which requests are held for their body; the others are
// picked for at headers, by least-request among all.
func TestWhoNeedsABody(t *testing.T) {
	w := newWorld(t, "policy: random\nlimits: {requestBody: 1KiB}")
	w.publish("default", ep(1, "m"))
	const (
		atOnce   = "continue to=10.0.0.1:8000 fairness_id=default-flow endpoint=10.0.0.1:8000 pod=pod-1 policy=least-request"
		needBody = "need body 1024"
		tooLarge = `reply reason=request_too_large fairness_id=default-flow status=413 details=shunt_request_too_large <content-type:application/json> ` +
			`{"error":{"message":"the request body is over the limit of 1KiB (limits.requestBody)","type":"invalid_request_error","code":"request_too_large","param":null}}`
	)
	for _, c := range []struct {
		name string
		head *Head
		end  bool
		want string
	}{
		{"chat", post(chatPath), false, needBody},
		{"chat with a query", post(chatPath + "?a=b"), false, needBody},
		{"messages", post("/v1/messages"), false, needBody},
		{"length at the limit", post(chatPath, "content-length", "1024"), false, needBody},
		{"length over the limit", post(chatPath, "content-length", "1025"), false, tooLarge},
		{"length far over the limit", post(chatPath, "content-length", "9223372036854775807"), false, tooLarge},
		{"length that no number holds", post(chatPath, "content-length", "9223372036854775808"), false, needBody},
		{"length of a body nobody reads", post("/v1/files", "content-length", "5000"), false, atOnce},
		{"GET", head(":method", "GET", ":path", "/version"), true, atOnce},
		{"GET with a body", head(":method", "GET", ":path", chatPath), false, atOnce},
		{"unknown path", post("/v1/unknown"), false, atOnce},
		{"no path", head(), true, atOnce},
		{"upgrade", post(chatPath, "upgrade", "websocket"), false, atOnce},
		{"CONNECT", head(":method", "CONNECT", ":path", chatPath), false, atOnce},
		{"CONNECT with a long body", head(":method", "CONNECT", ":path", chatPath, "content-length", "5000"), false, atOnce},
	} {
		s := w.stream()
		s.Headers(c.head, c.end, nil, &s.v)
		if got := show(&s.v); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", c.name, got, c.want)
		}
		if s.finish(End{}); load(w.pool("default")) != 0 {
			t.Fatalf("%s: load is left", c.name)
		}
	}
}

func TestTooLarge(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	for style, want := range map[string]string{
		chatPath:       `{"error":{"message":"the request body is over the limit of 4MiB (limits.requestBody)","type":"invalid_request_error","code":"request_too_large","param":null}}`,
		"/v1/messages": `{"type":"error","error":{"type":"request_too_large","message":"the request body is over the limit of 4MiB (limits.requestBody)"}}`,
	} {
		s := w.stream()
		s.v.Remove = []string{"of another request"}
		s.Headers(post(style, "content-length", "1"), false, nil, &s.v) // a lie
		s.TooLarge(&s.v)
		if s.v.Action != Reply || s.v.Reply.Status != 413 || string(s.v.Reply.Body) != want || len(s.v.Remove) != 0 {
			t.Errorf("%s: %s", style, show(&s.v))
		}
		s.finish(End{})
	}
	if n := w.counterValue(t, "shunt_refusals_total", "pool", "default", "code", "request_too_large"); n != 2 {
		t.Errorf("%v counted", n)
	}
}

// TestRefusals is what the client of a bad request sees.
func TestRefusals(t *testing.T) {
	var out strings.Builder
	for _, config := range []string{"", "models: {notFoundStatus: 404}"} {
		w := newWorld(t, config)
		w.publish("default", ep(1, "m"))
		for _, c := range []struct{ name, path, contentType, body string }{
			{"not JSON", chatPath, "", `hello`},
			{"cut JSON", chatPath, "", `{"model":"m"`},
			{"empty", chatPath, "", ``},
			{"no object", chatPath, "", `["m"]`},
			{"no model", chatPath, "", `{"messages":[{}]}`},
			{"null model", chatPath, "", `{"model":null,"messages":[{}]}`},
			{"a number as model", chatPath, "", `{"model":7,"messages":[{}]}`},
			{"empty model", chatPath, "", `{"model":"","messages":[{}]}`},
			{"two models", chatPath, "", `{"model":"m","messages":[{}],"model":"m"}`},
			{"no messages", chatPath, "", `{"model":"m"}`},
			{"a string as messages", chatPath, "", `{"model":"m","messages":"hi"}`},
			{"no prompt", "/v1/completions", "", `{"model":"m"}`},
			{"too deep", chatPath, "", `{"model":"m","messages":` + strings.Repeat("[", 600)},
			{"unknown model", chatPath, "", `{"model":"\"x\"","messages":[{}]}`},
			{"unknown model, Anthropic", "/v1/messages", "", `{"model":"x","messages":[{}],"max_tokens":1}`},
			{"no model, Anthropic", "/v1/messages", "", `{"messages":[{}]}`},
			{"unknown model, gRPC", chatPath, "application/grpc", `{"model":"x","messages":[{}]}`},
			{"not JSON, gRPC", chatPath, "application/grpc+proto", `x`},
		} {
			if config != "" && !strings.HasPrefix(c.name, "unknown model") {
				continue
			}
			h := post(c.path)
			if c.contentType != "" {
				h.Add("content-type", c.contentType)
			}
			s := w.stream()
			v := s.send(t, h, nil, c.body)
			fmt.Fprintf(&out, "%s%s\n  %s\n", c.name, strings.TrimSuffix(" "+config, " "), show(v))
			code := v.meta("reason")
			if v.Action != Reply || v.Reply.Details != "shunt_"+code || v.replyHeader(HeaderDropReason) != "" || v.replyHeader("retry-after") != "" {
				t.Errorf("%s: %s", c.name, show(v))
			}
			if v := s.finish(End{}); len(v.Metadata) != 0 {
				t.Errorf("%s: its end says %s", c.name, show(v))
			}
		}
	}
	golden(t, "refusals.golden", out.String())
}

// TestEmptyBodyAtHeaders: a request that ends with its headers is judged there.
func TestEmptyBodyAtHeaders(t *testing.T) {
	w := newWorld(t, "")
	s := w.stream()
	s.Headers(post(chatPath), true, nil, &s.v)
	if s.v.Action != Reply || s.v.meta("reason") != "invalid_json" {
		t.Errorf("got %s", show(&s.v))
	}
}

// TestNobodyServes is the line between a model that does not exist and one that
// nobody serves now.
func TestNobodyServes(t *testing.T) {
	blank := ep(3)
	blank.AnyModel = false
	for _, c := range []struct {
		name string
		in   pool.Input
		want string
	}{
		{"an empty pool", pool.Input{Complete: true, Fresh: true}, "rejected-no-endpoints"},
		{"another model's pool", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{ep(1, "n")}}, "model_not_found"},
		{"a known model", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{ep(1, "n")}, Known: []string{"m"}}, "rejected-no-endpoints"},
		{"no endpoint is ready", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{notReady(ep(1, "m")), ep(2, "n")}}, "rejected-no-endpoints"},
		{"discovery is stale", pool.Input{Complete: true, Endpoints: []pool.Endpoint{ep(1, "n")}}, "rejected-no-endpoints"},
		{"an endpoint has not said what it serves", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{ep(1, "n"), blank}}, "rejected-no-endpoints"},
		{"never complete", pool.Input{Fresh: true, Endpoints: []pool.Endpoint{ep(1, "n")}}, "rejected-no-endpoints"},
		{"one serves all", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{ep(1, "n"), ep(2)}}, ""},
	} {
		w := newWorld(t, "startupHold: 0s")
		w.publishInput("default", c.in)
		s := w.stream()
		if v := s.chat(t, chatBody); v.meta("reason") != c.want {
			t.Errorf("%s: %s", c.name, show(v))
		}
		if c.name == "an empty pool" {
			if v := w.stream().get(); v.meta("reason") != c.want {
				t.Errorf("%s, no model: %s", c.name, show(v))
			}
		}
		s.finish(End{})
	}
}

// TestAnySplitGivesTheSameVerdict cuts bodies anywhere.
func TestAnySplitGivesTheSameVerdict(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	rng := rand.New(rand.NewPCG(1, 2))
	for _, body := range []string{
		chatBody,
		`{"messages":[{"content":"\u00e9\ud83d\ude00 \" } "}],"x":[1,{"model":"no"}],"mo\u0064el":"m"}`,
		`{"model":"m","messages":[{}],"model":"m"}`,
		`{"model":"unknown","messages":[{}]}`,
		`{"messages":[{}]}`,
		`{"model":"m","messages":[{}]} x`,
		``,
	} {
		verdict := func(cuts []int) string {
			var chunks [][]byte
			last := 0
			for _, cut := range append(cuts, len(body)) {
				chunks = append(chunks, []byte(body[last:cut]))
				last = cut
			}
			s := w.stream()
			s.Headers(post(chatPath), false, nil, &s.v)
			s.Body(chunks, &s.v)
			size := s.size
			got := show(&s.v)
			s.finish(End{})
			if size != int64(len(body)) {
				t.Errorf("%q in %d chunks: size %d", body, len(chunks), size)
			}
			return got
		}
		want := verdict(nil)
		for at := range len(body) + 1 {
			if got := verdict([]int{at}); got != want {
				t.Fatalf("%q cut at %d: %s, want %s", body, at, got, want)
			}
		}
		for range 200 {
			var cuts []int
			for range rng.IntN(9) {
				cuts = append(cuts, rng.IntN(len(body)+1))
			}
			slices.Sort(cuts)
			if got := verdict(cuts); got != want {
				t.Fatalf("%q cut at %v: %s, want %s", body, cuts, got, want)
			}
		}
	}
}

// TestNothingOfTheRequestIsKept: what outlives a callback is not Envoy's
// memory.
func TestNothingOfTheRequestIsKept(t *testing.T) {
	w := newWorld(t, "subsetHeader: true")
	s := w.stream()
	memory := []byte("10.0.0.1:8000" + chatBody)
	s.Headers(post(chatPath, "x-gateway-destination-endpoint-subset", borrowed(memory[:13])), false, nil, &s.v)
	s.Body([][]byte{memory[13:]}, &s.v)
	if s.v.Action != Wait {
		t.Fatalf("got %s", show(&s.v))
	}
	for i := range memory {
		memory[i] = '!'
	}
	w.publish("default", ep(1, "m"), ep(2, "m"))
	if s.Resume(&s.v); s.v.Destination != "10.0.0.1:8000" || s.v.meta("model") != "m" {
		t.Errorf("got %s", show(&s.v))
	}
	address := []byte("10.0.0.2:8000")
	s.Served(borrowed(address), &s.v)
	address[0] = '!'
	if s.v.meta("endpoint") != "10.0.0.2:8000" {
		t.Errorf("got %s", show(&s.v))
	}
	s.finish(End{})
}

func TestEveryPolicyHasCounters(t *testing.T) {
	w := newWorld(t, "")
	if numPolicies != len(scorer.Names())+1 {
		t.Fatalf("%d policies, the metrics know %d", len(scorer.Names()), numPolicies-1)
	}
	w.publish("default", ep(1, "m"))
	for _, name := range scorer.Names() {
		s := w.stream()
		s.send(t, post(chatPath), route(t, w, "policy: "+name), chatBody)
		s.finish(End{})
		if n := w.counterValue(t, "shunt_picks_total", "pool", "default", "policy", name); n != 1 {
			t.Errorf("%s: %v picks", name, n)
		}
	}
}
