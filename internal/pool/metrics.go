package pool

import (
	"math"
	"time"
)

// Metric is an engine metric by its abstract name, the same for all engines.
type Metric uint8

// The metrics that policies read. Their names are those of the AIBrix metric
// table.
const (
	NumRequestsRunning Metric = iota // requests in the running batch
	NumRequestsWaiting               // requests queued in the engine
	KVCacheUsagePerc                 // share of KV blocks in use, 0 to 1
	numMetrics
)

// String returns the abstract name.
func (m Metric) String() string {
	switch m {
	case NumRequestsRunning:
		return "num_requests_running"
	case NumRequestsWaiting:
		return "num_requests_waiting"
	case KVCacheUsagePerc:
		return "kv_cache_usage_perc"
	default:
		return "unknown"
	}
}

// Metrics is what one scrape of one endpoint said. The zero value says
// nothing. It is immutable once it is part of a snapshot.
type Metrics struct {
	// Taken is when the page was read; zero before the first good scrape.
	Taken  time.Time
	has    uint64
	values [numMetrics]float64
}

// Set records a reading. NaN is no reading: an engine that reports it has not
// measured yet.
func (m *Metrics) Set(name Metric, v float64) {
	if math.IsNaN(v) {
		return
	}
	m.values[name] = v
	m.has |= 1 << name
}

// Get returns a reading and whether there is one. It says nothing of its age.
func (m *Metrics) Get(name Metric) (float64, bool) {
	if m == nil || m.has&(1<<name) == 0 {
		return 0, false
	}
	return m.values[name], true
}

// Empty reports whether nothing was read.
func (m *Metrics) Empty() bool { return m == nil || m.has == 0 }
