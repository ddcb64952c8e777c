// Package scorer ranks endpoints: pure functions from a request, one snapshot,
// the time and a seed to a choice and its reason. It is the in-process
// counterpart of the AIBrix routing policies, whose names it keeps.
package scorer

import (
	"fmt"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Policy is how endpoints are ranked. The zero value is not valid; Parse makes
// one.
type Policy uint8

// The policies, by their configuration names.
const (
	Random       Policy = iota + 1 // random
	LeastRequest                   // least-request
	LeastKVCache                   // least-kv-cache
)

// Names returns the valid policy names, in the order of the documentation.
func Names() []string { return []string{"random", "least-request", "least-kv-cache"} }

// String returns the configuration name.
func (p Policy) String() string {
	if p == 0 || int(p) > len(Names()) {
		return "unknown"
	}
	return Names()[p-1]
}

// Parse reads a policy name.
func Parse(name string) (Policy, error) {
	switch name {
	case "random":
		return Random, nil
	case "least-request":
		return LeastRequest, nil
	case "least-kv-cache":
		return LeastKVCache, nil
	default:
		return 0, fmt.Errorf("unknown policy %q, valid: %s", name, strings.Join(Names(), ", "))
	}
}

// Choice is what a policy picked, and why.
type Choice struct {
	// Index is a position in Snapshot.Endpoints.
	Index int32
	// Fallback is true where the policy could score no candidate and the pick
	// is random.
	Fallback bool
	// Reservation is what PickAndReserve took of the winner's live load.
	Reservation pool.Reservation
	// seen is the winner's in-flight count at the time it won.
	seen int64
}

// Pick chooses among candidates, which may not be empty. Equals are broken at
// random by seed; the same arguments and live load give the same choice.
func (p Policy) Pick(s *pool.Snapshot, candidates []int32, now time.Time, seed uint64) Choice {
	switch p {
	case LeastRequest:
		return leastRequest(s, candidates, seed)
	case LeastKVCache:
		return leastMetric(s, candidates, pool.KVCacheUsagePerc, now, seed)
	default:
		return random(s, candidates, seed, false)
	}
}

// maxTries bounds how often a pick is redone because another worker took the
// winner's slot in between. Each retry means that some other pick succeeded.
const maxTries = 8

// PickAndReserve picks an endpoint and takes a slot of its live load in the
// same step: a winner whose load another worker has changed meanwhile is picked
// anew, so that a burst over many workers spreads as evenly as over one. The
// caller releases the slot once.
func (p Policy) PickAndReserve(s *pool.Snapshot, candidates []int32, now time.Time, seed uint64) Choice {
	if p != LeastRequest { // the other rankings do not read what a reservation changes
		c := p.Pick(s, candidates, now, seed)
		c.Reservation = s.Endpoints[c.Index].Live.Reserve(pool.Load{}, now)
		return c
	}
	var c Choice
	for range maxTries {
		c = p.Pick(s, candidates, now, seed)
		if held, ok := s.Endpoints[c.Index].Live.TryReserve(c.seen, pool.Load{}, now); ok {
			c.Reservation = held
			return c
		}
		seed = mix(seed)
	}
	c.Reservation = s.Endpoints[c.Index].Live.Reserve(pool.Load{}, now)
	return c
}

func random(s *pool.Snapshot, candidates []int32, seed uint64, fallback bool) Choice {
	i := candidates[below(mix(seed), len(candidates))]
	return Choice{Index: i, Fallback: fallback, seen: s.Endpoints[i].Live.InFlight()}
}

// leastRequest takes the endpoint with the fewest requests of this process in
// flight: the same on every engine, and never stale.
func leastRequest(s *pool.Snapshot, candidates []int32, seed uint64) Choice {
	best, ties := Choice{Index: -1}, 0
	for _, i := range candidates {
		n := s.Endpoints[i].Live.InFlight()
		switch {
		case best.Index < 0 || n < best.seen:
			best, ties = Choice{Index: i, seen: n}, 1
		case n == best.seen:
			ties++
			if seed = mix(seed); below(seed, ties) == 0 {
				best.Index = i
			}
		}
	}
	return best
}

// leastMetric takes the smallest fresh reading of an engine metric. Endpoints
// without one are skipped; without any, the pick is random.
func leastMetric(s *pool.Snapshot, candidates []int32, m pool.Metric, now time.Time, seed uint64) Choice {
	best, ties, lowest := int32(-1), 0, 0.0
	readings := s.Readings(m, now)
	for _, i := range candidates {
		v, ok := readings.At(i)
		if !ok {
			continue
		}
		switch {
		case best < 0 || v < lowest:
			best, lowest, ties = i, v, 1
		case v == lowest:
			ties++
			if seed = mix(seed); below(seed, ties) == 0 {
				best = i
			}
		}
	}
	if best < 0 {
		return random(s, candidates, seed, true)
	}
	return Choice{Index: best, seen: s.Endpoints[best].Live.InFlight()}
}

// mix is the output function of SplitMix64 (Steele, Lea, Flood 2014): one
// random word makes as many as a pick needs.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// below maps a random word to [0, n) by multiplication (Lemire 2019). Its bias
// is n/2^32.
func below(x uint64, n int) int { return int(uint64(uint32(x)) * uint64(n) >> 32) }
