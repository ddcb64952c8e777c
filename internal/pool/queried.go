package pool

import (
	"math"
	"net/netip"
	"time"
)

// Query is a metric that a Prometheus server computes from what it scraped, by
// its abstract name. The names are AIBrix's.
type Query uint8

// The query-based metrics. Those whose name ends in Pod count all models of an
// endpoint together, the others one model.
const (
	DrainRate1m                          Query = iota // finished requests per second, at least 0.01 (SGLang)
	P95TTFT5m                                         // seconds, one model
	P95TTFT5mPod                                      // seconds
	AvgTTFT5mPod                                      // seconds
	P95TPOT5mPod                                      // seconds per output token
	AvgTPOT5mPod                                      // seconds per output token
	AvgPromptToksPerReq                               // tokens, over a day
	AvgGenerationToksPerReq                           // tokens, over a day
	AvgE2ELatencyPod                                  // seconds, over five minutes
	AvgRequestsPerMinPod                              // finished requests per minute, over five
	AvgPromptThroughputToksPerMinPod                  // tokens per minute, over five
	AvgGenerationThroughputToksPerMinPod              // tokens per minute, over five
	// NumQueries is how many there are.
	NumQueries
)

// String returns the abstract name.
func (q Query) String() string {
	switch q {
	case DrainRate1m:
		return "drain_rate_1m"
	case P95TTFT5m:
		return "p95_ttft_5m"
	case P95TTFT5mPod:
		return "p95_ttft_5m_pod"
	case AvgTTFT5mPod:
		return "avg_ttft_5m_pod"
	case P95TPOT5mPod:
		return "p95_tpot_5m_pod"
	case AvgTPOT5mPod:
		return "avg_tpot_pod_5m"
	case AvgPromptToksPerReq:
		return "avg_prompt_toks_per_req"
	case AvgGenerationToksPerReq:
		return "avg_generation_toks_per_req"
	case AvgE2ELatencyPod:
		return "avg_e2e_latency_pod"
	case AvgRequestsPerMinPod:
		return "avg_requests_per_min_pod"
	case AvgPromptThroughputToksPerMinPod:
		return "avg_prompt_throughput_toks_per_min_pod"
	case AvgGenerationThroughputToksPerMinPod:
		return "avg_generation_throughput_toks_per_min_pod"
	default:
		return "unknown"
	}
}

// PerModel reports whether the metric is one model's; else it is that of all
// models of an endpoint together.
func (q Query) PerModel() bool {
	switch q {
	case DrainRate1m, P95TTFT5m, AvgPromptToksPerReq, AvgGenerationToksPerReq:
		return true
	default:
		return false
	}
}

// Queried is what a Prometheus server said of all endpoints it knows. One
// goroutine fills it; once handed over it is immutable. A nil one says nothing.
type Queried struct {
	// until is the last moment at which the readings of a query may be used.
	until  [NumQueries]time.Time
	byAddr map[netip.AddrPort]*instance
	byName map[string]*instance
}

// values are readings by Query, NaN where there is none.
type values [NumQueries]float64

// instance is what the label instance names: one engine's metrics page.
type instance struct {
	shared values // of the pod, or of series without a model
	models []modelValues
}

type modelValues struct {
	model  string
	values values
}

// NewQueried returns one that says nothing yet.
func NewQueried() *Queried {
	return &Queried{byAddr: make(map[netip.AddrPort]*instance), byName: make(map[string]*instance)}
}

// Answered says that the readings of a query that are added hold until then.
func (q *Queried) Answered(query Query, until time.Time) { q.until[query] = until }

// Add records one reading: name is the value of the label instance, ip:port of
// a metrics page or the name of a pod; model is "" where a series has none.
// NaN and infinity are no readings: nothing was measured in the window.
func (q *Queried) Add(query Query, name, model string, v float64) {
	if math.IsNaN(v) || math.IsInf(v, 0) || name == "" {
		return
	}
	in := q.instanceOf(name)
	// TensorRT-LLM labels its series so, whatever it serves.
	if model == "undefined" || !query.PerModel() {
		model = ""
	}
	in.of(model)[query] = v
}

func (q *Queried) instanceOf(name string) *instance {
	if addr, err := netip.ParseAddrPort(name); err == nil {
		addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
		if q.byAddr[addr] == nil {
			q.byAddr[addr] = newInstance()
		}
		return q.byAddr[addr]
	}
	if q.byName[name] == nil {
		q.byName[name] = newInstance()
	}
	return q.byName[name]
}

func newInstance() *instance {
	in := &instance{}
	in.shared.clear()
	return in
}

func (v *values) clear() {
	for i := range v {
		v[i] = math.NaN()
	}
}

// of returns the readings of a model, new if need be.
func (in *instance) of(model string) *values {
	if model == "" {
		return &in.shared
	}
	if i := in.find(model); i >= 0 {
		return &in.models[i].values
	}
	in.models = append(in.models, modelValues{model: model})
	v := &in.models[len(in.models)-1].values
	v.clear()
	return v
}

func (in *instance) find(model string) int {
	for i := range in.models {
		if in.models[i].model == model {
			return i
		}
	}
	return -1
}

// Keep takes over the readings of a query from an earlier answer, with the
// moment at which they end.
func (q *Queried) Keep(query Query, from *Queried) {
	if from == nil || from.until[query].IsZero() {
		return
	}
	q.until[query] = from.until[query]
	keep := func(to, in *instance) {
		if v := in.shared[query]; v == v {
			to.shared[query] = v
		}
		for i := range in.models {
			if v := in.models[i].values[query]; v == v {
				to.of(in.models[i].model)[query] = v
			}
		}
	}
	for addr, in := range from.byAddr {
		if q.byAddr[addr] == nil {
			q.byAddr[addr] = newInstance()
		}
		keep(q.byAddr[addr], in)
	}
	for name, in := range from.byName {
		keep(q.instanceOf(name), in)
	}
}

// queriedRows are the readings of a snapshot's endpoints, by position.
type queriedRows struct {
	from *Queried
	rows []queriedRow
}

// queriedRow is one endpoint's: its models, and the readings that stand for a
// model without series of its own.
type queriedRow struct {
	in   *instance // nil where nothing is known
	many bool      // it tells several models apart
	pod  values
}

// rowsFor looks up the endpoints. last is what the snapshot before had, reused
// if it is the same: snapshots are made far more often than queries.
func (q *Queried) rowsFor(endpoints []Endpoint, before []Endpoint, last queriedRows) queriedRows {
	if q == nil {
		return queriedRows{}
	}
	if last.from == q && sameKeys(endpoints, before) {
		return last
	}
	out := queriedRows{from: q, rows: make([]queriedRow, len(endpoints))}
	for i := range endpoints {
		e := &endpoints[i]
		in := q.byAddr[netip.AddrPortFrom(e.Addr.Addr().Unmap(), e.MetricPort)]
		if in == nil && e.Pod != "" {
			in = q.byName[e.Pod]
		}
		if in != nil {
			out.rows[i] = queriedRow{in, len(in.models) > 1, in.standIn(e.Model)}
		}
	}
	return out
}

func sameKeys(a, b []Endpoint) bool {
	if len(a) != len(b) {
		return false
	}
	if len(a) == 0 || &a[0] == &b[0] { // readings alone differ
		return true
	}
	for i := range a {
		if x, y := &a[i], &b[i]; x.Addr != y.Addr || x.MetricPort != y.MetricPort || x.Model != y.Model || x.Pod != y.Pod {
			return false
		}
	}
	return true
}

// standIn returns the readings for a model that has no series of its own: those
// of the endpoint's label, else of the only model, else those without a model.
// Adapters count under their base model, which is the label's.
func (in *instance) standIn(label string) values {
	out := in.shared
	for q := range out {
		only, n := math.NaN(), 0
		for i := range in.models {
			v := in.models[i].values[q]
			if v != v {
				continue
			}
			if in.models[i].model == label {
				only, n = v, 1
				break
			}
			only, n = v, n+1
		}
		if n == 1 {
			out[q] = only
		}
	}
	return out
}

// QueriedReadings are one query-based metric of all endpoints for one model, at
// one time.
type QueriedReadings struct {
	rows  []queriedRow
	query Query
	model string
}

// Queried returns the readings of a query-based metric for a model as of now.
func (s *Snapshot) Queried(query Query, model string, now time.Time) QueriedReadings {
	if s.queried.from == nil || now.After(s.queried.from.until[query]) {
		return QueriedReadings{}
	}
	return QueriedReadings{s.queried.rows, query, model}
}

// At returns the reading of the endpoint at a position in Snapshot.Endpoints:
// the model's own, else the pod's. ok is false where there is none, or none that
// is recent enough.
func (r QueriedReadings) At(i int32) (v float64, ok bool) {
	if int(i) >= len(r.rows) || r.rows[i].in == nil {
		return 0, false
	}
	row := &r.rows[i]
	if row.many {
		if j := row.in.find(r.model); j >= 0 {
			if v = row.in.models[j].values[r.query]; v == v {
				return v, true
			}
		}
	}
	if v = row.pod[r.query]; v != v {
		return 0, false
	}
	return v, true
}

// Fill sets out to the readings of the endpoints at positions, NaN where At has
// none.
func (r QueriedReadings) Fill(out []float64, positions []int32) {
	rows, query := r.rows, r.query
	for k, i := range positions {
		if int(i) < len(rows) {
			if row := &rows[i]; row.in != nil && !row.many {
				out[k] = row.pod[query]
				continue
			}
		}
		v, ok := r.At(i)
		if !ok {
			v = math.NaN()
		}
		out[k] = v
	}
}

// SetQueried replaces what snapshots published from now on say of query-based
// metrics; nil is nothing. Any goroutine may call it.
func (h *Holder) SetQueried(q *Queried) { h.queried.Store(q) }
