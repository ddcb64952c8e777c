//go:build shunttest

package filter

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/pool"
)

// phases drive a request until the panic of a phase has happened, and return
// the stream with the verdict of that call.
var phases = map[string]func(t *testing.T, w *world, test string) *stream{
	"headers": func(_ *testing.T, w *world, test string) *stream {
		s := w.stream()
		s.Headers(post(chatPath, everyHeader(headerTest, test)...), false, nil, &s.v)
		return s
	},
	"body": func(t *testing.T, w *world, test string) *stream {
		s := w.stream()
		s.chat(t, chatBody, headerTest, test)
		return s
	},
	"too large": func(_ *testing.T, w *world, test string) *stream {
		s := w.stream()
		s.Headers(post(chatPath, headerTest, test), false, nil, &s.v)
		s.TooLarge(&s.v)
		return s
	},
	"resume": func(t *testing.T, w *world, test string) *stream {
		p := w.pool("default")
		ready := p.holder.Load()
		p.holder.Publish(pool.NewSnapshot(pool.Input{})) // makes it wait
		s := w.stream()
		if s.chat(t, chatBody, headerTest, test); s.v.Action != Wait {
			t.Fatalf("got %s", show(&s.v))
		}
		p.holder.Publish(ready)
		p.queue.Grant(1)
		s.Resume(&s.v)
		return s
	},
}

func TestPanicInADecision(t *testing.T) {
	const rejected = ` reason=rejected-internal%s fairness_id=default-flow status=500 details=shunt_rejected-internal ` +
		`<x-llm-d-request-dropped-reason:rejected-internal> <content-type:application/json> `
	remove := "remove=" + strings.Join(spoofNames, ",")
	for where, run := range phases {
		for _, mode := range []string{"reject", "route"} {
			t.Run(where+" "+mode, func(t *testing.T) {
				w := newWorld(t, "onInternalError: "+mode+"\npolicy: random")
				w.publish("default", ep(1, "m"))
				s := run(t, w, "panic-"+where)
				got := show(&s.v)
				model := ""
				if where == "resume" {
					model = " model=m"
				}
				want := "reply " + remove + fmt.Sprintf(rejected, model)
				if mode == "route" && where != "too large" {
					want = "continue " + remove + " to=10.0.0.1:8000 "
				}
				if !strings.HasPrefix(got, want) {
					t.Fatalf("got\n%s\nwant\n%s", got, want)
				}
				if mode == "route" && where != "too large" && (load(w.pool("default")) != 1 || s.v.meta("policy") != "least-request") {
					t.Errorf("load %d, %s", load(w.pool("default")), got)
				}
				if v := s.finish(End{}); len(v.Metadata) != 0 {
					t.Errorf("its end: %s", show(v))
				}
				if load(w.pool("default")) != 0 || w.pool("default").queue.Len() != 0 {
					t.Errorf("load %d, %d waiting", load(w.pool("default")), w.pool("default").queue.Len())
				}
				if n := w.counterValue(t, "shunt_internal_errors_total", "where", where); n != 1 {
					t.Errorf("%v counted", n)
				}
				if w.log.count("internal error in "+where+": injected in "+where) != 1 {
					t.Errorf("log:\n%s", w.log)
				}
			})
		}
	}
}

func TestRouteAnywayWithoutAnEndpoint(t *testing.T) {
	for _, c := range []struct {
		config, subset string
		endpoints      []pool.Endpoint
	}{
		{"", "", nil},
		{"", "", []pool.Endpoint{notReady(ep(1, "m"))}},
		{"subsetHeader: true", "10.0.0.2", []pool.Endpoint{ep(1, "m")}},
		{"", "", []pool.Endpoint{ep(1, "m"), ep(2, "other")}}, // it may be for either
	} {
		w := newWorld(t, "onInternalError: route\n"+c.config)
		w.publish("default", c.endpoints...)
		s := w.stream()
		v := s.chat(t, chatBody, headerTest, "panic-body", "x-gateway-destination-endpoint-subset", c.subset)
		if v.meta("reason") != "rejected-internal" || v.Destination != "" || load(w.pool("default")) != 0 {
			t.Errorf("got %s", show(v))
		}
		s.finish(End{})
	}
}

// TestPanicAgainWhileRouting: what routeAnyway had begun is given back.
func TestPanicAgainWhileRouting(t *testing.T) {
	w := newWorld(t, "onInternalError: route")
	w.publish("default", ep(1, "m"))
	observer := w.pool("default").counters.pickSeconds
	w.pool("default").counters.pickSeconds = nil // the last step of a pick panics
	s := w.stream()
	v := s.chat(t, chatBody)
	w.pool("default").counters.pickSeconds = observer
	if v.meta("reason") != "rejected-internal" || v.Destination != "" || v.has("endpoint") || len(v.ResponseHeaders) != 0 {
		t.Errorf("got %s", show(v))
	}
	s.finish(End{})
	if load(w.pool("default")) != 0 {
		t.Error("load is left")
	}
	if w.counterValue(t, "shunt_internal_errors_total", "where", "body") != 1 ||
		w.counterValue(t, "shunt_internal_errors_total", "where", "route anyway") != 1 {
		t.Errorf("log:\n%s", w.log)
	}
}

// TestPanicInTrailers decides nothing: whatever state the request is in, it
// stays, and the headers of a client that would steer are removed.
func TestPanicInTrailers(t *testing.T) {
	for _, mode := range []string{"reject", "route"} {
		w := newWorld(t, "onInternalError: "+mode)
		trailers := func(s *stream) {
			t.Helper()
			s.Trailers(head(everyHeader()...), &s.v)
			if s.v.Action != Continue || !slices.Equal(slices.Sorted(slices.Values(s.v.Remove)), spoofNames) || len(s.v.Metadata) != 0 {
				t.Errorf("got %s", show(&s.v))
			}
		}
		waiting := w.stream()
		waiting.chat(t, chatBody, headerTest, "panic-trailers")
		trailers(waiting)
		w.publish("default", ep(1, "m"))
		if waiting.Resume(&waiting.v); waiting.v.Destination != "10.0.0.1:8000" {
			t.Errorf("waiting: got %s", show(&waiting.v))
		}
		trailers(waiting)
		if load(w.pool("default")) != 1 {
			t.Error("routed: the reservation is gone")
		}
		waiting.finish(End{})

		reading := w.stream()
		reading.Headers(post(chatPath, headerTest, "panic-trailers"), false, nil, &reading.v)
		trailers(reading)
		reading.Body([][]byte{[]byte(chatBody)}, &reading.v)
		if reading.v.Destination != "10.0.0.1:8000" {
			t.Errorf("reading: got %s", show(&reading.v))
		}
		reading.finish(End{})

		answered := w.stream()
		answered.chat(t, "x", headerTest, "panic-trailers")
		trailers(answered)
		trailers(answered) // and once more
		answered.finish(End{})
		if load(w.pool("default")) != 0 {
			t.Error("load is left")
		}
	}
}

// TestPanicAfterAReply sends no second, however many come.
func TestPanicAfterAReply(t *testing.T) {
	for _, mode := range []string{"reject", "route"} {
		w := newWorld(t, "onInternalError: "+mode)
		w.publish("default", ep(1, "m"))
		s := w.stream()
		if s.chat(t, "x", headerTest, "panic-body"); mode == "reject" && s.v.Action != Reply {
			t.Fatalf("got %s", show(&s.v))
		}
		s.word.Store(stateDone)
		if s.held.Live() != nil {
			s.held.Release(time.Now(), true)
		}
		for range 2 {
			s.Body(nil, &s.v) // a door would not
			if s.v.Action == Reply || s.v.Destination != "" {
				t.Errorf("got %s", show(&s.v))
			}
		}
		if s.finish(End{}); load(w.pool("default")) != 0 {
			t.Error("load is left")
		}
	}
}

func TestPanicAtTheEnd(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	s := w.stream()
	s.chat(t, chatBody, headerTest, "panic-finish")
	if s.finish(End{Answered: true, FirstByte: time.Millisecond}); load(w.pool("default")) != 0 || !s.v.has("ttft_ms") {
		t.Errorf("load %d, %+v", load(w.pool("default")), s.v.Metadata)
	}
	if n := w.counterValue(t, "shunt_internal_errors_total", "where", "finish"); n != 1 {
		t.Errorf("%v counted", n)
	}
}

// badHost is a door that fails.
type badHost struct{ host }

func (*badHost) Post() { panic("no worker") }

func TestPanicOfTheDoorInAGrant(t *testing.T) {
	w := newWorld(t, "")
	s := w.stream()
	s.Init(&badHost{}, w.gen)
	s.chat(t, chatBody)
	w.publish("default", ep(1, "m")) // does not take this goroutine along
	if n := w.counterValue(t, "shunt_internal_errors_total", "where", "wake"); n != 1 {
		t.Errorf("%v counted", n)
	}
	s.finish(End{})
}

// TestScannersSurviveAPanic: what a panic leaves in the pool of scanners does
// not show in the next request.
func TestScannersSurviveAPanic(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	for range 50 {
		s := w.stream()
		s.Headers(post(chatPath), false, nil, &s.v)
		s.rules = &openai.Endpoint{} // no rules: a panic in the scan
		if s.Body([][]byte{[]byte(chatBody)}, &s.v); s.v.meta("reason") != "rejected-internal" {
			t.Fatalf("got %s", show(&s.v))
		}
		s.finish(End{})
		if s = w.stream(); s.chat(t, chatBody).Destination == "" {
			t.Fatalf("got %s", show(&s.v))
		}
		s.finish(End{})
	}
}

// TestPanicWhileEvicted: the request goes on as if nobody had asked.
func TestPanicWhileEvicted(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	s := w.asks(t, "", headerTest, "panic-evicted")
	eventually(t, "asked to end", s.Evicting)
	if s.Evicted(End{}, &s.v); s.v.Action != Continue || load(w.pool("default")) != 1 {
		t.Errorf("got %s, load %d", show(&s.v), load(w.pool("default")))
	}
	s.finish(End{Answered: true})
	if n := w.counterValue(t, "shunt_internal_errors_total", "where", "evicted"); n != 1 || load(w.pool("default")) != 0 {
		t.Errorf("%v counted, load %d", n, load(w.pool("default")))
	}
}

// door is a fake of one: workers with posts, which other goroutines send to.
type door struct {
	workers []*doorWorker
}

type doorWorker struct {
	events chan func()
	done   sync.WaitGroup
}

type doorStream struct {
	Request
	worker *doorWorker
	v      Verdict
	got    chan string // what became of it
	ended  bool
}

func (*doorStream) Metadata(string, string) string { return "" }

func (*doorStream) SubsetHint() ([]string, bool) { return nil, false }

func (s *doorStream) PrepareWait() {}

func (s *doorStream) Evictable(bool) bool { return false }

func (s *doorStream) PostEvict() {}

func (s *doorStream) Post() {
	s.worker.events <- func() {
		if !s.ended {
			s.Resume(&s.v)
			s.report()
		}
	}
}

func (s *doorStream) report() {
	switch s.v.Action {
	case Continue:
		s.got <- "routed"
	case Reply:
		s.got <- s.v.meta("reason")
	}
}

// TestTwoThousandWait is the asynchronous path with the test policy: of 2,000
// that wait at once a third is granted, a third leaves and a third runs out of
// time, over four workers.
func TestTwoThousandWait(t *testing.T) {
	const n, workers = 2001, 4
	log := newLines()
	rt := NewRuntime(Options{Log: log.write, Linger: time.Millisecond})
	defer rt.Stop()
	gen, err := rt.Load([]byte("admin: {address: \"\"}\npools: {default: {static: []}}"))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Runtime: rt, gen: gen, log: log}
	delays.queue = nil // the last runtime's
	p := w.pool("default")
	p.syncer.Stop() // the test publishes
	w.publish("default", ep(1, "m"), ep(2, "m"), ep(3, "m"))

	var d door
	for range workers {
		dw := &doorWorker{events: make(chan func(), 2*n)}
		dw.done.Go(func() {
			for f := range dw.events {
				f()
			}
		})
		d.workers = append(d.workers, dw)
	}
	var begun sync.WaitGroup
	streams := make([]*doorStream, n)
	for i := range streams {
		s := &doorStream{worker: d.workers[i%workers], got: make(chan string, 4)}
		s.Init(s, gen)
		streams[i] = s
		wait := "wait-1h"
		if i%3 == 2 {
			wait = "wait-1ms"
		}
		begun.Add(1)
		s.worker.events <- func() {
			defer begun.Done()
			s.Headers(post(chatPath, headerTest, wait), false, nil, &s.v)
			s.Body([][]byte{[]byte(chatBody)}, &s.v)
			if s.v.Action != Wait {
				t.Errorf("got %s", show(&s.v))
			}
		}
		if i == 0 {
			begun.Wait()
		}
	}
	begun.Wait()
	outcome := map[string]int{}
	for i, s := range streams {
		if i%3 == 2 { // time runs out by itself
			outcome[<-s.got]++
		}
	}
	if waiting, bytes, _ := rt.room.Waiting(); waiting != n/3*2 || bytes != int64(n/3*2*len(chatBody)) {
		t.Errorf("%d waiting, %d bytes", waiting, bytes)
	}
	// The clients of a third leave, then another third is granted.
	var left sync.WaitGroup
	for i, s := range streams {
		if i%3 == 1 {
			left.Add(1)
			s.worker.events <- func() {
				defer left.Done()
				s.ended = true
				if s.Finish(End{}, &s.v); s.v.meta("reason") != "rejected-context-cancelled" {
					t.Errorf("got %s", show(&s.v))
				}
			}
		}
	}
	left.Wait()
	admin := rt.adminHandler()
	rec := httptest.NewRecorder()
	admin.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, fmt.Sprintf("/test/grant?n=%d", n), nil))
	if got := strings.TrimSpace(rec.Body.String()); got != fmt.Sprint(n/3) {
		t.Errorf("granted %s", got)
	}
	for i, s := range streams {
		if i%3 == 0 {
			outcome[<-s.got]++
		}
	}
	if outcome["routed"] != n/3 || outcome["rejected-ttl-expired"] != n/3 || len(outcome) != 2 {
		t.Errorf("outcomes %v", outcome)
	}
	if l := load(p); l != n/3 {
		t.Errorf("load %d, want %d", l, n/3)
	}
	snap := p.holder.Load()
	for i := range snap.Endpoints {
		if got := snap.Endpoints[i].Live.InFlight(); got < n/9-1 || got > n/9+1 {
			t.Errorf("%s has %d of %d", snap.Endpoints[i].Key, got, n/3)
		}
	}
	for i, s := range streams {
		if i%3 != 1 {
			s.worker.events <- func() { s.ended = true; s.Finish(End{}, &s.v) }
		}
	}
	for _, dw := range d.workers {
		close(dw.events)
		dw.done.Wait()
	}
	if waiting, bytes, expired := rt.room.Waiting(); waiting != 0 || bytes != 0 || expired != n/3 || load(p) != 0 {
		t.Errorf("%d waiting, %d bytes, %d expired, load %d", waiting, bytes, expired, load(p))
	}
	for i, s := range streams {
		if len(s.got) != 0 {
			t.Fatalf("stream %d was answered twice", i)
		}
	}
	if n := metricValue(t, rt, "shunt_internal_errors_total"); n != 0 {
		t.Errorf("internal errors:\n%s", log)
	}
}

func TestWaitsThatAreNone(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"))
	for _, test := range []string{"", "wait-", "wait-x", "panic-nowhere", "other"} {
		s := w.stream()
		if s.chat(t, chatBody, headerTest, test); s.v.Action != Continue {
			t.Errorf("%q: %s", test, show(&s.v))
		}
		s.finish(End{})
	}
}
