package filter

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

const evicting = `
flowControl: {enabled: true, saturation: concurrency, maxConcurrency: 1, ttl: 60s, eviction: true}
objectives: [{name: high, priority: 5}, {name: low, priority: -1}]
`

// overdue lets what waits have waited long enough for eviction.
func (w *world) overdue() {
	w.room.Expire()
	w.clock.advance(500 * time.Millisecond)
	w.room.Expire()
}

// TestEvicted: before the response's headers and after them.
func TestEvicted(t *testing.T) {
	for _, answered := range []bool{false, true} {
		w := newWorld(t, evicting)
		w.publish("default", ep(1, "m"))
		low, high := w.asks(t, "low"), w.asks(t, "high")
		if low.Evicted(End{}, &low.v); low.v.Action == Reply {
			t.Fatal("ended before it was asked to")
		}
		w.overdue()
		if low.evicts.Load() != 1 || !low.Evicting() {
			t.Fatalf("posted %d times", low.evicts.Load())
		}
		low.Evicted(End{Answered: answered, FirstByte: time.Second}, &low.v)
		if v := &low.v; v.Action != Reply || v.Reply.Status != 429 || v.meta("reason") != "evicted" || v.Reply.Details != "shunt_evicted" ||
			v.replyHeader(HeaderDropReason) != "evicted" || !strings.Contains(string(v.Reply.Body), `"code":"evicted"`) || v.meta("model") != "m" {
			t.Errorf("got %s", show(v))
		}
		if retry, err := strconv.Atoi(low.v.replyHeader("retry-after")); err != nil || retry < 5 || retry > 10 {
			t.Errorf("retry-after %q", low.v.replyHeader("retry-after"))
		}
		if v := high.resume(t); v.Destination != "10.0.0.1:8000" {
			t.Errorf("got %s", show(v))
		}
		if low.Evicted(End{}, &low.v); low.v.Action == Reply {
			t.Error("ended twice")
		}
		low.finish(End{Answered: answered, Details: "upstream_reset_before_response_started{local_reset}"})
		if n := load(w.pool("default")); n != 1 {
			t.Errorf("%d slots", n)
		}
		high.finish(End{})
		want := map[bool]string{false: "reply", true: "reset"}[answered]
		for outcome, n := range map[string]float64{"reply": 0, "reset": 0, "missed": 0, want: 1} {
			if got := w.counterOf(t, "shunt_evictions_total", "outcome", outcome); got != n {
				t.Errorf("%s: %v counted", outcome, got)
			}
		}
		if n := w.counterValue(t, "shunt_drops_total", "reason", "evicted"); n != 1 {
			t.Errorf("%v dropped", n)
		}
		w.idle(t)
	}
}

// counterOf reads what a collector writes.
func (w *world) counterOf(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	w.register()
	return w.counterValue(t, name, labels...)
}

// TestNotEvicted is who is not asked to end.
func TestNotEvicted(t *testing.T) {
	stream := `{"model":"m","stream":true,"messages":[{}]}`
	for _, c := range []struct {
		name, config, objective, body string
		late, want                    bool
	}{
		{"sheddable", evicting, "low", chatBody, false, true},
		{"eviction is off", strings.Replace(evicting, "eviction: true", "eviction: false", 1), "low", chatBody, false, false},
		{"priority 0", evicting, "", chatBody, false, false},
		{"the door can't end it", evicting, "low", chatBody, true, false},
		{"the door can, at its next event", evicting, "low", stream, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.config)
			w.publish("default", ep(1, "m"))
			s := w.stream()
			s.late = c.late
			var pairs []string
			if c.objective != "" {
				pairs = []string{"x-llm-d-inference-objective", c.objective}
			}
			if s.chat(t, c.body, pairs...); s.v.Action != Continue {
				t.Fatalf("got %s", show(&s.v))
			}
			high := w.asks(t, "high")
			w.overdue()
			if s.Evicting() != c.want {
				t.Errorf("asked: %v", s.Evicting())
			}
			if s.Evicted(End{Complete: true}, &s.v); s.v.Action == Reply {
				t.Error("a complete one was ended")
			}
			s.finish(End{Answered: true}) // by itself
			if s.Evicted(End{}, &s.v); s.v.Action == Reply {
				t.Error("ended after its end")
			}
			high.resume(t)
			high.finish(End{})
			w.idle(t)
		})
	}
}

// TestEvictedElsewhere: a request that another endpoint serves is ended for what
// waits there.
func TestEvictedElsewhere(t *testing.T) {
	w := newWorld(t, evicting)
	w.publish("default", ep(1, "m", "a"), ep(2, "m", "b"))
	low := w.stream()
	low.chat(t, `{"model":"a","messages":[{}]}`, "x-llm-d-inference-objective", "low")
	low.Served("10.0.0.2:8000", &low.v)
	first := w.stream()
	first.chat(t, `{"model":"a","messages":[{}]}`)
	wants := func(model string) *stream {
		s := w.stream()
		s.chat(t, `{"model":"`+model+`","messages":[{}]}`, "x-llm-d-inference-objective", "high")
		return s
	}
	a := wants("a")
	w.overdue()
	if low.Evicting() {
		t.Fatal("ended where it is not")
	}
	b := wants("b")
	w.overdue()
	if !low.Evicting() {
		t.Fatal("not asked to end")
	}
	low.Evicted(End{}, &low.v)
	if v := b.resume(t); v.Destination != "10.0.0.2:8000" {
		t.Errorf("got %s", show(v))
	}
	for _, s := range []*stream{low, first, a, b} {
		s.finish(End{})
	}
	w.idle(t)
}
