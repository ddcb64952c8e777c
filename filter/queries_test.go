package filter

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// TestPrometheus: what a configured server says shows for its endpoints, and
// that it is gone shows too; without one there is no trace of it.
func TestPrometheus(t *testing.T) {
	address := engine(t, "m")
	var down atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if down.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		result := ""
		if q := r.FormValue("query"); strings.Contains(q, "prompt_tokens_sum") && strings.Contains(q, `{job="engines"}`) {
			result = fmt.Sprintf(`{"metric":{"instance":%q,"model_name":"m"},"value":[1,"120"]}`, address)
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"status":"success","data":{"resultType":"vector","result":[%s]}}`, result)
	}))
	defer server.Close()
	rt, log := newRuntime(t)
	gen := mustLoad(t, rt, staticConfig(entry(address, "m")))
	if st := rt.Status().Pools[0]; st.Prometheus != nil {
		t.Errorf("%+v without a server", st.Prometheus)
	}
	asked := staticConfig(entry(address, "m")) + "\nprometheus: {interval: 100ms, selector: 'job=\"engines\"', url: \"" + server.URL + "\"}"
	next := mustLoad(t, rt, asked)
	gen.Release()
	eventually(t, "a queried reading", func() bool {
		st := rt.Status().Pools[0]
		return st.Prometheus != nil && st.Prometheus.Up && st.Prometheus.AgeSeconds != nil && st.Prometheus.Series["avg_prompt_toks_per_req"] == 1 &&
			len(st.Endpoints) == 1 && st.Endpoints[0].Queried["avg_prompt_toks_per_req"] == 120 && len(st.Endpoints[0].Queried) == 1
	})
	for name, want := range map[string]float64{"shunt_prometheus_up": 1, "shunt_prometheus_endpoints": 1} {
		if got := metricValue(t, rt, name, "pool", "default"); got != want {
			t.Errorf("%s is %v", name, got)
		}
	}
	if got := metricValue(t, rt, "shunt_prometheus_series", "pool", "default", "metric", "avg_prompt_toks_per_req"); got != 1 {
		t.Errorf("shunt_prometheus_series is %v", got)
	}
	down.Store(true)
	log.wait(t, 1, "server_error: server error: 503")
	eventually(t, "the reading ended", func() bool { return rt.Status().Pools[0].Endpoints[0].Queried == nil })
	if st := rt.Status().Pools[0].Prometheus; st.Up || !strings.Contains(st.Error, "503") {
		t.Errorf("%+v", st)
	}
	if got := metricValue(t, rt, "shunt_prometheus_up", "pool", "default"); got != 0 {
		t.Errorf("shunt_prometheus_up is %v", got)
	}
	if n := log.count("prometheus"); n != 2 {
		t.Errorf("%d lines, want one up and one down:\n%s", n, log)
	}
	next.Release()
	rt.Stop()
}
