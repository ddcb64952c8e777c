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
