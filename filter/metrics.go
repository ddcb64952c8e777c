package filter

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
	"github.com/shuntproxy/shunt/scorer"
)

// metrics are all metrics of the process. Names begin with shunt_. What is on
// the request path is resolved before the first request; what describes
// endpoints is read from the snapshot when someone asks.
type metrics struct {
	registry *prometheus.Registry

	spoofed    prometheus.Counter
	aliases    [numHeaders]prometheus.Counter // by the older name
	duplicates [numHeaders]prometheus.Counter
	malformed  [numHeaders]prometheus.Counter

	unknownObjectives prometheus.Counter
	queueSeconds      *prometheus.HistogramVec // pool, priority, outcome

	internalErrors *prometheus.CounterVec // where
	reloads        *prometheus.CounterVec // result
	configStale    prometheus.Gauge
	edsWrites      *prometheus.CounterVec // result

	requests    *prometheus.CounterVec // pool, policy
	models      *prometheus.CounterVec // pool, model, target_model
	tokens      *prometheus.CounterVec // pool, model, target_model, kind, source
	fallbacks   *prometheus.CounterVec // pool, policy
	guarded     *prometheus.CounterVec // pool, guard
	slo         *prometheus.CounterVec // pool, outcome
	drops       *prometheus.CounterVec // pool, reason
	refusals    *prometheus.CounterVec // pool, code
	faults      *prometheus.CounterVec // pool, kind
	moved       *prometheus.CounterVec // pool
	overfull    *prometheus.CounterVec // pool
	usage       *prometheus.CounterVec // pool, source
	unread      *prometheus.CounterVec // pool, cause
	upstream    *prometheus.CounterVec // pool, status
	incomplete  *prometheus.CounterVec // pool
	failed      *prometheus.CounterVec // pool
	answers     *prometheus.CounterVec // pool
	busy        prometheus.Counter
	pickSeconds *prometheus.HistogramVec
	firstByte   *prometheus.HistogramVec
	firstToken  *prometheus.HistogramVec
}

func newMetrics(version string) *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shunt_" + name, Help: help}, labels)
		m.registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, start float64, n int) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "shunt_" + name, Help: help, Buckets: prometheus.ExponentialBuckets(start, 2, n),
		}, []string{"pool"})
		m.registry.MustRegister(h)
		return h
	}
	m.spoofed = counter("spoofed_headers_total",
		"Requests with a header by which a client would choose an endpoint or pretend to be shunt; the header was removed.").WithLabelValues()
	aliased := counter("alias_headers_total", "Requests in which an older name of a header counted, by that name.", "header")
	duplicates := counter("duplicate_headers_total", "Requests with a control header more than once, of which the last counted.", "header")
	malformed := counter("malformed_headers_total", "Requests with a header whose value can't be read and was ignored.", "header")
	for _, a := range aliases {
		m.aliases[a.alias] = aliased.WithLabelValues(headerNames[a.alias])
	}
	for h := range headerNames {
		if control>>h&1 == 1 {
			m.duplicates[h] = duplicates.WithLabelValues(headerNames[h])
		}
	}
	for _, h := range []header{hdrObjective, hdrFairnessID, hdrSLOTTFT, hdrSLOTPOT, hdrInferenceTTL} {
		m.malformed[h] = malformed.WithLabelValues(headerNames[h])
	}
	m.internalErrors = counter("internal_errors_total", "Faults of shunt's own, by where they were caught.", "where")
	for _, where := range append([]string{whereScraping, whereQuerying, whereWaiting}, guarded...) { // or rate() would miss the first
		m.internalErrors.WithLabelValues(where)
	}
	m.reloads = counter("config_reloads_total", "Configurations taken and refused.", "result")
	m.edsWrites = counter("eds_writes_total", "Versions of the file eds.path that were written, restored after somebody else had changed the file, and that could not be written.", "result")
	m.configStale = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "shunt_config_stale", Help: "1 while a configuration file is broken and its last good content is in use.",
	})
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "shunt_build_info", Help: "1, with the version.", ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.registry.MustRegister(m.configStale, build)
	m.requests = counter("picks_total", "Requests for which an endpoint was picked.", "pool", "policy")
	m.models = counter("requests_total",
		"Requests for which an endpoint was picked, by the model that was asked for and the one that the engine got.", "pool", "model", "target_model")
	m.tokens = counter("tokens_total",
		"Tokens of answers by model and kind: as reported by the engine, or estimated from the events of a stream that reported none.",
		"pool", "model", "target_model", "kind", "source")
	m.usage = counter("usage_total", "Answers that were read for their usage, by where it came from.", "pool", "source")
	m.unread = counter("unread_responses_total",
		"Successful answers that were not read, so that their usage is not known and the model's name not restored, by cause.", "pool", "cause")
	m.upstream = counter("upstream_errors_total", "Answers of engines with a status of 400 and above, which pass through untouched.", "pool", "status")
	m.incomplete = counter("incomplete_answers_total", "Answers that began and did not come to their end: the engine cut them, or the client left.", "pool")
	m.failed = counter("failed_answers_total", "Answers of engines with a success status and an error inside.", "pool")
	m.fallbacks = counter("fallbacks_total", "Picks not made by the policy's rule: at random because it could score no candidate, or the emptiest because the request fits on none.", "pool", "policy")
	m.guarded = counter("guarded_picks_total", "Picks from which a guard took candidates out.", "pool", "guard")
	m.slo = counter("slo_admissions_total",
		"Requests with a latency goal, with slo.admission, by what it did: kept (no candidate is predicted to miss it), narrowed (some are, and are left out), missed (all are) or refused (all are, and the priority is below 0).",
		"pool", "outcome")
	m.drops = counter("drops_total", "Requests dropped, by drop reason.", "pool", "reason")
	m.unknownObjectives = counter("unknown_objectives_total",
		"Requests that named an objective which the configuration does not have; they have priority 0.").WithLabelValues()
	m.queueSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "shunt_queue_seconds", Help: "How long requests waited for room, by what became of them.",
		Buckets: prometheus.ExponentialBuckets(1e-3, 2, 18),
	}, []string{"pool", "priority", "outcome"})
	m.registry.MustRegister(m.queueSeconds)
	m.refusals = counter("refusals_total", "Requests refused as invalid, by error code.", "pool", "code")
	m.faults = counter("endpoint_faults_total", "Requests that an endpoint refused to connect, reset before response headers, or cut in the response.", "pool", "kind")
	m.moved = counter("moved_total", "Requests that another endpoint than the picked one served.", "pool")
	m.overfull = counter("overfull_picks_total",
		"Requests sent to a full endpoint because each slot that flow control had for them was gone when they looked.", "pool")
	m.answers = counter("answers_total", "Requests for the list of models, or for one of them, that were answered without an engine.", "pool")
	m.busy = counter("busy_pages_total", "Requests to shunt's own listeners that got 503 because other pages were being made.").WithLabelValues()
	m.pickSeconds = histogram("pick_seconds", "Time from the whole request to the pick.", 250e-9, 16)
	m.firstByte = histogram("first_byte_seconds", "Time from the pick to the response headers.", 1e-3, 18)
	m.firstToken = histogram("first_token_seconds", "Time from the pick to the first event with generated content, of streams.", 1e-3, 18)
	return m
}

// poolCounters are one pool's, resolved.
type poolCounters struct {
	picks       [numPolicies]prometheus.Counter
	fallbacks   [numPolicies]prometheus.Counter
	guarded     [scorer.NumGuards]prometheus.Counter
	slo         [scorer.NumSLOOutcomes]prometheus.Counter // but SLONone
	drops       [numDropReasons]prometheus.Counter
	faults      [3]prometheus.Counter
	moved       prometheus.Counter
	incomplete  prometheus.Counter
	overfull    prometheus.Counter
	answers     prometheus.Counter
	pickSeconds prometheus.Observer
	firstByte   prometheus.Observer
	firstToken  prometheus.Observer
	refusals    *prometheus.CounterVec

	queueSeconds prometheus.ObserverVec // priority, outcome
	models       modelTable

	usage          [numUsageSources]prometheus.Counter
	unread         [numUnreadCauses]prometheus.Counter
	upstreamErrors *prometheus.CounterVec // status
	failedAnswers  prometheus.Counter
}

const numPolicies = scorer.NumLabels

func (m *metrics) forPool(name string) *poolCounters {
	c := &poolCounters{
		moved:       m.moved.WithLabelValues(name),
		incomplete:  m.incomplete.WithLabelValues(name),
		overfull:    m.overfull.WithLabelValues(name),
		answers:     m.answers.WithLabelValues(name),
		pickSeconds: m.pickSeconds.WithLabelValues(name),
		firstByte:   m.firstByte.WithLabelValues(name),
		firstToken:  m.firstToken.WithLabelValues(name),
		refusals:    m.refusals.MustCurryWith(prometheus.Labels{"pool": name}),

		queueSeconds: m.queueSeconds.MustCurryWith(prometheus.Labels{"pool": name}),

		upstreamErrors: m.upstream.MustCurryWith(prometheus.Labels{"pool": name}),
		failedAnswers:  m.failed.WithLabelValues(name),
	}
	for s := range numUsageSources {
		c.usage[s] = m.usage.WithLabelValues(name, s.String())
	}
	for u := range numUnreadCauses {
		c.unread[u] = m.unread.WithLabelValues(name, u.String())
	}
	c.models.make = func(p modelPair) *modelCounters {
		row := &modelCounters{requests: m.models.WithLabelValues(name, p.asked, p.target)}
		for s := usageReported; s < numUsageSources; s++ {
			for k := range numTokenKinds {
				row.counts[s][k] = m.tokens.WithLabelValues(name, p.asked, p.target, k.String(), s.String())
			}
		}
		return row
	}
	for p, label := range scorer.Labels() {
		c.picks[p] = m.requests.WithLabelValues(name, label)
		c.fallbacks[p] = m.fallbacks.WithLabelValues(name, label)
	}
	for g := range scorer.NumGuards {
		c.guarded[g] = m.guarded.WithLabelValues(name, g.String())
	}
	for o := scorer.SLOKept; o < scorer.NumSLOOutcomes; o++ {
		c.slo[o] = m.slo.WithLabelValues(name, o.String())
	}
	for d := DropSaturated; d < numDropReasons; d++ {
		c.drops[d] = m.drops.WithLabelValues(name, d.String())
	}
	c.faults[pool.FaultReset] = m.faults.WithLabelValues(name, "reset")
	c.faults[pool.FaultConnect] = m.faults.WithLabelValues(name, "connect")
	c.faults[pool.FaultCut] = m.faults.WithLabelValues(name, "cut")
	return c
}

// unreadCause is why an answer was not read.
type unreadCause uint8

const (
	unreadEncoded unreadCause = iota // it is compressed
	unreadType                       // it is neither JSON nor a stream of events
	numUnreadCauses
)

func (u unreadCause) String() string {
	return [numUnreadCauses]string{"content-encoding", "content-type"}[u]
}

func (c *poolCounters) picked(p *scorer.Policy, fallback scorer.Fallback) {
	c.picks[p.LabelIndex()].Inc()
	if fallback != scorer.FallbackNone {
		c.fallbacks[p.LabelIndex()].Inc()
	}
}

// refused counts an error code; the set of codes is closed.
func (c *poolCounters) refused(code string) { c.refusals.WithLabelValues(code).Inc() }

// endpointCollector describes the endpoints of all pools at the time of the
// scrape: series of endpoints that are gone go with them.
type endpointCollector struct{ runtime *Runtime }

var (
	descInFlight = endpointDesc("in_flight_requests", "Requests of this process that the endpoint is serving.")
	descPicks    = endpointDesc("picks_total", "Times the endpoint was picked.")
	descReady    = endpointDesc("ready", "1 if the endpoint may take requests.")
	descAside    = endpointDesc("set_aside", "1 while resets have set the endpoint aside.")
	descAge      = endpointDesc("metrics_age_seconds", "Age of the newest good scrape.")
	descRunning  = endpointDesc("num_requests_running", "As scraped; absent where it is absent or stale.")
	descWaiting  = endpointDesc("num_requests_waiting", "As scraped; absent where it is absent or stale.")
	descKV       = endpointDesc("kv_cache_usage_perc", "As scraped; absent where it is absent or stale.")

	descWaitingHere  = prometheus.NewDesc("shunt_waiting_requests", "Requests that wait in this process.", nil, nil)
	descWaitingBytes = prometheus.NewDesc("shunt_waiting_bytes", "Bytes of bodies that waiting requests hold.", nil, nil)
	descHeldBytes    = prometheus.NewDesc("shunt_held_body_bytes", "Bytes of bodies of requests that are not decided yet.", nil, nil)
	descScrapes      = prometheus.NewDesc("shunt_scrapes_total", "Scrapes of engines, by result.", []string{"pool", "result"}, nil)
	descProbes       = prometheus.NewDesc("shunt_probes_total", "Connects and health requests to serving ports, by result.", []string{"pool", "result"}, nil)
	descLists        = prometheus.NewDesc("shunt_model_lists_total",
		"Requests to endpoints for the list of their models, by result; of those that answer that they have none too.", []string{"pool", "result"}, nil)
	descFaultsLost = prometheus.NewDesc("shunt_faults_lost_total", "Endpoint faults that were dropped for a full queue: they count for no setting aside, and whoever is doubted is probed.", []string{"pool"}, nil)
)

func endpointDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("shunt_endpoint_"+name, help, []string{"pool", "endpoint", "pod"}, nil)
}

// Describe implements prometheus.Collector.
func (c endpointCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descInFlight, descPicks, descReady, descAside, descAge, descRunning, descWaiting, descKV,
		descWaitingHere, descWaitingBytes, descHeldBytes, descScrapes, descProbes, descLists, descFaultsLost,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c endpointCollector) Collect(ch chan<- prometheus.Metric) {
	defer c.runtime.contain("metrics") // the registry calls it in goroutines of its own
	gauge, counter := constMetrics(ch)
	waiting, bytes, _ := c.runtime.room.Waiting()
	gauge(descWaitingHere, float64(waiting))
	gauge(descWaitingBytes, float64(bytes))
	gauge(descHeldBytes, float64(c.runtime.bodies.bytes.Load()))
	now := c.runtime.now()
	for _, p := range c.runtime.poolList() {
		s := p.holder.Load()
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			labels := []string{p.name, e.Key, e.Pod}
			gauge(descInFlight, float64(e.Live.InFlight()), labels...)
			counter(descPicks, float64(e.Live.Picks()), labels...)
			gauge(descReady, boolean(e.Ready), labels...)
			gauge(descAside, boolean(e.Passed), labels...)
			if read := s.Metrics(int32(i)); read != nil {
				gauge(descAge, now.Sub(read.Taken).Seconds(), labels...)
			}
			for m, d := range map[pool.Metric]*prometheus.Desc{
				pool.NumRequestsRunning: descRunning, pool.NumRequestsWaiting: descWaiting, pool.KVCacheUsagePerc: descKV,
			} {
				if v, ok := s.Readings(m, now).At(int32(i)); ok {
					gauge(d, v, labels...)
				}
			}
		}
		counter(descFaultsLost, float64(p.holder.DroppedFaults()), p.name)
		stats := p.syncer.Stats()
		for _, r := range metricsync.Reasons() {
			counter(descScrapes, float64(stats.Scrapes[r]), p.name, r.String())
		}
		for d, n := range map[*prometheus.Desc]metricsync.Outcomes{descProbes: stats.Probes, descLists: stats.Lists} {
			counter(d, float64(n.OK), p.name, "ok")
			counter(d, float64(n.Failed), p.name, "failed")
		}
	}
}

// constMetrics are how a collector writes a gauge and a counter.
func constMetrics(ch chan<- prometheus.Metric) (gauge, counter func(d *prometheus.Desc, v float64, labels ...string)) {
	write := func(kind prometheus.ValueType) func(*prometheus.Desc, float64, ...string) {
		return func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
		}
	}
	return write(prometheus.GaugeValue), write(prometheus.CounterValue)
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
