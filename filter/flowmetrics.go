package filter

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
)

// waited takes in how long a request waited for room, and how that ended; 0 is
// a client that left.
func (c *poolCounters) waited(priority int, o flowcontrol.Outcome, d time.Duration) {
	outcome := "cancelled"
	switch o {
	case flowcontrol.Granted:
		outcome = "dispatched"
	case flowcontrol.Expired, flowcontrol.ExpiredEmpty:
		outcome = "expired"
	case flowcontrol.Displaced:
		outcome = "displaced"
	case flowcontrol.Drained:
		outcome = "drained"
	}
	c.queueSeconds.WithLabelValues(strconv.Itoa(priority), outcome).Observe(d.Seconds())
}

// flowCollector describes what waits at the time of the scrape: series of bands
// that are gone go with them.
type flowCollector struct{ runtime *Runtime }

var (
	descSaturation = prometheus.NewDesc("shunt_saturation",
		"Mean over the ready endpoints of how full each is, 1 for full.", []string{"pool"}, nil)
	descFullEndpoints = prometheus.NewDesc("shunt_full_endpoints", "Ready endpoints that are full.", []string{"pool"}, nil)
	descUnknown       = prometheus.NewDesc("shunt_unknown_endpoints",
		"Ready endpoints without fresh metrics of their queue or cache, which are judged by live requests.", []string{"pool"}, nil)
	descBandRequests = bandDesc("requests", "Requests that wait for room.")
	descBandBytes    = bandDesc("bytes", "Bytes of bodies that they hold.")
	descBandFlows    = bandDesc("flows", "Flows that have requests waiting.")
	descBandLimit    = bandDesc("limit_requests", "How many may wait, 0 for no bound.")
	descBandOldest   = bandDesc("oldest_seconds", "How long the first of them has waited.")
	descBandPace     = bandDesc("dispatches_per_second", "How many are dispatched a second, over about five seconds.")
	descBandTotal    = prometheus.NewDesc("shunt_queue_total",
		"Requests that had to wait for room, by what became of them; refused are those over a limit.", []string{"pool", "priority", "outcome"}, nil)
	descFlowWaiting    = flowDesc("waiting_requests", "Requests of the fairness id that wait for room.")
	descFlowQueued     = flowDesc("queued_total", "Requests of the fairness id that had to wait for room.")
	descFlowDispatched = flowDesc("dispatched_total", "Those that were then sent.")
	descFlowDropped    = flowDesc("dropped_total", "Those that were not, and those refused over a limit.")
	descFlowWaited     = flowDesc("waited_seconds_total", "How long they waited together.")
	descEvictable      = evictDesc("evictable_requests", "Requests in flight that may be ended for a higher priority.")
	descEvicting       = evictDesc("evicting_requests", "Those of them that were asked to end, and have not yet.")
	descEvictions      = evictDesc("evictions_total",
		"Requests in flight that were asked to end for a higher priority, by how they did: before response headers (reply), after them (reset), or by themselves (missed).", "outcome")
	descDraining = prometheus.NewDesc("shunt_draining", "0 serving, 1 within the grace of a drain, 2 after it.", nil, nil)
	descFlights  = prometheus.NewDesc("shunt_in_flight_requests", "Requests that engines work on.", nil, nil)
)

func bandDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("shunt_queue_"+name, help, []string{"pool", "priority"}, nil)
}

func evictDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("shunt_"+name, help, append([]string{"pool", "priority"}, labels...), nil)
}

func flowDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("shunt_flow_"+name, help, []string{"pool", "flow"}, nil)
}

// Describe implements prometheus.Collector.
func (c flowCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descSaturation, descFullEndpoints, descUnknown, descBandRequests, descBandBytes, descBandFlows, descBandLimit, descBandOldest,
		descBandPace, descBandTotal, descFlowWaiting, descFlowQueued, descFlowDispatched, descFlowDropped, descFlowWaited,
		descEvictable, descEvicting, descEvictions, descDraining, descFlights,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c flowCollector) Collect(ch chan<- prometheus.Metric) {
	defer c.runtime.contain("metrics") // the registry calls it in goroutines of its own
	gauge, counter := constMetrics(ch)
	gauge(descDraining, map[string]float64{StateServing: 0, StateGrace: 1, StateDraining: 2}[c.runtime.DrainStatus().State])
	gauge(descFlights, float64(c.runtime.flights.sum()))
	for _, p := range c.runtime.poolList() {
		state := p.saturation(c.runtime.now())
		gauge(descSaturation, state.Mean, p.name)
		gauge(descFullEndpoints, float64(state.Full), p.name)
		gauge(descUnknown, float64(state.Unknown), p.name)
		stats := p.flow.Stats()
		for i := range stats.Bands {
			b := &stats.Bands[i]
			labels := []string{p.name, strconv.Itoa(b.Priority)}
			gauge(descBandRequests, float64(b.Requests), labels...)
			gauge(descBandBytes, float64(b.Bytes), labels...)
			gauge(descBandFlows, float64(b.Flows), labels...)
			gauge(descBandLimit, float64(b.Limit.Requests), labels...)
			gauge(descBandOldest, b.Oldest.Seconds(), labels...)
			gauge(descBandPace, b.Pace, labels...)
			for outcome, n := range map[string]uint64{
				"queued": b.Queued, "dispatched": b.Dispatched, "expired": b.Expired, "displaced": b.Displaced,
				"drained": b.Drained, "cancelled": b.Cancelled, "refused": b.Refused,
			} {
				counter(descBandTotal, float64(n), append(labels, outcome)...)
			}
		}
		for i := range stats.Evictions {
			e := &stats.Evictions[i]
			priority := strconv.Itoa(e.Priority)
			gauge(descEvictable, float64(e.Evictable), p.name, priority)
			gauge(descEvicting, float64(e.Asked), p.name, priority)
			counter(descEvictions, float64(e.Replied), p.name, priority, "reply")
			counter(descEvictions, float64(e.Reset), p.name, priority, "reset")
			counter(descEvictions, float64(e.Missed), p.name, priority, "missed")
		}
		for i := range stats.Flows {
			f := &stats.Flows[i]
			gauge(descFlowWaiting, float64(f.Waiting), p.name, f.Name)
			counter(descFlowQueued, float64(f.Queued), p.name, f.Name)
			counter(descFlowDispatched, float64(f.Dispatched), p.name, f.Name)
			counter(descFlowDropped, float64(f.Dropped), p.name, f.Name)
			counter(descFlowWaited, f.Waited.Seconds(), p.name, f.Name)
		}
	}
}

// saturationState is how full a pool is.
type saturationState struct {
	Mean          float64
	Full, Unknown int
}

func (p *Pool) saturation(now time.Time) saturationState {
	snap := p.holder.Load()
	detector := p.flow.Detector()
	view := detector.View(snap, now)
	var st saturationState
	ready := snap.All().Index
	for _, i := range ready {
		ratio := view.Ratio(i, 0)
		st.Mean += min(1, ratio)
		if ratio >= 1 {
			st.Full++
		}
		if view.Unknown(i) {
			st.Unknown++
		}
	}
	if len(ready) > 0 {
		st.Mean /= float64(len(ready))
	}
	return st
}
