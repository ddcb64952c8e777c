package flowcontrol

import (
	"slices"
	"time"
)

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
		if slices.ContainsFunc(ln.index, func(i int32) bool { return view.Open(i, 0) }) {
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
	}
	b.stats.Queued++ // again too: it counts as dispatched each time
	w.request, w.bytes, w.cost = request, ask.Bytes, max(1, ask.Cost)
	w.goal = w.normal
	if ask.TTFT > 0 {
		w.goal = w.arrival + int64(ask.TTFT)
	}
	if c.config.Order == EDF {
		w.urgency = w.goal
	}
	w.flow = c.flowLocked(b, ask.Flow)
	w.flow.stats.Queued++
	w.flow.stats.Waiting++
	c.lanes[[2]string{ask.Model, ask.Subset}] = ln
	b.addLocked(c.turnOfLocked(b, w.flow), ln, c.config.Order, w, now)
	c.bytes += w.bytes
	r.bytes += w.bytes
	r.byDeadline.push(w)
	c.watchLocked(snap, now)
	if c.config.Eviction && c.flying() {
		r.earlier()
	}
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
		for low := c.bands[i]; low.priority < b.priority && low.waiters.last != nil && over(); {
			woken.add(low.waiters.last.request, Displaced, nil)
			c.room.removeLocked(low.waiters.last, Displaced)
		}
	}
	return true
}
