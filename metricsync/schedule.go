package metricsync

import (
	"hash/fnv"
	"net/netip"
	"time"
)

const (
	// minInterval is the floor of Config.Interval.
	minInterval = 50 * time.Millisecond
	// slots is how many moments of an interval the scrapes of a pool are spread
	// over: those of one moment share the cost of waking an idle process, which is
	// more than that of a scrape (BenchmarkSync), and one snapshot (readingsGap).
	slots = 20
	// probeGap is the least time between two probes of one endpoint, however
	// many requests fail to connect.
	probeGap = 20 * time.Millisecond
	// probeDelay is the least time from the first of these to a probe. The kernel
	// closes what a dying process has open one after another, most often the
	// listener last: who connects at the first reset still can.
	probeDelay = 10 * time.Millisecond
	// listEvery is how often a ready endpoint is asked for its models, spread over
	// a pool by phase, and listRetry how long after an answer that was none.
	listEvery = 30 * time.Second
	listRetry = 5 * time.Second
)

// phase is an endpoint's fixed offset into each interval, so that the scrapes
// of a pool are spread and stay so over restarts.
func phase(addr netip.AddrPort) uint64 {
	h := fnv.New64a()
	b, _ := addr.MarshalBinary() // never fails
	h.Write(b)
	return h.Sum64()
}

// nextScrape returns when the next scrape is due, as time since the pool's
// start. now is such a time too; failures counts those in a row.
func nextScrape(now time.Duration, cfg *Config, phase uint64, failures int) time.Duration {
	interval, wait := cfg.Interval, cfg.Interval
	for range failures {
		if wait >= cfg.MaxBackOff {
			break
		}
		wait = min(2*wait, cfg.MaxBackOff)
	}
	offset := time.Duration(0)
	if spread := cfg.spread(); spread > 0 {
		offset = time.Duration(phase % uint64(spread))
		offset -= offset % max(spread/slots, 1)
	}
	// The first instant of the grid after now, and as many more as back-off asks.
	tick := now - (now-offset)%interval
	if tick <= now {
		tick += interval
	}
	return tick + (max(wait, interval)-interval)/interval*interval
}

// probeState is what decides when the serving port is probed next.
type probeState struct {
	last   time.Time // zero before the first
	failed bool      // the last probe did
	asked  time.Time // since when a fault, or scrapes that began to fail, ask for one; zero for not
	ready  bool      // as the writer sees it
	blind  bool      // scrapes fail, or there are none
}

// nextProbe returns when the next probe is due; ok is false if none is.
func nextProbe(s probeState, cfg *Config) (at time.Time, ok bool) {
	switch {
	case s.last.IsZero():
		return s.last, true
	case !s.asked.IsZero():
		at = s.last.Add(probeGap)
		if settled := s.asked.Add(probeDelay); settled.After(at) {
			at = settled
		}
		return at, true
	case cfg.Health.Path != "":
		return s.last.Add(cfg.Health.Interval), true
	case !s.ready || s.blind || s.failed:
		return s.last.Add(cfg.Interval), true
	default:
		return time.Time{}, false
	}
}

// listState is what decides when the model list is asked for next.
type listState struct {
	last   time.Time // zero before the first since it became ready
	failed bool
	asked  bool
	ready  bool
}

// nextList returns when the model list is due; ok is false if it is not. origin is
// the pool's start.
func nextList(s listState, cfg *Config, origin time.Time, phase uint64) (at time.Time, ok bool) {
	switch {
	case !cfg.Discover || !s.ready:
		return time.Time{}, false
	case s.last.IsZero() || s.asked:
		return time.Time{}, true
	case s.failed:
		return s.last.Add(listRetry), true
	default:
		// On the grid, so that endpoints that came up at one moment are not asked at
		// one moment for ever.
		last, offset := s.last.Sub(origin), time.Duration(phase%uint64(listEvery))
		next := last - (last-offset)%listEvery
		if next <= last {
			next += listEvery
		}
		return origin.Add(next), true
	}
}
