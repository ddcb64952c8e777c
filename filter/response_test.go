package filter

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// route sends a chat request for model asked that was rewritten to m, or not.
func (w *world) route(t testing.TB, asked string) *stream {
	t.Helper()
	s := w.stream()
	s.set, s.pool, s.policy = w.gen.settings.Load(), w.pool("default"), w.gen.settings.Load().policy
	s.Headers(post(chatPath), false, nil, &s.v)
	s.Body([][]byte{[]byte(chatBody)}, &s.v)
	if s.v.Action != Continue {
		t.Fatal(show(&s.v))
	}
	s.asked = asked
	return s
}

// respond hands over a response in chunks and returns what the client gets.
func (s *stream) respond(h ResponseHead, chunks ...string) (body string, removed []string) {
	s.Response(&h, &s.v)
	removed = append(removed, s.v.Remove...)
	for _, c := range chunks {
		if !s.v.Watch {
			body += c
			continue
		}
		own := []byte(c)
		s.ResponseBody([][]byte{own[:len(own)/2], own[len(own)/2:]}, &s.v)
		body += string(s.v.AppendEdited(nil, [][]byte{own[:len(own)/2], own[len(own)/2:]}))
		for i := range own {
			own[i] = '#'
		}
	}
	return body, removed
}

const (
	jsonType = "application/json"
	sseType  = "text/event-stream; charset=utf-8"
)

func event(content string) string {
	return `data: {"model":"m","choices":[{"delta":{"content":"` + content + `"}}]}` + "\n\n"
}

// TestUsage is what metadata and metrics say of a response.
func TestUsage(t *testing.T) {
	const prompt = 5 // of chatBody, estimated
	for _, c := range []struct {
		name     string
		head     ResponseHead
		body     string
		complete bool
		want     string // source prompt completion total cached
		metric   string
	}{
		{"chat", ResponseHead{Status: 200, ContentType: jsonType},
			`{"usage":{"prompt_tokens":3,"total_tokens":10,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}}`, true,
			"reported 3 7 10 2", "shunt_usage_total source reported"},
		{"any success status", ResponseHead{Status: 201, ContentType: "application/problem+json;x=y"}, `{"usage":{"input_tokens":3,"output_tokens":7}}`, true,
			"reported 3 7 10 -", "shunt_usage_total source reported"},
		{"no generation", ResponseHead{Status: 200, ContentType: "Application/JSON"}, `{"usage":{"prompt_tokens":3,"total_tokens":3}}`, true,
			"reported 3 - 3 -", "shunt_usage_total source reported"},
		{"stream", ResponseHead{Status: 200, ContentType: sseType},
			event("a") + event("b") + `data: {"usage":{"prompt_tokens":3,"completion_tokens":9}}` + "\n\ndata: [DONE]\n\n", true,
			"reported 3 9 12 -", "shunt_usage_total source reported"},
		{"stream without usage", ResponseHead{Status: 200, ContentType: sseType}, event("a") + event("b") + "data: [DONE]\n\n", true,
			fmt.Sprint("estimated ", prompt, " 2 ", prompt+2, " -"), "shunt_usage_total source estimated"},
		{"stream that was cut", ResponseHead{Status: 200, ContentType: sseType},
			`data: {"message":{"usage":{"input_tokens":3,"output_tokens":1}}}` + "\n\n" + event("a") + event("b"), false,
			"estimated 3 2 5 -", "shunt_usage_total source estimated"},
		{"stream that was cut after its end", ResponseHead{Status: 200, ContentType: sseType},
			event("a") + event("b") + `data: {"usage":{"prompt_tokens":3,"completion_tokens":1}}` + "\n\ndata: [DONE]\n\n", false,
			"reported 3 1 4 -", "shunt_usage_total source reported"},
		{"stream of nothing", ResponseHead{Status: 200, ContentType: sseType}, "data: [DONE]\n\n", true, "", "shunt_usage_total source absent"},
		{"no usage", ResponseHead{Status: 200, ContentType: jsonType}, `{"choices":[]}`, true, "", "shunt_usage_total source absent"},
		{"identity", ResponseHead{Status: 200, ContentType: jsonType, ContentEncoding: "Identity"}, `{"usage":{"prompt_tokens":3,"total_tokens":3}}`, true,
			"reported 3 - 3 -", "shunt_usage_total source reported"},
		{"compressed", ResponseHead{Status: 200, ContentType: jsonType, ContentEncoding: "gzip"}, `{"usage":{"prompt_tokens":3}}`, true,
			"", "shunt_unread_responses_total cause content-encoding"},
		{"another type", ResponseHead{Status: 200, ContentType: "text/plain"}, `{"usage":{"prompt_tokens":3}}`, true,
			"", "shunt_unread_responses_total cause content-type"},
		{"error", ResponseHead{Status: 503, ContentType: jsonType}, `{"usage":{"prompt_tokens":3}}`, true, "", "shunt_upstream_errors_total status 503"},
		{"an error inside", ResponseHead{Status: 200, ContentType: sseType}, event("a") + `data: {"error":{"message":"x"}}` + "\n\n", true,
			fmt.Sprint("estimated ", prompt, " 1 ", prompt+1, " -"), "shunt_failed_answers_total pool default"},
		{"no body", ResponseHead{Status: 204, End: true}, "", true, "", ""},
	} {
		for _, single := range []bool{false, true} {
			t.Run(c.name, func(t *testing.T) {
				w := newWorld(t, "")
				w.publish("default", ep(1, "m"))
				s := w.route(t, "m")
				if s.prompt != 1 {
					t.Errorf("the prompt is estimated as %d tokens", s.prompt)
				}
				s.prompt = prompt
				chunks := []string{c.body}
				if single {
					chunks = strings.Split(c.body, "")
				}
				body, removed := s.respond(c.head, chunks...)
				if body != c.body || len(removed) > 0 {
					t.Errorf("changed: %q, removed %v", body, removed)
				}
				v := s.finish(End{Answered: true, Status: c.head.Status, Complete: c.complete, FirstByte: time.Millisecond})
				got := ""
				if v.has("usage") {
					got = v.meta("usage")
					for _, key := range []string{"prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens"} {
						if v.has(key) {
							got += fmt.Sprint(" ", v.numberOf(key))
						} else {
							got += " -"
						}
					}
				}
				if got != c.want {
					t.Errorf("got %q, want %q", got, c.want)
				}
				if f := strings.Fields(c.metric); len(f) > 0 && w.counterValue(t, f[0], "pool", "default", f[len(f)-2], f[len(f)-1]) != 1 {
					t.Errorf("%s is not counted", c.metric)
				}
				source, numbers, _ := strings.Cut(c.want, " ")
				var p, o float64
				_, _ = fmt.Sscan(strings.ReplaceAll(numbers, "-", "0"), &p, &o)
				for kind, n := range map[string]float64{"prompt": p, "completion": o} {
					if m := w.counterValue(t, "shunt_tokens_total", "model", "m", "target_model", "m", "kind", kind, "source", source); m != n {
						t.Errorf("%v %s tokens counted, want %v", m, kind, n)
					}
				}
				if load(w.pool("default")) != 0 {
					t.Error("load is left")
				}
			})
		}
	}
}

func (v *Verdict) numberOf(key string) float64 {
	for _, f := range v.Metadata {
		if f.Key == key {
			return f.Number
		}
	}
	return -1
}

// TestNotWatched: what says nothing is not looked at.
func TestNotWatched(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	s := w.stream()
	if v := s.get(); v.Action != Continue || v.Watch {
		t.Errorf("a request without a model is watched: %s", show(v))
	}
	s = w.stream()
	if v := s.send(t, post("/tokenize"), nil, `{"model":"m","prompt":"x"}`); v.Action != Continue || v.Watch {
		t.Errorf("an answer without usage is watched: %s", show(v))
	}
	s = w.stream()
	if v := s.chat(t, chatBody); !v.Watch {
		t.Errorf("a chat is not watched: %s", show(v))
	}
}

// TestLiveTokens: streams show their tokens as they come, and what usage says
// in the end counts.
func TestLiveTokens(t *testing.T) {
	w := newWorld(t, "")
	snap := w.publish("default", ep(1, "m"))
	live := snap.Endpoints[0].Live
	s := w.route(t, "m")
	w.clock.advance(300 * time.Millisecond)
	s.respond(ResponseHead{Status: 200, ContentType: sseType}, event("a"))
	w.clock.advance(200 * time.Millisecond)
	s.ResponseBody([][]byte{[]byte(event("b") + event("c"))}, &s.v)
	if n := live.Tokens(); n != 4 { // one of the prompt
		t.Errorf("%d tokens in flight", n)
	}
	w.clock.advance(time.Second)
	s.ResponseBody([][]byte{[]byte("data: {\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":30}}\n\ndata: [DONE]\n\n")}, &s.v)
	v := s.finish(End{Answered: true, Status: 200, Complete: true, FirstByte: 10 * time.Millisecond})
	if v.numberOf("ttft_ms") != 300 {
		t.Errorf("ttft_ms is %v", v.numberOf("ttft_ms"))
	}
	if live.Tokens() != 0 || live.InFlight() != 0 || live.OutputRate() <= 0 {
		t.Errorf("%d tokens, %d in flight, %v a second", live.Tokens(), live.InFlight(), live.OutputRate())
	}
	s = w.route(t, "m")
	s.respond(ResponseHead{Status: 200, ContentType: jsonType}, `{"choices":[]}`)
	if v := s.finish(End{Answered: true, Status: 200, FirstByte: 10 * time.Millisecond}); v.numberOf("ttft_ms") != 10 {
		t.Errorf("ttft_ms of what is no stream is %v", v.numberOf("ttft_ms"))
	}
}

// TestRestoreModelName: the client finds the name it asked for, in the place of
// the engine's and nowhere else, and content-length goes only then.
func TestRestoreModelName(t *testing.T) {
	const sse = "data: {\"model\":\"m\",\"choices\":[{\"delta\":{\"content\":\"\\\"model\\\":\\\"m\\\"\"}}]}\n\ndata: {\"model\":\"m\"}\n\ndata: [DONE]\n\n"
	for _, c := range []struct {
		name, config, asked string
		head                ResponseHead
		body, want          string
		removed             bool
	}{
		{"JSON", "", `a "b"`, ResponseHead{Status: 200, ContentType: jsonType}, `{"model":"m","x":{"model":"m"}}`, `{"model":"a \"b\"","x":{"model":"m"}}`, true},
		{"stream", "", "asked", ResponseHead{Status: 200, ContentType: sseType}, sse, strings.ReplaceAll(sse, `"model":"m"`, `"model":"asked"`), true},
		{"not rewritten", "", "m", ResponseHead{Status: 200, ContentType: sseType}, sse, sse, false},
		{"none asked for", "", "", ResponseHead{Status: 200, ContentType: sseType}, sse, sse, false},
		{"switched off", "restoreModelName: false", "asked", ResponseHead{Status: 200, ContentType: sseType}, sse, sse, false},
		{"compressed", "", "asked", ResponseHead{Status: 200, ContentType: sseType, ContentEncoding: "br"}, sse, sse, false},
		{"error", "", "asked", ResponseHead{Status: 400, ContentType: jsonType}, `{"model":"m"}`, `{"model":"m"}`, false},
		{"text", "", "asked", ResponseHead{Status: 200, ContentType: "text/plain"}, `{"model":"m"}`, `{"model":"m"}`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.config)
			w.publish("default", ep(1, "m"))
			for _, chunks := range append(cuts(c.body), strings.Split(c.body, "")) {
				s := w.route(t, c.asked)
				got, removed := s.respond(c.head, chunks...)
				if got != c.want {
					t.Fatalf("cut after %d: got %q, want %q", len(chunks[0]), got, c.want)
				}
				if fmt.Sprint(removed) != map[bool]string{true: "[content-length]", false: "[]"}[c.removed] {
					t.Fatalf("removed %v", removed)
				}
				s.finish(End{Answered: true, Status: c.head.Status, Complete: true})
			}
		})
	}
}

// cuts are all ways to cut a text in two.
func cuts(text string) [][]string {
	var all [][]string
	for i := range len(text) {
		all = append(all, []string{text[:i], text[i:]})
	}
	return all
}

// TestResponseAllocs: a chunk costs no memory, changed or not.
func TestResponseAllocs(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	for _, asked := range []string{"m", "asked"} {
		s := w.route(t, asked)
		s.Response(&ResponseHead{Status: 200, ContentType: sseType}, &s.v)
		chunks := [][]byte{[]byte(event("a") + event("b"))}
		buffer := make([]byte, 0, 1024)
		if n := testing.AllocsPerRun(100, func() {
			s.ResponseBody(chunks, &s.v)
			buffer = s.v.AppendEdited(buffer[:0], chunks)
		}); n != 0 && !raceEnabled {
			t.Errorf("%v allocations for a chunk", n)
		}
		s.finish(End{Answered: true})
	}
}

func BenchmarkResponseBody(b *testing.B) {
	w := newWorld(b, "")
	w.publish("default", ep(1, "m"))
	for _, asked := range []string{"m", "asked"} {
		b.Run("asked="+asked, func(b *testing.B) {
			s := w.route(b, asked)
			s.Response(&ResponseHead{Status: 200, ContentType: sseType}, &s.v)
			chunk := []byte(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}` + "\n\n")
			chunks := [][]byte{chunk}
			buffer := make([]byte, 0, 1024)
			b.SetBytes(int64(len(chunk)))
			b.ReportAllocs()
			for b.Loop() {
				s.ResponseBody(chunks, &s.v)
				if len(s.v.Edits) > 0 {
					buffer = s.v.AppendEdited(buffer[:0], chunks)
				}
			}
		})
	}
}
