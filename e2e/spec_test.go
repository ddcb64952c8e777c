package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
)

// with sets a field of a body to a raw value; "" leaves it out.
func with(body, name, value string) string {
	var object map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &object); err != nil {
		panic(err) // of a test's own text
	}
	delete(object, name)
	if value != "" {
		object[name] = json.RawMessage(value)
	}
	text, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// scored is an endpoint that answers without generating.
type scored struct {
	path, body string
	// text is the field of the routing text, and questions the other one that must
	// be there.
	text, questions           string
	textOK, textBad           []string
	questionsOK, questionsBad []string
	usage                     string // what the answer says
}

var (
	decisions = scored{
		path:   "/v1/decisions",
		body:   `{"model":"m","input":"The customer reports a double charge.","questions":[{"id":"team","type":"choice","question":"?","options":[{"name":"billing"}]}]}`,
		text:   "input",
		textOK: []string{`"x"`, `{"a":1}`, `["x"]`, `[0]`}, textBad: []string{"", "null", `""`, "{}", "[ ]", "1", "true"},
		questions:   "questions",
		questionsOK: []string{`[{}]`, `[1]`, `[{"id":"q","type":"of another schema"}]`}, questionsBad: []string{"", "null", "[]", `{"q":{}}`, `"x"`, "1"},
		usage: `"prompt_tokens":10,"total_tokens":10`,
	}
	systemOne = scored{
		path:   "/v1/systemone",
		body:   `{"model":"m","state":"12345678","questions":{"a":{"type":"noul"},"b":{"type":"noul"}}}`,
		text:   "state",
		textOK: []string{`"x"`, `{"a":1}`, `["x"]`, `""`, "{}", "[ ]"}, textBad: []string{"", "null", "1", "true"},
		questions:   "questions",
		questionsOK: []string{`{"q":{}}`, `{"q":1}`}, questionsBad: []string{"", "null", "{ }", `[{"id":"q"}]`, "[]", `"x"`},
		usage: `"input_tokens":12,"output_tokens":0`,
	}
	score = scored{
		path:   "/v1/score",
		body:   `{"model":"m","query":"Is this passage about billing?","items":["The invoice was charged twice.","The app crashes on start."],"label_token_ids":[9454,2753],"apply_softmax":true}`,
		text:   "query",
		textOK: []string{`"x"`, `[1,2]`}, textBad: []string{"", "null", "{}", "1"},
		questions:   "items",
		questionsOK: []string{`"x"`, `["x"]`, `[[1,2]]`}, questionsBad: []string{"", "null", "[]", "{}", "1"},
	}
)

func TestDecisions(t *testing.T) { testScored(t, decisions) }
func TestSystemOne(t *testing.T) { testScored(t, systemOne) }
func TestScore(t *testing.T)     { testScored(t, score) }

// testScored is what the three endpoints of SGLang have in common.
func testScored(t *testing.T, s scored) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 4, engine: sim.Config{Engine: "sglang"}})
		other := startEngine(t, sim.Config{Engine: "trtllm", Models: []string{"other"}})
		var all, some []any
		for _, list := range []string{strings.ReplaceAll(endpoints("m", w.engines...), `"vllm"`, `"sglang"`), strings.ReplaceAll(endpoints("other", other), `"vllm"`, `"trtllm"`)} {
			if err := json.Unmarshal([]byte(list), &some); err != nil {
				t.Fatal(err)
			}
			all = append(all, some...)
		}
		text, _ := json.Marshal(all)
		w.setup.pools = "pools: {default: {static: " + string(text) + "}}\n"
		w.options.Document = []byte(w.document("policy: prefix-cache\n"))
		w.run(t)
		ask := func(t *testing.T, body string) reply {
			t.Helper()
			return w.must(t, w.h1, call{path: s.path, body: strings.NewReader(body), header: header("x-shunt-explain", "1")})
		}
		refused := func(t *testing.T, body, param string) {
			t.Helper()
			r := ask(t, body)
			if r.status != 400 {
				t.Errorf("%s: %v", body, r)
			} else if e := errorOf(t, r).Error; e.Param == nil || *e.Param != param {
				t.Errorf("%s: %v", body, r)
			}
		}
		t.Run("goes to a pod of the model as sent", func(t *testing.T) {
			r := ask(t, s.body)
			if r.status != 200 {
				t.Fatalf("%v", r)
			}
			if e, got := w.received(t, r.id); got.BodySHA256 != sum(s.body) || got.Path != s.path || e.Addr() == other.Addr() {
				t.Errorf("%+v at %s", got, e.Addr())
			}
		})
		t.Run("model is required", func(t *testing.T) {
			refused(t, with(s.body, "model", ""), "model")
			refused(t, with(s.body, "model", "null"), "model")
		})
		t.Run("a model that is not deployed", func(t *testing.T) {
			refused(t, with(s.body, "model", `"jev-latest"`), "model")
			if e := errorOf(t, ask(t, with(s.body, "model", `"jev-latest"`))).Error; e.Code != "model_not_found" {
				t.Errorf("%+v", e)
			}
		})
		t.Run("text", func(t *testing.T) {
			for _, v := range s.textOK {
				if r := ask(t, with(s.body, s.text, v)); r.status != 200 {
					t.Errorf("%s %s: %v", s.text, v, r)
				}
			}
			for _, v := range s.textBad {
				refused(t, with(s.body, s.text, v), s.text)
			}
		})
		t.Run("questions", func(t *testing.T) {
			for _, v := range s.questionsOK {
				body := with(s.body, s.questions, v)
				r := ask(t, body)
				if got := w.arrivedAnyhow(t, r); got.BodySHA256 != sum(body) {
					t.Errorf("%s %s: %v", s.questions, v, r)
				}
			}
			for _, v := range s.questionsBad {
				refused(t, with(s.body, s.questions, v), s.questions)
			}
		})
		t.Run("routing text", func(t *testing.T) { testRoutingText(t, w, s, ask) })
		t.Run("stream is forwarded and ignored", func(t *testing.T) {
			body := with(s.body, "stream", "true")
			r := ask(t, body)
			if _, got := w.received(t, r.id); r.status != 200 || got.BodySHA256 != sum(body) || r.header.Get("Content-Type") != "application/json" {
				t.Errorf("%v", r)
			}
		})
		t.Run("usage", func(t *testing.T) {
			r := ask(t, s.body)
			a := w.access(t, r.id)
			prompt, total := a.at("shunt", "prompt_tokens"), a.at("shunt", "total_tokens")
			if n, ok := prompt.(float64); !ok || n <= 0 || total != prompt || a.at("shunt", "completion_tokens") != 0.0 {
				t.Errorf("metadata %v", a["shunt"])
			}
			for _, part := range strings.Split(s.usage, ",") {
				if !strings.Contains(string(r.body), part) {
					t.Errorf("the answer is changed: %s", r.body)
				}
			}
		})
		t.Run("each retry counts", func(t *testing.T) {
			before, tokens := w.metric(t, "shunt_requests_total", "model", "m"), w.metric(t, "shunt_tokens_total", "model", "m", "kind", "prompt")
			var last reply
			for range 3 {
				last = ask(t, s.body)
			}
			each, _ := w.access(t, last.id).at("shunt", "prompt_tokens").(float64)
			eventually(t, "three requests are counted", func() string {
				n, m := w.metric(t, "shunt_requests_total", "model", "m")-before, w.metric(t, "shunt_tokens_total", "model", "m", "kind", "prompt")-tokens
				if n != 3 || m != 3*each {
					return fmt.Sprint(n, " requests, ", m, " tokens")
				}
				return ""
			})
		})
		t.Run("images pass as sent within the limit", func(t *testing.T) {
			image := func(n int) string {
				return with(s.body, "images", `["`+base64.StdEncoding.EncodeToString(make([]byte, n))+`"]`)
			}
			body := image(2 << 20)
			r := ask(t, body)
			if _, got := w.received(t, r.id); r.status != 200 || got.BodySHA256 != sum(body) {
				t.Errorf("%d, %d bytes arrived", r.status, got.BodyLen)
			}
			if r := ask(t, image(4<<20)); r.status != 413 || errorOf(t, r).Error.Code != "request_too_large" {
				t.Errorf("over the limit: %v", r)
			}
		})
		t.Run("another engine is not checked", func(t *testing.T) {
			r := ask(t, with(s.body, "model", `"other"`))
			if r.status != 404 || string(r.body) != `{"detail":"Not Found"}` || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "" {
				t.Errorf("%v", r)
			}
		})
		w.waitLoad(t, 0, 0)
	})
}

// arrivedAnyhow is the request that an engine got, whatever it answered.
func (w *world) arrivedAnyhow(t *testing.T, r reply) sim.Received {
	t.Helper()
	_, got := w.received(t, r.id)
	return got
}

// testRoutingText: of four pods, the one that got a text gets it again, however
// its JSON is spaced; what is no routing text doesn't matter.
func testRoutingText(t *testing.T, w *world, s scored, ask func(*testing.T, string) reply) {
	for i := range 8 {
		long := strings.Repeat(fmt.Sprintf("text %d of %s. ", i, s.path), 400)
		compact, _ := json.Marshal(map[string]any{"a": long, "b": []any{1, "x"}})
		spaced := strings.NewReplacer(`{"a":`, "{ \"a\" :\n\t", `,"b":[`, ` , "b" : [ `).Replace(string(compact))
		quoted, _ := json.Marshal(long)
		values := []string{string(compact), spaced, string(compact)}
		if s.text == "query" { // only strings and tokens
			values = []string{string(quoted), string(quoted), string(quoted)}
		}
		picked := map[string]int{}
		for n, v := range values {
			r := ask(t, strings.Replace(with(s.body, s.text, `"@"`), `"@"`, v, 1))
			if n == 2 && r.status == 200 {
				r = ask(t, strings.Replace(with(with(s.body, s.text, `"@"`), "extra", `"of no interest"`), `"@"`, v, 1))
			}
			if r.status != 200 {
				t.Fatalf("%v", r)
			}
			picked[r.header.Get("X-Shunt-Endpoint")]++
		}
		if len(picked) != 1 {
			t.Errorf("text %d went to %v", i, picked)
		}
	}
}
