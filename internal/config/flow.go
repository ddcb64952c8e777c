package config

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
)

// FlowControl lets requests wait while all endpoints that could serve them are
// full.
type FlowControl struct {
	// Enabled turns it on. Off, a request goes to an endpoint that may be full, but
	// one of negative priority is refused while all of its candidates are. Default:
	// false.
	Enabled bool `json:"enabled,omitempty" default:"false"`

	// Saturation is how an endpoint is judged full: utilization (by the engine's
	// queue and KV cache; without fresh metrics by live requests) or concurrency (by
	// the requests and tokens that this Envoy has in flight there). Default:
	// utilization.
	Saturation string `json:"saturation,omitempty" default:"utilization" jsonschema:"enum=utilization,enum=concurrency"`

	// QueueThreshold is the number of requests waiting in the engine at which an
	// endpoint is full, above 0 to 1000000. Default: 5.
	QueueThreshold float64 `json:"queueThreshold,omitempty" default:"5"`

	// KVThreshold is the share of the engine's KV cache in use at which an endpoint
	// is full, above 0 to 1. Default: 0.8.
	KVThreshold float64 `json:"kvThreshold,omitempty" default:"0.8"`

	// MaxConcurrency is the number of live requests at which an endpoint is full,
	// with concurrency, and for endpoints without fresh metrics. 1 to 1000000.
	// Default: 100.
	MaxConcurrency int `json:"maxConcurrency,omitempty" default:"100"`

	// MaxTokens is the number of prompt and output tokens of live requests at which
	// an endpoint is full, with concurrency. 0 is no bound. Default: 0.
	MaxTokens int `json:"maxTokens,omitempty" default:"0"`

	// TTL is how long a request waits at the most, 1ms to 1h. A band, an objective
	// and the header x-llm-d-inference-ttl can shorten it. Default: 60s.
	TTL time.Duration `json:"ttl,omitempty" default:"60s"`

	// EmptyPoolTTL is how long a request waits for an endpoint where none serves its
	// model, 0s to 1h. 0s refuses such requests at once. Default: 0s.
	EmptyPoolTTL time.Duration `json:"emptyPoolTTL,omitempty" default:"0s"`

	// Fairness is how the flows of a band share what is dispatched: round-robin (a
	// request each in turn), weighted (tokens in turn, by weight) or global-fcfs (one
	// line for all). Default: round-robin.
	Fairness string `json:"fairness,omitempty" default:"round-robin" jsonschema:"enum=round-robin,enum=weighted,enum=global-fcfs"`

	// Weights of flows, by fairness id, with fairness weighted; above 0 to 1000.
	// Default: 1 for each flow.
	Weights map[string]float64 `json:"weights,omitempty"`

	// Order of the requests of one flow: fcfs (first come, first served) or edf (the
	// earliest deadline first: arrival plus the goal for the first token, else plus
	// the time to live). Default: fcfs.
	Order string `json:"order,omitempty" default:"fcfs" jsonschema:"enum=fcfs,enum=edf"`

	// FlowRequests bounds the waiting requests of one flow in one band. 0 is no
	// bound. Default: 0.
	FlowRequests int `json:"flowRequests,omitempty" default:"0"`

	// FlowBytes bounds the bodies of those. 0 is no bound. Default: 0.
	FlowBytes Size `json:"flowBytes,omitempty" default:"0"`

	// BandRequests bounds the waiting requests of one band. 0 is no bound. Default:
	// 5000.
	BandRequests int `json:"bandRequests,omitempty" default:"5000"`

	// BandBytes bounds the bodies of those. 0 is no bound; limits.heldBodies bounds
	// all that waits in this Envoy. Default: 1GB.
	BandBytes Size `json:"bandBytes,omitempty" default:"1GB"`

	// MaxRequests bounds the waiting requests of a pool. 0 is no bound. Default: 0.
	MaxRequests int `json:"maxRequests,omitempty" default:"0"`

	// MaxBytes bounds the bodies of those. 0 is no bound. Default: 0.
	MaxBytes Size `json:"maxBytes,omitempty" default:"0"`

	// Displace lets a request over maxRequests, maxBytes or limits.heldBodies take
	// the place of the youngest request of the lowest band below its own, which gets
	// rejected-saturated. Default: false.
	Displace bool `json:"displace,omitempty" default:"false"`

	// Eviction lets requests of negative priority that engines work on be ended with
	// evicted, for requests of a higher priority that have waited for half a second
	// while nothing came free. Default: false.
	Eviction bool `json:"eviction,omitempty" default:"false"`

	// Bands are what differs for single priorities. Default: none.
	Bands []FlowBand `json:"bands,omitempty"`

	// FlowLabels bounds the fairness ids that have metrics of their own, 0 to 10000;
	// the rest is other. Default: 100.
	FlowLabels int `json:"flowLabels,omitempty" default:"100"`
}

// FlowBand is what differs for one priority.
type FlowBand struct {
	// Priority is the band's, -1000000 to 1000000. Required.
	Priority int `json:"priority"`

	// TTL shortens flowControl.ttl. Default: 0s, and it does not.
	TTL time.Duration `json:"ttl,omitempty" default:"0s"`

	// Requests replaces bandRequests. Default: 0, and it does not.
	Requests int `json:"requests,omitempty" default:"0"`

	// Bytes replaces bandBytes. Default: 0, and it does not.
	Bytes Size `json:"bytes,omitempty" default:"0"`
}

// Objective is what requests ask for by its name, in x-llm-d-inference-objective.
type Objective struct {
	// Name is what the header says. Required.
	Name string `json:"name"`

	// Priority is the band, -1000000 to 1000000: higher ones go first, and negative
	// ones are sheddable. Default: 0.
	Priority int `json:"priority,omitempty" default:"0"`

	// TTFTMs is the goal for the time to the first token, in milliseconds, 0 to
	// 86400000, unless the request has one: order edf goes by it, slo.admission and the
	// policy slo-headroom. 0 is none. Default: 0.
	TTFTMs float64 `json:"ttftMs,omitempty" default:"0"`

	// TPOTMs is the goal for the time from each token to the next, in milliseconds, 0
	// to 86400000, unless the request has one: slo.admission and the policy slo-headroom
	// go by it. 0 is none. Default: 0.
	TPOTMs float64 `json:"tpotMs,omitempty" default:"0"`

	// TTL shortens how long a request may wait. Default: 0s, and it does not.
	TTL time.Duration `json:"ttl,omitempty" default:"0s"`
}

// SLO is what goals for the latency do beside what policies make of them.
type SLO struct {
	// Admission compares the goals of a request, in x-llm-d-slo-ttft-ms and
	// x-llm-d-slo-tpot-ms or else of its objective, with what is predicted of each
	// candidate. Those that would miss a goal are left out while others would not; where
	// all would, a request of negative priority is refused with rejected-saturated. What
	// nothing is known of is not judged. It works with flowControl and without.
	// Default: false.
	Admission bool `json:"admission,omitempty" default:"false"`
}

// Drain is how this Envoy takes leave.
type Drain struct {
	// Grace is how long after POST /drain requests are still served, while load
	// balancers notice that /readyz says no; 0s to 1h. Default: 15s.
	Grace time.Duration `json:"grace,omitempty" default:"15s"`
}

// TTFT is the goal for the first token, 0 for none.
func (o *Objective) TTFT() time.Duration {
	return time.Duration(o.TTFTMs * float64(time.Millisecond))
}

// TPOT is the goal for each further token, 0 for none.
func (o *Objective) TPOT() time.Duration {
	return time.Duration(o.TPOTMs * float64(time.Millisecond))
}

// Compile makes what internal/flowcontrol needs of a validated FlowControl.
func (f *FlowControl) Compile() (flowcontrol.Config, error) {
	c := flowcontrol.Config{
		Enabled: f.Enabled, Eviction: f.Eviction, Weights: f.Weights, TTL: f.TTL, EmptyPoolTTL: f.EmptyPoolTTL,
		Flow:     flowcontrol.Limit{Requests: f.FlowRequests, Bytes: int64(f.FlowBytes)},
		Band:     flowcontrol.Limit{Requests: f.BandRequests, Bytes: int64(f.BandBytes)},
		Total:    flowcontrol.Limit{Requests: f.MaxRequests, Bytes: int64(f.MaxBytes)},
		Displace: f.Displace, FlowLabels: f.FlowLabels,
		Detector: flowcontrol.Detector{
			QueueThreshold: f.QueueThreshold, KVThreshold: f.KVThreshold,
			MaxConcurrency: int64(f.MaxConcurrency), MaxTokens: int64(f.MaxTokens),
		},
	}
	for _, b := range f.Bands {
		c.Bands = append(c.Bands, flowcontrol.BandConfig{
			Priority: b.Priority, TTL: b.TTL, Limit: flowcontrol.Limit{Requests: b.Requests, Bytes: int64(b.Bytes)},
		})
	}
	var err error
	if c.Detector.Saturation, err = flowcontrol.ParseSaturation(f.Saturation); err != nil {
		return c, fmt.Errorf("flowControl.saturation: %w", err)
	}
	if c.Fairness, err = flowcontrol.ParseFairness(f.Fairness); err != nil {
		return c, fmt.Errorf("flowControl.fairness: %w", err)
	}
	if c.Order, err = flowcontrol.ParseOrder(f.Order); err != nil {
		return c, fmt.Errorf("flowControl.order: %w", err)
	}
	return c, nil
}

const maxPriority = 1_000_000

func (c *checker) flow(cfg *Config) {
	f := &cfg.FlowControl
	at := func(name string) string { return "flowControl." + name }
	c.oneOf(at("saturation"), "detector", f.Saturation, []string{"utilization", "concurrency"})
	c.oneOf(at("fairness"), "fairness", f.Fairness, []string{"round-robin", "weighted", "global-fcfs"})
	c.oneOf(at("order"), "order", f.Order, []string{"fcfs", "edf"})
	positive(c, at("queueThreshold"), f.QueueThreshold, 1_000_000)
	positive(c, at("kvThreshold"), f.KVThreshold, 1)
	inRange(c, at("maxConcurrency"), f.MaxConcurrency, 1, 1_000_000)
	inRange(c, at("maxTokens"), f.MaxTokens, 0, math.MaxInt32)
	inRange(c, at("ttl"), f.TTL, time.Millisecond, time.Hour)
	inRange(c, at("emptyPoolTTL"), f.EmptyPoolTTL, 0, time.Hour)
	for _, name := range slices.Sorted(maps.Keys(f.Weights)) {
		positive(c, fieldPath(at("weights"), name), f.Weights[name], 1000)
	}
	if len(f.Weights) > 0 && f.Fairness != "weighted" {
		c.fail(at("weights"), "have no effect without fairness: weighted")
	}
	for _, bound := range []struct {
		name  string
		value int
	}{{"flowRequests", f.FlowRequests}, {"bandRequests", f.BandRequests}, {"maxRequests", f.MaxRequests}} {
		inRange(c, at(bound.name), bound.value, 0, 10_000_000)
	}
	inRange(c, at("flowLabels"), f.FlowLabels, 0, 10_000)
	seen := map[int]bool{}
	for i, b := range f.Bands {
		band := indexPath(at("bands"), i)
		inRange(c, band+".priority", b.Priority, -maxPriority, maxPriority)
		inRange(c, band+".ttl", b.TTL, 0, time.Hour)
		inRange(c, band+".requests", b.Requests, 0, 10_000_000)
		if seen[b.Priority] {
			c.fail(band+".priority", "%d is listed before", b.Priority)
		}
		seen[b.Priority] = true
	}
	names := map[string]bool{}
	for i, o := range cfg.Objectives {
		objective := indexPath("objectives", i)
		switch {
		case o.Name == "":
			c.fail(objective+".name", "is missing: it is what requests ask for")
		case names[o.Name]:
			c.fail(objective+".name", "%q is listed before", o.Name)
		}
		names[o.Name] = true
		inRange(c, objective+".priority", o.Priority, -maxPriority, maxPriority)
		inRange(c, objective+".ttftMs", o.TTFTMs, 0, 86_400_000)
		inRange(c, objective+".tpotMs", o.TPOTMs, 0, 86_400_000)
		inRange(c, objective+".ttl", o.TTL, 0, time.Hour)
	}
	inRange(c, "drain.grace", cfg.Drain.Grace, 0, time.Hour)
}

func positive(c *checker, path string, value, most float64) {
	if !(value > 0 && value <= most) {
		c.fail(path, "is %s: above 0 to %s is wanted", text(value), text(most))
	}
}
