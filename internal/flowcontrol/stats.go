package flowcontrol

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// BandStats is one band, now and since it was made.
type BandStats struct {
	Priority int
	// Requests and Flows wait now, and hold Bytes.
	Requests, Flows int
	Bytes           int64
	// Limit is what bounds them.
	Limit Limit
	// Oldest is how long the first of them has waited.
	Oldest time.Duration
	// Pace is how many requests a second are dispatched.
	Pace float64
	// Queued is how many have ever waited, and what became of them.
	Queued, Dispatched, Expired, Displaced, Drained, Cancelled uint64
	// Refused is how many were over a limit.
	Refused uint64
}

// FlowStats is one flow over all bands. The flows that come first have their
// own, up to Config.FlowLabels; the others share OtherFlows.
type FlowStats struct {
	Name string
	// Waiting is how many wait now.
	Waiting int
	// Queued is how many have ever waited; Dispatched and Dropped what became of
	// them.
	Queued, Dispatched, Dropped uint64
	// Waited is how long they have waited together.
	Waited time.Duration

	waited int64
}

// OtherFlows is the name of the flows without statistics of their own.
const OtherFlows = "other"

// Stats is what waits in a controller.
type Stats struct {
	Requests int
	Bytes    int64
	Bands    []BandStats
	Flows    []FlowStats
	// Evictions are by priority, the lowest first.
	Evictions []EvictionStats
}

// Stats returns what waits here: bands by priority, the highest first, and flows
// by name.
func (c *Controller) Stats() Stats {
	r := c.room
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	st := Stats{Requests: int(c.waiting.Load()), Bytes: c.bytes}
	for _, b := range c.bands {
		bs := b.stats
		bs.Requests, bs.Flows, bs.Bytes, bs.Limit, bs.Pace = b.requests, len(b.flows), b.bytes, b.limit, b.pace.per(now)
		if b.waiters.first != nil {
			bs.Oldest = time.Duration(now - b.waiters.first.arrival)
		}
		st.Bands = append(st.Bands, bs)
	}
	for _, fs := range c.flights {
		st.Evictions = append(st.Evictions, fs.stats)
	}
	c.expectedLocked(&st)
	for _, f := range c.flowStats {
		fs := *f
		fs.Waited = time.Duration(fs.waited)
		st.Flows = append(st.Flows, fs)
	}
	slices.SortFunc(st.Flows, func(a, b FlowStats) int { return cmp.Compare(a.Name, b.Name) })
	return st
}

// expectedLocked adds what is configured and has not happened yet.
func (c *Controller) expectedLocked(st *Stats) {
	if !c.config.Enabled {
		return
	}
	for _, priority := range c.config.Priorities {
		i, found := slices.BinarySearchFunc(st.Bands, priority, func(b BandStats, p int) int { return cmp.Compare(p, b.Priority) })
		if !found {
			limit, _ := c.bandConfigLocked(priority)
			st.Bands = slices.Insert(st.Bands, i, BandStats{Priority: priority, Limit: limit})
		}
		if priority >= 0 || !c.config.Eviction {
			continue
		}
		i, found = slices.BinarySearchFunc(st.Evictions, priority, func(e EvictionStats, p int) int { return cmp.Compare(e.Priority, p) })
		if !found {
			st.Evictions = slices.Insert(st.Evictions, i, EvictionStats{Priority: priority})
		}
	}
}

func (c *Controller) statsOfLocked(name string) *FlowStats {
	if s := c.flowStats[name]; s != nil {
		return s
	}
	if len(c.flowStats) >= c.config.FlowLabels {
		if name = OtherFlows; c.flowStats[name] != nil {
			return c.flowStats[name]
		}
	}
	s := &FlowStats{Name: strings.Clone(name)}
	c.flowStats[s.Name] = s
	return s
}
