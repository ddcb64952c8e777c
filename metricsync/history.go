package metricsync

import (
	"math"
	"time"
)

const (
	// historySpan is the window of rates, means and percentiles: what they say is
	// of the last one to one and a sixth of it.
	historySpan = time.Minute
	// historyStep is the least time between two points that are kept.
	historyStep = 10 * time.Second
	// historyPoints cover the span, and one before it to begin from.
	historyPoints = int(historySpan/historyStep) + 2
)

// trackedCounters and trackedHistograms are what a history follows, and
// trackedBuckets the histograms of which it keeps buckets too.
var (
	trackedCounters = [...]metric{
		promptTokens, generationTokens, requestSuccess, numPreemptions, prefixCacheQueries, prefixCacheHits,
	}
	trackedHistograms = [...]metric{
		timeToFirstToken, interTokenLatency, e2eLatency, queueTime,
		prefillTime, decodeTime, inferenceTime, requestPromptTokens, requestGenerationTokens,
	}
)

const trackedBuckets = 4 // the first of trackedHistograms

// history is what one endpoint's counters were over the last minute. It belongs
// to the loop that scrapes the endpoint.
type history struct {
	points [historyPoints]point // ring; at is the newest, n how many
	at, n  int
	start  float64 // of the engine's process, 0 for unknown
	now    point   // the newest page
}

// point is one page's counters; NaN where absent.
type point struct {
	taken    time.Time
	counters [len(trackedCounters)]float64
	sums     [len(trackedHistograms)]float64
	counts   [len(trackedHistograms)]float64
	// bounds are shared with the layout of the parser, which never changes them.
	bounds  [trackedBuckets][]float64
	buckets [trackedBuckets][]float64
}

// observe takes in a page. What is lower than before, or a process that started
// anew, is a reset: then the window begins anew. What the counters gained since
// the engine's start is not taken for a gain, since one of several ranks may have
// restarted while the sum of all is large.
func (h *history) observe(r *reading, taken time.Time) {
	next := &h.now
	reset := false
	for i, m := range trackedCounters {
		v := math.NaN()
		if x, ok := r.get(m); ok {
			v = x
		}
		reset = reset || v < next.counters[i]
		next.counters[i] = v
	}
	for i, m := range trackedHistograms {
		before := next.counts[i]
		next.sums[i], next.counts[i] = math.NaN(), math.NaN()
		d := r.of(m)
		if d == nil || d.recorder {
			if i < trackedBuckets {
				next.bounds[i], next.buckets[i] = nil, next.buckets[i][:0]
			}
			continue
		}
		next.sums[i], next.counts[i] = d.sum, d.count
		reset = reset || d.count < before
		if i < trackedBuckets {
			next.bounds[i] = d.bounds
			next.buckets[i] = append(next.buckets[i][:0], d.counts...)
		}
	}
	if start, ok := r.get(processStart); ok {
		reset = reset || h.start != 0 && start != h.start
		h.start = start
	}
	next.taken = taken
	if reset {
		h.n = 0
	}
	if h.n == 0 || taken.Sub(h.points[h.at].taken) >= historyStep {
		h.keep()
	}
}

// keep makes a point of the newest page.
func (h *history) keep() {
	if h.n > 0 {
		h.at = (h.at + 1) % historyPoints
	}
	h.n = min(h.n+1, historyPoints)
	p := &h.points[h.at]
	kept := p.buckets
	*p = h.now
	for i := range p.buckets {
		p.buckets[i] = append(kept[i][:0], h.now.buckets[i]...)
	}
}

// base is the point from which the window runs: the newest that is a whole span
// old, else the oldest. It is nil if there is none before the newest page.
func (h *history) base() *point {
	var base *point
	for i := h.n - 1; i >= 0; i-- { // from the oldest on
		p := &h.points[(h.at-i+historyPoints)%historyPoints]
		if base != nil && h.now.taken.Sub(p.taken) < historySpan {
			break
		}
		base = p
	}
	if base == nil || !h.now.taken.After(base.taken) {
		return nil
	}
	return base
}

// rate returns what a counter gained a second over the window, NaN if that is
// not known.
func (h *history) rate(m metric) float64 {
	base := h.base()
	i := trackedAt(trackedCounters[:], m)
	if base == nil || i < 0 {
		return math.NaN()
	}
	return (h.now.counters[i] - base.counters[i]) / h.now.taken.Sub(base.taken).Seconds()
}

// mean returns the mean of the observations within the window, NaN if there was
// none.
func (h *history) mean(m metric) float64 {
	base := h.base()
	i := trackedAt(trackedHistograms[:], m)
	if base == nil || i < 0 {
		return math.NaN()
	}
	n := h.now.counts[i] - base.counts[i]
	if !(n > 0) {
		return math.NaN()
	}
	return (h.now.sums[i] - base.sums[i]) / n
}

// percentile returns distribution.percentile of the observations within the
// window, NaN if there was none.
func (h *history) percentile(m metric, q float64) float64 {
	base := h.base()
	i := trackedAt(trackedHistograms[:], m)
	if base == nil || i < 0 || i >= trackedBuckets || len(h.now.buckets[i]) != len(base.buckets[i]) {
		return math.NaN()
	}
	n := h.now.counts[i] - base.counts[i]
	if !(n > 0) {
		return math.NaN()
	}
	var room [64]float64
	counts := room[:0]
	for j, c := range h.now.buckets[i] {
		if h.now.bounds[i][j] != base.bounds[i][j] {
			return math.NaN()
		}
		counts = append(counts, c-base.buckets[i][j])
	}
	return percentile(h.now.bounds[i], counts, n, q)
}

// hitRate returns the share of looked up tokens that were in the prefix cache,
// within the window, NaN if nothing was looked up.
func (h *history) hitRate() float64 {
	queries, hits := h.rate(prefixCacheQueries), h.rate(prefixCacheHits)
	if !(queries > 0) {
		return math.NaN()
	}
	return min(hits/queries, 1)
}

func trackedAt(all []metric, m metric) int {
	for i := range all {
		if all[i] == m {
			return i
		}
	}
	return -1
}
