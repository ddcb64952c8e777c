package filter

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/pool"
)

// TestFinishInEachState ends a request wherever it may be.
func TestFinishInEachState(t *testing.T) {
	const cancelled = "continue reason=rejected-context-cancelled model=m fairness_id=default-flow"
	for _, c := range []struct {
		name  string
		setUp func(w *world, s *stream)
		drops float64
		want  string
	}{
		{"never saw headers", func(*world, *stream) {}, 0, "continue"},
		{"its body is awaited", func(_ *world, s *stream) { s.Headers(post(chatPath), false, nil, &s.v) }, 0, "continue"},
		{"waiting", func(_ *world, s *stream) { s.chat(t, chatBody) }, 1, cancelled},
		{"granted", func(w *world, s *stream) {
			s.chat(t, chatBody)
			w.publish("default", ep(1, "m"))
		}, 1, cancelled},
		{"granted and resumed", func(w *world, s *stream) {
			s.chat(t, chatBody)
			w.publish("default", ep(1, "m"))
			s.Resume(&s.v)
		}, 0, "continue"},
		{"routed", func(w *world, s *stream) {
			w.publish("default", ep(1, "m"))
			s.chat(t, chatBody)
		}, 0, "continue"},
		{"routed at headers", func(w *world, s *stream) {
			w.publish("default", ep(1, "m"))
			s.get()
		}, 0, "continue"},
		{"answered at headers", func(_ *world, s *stream) { s.Headers(post(chatPath), true, nil, &s.v) }, 0, "continue"},
		{"answered with its body", func(_ *world, s *stream) { s.chat(t, "x") }, 0, "continue"},
		{"answered after waiting", func(w *world, s *stream) {
			s.chat(t, chatBody)
			w.clock.advance(time.Minute)
			w.room.Expire()
			s.Resume(&s.v)
		}, 0, "continue"},
		{"expired, not resumed", func(w *world, s *stream) {
			s.chat(t, chatBody)
			w.clock.advance(time.Minute)
			w.room.Expire()
		}, 1, cancelled},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, "")
			s := w.stream()
			c.setUp(w, s)
			if got := show(s.finish(End{})); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			// What comes late finds it ended.
			s.Wake(flowcontrol.Granted, nil)
			w.publish("default", ep(1, "m"))
			s.Resume(&s.v)
			if s.v.Action != Wait || s.v.Destination != "" {
				t.Errorf("resumed after its end: %s", show(&s.v))
			}
			s.Served("10.0.0.1:8000", &s.v)
			if n, bytes, _ := w.room.Waiting(); n != 0 || bytes != 0 || load(w.pool("default")) != 0 {
				t.Errorf("%d waiting, %d bytes, load %d", n, bytes, load(w.pool("default")))
			}
			if n := w.counterValue(t, "shunt_drops_total", "reason", "rejected-context-cancelled"); n != c.drops {
				t.Errorf("%v counted, want %v", n, c.drops)
			}
			if n := w.counterValue(t, "shunt_internal_errors_total"); n != 0 {
				t.Errorf("internal errors:\n%s", w.log)
			}
		})
	}
}

func TestResumeWithoutAGrant(t *testing.T) {
	w := newWorld(t, "")
	s := w.stream()
	s.chat(t, chatBody)
	if s.Resume(&s.v); s.v.Action != Wait {
		t.Fatalf("got %s", show(&s.v))
	}
	if n, bytes, _ := w.room.Waiting(); n != 1 || bytes != int64(len(chatBody)) {
		t.Fatalf("%d waiting, %d bytes", n, bytes)
	}
	w.publish("default", ep(1, "m"))
	if !s.posted() || s.posted() {
		t.Fatal("one grant is one post")
	}
	if s.Resume(&s.v); s.v.Destination != "10.0.0.1:8000" || !s.v.has("queue_ms") {
		t.Fatalf("got %s", show(&s.v))
	}
	if s.Resume(&s.v); s.v.Action != Wait || load(w.pool("default")) != 1 {
		t.Fatalf("a second resume: %s, load %d", show(&s.v), load(w.pool("default")))
	}
	s.finish(End{})
}

// TestReleasedOnce ends routed requests in every way.
func TestReleasedOnce(t *testing.T) {
	for _, c := range []struct {
		name string
		end  End
		kind string // of the fault
	}{
		{"the whole response", End{Answered: true, FirstByte: time.Millisecond}, ""},
		{"reset by the client before the response", End{Details: "downstream_remote_disconnect"}, ""},
		{"reset by the client in the response", End{Answered: true, Details: "downstream_remote_disconnect", FirstByte: time.Second}, ""},
		{"reset by the upstream before the response", End{Details: "upstream_reset_before_response_started{connection_termination}"}, "reset"},
		{"reset by the upstream in the response", End{Answered: true, Details: "upstream_reset_after_response_started{connection_termination}"}, "cut"},
		{"refused", End{Details: "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_Connection_refused}"}, "connect"},
		{"tried, and nobody is left to try", End{Details: "no_healthy_upstream"}, "connect"},
		{"timeout", End{Details: "response_timeout"}, ""},
		{"another filter's reply", End{Details: "ext_authz_denied"}, ""},
		{"no details", End{}, ""},
	} {
		w := newWorld(t, "")
		w.publish("default", ep(1, "m"), ep(2, "m"))
		s := w.stream()
		s.chat(t, chatBody)
		if load(w.pool("default")) != 1 {
			t.Fatalf("%s: no reservation", c.name)
		}
		live := s.held.Live()
		v := s.finish(c.end)
		if v.has("ttft_ms") != (c.end.FirstByte > 0) {
			t.Errorf("%s: %+v", c.name, v.Metadata)
		}
		if n := load(w.pool("default")); n != 0 {
			t.Errorf("%s: load %d", c.name, n)
		}
		faults := w.pool("default").holder.Faults()
		for _, kind := range []string{"reset", "connect", "cut"} {
			if n := w.counterValue(t, "shunt_endpoint_faults_total", "kind", kind); (n == 1) != (c.kind == kind) {
				t.Errorf("%s: %v %s faults", c.name, n, kind)
			}
		}
		switch {
		case (c.kind != "") != (len(faults) == 1):
			t.Errorf("%s: %d faults reported", c.name, len(faults))
		case c.kind != "":
			f := <-faults
			if f.Live != live || (f.Kind == pool.FaultConnect) != (c.kind == "connect") || (f.Kind == pool.FaultCut) != (c.kind == "cut") || !live.Doubted(w.now()) || !f.At.Equal(w.now()) {
				t.Errorf("%s: %+v", c.name, f)
			}
		}
	}
}

// TestClassify holds Envoy's words: StreamResetReason with underscores, and
// behind a bar what the transport said.
func TestClassify(t *testing.T) {
	const none, reset, connect, cut = "", "reset", "connect", "cut"
	before := func(cause string) string { return "upstream_reset_before_response_started{" + cause + "}" }
	after := func(cause string) string { return "upstream_reset_after_response_started{" + cause + "}" }
	kinds := map[pool.FaultKind]string{pool.FaultReset: reset, pool.FaultConnect: connect, pool.FaultCut: cut}
	kindOf := func(end End) string {
		if kind, fault := classify(end); fault {
			return kinds[kind]
		}
		return none
	}
	for details, want := range map[string]string{
		after("remote_reset"):                         cut,
		after("connection_termination"):               cut,
		after("protocol_error"):                       cut,
		after("local_reset"):                          none,
		after("overload_manager_reset"):               none,
		before("connection_termination"):              reset,
		before("remote_reset"):                        reset,
		before("remote_refused_stream_reset"):         reset,
		before("protocol_error"):                      reset,
		before("http1_premature_upstream_half_close"): reset,
		before("remote_connection_failure"):           connect,
		before("remote_connection_failure|delayed_connect_error:_Connection_refused"):                                    connect,
		before("remote_connection_failure|immediate_connect_error:_Network_is_unreachable|remote_address:10.0.0.1:8000"): connect,
		before("local_connection_failure"):       connect,
		before("connection_timeout"):             connect,
		before("connection_failure"):             connect,
		before("overflow"):                       none,
		before("overload_manager_reset"):         none,
		before("local_reset"):                    none,
		before("local_refused_stream_reset"):     none,
		"upstream_reset_before_response_started": none,
		"response_timeout":                       none,
		"upstream_response_timeout":              none,
		"upstream_per_try_timeout":               none,
		"stream_idle_timeout":                    none,
		"max_duration_timeout":                   none,
		"downstream_remote_disconnect":           none,
		"downstream_local_disconnect(overload)":  none,
		"http2.remote_reset":                     none,
		"no_healthy_upstream":                    connect,
		"maintenance_mode":                       none,
		"via_upstream":                           none,
		"shunt_rejected-no-endpoints":            none,
		"":                                       none,
	} {
		began, early, late := strings.HasPrefix(details, "upstream_reset_after"), none, none
		if began {
			late = want
		} else {
			early = want
		}
		if got := kindOf(End{Details: details}); got != early {
			t.Errorf("%s, before the response: %q, want %q", details, got, early)
		}
		if got := kindOf(End{Answered: true, Details: details}); got != late {
			t.Errorf("%s, in the response: %q, want %q", details, got, late)
		}
	}
}

func TestServed(t *testing.T) {
	w := newWorld(t, "")
	one, two, three := ep(1, "m"), ep(2, "m"), ep(3, "m")
	three.Pod = ""
	w.publish("default", one, notReady(two), notReady(three))
	flight := func(want ...int64) {
		t.Helper()
		for i, l := range []*pool.Live{one.Live, two.Live, three.Live} {
			if l.InFlight() != want[i] {
				t.Errorf("endpoint %d: %d in flight, want %d", i+1, l.InFlight(), want[i])
			}
		}
	}
	s := w.stream()
	s.chat(t, chatBody)
	flight(1, 0, 0)
	for _, step := range []struct {
		address, want string
		flight        []int64
		moved         float64
	}{
		{"10.0.0.1:8000", "continue", []int64{1, 0, 0}, 0},
		{"10.0.0.2:8000", "continue endpoint=10.0.0.2:8000 pod=pod-2", []int64{0, 1, 0}, 1},
		{"10.0.0.2:8000", "continue", []int64{0, 1, 0}, 1},
		{"10.0.0.3:8000", "continue endpoint=10.0.0.3:8000 pod=10.0.0.3:8000", []int64{0, 0, 1}, 2},
		// One that is not the pool's: the load stays where it was.
		{"10.9.9.9:1", "continue endpoint=10.9.9.9:1 pod=10.9.9.9:1", []int64{0, 0, 1}, 3},
	} {
		if s.Served(step.address, &s.v); show(&s.v) != step.want {
			t.Errorf("%s: %s, want %s", step.address, show(&s.v), step.want)
		}
		flight(step.flight...)
		if n := w.counterValue(t, "shunt_moved_total", "pool", "default"); n != step.moved {
			t.Errorf("%s: %v moved", step.address, n)
		}
	}
	s.finish(End{Details: "upstream_reset_before_response_started{remote_reset}"})
	flight(0, 0, 0)
	// Whoever did not answer is probed; then comes the fault of the last.
	for i, want := range []pool.Fault{
		{Live: one.Live, Kind: pool.FaultConnect}, {Live: two.Live, Kind: pool.FaultConnect},
		{Live: three.Live, Kind: pool.FaultConnect}, {Live: three.Live, Kind: pool.FaultReset},
	} {
		if f := <-w.pool("default").holder.Faults(); f.Live != want.Live || f.Kind != want.Kind {
			t.Errorf("fault %d is %s's, of kind %v", i, f.Live.Addr, f.Kind)
		}
	}
	s.Served("10.0.0.1:8000", &s.v)
	flight(0, 0, 0)
}

// racer is a door whose worker is one goroutine for many requests, so that
// grants of other goroutines race with it.
type racer struct {
	Request
	v       Verdict
	posts   chan *racer
	ended   atomic.Bool
	posted  atomic.Int32
	waits   int
	resumes int
}

func (*racer) Metadata(string, string) string { return "" }

func (*racer) SubsetHint() ([]string, bool) { return nil, false }

func (r *racer) PrepareWait() {}

func (r *racer) Evictable(bool) bool { return true }

func (r *racer) PostEvict() { r.posts <- r }
func (r *racer) Post() {
	r.posted.Add(1)
	r.posts <- r
}

// TestGrantsRaceEnds lets grants and deadlines of other goroutines race with
// clients that leave.
func TestGrantsRaceEnds(t *testing.T) {
	const workers, rounds = 4, 2000
	w := newWorld(t, "startupHold: 1m")
	p := w.pool("default")
	// Half of the grants find the endpoint of a model that has one.
	s := w.publishInput("default", pool.Input{Complete: false, Endpoints: []pool.Endpoint{ep(1, "m"), notReady(ep(2, "n"))}})
	stop := make(chan struct{})
	var leaving, granting, working sync.WaitGroup
	leaving.Add(workers) // each has one client that leaves before anything is granted
	granting.Go(func() {
		leaving.Wait()
		for {
			select {
			case <-stop:
				return
			default:
				p.queue.Grant(3)
			}
		}
	})
	granting.Go(func() {
		leaving.Wait()
		for {
			select {
			case <-stop:
				return
			default:
				w.clock.advance(time.Millisecond)
				w.room.Expire()
			}
		}
	})
	var routed, cancelled, dropped atomic.Int64
	for id := range workers {
		working.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(id)))
			posts := make(chan *racer, rounds)
			var open []*racer
			resume := func(r *racer) {
				if r.ended.Load() {
					return // as a door does
				}
				r.resumes++
				r.Resume(&r.v)
				if r.v.Action == Wait {
					r.waits++
				}
			}
			finish := func(r *racer) {
				if r.ended.Swap(true) {
					t.Error("ended twice")
				}
				state := r.word.Load()
				r.Finish(End{}, &r.v)
				switch {
				case state == stateRouted:
					routed.Add(1)
				case r.v.meta("reason") != "":
					cancelled.Add(1)
				case state == stateDone:
					dropped.Add(1)
				default:
					t.Errorf("ended in state %d: %s", state, show(&r.v))
				}
			}
			begin := func(body string) *racer {
				r := &racer{posts: posts}
				r.Init(r, w.gen)
				r.Headers(post(chatPath), false, nil, &r.v)
				r.Body([][]byte{[]byte(body)}, &r.v)
				if r.v.Action == Wait {
					r.waits++
				}
				return r
			}
			finish(begin(chatBody))
			leaving.Done()
			for range rounds - 1 {
				body := chatBody
				if rng.IntN(2) == 0 {
					body = fmt.Sprintf(`{"model":"n","messages":[{}],"n":%d}`, id)
				}
				r := begin(body)
				open = append(open, r)
				for range rng.IntN(3) {
					select {
					case r := <-posts:
						resume(r)
					default:
					}
				}
				if rng.IntN(4) > 0 {
					i := rng.IntN(len(open))
					finish(open[i])
					open[i] = open[len(open)-1]
					open = open[:len(open)-1]
				}
			}
			for _, r := range open {
				finish(r)
			}
		})
	}
	working.Wait()
	close(stop)
	granting.Wait()
	if n := routed.Load() + cancelled.Load() + dropped.Load(); n != workers*rounds {
		t.Errorf("%d ends of %d requests", n, workers*rounds)
	}
	if routed.Load() == 0 || cancelled.Load() == 0 {
		t.Errorf("%d routed, %d cancelled: nothing raced", routed.Load(), cancelled.Load())
	}
	if n := p.counters.drops[DropContextCancelled]; metricOf(n) != float64(cancelled.Load()) {
		t.Errorf("%v counted, %d cancelled", metricOf(n), cancelled.Load())
	}
	if n, bytes, _ := w.room.Waiting(); n != 0 || bytes != 0 || p.queue.Len() != 0 {
		t.Errorf("%d waiting, %d bytes", n, bytes)
	}
	for i := range s.Endpoints {
		if n := s.Endpoints[i].Live.InFlight(); n != 0 {
			t.Errorf("%s: %d in flight", s.Endpoints[i].Key, n)
		}
	}
	if n := w.counterValue(t, "shunt_internal_errors_total"); n != 0 {
		t.Errorf("internal errors:\n%s", w.log)
	}
}

// TestGrantRacesFinish is the two of them alone, on one request at a time.
func TestGrantRacesFinish(t *testing.T) {
	w := newWorld(t, "")
	p := w.pool("default")
	outcomes := map[string]int{}
	for range 10000 {
		r := &racer{posts: make(chan *racer, 1)}
		r.Init(r, w.gen)
		r.Headers(post(chatPath), false, nil, &r.v)
		r.Body([][]byte{[]byte(chatBody)}, &r.v)
		if r.v.Action != Wait {
			t.Fatalf("got %s", show(&r.v))
		}
		start := make(chan struct{})
		var wg sync.WaitGroup
		granted := 0
		wg.Go(func() { <-start; granted = p.queue.Grant(1) })
		close(start)
		r.Finish(End{}, &r.v)
		wg.Wait()
		outcomes[fmt.Sprintf("granted %d, posted %d", granted, r.posted.Load())]++
		if r.v.meta("reason") != "rejected-context-cancelled" || r.word.Load() != stateDone || p.queue.Len() != 0 {
			t.Fatalf("got %s, state %d, queue %d", show(&r.v), r.word.Load(), p.queue.Len())
		}
	}
	if outcomes["granted 0, posted 1"] > 0 {
		t.Errorf("a post without a grant: %v", outcomes)
	}
}

// TestPanicWhileInTheQueue: one that panics after it has entered the queue
// leaves it.
func TestPanicWhileInTheQueue(t *testing.T) {
	w := newWorld(t, "")
	s := w.stream()
	s.chat(t, chatBody)
	func() {
		defer s.guard("body", &s.v)
		panic("late")
	}()
	if n, bytes, _ := w.room.Waiting(); n != 0 || bytes != 0 || s.v.meta("reason") != "rejected-internal" {
		t.Errorf("%d waiting, %d bytes, %s", n, bytes, show(&s.v))
	}
	s.finish(End{})
}
