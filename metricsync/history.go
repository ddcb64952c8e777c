package metricsync

import (
	"math"
	"slices"
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
	blank  bool    // now has no buckets, those before a reset being useless
	now    point   // the newest page
	// p95 are percentiles of the first of trackedBuckets, as of the newest page with
	// buckets.
	p95 [2]float64
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
// buckets is false where the page's were passed over.
func (h *history) observe(r *reading, buckets bool, taken time.Time) {
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
		if d != nil && !d.recorder {
			next.sums[i], next.counts[i] = d.sum, d.count
			reset = reset || d.count < before
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
	if buckets || reset {
		h.observeBuckets(r)
		h.blank = !buckets
	}
	if h.n == 0 || taken.Sub(h.points[h.at].taken) >= historyStep {
		h.keep()
	}
	if buckets || reset {
		for i := range h.p95 {
			h.p95[i] = h.percentile(trackedHistograms[i], 0.95)
		}
	}
}

// due reports whether the next page's buckets are wanted: they are as many as all
// else together, and of the percentiles of a minute nobody asks more often.
func (h *history) due(now time.Time) bool {
	return h.n == 0 || h.blank || now.Sub(h.points[h.at].taken) >= historyStep
}

func (h *history) observeBuckets(r *reading) {
	for i, m := range trackedHistograms[:trackedBuckets] {
		h.now.bounds[i], h.now.buckets[i] = nil, h.now.buckets[i][:0]
		if d := r.of(m); d != nil && !d.recorder {
			h.now.bounds[i] = d.bounds
			h.now.buckets[i] = append(h.now.buckets[i], d.counts...)
		}
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
// window, or of all time where it had none; NaN where there never was one.
func (h *history) percentile(m metric, q float64) float64 {
	i := trackedAt(trackedHistograms[:], m)
	if i < 0 || i >= trackedBuckets || len(h.now.buckets[i]) == 0 {
		return math.NaN()
	}
	all, bounds := h.now.buckets[i], h.now.bounds[i]
	var room [64]float64
	counts := room[:0]
	if base := h.base(); base != nil && slices.Equal(base.bounds[i], bounds) {
		for j, c := range all {
			counts = append(counts, c-base.buckets[i][j])
		}
	}
	if n := len(counts); n == 0 || !(counts[n-1] > 0) {
		counts = all
	}
	return percentile(bounds, counts, counts[len(counts)-1], q)
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
