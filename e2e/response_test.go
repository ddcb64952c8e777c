package e2e

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/sim"
)

const sseType = "text/event-stream; charset=utf-8"

const streamed = `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`

// sse is a stream of three events, with the model's name where it may and where
// it may not be changed, and usage.
const sse = "data: {\"id\":\"1\",\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n" +
	": keep-alive\n\n" +
	"data: {\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\\\"model\\\":\\\"m\\\" é\"}}]}\r\n\r\n" +
	"data: {\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":7,\"completion_tokens\":2}}\n\n" +
	"data: [DONE]\n\n"

// renamed is what a client that asked for model "asked" gets instead.
func renamed(answer string) string {
	return strings.ReplaceAll(answer, `"model":"m"`, `"model":"asked"`)
}

// rewritten is a request for model asked that is rewritten to m.
func rewritten(body string) call {
	return call{body: strings.NewReader(strings.Replace(body, `"m"`, `"asked"`, 1)), header: header("x-llm-d-model-name-rewrite", "m")}
}

// TestResponsesStayStreaming: what an engine has sent is at the client before
// the engine sends more; no answer is buffered, whether it is read, changed or
// neither.
func TestResponsesStayStreaming(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		engine := startScript(t)
		w := start(t, d, setup{pools: pools(engine)})
		jsonPieces := []string{`{"model":"m","choices":[`, `{"message":{"content":"x"}}`, `],"usage":{"prompt_tokens":1}}`}
		for _, row := range []struct {
			name, contentType string
			pieces            []string
			query             func() call
			change            func(string) string
		}{
			{"events", sseType, strings.SplitAfter(sse, "\n\n"), func() call { return call{body: strings.NewReader(streamed)} }, nil},
			{"events, renamed", sseType, strings.SplitAfter(sse, "\n\n"), func() call { return rewritten(streamed) }, renamed},
			{"JSON", "application/json", jsonPieces, func() call { return call{body: strings.NewReader(chat)} }, nil},
			{"JSON, renamed", "application/json", jsonPieces, func() call { return rewritten(chat) }, renamed},
			{"of no interest", "application/octet-stream", []string{"a", "b", "c"}, func() call { return call{path: "/files", body: strings.NewReader("x")} }, nil},
		} {
			for proto, c := range w.protocols() {
				t.Run(row.name+" "+proto, func(t *testing.T) {
					next := make(chan struct{})
					engine.plays(func(s *stage) {
						s.begin(200, "Content-Type", row.contentType)
						for _, p := range row.pieces {
							s.wait(next)
							s.send(p)
						}
					})
					resp, id := w.open(t, c, row.query()) // the headers come before the body has begun
					if resp.StatusCode != 200 {
						t.Fatalf("%d: %s", resp.StatusCode, rest(t, resp.Body))
					}
					for _, p := range row.pieces {
						next <- struct{}{}
						want := p
						if row.change != nil {
							want = row.change(p)
						}
						if got := readN(t, resp.Body, len(want)); got != want {
							t.Fatalf("got %q, want %q", got, want)
						}
					}
					if left := rest(t, resp.Body); left != "" {
						t.Errorf("and then %q", left)
					}
					if a := w.access(t, id); a["details"] != "via_upstream" {
						t.Errorf("details %v", a["details"])
					}
				})
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestEveryCut cuts a stream of events in two at every byte. The first part is
// at the client before the second is sent, and the client's bytes are the same.
func TestEveryCut(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		engine := startScript(t)
		w := start(t, d, setup{pools: pools(engine)})
		for name, row := range map[string]struct {
			query func() call
			want  string
		}{
			"as sent": {func() call { return call{body: strings.NewReader(streamed)} }, sse},
			"renamed": {func() call { return rewritten(streamed) }, renamed(sse)},
		} {
			t.Run(name, func(t *testing.T) {
				for cut := range len(sse) {
					next := make(chan struct{})
					engine.plays(func(s *stage) {
						s.begin(200, "Content-Type", sseType)
						s.send(sse[:cut])
						s.wait(next)
						s.send(sse[cut:])
					})
					first := len(sse[:cut])
					if name == "renamed" {
						var r openai.Reader
						r.Reset(true, true)
						r.Write([]byte(sse[:cut]))
						first = len(openai.Rename(nil, []byte(sse[:cut]), r.Spans(), `"asked"`))
					}
					resp, id := w.open(t, w.h1, row.query())
					if resp.StatusCode != 200 {
						t.Fatalf("%d: %s", resp.StatusCode, rest(t, resp.Body))
					}
					got := readN(t, resp.Body, first)
					close(next)
					if got += rest(t, resp.Body); got != row.want {
						t.Fatalf("cut at %d: got %q, want %q", cut, got, row.want)
					}
					if cut%50 == 0 {
						if a := w.access(t, id); a.at("shunt", "total_tokens") != 7.0 || a.at("shunt", "usage") != "reported" {
							t.Errorf("cut at %d: metadata %v", cut, a["shunt"])
						}
					}
				}
			})
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestRestoredAnswers are those of which the length changes with the name, and
// those that are left alone.
func TestRestoredAnswers(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		engine := startScript(t)
		w := start(t, d, setup{pools: pools(engine)})
		const answer = `{"model":"m","choices":[{"message":{"content":"{\"model\":\"m\"}"}}],"usage":{"prompt_tokens":4,"total_tokens":4}}`
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		_, _ = z.Write([]byte(answer))
		_ = z.Close()
		for _, row := range []struct {
			name      string
			status    int
			headers   []string
			body      string
			rewrite   bool
			want      string
			hasLength bool
		}{
			{"restored", 200, []string{"Content-Type", "application/json"}, answer, true, renamed(answer), false},
			{"not rewritten", 200, []string{"Content-Type", "application/json"}, answer, false, answer, true},
			{"gzip", 200, []string{"Content-Type", "application/json", "Content-Encoding", "gzip"}, packed.String(), true, packed.String(), true},
			{"error", 422, []string{"Content-Type", "application/json"}, answer, true, answer, true},
			{"text", 200, []string{"Content-Type", "text/plain"}, answer, true, answer, true},
			{"created", 201, []string{"Content-Type", "application/json; charset=utf-8"}, answer, true, renamed(answer), false},
		} {
			for proto, c := range w.protocols() {
				t.Run(row.name+" "+proto, func(t *testing.T) {
					engine.plays(func(s *stage) {
						s.Header().Set("Content-Length", fmt.Sprint(len(row.body)))
						for i := 0; i < len(row.headers); i += 2 {
							s.Header().Set(row.headers[i], row.headers[i+1])
						}
						s.WriteHeader(row.status)
						_, _ = io.WriteString(s, row.body)
					})
					unread := w.metric(t, "shunt_unread_responses_total", "cause", "content-encoding")
					errors := w.metric(t, "shunt_upstream_errors_total", "status", "422")
					q := call{body: strings.NewReader(chat)}
					if row.rewrite {
						q = rewritten(chat)
					}
					r := w.must(t, c, q)
					if r.status != row.status || string(r.body) != row.want || r.err != nil {
						t.Errorf("%v", r)
					}
					if has := r.header.Get("Content-Length") != ""; has != row.hasLength {
						t.Errorf("content-length %q", r.header.Get("Content-Length"))
					}
					a := w.access(t, r.id)
					if total := a.at("shunt", "total_tokens"); (total == 4.0) != (row.status < 300 && len(row.headers) == 2 && row.name != "text") {
						t.Errorf("metadata %v", a["shunt"])
					}
					if n := w.metric(t, "shunt_unread_responses_total", "cause", "content-encoding") - unread; (n == 1) != (row.name == "gzip") {
						t.Errorf("%v unread for their encoding", n)
					}
					if n := w.metric(t, "shunt_upstream_errors_total", "status", "422") - errors; (n == 1) != (row.status == 422) {
						t.Errorf("%v upstream errors counted", n)
					}
				})
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestUsageOfEngines reads what simulated engines report.
func TestUsageOfEngines(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, engine: sim.Config{Output: 7}})
		for _, row := range []struct {
			name, path, body, source string
			completion               float64
		}{
			{"JSON", "/v1/chat/completions", chat, "reported", 7},
			{"stream with usage", "/v1/chat/completions", strings.Replace(streamed, `{`, `{"stream_options":{"include_usage":true},`, 1), "reported", 7},
			{"stream without", "/v1/chat/completions", streamed, "estimated", 7},
			{"completions", "/v1/completions", `{"model":"m","prompt":"hello"}`, "reported", 7},
		} {
			for proto, c := range w.protocols() {
				t.Run(row.name+" "+proto, func(t *testing.T) {
					before := w.metric(t, "shunt_tokens_total", "kind", "completion", "source", row.source, "model", "m")
					r := w.must(t, c, call{path: row.path, body: strings.NewReader(row.body)})
					if r.status != 200 {
						t.Fatalf("%v", r)
					}
					a := w.access(t, r.id)
					prompt, _ := a.at("shunt", "prompt_tokens").(float64)
					if a.at("shunt", "usage") != row.source || a.at("shunt", "completion_tokens") != row.completion ||
						a.at("shunt", "total_tokens") != prompt+row.completion || prompt < 1 {
						t.Errorf("metadata %v", a["shunt"])
					}
					if n := w.metric(t, "shunt_tokens_total", "kind", "completion", "source", row.source, "model", "m") - before; n != row.completion {
						t.Errorf("%v completion tokens counted", n)
					}
				})
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestUpstreamErrorsPassUntouched: whatever an engine calls an error is the
// client's to read.
func TestUpstreamErrorsPassUntouched(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1})
		for _, status := range []int{400, 401, 404, 422, 429, 500, 503} {
			for _, body := range []string{`{"error":{"message":"no \u00e9","type":"BadRequestError","param":null,"code":400}}`, "[EREQUEST]not JSON \xff", `{"error":"Unauthorized"}`} {
				if err := w.engines[0].SetFaults(sim.Fault{Kind: sim.FaultStatus, Status: status, Body: body,
					Headers: map[string]string{"X-Llm-D-Request-Dropped-Reason": "evicted", "Retry-After": "7"}}); err != nil {
					t.Fatal(err)
				}
				before := w.metric(t, "shunt_upstream_errors_total", "status", fmt.Sprint(status))
				r := w.must(t, w.h1, call{body: strings.NewReader(chat)})
				if r.status != status || string(r.body) != body || r.header.Get("Retry-After") != "7" || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "" {
					t.Errorf("%v", r)
				}
				w.access(t, r.id) // after that it is counted
				if n := w.metric(t, "shunt_upstream_errors_total", "status", fmt.Sprint(status)); n != before+1 {
					t.Errorf("%d: counted %v times", status, n-before)
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestBackPressure: a client that does not read stops the engine, also where
// the answer is read and changed on its way.
func TestBackPressure(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		engine := startScript(t)
		w := start(t, d, setup{pools: pools(engine)})
		const events = 100_000
		const event = `data: {"model":"m","choices":[{"delta":{"content":"` + "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789" + `"}}]}` + "\n\n"
		for _, rewrite := range []bool{false, true} {
			t.Run(fmt.Sprint("rewrite ", rewrite), func(t *testing.T) {
				var sent atomic.Int64
				engine.plays(func(s *stage) {
					s.begin(200, "Content-Type", sseType)
					for range events {
						if _, err := io.WriteString(s, event); err != nil {
							return
						}
						sent.Add(1)
					}
				})
				paused := w.stat(t, "cluster.shunt_engines.upstream_flow_control_paused_reading_total")
				q, want := call{body: strings.NewReader(streamed)}, sha256.New()
				text := event
				if rewrite {
					q, text = rewritten(streamed), renamed(event)
				}
				resp, id := w.open(t, w.h1, q)
				if resp.StatusCode != 200 {
					t.Fatalf("%d: %s", resp.StatusCode, rest(t, resp.Body))
				}
				w.waitStat(t, "cluster.shunt_engines.upstream_flow_control_paused_reading_total", func(n int64) bool { return n > paused })
				if n := sent.Load(); n == events {
					t.Error("the engine has sent all of it")
				}
				got := sha256.New()
				if _, err := io.Copy(got, resp.Body); err != nil {
					t.Fatal(err)
				}
				_, _ = io.WriteString(want, strings.Repeat(text, events))
				if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
					t.Error("other bytes than expected")
				}
				if a := w.access(t, id); a.at("shunt", "completion_tokens") != float64(events) {
					t.Errorf("metadata %v", a["shunt"])
				}
			})
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestClientThatLeaves: what has streamed until then counts.
func TestClientThatLeaves(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		engine := startScript(t)
		w := start(t, d, setup{pools: pools(engine)})
		for proto, c := range map[string]*http.Client{"h1": w.h1, "h2": w.h2} {
			t.Run(proto, func(t *testing.T) {
				never := make(chan struct{})
				part, _, _ := strings.Cut(sse, "data: {\"model\":\"m\",\"choices\":[],")
				engine.plays(func(s *stage) {
					s.begin(200, "Content-Type", sseType)
					s.send(part)
					s.wait(never)
				})
				resp, id := w.open(t, c, call{body: strings.NewReader(streamed)})
				readN(t, resp.Body, len(part))
				_ = resp.Body.Close()
				if a := w.access(t, id); a.at("shunt", "usage") != "estimated" || a.at("shunt", "completion_tokens") != 1.0 {
					t.Errorf("metadata %v", a["shunt"])
				}
			})
		}
		w.waitLoad(t, 0, 0)
	})
}
