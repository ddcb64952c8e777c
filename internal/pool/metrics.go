package pool

import (
	"math"
	"time"
)

// Metric is an engine metric by its abstract name, the same for all engines.
type Metric uint8

// The metrics that policies may read of any endpoint: gauges as scraped, and
// means and rates of the last minute, or since the engine's start where the last
// minute had no request. Their names are those of the AIBrix metric table as far
// as that has them.
const (
	NumRequestsRunning         Metric = iota // requests in the running batch
	NumRequestsWaiting                       // requests queued in the engine
	KVCacheUsagePerc                         // share of KV blocks in use, 0 to 1
	EngineUtilization                        // as the engine has it; xLLM alone
	KVCacheHitRate                           // share of looked up tokens that were cached, 0 to 1
	RequestQueueTime                         // seconds, mean
	RequestPrefillTime                       // seconds, mean
	RequestDecodeTime                        // seconds, mean
	TimeToFirstToken                         // seconds, mean
	TimeToFirstTokenP95                      // seconds
	InterTokenLatency                        // seconds, mean
	InterTokenLatencyP95                     // seconds
	PromptTokensPerRequest                   // tokens, mean
	GenerationTokensPerRequest               // tokens, mean
	PromptTokenRate                          // tokens per second
	GenerationTokenRate                      // tokens per second
	RequestRate                              // finished requests per second
	// NumMetrics is how many there are.
	NumMetrics
)

// String returns the abstract name.
func (m Metric) String() string {
	names := [NumMetrics]string{
		"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_utilization",
		"kv_cache_hit_rate", "request_queue_time_seconds", "request_prefill_time_seconds",
		"request_decode_time_seconds", "time_to_first_token_seconds", "time_to_first_token_seconds_p95",
		"inter_token_latency_seconds", "inter_token_latency_seconds_p95", "request_prompt_tokens",
		"request_generation_tokens", "prompt_tokens_per_second", "generation_tokens_per_second", "requests_per_second",
	}
	if m < NumMetrics {
		return names[m]
	}
	return "unknown"
}

// Known says what is known of a metric. Zero is a value like others.
type Known uint8

// What may be known of a metric of an endpoint.
const (
	Absent    Known = iota // the page does not have it, or there was no page yet
	NotNumber              // the engine has not measured it yet
	Stale                  // it was read too long ago
	Fresh
)

// String returns a word for people.
func (k Known) String() string {
	switch k {
	case NotNumber:
		return "not a number"
	case Stale:
		return "stale"
	case Fresh:
		return "fresh"
	default:
		return "absent"
	}
}

// Metrics is what one scrape of one endpoint said. The zero value says
// nothing. It is immutable once it is part of a snapshot.
type Metrics struct {
	// Taken is when the page was read; zero before the first good scrape.
	Taken time.Time
	Values
	LoRA LoRA
	// BlockSize is the tokens of one KV block and NumBlocks how many there are,
	// 0 where the engine does not say.
	BlockSize, NumBlocks int
	// Models are the readings of single models, where the page tells several
	// apart. A metric that one lacks is the endpoint's.
	Models []ModelMetrics
}

// ModelMetrics is what a page says of one of several models.
type ModelMetrics struct {
	Model string
	Values
}

// LoRA is what an engine says of its adapters.
type LoRA struct {
	// Max is the number of adapters that run together; 0 where it does not say.
	Max int
	// Running and Waiting are the adapters with requests in the batch and in the
	// queue. An idle adapter is in neither, loaded or not.
	Running, Waiting []string
}

// Values are readings by Metric. The zero value has none.
type Values struct {
	has    uint32
	nan    uint32
	values [NumMetrics]float64
}

// Set records a reading. NaN is no reading but is told from an absent one: an
// engine that reports it has not measured yet.
func (v *Values) Set(name Metric, x float64) {
	v.has &^= 1 << name
	v.nan &^= 1 << name
	if math.IsNaN(x) {
		v.nan |= 1 << name
		return
	}
	v.values[name] = x
	v.has |= 1 << name
}

// Get returns a reading and whether there is one. It says nothing of its age.
func (m *Metrics) Get(name Metric) (float64, bool) {
	if m == nil {
		return 0, false
	}
	return m.Values.Get(name)
}

// Get returns a reading and whether there is one.
func (v *Values) Get(name Metric) (float64, bool) {
	if v.has&(1<<name) == 0 {
		return 0, false
	}
	return v.values[name], true
}

// Empty reports whether nothing was read.
func (m *Metrics) Empty() bool { return m == nil || m.has == 0 }

// notNumber is the NaN of a column where the engine said NaN; any other is an
// absent reading.
const notNumber = 0x7ff8_0000_0000_0002

// cell returns a reading as a column holds it.
func (v *Values) cell(name Metric) float64 {
	switch bit := uint32(1) << name; {
	case v.has&bit != 0:
		return v.values[name]
	case v.nan&bit != 0:
		return math.Float64frombits(notNumber)
	default:
		return math.NaN()
	}
}
