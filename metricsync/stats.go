package metricsync

import (
	"net/netip"
	"sync/atomic"
	"time"
)

// Stats counts since the Syncer's start. Counts never fall.
type Stats struct {
	// Scrapes by outcome, index Reason.
	Scrapes [numReasons]uint64
	// Bytes read of metrics pages.
	Bytes uint64
	// Probes are connects and health requests, and Lists requests for the model
	// list; of those that have no list for us too.
	Probes, Lists Outcomes
	// Published counts snapshots; PublishSeconds is what building them took.
	Published      uint64
	PublishSeconds float64
	// Panics caught in our own goroutines.
	Panics uint64
}

// Outcomes counts what was asked by how it ended.
type Outcomes struct{ OK, Failed uint64 }

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
	publishNanos             atomic.Int64
	bytes, published, panics atomic.Uint64
	probes, lists            outcomes
}

type outcomes struct{ ok, failed atomic.Uint64 }

func (o *outcomes) count(err error) {
	if err != nil {
		o.failed.Add(1)
	} else {
		o.ok.Add(1)
	}
}

func (o *outcomes) load() Outcomes { return Outcomes{OK: o.ok.Load(), Failed: o.failed.Load()} }

func (c *counters) scraped(s *scrape) {
	c.scrapes[s.reason].Add(1)
	c.bytes.Add(uint64(s.bytes))
}

func (c *counters) stats() Stats {
	out := Stats{
		Bytes: c.bytes.Load(), Probes: c.probes.load(), Lists: c.lists.load(),
		Published: c.published.Load(), PublishSeconds: time.Duration(c.publishNanos.Load()).Seconds(),
		Panics: c.panics.Load(),
	}
	for i := range c.scrapes {
		out.Scrapes[i] = c.scrapes[i].Load()
	}
	return out
}
