package main

import (
	"math"
	"slices"
	"time"
)

// schedule gives the intended send times of an open loop: evenly spaced, whatever the answers do. A request that can't be
// sent in time (every connection waits) is sent late and its latency still counts from the intended time; so a stall
// costs all the requests that should have been sent meanwhile, not one (coordinated omission).
type schedule struct {
	rate float64 // per second, > 0
	next int64   // index of the request to send next
}

// due is the intended time of the next request, from the start of the run.
func (s *schedule) due() time.Duration {
	return time.Duration(float64(s.next) / s.rate * float64(time.Second))
}

// take returns the next intended time if it has come.
func (s *schedule) take(now time.Duration) (time.Duration, bool) {
	at := s.due()
	if at > now {
		return 0, false
	}
	s.next++
	return at, true
}

// window is the part of a run that counts, from and to as time since its start.
type window struct{ from, to time.Duration }

func (w window) has(t time.Duration) bool { return w.from <= t && t < w.to }

// percentile is the nearest-rank percentile q (0 < q ≤ 1) of sorted values, 0 if there are none.
func percentile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	// The small step down keeps 0.99·100, which is a little more than 99 in floating point, at rank 99.
	rank := int(math.Ceil(q*float64(len(sorted)) - 1e-9))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// median is the middle of values, the mean of the two middle ones if their number is even, NaN of none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	mid := len(s) / 2
	if len(s)%2 == 1 {
		return s[mid]
	}
	return (s[mid-1] + s[mid]) / 2
}

// sample is what one run of one case measured.
type sample struct {
	rps   float64 // answers within the window per second
	cpuUs float64 // CPU time of Envoy in the window per answer, µs
	p50Ms float64 // from the intended send time to the last byte of the answer, of a stream to the first of its body
	p99Ms float64
	// crossings are the calls between Envoy and the Go module, in both directions, per request. 0: not counted.
	crossings float64
}

// summarize turns the raw figures of a run into a sample. It sorts latencies.
func summarize(answers int, length, cpu time.Duration, latencies []time.Duration) sample {
	slices.Sort(latencies)
	s := sample{
		rps:   float64(answers) / length.Seconds(),
		p50Ms: percentile(latencies, 0.50).Seconds() * 1e3,
		p99Ms: percentile(latencies, 0.99).Seconds() * 1e3,
	}
	if answers > 0 {
		s.cpuUs = cpu.Seconds() * 1e6 / float64(answers)
	}
	return s
}
