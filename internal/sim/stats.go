package sim

import "slices"

// Bounds are the upper bounds of the histograms an engine exports, without +Inf, ascending.
type Bounds struct {
	TTFT       []float64 // seconds
	TokenTime  []float64 // seconds, inter-token latency and time per output token
	Latency    []float64 // seconds, of whole requests and of their phases
	Tokens     []float64 // tokens per request
	Iteration  []float64 // tokens per engine step
	ParamsN    []float64
	Preemption []float64 // preemptions per request
}

// Histogram counts observations per bucket; not cumulative, the last bucket is +Inf.
type Histogram struct {
	Bounds []float64
	Counts []uint64
	Sum    float64
	N      uint64
}

func newHistogram(bounds []float64) Histogram {
	return Histogram{Bounds: bounds, Counts: make([]uint64, len(bounds)+1)}
}

func (h *Histogram) observe(v float64) {
	i := 0
	for i < len(h.Bounds) && v > h.Bounds[i] {
		i++
	}
	h.Counts[i]++
	h.Sum += v
	h.N++
}

func (h *Histogram) clone() Histogram {
	c := *h
	c.Counts = slices.Clone(h.Counts)
	return c
}

// Reason says why a sequence ended.
type Reason uint8

// The values vLLM exports as finished_reason; a model only produces the first three.
const (
	Stop Reason = iota
	Length
	Aborted
	Failed
	Repetition
	reasons
)

// String is the reason as vLLM spells it in finish_reason and in its metrics.
func (r Reason) String() string {
	return [...]string{"stop", "length", "abort", "error", "repetition"}[r]
}

// Stats are a model's counters since its start. Times are seconds of model time.
type Stats struct {
	PromptTokens     uint64 // prompt tokens of admitted requests, cached ones included
	CachedTokens     uint64 // those of them that the prefix cache had
	GenerationTokens uint64
	PrefixQueries    uint64 // tokens looked up in the prefix cache
	PrefixHits       uint64 // tokens found there
	Preemptions      uint64
	Steps            uint64
	Finished         [reasons]uint64

	RequestPrompt     Histogram
	RequestGeneration Histogram
	RequestMaxGen     Histogram
	RequestParamsN    Histogram
	RequestParamsMax  Histogram
	RequestComputed   Histogram // prompt tokens not taken from the cache
	RequestPreempted  Histogram
	IterationTokens   Histogram
	TTFT              Histogram
	InterToken        Histogram
	PerOutputToken    Histogram
	E2E               Histogram
	Queue             Histogram
	Inference         Histogram
	Prefill           Histogram
	Decode            Histogram
}

func newStats(b Bounds) Stats {
	return Stats{
		RequestPrompt:     newHistogram(b.Tokens),
		RequestGeneration: newHistogram(b.Tokens),
		RequestMaxGen:     newHistogram(b.Tokens),
		RequestParamsN:    newHistogram(b.ParamsN),
		RequestParamsMax:  newHistogram(b.Tokens),
		RequestComputed:   newHistogram(b.Tokens),
		RequestPreempted:  newHistogram(b.Preemption),
		IterationTokens:   newHistogram(b.Iteration),
		TTFT:              newHistogram(b.TTFT),
		InterToken:        newHistogram(b.TokenTime),
		PerOutputToken:    newHistogram(b.TokenTime),
		E2E:               newHistogram(b.Latency),
		Queue:             newHistogram(b.Latency),
		Inference:         newHistogram(b.Latency),
		Prefill:           newHistogram(b.Latency),
		Decode:            newHistogram(b.Latency),
	}
}

func (s *Stats) clone() Stats {
	c := *s
	for _, h := range []*Histogram{
		&c.RequestPrompt, &c.RequestGeneration, &c.RequestMaxGen, &c.RequestParamsN, &c.RequestParamsMax,
		&c.RequestComputed, &c.RequestPreempted, &c.IterationTokens, &c.TTFT, &c.InterToken, &c.PerOutputToken,
		&c.E2E, &c.Queue, &c.Inference, &c.Prefill, &c.Decode,
	} {
		*h = h.clone()
	}
	return c
}
