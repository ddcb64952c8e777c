package flowcontrol

import (
	"time"
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
	// Eviction lets sheddable requests in flight be ended for what waits in higher
	// bands.
	Eviction bool
	// FlowLabels bounds the flows that have statistics of their own.
	FlowLabels int
	// Priorities are those that have statistics before their first request.
	Priorities []int
}

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
	c.evicting.Store(config.Enabled && config.Eviction)
	c.lookAgainLocked()
	for _, b := range c.bands {
		b.limit, b.ttl = c.bandConfigLocked(b.priority)
	}
	if !config.Enabled {
		for _, b := range c.bands {
			for b.waiters.first != nil {
				woken.add(b.waiters.first.request, Granted, nil)
				c.room.removeLocked(b.waiters.first, Granted)
			}
		}
	} else if rebuild {
		c.rebuildLocked()
	}
}

// Enabled reports whether the newest configuration lets requests wait.
func (c *Controller) Enabled() bool {
	c.room.mu.Lock()
	defer c.room.mu.Unlock()
	return c.config.Enabled
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
		for b.waiters.first != nil {
			w := b.waiters.first
			all = append(all, w)
			ln, f := w.sub.lane, w.flow
			b.removeLocked(w, false)
			w.sub, w.flow = &sub{lane: ln}, f // what it is put back by
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
			b.addLocked(c.turnOfLocked(b, w.flow), ln, c.config.Order, w, c.room.now())
		}
	}
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
