package filter

import (
	"strings"
	"testing"
	"time"
)

// TestSeriesBeforeTheirFirstEvent: what a query asks the rate of is there at 0.
func TestSeriesBeforeTheirFirstEvent(t *testing.T) {
	w := newWorld(t, strings.Replace(oneAtATime, "enabled: true", "enabled: true, eviction: true, bands: [{priority: 7}]", 1))
	w.register()
	_, page := ask(w.monitorHandler(), "GET", "/metrics")
	for _, series := range []string{
		`shunt_internal_errors_total{where="body"} 0`,
		`shunt_internal_errors_total{where="response body"} 0`,
		`shunt_queue_total{outcome="expired",pool="default",priority="0"} 0`,
		`shunt_queue_total{outcome="refused",pool="default",priority="5"} 0`,
		`shunt_queue_requests{pool="other",priority="-1"} 0`,
		`shunt_queue_limit_requests{pool="default",priority="7"} 5000`,
		`shunt_evictions_total{outcome="reply",pool="default",priority="-1"} 0`,
		`shunt_endpoint_faults_total{kind="cut",pool="default"} 0`,
	} {
		if !strings.Contains(page, series+"\n") {
			t.Errorf("no %s", series)
		}
	}
	if strings.Contains(page, `shunt_evictions_total{outcome="reply",pool="default",priority="0"}`) {
		t.Error("evictions of what is never evicted")
	}
	off := newWorld(t, "")
	off.register()
	if _, page := ask(off.monitorHandler(), "GET", "/metrics"); !strings.Contains(page, `shunt_saturation{pool="default"}`) || strings.Contains(page, "shunt_queue_total") {
		t.Error("bands without flow control")
	}
}

// TestFlowStatus: /statusz.json says what waits, and who is doubted.
func TestFlowStatus(t *testing.T) {
	off := newWorld(t, "")
	off.register()
	if st := off.Status().Pools[0].FlowControl; st != nil {
		t.Errorf("without flow control: %+v", st)
	}
	w := newWorld(t, oneAtATime)
	w.register()
	w.publish("default", ep(1, "m"))
	running, waiting := w.asks(t, ""), w.asks(t, "high")
	w.clock.advance(3 * time.Second)
	running.held.Live().Doubt(w.now())
	st := w.Status().Pools[0]
	if !st.Endpoints[0].Doubted {
		t.Error("not shown as doubted")
	}
	f := st.FlowControl
	if f.Saturation != 1 || f.Full != 1 || f.Waiting != 1 || f.Bytes != int64(len(chatBody)) || len(f.Bands) != 3 {
		t.Fatalf("%+v", f)
	}
	if b := f.Bands[0]; b.Priority != 5 || b.Waiting != 1 || b.Flows != 1 || b.OldestSeconds != 3 || b.Limit != 5000 {
		t.Errorf("%+v", b)
	}
	running.finish(End{})
	if waiting.posted() {
		t.Error("sent to an endpoint that is doubted")
	}
	waiting.finish(End{})
	w.idle(t)
}
