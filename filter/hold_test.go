package filter

import (
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// TestStartupHold: a pool whose endpoints have not answered yet holds requests
// until it knows, and no longer than startupHold after its start.
func TestStartupHold(t *testing.T) {
	for _, c := range []struct {
		name string
		act  func(w *world)
		want string // after one resume
	}{
		{"an endpoint answers", func(w *world) { w.publish("default", ep(1, "m")) }, "10.0.0.1:8000"},
		{"one of two answers", func(w *world) { w.publish("default", ep(1, "m"), unjudged(ep(2, "m"))) }, "10.0.0.1:8000"},
		{"none answers", func(w *world) { w.publish("default", notReady(ep(1, "m"))) }, "rejected-no-endpoints"},
		{"there are none", func(w *world) { w.publish("default") }, "rejected-no-endpoints"},
		{"all serve other models", func(w *world) { w.publish("default", ep(1, "n")) }, "model_not_found"},
		{"time runs out", func(w *world) { w.clock.advance(5 * time.Second); w.room.Expire() }, "rejected-no-endpoints"},
		{"another's endpoint answers, then its own", func(w *world) {
			w.publish("default", ep(1, "n"), unjudged(ep(2, "m")))
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, "")
			w.publish("default", unjudged(ep(1, "m")))
			w.clock.advance(4 * time.Second)
			s := w.stream()
			if s.chat(t, chatBody); show(&s.v) != "wait" || s.prepared != 1 {
				t.Fatalf("got %s, prepared %d", show(&s.v), s.prepared)
			}
			w.clock.advance(999 * time.Millisecond)
			w.room.Expire()
			w.publish("default", unjudged(ep(1, "m"))) // no news
			if s.posted() {
				t.Fatal("woken too early")
			}
			c.act(w)
			if !s.posted() {
				t.Fatal("not woken")
			}
			s.Resume(&s.v)
			if c.want == "" {
				if show(&s.v) != "wait" || s.posted() {
					t.Fatalf("got %s", show(&s.v))
				}
				w.publish("default", ep(1, "n"), ep(2, "m"))
				if s.Resume(&s.v); s.v.Destination != "10.0.0.2:8000" {
					t.Fatalf("got %s", show(&s.v))
				}
			} else if got := s.v.Destination + s.v.meta("reason"); got != c.want {
				t.Fatalf("got %s", show(&s.v))
			}
			if !s.v.has("queue_ms") {
				t.Error("no queue_ms")
			}
			s.finish(End{})
		})
	}
}

func TestHoldEndsForAll(t *testing.T) {
	w := newWorld(t, "startupHold: 2s")
	s := w.stream()
	w.clock.advance(2*time.Second - time.Nanosecond)
	if s.get(); s.v.Action != Wait {
		t.Fatalf("got %s", show(&s.v))
	}
	s.finish(End{})
	w.clock.advance(time.Nanosecond)
	if s = w.stream(); s.get().meta("reason") != "rejected-no-endpoints" {
		t.Errorf("held after startupHold: %s", show(&s.v))
	}
}

func TestHoldIsBounded(t *testing.T) {
	for _, c := range []struct {
		requests int
		bytes    int64
	}{{3, 1 << 30}, {maxWaiting, 3*int64(len(chatBody)) + 1}} {
		w := newWorld(t, "")
		w.room.SetLimits(c.requests, c.bytes)
		var held []*stream
		for range 3 {
			s := w.stream()
			if s.chat(t, chatBody); s.v.Action != Wait {
				t.Fatalf("got %s", show(&s.v))
			}
			held = append(held, s)
		}
		over := w.stream()
		if v := over.chat(t, chatBody); v.meta("reason") != "rejected-no-endpoints" || !strings.Contains(string(v.Reply.Body), "too many requests wait") {
			t.Errorf("got %s", show(v))
		}
		over.finish(End{})
		held[1].finish(End{}) // its place is free
		if v := w.stream().chat(t, chatBody); v.Action != Wait {
			t.Errorf("got %s", show(v))
		}
	}
}

// TestWakeUpIsNotLost: a snapshot that comes after the request has read the one
// before, and before it is in the queue, wakes it all the same.
func TestWakeUpIsNotLost(t *testing.T) {
	w := newWorld(t, "")
	old := w.publish("default", unjudged(ep(1, "m")))
	s := w.stream()
	s.Headers(post(chatPath), false, nil, &s.v)
	s.model = "m"
	w.publish("default", ep(1, "m"))
	if s.decideOn(old, w.now(), &s.v); s.v.Action != Wait || !s.posted() {
		t.Fatalf("got %s, and no post", show(&s.v))
	}
	if s.Resume(&s.v); s.v.Destination != "10.0.0.1:8000" {
		t.Errorf("got %s", show(&s.v))
	}
	s.finish(End{})
}

// TestNoHoldOnceKnown: a pool that is known has no start any more.
func TestNoHoldOnceKnown(t *testing.T) {
	w := newWorld(t, "")
	w.publishInput("default", pool.Input{Complete: true, Fresh: true})
	s := w.stream()
	if s.chat(t, chatBody); s.v.Action != Reply || s.prepared != 0 {
		t.Errorf("got %s", show(&s.v))
	}
}

// TestNewSetIsAwaited: where endpoints take the place of all others, requests wait
// for the first answer of one, no longer than startupHold.
func TestNewSetIsAwaited(t *testing.T) {
	refused, unlabelled := notReady(ep(2, "m")), unjudged(ep(2))
	refused.NotReady, refused.Judged = "terminating", false
	prefill := unjudged(ep(2, "m"))
	prefill.PrefillOnly = true
	adapter := unjudged(ep(2, "base", "m"))
	for _, c := range []struct {
		name   string
		config string
		found  pool.Endpoint
		model  string // what is asked for, "" for a GET
		act    func(w *world)
		want   string // after one resume; "" if it should not have waited
	}{
		{"it answers", "", unjudged(ep(2, "m")), "m", func(w *world) { w.publish("default", ep(2, "m")) }, "10.0.0.2:8000"},
		{"it fails", "", unjudged(ep(2, "m")), "m", func(w *world) { w.publish("default", notReady(ep(2, "m"))) }, "rejected-no-endpoints"},
		{"it goes", "", unjudged(ep(2, "m")), "m", func(w *world) { w.publish("default") }, "rejected-no-endpoints"},
		{"the old one comes back", "", unjudged(ep(2, "m")), "m", func(w *world) { w.publish("default", ep(1, "m"), unjudged(ep(2, "m"))) }, "10.0.0.1:8000"},
		{"time runs out", "", unjudged(ep(2, "m")), "m", func(w *world) { w.clock.advance(5 * time.Second); w.room.Expire() }, "rejected-no-endpoints"},
		{"a request without a model", "", unjudged(ep(2, "m")), "", func(w *world) { w.publish("default", ep(2, "m")) }, "10.0.0.2:8000"},
		{"it has not said what it serves", "", unlabelled, "m", func(w *world) { w.publish("default", ep(2, "m")) }, "10.0.0.2:8000"},
		{"an adapter that config names", "", adapter, "m", func(w *world) { w.publish("default", ep(2, "base", "m")) }, "10.0.0.2:8000"},
		{"with flow control", "flowControl: {enabled: true}", unjudged(ep(2, "m")), "m", func(w *world) { w.publish("default", notReady(ep(2, "m"))) }, "rejected-no-endpoints"},
		{"another model's", "", unjudged(ep(2, "n")), "m", nil, ""},
		{"its source says no", "", refused, "m", nil, ""},
		{"for prefill alone", "", prefill, "m", nil, ""},
		{"no hold", "startupHold: 0s", unjudged(ep(2, "m")), "m", nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.config)
			w.publish("default", ep(1, "m"))
			w.clock.advance(time.Hour)
			w.publish("default", c.found)
			s := w.stream()
			ask := func() {
				if c.model == "" {
					s.get()
				} else {
					s.chat(t, chatBody)
				}
			}
			if ask(); c.want == "" {
				if s.v.Action != Reply || s.prepared != 0 {
					t.Fatalf("got %s", show(&s.v))
				}
				return
			}
			if show(&s.v) != "wait" || s.posted() {
				t.Fatalf("got %s", show(&s.v))
			}
			if c.act(w); !s.posted() {
				t.Fatal("not woken")
			}
			s.Resume(&s.v)
			if got := s.v.Destination + s.v.meta("reason"); got != c.want {
				t.Fatalf("got %s", show(&s.v))
			}
			s.finish(End{})
		})
	}
}

// TestAwaitingEnds: endpoints that nothing is heard of hold requests for
// startupHold from when they came, and others that come later hold anew.
func TestAwaitingEnds(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	w.clock.advance(time.Hour)
	step := func(name string, after time.Duration, want Action, endpoints ...pool.Endpoint) {
		t.Helper()
		w.clock.advance(after)
		w.publish("default", endpoints...)
		s := w.stream()
		if s.chat(t, chatBody); s.v.Action != want {
			t.Errorf("%s: got %s", name, show(&s.v))
		}
		s.finish(End{})
	}
	step("found", 0, Wait, unjudged(ep(2, "m")))
	step("almost over", 5*time.Second-1, Wait, unjudged(ep(2, "m")), unjudged(ep(3, "m")))
	step("over", 1, Reply, unjudged(ep(2, "m")), unjudged(ep(3, "m")))
	step("all were heard of", 0, Reply, notReady(ep(2, "m")), notReady(ep(3, "m")))
	step("another is found", 0, Wait, notReady(ep(2, "m")), unjudged(ep(4, "m")))
}
