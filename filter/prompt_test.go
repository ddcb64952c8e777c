package filter

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// chatOf is a chat of that much text, with further fields.
func chatOf(text string, fields ...string) string {
	return `{"model":"m",` + strings.Join(append(fields, ""), ",") + `"messages":[{"role":"user","content":"` + text + `"}]}`
}

// TestPrefixDecides: prompts that begin alike go to one endpoint, others do not
// follow them.
func TestPrefixDecides(t *testing.T) {
	w := newWorld(t, "policy: prefix-cache")
	w.publish("default", ep(1, "m"), ep(2, "m"), ep(3, "m"), ep(4, "m"))
	long := strings.Repeat("a conversation that goes on and on. ", 40)
	send := func(body string) (string, int64) {
		t.Helper()
		s := w.stream()
		to := s.chat(t, body).Destination
		prefill := s.held.Live().Prefill()
		s.finish(End{Answered: true})
		if s.blocks != nil {
			t.Error("the request keeps blocks that are not its own")
		}
		return to, prefill
	}
	first, all := send(chatOf(long))
	for range 8 {
		if again, left := send(chatOf(long + "and one thing more")); again != first || left >= all/2 {
			t.Errorf("the conversation was at %s and goes to %s, %d of %d tokens to read", first, again, left, all)
		}
	}
	for name, fields := range map[string][]string{
		"tools":      {`"tools":[{"type":"function"}]`},
		"cache_salt": {`"cache_salt":"x"`},
	} {
		if _, left := send(chatOf(long, fields...)); left < all {
			t.Errorf("%s: a hit, %d of %d tokens to read", name, left, all)
		}
		if again, left := send(chatOf(long, fields...)); left >= all/2 {
			t.Errorf("%s: no hit at %s, %d tokens to read", name, again, left)
		}
	}
	// The endpoint goes, and what was known of it.
	snap := w.pool("default").holder.Load()
	var rest []pool.Endpoint
	for _, e := range snap.Endpoints {
		if e.Key != first {
			rest = append(rest, e)
		}
	}
	w.publish("default", rest...)
	if _, left := send(chatOf(long)); left < all {
		t.Errorf("a hit at an endpoint that never had it: %d of %d", left, all)
	}
}

// TestPrefixOfAWaitingRequest: its blocks outlive the body.
func TestPrefixOfAWaitingRequest(t *testing.T) {
	w := newWorld(t, "policy: prefix-cache")
	w.publish("default", ep(1, "m"), ep(2, "m"), ep(3, "m"))
	long := strings.Repeat("a conversation that goes on and on. ", 40)
	s := w.stream()
	s.chat(t, chatOf(long))
	first := s.v.Destination
	s.finish(End{})
	lives := w.pool("default").holder.Load().Endpoints
	w.pool("default").holder.Publish(pool.NewSnapshot(pool.Input{}))
	waiting := w.stream()
	if waiting.chat(t, chatOf(long)); waiting.v.Action != Wait || len(waiting.blocks) == 0 {
		t.Fatalf("%s with %d blocks", show(&waiting.v), len(waiting.blocks))
	}
	for range 20 { // others use the reader
		other := w.stream()
		other.chat(t, chatOf(strings.Repeat("x", 2000)))
		other.finish(End{})
	}
	w.publish("default", lives...)
	if !waiting.posted() {
		t.Fatal("it was not woken")
	}
	if waiting.Resume(&waiting.v); waiting.v.Destination != first {
		t.Errorf("it went to %q, the conversation was at %s", waiting.v.Destination, first)
	}
	waiting.finish(End{})
}

// TestSessions: whichever way a request says whom it belongs to.
func TestSessions(t *testing.T) {
	w := newWorld(t, "policy: session-affinity\nsessions: {cookie: sid}")
	var eps []pool.Endpoint
	for n := range byte(8) {
		eps = append(eps, ep(n+1, "m"))
	}
	w.publish("default", eps...)
	for _, c := range []struct {
		name string
		send func(id string) (pairs []string, body string)
	}{
		{"x-session-id", func(id string) ([]string, string) { return []string{"x-session-id", id}, chatBody }},
		{"x-session-affinity", func(id string) ([]string, string) { return []string{"x-session-affinity", id}, chatBody }},
		{"cookie", func(id string) ([]string, string) { return []string{"cookie", "a=b; sid=" + id}, chatBody }},
		{"prompt_cache_key", func(id string) ([]string, string) { return nil, chatOf("hi", `"prompt_cache_key":"`+id+`"`) }},
	} {
		where := map[string]bool{}
		for i := range 24 {
			pairs, body := c.send(fmt.Sprint("s", i))
			at := map[string]bool{}
			for range 3 {
				s := w.stream()
				v := s.chat(t, body, pairs...)
				if v.meta("fallback") != "" {
					t.Fatalf("%s: %s", c.name, show(v))
				}
				at[v.Destination], where[v.Destination] = true, true
				s.finish(End{})
			}
			if len(at) != 1 {
				t.Errorf("%s: one session went to %v", c.name, at)
			}
		}
		if len(where) < 4 {
			t.Errorf("%s: 24 sessions went to %d endpoints", c.name, len(where))
		}
	}
	s := w.stream()
	if v := s.chat(t, chatBody, "cookie", "other=x"); v.meta("fallback") != "random" {
		t.Errorf("without a session: %s", show(v))
	}
	s.finish(End{})

	// A session stays when an endpoint comes that it would be hashed to, until the
	// pin runs out.
	moved := func() (n int) {
		for i := range 24 {
			s := w.stream()
			s.chat(t, chatBody, "x-session-id", fmt.Sprint("s", i))
			if s.v.Destination == "10.0.0.9:8000" {
				n++
			}
			s.finish(End{})
		}
		return n
	}
	w.publish("default", append(eps, ep(9, "m"))...)
	if n := moved(); n != 0 {
		t.Errorf("%d sessions moved to the new endpoint", n)
	}
	w.clock.advance(10 * time.Minute)
	if n := moved(); n == 0 || n > 12 {
		t.Errorf("%d sessions moved once their pins had run out", n)
	}
}

func TestPushbackIsNoFault(t *testing.T) {
	for status, want := range map[int]bool{429: true, 503: true, 400: false, 404: false, 500: false, 200: false} {
		w := newWorld(t, "")
		w.publish("default", ep(1, "m"))
		s := w.stream()
		s.chat(t, chatBody)
		live := s.held.Live()
		s.finish(End{Answered: true, Status: status})
		if live.PushedBack(w.now()) != want || len(w.pool("default").holder.Faults()) != 0 {
			t.Errorf("%d: pushed back %v, %d faults", status, live.PushedBack(w.now()), len(w.pool("default").holder.Faults()))
		}
	}
}
