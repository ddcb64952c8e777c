package e2e

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
)

const objective = "x-llm-d-inference-objective"

// evictsAtOnce reports whether a door can end a request at any time, or only when
// its engine next sends something.
func (d door) evictsAtOnce() bool { return d.name == "stock" }

func (w *world) evictions(t *testing.T, outcome string) float64 {
	t.Helper()
	return w.metric(t, "shunt_evictions_total", "outcome", outcome)
}

// TestEvictedBeforeHeaders: a sheddable request that an engine works on is ended
// with 429 for one of a higher priority, which gets its place.
func TestEvictedBeforeHeaders(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		engine := startScript(t)
		w := start(t, d, setup{pools: pools(engine), config: oneSlot(", eviction: true")})
		for proto, c := range w.protocols() {
			t.Run(proto, func(t *testing.T) {
				speak, began, left := make(chan struct{}), make(chan struct{}, 2), make(chan struct{})
				engine.plays(func(s *stage) {
					if s.req.Header.Get("X-Test-Role") == "victim" {
						began <- struct{}{}
						s.wait(speak)
						s.begin(200, "Content-Type", sseType)
						s.wait(nil)
						close(left)
						return
					}
					s.begin(200, "Content-Type", "application/json")
					s.send(`{"model":"m","choices":[]}`)
				})
				before, replies := w.drops(t, "evicted"), w.evictions(t, "reply")
				victim := w.begin(t, c, call{body: strings.NewReader(streamed), header: header(objective, "low", "x-test-role", "victim")})
				<-began
				if n := w.metric(t, "shunt_evictable_requests"); n != 1 {
					t.Errorf("%v may be ended", n)
				}
				high := w.begin(t, w.h1, call{body: strings.NewReader(chat), header: header(objective, "high")})
				if !d.evictsAtOnce() {
					w.asked(t, 1)
					close(speak)
				}
				r, err := victim.wait()
				if err != nil {
					t.Fatal(err)
				}
				w.dropped(t, r, 429, "evicted", before)
				if retry := r.header.Get("Retry-After"); retry != "10" && (len(retry) != 1 || retry < "5") {
					t.Errorf("retry-after %s", retry)
				}
				if a := w.access(t, r.id); a.at("shunt", "priority") != -1.0 || a.at("shunt", "objective") != "low" || a.at("shunt", "model") != "m" {
					t.Errorf("access log %v", a)
				}
				if n := w.evictions(t, "reply"); n != replies+1 {
					t.Errorf("%v counted", n-replies)
				}
				if r, err := high.wait(); err != nil || r.status != 200 {
					t.Errorf("the high one: %v %v", r, err)
				}
				<-left // the engine's work has ended too
				w.waitLoad(t, 0, 0)
			})
		}
	})
}

// asked waits until that many requests were asked to end and have not yet.
func (w *world) asked(t *testing.T, n float64) {
	t.Helper()
	eventually(t, "requests are asked to end", func() string {
		if got := w.metric(t, "shunt_evicting_requests"); got != n {
			return "not yet"
		}
		return ""
	})
}

// TestEvictedAfterHeaders: once the response has begun, its stream is reset.
func TestEvictedAfterHeaders(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		engine := startScript(t)
		w := start(t, d, setup{pools: pools(engine), config: oneSlot(", eviction: true")})
		for proto, c := range w.protocols() {
			t.Run(proto, func(t *testing.T) {
				speak, left := make(chan struct{}), make(chan struct{})
				event := "data: {\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n"
				engine.plays(func(s *stage) {
					if s.req.Header.Get("X-Test-Role") == "victim" {
						s.begin(200, "Content-Type", sseType)
						s.send(event)
						s.wait(speak)
						s.send(event)
						s.wait(nil)
						close(left)
						return
					}
					s.begin(200, "Content-Type", "application/json")
					s.send(`{"model":"m","choices":[]}`)
				})
				before, resets := w.drops(t, "evicted"), w.evictions(t, "reset")
				victim, id := w.open(t, c, call{body: strings.NewReader(streamed), header: header(objective, "low", "x-test-role", "victim")})
				if got := readN(t, victim.Body, len(event)); victim.StatusCode != 200 || got != event {
					t.Fatalf("%d %q", victim.StatusCode, got)
				}
				high := w.begin(t, w.h1, call{body: strings.NewReader(chat), header: header(objective, "high")})
				if !d.evictsAtOnce() {
					w.asked(t, 1)
					close(speak)
				}
				if more, err := io.ReadAll(victim.Body); err == nil {
					t.Errorf("the stream came to its end: %q", more)
				}
				if r, err := high.wait(); err != nil || r.status != 200 {
					t.Errorf("the high one: %v %v", r, err)
				}
				a := w.access(t, id)
				if a.at("shunt", "reason") != "evicted" || a.at("status") != 200.0 || a.at("shunt", "completion_tokens") == nil {
					t.Errorf("access log %v", a)
				}
				if n := w.drops(t, "evicted"); n != before+1 {
					t.Errorf("dropped %v times", n-before)
				}
				if n := w.evictions(t, "reset"); n != resets+1 {
					t.Errorf("%v counted", n-resets)
				}
				<-left
				w.waitLoad(t, 0, 0)
			})
		}
	})
}

// TestWhoIsNotEvicted: without eviction, what has no negative priority, and
// through the contrib door what is not streamed. They are answered, and what
// waits is in time.
func TestWhoIsNotEvicted(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, config: oneSlot(", eviction: true, ttl: 10m")})
		engine := w.engines[0]
		defer engine.SetHold(false)
		for _, row := range []struct {
			name, objective, body string
			evicted               bool
		}{
			{"priority 0", "", streamed, false},
			{"high", "high", streamed, false},
			{"sheddable, not streamed", "low", chat, d.evictsAtOnce()},
		} {
			t.Run(row.name, func(t *testing.T) {
				engine.SetHold(true)
				first := w.begin(t, w.h1, call{body: strings.NewReader(row.body), header: header(objective, row.objective)})
				wait(t, engine, func(c sim.Counters) bool { return c.Held == 1 })
				h := header(objective, "high")
				if !row.evicted { // it waits for what doesn't come, longer than for an eviction
					h.Set("X-Llm-D-Inference-Ttl", "1200ms")
				}
				high := w.begin(t, w.h2, call{body: strings.NewReader(chat), header: h})
				if row.evicted {
					if r, err := first.wait(); err != nil || r.status != 429 {
						t.Errorf("%v %v", r, err)
					}
					engine.SetHold(false)
					if r, err := high.wait(); err != nil || r.status != 200 {
						t.Errorf("%v %v", r, err)
					}
				} else {
					if r, err := high.wait(); err != nil || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "rejected-ttl-expired" {
						t.Errorf("%v %v", r, err)
					}
					engine.SetHold(false)
					if r, err := first.wait(); err != nil || r.status != 200 {
						t.Errorf("%v %v", r, err)
					}
				}
				w.waitLoad(t, 0, 0)
			})
		}
	})
}

// TestEvictionStorm: 2,000 sheddable streams that never end by themselves, whose
// clients leave when they like; high requests that need their places; and a
// configuration that changes meanwhile. Every stream ends once, clients, counters
// and the access log agree, and nothing is left.
func TestEvictionStorm(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		const streams, slots, rounds = 2000, 4, 3
		engine := startScript(t)
		config := func(round int) string {
			return fmt.Sprintf("flowControl: {enabled: true, saturation: concurrency, maxConcurrency: %d, ttl: 10m, maxRequests: %d, eviction: true}\n",
				slots, 100_000+round) + flowObjectives
		}
		w := start(t, d, setup{pools: pools(engine), config: config(0), configFile: true, expect: []string{`shunt: configFile `}})
		event := "data: {\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n"
		over, arrived := make(chan struct{}), make(chan struct{}, streams)
		answer := make(chan struct{})
		engine.plays(func(s *stage) {
			s.begin(200, "Content-Type", sseType)
			if s.req.Header.Get("X-Test-Role") == "high" {
				arrived <- struct{}{}
				s.wait(answer)
				s.send("data: [DONE]\n\n")
				return
			}
			tick := time.NewTicker(5 * time.Millisecond) // an engine's pace
			defer tick.Stop()
			for {
				select {
				case <-over:
					s.send("data: [DONE]\n\n")
					return
				case <-s.req.Context().Done():
					return
				case <-tick.C:
					s.send(event)
				}
			}
		})
		var mu sync.Mutex
		seen := map[string]int{}
		var stayed []string
		var all sync.WaitGroup
		leave := make(chan struct{}, streams)
		for i := range streams {
			// Envoy takes 500 resets on one connection for an attack, and ends it.
			c, leaves := w.h2, i%4 == 0
			if leaves || i%4 == 1 {
				c = w.h1
			}
			all.Go(func() {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if leaves {
					gone := make(chan struct{})
					defer close(gone)
					go func() {
						select {
						case <-leave:
							cancel()
						case <-gone:
						}
					}()
				}
				r, err := w.do(ctx, c, call{body: strings.NewReader(streamed), header: header(objective, "low")})
				mu.Lock()
				defer mu.Unlock()
				how := "left"
				switch {
				case ctx.Err() != nil:
				case err == nil && r.err == nil && r.status == 200:
					how = "ok"
				case err == nil && r.status == 429 && r.header.Get("X-Llm-D-Request-Dropped-Reason") == "evicted":
					how = "evicted"
				case err == nil && r.status == 200:
					how = "reset"
				default:
					t.Errorf("%v %v", r, err)
				}
				seen[how]++
				if how != "left" {
					stayed = append(stayed, r.id)
				}
			})
		}
		w.waits(t, streams-slots)
		for round := range rounds {
			var high []*background
			for range slots {
				high = append(high, w.begin(t, w.h1, call{body: strings.NewReader(streamed), header: header(objective, "high", "x-test-role", "high")}))
			}
			w.write(t, "shunt.yaml", w.document(config(round+1)))
			for range streams / 20 {
				leave <- struct{}{}
			}
			for range high {
				<-arrived
			}
			for range high {
				answer <- struct{}{}
			}
			for _, b := range high {
				if r, err := b.wait(); err != nil || r.err != nil || r.status != 200 {
					t.Errorf("a high one: %v %v", r, err)
				}
			}
		}
		close(over)
		all.Wait()
		w.waitLoad(t, 0, 0)
		evicted := seen["evicted"] + seen["reset"]
		if evicted == 0 || seen["left"] == 0 || seen["ok"] == 0 {
			t.Errorf("too little happened: %v", seen)
		}
		w.countsAgree(t)
		if n := int(w.drops(t, "evicted")); n < evicted || n > evicted+seen["left"] {
			t.Errorf("clients saw %d evicted, counted %d", evicted, n)
		}
		if n := w.evictions(t, "reply") + w.evictions(t, "reset"); n != w.drops(t, "evicted") {
			t.Errorf("%v evictions, %v drops", n, w.drops(t, "evicted"))
		}
		logged := 0
		for _, id := range stayed {
			if w.access(t, id).at("shunt", "reason") == "evicted" {
				logged++
			}
		}
		if logged != evicted {
			t.Errorf("clients saw %d evicted, the access log has %d", evicted, logged)
		}
		w.nothingLeft(t)
		t.Logf("%v; missed %v", seen, w.evictions(t, "missed"))
	})
}
