package filter

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

const sloConfig = `
slo: {admission: true}
explain: {header: true}
policy: least-request
objectives: [{name: high, priority: 5}, {name: low, priority: -1}, {name: batch, priority: -1, ttftMs: 50, tpotMs: 20}, {name: chat, ttftMs: 50, tpotMs: 20}]
`

// paced is an endpoint that streams have come from: first tokens after ttft, each
// further one after tpot; 0 is never seen.
func (w *world) paced(n byte, ttft, tpot time.Duration) pool.Endpoint {
	e := ep(n, "m")
	if ttft > 0 {
		r := e.Live.Reserve(pool.Load{Prompt: 10, Uncached: 10, Talks: true}, w.now())
		r.FirstToken(w.now().Add(ttft))
		r.Release(w.now().Add(ttft), false)
	}
	if tpot > 0 {
		r := new(pool.Live).Reserve(pool.Load{Talks: true}, w.now())
		r.Move(e.Live, w.now())
		r.FirstToken(w.now())
		r.Progress(1, w.now())
		r.Progress(17, w.now().Add(16*tpot))
		r.Release(w.now().Add(16*tpot), false)
	}
	return e
}

// outcome is where a request was sent, or how it was refused.
func outcome(v *Verdict) string {
	if v.Action == Reply {
		return fmt.Sprintf("%d %s", v.Reply.Status, v.meta("reason"))
	}
	return v.Destination
}

// TestSLOAdmission: what goals do, by who asks and what is known.
func TestSLOAdmission(t *testing.T) {
	const ms = time.Millisecond
	const a, b, refused = "10.0.0.1:8000", "10.0.0.2:8000", "429 rejected-saturated"
	ttft := func(v string) []string { return []string{"x-llm-d-slo-ttft-ms", v} }
	for _, c := range []struct {
		name       string
		off        bool
		first      [2]time.Duration // of both endpoints; b has a request in flight
		pace       [2]time.Duration
		objective  string
		headers    []string
		want, says string // and the outcome that is counted
	}{
		{name: "no goal", first: [2]time.Duration{80 * ms, 10 * ms}, want: a},
		{name: "no goal, sheddable", first: [2]time.Duration{80 * ms, 10 * ms}, objective: "low", want: a},
		{name: "all can", first: [2]time.Duration{30 * ms, 10 * ms}, headers: ttft("50"), want: a, says: "kept"},
		{name: "one can", first: [2]time.Duration{80 * ms, 10 * ms}, headers: ttft("50"), want: b, says: "narrowed"},
		{name: "one can, by the older name", first: [2]time.Duration{80 * ms, 10 * ms}, headers: []string{"x-slo-ttft-ms", "50"}, want: b, says: "narrowed"},
		{name: "one can, sheddable", first: [2]time.Duration{80 * ms, 10 * ms}, objective: "low", headers: ttft("50"), want: b, says: "narrowed"},
		{name: "none can", first: [2]time.Duration{80 * ms, 90 * ms}, headers: ttft("50"), want: a, says: "missed"},
		{name: "none can, of a high priority", first: [2]time.Duration{80 * ms, 90 * ms}, objective: "high", headers: ttft("50"), want: a, says: "missed"},
		{name: "none can, sheddable", first: [2]time.Duration{80 * ms, 90 * ms}, objective: "low", headers: ttft("50"), want: refused, says: "refused"},
		{name: "switched off", off: true, first: [2]time.Duration{80 * ms, 90 * ms}, objective: "low", headers: ttft("50"), want: a},
		{name: "nothing is known of one", first: [2]time.Duration{80 * ms}, objective: "low", headers: ttft("50"), want: b, says: "narrowed"},
		{name: "nothing is known of any", objective: "low", headers: ttft("1"), want: a, says: "kept"},
		{name: "no pace is known", first: [2]time.Duration{10 * ms, 10 * ms}, objective: "low", headers: []string{"x-llm-d-slo-tpot-ms", "1"}, want: a, says: "kept"},
		{name: "each token", pace: [2]time.Duration{30 * ms, 10 * ms}, headers: []string{"x-llm-d-slo-tpot-ms", "20.5"}, want: b, says: "narrowed"},
		{name: "each token, sheddable", pace: [2]time.Duration{30 * ms, 40 * ms}, objective: "low", headers: []string{"x-slo-tpot-ms", "20"}, want: refused, says: "refused"},
		{name: "the objective's goals", first: [2]time.Duration{80 * ms, 10 * ms}, objective: "chat", want: b, says: "narrowed"},
		{name: "the objective's goals, sheddable", pace: [2]time.Duration{30 * ms, 40 * ms}, objective: "batch", want: refused, says: "refused"},
		{name: "the request's own beat those", first: [2]time.Duration{80 * ms, 90 * ms}, objective: "batch", headers: ttft("85"), want: a, says: "narrowed"},
		{name: "no goal that can be read", first: [2]time.Duration{80 * ms, 90 * ms}, objective: "low", headers: ttft("fast"), want: a},
	} {
		for _, flow := range []string{"", "flowControl: {enabled: true, saturation: concurrency}\n"} {
			text := sloConfig + flow
			if c.off {
				text = strings.Replace(text, "true", "false", 1)
			}
			w := newWorld(t, text)
			w.publish("default", w.paced(1, c.first[0], c.pace[0]), w.paced(2, c.first[1], c.pace[1]))
			live := w.pool("default").holder.Load().Live(1)
			busy := live.Reserve(pool.Load{}, w.now())
			s := w.asks(t, c.objective, c.headers...)
			if got := outcome(&s.v); got != c.want {
				t.Errorf("%s, %q: got %s, want %s: %s", c.name, flow, got, c.want, show(&s.v))
			}
			for _, what := range []string{"kept", "narrowed", "missed", "refused"} {
				want := 0.0
				if what == c.says {
					want = 1
				}
				if n := w.counterValue(t, "shunt_slo_admissions_total", "outcome", what); n != want {
					t.Errorf("%s, %q: %s counted %v times", c.name, flow, what, n)
				}
			}
			s.finish(End{})
			busy.Release(w.now(), true)
			w.idle(t)
		}
	}
}

// TestSLORefusal: what the client, the counters and /explain say of it.
func TestSLORefusal(t *testing.T) {
	w := newWorld(t, sloConfig)
	w.publish("default", w.paced(1, 80*time.Millisecond, 30*time.Millisecond))
	s := w.asks(t, "batch", "x-shunt-explain", "1", "x-request-id", "r1")
	const says = "no endpoint of the model is predicted to keep the request's goals, first token after 50ms, each further one after 20ms"
	if text := show(&s.v); !strings.Contains(text, says) {
		t.Errorf("got %s", text)
	}
	if n := w.counterValue(t, "shunt_drops_total", "reason", "rejected-saturated"); n != 1 {
		t.Errorf("%v drops", n)
	}
	list := w.explanations(t, "?id=r1")
	if len(list) != 1 || list[0].Winner != "" || list[0].Model != "m" || len(list[0].Candidates) != 1 ||
		list[0].Candidates[0].Skipped != "slo: first token after 80ms, wanted after 50ms; each token after 30ms, wanted after 20ms" {
		t.Errorf("%+v", list)
	}
	s.finish(End{})
	w.idle(t)
}

// TestSLOAfterWaiting: the time in the queue is part of the time to the first
// token.
func TestSLOAfterWaiting(t *testing.T) {
	for _, c := range []struct {
		wait time.Duration
		want string
	}{{100 * time.Millisecond, "10.0.0.1:8000"}, {450 * time.Millisecond, "429 rejected-saturated"}, {2 * time.Second, "429 rejected-saturated"}} {
		w := newWorld(t, oneAtATime+"slo: {admission: true}\n")
		w.publish("default", w.paced(1, 80*time.Millisecond, 0))
		first := w.asks(t, "")
		s := w.asks(t, "low", "x-llm-d-slo-ttft-ms", "500")
		if s.v.Action != Wait {
			t.Fatalf("got %s", show(&s.v))
		}
		w.clock.advance(c.wait)
		first.finish(End{})
		if v := s.resume(t); outcome(v) != c.want {
			t.Errorf("after %v: got %s", c.wait, show(v))
		}
		s.finish(End{})
		w.idle(t) // a refused one gives its slot on
	}
}

// TestPreferredIsFull: of those that can keep a goal none has room, so one that
// can't is taken: a goal makes nobody wait.
func TestPreferredIsFull(t *testing.T) {
	w := newWorld(t, oneAtATime+"slo: {admission: true}\n")
	w.publish("default", w.paced(1, 80*time.Millisecond, 0), w.paced(2, 10*time.Millisecond, 0))
	headers := []string{"x-llm-d-slo-ttft-ms", "50"}
	one, two := w.asks(t, "", headers...), w.asks(t, "", headers...)
	if one.v.Destination != "10.0.0.2:8000" || two.v.Destination != "10.0.0.1:8000" {
		t.Errorf("got %s and %s", show(&one.v), show(&two.v))
	}
	one.finish(End{})
	two.finish(End{})
	w.idle(t)
}
