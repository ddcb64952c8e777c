package metricsync

import (
	"net/netip"
	"sync/atomic"
	"time"
)

// DurationBounds are the upper bounds of Stats.Durations, in seconds. The last
// bucket of Durations has no bound.
var DurationBounds = [...]float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5}

// Stats counts since the Syncer's start. Counts never fall.
type Stats struct {
	// Scrapes by outcome, index Reason.
	Scrapes [numReasons]uint64
	// Durations counts scrapes by DurationBounds, not cumulative, and
	// DurationSum is their seconds.
	Durations   [len(DurationBounds) + 1]uint64
	DurationSum float64
	// Bytes read of metrics pages.
	Bytes uint64
	// Probes and ProbesFailed count connects and health requests.
	Probes, ProbesFailed uint64
	// Lists and ListsFailed count requests for the model list.
	Lists, ListsFailed uint64
	// Published counts snapshots; PublishSeconds is what building them took.
	Published      uint64
	PublishSeconds float64
	// Panics caught in our own goroutines.
	Panics uint64
}

// EndpointStats is the scrape state of one endpoint.
type EndpointStats struct {
	Addr netip.AddrPort
	Pod  string
	// LastGood is when metrics were last read, zero for never.
	LastGood time.Time
	// LastError is the last failure, and LastErrorAt its time; "" for none.
	// It is kept after a success: compare the times.
	LastError   string
	LastReason  Reason
	LastErrorAt time.Time
	// Failures in a row.
	Failures int
	// LastDuration and LastBytes of the newest scrape.
	LastDuration time.Duration
	LastBytes    int64
}

// Reasons lists every outcome of a scrape.
func Reasons() []Reason {
	all := make([]Reason, numReasons)
	for i := range all {
		all[i] = Reason(i)
	}
	return all
}

// counters are written by any goroutine of a Syncer.
type counters struct {
	scrapes                  [numReasons]atomic.Uint64
	durations                [len(DurationBounds) + 1]atomic.Uint64
	nanos, publishNanos      atomic.Int64
	bytes, published, panics atomic.Uint64
	probes, probesFailed     atomic.Uint64
	listsAsked, listsFailed  atomic.Uint64
}

func (c *counters) scraped(s *scrape) {
	c.scrapes[s.reason].Add(1)
	c.bytes.Add(uint64(s.bytes))
	c.nanos.Add(int64(s.took))
	i := 0
	for i < len(DurationBounds) && s.took.Seconds() > DurationBounds[i] {
		i++
	}
	c.durations[i].Add(1)
}

func (c *counters) stats() Stats {
	out := Stats{
		DurationSum: time.Duration(c.nanos.Load()).Seconds(), Bytes: c.bytes.Load(),
		Probes: c.probes.Load(), ProbesFailed: c.probesFailed.Load(),
		Lists: c.listsAsked.Load(), ListsFailed: c.listsFailed.Load(),
		Published: c.published.Load(), PublishSeconds: time.Duration(c.publishNanos.Load()).Seconds(),
		Panics: c.panics.Load(),
	}
	for i := range c.scrapes {
		out.Scrapes[i] = c.scrapes[i].Load()
	}
	for i := range c.durations {
		out.Durations[i] = c.durations[i].Load()
	}
	return out
}
