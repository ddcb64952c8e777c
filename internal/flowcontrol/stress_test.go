package flowcontrol

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

var stressRequests = flag.Int("requests", 50_000, "requests of the stress test")

// stressed is a request as a door has it: one worker calls it, any goroutine
// wakes it.
type stressed struct {
	Waiter
	s       *stress
	worker  *stressWorker
	ask     Ask
	word    atomic.Int32 // 0 new, 1 waiting, 2 granted, 3 done
	outcome Outcome
	hold    *pool.Live
	on      pool.Reservation
	wakes   atomic.Int32
	ends    atomic.Int32

	flight *Flight
	evicts atomic.Int32
}

type stressWorker struct {
	posts chan *stressed
	rng   *rand.Rand
	open  []*stressed
}

type stress struct {
	t       *testing.T
	room    *Room
	ctl     *Controller
	snap    atomic.Pointer[pool.Snapshot]
	config  atomic.Pointer[Config]
	ends    [8]atomic.Int64
	routed  atomic.Int64
	waited  atomic.Int64
	handed  atomic.Int64 // grants that came too late
	lowered atomic.Int64
	evicted atomic.Int64
	missed  atomic.Int64
	clock   atomic.Int64 // nanoseconds: each request takes a while
	chaos   chan struct{}
}

func (s *stress) now() time.Time { return time.Unix(1000, s.clock.Load()) }

func (r *stressed) Wake(o Outcome, hold *pool.Live) {
	if r.wakes.Add(1) > 1 {
		r.s.t.Error("woken twice")
	}
	r.outcome, r.hold = o, hold
	if r.word.CompareAndSwap(1, 2) {
		r.worker.posts <- r
		return
	}
	if hold != nil {
		r.s.handed.Add(1)
		r.s.ctl.Return(hold)
	}
}

// decide is what the filter does, on the request's worker.
func (r *stressed) decide(hold *pool.Live) {
	s := r.s
	snap := s.snap.Load()
	config := s.config.Load()
	view := config.Detector.View(snap, s.now())
	var with []*pool.Live
	for _, i := range candidates(snap, r.ask.Model, "") {
		live := snap.Endpoints[i].Live
		if live == hold || view.Open(i, 0) {
			with = append(with, live)
		}
	}
	if hold != nil && len(with) > 0 || hold == nil && len(with) > 0 && s.ctl.Waiting() == 0 {
		r.route(with[r.worker.rng.IntN(len(with))])
	} else {
		r.wait(with)
	}
	if hold != nil {
		s.ctl.Return(hold)
	}
}

func (r *stressed) route(live *pool.Live) {
	r.on = live.Reserve(pool.Load{}, r.s.now())
	r.s.routed.Add(1)
	if r.ask.Priority < 0 && r.s.ctl.Evicting() {
		r.flight = r.s.ctl.Fly(r, r.ask.Priority, live)
	}
}

func (r *stressed) Evict() {
	if r.evicts.Add(1) > 1 {
		r.s.t.Error("asked twice to end")
	}
	if r.ask.Cost%2 == 0 { // as a door that posts; else the next look finds it
		r.worker.posts <- r
	}
}

// evict ends a request that was asked to, on its worker.
func (r *stressed) evict() {
	if r.flight != nil && r.evicts.Load() > 0 {
		r.s.evicted.Add(1)
		r.release(EvictedReset)
		r.end(5)
	}
}

func (r *stressed) release(how Landing) {
	live := r.on.Live()
	r.on.Release(r.s.now(), how == Finished)
	if r.flight != nil {
		r.s.ctl.Land(r.flight, how)
		r.flight = nil
		if how == Finished && r.evicts.Load() > 0 {
			r.s.missed.Add(1)
		}
	}
	r.s.ctl.Released(live)
}

func (r *stressed) wait(with []*pool.Live) {
	r.wakes.Store(0)
	r.word.Store(1)
	result, _ := r.s.ctl.Enter(&r.Waiter, r, &r.ask)
	if result == Queued {
		r.s.waited.Add(1)
		return
	}
	r.word.Store(0)
	if result == Pass {
		if len(with) == 0 { // room came between the looks
			snap := r.s.snap.Load()
			if index := candidates(snap, r.ask.Model, ""); len(index) > 0 {
				r.route(snap.Endpoints[index[0]].Live)
				return
			}
			r.end(6)
			return
		}
		r.route(with[0])
		return
	}
	r.end(7)
}

func (r *stressed) end(how int) {
	if r.ends.Add(1) > 1 {
		r.s.t.Error("ended twice")
	}
	r.s.ends[how].Add(1)
}

// resume is what a post leads to.
func (r *stressed) resume() {
	r.evict()
	if !r.word.CompareAndSwap(2, 0) {
		return // it has ended meanwhile
	}
	hold := r.hold
	r.hold = nil
	if r.outcome == Granted {
		r.decide(hold)
		return
	}
	r.end(1)
}

// finish is the end of the stream.
func (r *stressed) finish() {
	if r.evicts.Load() > 0 && r.ask.Cost%2 == 1 && r.worker.rng.IntN(2) == 0 {
		r.evict()
	}
	if r.ends.Load() > 0 {
		r.word.Store(3)
		return
	}
	switch r.word.Swap(3) {
	case 1:
		r.s.room.Remove(&r.Waiter)
		r.end(2)
	case 2:
		if r.hold != nil {
			r.s.ctl.Return(r.hold)
		}
		r.end(3)
	default:
		if r.on.Live() == nil {
			r.s.t.Error("a request ends that was neither answered nor sent")
			return
		}
		r.release(Finished)
		r.end(4)
	}
}

// TestStress lets arrivals, ends, clients that leave, deadlines, scrapes,
// endpoints that come and go and reloads meet. Every request ends once, no slot
// is lost, no band is served while a higher one could be, and a flow is served
// in its order.
func TestStress(t *testing.T) {
	n := *stressRequests
	if testing.Short() {
		n = min(n, 5000)
	}
	s := &stress{t: t, chaos: make(chan struct{})}
	lives := make([]*pool.Live, 8)
	for i := range lives {
		lives[i] = &pool.Live{Addr: fmt.Sprintf("e%d", i)}
	}
	var seq uint64
	publish := func(rng *rand.Rand) {
		var list []pool.Endpoint
		var read []*pool.Metrics
		for i, live := range lives {
			if live.Trust(s.now()); rng.IntN(32) == 0 {
				live.Doubt(s.now())
			}
			if rng.IntN(4) == 0 {
				continue
			}
			models := [][]string{{"a"}, {"b"}, {"a", "b"}, {"c", "a"}}[i%4]
			m := &pool.Metrics{Taken: s.now()}
			m.Set(pool.NumRequestsWaiting, float64(rng.IntN(8)))
			m.Set(pool.NumRequestsRunning, float64(rng.IntN(8)))
			if rng.IntN(4) == 0 {
				m = nil
			}
			list = append(list, pool.Endpoint{
				Target: pool.Target{Addr: address(i), Model: models[0]}, Models: models[1:], Live: live, Judged: true, Ready: true,
			})
			read = append(read, m)
		}
		seq++
		s.snap.Store(pool.NewSnapshot(pool.Input{
			Now: s.now(), Seq: seq, Complete: true, StaleAfter: 20 * time.Millisecond, Endpoints: list, Metrics: read,
		}))
		if s.ctl != nil {
			s.ctl.Changed()
		}
	}
	reload := func(rng *rand.Rand) {
		c := defaultConfig()
		c.Fairness = Fairness(rng.IntN(3))
		c.Order = Order(rng.IntN(2))
		c.Weights = map[string]float64{"f1": 2}
		c.Detector.Saturation = Saturation(rng.IntN(2))
		c.Detector.MaxConcurrency = 2 + rng.Int64N(4)
		c.Displace = rng.IntN(2) == 0
		c.Total.Requests = 400
		c.Band.Requests = 200
		c.TTL = time.Duration(1+rng.IntN(50)) * time.Millisecond
		c.EmptyPoolTTL = time.Duration(rng.IntN(2)) * 10 * time.Millisecond
		c.FlowLabels = 3
		c.Enabled = rng.IntN(20) > 0
		c.Eviction = rng.IntN(4) > 0
		s.config.Store(&c)
		s.ctl.Apply(c)
	}
	rng := rand.New(rand.NewPCG(3, 3))
	publish(rng)
	s.room = NewRoom(100, 1<<40, s.now)
	s.ctl = s.room.NewController(Options{Snapshot: func() *pool.Snapshot { return s.snap.Load() }, Candidates: candidates})
	s.ctl.patience = int64(200 * time.Microsecond)
	s.ctl.granted = func(w *Waiter, i int32) {
		if s.ctl.config.Order == FCFS {
			for x := w.flow.band.waiters.first; x != w; x = x.links[inBand].next {
				if x.sub == w.sub {
					t.Error("not the first of its flow was granted")
				}
			}
		}
		for _, b := range s.ctl.bands {
			if b.priority <= w.flow.band.priority {
				break
			}
			for x := b.waiters.first; x != nil; x = x.links[inBand].next {
				if slices.Contains(x.sub.lane.index, i) {
					s.lowered.Add(1)
				}
			}
		}
	}
	reload(rng)
	stop := make(chan struct{})
	var chaos, working sync.WaitGroup
	chaos.Go(func() {
		rng := rand.New(rand.NewPCG(4, 4))
		for {
			select {
			case <-stop:
				return
			case <-s.chaos:
			}
			s.room.Expire()
			publish(rng)
			if rng.IntN(10) == 0 {
				reload(rng)
			}
			if rng.IntN(200) == 0 {
				s.room.Drain()
				s.room.Undrain()
			}
		}
	})
	const workers = 4
	for id := range workers {
		working.Go(func() {
			w := &stressWorker{posts: make(chan *stressed, n), rng: rand.New(rand.NewPCG(5, uint64(id)))}
			for range n / workers {
				r := &stressed{s: s, worker: w, ask: Ask{
					Model: []string{"a", "b", "c", "a", "b", "c", "a", "b", "c", "d"}[w.rng.IntN(10)], Flow: fmt.Sprintf("f%d", w.rng.IntN(20)),
					Priority: w.rng.IntN(4) - 1, Bytes: 1, Cost: w.rng.Int64N(2000), TTL: time.Duration(w.rng.IntN(5)) * 10 * time.Millisecond,
				}}
				r.decide(nil)
				w.open = append(w.open, r)
				s.clock.Add(int64(100 * time.Microsecond))
				if w.rng.IntN(20) == 0 {
					s.chaos <- struct{}{}
				}
				for len(w.posts) > 0 {
					(<-w.posts).resume()
				}
				for len(w.open) > 60 || len(w.open) > 0 && w.rng.IntN(2) == 0 {
					i := w.rng.IntN(len(w.open))
					for try := 0; try < 8 && w.open[i].on.Live() == nil; try++ { // most answers end before a client leaves
						i = w.rng.IntN(len(w.open))
					}
					r := w.open[i]
					w.open[i] = w.open[len(w.open)-1]
					w.open = w.open[:len(w.open)-1]
					r.finish()
				}
			}
			for len(w.open) > 0 { // what is left: some still wait
				for len(w.posts) > 0 {
					(<-w.posts).resume()
				}
				w.open[0].finish()
				w.open = w.open[1:]
			}
		})
	}
	working.Wait()
	close(stop)
	chaos.Wait()

	sum := int64(0)
	for i := range s.ends {
		sum += s.ends[i].Load()
	}
	if want := int64(n / workers * workers); sum != want {
		t.Errorf("%d requests ended, of %d", sum, want)
	}
	for _, live := range lives {
		if live.InFlight() != 0 {
			t.Errorf("%s: %d slots lost", live.Addr, live.InFlight())
		}
	}
	st := s.ctl.Stats()
	requests, bytes, _ := s.room.Waiting()
	if st.Requests != 0 || st.Bytes != 0 || requests != 0 || bytes != 0 {
		t.Errorf("%d wait, %d bytes are left", st.Requests, st.Bytes)
	}
	for _, e := range st.Evictions {
		if e.Evictable != 0 || e.Asked != 0 || e.Reset+e.Missed == 0 {
			t.Errorf("evictions: %+v", e)
		}
	}
	if s.evicted.Load() < int64(n)/5000 {
		t.Errorf("%d evicted: too few to mean anything", s.evicted.Load())
	}
	if len(st.Flows) > 4 {
		t.Errorf("%d flows have statistics", len(st.Flows))
	}
	if s.lowered.Load() > 0 {
		t.Errorf("%d grants to a band while a higher one waited for the endpoint", s.lowered.Load())
	}
	if s.ends[1].Load() == 0 || s.ends[2].Load() == 0 || s.routed.Load() == 0 || s.waited.Load() < int64(n)/20 {
		t.Errorf("too little happened: %d routed, %d waited, ends %v", s.routed.Load(), s.waited.Load(), &s.ends)
	}
	t.Logf("%d routed, %d waited, %d answered, %d left while waiting, %d when granted, %d grants came too late, %d evicted, %d missed",
		s.routed.Load(), s.waited.Load(), s.ends[1].Load()+s.ends[7].Load(), s.ends[2].Load(), s.ends[3].Load(), s.handed.Load(), s.evicted.Load(), s.missed.Load())
}
