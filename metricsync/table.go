package metricsync

import "github.com/shuntproxy/shunt/internal/pool"

// rule says how several series of one family become one reading.
type rule uint8

const (
	sum  rule = iota // counts: each data-parallel rank has its own
	mean             // ratios of ranks that share the load
	peak             // ratios where a dead process's series may linger
)

// row is one abstract metric in the words of one engine.
type row struct {
	metric pool.Metric
	rule   rule
	// names are tried in order: the specified name, then what versions of the
	// engine really export. The first with a reading wins.
	names []string
}

// table is how one engine's metrics are found and read. It is immutable.
type table struct {
	// paths are tried in order while the answer is 404.
	paths []string
	// hint tells the operator what to set where no path has metrics.
	hint string
	rows []row
	// rankLabel tells data-parallel ranks apart. Series that differ in other
	// labels only are one rank seen twice, and the largest counts. "" makes
	// each series a rank.
	rankLabel string
	// totalLabel is empty on the series that sums a breakdown; series with a
	// value there are the breakdown and do not count. "" where there is none.
	totalLabel string
	// loraFamily's series each hold an ever seen combination of adapters; the
	// largest value is the newest. "" where the engine has none.
	loraFamily string
	// sleepFamily has a series sleep_state="awake" that is 0 while asleep.
	sleepFamily string

	families map[string]family
	// prefix is what all wanted names begin with, and next holds the pairs of
	// bytes that follow it in one: they tell nearly all other names apart.
	prefix string
	next   [1 << 16 / 64]uint64 // a set of bits
}

// family is what a sample's name leads to.
type family struct {
	kind  familyKind
	index int // of the accumulator, for readings
}

type familyKind uint8

const (
	reading familyKind = iota
	loraInfo
	sleepState
)

// tables holds one table for each engine; nil where there is none.
type tables [pool.EngineXLLM + 1]*table

func (t *tables) of(e pool.Engine) *table {
	if int(e) >= len(t) {
		return nil
	}
	return t[e]
}

func newTables() *tables {
	t := &tables{
		pool.EngineVLLM: {
			paths: []string{"/metrics"},
			rows: []row{
				{pool.NumRequestsRunning, sum, []string{"vllm:num_requests_running"}},
				{pool.NumRequestsWaiting, sum, []string{"vllm:num_requests_waiting"}},
				{pool.KVCacheUsagePerc, mean, []string{"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"}},
			},
			loraFamily:  "vllm:lora_requests_info",
			sleepFamily: "vllm:engine_sleep_state",
		},
		pool.EngineSGLang: {
			paths: []string{"/metrics"},
			hint:  "start SGLang with --enable-metrics",
			rows: []row{
				{pool.NumRequestsRunning, sum, []string{"sglang:num_running_reqs"}},
				{pool.NumRequestsWaiting, sum, []string{"sglang:num_queue_reqs"}},
				{pool.KVCacheUsagePerc, mean, []string{"sglang:token_usage"}},
			},
			rankLabel:  "dp_rank",
			totalLabel: "priority",
		},
		pool.EngineTRTLLM: {
			paths: []string{"/prometheus/metrics"},
			hint:  "set return_perf_metrics, enable_iter_perf_stats and enable_iter_req_stats to true in TensorRT-LLM's config",
			rows: []row{
				{pool.NumRequestsRunning, sum, []string{"trtllm_num_requests_running"}},
				{pool.NumRequestsWaiting, sum, []string{"trtllm_num_requests_waiting"}},
				{pool.KVCacheUsagePerc, peak, []string{"trtllm_kv_cache_utilization"}},
			},
		},
		pool.EngineXLLM: {
			paths: []string{"/metrics", "/brpc_metrics"},
			rows: []row{
				{pool.NumRequestsRunning, sum, []string{"num_running_requests"}},
				{pool.NumRequestsWaiting, sum, []string{"num_waiting_requests"}},
				{pool.KVCacheUsagePerc, mean, []string{"kv_cache_utilization", "kv_cache_utilization_perc"}},
			},
		},
	}
	for _, one := range t {
		if one != nil {
			one.index()
		}
	}
	return t
}

// index builds the lookup of names. Accumulators are numbered in the order of
// rows and names, which reduce walks again.
func (t *table) index() {
	t.families = make(map[string]family)
	add := func(name string, f family) {
		t.families[name] = f
	}
	n := 0
	for _, r := range t.rows {
		for _, name := range r.names {
			add(name, family{reading, n})
			n++
		}
	}
	if t.loraFamily != "" {
		add(t.loraFamily, family{kind: loraInfo})
	}
	if t.sleepFamily != "" {
		add(t.sleepFamily, family{kind: sleepState})
	}

	for name := range t.families {
		t.prefix = name
		break
	}
	for name := range t.families {
		n := 0
		// Two bytes of each name are left for next.
		for n < len(t.prefix) && n < len(name)-2 && t.prefix[n] == name[n] {
			n++
		}
		t.prefix = t.prefix[:n]
	}
	for name := range t.families {
		n := len(t.prefix)
		pair := uint16(name[n])<<8 | uint16(name[n+1])
		t.next[pair/64] |= 1 << (pair % 64)
	}
}

// maybe is false for nearly all lines that begin with no wanted name.
func (t *table) maybe(line []byte) bool {
	n := len(t.prefix)
	if len(line) < n+2 {
		return false
	}
	pair := uint16(line[n])<<8 | uint16(line[n+1])
	return t.next[pair/64]&(1<<(pair%64)) != 0 && string(line[:n]) == t.prefix
}

// size is the number of accumulators.
func (t *table) size() int {
	n := 0
	for _, r := range t.rows {
		n += len(r.names)
	}
	return n
}
