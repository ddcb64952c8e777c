package filter

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/openai"
)

// TestStoredResponses: what is asked about a response goes to the endpoint that
// made it, as long as that may take requests.
func TestStoredResponses(t *testing.T) {
	w := newWorld(t, "policy: random")
	w.publish("default", ep(1, "m"), ep(2, "m"), ep(3, "n"))
	made := map[string]string{}
	for i := range 40 {
		id := fmt.Sprintf("resp_%d", i)
		body := []byte(`{"id":"` + id + `","object":"response","usage":{"input_tokens":1,"output_tokens":1}}`)
		head := &ResponseHead{Status: 200, ContentType: "application/json"}
		if i%2 == 0 {
			head.ContentType = "text/event-stream"
			body = []byte(`data: {"type":"response.created","response":{"id":"` + id + `"}}` + "\n\n")
		}
		s := w.stream()
		s.send(t, post("/v1/responses"), nil, `{"model":"m","input":"x"}`)
		made[id] = s.v.Destination
		if s.Response(head, &s.v); !s.v.Watch {
			t.Fatal("the response is not read")
		}
		s.ResponseBody([][]byte{body[:20], body[20:]}, &s.v)
		s.finish(End{Answered: true, Status: 200, Complete: true})
	}
	for id, want := range made {
		for _, ask := range []func(s *stream) *Verdict{
			func(s *stream) *Verdict { return s.at("GET", "/v1/responses/"+id) },
			func(s *stream) *Verdict { return s.at("DELETE", "/openai/v1/responses/"+id+"/?x=1") },
			func(s *stream) *Verdict { return s.at("POST", "/v1/responses/"+id+"/cancel") },
			func(s *stream) *Verdict {
				return s.send(t, post("/v1/responses"), nil, `{"model":"m","input":"x","previous_response_id":"`+id+`"}`)
			},
		} {
			s := w.stream()
			if v := ask(s); v.Destination != want {
				t.Errorf("%s: %s, want %s", id, show(v), want)
			}
			s.finish(End{})
		}
	}
	if s := w.stream(); s.at("GET", "/v1/responses/resp_unknown").Action != Continue {
		t.Errorf("an unknown id: %s", show(&s.v))
	}
	w.publish("default", notReady(ep(1, "m")), notReady(ep(2, "m")), ep(3, "n"))
	if s := w.stream(); s.at("GET", "/v1/responses/resp_1").Destination != "10.0.0.3:8000" {
		t.Errorf("its endpoint is gone: %s", show(&s.v))
	}
	s := w.stream()
	if s.at("OPTIONS", "/v1/responses/resp_1"); s.v.Action != Continue {
		t.Errorf("a preflight: %s", show(&s.v))
	}
}

// TestStoredResponsesWait: with flow control too, what is about a response keeps
// to the endpoint that made it: it waits for that one and takes no other's room,
// whoever else waits. A subset hint that leaves it out counts.
func TestStoredResponsesWait(t *testing.T) {
	w := newWorld(t, "policy: random\nsubsetHeader: true\n"+oneAtATime)
	w.publish("default", ep(1, "m"), ep(2, "m"), ep(3, "n"))
	const one, two = "10.0.0.1:8000", "10.0.0.2:8000"
	stored := &w.pool("default").stored
	stored.add(openai.IDHash("resp_1"), one)
	stored.add(openai.IDHash("resp_2"), two)
	about := func(id string, pairs ...string) *stream {
		s := w.stream()
		s.send(t, post("/v1/responses", pairs...), nil, `{"model":"m","input":"x","previous_response_id":"`+id+`"}`)
		return s
	}
	other := func() *stream {
		s := w.stream()
		s.chat(t, strings.Replace(chatBody, `"m"`, `"n"`, 1))
		return s
	}
	running, waiting := other(), other()
	if running.v.Action != Continue || waiting.v.Action != Wait {
		t.Fatal(show(&running.v), show(&waiting.v))
	}
	for range 20 { // while somebody waits for an endpoint of another model
		a, b := about("resp_1"), about("resp_2")
		if a.v.Destination != one || b.v.Destination != two {
			t.Fatalf("%s, %s", show(&a.v), show(&b.v))
		}
		a.finish(End{})
		b.finish(End{})
	}
	a := about("resp_1")
	next := about("resp_1")
	if a.v.Destination != one || next.v.Action != Wait {
		t.Fatalf("%s, %s while %s is free", show(&a.v), show(&next.v), two)
	}
	if s := about("resp_1", "x-gateway-destination-endpoint-subset", two); s.v.Destination != two {
		t.Errorf("its endpoint is outside of the subset: %s", show(&s.v))
	} else if s.finish(End{}); next.posted() {
		t.Error("woken for another's room")
	}
	a.finish(End{})
	if v := next.resume(t); v.Destination != one {
		t.Errorf("got %s", show(v))
	}
	last := about("resp_1")
	w.publish("default", notReady(ep(1, "m")), ep(2, "m"), ep(3, "n"))
	if s := about("resp_1"); s.v.Destination != two {
		t.Errorf("its endpoint is gone: %s", show(&s.v))
	} else {
		s.finish(End{})
	}
	for _, s := range []*stream{next, last, running, waiting} {
		s.finish(End{})
	}
	w.idle(t)
}
