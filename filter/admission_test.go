package filter

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

const oneAtATime = `
flowControl: {enabled: true, saturation: concurrency, maxConcurrency: 1, ttl: 10s, emptyPoolTTL: 0s}
objectives: [{name: high, priority: 5}, {name: low, priority: -1}, {name: short, ttl: 2s, ttftMs: 100}]
`

// asks sends a chat request with an objective.
func (w *world) asks(t testing.TB, objective string, pairs ...string) *stream {
	t.Helper()
	s := w.stream()
	if objective != "" {
		pairs = append(pairs, "x-llm-d-inference-objective", objective)
	}
	s.chat(t, chatBody, pairs...)
	return s
}

func (s *stream) resume(t testing.TB) *Verdict {
	t.Helper()
	if !s.posted() {
		t.Fatal("not woken")
	}
	s.Resume(&s.v)
	return &s.v
}

// TestWaits: a request waits for the slot of another, by priority.
func TestWaits(t *testing.T) {
	w := newWorld(t, oneAtATime)
	w.publish("default", ep(1, "m"))
	first, low, mid, high := w.asks(t, ""), w.asks(t, "low"), w.asks(t, ""), w.asks(t, "high")
	if first.v.Action != Continue || low.v.Action != Wait || mid.v.Action != Wait || high.v.Action != Wait {
		t.Fatal(show(&first.v), show(&low.v), show(&mid.v), show(&high.v))
	}
	running := first
	for _, next := range []*stream{high, mid, low} {
		for _, s := range []*stream{low, mid, high} {
			if s.posted() {
				t.Fatal("woken too early")
			}
		}
		w.clock.advance(250 * time.Millisecond)
		running.finish(End{})
		if v := next.resume(t); v.Destination != "10.0.0.1:8000" || !v.has("queue_ms") || !v.has("priority") {
			t.Fatalf("got %s", show(v))
		}
		if n := load(w.pool("default")); n != 1 {
			t.Fatalf("%d in flight", n)
		}
		running = next
	}
	running.finish(End{})
	w.idle(t)
	if bands := w.pool("default").flow.Stats().Bands; len(bands) != 3 || bands[0].Priority != 5 || bands[0].Dispatched != 1 {
		t.Errorf("%+v", bands)
	}
}

// idle checks that nothing is held any more.
func (w *world) idle(t testing.TB) {
	t.Helper()
	p := w.pool("default")
	requests, bytes, _ := w.room.Waiting()
	if requests != 0 || bytes != 0 || p.flow.Waiting() != 0 || load(p) != 0 || w.flights.sum() != 0 {
		t.Errorf("left: %d waiting, %d bytes, %d in the pool's queue, %d slots, %d in flight", requests, bytes, p.flow.Waiting(), load(p), w.flights.sum())
	}
	if n := w.counterValue(t, "shunt_internal_errors_total"); n != 0 {
		t.Errorf("internal errors:\n%s", w.log)
	}
}

// TestEndsOfWaiting is each way in which a wait for room can end badly.
func TestEndsOfWaiting(t *testing.T) {
	for _, c := range []struct {
		name, config string
		act          func(w *world, s *stream)
		want         string
		retry        int // the least
		outcome      string
	}{
		{"its time is over", "", func(w *world, _ *stream) { w.clock.advance(10 * time.Second); w.room.Expire() },
			"429 rejected-ttl-expired", 1, "expired"},
		{"its pool has gone, then its time is over", "", func(w *world, _ *stream) {
			w.publish("default")
			w.clock.advance(10 * time.Second)
			w.room.Expire()
		}, "503 rejected-no-endpoints", 1, "expired"},
		{"a higher one comes", "flowControl: {enabled: true, saturation: concurrency, maxConcurrency: 1, maxRequests: 1, displace: true}",
			func(w *world, _ *stream) { w.asks(t, "high").finish(End{}) }, "429 rejected-saturated", 1, "displaced"},
		{"the process drains", "", func(w *world, _ *stream) { w.room.Drain() }, "503 rejected-shutting-down", 1, "drained"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := oneAtATime
			if c.config != "" {
				text = c.config + "\nobjectives: [{name: high, priority: 5}]"
			}
			w := newWorld(t, text)
			w.publish("default", ep(1, "m"))
			first := w.asks(t, "")
			s := w.asks(t, "")
			if s.v.Action != Wait {
				t.Fatalf("got %s", show(&s.v))
			}
			w.clock.advance(time.Second)
			c.act(w, s)
			v := s.resume(t)
			if got := fmt.Sprintf("%d %s", v.Reply.Status, v.meta("reason")); v.Action != Reply || got != c.want || v.replyHeader(HeaderDropReason) != v.meta("reason") {
				t.Errorf("got %s", show(v))
			}
			if retry, err := strconv.Atoi(v.replyHeader("retry-after")); err != nil || retry < c.retry || retry > maxRetryAfter {
				t.Errorf("retry-after %q", v.replyHeader("retry-after"))
			}
			bands := w.pool("default").flow.Stats().Bands
			n := uint64(0)
			for _, b := range bands {
				n += map[string]uint64{"expired": b.Expired, "displaced": b.Displaced, "drained": b.Drained}[c.outcome]
			}
			if n != 1 {
				t.Errorf("%+v", bands)
			}
			s.finish(End{})
			first.finish(End{})
			w.idle(t)
		})
	}
}

func TestOverALimit(t *testing.T) {
	w := newWorld(t, "flowControl: {enabled: true, saturation: concurrency, maxConcurrency: 1, bandRequests: 2}\nobjectives: [{name: high, priority: 5}]")
	w.publish("default", ep(1, "m"))
	first := w.asks(t, "")
	held := []*stream{w.asks(t, ""), w.asks(t, "")}
	over := w.asks(t, "")
	if v := &over.v; v.meta("reason") != "rejected-saturated" || v.Reply.Status != 429 || v.replyHeader("retry-after") != "30" {
		t.Errorf("got %s, retry-after %s", show(v), v.replyHeader("retry-after"))
	}
	other := w.asks(t, "high")
	if other.v.Action != Wait {
		t.Errorf("another band: %s", show(&other.v))
	}
	for _, s := range append(held, over, other, first) {
		s.finish(End{})
	}
	w.idle(t)
}

// TestRetryAfterGrowsWithTheQueue: what waits and how fast it goes says when to
// come again.
func TestRetryAfterGrowsWithTheQueue(t *testing.T) {
	w := newWorld(t, "flowControl: {enabled: true, saturation: concurrency, maxConcurrency: 1, bandRequests: 20}")
	w.publish("default", ep(1, "m"))
	running := w.asks(t, "")
	var held []*stream
	for range 20 {
		held = append(held, w.asks(t, ""))
	}
	for range 200 { // two a second
		w.clock.advance(500 * time.Millisecond)
		running.finish(End{})
		next := held[0]
		held = append(held[1:], w.asks(t, ""))
		if next.resume(t).Action != Continue {
			t.Fatalf("got %s", show(&next.v))
		}
		running = next
	}
	over := w.asks(t, "")
	if retry, _ := strconv.Atoi(over.v.replyHeader("retry-after")); retry < 10 || retry > 15 {
		t.Errorf("20 wait, 2 a second are served: retry-after %d", retry)
	}
	for _, s := range append(held, running, over) {
		s.finish(End{})
	}
	w.idle(t)
}

// TestSheddableWithoutFlowControl: a negative priority is refused while all its
// candidates are full, and nothing waits.
func TestSheddableWithoutFlowControl(t *testing.T) {
	w := newWorld(t, "flowControl: {maxConcurrency: 1}\nobjectives: [{name: low, priority: -1}, {name: zero}]")
	w.publish("default", ep(1, "m"), ep(2, "m"))
	one, two := w.asks(t, "low"), w.asks(t, "zero")
	shed := w.asks(t, "low")
	if v := &shed.v; v.meta("reason") != "rejected-saturated" || v.Reply.Status != 429 {
		t.Errorf("got %s", show(v))
	}
	other := w.asks(t, "nobody's")
	if other.v.Action != Continue {
		t.Errorf("got %s", show(&other.v))
	}
	if n := w.counterValue(t, "shunt_unknown_objectives_total"); n != 1 {
		t.Errorf("%v unknown objectives", n)
	}
	two.finish(End{})
	other.finish(End{})
	again := w.asks(t, "low")
	if again.v.Action != Continue {
		t.Errorf("with room: %s", show(&again.v))
	}
	for _, s := range []*stream{one, shed, again} {
		s.finish(End{})
	}
	w.idle(t)
}

// TestLeavesWhileWaiting: the place is free, the metadata say so, and a slot that
// was granted goes on.
func TestLeavesWhileWaiting(t *testing.T) {
	w := newWorld(t, oneAtATime)
	w.publish("default", ep(1, "m"))
	first, a, b, c := w.asks(t, ""), w.asks(t, ""), w.asks(t, "", "x-llm-d-inference-fairness-id", "tenant"), w.asks(t, "")
	w.clock.advance(time.Second)
	if v := b.finish(End{}); v.meta("reason") != "rejected-context-cancelled" || v.meta("fairness_id") != "tenant" || v.meta("model") != "m" || !v.has("queue_ms") {
		t.Errorf("got %s", show(v))
	}
	first.finish(End{})
	if !a.posted() {
		t.Fatal("not woken")
	}
	a.finish(End{}) // granted, and gone
	if v := c.resume(t); v.Action != Continue {
		t.Errorf("got %s", show(v))
	}
	if n := w.counterValue(t, "shunt_drops_total", "reason", "rejected-context-cancelled"); n != 2 {
		t.Errorf("%v cancelled", n)
	}
	c.finish(End{})
	w.idle(t)
}

// TestTimeToLive: the configuration's, the objective's, the header's: the
// smallest counts.
func TestTimeToLive(t *testing.T) {
	w := newWorld(t, oneAtATime)
	w.publish("default", ep(1, "m"))
	first := w.asks(t, "")
	for _, c := range []struct {
		objective, header string
		want              time.Duration
	}{{"", "", 10 * time.Second}, {"short", "", 2 * time.Second}, {"short", "1s", time.Second}, {"short", "1m", 2 * time.Second}, {"", "1m", 10 * time.Second}} {
		s := w.asks(t, c.objective, "x-llm-d-inference-ttl", c.header)
		if next := w.room.Expire(); next != c.want || s.v.Action != Wait {
			t.Errorf("%+v: expires in %v, %s", c, next, show(&s.v))
		}
		s.finish(End{})
	}
	s := w.asks(t, "short")
	if ttft := s.goal(); ttft != 100*time.Millisecond {
		t.Errorf("goal %v", ttft)
	}
	s.finish(End{})
	s = w.asks(t, "short", "x-llm-d-slo-ttft-ms", "7.5")
	if ttft := s.goal(); ttft != 7500*time.Microsecond {
		t.Errorf("goal %v", ttft)
	}
	s.finish(End{})
	first.finish(End{})
	w.idle(t)
}

// TestEmptyPoolWaits: with emptyPoolTTL a request for a known model waits for its
// endpoint.
func TestEmptyPoolWaits(t *testing.T) {
	w := newWorld(t, strings.Replace(oneAtATime, "emptyPoolTTL: 0s", "emptyPoolTTL: 5s", 1))
	w.publishInput("default", pool.Input{Complete: true, Fresh: true, Known: []string{"m"}})
	s, late := w.asks(t, ""), w.asks(t, "")
	if s.v.Action != Wait || late.v.Action != Wait {
		t.Fatalf("got %s", show(&s.v))
	}
	w.clock.advance(4 * time.Second)
	w.publish("default", ep(1, "m"))
	if v := s.resume(t); v.Destination != "10.0.0.1:8000" {
		t.Errorf("got %s", show(v))
	}
	w.publishInput("default", pool.Input{Complete: true, Fresh: true, Known: []string{"m"}})
	s.finish(End{})
	w.clock.advance(6 * time.Second)
	w.room.Expire()
	if v := late.resume(t); v.meta("reason") != "rejected-no-endpoints" || v.Reply.Status != 503 {
		t.Errorf("got %s", show(v))
	}
	late.finish(End{})
	// A model that does not exist is no model to wait for.
	w.publish("default", ep(1, "n"))
	for _, model := range []string{"m", "x"} { // m is known no longer
		if v := w.stream().chat(t, `{"model":"`+model+`","messages":[{}]}`); v.meta("reason") != "model_not_found" {
			t.Errorf("%s: got %s", model, show(v))
		}
	}
}

// TestFullModelDoesNotBlockAnother, nor what has no model.
func TestFullModelDoesNotBlockAnother(t *testing.T) {
	w := newWorld(t, oneAtATime)
	w.publish("default", ep(1, "m"), ep(2, "n"))
	first, waits := w.asks(t, ""), w.asks(t, "high")
	other := w.stream()
	if v := other.chat(t, `{"model":"n","messages":[{}]}`); v.Destination != "10.0.0.2:8000" {
		t.Errorf("got %s", show(v))
	}
	list := w.stream()
	if v := list.send(t, head(":method", "GET", ":path", "/health"), nil, ""); v.Action != Continue {
		t.Errorf("got %s", show(v))
	}
	for _, s := range []*stream{other, list, first} {
		s.finish(End{})
	}
	waits.resume(t)
	waits.finish(End{})
	w.idle(t)
}

// TestPanicWithASlot: a fault after a grant gives the slot on.
func TestPanicWithASlot(t *testing.T) {
	for _, onError := range []string{"reject", "route"} {
		w := newWorld(t, oneAtATime+"onInternalError: "+onError)
		w.publish("default", ep(1, "m"))
		first, s, next := w.asks(t, ""), w.asks(t, ""), w.asks(t, "")
		first.finish(End{})
		if !s.posted() {
			t.Fatal("not woken")
		}
		hold := s.wait.granted
		func() {
			defer s.guard("resume", &s.v)
			s.word.Store(stateNew)
			s.wait.granted = nil
			defer w.pool("default").flow.Return(hold)
			panic("with a slot")
		}()
		if want := map[string]Action{"reject": Reply, "route": Continue}[onError]; s.v.Action != want {
			t.Errorf("%s: %s", onError, show(&s.v))
		}
		s.finish(End{})
		next.resume(t)
		next.finish(End{})
		if n := load(w.pool("default")); n != 0 || w.flights.sum() != 0 {
			t.Errorf("%s: %d slots, %d in flight", onError, n, w.flights.sum())
		}
	}
}

// TestAllocsWithFlowControl: with room, flow control costs no memory, no lock
// and no callback.
func TestAllocsWithFlowControl(t *testing.T) {
	for _, saturation := range []string{"utilization", "concurrency"} {
		door := oneHundred(t, "flowControl: {enabled: true, saturation: "+saturation+"}")
		if door.prepared != 0 {
			t.Errorf("%s: the door was called %d times", saturation, door.prepared)
		}
	}
}

// TestGrantedEndpointGoes: a slot on an endpoint that has gone meanwhile is given
// back before the request waits anew, or is answered.
func TestGrantedEndpointGoes(t *testing.T) {
	for _, c := range []struct {
		name string
		then []pool.Endpoint // after the grant
		act  func(w *world)
		want string
	}{
		{"another one is full", []pool.Endpoint{ep(2, "m")}, func(*world) {}, "wait"},
		{"the process drains", nil, func(w *world) { w.room.Drain() }, "reply rejected-shutting-down"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, oneAtATime)
			granted := ep(1, "m")
			w.publish("default", granted)
			first, s := w.asks(t, ""), w.asks(t, "")
			first.finish(End{})
			if granted.Live.InFlight() != 1 {
				t.Fatal("not granted")
			}
			var other *stream
			if c.then != nil {
				w.publish("default", c.then...)
				other = w.asks(t, "")
			}
			c.act(w)
			held := int64(-1)
			s.onWait = func() { held = granted.Live.InFlight() }
			v := s.resume(t)
			if got := strings.TrimSpace(v.Action.String() + " " + v.meta("reason")); got != c.want {
				t.Errorf("got %s", show(v))
			}
			if held > 0 {
				t.Error("it waits while it holds a slot")
			}
			if c.want == "wait" && held < 0 {
				t.Error("it does not wait")
			}
			if n := granted.Live.InFlight(); n != 0 {
				t.Errorf("%d slots are left behind", n)
			}
			if other != nil {
				other.finish(End{})
			}
			if c.want == "wait" {
				if v := s.resume(t); v.Destination != "10.0.0.2:8000" {
					t.Errorf("got %s", show(v))
				}
			}
			s.finish(End{})
			w.idle(t)
		})
	}
}

// TestGrantedEndpointIsDoubted: a request that was granted a slot before the
// fault, and not yet sent, keeps its place in the queue, or goes elsewhere.
func TestGrantedEndpointIsDoubted(t *testing.T) {
	w := newWorld(t, oneAtATime)
	one, two := ep(1, "m"), ep(2, "m")
	w.publish("default", one, two)
	a, b := w.asks(t, ""), w.asks(t, "")
	first, later := w.asks(t, ""), w.asks(t, "")
	running := map[string]*stream{a.v.Destination: a, b.v.Destination: b}
	fail := func(s *stream) {
		t.Helper()
		s.finish(End{}) // by itself; its slot is granted
		w.pool("default").holder.Report(pool.Fault{Live: one.Live, Kind: pool.FaultCut, At: w.now()})
	}
	fail(running["10.0.0.1:8000"])
	if v := first.resume(t); v.Action != Wait || one.Live.InFlight() != 0 {
		t.Fatalf("sent to an endpoint that is doubted: %s", show(v))
	}
	running["10.0.0.2:8000"].finish(End{})
	if v := first.resume(t); v.Destination != "10.0.0.2:8000" || later.posted() {
		t.Fatalf("it lost its place: %s", show(v))
	}
	one.Live.Trust(w.now())
	w.publish("default", one, two)
	first.finish(End{}) // and the second has room: that is where it goes
	fail(first)
	if v := later.resume(t); v.Destination != "10.0.0.2:8000" {
		t.Fatalf("got %s", show(v))
	}
	later.finish(End{})
	w.idle(t)
	for _, b := range w.pool("default").flow.Stats().Bands {
		if b.Queued != b.Dispatched {
			t.Errorf("%d were queued, %d dispatched", b.Queued, b.Dispatched)
		}
	}
}

// TestSentToAFullEndpoint: a request whose own, older configuration finds full
// what the newest has room on is sent in the end, and counted.
func TestSentToAFullEndpoint(t *testing.T) {
	w := newWorld(t, oneAtATime)
	w.publish("default", ep(1, "m"))
	first := w.asks(t, "")
	newer := w.gen.settings.Load().flow
	newer.Detector.MaxConcurrency = 2
	w.pool("default").flow.Apply(newer)
	s := w.asks(t, "")
	if s.v.Action != Continue {
		t.Fatalf("got %s", show(&s.v))
	}
	if n := w.counterValue(t, "shunt_overfull_picks_total"); n != 1 {
		t.Errorf("%v counted", n)
	}
	s.finish(End{})
	first.finish(End{})
	w.idle(t)
}

// TestFlowControlRaces lets requests on several workers, which end and leave when
// they like, race for few slots. Nobody has one too many, and none is lost.
func TestFlowControlRaces(t *testing.T) {
	const workers, rounds, slots = 4, 3000, 2
	w := newWorld(t, strings.Replace(evicting, "maxConcurrency: 1", fmt.Sprint("maxConcurrency: ", slots), 1))
	w.publish("default", ep(1, "m"), ep(2, "m"))
	p := w.pool("default")
	var working sync.WaitGroup
	var routed, cancelled, dropped, evicted atomic.Int64
	for id := range workers {
		working.Go(func() {
			rng := rand.New(rand.NewPCG(9, uint64(id)))
			posts := make(chan *racer, 2*rounds)
			var open []*racer
			take := func(r *racer) {
				if r.ended.Load() {
					return
				}
				if r.Evicted(End{}, &r.v); r.v.Action == Reply {
					evicted.Add(1)
				} else {
					r.Resume(&r.v)
				}
			}
			finish := func(r *racer) {
				r.ended.Store(true)
				state := r.word.Load()
				r.Finish(End{}, &r.v)
				switch {
				case state == stateRouted:
					routed.Add(1)
				case state == stateDone:
					dropped.Add(1)
				default:
					cancelled.Add(1)
				}
			}
			for range rounds {
				if rng.IntN(4) == 0 {
					w.clock.advance(600 * time.Millisecond) // what waits is overdue for eviction
					w.room.Expire()
				}
				r := &racer{posts: posts}
				r.Init(r, w.gen)
				h := post(chatPath, "x-llm-d-inference-objective", []string{"high", "low", "none"}[rng.IntN(3)],
					"x-llm-d-inference-fairness-id", strconv.Itoa(rng.IntN(3)))
				r.Headers(h, false, nil, &r.v)
				r.Body([][]byte{[]byte(chatBody)}, &r.v)
				open = append(open, r)
				for len(posts) > 0 {
					take(<-posts)
				}
				for len(open) > 20 || len(open) > 0 && rng.IntN(2) == 0 {
					i := rng.IntN(len(open))
					finish(open[i])
					open[i] = open[len(open)-1]
					open = open[:len(open)-1]
				}
			}
			for len(open) > 0 {
				for len(posts) > 0 {
					take(<-posts)
				}
				finish(open[0])
				open = open[1:]
			}
		})
	}
	working.Wait()
	if n := routed.Load() + cancelled.Load() + dropped.Load(); n != workers*rounds {
		t.Errorf("%d ends of %d requests", n, workers*rounds)
	}
	if routed.Load() == 0 || cancelled.Load() == 0 {
		t.Errorf("%d routed, %d cancelled: nothing raced", routed.Load(), cancelled.Load())
	}
	if n := metricOf(p.counters.drops[DropContextCancelled]); n != float64(cancelled.Load()) {
		t.Errorf("%v counted, %d cancelled", n, cancelled.Load())
	}
	if n := metricOf(p.counters.drops[DropEvicted]); n != float64(evicted.Load()) || n == 0 {
		t.Errorf("%v counted, %d evicted", n, evicted.Load())
	}
	w.idle(t)
}

// TestDrain: not ready at once, served within the grace, refused after it, and
// taken back.
func TestDrain(t *testing.T) {
	w := newWorld(t, oneAtATime)
	w.publish("default", ep(1, "m"))
	admin := httptest.NewServer(w.adminHandler())
	defer admin.Close()
	ask := func(method, path string, pairs ...string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, admin.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(pairs); i += 2 {
			req.Header.Set(pairs[i], pairs[i+1])
		}
		resp, err := admin.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var b strings.Builder
		_, _ = fmt.Fprint(&b, resp.Header.Get("content-type"))
		return resp.StatusCode, b.String()
	}
	for _, c := range []struct {
		method, path string
		pairs        []string
		want         int
	}{
		{"POST", "/drain", nil, 403},
		{"POST", "/undrain", nil, 403},
		{"POST", "/drain?grace=2h", []string{HeaderAdmin, "1"}, 400},
		{"POST", "/drain?grace=soon", []string{HeaderAdmin, "1"}, 400},
		{"POST", "/drain?graze=1s", []string{HeaderAdmin, "1"}, 400},
		{"POST", "/drain?grace=1s;x", []string{HeaderAdmin, "1"}, 400},
		{"GET", "/drain", nil, 200},
	} {
		if got, _ := ask(c.method, c.path, c.pairs...); got != c.want {
			t.Errorf("%s %s: %d, want %d", c.method, c.path, got, c.want)
		}
	}
	if st := w.DrainStatus(); st.State != StateServing {
		t.Errorf("state %s", st.State)
	}
	first, waits := w.asks(t, ""), w.asks(t, "")
	if code, _ := ask("POST", "/drain?grace=1h", HeaderAdmin, "1"); code != 200 {
		t.Fatal(code)
	}
	if code, _ := ask("GET", "/readyz"); code != 503 || w.notReady() != "draining" {
		t.Errorf("ready: %d", code)
	}
	if st := w.DrainStatus(); st.State != StateGrace || st.InFlight != 1 || st.Waiting != 1 {
		t.Errorf("%+v", st)
	}
	if waits.posted() {
		t.Error("woken within the grace")
	}
	if code, _ := ask("POST", "/drain?grace=0s", HeaderAdmin, "1"); code != 200 {
		t.Fatal(code)
	}
	eventually(t, "the grace ends", func() bool { return w.DrainStatus().State == StateDraining })
	eventually(t, "woken", func() bool { return len(waits.posts) > 0 })
	if v := waits.resume(t); v.meta("reason") != "rejected-shutting-down" || v.Reply.Status != 503 {
		t.Errorf("got %s", show(v))
	}
	if late := w.asks(t, ""); late.v.meta("reason") != "rejected-shutting-down" {
		t.Errorf("got %s", show(&late.v))
	}
	first.finish(End{})
	if st := w.DrainStatus(); st.InFlight != 0 || st.Waiting != 0 {
		t.Errorf("%+v", st)
	}
	if code, _ := ask("POST", "/undrain", HeaderAdmin, "1"); code != 200 {
		t.Fatal(code)
	}
	if s := w.asks(t, ""); s.v.Action != Continue {
		t.Errorf("got %s", show(&s.v))
	}
}
