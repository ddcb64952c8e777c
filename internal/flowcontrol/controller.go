package flowcontrol

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

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
	room     *Room
	options  Options
	patience int64                    // evictPatience, but in tests
	granted  func(w *Waiter, i int32) // of tests, under the room's mutex; else nil

	waiting  atomic.Int64 // written under the room's mutex
	evicting atomic.Bool  // written under the room's mutex

	// protected by the room's mutex
	config    Config
	lanes     map[[2]string]*lane // by model and subset, those with requests
	bands     []*band             // the highest priority first
	bytes     int64
	seen      map[*pool.Live]*since
	staleAt   int64 // when a reading becomes stale, 0 for none
	rooms     []int64
	flowStats map[string]*FlowStats
	flights   []*flights         // the lowest priority first
	asked     []*Flight          // to end, and still there
	askedAt   [evictAtOnce]int64 // when the last ones were asked
	changes   uint64             // after which somebody else may be asked
}

// NewController returns a controller of a pool. It holds no request before the
// first Apply.
func (r *Room) NewController(options Options) *Controller {
	c := &Controller{
		room: r, options: options, patience: evictPatience, lanes: make(map[[2]string]*lane),
		seen: make(map[*pool.Live]*since), flowStats: make(map[string]*FlowStats),
	}
	for i := range c.askedAt {
		c.askedAt[i] = -evictPatience
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

func (c *Controller) bandLocked(priority int, now int64) *band {
	i, found := slices.BinarySearchFunc(c.bands, priority, func(b *band, p int) int { return p - b.priority })
	if found {
		return c.bands[i]
	}
	b := &band{priority: priority, flows: make(map[string]*flow), lanes: make(map[*lane]*bandLane), waiters: line{kind: inBand}, since: now}
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
		w.sub.in.since = now
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
	if b.lanes[ln] == nil {
		c.lookAgainLocked() // its endpoints' next slots go to another band
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
	was := ln.empty
	if ln.empty = len(ln.index) == 0; was && !ln.empty {
		c.filledLocked(ln)
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
	next = min(next, c.evictLocked(now, woken))
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
