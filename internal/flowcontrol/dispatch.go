package flowcontrol

import (
	"slices"

	"github.com/shuntproxy/shunt/internal/pool"
)

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
// holds a slot on, which is at position held, unless that is doubted since.
func (c *Controller) Open(snap *pool.Snapshot, candidates []int32, hold *pool.Live, into []int32) (open []int32, held int32) {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	view := c.config.Detector.View(snap, c.room.clock())
	held = -1
	for _, i := range candidates {
		if snap.Live(i) == hold && !view.Doubted(i) {
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
		c.refresh(ln, snap)
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
	c.lookAgainLocked()
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
			for w := s.waiters.first; w != nil; w = w.links[inSub].next {
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
