package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/sim"
)

// smallest are bodies with all that an endpoint asks for, without their model.
var smallest = map[string]string{
	"chat/completions":      `"messages":[{"role":"user","content":"x"}]`,
	"completions":           `"prompt":"x"`,
	"responses":             `"input":"x"`,
	"messages":              `"messages":[{"role":"user","content":"x"}],"max_tokens":1`,
	"messages/count_tokens": `"messages":[{"role":"user","content":"x"}]`,
	"embeddings":            `"input":["x"]`,
	"rerank":                `"query":"x","documents":["y"]`,
	"score":                 `"query":"x","items":["y"]`,
	"classify":              `"input":"x"`,
	"pooling":               `"input":"x"`,
	"tokenize":              `"prompt":"x"`,
	"detokenize":            `"tokens":[1]`,
	"images/generations":    `"prompt":"x"`,
	"decisions":             `"input":"x","questions":[{"id":"q","type":"yes_no","question":"?"}]`,
	"systemone":             `"state":"","questions":{"q":{"type":"noul"}}`,
}

// TestEveryEndpoint: each path with a body is read, with a query, a trailing
// slash and under a prefix, and its request goes to an engine of its model, as
// sent; without a model it is 400.
func TestEveryEndpoint(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 1})
		w.engines = append(w.engines, startEngine(t, sim.Config{Models: []string{"n"}}))
		w.setup.pools = "pools: {default: {static: " + strings.TrimSuffix(endpoints("m", w.engines[0]), "]") + "," +
			strings.TrimPrefix(endpoints("n", w.engines[1]), "[") + "}}\n"
		w.options.Document = []byte(w.document("paths: {prefixes: [/openai, /team/a]}\n"))
		w.run(t)
		w.answerAll(t)
		for _, e := range openai.Endpoints() {
			if e.From != openai.FromBody {
				continue
			}
			rest, ok := smallest[e.Name]
			if !ok {
				t.Fatalf("no body for %s", e.Name)
			}
			for i, path := range []string{e.Path, e.Path + "/", e.Path + "?api-version=1", "/openai" + e.Path, "/team/a" + e.Path + "/?x=/v1/y"} {
				c := []*http.Client{w.h1, w.h2}[i%2]
				for at, model := range []string{"m", "n"} {
					body := `{"model":"` + model + `",` + rest + "}"
					r := w.must(t, c, call{path: path, body: strings.NewReader(body)})
					w.arrived(t, r, body, int64(len(body)))
					if served, got := w.received(t, r.id); served != w.engines[at] || !strings.HasPrefix(path, got.Path) {
						t.Errorf("%s for %s arrived at %s of %s", path, model, got.Path, served.Addr())
					}
				}
				r := w.must(t, c, call{path: path, body: strings.NewReader("{" + rest + "}")})
				code := "missing_required_parameter"
				if r.status != 400 || !strings.Contains(string(r.body), "model") || (e.Style == openai.StyleOpenAI && errorOf(t, r).Error.Code != code) {
					t.Errorf("%s without a model: %v", path, r)
				}
				r = w.must(t, c, call{path: path, body: strings.NewReader(`{"model":"nobody",` + rest + "}")})
				if r.status != 400 || w.access(t, r.id).at("shunt", "reason") != "model_not_found" {
					t.Errorf("%s for a model that is not deployed: %v", path, r)
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestModelsList: GET /v1/models is answered from the pool, and by an engine
// where the configuration says so.
func TestModelsList(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 1, engine: sim.Config{Adapters: []string{"lora"}}})
		w.engines = append(w.engines, startEngine(t, sim.Config{Models: []string{"org/n"}}))
		w.setup.pools = "pools: {default: {static: " + strings.TrimSuffix(endpoints("m", w.engines[0]), "]") + "," +
			strings.TrimPrefix(endpoints("org/n", w.engines[1]), "[") + "}}\n"
		w.options.Document = []byte(w.document("models: {known: [{name: m, aliases: [m-latest]}]}\n"))
		w.run(t)
		list := func(c *http.Client, path string) (names []string) {
			r := w.must(t, c, call{method: "GET", path: path})
			var answer struct {
				Object string
				Data   []struct{ ID, Object string }
			}
			if err := json.Unmarshal(r.body, &answer); err != nil || r.status != 200 || answer.Object != "list" || r.header.Get("Content-Type") != "application/json" {
				t.Fatalf("%v: %v", err, r)
			}
			for _, m := range answer.Data {
				names = append(names, m.ID)
			}
			slices.Sort(names)
			return names
		}
		eventually(t, "adapters are listed", func() string {
			if names := list(w.h2, "/v1/models"); !slices.Contains(names, "lora") {
				return fmt.Sprint(names)
			}
			return ""
		})
		for proto, c := range w.protocols() {
			for _, path := range []string{"/v1/models", "/v1/models/", "/openai/v1/models?limit=20"} {
				if names := list(c, path); !slices.Equal(names, []string{"lora", "m", "m-latest", "org/n"}) {
					t.Errorf("%s %s: %v", proto, path, names)
				}
			}
			for _, path := range []string{"/v1/models/lora", "/v1/models/org/n", "/v1/models/org%2Fn"} {
				r := w.must(t, c, call{method: "GET", path: path})
				if r.status != 200 || !strings.Contains(string(r.body), `"object":"model"`) {
					t.Errorf("%s %s: %v", proto, path, r)
				}
			}
			r := w.must(t, c, call{method: "GET", path: "/v1/models/nobody"})
			if e := errorOf(t, r).Error; r.status != 404 || e.Code != "model_not_found" {
				t.Errorf("%s: %v", proto, r)
			}
			r = w.must(t, c, call{method: "GET", path: "/v1/models"})
			if a := w.access(t, r.id); a["details"] != "shunt_models" || a["upstream"] != nil || a.at("shunt", "reason") != "models" {
				t.Errorf("%s: the log says %v", proto, a)
			}
			for _, method := range []string{"HEAD", "OPTIONS", "DELETE", "POST"} {
				r := w.must(t, c, call{method: method, path: "/v1/models"})
				if _, got := w.received(t, r.id); r.status != 200 || got.Method != method {
					t.Errorf("%s %s: %v", proto, method, r)
				}
			}
		}
		for _, e := range w.engines {
			for _, r := range e.Requests("/v1/models") {
				if r.Method == "GET" && r.Headers.Get("X-Test-Id") != "" {
					t.Errorf("a request for the list reached an engine: %+v", r)
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestModelsListOfAnEngine, and paths that the configuration refuses.
func TestPathsByConfiguration(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{config: "models: {list: false}\npaths: {prefixes: [], unknown: reject}\n"})
		for proto, c := range w.protocols() {
			for _, path := range []string{"/v1/models", "/v1/models/m"} {
				r := w.must(t, c, call{method: "GET", path: path})
				if _, got := w.received(t, r.id); r.status != 200 || got.Path != path {
					t.Errorf("%s %s: %v", proto, path, r)
				}
			}
			for _, q := range []call{
				{method: "GET", path: "/metrics"}, {path: "/v1/files", body: strings.NewReader("x")}, {path: "/openai/v1/chat/completions", body: strings.NewReader(chat)},
			} {
				r := w.must(t, c, q)
				if e := errorOf(t, r).Error; r.status != 404 || e.Code != "unknown_path" || e.Type != "invalid_request_error" {
					t.Errorf("%s %s: %v", proto, q.path, r)
				}
			}
			r := w.must(t, c, call{method: "OPTIONS", path: "/v1/chat/completions"})
			if _, got := w.received(t, r.id); got.Method != "OPTIONS" { // what it is told is the engine's business
				t.Errorf("%s: a preflight got %v", proto, r)
			}
			if r := w.must(t, c, call{body: strings.NewReader(chat)}); r.status != 200 {
				t.Errorf("%s: %v", proto, r)
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestRealtime: a session goes to an engine of the model in its query, and its
// bytes pass both ways.
func TestRealtime(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 1})
		paths := make(chan string, 10)
		session := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Upgrade") == "" { // a scrape
				http.NotFound(rw, r)
				return
			}
			paths <- r.URL.String()
			peer, _, err := rw.(http.Hijacker).Hijack()
			if err != nil {
				return
			}
			defer func() { _ = peer.Close() }()
			_, _ = io.WriteString(peer, "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
			in := bufio.NewReader(peer)
			for {
				line, err := in.ReadString('\n')
				if err != nil {
					return
				}
				_, _ = io.WriteString(peer, "echo "+line)
			}
		}))
		t.Cleanup(session.Close)
		w.setup.pools = "pools: {default: {static: " + strings.TrimSuffix(endpoints("m", w.engines[0]), "]") +
			`,{"address":"` + session.Listener.Addr().String() + `","labels":{"model.aibrix.ai/name":"voice"}}]}}` + "\n"
		w.options.Document = []byte(w.document("models: {known: [{name: voice, aliases: [voice-latest]}]}\nrestoreModelName: true\n"))
		w.run(t)
		for i, path := range []string{"/v1/realtime?model=voice", "/openai/v1/realtime?a=b&model=voice-latest"} {
			c := w.dial(t)
			c.send(t, "GET "+path+" HTTP/1.1\r\nhost: e2e\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
			if head := readHead(t, c); !strings.HasPrefix(head, "HTTP/1.1 101 ") {
				t.Fatalf("%q", head)
			}
			for _, line := range []string{"hello\n", "again\n"} {
				c.send(t, line)
				if got, err := c.r.ReadString('\n'); got != "echo "+line {
					t.Errorf("got %q, %v", got, err)
				}
			}
			if want, got := []string{"/v1/realtime?model=voice", "/openai/v1/realtime?a=b&model=voice"}[i], <-paths; got != want {
				t.Errorf("the engine got %s, want %s", got, want)
			}
			if inFlight, _ := w.load(t); inFlight != 1 {
				t.Errorf("%d in flight during a session", inFlight)
			}
			_ = c.Close()
			w.waitLoad(t, 0, 0)
		}
		c := w.dial(t)
		c.send(t, "GET /v1/realtime?model=nobody HTTP/1.1\r\nhost: e2e\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
		if r := c.read(t); r.status != 400 || errorOf(t, r).Error.Code != "model_not_found" {
			t.Errorf("%v", r)
		}
	})
}

// TestStoredResponses: a response is asked for where it was made.
func TestStoredResponses(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 3, config: "policy: random\n"})
		for i, e := range w.engines {
			body := fmt.Sprintf(`{"id":"resp_%d","object":"response","usage":{"input_tokens":1,"output_tokens":1,"total_tokens":2}}`, i)
			if err := e.SetFaults(sim.Fault{Kind: sim.FaultStatus, Path: "/v1/responses", Status: 200, Body: body, Headers: map[string]string{"Content-Type": "application/json"}}); err != nil {
				t.Fatal(err)
			}
		}
		made := map[*sim.Server]string{}
		for range 100 {
			r := w.must(t, w.h2, call{path: "/v1/responses", body: strings.NewReader(`{"model":"m","input":"x"}`)})
			var answer struct{ ID string }
			if err := json.Unmarshal(r.body, &answer); err != nil || r.status != 200 {
				t.Fatalf("%v: %v", err, r)
			}
			e, _ := w.received(t, r.id)
			made[e] = answer.ID
		}
		if len(made) != len(w.engines) {
			t.Fatalf("only %d engines made responses", len(made))
		}
		for e, id := range made {
			for range 10 {
				for _, q := range []call{
					{method: "GET", path: "/v1/responses/" + id}, {method: "DELETE", path: "/openai/v1/responses/" + id + "?x=1"},
					{path: "/v1/responses/" + id + "/cancel"},
					{path: "/v1/responses", body: strings.NewReader(`{"model":"m","input":"x","previous_response_id":"` + id + `"}`)},
				} {
					r := w.must(t, w.h1, q)
					if at, _ := w.received(t, r.id); at != e {
						t.Errorf("%s %s of %s went to %s", q.method, q.path, e.Addr(), at.Addr())
					}
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}
