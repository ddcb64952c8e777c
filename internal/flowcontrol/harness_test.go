package flowcontrol

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// world is a controller, its endpoints and a clock that only the test moves.
// The host of its requests is as simple as can be: it picks the endpoint with
// the fewest requests among those with room.
type world struct {
	clock    time.Time
	room     *Room
	ctl      *Controller
	config   Config
	snap     *pool.Snapshot
	names    []string // of endpoints, by position
	live     map[string]*pool.Live
	models   map[string][]string
	metrics  map[string]*pool.Metrics
	requests map[string]*fake
	order    []string // of requests, by arrival
	log      []string
}

// fake is a request of the world.
type fake struct {
	Waiter
	w     *world
	name  string
	ask   Ask
	state string // waiting, granted, routed, or how it ended
	on    pool.Reservation

	evict  string // how its door can end it: "" at once, late when its engine sends something, no
	flight *Flight
	asked  bool // to end
}

func defaultConfig() Config {
	return Config{
		Enabled: true, TTL: time.Minute, FlowLabels: 100,
		Detector: Detector{Saturation: Concurrency, QueueThreshold: 5, KVThreshold: 0.8, MaxConcurrency: 1},
	}
}

func newWorld(config Config) *world {
	w := &world{
		clock: time.Unix(1000, 0), config: config, live: map[string]*pool.Live{}, models: map[string][]string{},
		metrics: map[string]*pool.Metrics{}, requests: map[string]*fake{},
	}
	w.snap = pool.NewSnapshot(pool.Input{Now: w.clock, Complete: true, StaleAfter: 5 * time.Second})
	w.room = NewRoom(100, 1<<40, func() time.Time { return w.clock })
	w.ctl = w.room.NewController(Options{
		Snapshot: func() *pool.Snapshot { return w.snap }, Candidates: candidates,
	})
	w.ctl.Apply(config)
	return w
}

func candidates(s *pool.Snapshot, model, _ string) []int32 {
	if model == "" {
		return s.All().Index
	}
	if c := s.ForModel(model); c != nil {
		return c.Index
	}
	return nil
}

func address(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), 8000)
}

// setEndpoints replaces the pool's endpoints; one that stays keeps its load.
func (w *world) setEndpoints(names []string) {
	w.names = names
	w.publish()
}

func (w *world) publish() {
	var list []pool.Endpoint
	var read []*pool.Metrics
	for i, name := range w.names {
		if w.live[name] == nil {
			w.live[name] = &pool.Live{Addr: name}
		}
		models := w.models[name]
		list = append(list, pool.Endpoint{
			Target: pool.Target{Addr: address(i), Model: models[0]}, Models: models[1:], Live: w.live[name], Judged: true, Ready: true,
		})
		read = append(read, w.metrics[name])
	}
	w.snap = pool.NewSnapshot(pool.Input{
		Now: w.clock, Seq: w.snap.Seq + 1, Complete: true, Fresh: true, StaleAfter: 5 * time.Second, Endpoints: list, Metrics: read,
	})
	w.ctl.Changed()
}

func (w *world) say(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

func (w *world) arrive(name string, ask Ask) *fake {
	r := &fake{w: w, name: name, ask: ask, evict: ask.Subset}
	r.ask.Subset = ""
	w.requests[name] = r
	w.order = append(w.order, name)
	r.decide(nil)
	return r
}

// decide is what a host does with a request: pick, or wait. One that was granted
// goes where it holds a slot.
func (r *fake) decide(hold *pool.Live) {
	w := r.w
	if hold != nil {
		r.send(hold)
		w.ctl.Return(hold)
		return
	}
	if best := r.pick(); best != nil && w.ctl.Waiting() == 0 {
		r.send(best)
		return
	}
	r.state = "waiting"
	result, drain := w.ctl.Enter(&r.Waiter, r, &r.ask)
	switch result {
	case Pass:
		r.send(r.pick())
	case Queued:
		if r.state == "waiting" {
			w.say("%s waits", r.name)
		}
	case Over:
		r.end(fmt.Sprintf("rejected-saturated, its band needs %v", drain.Round(time.Millisecond)))
	case Empty:
		r.end("rejected-no-endpoints")
	case Closing:
		r.end("rejected-shutting-down")
	}
}

// pick is the endpoint with the fewest requests among those with room, or nil.
func (r *fake) pick() (best *pool.Live) {
	view := r.w.config.Detector.View(r.w.snap, r.w.clock)
	for _, i := range candidates(r.w.snap, r.ask.Model, "") {
		live := r.w.snap.Endpoints[i].Live
		if r.w.config.Enabled && !view.Open(i, 0) {
			continue
		}
		if best == nil || live.InFlight() < best.InFlight() {
			best = live
		}
	}
	return best
}

func (r *fake) send(to *pool.Live) {
	r.on = to.Reserve(pool.Load{}, r.w.clock)
	r.state = "routed"
	r.w.say("%s -> %s", r.name, to.Addr)
	if r.ask.Priority < 0 && r.w.config.Eviction && r.evict != "no" {
		r.flight = r.w.ctl.Fly(r, r.ask.Priority, to)
	}
}

func (r *fake) Evict() {
	r.asked = true
	if r.evict == "late" {
		r.w.say("%s is asked to end", r.name)
		return
	}
	r.evicted()
}

// evicted is the end of one that was asked to.
func (r *fake) evicted() {
	if r.state == "routed" && r.asked {
		r.end("evicted")
		r.release(EvictedReply)
	}
}

func (r *fake) release(how Landing) {
	live := r.on.Live()
	r.on.Release(r.w.clock, how == Finished)
	if r.flight != nil {
		r.w.ctl.Land(r.flight, how)
		r.flight = nil
	}
	r.w.ctl.Released(live)
}

func (r *fake) end(how string) {
	r.state = how
	r.w.say("%s: %s", r.name, how)
}

func (r *fake) Wake(o Outcome, hold *pool.Live) {
	switch o {
	case Granted:
		r.state = "granted"
		r.decide(hold)
	case Expired:
		r.end("rejected-ttl-expired")
	case ExpiredEmpty:
		r.end("rejected-no-endpoints")
	case Displaced:
		r.end("rejected-saturated, displaced")
	case Drained:
		r.end("rejected-shutting-down")
	}
}

// finish ends a request as its client or its engine does.
func (w *world) finish(name string) {
	r := w.requests[name]
	switch r.state {
	case "waiting":
		if w.room.Remove(&r.Waiter) {
			r.end("rejected-context-cancelled")
		}
	case "routed":
		r.state = "done"
		r.release(Finished)
	}
}

// advance moves the clock, to each deadline on the way.
func (w *world) advance(d time.Duration) {
	for end := w.clock.Add(d); ; {
		next := w.room.Expire()
		select {
		case <-w.room.nudge: // as the room's goroutine
			continue
		default:
		}
		if w.clock.Add(next).After(end) {
			w.clock = end
			return
		}
		w.clock = w.clock.Add(max(next, 1))
	}
}

func (w *world) show() string {
	var b strings.Builder
	for i, name := range w.names {
		if i > 0 {
			b.WriteString(" ")
		}
		fmt.Fprintf(&b, "%s:%d", name, w.live[name].InFlight())
	}
	st := w.ctl.Stats()
	fmt.Fprintf(&b, " | %d wait, %d bytes", st.Requests, st.Bytes)
	for _, band := range st.Bands {
		fmt.Fprintf(&b, " | band %d: %d", band.Priority, band.Requests)
	}
	for _, e := range st.Evictions {
		fmt.Fprintf(&b, " | in flight %d: %d, %d asked, %d evicted, %d missed", e.Priority, e.Evictable, e.Asked, e.Replied+e.Reset, e.Missed)
	}
	return b.String()
}
