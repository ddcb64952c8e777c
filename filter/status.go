package filter

import (
	"net/netip"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
)

// Status is what /statusz.json shows.
type Status struct {
	Version string       `json:"version"`
	Now     time.Time    `json:"now"`
	Ready   bool         `json:"ready"`
	Why     string       `json:"why,omitempty"`
	Waiting int          `json:"waiting_requests"`
	Pools   []PoolStatus `json:"pools"`
}

// PoolStatus is one pool.
type PoolStatus struct {
	Name     string `json:"name"`
	Snapshot uint64 `json:"snapshot"`
	// AgeSeconds is the snapshot's age.
	AgeSeconds float64 `json:"age_seconds"`
	// Complete is false until every source has delivered a full set.
	Complete bool `json:"complete"`
	// Fresh is false while a source has only its last good set.
	Fresh bool `json:"fresh"`
	// Configs is the number of live configurations that refer to the pool;
	// Conflict is true if an older one of them defines it differently.
	Configs  int  `json:"configs"`
	Conflict bool `json:"conflict,omitempty"`
	// Sources are where endpoints come from.
	Sources []SourceStatus `json:"sources"`
	// Prometheus is the server asked for query-based metrics, null for none.
	Prometheus *PrometheusStatus `json:"prometheus,omitempty"`
	// FlowControl is what waits, null where it is off.
	FlowControl *FlowStatus      `json:"flow_control,omitempty"`
	Models      []string         `json:"models"`
	Endpoints   []EndpointStatus `json:"endpoints"`
}

// FlowStatus is a pool's flow control.
type FlowStatus struct {
	// Saturation is the mean over the ready endpoints of how full each is, 1 for
	// full, and Full how many are.
	Saturation float64 `json:"saturation"`
	Full       int     `json:"full_endpoints"`
	// Waiting requests hold Bytes.
	Waiting int   `json:"waiting_requests"`
	Bytes   int64 `json:"waiting_bytes"`
	// Bands are those in use, the highest priority first.
	Bands []BandStatus `json:"bands"`
}

// BandStatus is what waits with one priority.
type BandStatus struct {
	Priority int `json:"priority"`
	// Waiting requests of Flows fairness ids; Limit is how many may, 0 for no bound.
	Waiting int `json:"waiting_requests"`
	Flows   int `json:"flows"`
	Limit   int `json:"limit_requests"`
	// OldestSeconds is how long the first of them has waited, and Pace how many are
	// dispatched a second.
	OldestSeconds float64 `json:"oldest_seconds"`
	Pace          float64 `json:"dispatches_per_second"`
}

// EndpointStatus is one endpoint. Metrics that are absent or stale are null.
type EndpointStatus struct {
	Endpoint string   `json:"endpoint"`
	Pod      string   `json:"pod,omitempty"`
	Model    string   `json:"model,omitempty"`
	Models   []string `json:"models,omitempty"`
	Engine   string   `json:"engine"`
	Source   string   `json:"source"`
	// State is ready, not-ready, set-aside, prefill-only or unknown (not probed
	// yet).
	State string `json:"state"`
	// Doubted endpoints had a fault and have not answered since.
	Doubted    bool     `json:"doubted,omitempty"`
	Why        string   `json:"why,omitempty"`
	InFlight   int64    `json:"in_flight"`
	Picks      uint64   `json:"picks"`
	Running    *float64 `json:"num_requests_running"`
	Waiting    *float64 `json:"num_requests_waiting"`
	KV         *float64 `json:"kv_cache_usage_perc"`
	AgeSeconds *float64 `json:"metrics_age_seconds"`
	// MetricsAddress is where metrics are scraped, and MetricsError why the
	// newest scrape failed, "" if it did not.
	MetricsAddress string `json:"metrics_address"`
	MetricsError   string `json:"metrics_error,omitempty"`
	// Queried are the query-based metrics of the endpoint's own model, by
	// abstract name, without those that are absent or stale.
	Queried map[string]float64 `json:"queried,omitempty"`
}

// PrometheusStatus is how asking a Prometheus server goes.
type PrometheusStatus struct {
	// Up is whether the newest round had an answer to every query, and some
	// series in them; Error says why not.
	Up    bool   `json:"up"`
	Error string `json:"error,omitempty"`
	// AgeSeconds is the age of the last round that was up, null for none.
	AgeSeconds *float64 `json:"age_seconds"`
	// Series is how many readings each query gave in the newest round.
	Series map[string]int `json:"series"`
}

// Status describes the process at this moment. Any goroutine may call it.
func (rt *Runtime) Status() Status {
	waiting, _, _ := rt.room.Waiting()
	why := rt.notReady()
	st := Status{Version: Version, Now: rt.now(), Ready: why == "", Why: why, Waiting: waiting, Pools: []PoolStatus{}}
	for _, p := range rt.poolList() {
		st.Pools = append(st.Pools, rt.poolStatus(p, st.Now))
	}
	return st
}

func (rt *Runtime) poolStatus(p *Pool, now time.Time) PoolStatus {
	s := p.holder.Load()
	configs, conflict := rt.users(p)
	st := PoolStatus{
		Name: p.name, Snapshot: s.Seq, AgeSeconds: now.Sub(s.Built).Seconds(), Complete: s.Complete, Fresh: s.Fresh,
		Configs: configs, Conflict: conflict, Models: s.ModelNames(), Endpoints: []EndpointStatus{},
	}
	st.Sources = rt.sourceStatus(p)
	if stats := p.querier.Stats(); stats.Configured {
		st.Prometheus = prometheusStatus(stats, now)
	}
	st.FlowControl = p.flowStatus(now)
	failing := make(map[netip.AddrPort]string)
	for es := range p.syncer.Endpoints {
		if es.Failures > 0 {
			failing[es.Addr] = es.LastError
		}
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		read := func(m pool.Metric) *float64 {
			if v, ok := s.Readings(m, now).At(int32(i)); ok {
				return &v
			}
			return nil
		}
		es := EndpointStatus{
			Endpoint: e.Key, Pod: e.Pod, Model: e.Model, Models: e.Models, Engine: e.Engine.String(), Source: e.Source,
			State: stateOf(e), Why: e.Why, Doubted: e.Live.Doubted(now), InFlight: e.Live.InFlight(), Picks: e.Live.Picks(),
			MetricsAddress: netip.AddrPortFrom(e.Addr.Addr(), e.MetricPort).String(), MetricsError: failing[e.Addr],
			Running: read(pool.NumRequestsRunning), Waiting: read(pool.NumRequestsWaiting), KV: read(pool.KVCacheUsagePerc),
		}
		if m := s.Metrics(int32(i)); m != nil {
			age := now.Sub(m.Taken).Seconds()
			es.AgeSeconds = &age
		}
		for q := range pool.NumQueries {
			if v, ok := s.Queried(q, e.Model, now).At(int32(i)); ok {
				if es.Queried == nil {
					es.Queried = make(map[string]float64)
				}
				es.Queried[q.String()] = v
			}
		}
		st.Endpoints = append(st.Endpoints, es)
	}
	return st
}

func (p *Pool) flowStatus(now time.Time) *FlowStatus {
	if !p.flow.Enabled() {
		return nil
	}
	state, stats := p.saturation(now), p.flow.Stats()
	st := &FlowStatus{Saturation: state.Mean, Full: state.Full, Waiting: stats.Requests, Bytes: stats.Bytes, Bands: []BandStatus{}}
	for i := range stats.Bands {
		b := &stats.Bands[i]
		st.Bands = append(st.Bands, BandStatus{
			Priority: b.Priority, Waiting: b.Requests, Flows: b.Flows, Limit: b.Limit.Requests,
			OldestSeconds: b.Oldest.Seconds(), Pace: b.Pace,
		})
	}
	return st
}

func prometheusStatus(stats metricsync.QueryStats, now time.Time) *PrometheusStatus {
	st := &PrometheusStatus{Up: stats.Up, Error: stats.Error, Series: make(map[string]int)}
	if !stats.LastGood.IsZero() {
		age := now.Sub(stats.LastGood).Seconds()
		st.AgeSeconds = &age
	}
	for q, n := range stats.Series {
		st.Series[pool.Query(q).String()] = n
	}
	return st
}

func stateOf(e *pool.Endpoint) string {
	switch {
	case e.PrefillOnly:
		return "prefill-only"
	case e.Passed:
		return "set-aside"
	case e.Ready:
		return "ready"
	case !e.Judged:
		return "unknown"
	default:
		return "not-ready"
	}
}
