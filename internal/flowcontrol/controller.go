package flowcontrol

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Limit bounds requests that wait. 0 is no bound.
type Limit struct {
	Requests int
	Bytes    int64
}

func (l Limit) over(requests int, bytes int64) bool {
	return l.Requests > 0 && requests > l.Requests || l.Bytes > 0 && bytes > l.Bytes
}

// BandConfig is what differs for one priority. The zero values are the
// controller's own.
type BandConfig struct {
	Priority int
	Limit    Limit
	TTL      time.Duration
}

// Config is a controller's configuration. It is not written to once it was
// handed over.
type Config struct {
	// Enabled is false where no request waits.
	Enabled  bool
	Detector Detector
	Fairness Fairness
	Order    Order
	// Weights are those of flows, by fairness id; 1 where there is none.
	Weights map[string]float64
	// TTL is how long a request waits at the most.
	TTL time.Duration
	// EmptyPoolTTL is the same for one that came while no endpoint served it. 0
	// refuses such requests.
	EmptyPoolTTL time.Duration
	// Flow, Band and Total bound a flow, a band and all that wait here.
	Flow, Band, Total Limit
	// Bands are what differs for single priorities.
	Bands []BandConfig
	// Displace lets a request over Total take the place of the youngest of the
	// lowest band below its own.
	Displace bool
	// FlowLabels bounds the flows that have statistics of their own.
	FlowLabels int
}

// Options are what a Controller needs of the pool it belongs to.
type Options struct {
	// Snapshot returns the newest snapshot.
	Snapshot func() *pool.Snapshot
	// Candidates returns the positions of the endpoints that may serve a request
	// for a model ("" for none) with a subset hint ("" for none), ascending.
	Candidates func(s *pool.Snapshot, model, subset string) []int32
}

// Controller is the flow control of one pool. All methods may be called from
// any goroutine.
type Controller struct {
	// immutable
	room    *Room
	options Options
	granted func(w *Waiter, i int32) // of tests, under the room's mutex; else nil

	waiting atomic.Int64 // written under the room's mutex

	// protected by the room's mutex
	config    Config
	lanes     map[[2]string]*lane // by model and subset, those with requests
	bands     []*band             // the highest priority first
	bytes     int64
	seen      map[*pool.Live]*since
	staleAt   int64 // when a reading becomes stale, 0 for none
	rooms     []int64
	flowStats map[string]*FlowStats
}

// NewController returns a controller of a pool. It holds no request before the
// first Apply.
func (r *Room) NewController(options Options) *Controller {
	c := &Controller{
		room: r, options: options, lanes: make(map[[2]string]*lane),
		seen: make(map[*pool.Live]*since), flowStats: make(map[string]*FlowStats),
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.controllers = append(r.controllers, c)
	return c
}

// Close forgets the controller. What waits there stays until its time is over.
func (c *Controller) Close() { c.room.forget(c) }

// Waiting is the number of requests that wait. It takes no lock.
func (c *Controller) Waiting() int64 { return c.waiting.Load() }

// Apply changes the configuration. What waits keeps its place, its time to live
// and its arrival; if waiting is switched off, it is woken.
func (c *Controller) Apply(config Config) {
	woken := newWakes()
	defer woken.free()
	c.apply(config, woken)
	woken.wake()
	c.Changed()
}

func (c *Controller) apply(config Config, woken *wakes) {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	rebuild := config.Fairness != c.config.Fairness || config.Order != c.config.Order || !sameWeights(config.Weights, c.config.Weights)
	c.config = config
	for _, b := range c.bands {
		b.limit, b.ttl = c.bandConfigLocked(b.priority)
	}
	if !config.Enabled {
		for _, b := range c.bands {
			for b.oldest != nil {
				woken.add(b.oldest.request, Granted, nil)
				c.room.removeLocked(b.oldest, Granted)
			}
		}
	} else if rebuild {
		c.rebuildLocked()
	}
}

// Detector is what endpoints are judged by now.
func (c *Controller) Detector() Detector {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	return c.config.Detector
}

func sameWeights(a, b map[string]float64) bool {
	if len(a) != len(b) {
		return false
	}
	for name, w := range a {
		if v, ok := b[name]; !ok || v != w {
			return false
		}
	}
	return true
}

// rebuildLocked sorts what waits by a new fairness or order.
func (c *Controller) rebuildLocked() {
	for _, b := range c.bands {
		var all []*Waiter
		for b.oldest != nil {
			w := b.oldest
			all = append(all, w)
			ln, f := w.sub.lane, w.flow
			b.removeLocked(w, false)
			w.sub, w.flow = &sub{lane: ln}, f // what it is put back by
			w.prev, w.next, w.older, w.younger = nil, nil, nil, nil
		}
		b.round, b.turn, b.line = 0, 0, nil
		b.flows = make(map[string]*flow)
		for _, w := range all {
			w.urgency = 0
			if c.config.Order == EDF {
				w.urgency = w.goal
			}
			ln := w.sub.lane
			w.flow = c.flowLocked(b, w.flow.name)
			b.addLocked(c.turnOfLocked(b, w.flow), ln, c.config.Order, w)
		}
	}
}

// Ask describes a request that would wait.
type Ask struct {
	Model, Subset string
	// Flow is the fairness id and Priority the band.
	Flow     string
	Priority int
	// Bytes is what the request holds while it waits, and Cost its uncached prompt
	// tokens; less than 1 counts as 1.
	Bytes, Cost int64
	// TTL shortens the configured one, and TTFT is the goal that order edf goes
	// by. 0 is none.
	TTL, TTFT time.Duration
}

// Result is what Enter decided.
type Result uint8

// The results.
const (
	// Pass means that there is room, and nobody waits for it: pick.
	Pass Result = iota
	// Queued means that the request waits, and will be woken.
	Queued
	// Over means that a limit is reached.
	Over
	// Empty means that no endpoint serves the request, and it may not wait for one.
	Empty
	// Closing means that the process is shutting down.
	Closing
)

// Enter puts a request in line, unless there is room at once. It may be woken
// before Enter returns. w must not be in a queue; one that has waited here
// before gets its old place. drain is how long the band needs to serve what
// waits in it, where the result is Over.
func (c *Controller) Enter(w *Waiter, request Wakeable, ask *Ask) (result Result, drain time.Duration) {
	woken := newWakes()
	defer woken.free()
	result, drain = c.enter(w, request, ask, woken)
	woken.wake() // what was displaced
	return result, drain
}

func (c *Controller) enter(w *Waiter, request Wakeable, ask *Ask, woken *wakes) (Result, time.Duration) {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	result, drain := c.enterLocked(w, request, ask, woken)
	if result == Queued && w.index == 0 {
		c.room.earlier()
	}
	return result, drain
}

func (c *Controller) enterLocked(w *Waiter, request Wakeable, ask *Ask, woken *wakes) (Result, time.Duration) {
	r := c.room
	switch {
	case r.draining.Load():
		return Closing, 0
	case !c.config.Enabled:
		return Pass, 0
	}
	// Counted before it looks: whoever makes room after the look sees that someone
	// waits, and has to wait for the lock.
	c.waiting.Add(1)
	queued := false
	defer func() {
		if !queued {
			c.waiting.Add(-1)
		}
	}()
	snap := c.options.Snapshot()
	clock := r.clock()
	now := int64(clock.Sub(r.epoch))
	ln := c.lanes[[2]string{ask.Model, ask.Subset}]
	if ln == nil {
		ln = &lane{controller: c, model: ask.Model, subset: ask.Subset}
	}
	c.refresh(ln, snap)
	again := w.seq != 0
	if ln.waiting == 0 {
		view := c.config.Detector.View(snap, clock)
		if ln.empty && c.config.EmptyPoolTTL == 0 && !again {
			return Empty, 0
		}
		if view.Any(ln.index) {
			return Pass, 0
		}
	} else if ln.empty && c.config.EmptyPoolTTL == 0 && !again {
		return Empty, 0
	}
	b := c.bandLocked(ask.Priority, now)
	if !again && !c.fitsLocked(b, ask, woken) {
		b.stats.Refused++
		c.statsOfLocked(ask.Flow).Dropped++
		return Over, b.drainTime(now)
	}
	queued = true
	if again {
		w.deadline = w.normal
	} else {
		r.seq++
		w.seq, w.arrival = r.seq, now
		w.normal = now + int64(c.ttl(b, ask.TTL, c.config.TTL))
		w.deadline = w.normal
		if ln.empty {
			w.deadline = now + int64(c.ttl(nil, ask.TTL, c.config.EmptyPoolTTL))
		}
		b.stats.Queued++
	}
	w.request, w.bytes, w.cost = request, ask.Bytes, max(1, ask.Cost)
	w.goal = w.normal
	if ask.TTFT > 0 {
		w.goal = w.arrival + int64(ask.TTFT)
	}
	if c.config.Order == EDF {
		w.urgency = w.goal
	}
	w.flow = c.flowLocked(b, ask.Flow)
	if !again {
		w.flow.stats.Queued++
	}
	w.flow.stats.Waiting++
	c.lanes[[2]string{ask.Model, ask.Subset}] = ln
	b.addLocked(c.turnOfLocked(b, w.flow), ln, c.config.Order, w)
	c.bytes += w.bytes
	r.bytes += w.bytes
	r.byDeadline.push(w)
	c.watchLocked(snap, now)
	return Queued, 0
}

// ttl is the shortest of what is set.
func (c *Controller) ttl(b *band, asked, configured time.Duration) time.Duration {
	if b != nil && b.ttl > 0 {
		configured = min(configured, time.Duration(b.ttl))
	}
	if asked > 0 {
		configured = min(configured, asked)
	}
	return configured
}

// fitsLocked reports whether a request may wait, and makes room for it if it
// may take the place of others.
func (c *Controller) fitsLocked(b *band, ask *Ask, woken *wakes) bool {
	f := b.flows[ask.Flow]
	if f != nil && c.config.Flow.over(f.requests+1, f.bytes+ask.Bytes) || f == nil && c.config.Flow.over(1, ask.Bytes) ||
		b.limit.over(b.requests+1, b.bytes+ask.Bytes) {
		return false
	}
	over := func() bool {
		return c.config.Total.over(int(c.waiting.Load()), c.bytes+ask.Bytes) || c.room.bytes+ask.Bytes > c.room.maxBytes
	}
	if !over() {
		return true
	}
	if !c.config.Displace {
		return false
	}
	// What the bands below hold has to be enough, or some are displaced in vain.
	requests, bytes := 0, int64(0)
	for _, low := range c.bands {
		if low.priority < b.priority {
			requests += low.requests
			bytes += low.bytes
		}
	}
	if c.config.Total.over(int(c.waiting.Load())-requests, c.bytes+ask.Bytes-bytes) || c.room.bytes+ask.Bytes-bytes > c.room.maxBytes {
		return false
	}
	for i := len(c.bands) - 1; i >= 0 && over(); i-- {
		for low := c.bands[i]; low.priority < b.priority && low.youngest != nil && over(); {
			woken.add(low.youngest.request, Displaced, nil)
			c.room.removeLocked(low.youngest, Displaced)
		}
	}
	return true
}

func (c *Controller) bandConfigLocked(priority int) (Limit, int64) {
	limit, ttl := c.config.Band, int64(0)
	for _, b := range c.config.Bands {
		if b.Priority != priority {
			continue
		}
		if b.Limit.Requests > 0 {
			limit.Requests = b.Limit.Requests
		}
		if b.Limit.Bytes > 0 {
			limit.Bytes = b.Limit.Bytes
		}
		ttl = int64(b.TTL)
	}
	return limit, ttl
}

func (c *Controller) bandLocked(priority int, now int64) *band {
	i, found := slices.BinarySearchFunc(c.bands, priority, func(b *band, p int) int { return p - b.priority })
	if found {
		return c.bands[i]
	}
	b := &band{priority: priority, flows: make(map[string]*flow), lanes: make(map[*lane]*bandLane), since: now}
	b.stats.Priority = priority
	b.limit, b.ttl = c.bandConfigLocked(priority)
	c.bands = slices.Insert(c.bands, i, b)
	return b
}

func (c *Controller) flowLocked(b *band, name string) *flow {
	f := b.flows[name]
	if f == nil {
		f = b.newFlow(name, c.shareLocked(name), c.config.Fairness != Weighted)
		f.stats = c.statsOfLocked(name)
		b.flows[f.name] = f
	}
	return f
}

func (c *Controller) shareLocked(name string) int64 {
	if c.config.Fairness != Weighted {
		return 1
	}
	weight, ok := c.config.Weights[name]
	if !ok {
		weight = 1
	}
	return max(1, int64(weight*quantum))
}

// turnOfLocked is the flow whose turn a request of f takes.
func (c *Controller) turnOfLocked(b *band, f *flow) *flow {
	if c.config.Fairness != GlobalFCFS {
		return f
	}
	if b.line == nil {
		b.line = b.newFlow("", 1, true)
	}
	return b.line
}

// removeLocked is part of Room.removeLocked.
func (c *Controller) removeLocked(w *Waiter, o Outcome) {
	ln, b := w.sub.lane, w.flow.band
	now := c.room.now()
	served := o == Granted
	if served {
		w.sub.flow.served(w)
		b.pace.add(now)
	}
	f := w.flow
	b.removeLocked(w, served)
	c.bytes -= w.bytes
	c.waiting.Add(-1)
	if ln.waiting == 0 {
		delete(c.lanes, [2]string{ln.model, ln.subset})
	}
	if b.requests == 0 {
		b.since = now
	}
	f.stats.Waiting--
	waited := now - w.arrival
	f.stats.waited += waited
	switch o {
	case Granted:
		b.stats.Dispatched++
		f.stats.Dispatched++
	case 0:
		b.stats.Cancelled++
		f.stats.Dropped++
	case Displaced:
		b.stats.Displaced++
		f.stats.Dropped++
	case Drained:
		b.stats.Drained++
		f.stats.Dropped++
	default:
		b.stats.Expired++
		f.stats.Dropped++
	}
}

// refresh brings the candidates of a lane up to the snapshot.
func (c *Controller) refresh(ln *lane, snap *pool.Snapshot) {
	if ln.snapshot == snap.Seq+1 {
		return
	}
	ln.snapshot = snap.Seq + 1
	ln.index = c.options.Candidates(snap, ln.model, ln.subset)
	ln.empty = len(ln.index) == 0
}

// Changed sends what waits to endpoints that have room, after a snapshot or the
// configuration has changed.
func (c *Controller) Changed() {
	if c.waiting.Load() == 0 {
		return
	}
	woken := newWakes()
	defer woken.free()
	for c.dispatch(woken) {
		woken.wake()
	}
	woken.wake()
}

// dispatch reports whether there may be more to do.
func (c *Controller) dispatch(woken *wakes) bool {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	c.dispatchLocked(woken)
	return woken.full()
}

// Released sends what waits to an endpoint on which a request has ended. The
// caller has given its slot back.
func (c *Controller) Released(live *pool.Live) {
	if c.waiting.Load() == 0 {
		return
	}
	woken := newWakes()
	defer woken.free()
	for c.dispatchTo(live, woken) {
		woken.wake()
	}
	woken.wake()
}

func (c *Controller) dispatchTo(live *pool.Live, woken *wakes) bool {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	snap := c.options.Snapshot()
	i := c.find(snap, live)
	if i < 0 {
		return false
	}
	view := c.config.Detector.View(snap, c.room.clock())
	for room := view.room(i, c.sinceOf(snap, i)); room > 0 && !woken.full(); room-- {
		if !c.grantLocked(snap, i, woken) {
			return false
		}
	}
	return woken.full()
}

// Return gives back the slot that a grant came with.
func (c *Controller) Return(hold *pool.Live) {
	hold.Unhold()
	c.Released(hold)
}

// Open appends to into those of candidates that a granted request may be sent
// to: those with room beside the ones that others hold, and the endpoint that it
// holds a slot on, which is at position held.
func (c *Controller) Open(snap *pool.Snapshot, candidates []int32, hold *pool.Live, into []int32) (open []int32, held int32) {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	view := c.config.Detector.View(snap, c.room.clock())
	held = -1
	for _, i := range candidates {
		if snap.Live(i) == hold {
			held = i
		} else if view.room(i, c.sinceOf(snap, i)) <= 0 {
			continue
		}
		into = append(into, i)
	}
	return into, held
}

// dispatchLocked gives all endpoints with room one request each in turn, until
// there is no more room or nobody for it.
func (c *Controller) dispatchLocked(woken *wakes) {
	snap := c.options.Snapshot()
	clock := c.room.clock()
	view := c.config.Detector.View(snap, clock)
	for _, ln := range c.lanes {
		was := ln.empty
		if c.refresh(ln, snap); was && !ln.empty {
			c.filledLocked(ln)
		}
	}
	c.rooms = slices.Grow(c.rooms[:0], len(snap.Endpoints))[:len(snap.Endpoints)]
	left := 0
	for i := range snap.Endpoints {
		c.rooms[i] = max(0, view.room(int32(i), c.sinceOf(snap, int32(i))))
		if c.rooms[i] > 0 {
			left++
		}
	}
	for left > 0 && c.waiting.Load() > 0 && !woken.full() {
		for i := range c.rooms {
			if c.rooms[i] == 0 {
				continue
			}
			if woken.full() {
				return
			}
			c.rooms[i]--
			if !c.grantLocked(snap, int32(i), woken) {
				c.rooms[i] = 0
			}
			if c.rooms[i] == 0 {
				left--
			}
		}
	}
	c.watchLocked(snap, int64(clock.Sub(c.room.epoch)))
}

// filledLocked ends the time to live of an empty pool: an endpoint serves the
// lane now.
func (c *Controller) filledLocked(ln *lane) {
	for _, b := range c.bands {
		in := b.lanes[ln]
		if in == nil {
			continue
		}
		for _, s := range in.subs {
			for w := s.first; w != nil; w = w.next {
				c.rearmLocked(w)
			}
			for _, w := range s.heap {
				c.rearmLocked(w)
			}
		}
	}
	c.room.earlier()
}

func (c *Controller) rearmLocked(w *Waiter) {
	if w.deadline != w.normal {
		w.deadline = w.normal
		c.room.byDeadline.move(w)
	}
}

// grantLocked wakes the request that is next for the endpoint at a position, and
// reports whether there was one.
func (c *Controller) grantLocked(snap *pool.Snapshot, i int32, woken *wakes) bool {
	for _, b := range c.bands {
		var next *sub
		for _, in := range b.list {
			c.refresh(in.lane, snap)
			if _, ok := slices.BinarySearch(in.lane.index, i); ok && (next == nil || in.subs[0].before(next)) {
				next = in.subs[0]
			}
		}
		if next == nil {
			continue
		}
		w := next.head()
		if c.granted != nil {
			c.granted(w, i)
		}
		live := snap.Endpoints[i].Live
		live.Hold(c.room.clock())
		woken.add(w.request, Granted, live)
		c.room.removeLocked(w, Granted)
		return true
	}
	return false
}

// find returns the position of an endpoint, or -1.
func (c *Controller) find(snap *pool.Snapshot, live *pool.Live) int32 {
	known := c.seen[live]
	if known != nil && int(known.position) < len(snap.Endpoints) && snap.Endpoints[known.position].Live == live {
		return known.position
	}
	for i := range snap.Endpoints {
		if snap.Endpoints[i].Live == live {
			if known != nil {
				known.position = int32(i)
			}
			return int32(i)
		}
	}
	return -1
}

func (c *Controller) sinceOf(snap *pool.Snapshot, i int32) *since {
	live := snap.Endpoints[i].Live
	known := c.seen[live]
	if known == nil {
		if len(c.seen) > 2*len(snap.Endpoints)+8 {
			c.forgetGone(snap)
		}
		known = &since{position: i}
		c.seen[live] = known
	}
	return known
}

func (c *Controller) forgetGone(snap *pool.Snapshot) {
	kept := make(map[*pool.Live]*since, len(snap.Endpoints))
	for i := range snap.Endpoints {
		if known := c.seen[snap.Endpoints[i].Live]; known != nil {
			kept[snap.Endpoints[i].Live] = known
		}
	}
	c.seen = kept
}

// watchLocked finds when the next reading becomes stale: its endpoint is then
// judged by live load, and nothing else would tell.
func (c *Controller) watchLocked(snap *pool.Snapshot, now int64) {
	c.staleAt = 0
	if c.config.Detector.Saturation != Utilization {
		return
	}
	for i := range snap.Endpoints {
		m := snap.Metrics(int32(i))
		if m == nil {
			continue
		}
		if at := int64(m.Taken.Sub(c.room.epoch)+snap.StaleAfter) + 1; at > now && (c.staleAt == 0 || at < c.staleAt) {
			c.staleAt = at
		}
	}
	if c.staleAt != 0 && c.staleAt < c.room.wakeAt {
		c.room.earlier()
	}
}

// bandIdle is how long a band stays that has nobody in it.
const bandIdle = int64(5 * time.Minute)

// tickLocked does what is due and returns when there is more.
func (c *Controller) tickLocked(now int64, woken *wakes) (next int64) {
	next = now + int64(idle)
	c.bands = slices.DeleteFunc(c.bands, func(b *band) bool {
		if b.requests > 0 {
			return false
		}
		next = min(next, b.since+bandIdle)
		return now >= b.since+bandIdle
	})
	if c.waiting.Load() == 0 {
		return max(next, now)
	}
	if c.staleAt != 0 && c.staleAt <= now {
		c.dispatchLocked(woken)
	}
	if c.staleAt != 0 {
		next = min(next, c.staleAt)
	}
	return max(next, now)
}

// DrainTime is how long the band of a priority needs to serve what waits in it
// at its present pace.
func (c *Controller) DrainTime(priority int) time.Duration {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	for _, b := range c.bands {
		if b.priority == priority {
			return b.drainTime(c.room.now())
		}
	}
	return 0
}

// maxDrainTime is what a band that stands still is said to need.
const maxDrainTime = time.Hour

func (b *band) drainTime(now int64) time.Duration {
	if b.requests == 0 {
		return 0
	}
	rate := b.pace.per(now)
	if seconds := float64(b.requests) / rate; seconds < maxDrainTime.Seconds() {
		return time.Duration(seconds * 1e9)
	}
	return maxDrainTime
}
