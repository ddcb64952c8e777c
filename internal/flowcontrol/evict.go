package flowcontrol

import (
	"cmp"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Eviction takes slots back: while requests wait for endpoints on which nothing
// comes free, sheddable requests in flight there are asked to end. This file
// keeps who is in flight and decides who is asked; nobody waits for an answer.

const (
	// evictPatience is how long nothing may come free for what waits before a
	// request is asked to end, and how long until the next ones are.
	evictPatience = int64(500 * time.Millisecond)
	// evictAtOnce bounds those of a pool that are asked within evictPatience, and
	// those that were asked and are still there.
	evictAtOnce = 2
	// evictConfirm is how long one that was asked is waited for.
	evictConfirm = int64(10 * time.Second)
)

// Victim is a request in flight that may be asked to end. Evict is called at
// most once, from any goroutine, with no lock held, perhaps after Land; it must
// not block.
type Victim interface {
	Evict()
}

// Flight is a sheddable request in flight, from Fly to Land. Its fields are
// protected by the Room's mutex.
type Flight struct {
	victim     Victim
	of         *flights // of its priority
	live       *pool.Live
	asked      int64 // when it was asked to end, -1 for not
	prev, next *Flight
}

// flights are those of one priority, in the order in which they were sent.
type flights struct {
	stats       EvictionStats
	first, last *Flight
}

// Landing is how a flight ended.
type Landing uint8

// The landings.
const (
	// Finished means by itself, or by its client.
	Finished Landing = iota
	// EvictedReply means by eviction, before the headers of a response.
	EvictedReply
	// EvictedReset means by eviction, after them.
	EvictedReset
)

// EvictionStats is what eviction did to one priority.
type EvictionStats struct {
	Priority int
	// Evictable requests are in flight now, and Asked of them were asked to end.
	Evictable, Asked int
	// Replied and Reset is how many were ended, before and after the headers of a
	// response; Missed is how many ended by themselves after they were asked.
	Replied, Reset, Missed uint64
}

// Evicting reports whether the newest configuration has eviction on.
func (c *Controller) Evicting() bool { return c.evicting.Load() }

// Fly notes a request of a priority below 0 that was sent to an endpoint and
// may be asked to end. Land has to follow.
func (c *Controller) Fly(victim Victim, priority int, live *pool.Live) *Flight {
	r := c.room
	r.mu.Lock()
	defer r.mu.Unlock()
	i, found := slices.BinarySearchFunc(c.flights, priority, func(fs *flights, p int) int { return cmp.Compare(fs.stats.Priority, p) })
	if !found {
		c.flights = slices.Insert(c.flights, i, &flights{stats: EvictionStats{Priority: priority}})
	}
	fs := c.flights[i]
	f := &Flight{victim: victim, of: fs, live: live, asked: -1, prev: fs.last}
	if f.prev == nil {
		fs.first = f
	} else {
		f.prev.next = f
	}
	fs.last = f
	fs.stats.Evictable++
	c.lookAgainLocked()
	return f
}

// Moved tells that another endpoint serves a flight.
func (c *Controller) Moved(f *Flight, live *pool.Live) {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	f.live = live
	c.lookAgainLocked()
}

// Land ends a flight. It comes before Released.
func (c *Controller) Land(f *Flight, how Landing) {
	r := c.room
	r.mu.Lock()
	defer r.mu.Unlock()
	fs, st := f.of, &f.of.stats
	if f.prev == nil {
		fs.first = f.next
	} else {
		f.prev.next = f.next
	}
	if f.next == nil {
		fs.last = f.prev
	} else {
		f.next.prev = f.prev
	}
	st.Evictable--
	if f.asked < 0 {
		return
	}
	st.Asked--
	c.asked = slices.DeleteFunc(c.asked, func(x *Flight) bool { return x == f })
	switch how {
	case EvictedReply:
		st.Replied++
	case EvictedReset:
		st.Reset++
	default:
		st.Missed++
	}
	if known := c.seen[f.live]; known != nil {
		known.landed = r.clock()
	}
	c.lookAgainLocked()
}

// lookAgainLocked lets the room's goroutine decide anew, where a change may
// have made someone evictable.
func (c *Controller) lookAgainLocked() {
	c.changes++
	if c.config.Eviction && c.waiting.Load() > 0 && c.flying() {
		c.room.earlier()
	}
}

func (c *Controller) flying() bool {
	return slices.ContainsFunc(c.flights, func(fs *flights) bool { return fs.first != nil })
}

// evictLocked asks those to end whose time it is, and returns when there may be
// more to do, provided that nothing changes before.
func (c *Controller) evictLocked(now int64, woken *wakes) (next int64) {
	next = now + int64(idle)
	if !c.config.Eviction || c.waiting.Load() == 0 || !c.flying() {
		return next
	}
	c.asked = slices.DeleteFunc(c.asked, func(f *Flight) bool { return now >= f.asked+evictConfirm })
	snap := c.options.Snapshot()
	d := deciding{c: c, snap: snap, view: c.config.Detector.View(snap, c.room.clock()), taken: make([]bool, len(snap.Endpoints)), next: next}
	for _, b := range c.bands {
		d.band(b, now, woken)
	}
	for _, f := range c.asked {
		d.next = min(d.next, f.asked+evictConfirm)
	}
	for _, at := range c.askedAt {
		if at += c.patience; at > now {
			d.next = min(d.next, at)
		}
	}
	return d.next
}

// deciding is one look at who waits and who is in flight.
type deciding struct {
	c     *Controller
	snap  *pool.Snapshot
	view  View
	taken []bool // endpoints, by position, whose next slot goes to a higher band
	next  int64  // when something else will have waited long enough
}

// band asks for what one band waits for.
func (d *deciding) band(b *band, now int64, woken *wakes) {
	for _, in := range b.list {
		d.c.refresh(in.lane, d.snap)
		if in.since+d.c.patience <= now && in.futile != d.c.changes {
			d.lane(b.priority, in, now, woken)
		}
		if at := in.since + d.c.patience; at > now {
			d.next = min(d.next, at)
		}
	}
	for _, in := range b.list {
		for _, i := range in.lane.index {
			d.taken[i] = true
		}
	}
}

// lane asks for those that wait for one set of endpoints, and have nobody there
// who was asked already.
func (d *deciding) lane(priority int, in *bandLane, now int64, woken *wakes) {
	missing := 0
	for _, s := range in.subs {
		missing += s.length
	}
	for _, f := range d.c.asked {
		if slices.ContainsFunc(in.lane.index, func(i int32) bool { return d.snap.Endpoints[i].Live == f.live }) {
			missing--
		}
	}
	missing = min(missing, evictAtOnce-len(d.c.asked), d.c.mayAsk(now))
	if missing <= 0 {
		return
	}
	useful := make(map[*pool.Live]bool)
	for _, i := range in.lane.index {
		if !d.taken[i] && d.helps(i) {
			useful[d.snap.Endpoints[i].Live] = true
		}
	}
	for ; missing > 0; missing-- {
		f := d.victim(priority, useful)
		if f == nil {
			if in.since != now {
				in.futile = d.c.changes
			}
			return
		}
		f.asked = now
		f.of.stats.Asked++
		copy(d.c.askedAt[:], d.c.askedAt[1:])
		d.c.askedAt[evictAtOnce-1] = now
		d.c.asked = append(d.c.asked, f)
		in.since = now
		woken.evict(f.victim)
	}
}

// mayAsk is how many may be asked now, for those that were asked lately.
func (c *Controller) mayAsk(now int64) int {
	n := evictAtOnce
	for _, at := range c.askedAt {
		if now < at+c.patience {
			n--
		}
	}
	return n
}

// victim is the newest flight of the lowest priority, below one, on one of some
// endpoints.
func (d *deciding) victim(priority int, useful map[*pool.Live]bool) *Flight {
	for _, fs := range d.c.flights {
		if fs.stats.Priority >= priority {
			return nil
		}
		for f := fs.last; f != nil; f = f.prev {
			if f.asked < 0 && useful[f.live] {
				return f
			}
		}
	}
	return nil
}

// helps reports whether a request that ends at a position makes room there that
// is not there yet. By utilization, the engine has to say so: one that is not
// full takes more with its next reading, and what the last eviction brought is
// known with it.
func (d *deciding) helps(i int32) bool {
	if !d.view.Full(i, 0) || d.view.Doubted(i) {
		return false
	}
	if d.view.d.Saturation != Utilization || d.view.Unknown(i) {
		return true
	}
	known := d.c.seen[d.snap.Endpoints[i].Live]
	return known == nil || d.snap.Metrics(i).Taken.After(known.landed)
}
