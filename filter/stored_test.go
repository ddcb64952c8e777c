package filter

import (
	"fmt"
	"testing"
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
