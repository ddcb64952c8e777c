package filter

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shuntproxy/shunt/internal/pool"
)

// queryCollector describes how asking a Prometheus server goes, of the pools
// that ask one.
type queryCollector struct{ runtime *Runtime }

var (
	descQueryUp = prometheus.NewDesc("shunt_prometheus_up",
		"1 if the newest round of queries had all answers, and readings in them; 0 means query-based metrics are absent, or will be.", []string{"pool"}, nil)
	descQuerySeries = prometheus.NewDesc("shunt_prometheus_series",
		"Readings that the newest answer to a query held.", []string{"pool", "metric"}, nil)
	descQueryEndpoints = prometheus.NewDesc("shunt_prometheus_endpoints",
		"Endpoints of the pool that have a reading of some query-based metric.", []string{"pool"}, nil)
	descQueryRounds = prometheus.NewDesc("shunt_prometheus_rounds_total",
		"Rounds of queries, by result.", []string{"pool", "result"}, nil)
)

// Describe implements prometheus.Collector.
func (c queryCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descQueryUp, descQuerySeries, descQueryEndpoints, descQueryRounds} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c queryCollector) Collect(ch chan<- prometheus.Metric) {
	defer c.runtime.contain("metrics") // the registry calls it in goroutines of its own
	now := c.runtime.now()
	for _, p := range c.runtime.poolList() {
		stats := p.querier.Stats()
		if !stats.Configured {
			continue
		}
		gauge := func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{p.name}, labels...)...)
		}
		gauge(descQueryUp, boolean(stats.Up))
		for q, n := range stats.Series {
			gauge(descQuerySeries, float64(n), pool.Query(q).String())
		}
		gauge(descQueryEndpoints, float64(endpointsQueried(p.holder.Load(), now)))
		for result, n := range map[string]uint64{"ok": stats.Rounds - stats.Failed, "failed": stats.Failed} {
			ch <- prometheus.MustNewConstMetric(descQueryRounds, prometheus.CounterValue, float64(n), p.name, result)
		}
	}
}

func endpointsQueried(s *pool.Snapshot, now time.Time) int {
	n := 0
	for i := range s.Endpoints {
		for q := range pool.NumQueries {
			if _, ok := s.Queried(q, s.Endpoints[i].Model, now).At(int32(i)); ok {
				n++
				break
			}
		}
	}
	return n
}
