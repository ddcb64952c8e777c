package metricsync

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// adapters are the LoRA adapters of the newest info, and their texts as written:
// pages have the same ones again and again.
type adapters struct {
	running, waiting         []string
	runningText, waitingText string
}

// adapters returns those of a page; last is what the page before had.
func (r *reading) adapters(last adapters) adapters {
	running, waiting := r.texts[runningLoRA], r.texts[waitingLoRA]
	if r.states[runningLoRA] != present {
		running = nil
	}
	if r.states[waitingLoRA] != present {
		waiting = nil
	}
	if string(running) != last.runningText {
		last.runningText, last.running = string(running), splitAdapters(string(running))
	}
	if string(waiting) != last.waitingText {
		last.waitingText, last.waiting = string(waiting), splitAdapters(string(waiting))
	}
	return last
}

// maxAdapters of one label are read; engines run a few tens at a time.
const maxAdapters = 1024

// splitAdapters returns the names in a label of adapters.
func splitAdapters(raw string) []string {
	if strings.IndexByte(raw, '\\') >= 0 {
		raw = string(unescape(nil, []byte(raw)))
	}
	var names []string
	for name := range strings.SplitSeq(raw, ",") {
		if len(names) == maxAdapters {
			break
		}
		if name = strings.TrimSpace(name); name != "" && len(name) <= maxName && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// asleep reports whether the engine says that a rank of it is not awake.
func (r *reading) asleep() bool {
	v, ok := r.get(engineSleepState)
	return ok && v == 0
}

// columns makes the metrics that policies read of a page and what was before it.
// h may be nil: then means are of all time, and there are no rates.
func (p *parser) columns(h *history, a adapters, taken time.Time) *pool.Metrics {
	r := &p.reading
	out := &pool.Metrics{Taken: taken, LoRA: pool.LoRA{Running: a.running, Waiting: a.waiting}}
	fill(&out.Values, r, h)
	out.LoRA.Max = whole(r, maxLoRA)
	out.BlockSize, out.NumBlocks = whole(r, blockSize), whole(r, numBlocks)
	if len(p.models) > 1 {
		for i, name := range p.models {
			r.reduce(&p.page, i)
			one := pool.ModelMetrics{Model: name}
			if strings.IndexByte(name, '\\') >= 0 {
				one.Model = string(unescape(nil, []byte(name)))
			}
			fill(&one.Values, r, nil)
			out.Models = append(out.Models, one)
		}
		r.reduce(&p.page, anyModel)
	}
	return out
}

// whole returns a metric that counts things, 0 where it is absent.
func whole(r *reading, m metric) int {
	if v, ok := r.get(m); ok && v > 0 && v < math.MaxInt32 {
		return int(v)
	}
	return 0
}

func fill(v *pool.Values, r *reading, h *history) {
	for _, c := range [...]struct {
		to   pool.Metric
		from metric
	}{
		{pool.NumRequestsRunning, numRequestsRunning}, {pool.NumRequestsWaiting, numRequestsWaiting},
		{pool.KVCacheUsagePerc, kvCacheUsage}, {pool.EngineUtilization, engineUtilization},
	} {
		switch r.states[c.from] {
		case present:
			v.Set(c.to, r.values[c.from])
		case notNumber:
			v.Set(c.to, math.NaN())
		}
	}
	for _, c := range [...]struct {
		to   pool.Metric
		from metric
	}{
		{pool.RequestQueueTime, queueTime}, {pool.RequestPrefillTime, prefillTime}, {pool.RequestDecodeTime, decodeTime},
		{pool.TimeToFirstToken, timeToFirstToken}, {pool.InterTokenLatency, interTokenLatency},
		{pool.PromptTokensPerRequest, requestPromptTokens}, {pool.GenerationTokensPerRequest, requestGenerationTokens},
	} {
		if d := r.of(c.from); d != nil {
			recent := math.NaN()
			if h != nil {
				recent = h.mean(c.from)
			}
			setKnown(v, c.to, recent, d.mean())
		}
	}
	for i, to := range [...]pool.Metric{pool.TimeToFirstTokenP95, pool.InterTokenLatencyP95} {
		if d := r.of(trackedHistograms[i]); d != nil {
			p95 := d.percentile(0.95)
			if h != nil {
				p95 = h.p95[i]
			}
			setKnown(v, to, p95)
		}
	}
	recent := math.NaN()
	if h != nil {
		setKnown(v, pool.PromptTokenRate, h.rate(promptTokens))
		setKnown(v, pool.GenerationTokenRate, h.rate(generationTokens))
		setKnown(v, pool.RequestRate, h.rate(requestSuccess))
		if r.derivedHitRate {
			recent = h.hitRate()
		}
	}
	if rate, ok := r.get(kvCacheHitRate); ok {
		setKnown(v, pool.KVCacheHitRate, recent, rate)
	}
}

// setKnown sets the first that is a finite number and not below 0, if one is: a
// sum that fell while its count rose makes a mean that is.
func setKnown(v *pool.Values, m pool.Metric, from ...float64) {
	for _, x := range from {
		if x >= 0 && !math.IsInf(x, 0) {
			v.Set(m, x)
			return
		}
	}
}
