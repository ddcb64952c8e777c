package filter

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/pool"
)

// at sends a request without a body.
func (s *stream) at(method, path string, pairs ...string) *Verdict {
	s.Headers(head(append([]string{":method", method, ":path", path}, pairs...)...), true, nil, &s.v)
	return &s.v
}

// TestEndpointsAreReadUnderAPrefix: prefixes, queries and a trailing slash
// change nothing of what is read, and other methods than POST are not read.
func TestEndpointsAreReadUnderAPrefix(t *testing.T) {
	for _, c := range []struct {
		config   string
		prefixes []string
		others   []string
	}{
		{"", []string{"", "/openai"}, []string{"/openai2", "/a"}},
		{"paths: {prefixes: [/a, /b/c/]}", []string{"", "/a", "/b/c"}, []string{"/openai", "/b"}},
		{"paths: {prefixes: []}", []string{""}, []string{"/openai"}},
	} {
		w := newWorld(t, c.config)
		w.publish("default", ep(1, "m"))
		for _, e := range openai.Endpoints() {
			if e.From != openai.FromBody {
				continue
			}
			for _, suffix := range []string{"", "/", "?api-version=1", "/?a=/b"} {
				for _, prefix := range c.prefixes {
					path := prefix + e.Path + suffix
					if s := w.stream(); s.send(t, post(path), nil, "{}").meta("reason") != "missing_required_parameter" {
						t.Errorf("%q POST %s: %s", c.config, path, show(&s.v))
					}
					for _, method := range []string{"GET", "OPTIONS", "HEAD", "DELETE", "PUT"} {
						if s := w.stream(); s.at(method, path).Action != Continue || s.v.meta("policy") != "least-request" {
							t.Errorf("%q %s %s: %s", c.config, method, path, show(&s.v))
						}
					}
				}
				for _, prefix := range c.others {
					if s := w.stream(); s.send(t, post(prefix+e.Path+suffix), nil, "{}").Action != Continue {
						t.Errorf("%q POST %s%s: %s", c.config, prefix, e.Path, show(&s.v))
					}
				}
			}
		}
	}
}

func TestUnknownPaths(t *testing.T) {
	for _, c := range []struct {
		config, method, path string
		want                 string // "" is routed
	}{
		{"", "GET", "/metrics", ""},
		{"", "POST", "/v1/files", ""},
		{"paths: {unknown: reject}", "GET", "/metrics", `no such path: GET \"/metrics\"`},
		{"paths: {unknown: reject}", "POST", "/v1/files?key=secret", `no such path: POST \"/v1/files\"`},
		{"paths: {unknown: reject}", "OPTIONS", "/v1/chat/completions", ""},
		{"paths: {unknown: reject}", "DELETE", "/openai/v1/responses/resp_1", ""},
		{"paths: {unknown: reject}", "HEAD", "/v1/models", ""},
	} {
		w := newWorld(t, c.config)
		w.publish("default", ep(1, "m"))
		s := w.stream()
		v := s.at(c.method, c.path)
		switch {
		case c.want == "" && v.Action != Continue:
			t.Errorf("%+v: %s", c, show(v))
		case c.want != "" && (v.Reply.Status != 404 || v.meta("reason") != "unknown_path" || !strings.Contains(string(v.Reply.Body), c.want)):
			t.Errorf("%+v: %s", c, show(v))
		}
		s.finish(End{})
		if load(w.pool("default")) != 0 {
			t.Errorf("%+v: load is left", c)
		}
	}
}

// TestModelsList: GET /v1/models is the union of models and adapters of the
// pool, and what the configuration names.
func TestModelsList(t *testing.T) {
	const known = "models: {known: [{name: big, aliases: [big-latest], adapters: [big-sql]}]}\nrewrites: [{matches: [{model: gpt}], targets: [{model: m}]}, {targets: [{model: m}]}]"
	for _, c := range []struct {
		name, config string
		endpoints    []pool.Endpoint
		want         string
	}{
		{"models and adapters", "", []pool.Endpoint{ep(1, "m", "lora"), ep(2, "m"), notReady(ep(3, "n"))}, "lora m n"},
		{"known, aliases, rewrites", known, []pool.Endpoint{ep(1, "m")}, "big big-latest big-sql gpt m"},
		{"an empty pool", "", nil, ""},
		{"some serve any", "", []pool.Endpoint{ep(1), ep(2, "m")}, "m"},
	} {
		w := newWorld(t, c.config)
		w.publish("default", c.endpoints...)
		s := w.stream()
		v := s.at("GET", "/openai/v1/models/?limit=1")
		var list struct {
			Object string
			Data   []struct {
				ID, Object string
				Created    int64
				OwnedBy    string `json:"owned_by"`
			}
		}
		if err := json.Unmarshal(v.Reply.Body, &list); err != nil || v.Reply.Status != 200 || list.Object != "list" ||
			v.replyHeader("content-type") != "application/json" || v.meta("reason") != "models" || v.replyHeader(HeaderDropReason) != "" {
			t.Fatalf("%s: %v: %s", c.name, err, show(v))
		}
		names := []string{}
		for _, m := range list.Data {
			names = append(names, m.ID)
			if m.Object != "model" || m.OwnedBy == "" || m.Created != w.pool("default").started.Unix() {
				t.Errorf("%s: %+v", c.name, m)
			}
			one := w.stream()
			if v := one.at("GET", "/v1/models/"+m.ID); v.Reply.Status != 200 || !strings.Contains(string(v.Reply.Body), `"id":"`+m.ID+`"`) {
				t.Errorf("%s: %s", m.ID, show(v))
			}
		}
		if got := strings.Join(names, " "); got != c.want || list.Data == nil {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
		s = w.stream()
		if v := s.at("GET", "/v1/models/no%2Fbody"); v.Reply.Status != 404 || v.meta("reason") != "model_not_found" ||
			!strings.Contains(string(v.Reply.Body), `model \"no/body\" does not exist`) || !strings.Contains(string(v.Reply.Body), `"param":"model"`) {
			t.Errorf("%s: %s", c.name, show(v))
		}
		if n := w.counterValue(t, "shunt_answers_total", "pool", "default"); n != float64(1+len(names)) {
			t.Errorf("%s: %v answers counted", c.name, n)
		}
	}
}

// TestModelsListOfAnEngine: it is the engine's where the configuration or
// ignorance says so.
func TestModelsListOfAnEngine(t *testing.T) {
	for _, c := range []struct {
		config string
		ep     pool.Endpoint
	}{{"models: {list: false}", ep(1, "m")}, {"", ep(1)}} {
		w := newWorld(t, c.config)
		w.publish("default", c.ep)
		for _, path := range []string{"/v1/models", "/v1/models/m"} {
			if s := w.stream(); s.at("GET", path).Destination != "10.0.0.1:8000" {
				t.Errorf("%q %s: %s", c.config, path, show(&s.v))
			}
		}
	}
}

// TestModelsListWaits: while the pool starts, the list is not the whole one.
func TestModelsListWaits(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"), unjudged(ep(2, "n")))
	s := w.stream()
	if v := s.at("GET", "/v1/models"); v.Action != Wait {
		t.Fatal(show(v))
	}
	w.publish("default", ep(1, "m"), ep(2, "n"))
	if !s.posted() {
		t.Fatal("not woken")
	}
	if s.Resume(&s.v); !strings.Contains(string(s.v.Reply.Body), `"id":"n"`) {
		t.Error(show(&s.v))
	}
	late := newWorld(t, "")
	late.clock.advance(time.Minute)
	if v := late.stream().at("GET", "/v1/models"); v.meta("reason") != "rejected-no-endpoints" {
		t.Error(show(v))
	}
}

// TestRealtime: a session's model is in its query, and so picks the endpoint.
func TestRealtime(t *testing.T) {
	w := newWorld(t, "policy: random\nmodels: {known: [{name: n, aliases: ['new n']}]}\nforwardControlHeaders: true")
	w.publish("default", ep(1, "m"), ep(2, "n"))
	const rewrite = "x-llm-d-model-name-rewrite"
	for _, c := range []struct {
		path  string
		pairs []string
		want  string // model, target, destination, reason
		set   string
	}{
		{"/v1/realtime?model=m", nil, "m m 10.0.0.1:8000", ""},
		{"/openai/v1/realtime/?a=b&model=n", nil, "n n 10.0.0.2:8000", ""},
		{"/v1/realtime?model=new+n&a=b", nil, "new n n 10.0.0.2:8000", "/v1/realtime?model=n&a=b"},
		{"/v1/realtime?model=m", []string{rewrite, "n"}, "m n 10.0.0.2:8000", "/v1/realtime?model=n"},
		{"/v1/realtime", []string{rewrite, "n"}, " n 10.0.0.2:8000", "/v1/realtime?model=n"},
		{"/v1/realtime?a=b", []string{rewrite, "new n"}, " n 10.0.0.2:8000", "/v1/realtime?a=b&model=n"},
		{"/v1/realtime?model=nobody", nil, "nobody   model_not_found", ""},
		{"/v1/realtime?model=m", []string{rewrite, "nobody"}, "m nobody  model_not_found", ""},
	} {
		for _, pairs := range [][]string{{"upgrade", "websocket"}, {}} {
			s := w.stream()
			v := s.at("GET", c.path, append(pairs, c.pairs...)...)
			got := strings.TrimRight(strings.Join([]string{v.meta("model"), v.meta("target_model"), v.Destination, v.meta("reason")}, " "), " ")
			set := ""
			for _, h := range v.Set {
				set += strings.TrimPrefix(h.Key+" "+h.Value, ":path ")
			}
			if got != c.want || set != c.set || (v.Action == Continue && v.meta("policy") != "random") {
				t.Errorf("%+v: got %q, set %q: %s", c, got, set, show(v))
			}
			s.finish(End{})
		}
	}
	picked := []string{}
	for range 50 {
		s := w.stream()
		if v := s.at("GET", "/v1/realtime", "upgrade", "websocket"); v.Action != Continue || v.meta("policy") != "least-request" || v.has("model") {
			t.Fatal(show(v))
		}
		picked = append(picked, s.v.Destination)
		s.finish(End{})
	}
	if !slices.Contains(picked, "10.0.0.1:8000") || !slices.Contains(picked, "10.0.0.2:8000") {
		t.Error("a session without a model does not go to any endpoint")
	}
}
