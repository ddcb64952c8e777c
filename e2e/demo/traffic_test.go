package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestTraffic(t *testing.T) {
	list := traffic(3000, 7)
	if !reflect.DeepEqual(list, traffic(3000, 7)) {
		t.Error("the same seed gives other traffic")
	}
	if reflect.DeepEqual(list, traffic(3000, 8)) {
		t.Error("another seed gives the same traffic")
	}
	big, streamed := 0, 0
	for i, c := range list {
		if i > 0 && c.at < list[i-1].at {
			t.Fatalf("request %d comes before the one before it", i)
		}
		if c.model == bigModel {
			big++
		}
		if c.stream {
			streamed++
		}
		var body struct {
			Model     string
			Stream    bool
			MaxTokens int `json:"max_tokens"`
			Messages  []struct{ Content string }
		}
		if err := json.Unmarshal(c.body(i), &body); err != nil {
			t.Fatal(err)
		}
		if body.Model != c.model || body.Stream != c.stream || body.MaxTokens != c.maxTokens || !strings.HasPrefix(body.Messages[0].Content, fmt.Sprint(i, ":")) {
			t.Fatalf("body %+v of %+v", body, c)
		}
	}
	// Of 3,000, 2,000 are expected, with a standard deviation of 26; the arrivals take 100 s, with one of 2.
	if big < 1850 || big > 2150 || streamed < 1850 || streamed > 2150 {
		t.Errorf("%d for the big model and %d streamed, of %d", big, streamed, len(list))
	}
	if last := list[len(list)-1].at; last < 90*time.Second || last > 110*time.Second {
		t.Errorf("%d requests at %v a second take %v", len(list), rate, last)
	}
}

// Each kind of answer, from a server that decides by model.
func TestSend(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct{ Model string }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.Header.Get("X-Shunt-Explain") != "1" {
			http.Error(w, "bad", http.StatusTeapot)
			return
		}
		w.Header().Set("X-Shunt-Endpoint", "1.2.3.4:5")
		switch body.Model {
		case "ok":
			fmt.Fprint(w, "data: {}\n\ndata: [DONE]\n\n")
		case "cut":
			fmt.Fprint(w, "data: {}\n\n")
		case "empty":
		case "refused":
			http.Error(w, "no", http.StatusServiceUnavailable)
		}
	}))
	defer srv.Close()
	addr := strings.TrimPrefix(srv.URL, "http://")
	var list []chat
	for _, m := range []string{"ok", "cut", "empty", "refused"} {
		list = append(list, chat{model: m, stream: true})
	}
	list = append(list, chat{model: "cut"}) // whole where it isn't a stream
	outcomes, peak := send(t.Context(), addr, list)
	if peak < 1 || peak > len(list) {
		t.Errorf("at most %d open at once", peak)
	}
	for i, want := range []string{"", "the stream has no end", "status 200, no body: EOF", "status 503: no\n", ""} {
		got := ""
		if outcomes[i].err != nil {
			got = outcomes[i].err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", list[i].model, got, want)
		}
		if outcomes[i].endpoint != "1.2.3.4:5" {
			t.Errorf("%s: endpoint %q", list[i].model, outcomes[i].endpoint)
		}
		if (outcomes[i].firstByte > 0) != (list[i].model != "empty") {
			t.Errorf("%s: first byte after %v", list[i].model, outcomes[i].firstByte)
		}
	}
}

func TestSendEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	outcomes, _ := send(ctx, "127.0.0.1:1", []chat{{at: time.Hour}, {at: 2 * time.Hour}})
	if len(outcomes) != 2 {
		t.Errorf("%d outcomes of 2 requests", len(outcomes))
	}
	for _, o := range outcomes {
		if o.err == nil {
			t.Error("a request of a cancelled run succeeded")
		}
	}
}
