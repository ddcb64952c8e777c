package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/internal/sim"
)

// prepareEDS is a world whose cluster gets its endpoints from a file that shunt
// keeps, with endpoints from a file too: endpoints.yaml.
func prepareEDS(t *testing.T, d door, s setup) *world {
	t.Helper()
	w := prepareWorld(t, d, s)
	w.write(t, "eds.json", string(bootstrap.Endpoints()))
	w.write(t, "endpoints.yaml", w.static(w.engines...))
	w.setup.pools = "pools: {default: {file: {path: " + w.file("endpoints.yaml") + "}}}\n"
	w.options.Document = []byte(w.document("destination: eds\neds: {path: " + w.file("eds.json") + "}\n" + s.config))
	return w
}

// load sends requests until it is stopped, and counts what became of them.
type load struct {
	stop  context.CancelFunc
	ended sync.WaitGroup
	begun turns

	answered, cut atomic.Int64
	mu            sync.Mutex
	failed        []string // answers that were errors, and none at all
}

// startLoad keeps n requests going, every other one a stream.
func (w *world) startLoad(t *testing.T, n int, model string) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{stop: cancel, begun: make(turns, n)}
	for i := range n {
		client := client1(t)
		body := fmt.Sprintf(`{"model":%q,"stream":%v,"messages":[{"role":"user","content":"hi"}]}`, model, i%2 == 0)
		l.ended.Go(func() {
			for ctx.Err() == nil {
				l.begun[i].Add(1)
				l.one(client, "http://"+w.addr+"/v1/chat/completions", body)
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) one(client *http.Client, url, body string) {
	resp, err := client.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		l.fail(err.Error())
		return
	}
	answer, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	switch {
	case resp.StatusCode != 200:
		l.fail(fmt.Sprint(resp.StatusCode, " ", string(answer)))
	case err != nil:
		l.cut.Add(1)
	default:
		l.answered.Add(1)
	}
}

func (l *load) fail(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, what)
}

// end stops the load and waits for its last answers.
func (l *load) end() {
	l.stop()
	l.ended.Wait()
}

// more waits until n further requests were answered.
func (l *load) more(t *testing.T, n int64) {
	t.Helper()
	before := l.answered.Load()
	eventually(t, fmt.Sprintf("%d further answers", n), func() string {
		if got := l.answered.Load() - before; got < n {
			return fmt.Sprint(got)
		}
		return ""
	})
}

// check ends the load and reports requests that failed.
func (l *load) check(t *testing.T) {
	t.Helper()
	l.end()
	if len(l.failed) > 0 {
		t.Errorf("%d of %d requests failed, the first: %s", len(l.failed), int64(len(l.failed))+l.answered.Load(), l.failed[0])
	}
	if l.answered.Load() == 0 {
		t.Error("no request was answered")
	}
}

// TestEDSKilledEngines: engines that are killed without notice cost no request
// whose answer had not begun, and one that joins is used.
func TestEDSKilledEngines(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := prepareEDS(t, d, setup{engines: 4, config: "fallbacks: 3\n", engine: sim.Config{Output: 4}})
		w.run(t)
		l := w.startLoad(t, 8, "m")
		l.more(t, 100)
		for i, e := range w.engines[:3] {
			if i == 1 {
				joins := startEngine(t, sim.Config{})
				w.engines = append(w.engines, joins)
				w.write(t, "endpoints.yaml", w.static(w.engines...))
				wait(t, joins, func(c sim.Counters) bool { return c.Answered > 10 })
			}
			e.SetHold(true) // so that it has requests when it is killed
			wait(t, e, func(c sim.Counters) bool { return c.Held > 0 })
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			w.waitState(t, e, "not-ready")
			l.more(t, 50)
		}
		l.check(t)
		t.Logf("%d answered, %d cut after they had begun", l.answered.Load(), l.cut.Load())
		if n := w.metric(t, "shunt_moved_total"); n == 0 {
			t.Error("no request was served by another than the picked endpoint")
		}
		w.waitLoad(t, 0, 0)

		// One whose answer had begun ends with a reset, and is counted.
		for _, e := range w.engines[3:] {
			e.SetDelays(sim.Delays{BetweenTokens: sim.Duration(time.Second)})
		}
		cut := w.metric(t, "shunt_incomplete_answers_total")
		_, rest := w.endless(t)
		for _, e := range w.engines[3:] {
			if e.Counters().InFlight > 0 {
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := rest(); err == nil {
			t.Error("an answer that was cut ended as if it were whole")
		}
		w.waitLoad(t, 0, 0)
		if n := w.metric(t, "shunt_incomplete_answers_total") - cut; n != 1 {
			t.Errorf("%v incomplete answers are counted", n)
		}
	})
}

// TestEDSStrangers: an address that shunt has not discovered is never dialled,
// whoever names it.
func TestEDSStrangers(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		stranger := startCanary(t)
		w := prepareEDS(t, d, setup{config: "fallbacks: 1\n"})
		filterName := "shunt"
		w.options.ExtraRoutes = "- match: {prefix: /off}\n  route: {cluster: shunt_engines}\n  typed_per_filter_config:\n    " + filterName +
			": {\"@type\": type.googleapis.com/envoy.config.route.v3.FilterConfig, disabled: true}\n"
		w.setup.edit = func(b doc) {
			b.hcm()["http_filters"] = append([]any{doc{"name": "spoof", "typed_config": doc{
				"@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
				"metadata": []any{doc{"metadata_namespace": "envoy.lb", "value": doc{
					"x-gateway-destination-endpoint": stranger.addr,
				}}},
			}}}, b.hcm()["http_filters"].([]any)...)
		}
		w.run(t)
		for range 10 {
			r := w.must(t, w.h1, call{path: "/off", body: strings.NewReader(chat), header: header("x-gateway-destination-endpoint", stranger.addr)})
			if r.status != 503 {
				t.Errorf("without shunt: %v", r)
			}
			r = w.must(t, w.h1, call{body: strings.NewReader(chat), header: header("x-gateway-destination-endpoint", stranger.addr)})
			if r.status != 200 {
				t.Errorf("with shunt: %v", r)
			}
		}
	})
}

// TestEDSThousand: Envoy learns of a thousand endpoints, and of their end.
func TestEDSThousand(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := prepareEDS(t, d, setup{engines: 1, engine: sim.Config{Listen: "0.0.0.0:0"}, config: "fallbacks: 2\nscrape: {interval: 1m, timeout: 10s, staleAfter: 1h}\nhealth: {interval: 1m}\nmodels: {discover: false}\n"})
		_, port, err := net.SplitHostPort(w.engines[0].Addr())
		if err != nil {
			t.Fatal(err)
		}
		list := func(n int) string {
			var text strings.Builder
			for i := range n {
				fmt.Fprintf(&text, "- {address: \"127.9.%d.%d:%s\", labels: {model.aibrix.ai/name: m, model.aibrix.ai/metric-port: \"%s\"}}\n", i/250, 1+i%250, port, port)
			}
			return text.String()
		}
		w.write(t, "endpoints.yaml", list(1000))
		w.run(t)
		w.waitStat(t, "cluster.shunt_engines.membership_total", func(n int64) bool { return n == 1000 })
		seen := map[string]int64{}
		for range 50 {
			r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: header("x-shunt-explain", "1")})
			if r.status != 200 {
				t.Fatalf("%v", r)
			}
			seen[r.header.Get("X-Shunt-Endpoint")]++
		}
		if len(seen) < 25 {
			t.Errorf("50 requests went to %d of 1,000 endpoints", len(seen))
		}
		hosts := w.hosts(t)
		if len(hosts) != 1000 {
			t.Errorf("/clusters has %d hosts", len(hosts))
		}
		for address, h := range hosts { // each has its own counters
			if h.Stats["rq_total"] != seen[address] || h.Stats["rq_success"] != seen[address] || h.Health != "HEALTHY" {
				t.Errorf("%s, which answered %d requests: %+v", address, seen[address], h)
			}
		}
		w.write(t, "endpoints.yaml", list(10))
		w.waitStat(t, "cluster.shunt_engines.membership_total", func(n int64) bool { return n == 10 })
		for range 10 {
			if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
				t.Fatalf("%v", r)
			}
		}
	})
}

// TestEDSHostStats: what Envoy counts for each host is what the engine got, where
// an engine resets, fails and is gone too.
func TestEDSHostStats(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		// shunt looks at the engines once, so that Envoy finds out first.
		w := prepareEDS(t, d, setup{engines: 3, config: "fallbacks: 2\nscrape: {interval: 5m, timeout: 10s, staleAfter: 1h}\nhealth: {interval: 5m}\nmodels: {discover: false}\n"})
		w.run(t)
		for _, e := range w.engines {
			w.waitState(t, e, "ready")
		}
		send := func(want int) {
			t.Helper()
			if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != want {
				t.Fatalf("%v", r)
			}
		}
		got := func(e *sim.Server) int64 { return int64(len(e.Requests("/v1/chat/completions"))) }
		check := func(when string, e *sim.Server, failed, unreached int64) {
			t.Helper()
			eventually(t, "what is counted "+when, func() string {
				h := w.hosts(t)[e.Addr()]
				if h.Stats["rq_total"] != got(e) || h.Stats["rq_success"] != got(e)-failed || h.Stats["rq_error"] != failed+unreached || h.Stats["cx_connect_fail"] != unreached {
					return fmt.Sprintf("the engine got %d requests, Envoy counts %+v", got(e), h)
				}
				return ""
			})
		}
		untilMoved := func() {
			t.Helper()
			for before := w.metric(t, "shunt_moved_total"); w.metric(t, "shunt_moved_total") == before; {
				send(200)
			}
		}
		for range 30 {
			send(200)
		}
		resets, fails, dies := w.engines[0], w.engines[1], w.engines[2]
		if err := resets.SetFaults(sim.Fault{Kind: sim.FaultReset, Count: 1}); err != nil {
			t.Fatal(err)
		}
		untilMoved()
		if err := fails.SetFaults(sim.Fault{Kind: sim.FaultStatus, Status: 500, Count: 1}); err != nil {
			t.Fatal(err)
		}
		for r := (reply{status: 200}); r.status == 200; { // an answer, so it is not tried again
			r = w.must(t, w.h1, call{body: strings.NewReader(chat)})
		}
		if err := dies.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "Envoy has no connection to the engine that is gone", func() string {
			if h := w.hosts(t)[dies.Addr()]; h.Stats["cx_active"] != 0 {
				return fmt.Sprintf("%+v", h)
			}
			return ""
		})
		untilMoved()
		check("of the engine that reset one", resets, 1, 0)
		check("of the engine that failed one", fails, 1, 0)
		check("of the engine that is gone", dies, 0, 1)
		if total := w.stat(t, "cluster.shunt_engines.upstream_rq_total"); total != got(resets)+got(fails)+got(dies) {
			t.Errorf("the cluster counts %d requests, the engines got %d, %d and %d", total, got(resets), got(fails), got(dies))
		}
	})
}

// TestEDSForeignFile: a file that somebody else replaces comes back, and Envoy's
// endpoints with it.
func TestEDSForeignFile(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareEDS(t, d, setup{config: "fallbacks: 1\n"})
		w.run(t)
		w.write(t, "eds.json", `{"resources": [{"@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment", "cluster_name": "shunt_engines",
"endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 1}}}}]}]}]}`)
		eventually(t, "the file is written again", func() string {
			if n := w.metric(t, "shunt_eds_writes_total", "result", "restored"); n != 1 {
				return fmt.Sprint(n)
			}
			return ""
		})
		eventually(t, "Envoy knows the engines again", func() string {
			hosts := w.hosts(t)
			for _, e := range w.engines {
				if _, ok := hosts[e.Addr()]; !ok || len(hosts) != len(w.engines) {
					return fmt.Sprint(hosts)
				}
			}
			return ""
		})
		for range 10 {
			if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
				t.Fatalf("%v", r)
			}
		}
	})
}
