package scorer

import (
	"math"

	"github.com/shuntproxy/shunt/internal/pool"
)

// leastRequest counts the requests of this process in flight: the same on every
// engine, and never stale.
func (w *pick) leastRequest() {
	for k := range w.raw {
		w.raw[k] = float64(w.flight[k])
	}
}

// powerOfTwo scores two different candidates, drawn by lot, by their requests
// in flight (Mitzenmacher 2001).
func (w *pick) powerOfTwo(seed uint64) {
	for k := range w.raw {
		w.raw[k] = none
	}
	n := len(w.cand)
	first := below(mix(seed), n)
	w.raw[first] = float64(w.flight[first])
	if n > 1 {
		second := below(mix(mix(seed)), n-1)
		if second >= first {
			second++
		}
		w.raw[second] = float64(w.flight[second])
	}
}

// loadBalance is AIBrix's load-balance:
//
//	(running + queuedWeight·queued) / capacity × (1 + kvPressureAlpha·(1−kvFree)²)
//
// and infinite below kvCriticalFree. Capacity is the output-token rate; unknown
// ones are the mean of those known, 1 if none is. A missing reading of the KV
// cache is fully free. Equals go to the most free KV cache.
func (w *pick) loadBalance(pt *part) {
	queuedWeight, alpha, critical := pt.p[0], pt.p[1], pt.p[2]
	sum, known := 0.0, 0
	for k := range w.raw {
		rate := w.live(k).OutputRate()
		w.raw[k] = rate
		if rate > 0 {
			sum += rate
			known++
		}
	}
	mean := 1.0
	if known > 0 {
		mean = sum / float64(known)
	}
	s, model := w.in.Snapshot, w.in.Request.Model
	usage := s.ReadingsFor(model, pool.KVCacheUsagePerc, w.in.Now)
	var queued pool.Readings
	if queuedWeight > 0 {
		queued = s.ReadingsFor(model, pool.NumRequestsWaiting, w.in.Now)
	}
	w.tie = resize(w.tie, len(w.cand))
	for k, i := range w.cand {
		capacity := w.raw[k]
		if capacity <= 0 {
			capacity = mean
		}
		requests := float64(w.flight[k])
		if queuedWeight > 0 {
			if v, ok := queued.At(i); ok { // an engine without the metric sees zero
				requests += queuedWeight * v
			}
		}
		used, ok := usage.At(i)
		if !ok {
			used = 0
		}
		used = min(1, max(0, used))
		w.tie[k] = used
		w.raw[k] = requests / capacity * (1 + alpha*used*used)
		if used > 1-critical {
			w.raw[k] = math.Inf(1)
		}
	}
}

// leastLoad takes the least normalised load.
func (w *pick) leastLoad() {
	for k := range w.raw {
		w.raw[k] = w.live(k).Cost()
	}
}

// packLoad takes the fullest endpoint on which the request still fits, so that
// others stay free for what is larger or can be switched off. Where it fits on
// none it takes the emptiest and says so.
func (w *pick) packLoad() {
	fits := false
	for k, i := range w.cand {
		load := w.live(k).Cost()
		w.raw[k] = none
		if load+w.in.Costs.of(&w.in.Request, w.in.Snapshot, i) <= 1 {
			w.raw[k] = -load
			fits = true
		}
	}
	if w.full = !fits; w.full {
		w.leastLoad()
	}
}

// leastLatency is AIBrix's least-latency: the mean time in the queue, and the
// mean times of prefill and decode, both per token of that endpoint's mean
// request times the tokens of the mean request of all.
func (w *pick) leastLatency() {
	s, model, now := w.in.Snapshot, w.in.Request.Model, w.in.Now
	w.a, w.b, w.c, w.slow = resize(w.a, len(w.cand)), resize(w.b, len(w.cand)), resize(w.c, len(w.cand)), resize(w.slow, len(w.cand))
	prompt, output, decode, queue := w.a, w.b, w.c, w.slow
	s.Queried(pool.AvgPromptToksPerReq, model, now).Fill(prompt, w.cand)
	s.Queried(pool.AvgGenerationToksPerReq, model, now).Fill(output, w.cand)
	s.ReadingsFor(model, pool.RequestPrefillTime, now).Fill(w.raw, w.cand)
	s.ReadingsFor(model, pool.RequestDecodeTime, now).Fill(decode, w.cand)
	s.ReadingsFor(model, pool.RequestQueueTime, now).Fill(queue, w.cand)
	meanPrompt, meanOutput := meanOr(prompt, 10), meanOr(output, 100)
	for k, prefill := range w.raw { // NaN where one is missing
		if prompt[k] > 0 && output[k] > 0 {
			w.raw[k] = prefill/prompt[k]*meanPrompt + decode[k]/output[k]*meanOutput + queue[k]
		} else {
			w.raw[k] = none
		}
	}
}

// meanOr is the mean of the readings above 0, or the default.
func meanOr(readings []float64, otherwise float64) float64 {
	sum, n := 0.0, 0
	for _, v := range readings {
		if v > 0 {
			sum += v
			n++
		}
	}
	if n == 0 {
		return otherwise
	}
	return sum / float64(n)
}

// throughput is AIBrix's throughput: the fewest weighted tokens per request, a
// token of the prompt counting twice.
func (w *pick) throughput() {
	s, model, now := w.in.Snapshot, w.in.Request.Model, w.in.Now
	w.a = resize(w.a, len(w.cand))
	s.Queried(pool.AvgPromptToksPerReq, model, now).Fill(w.a, w.cand)
	s.Queried(pool.AvgGenerationToksPerReq, model, now).Fill(w.raw, w.cand)
	for k := range w.raw { // NaN where one is missing
		w.raw[k] += 2 * w.a[k]
	}
}
