package openai

import "testing"

// TestResponseID: the id of a stored response is found however it is cut, and
// whichever way it is written.
func TestResponseID(t *testing.T) {
	for _, c := range []struct {
		sse  bool
		body string
		want uint64
	}{
		{false, `{"id":"resp_1","object":"response","output":[{"id":"msg_2"}]}`, IDHash("resp_1")},
		{false, `{"output":[{"id":"msg_2"}],"id":"resp\u005f1"}`, IDHash("resp_1")},
		{false, `{"object":"response"}`, 0},
		{false, `{"id":7}`, 0},
		{true, "event: response.created\ndata: {\"response\":{\"id\":\"resp_1\"}}\n\ndata: {\"item\":{\"id\":\"x\"}}\n\ndata: {\"response\":{\"id\":\"resp_2\"}}\n\n", IDHash("resp_1")},
	} {
		for _, renaming := range []bool{false, true} {
			for cut := range len(c.body) + 1 {
				var r Reader
				r.Reset(c.sse, renaming)
				r.WantID(renaming)
				r.Write([]byte(c.body[:cut]))
				_ = r.ID()
				r.Write([]byte(c.body[cut:]))
				r.Finish()
				if got := r.ID(); got != c.want {
					t.Fatalf("%s cut at %d: %x, want %x", c.body, cut, got, c.want)
				}
			}
		}
	}
	body := []byte(`{"model":"m","input":"x","previous_response_id":"resp_\u0031"}`)
	for cut := range len(body) + 1 {
		var s Scan
		s.Reset(endpoint("responses").Rules, Options{})
		s.Write(body[:cut])
		s.Write(body[cut:])
		if r, err := s.Finish(); err != nil || r.Previous != IDHash("resp_1") {
			t.Fatalf("cut at %d: %x, %v", cut, r.Previous, err)
		}
	}
}
