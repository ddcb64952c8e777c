package metricsync

import (
	"math"
	"slices"
)

// distribution is what a histogram says, or brpc's LatencyRecorder, which has
// the mean and three percentiles of a recent window instead of buckets. What is
// absent is NaN.
type distribution struct {
	sum, count float64
	// bounds ascend, and counts are cumulative, as in the page.
	bounds, counts []float64

	recorder      bool
	average       float64
	p80, p90, p99 float64
}

// mean returns the mean of all observations, NaN if there is none.
func (d *distribution) mean() float64 {
	if d.recorder {
		return d.average
	}
	if d.count > 0 {
		return counted(d.sum / d.count)
	}
	return math.NaN()
}

// percentile returns an estimate of the value that the share q of all
// observations does not exceed, NaN if it can't. It is that of Prometheus's
// histogram_quantile: linear within a bucket whose lower bound is the bound
// before, or 0; the last finite bound where it is in the bucket without one.
func (d *distribution) percentile(q float64) float64 {
	if d.recorder {
		switch q {
		case 0.8:
			return d.p80
		case 0.9:
			return d.p90
		case 0.99:
			return d.p99
		}
		return math.NaN()
	}
	return percentile(d.bounds, d.counts, d.count, q)
}

func percentile(bounds, counts []float64, count, q float64) float64 {
	n := len(bounds)
	if n == 0 {
		return math.NaN()
	}
	total := counts[n-1]
	if count > total { // a page without +Inf
		total = count
	}
	if !(total > 0) {
		return math.NaN()
	}
	rank := q * total
	i := 0
	for i < n && counts[i] < rank {
		i++
	}
	switch {
	case i == n || math.IsInf(bounds[i], 1):
		if i = slices.IndexFunc(bounds, func(b float64) bool { return math.IsInf(b, 1) }); i < 0 {
			i = n
		}
		if i == 0 {
			return math.NaN()
		}
		return bounds[i-1]
	case i == 0 && bounds[0] <= 0:
		return bounds[0]
	}
	low, below := 0.0, 0.0
	if i > 0 {
		low, below = bounds[i-1], counts[i-1]
	}
	in := counts[i] - below
	if in <= 0 {
		return bounds[i]
	}
	return low + (bounds[i]-low)*(rank-below)/in
}

// gather makes d the sum of the series that are chosen.
func (d *distribution) gather(l *layout, chosen []*series) {
	*d = distribution{sum: math.NaN(), count: math.NaN(), counts: d.counts[:0]}
	var has uint16
	for _, s := range chosen {
		d.sum = plus(d.sum, s, partSum)
		d.count = plus(d.count, s, partCount)
		has |= s.has
	}
	d.sum, d.count = counted(d.sum), counted(d.count)
	if has&(1<<partBucket) == 0 { // passed over, or there are none
		return
	}
	d.bounds = l.bounds
	seen, ordered := 0, slices.IsSorted(l.bounds)
	for i := range l.bounds {
		total := -1.0
		for _, s := range chosen {
			if i < len(s.counts) && s.counts[i] >= 0 {
				total = max(total, 0) + s.counts[i]
			}
		}
		if math.IsInf(total, 1) {
			total = math.MaxFloat64
		}
		if total >= 0 {
			seen++
		}
		d.counts = append(d.counts, total)
	}
	if seen < len(l.bounds) || !ordered {
		d.tidy()
	}
	for i := 1; i < len(d.counts); i++ { // series of different bounds
		d.counts[i] = max(d.counts[i], d.counts[i-1])
	}
}

// counted returns NaN for what nothing that is counted adds up to: what is below
// 0, and infinity.
func counted(v float64) float64 {
	if v < 0 || math.IsInf(v, 1) {
		return math.NaN()
	}
	return v
}

// plus adds a part of a series, NaN being nothing yet.
func plus(total float64, s *series, p part) float64 {
	switch {
	case s.has&(1<<p) == 0:
		return total
	case math.IsNaN(total):
		return s.values[p]
	default:
		return total + s.values[p]
	}
}

// tidy sorts the buckets and drops those that this page does not have. Bounds
// are shared, so these are new.
func (d *distribution) tidy() {
	type bucket struct{ bound, count float64 }
	var all []bucket
	for i, c := range d.counts {
		if c >= 0 {
			all = append(all, bucket{d.bounds[i], c})
		}
	}
	slices.SortFunc(all, func(a, b bucket) int {
		switch {
		case a.bound < b.bound:
			return -1
		case a.bound > b.bound:
			return 1
		}
		return 0
	})
	d.bounds, d.counts = nil, d.counts[:0]
	for _, b := range all {
		if n := len(d.bounds); n > 0 && d.bounds[n-1] == b.bound { // 1 and 1.0
			d.counts[n-1] += b.count
			continue
		}
		d.bounds, d.counts = append(d.bounds, b.bound), append(d.counts, b.count)
	}
}

// record makes d what the gauges of a LatencyRecorder say.
func (d *distribution) record(s *series, unit float64) {
	at := func(p part, unit float64) float64 {
		if s.has&(1<<p) == 0 {
			return math.NaN()
		}
		return counted(s.values[p] * unit)
	}
	*d = distribution{
		recorder: true, sum: math.NaN(), count: at(partCount, 1), average: at(partMean, unit),
		p80: at(part80, unit), p90: at(part90, unit), p99: at(part99, unit), counts: d.counts[:0],
	}
}
