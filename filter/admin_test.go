package filter

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/shuntproxy/shunt/internal/loopback"
	"github.com/shuntproxy/shunt/internal/pool"
)

// register makes the world's pools those of the process, as if they ran.
func (w *world) register() {
	w.mu.Lock()
	defer w.mu.Unlock()
	set := w.gen.settings.Load()
	w.pools, w.live[w.gen] = set.pools, struct{}{}
	for _, p := range set.pools {
		p.users, p.owner = 1, w.gen
		def, _ := set.cfg.Pools.Lookup(p.name)
		p.def = *def
		w.gen.refs = append(w.gen.refs, p)
	}
}

func ask(h http.Handler, method, path string) (int, string) {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest(method, path, nil))
	return rec.Code, rec.Body.String()
}

func TestReadyz(t *testing.T) {
	w := newWorld(t, "pools: {default: {static: []}}")
	monitor := w.monitorHandler()
	step := func(name string, status int, body string) {
		t.Helper()
		if code, got := ask(monitor, "GET", "/readyz"); code != status || got != body+"\n" {
			t.Errorf("%s: %d %q, want %d %q", name, code, got, status, body)
		}
		if code, _ := ask(monitor, "GET", "/healthz"); code != 200 {
			t.Errorf("%s: /healthz is %d", name, code)
		}
		if st := w.Status(); st.Ready != (status == 200) || st.Why != strings.TrimSuffix(body, "ok") {
			t.Errorf("%s: status says %v %q", name, st.Ready, st.Why)
		}
	}
	step("nothing loaded", 503, "no configuration is loaded")
	w.register()
	step("started", 503, "pool default: discovery has not delivered yet")
	w.publish("default", ep(1, "m"), unjudged(ep(2, "m")))
	step("one has not answered", 503, "pool default: endpoints are being probed")
	w.publish("default", ep(1, "m"), notReady(ep(2, "m")))
	step("all are judged", 200, "ok")
	w.publish("default", ep(1, "m"), unjudged(ep(3, "m")))
	step("another joins", 200, "ok")
	w.publish("default", notReady(ep(1, "m")))
	step("none is ready", 200, "ok")
	w.gen.Release()
	step("released", 503, "no configuration is loaded")
}

// TestUnknownPages name those that there are.
func TestUnknownPages(t *testing.T) {
	w := newWorld(t, "")
	w.register()
	for name, row := range map[string]struct {
		handler http.Handler
		paths   string
	}{
		"admin":   {w.adminHandler(), "GET /metrics, /healthz, /readyz, /statusz.json, /explain, /drain; POST /drain, /undrain"},
		"monitor": {w.monitorHandler(), "GET /metrics, /healthz, /readyz"},
	} {
		for group := range strings.SplitSeq(row.paths, "; ") {
			method, paths, _ := strings.Cut(group, " ")
			for path := range strings.SplitSeq(paths, ", ") {
				if code, body := ask(row.handler, method, path); code == 404 || code == 405 {
					t.Errorf("%s: %s %s is %d %q", name, method, path, code, body)
				}
			}
		}
		if code, body := ask(row.handler, "GET", "/"); code != 200 || body != "shunt "+Version+": "+row.paths+"\n" {
			t.Errorf("%s: / is %d %q", name, code, body)
		}
		if code, body := ask(row.handler, "GET", "/stats/x"); code != 404 || body != "no GET /stats/x here; there are: "+row.paths+"\n" {
			t.Errorf("%s: /stats/x is %d %q", name, code, body)
		}
		if code, _ := ask(row.handler, "POST", "/metrics"); code != 405 {
			t.Errorf("%s: POST /metrics is %d", name, code)
		}
		for group := range strings.SplitSeq(row.paths, "; ") {
			method, paths, _ := strings.Cut(group, " ")
			for path := range strings.SplitSeq(paths, ", ") {
				if code, body := ask(row.handler, method, path); code == 404 {
					t.Errorf("%s: %s %s, which is listed, is %q", name, method, path, body)
				}
			}
		}
	}
}

func TestAdminServesTheRest(t *testing.T) {
	w := newWorld(t, "")
	w.register()
	for path, want := range map[string]struct{ admin, monitor int }{
		"/metrics": {200, 200}, "/healthz": {200, 200}, "/statusz.json": {200, 404}, "/": {200, 200}, "/nowhere": {404, 404}, "/test/grant": {404, 404},
	} {
		if path == "/test/grant" && injecting {
			continue
		}
		if code, _ := ask(w.adminHandler(), "GET", path); code != want.admin {
			t.Errorf("admin %s: %d, want %d", path, code, want.admin)
		}
		if code, _ := ask(w.monitorHandler(), "GET", path); code != want.monitor {
			t.Errorf("metrics %s: %d, want %d", path, code, want.monitor)
		}
	}
}

// endpointsOfAllKinds have every state that is shown.
func endpointsOfAllKinds(w *world) pool.Input {
	scraped := ep(1, "m", "adapter")
	scraped.Engine, scraped.Source = pool.EngineVLLM, "static"
	read := &pool.Metrics{Taken: w.now().Add(-time.Second)}
	read.Set(pool.NumRequestsRunning, 3)
	read.Set(pool.KVCacheUsagePerc, 0.25)
	stale := ep(2, "m")
	old := &pool.Metrics{Taken: w.now().Add(-time.Minute)}
	old.Set(pool.NumRequestsRunning, 3)
	aside := ep(3, "m")
	aside.SetAsideSince, aside.SetAsideUntil = w.now(), w.now().Add(10*time.Second)
	gone := notReady(ep(4, "m"))
	gone.Why = "connection refused"
	prefill := ep(5, "m")
	prefill.PrefillOnly = true
	nameless := unjudged(ep(6))
	nameless.Pod = ""
	return pool.Input{
		Complete: true, Fresh: true,
		Endpoints: []pool.Endpoint{scraped, stale, aside, gone, prefill, nameless},
		Metrics:   []*pool.Metrics{read, old, nil, nil, nil, nil},
	}
}

func TestStatusz(t *testing.T) {
	w := newWorld(t, "")
	w.register()
	w.publishInput("default", endpointsOfAllKinds(w))
	for range 2 {
		w.pool("default").holder.Load().Endpoints[0].Live.Reserve(pool.Load{}, time.Now())
	}
	waiting := w.stream()
	waiting.send(t, post(chatPath), route(t, w, "pool: other"), chatBody)
	w.clock.advance(2 * time.Second)
	code, body := ask(w.adminHandler(), "GET", "/statusz.json")
	if code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	golden(t, "statusz.json", body)
	waiting.finish(End{})
}

func TestMetricsPage(t *testing.T) {
	w := newWorld(t, "")
	w.register()
	w.publishInput("default", endpointsOfAllKinds(w))
	s := w.stream()
	s.chat(t, chatBody)
	s.finish(End{FirstByte: time.Millisecond})
	w.stream().chat(t, "x")
	w.fault("test", "cause", nil)
	w.metrics.reloads.WithLabelValues("taken").Inc()
	code, body := ask(w.monitorHandler(), "GET", "/metrics")
	if code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	var names strings.Builder
	for _, line := range strings.Split(body, "\n") {
		if strings.HasPrefix(line, "# ") {
			names.WriteString(line + "\n")
		}
	}
	golden(t, "metrics.golden", names.String())
	for name, f := range families {
		if !strings.HasPrefix(name, "shunt_") || f.GetHelp() == "" {
			t.Errorf("%s has the help %q", name, f.GetHelp())
		}
	}
	// What is absent or stale has no series; what is gone, neither.
	for series, want := range map[string]bool{
		`shunt_endpoint_num_requests_running{endpoint="10.0.0.1:8000",pod="pod-1",pool="default"} 3`:   true,
		`shunt_endpoint_num_requests_running{endpoint="10.0.0.2:8000",pod="pod-2",pool="default"}`:     false,
		`shunt_endpoint_num_requests_waiting{`:                                                         false,
		`shunt_endpoint_kv_cache_usage_perc{endpoint="10.0.0.1:8000",pod="pod-1",pool="default"} 0.25`: true,
		`shunt_endpoint_metrics_age_seconds{endpoint="10.0.0.2:8000",pod="pod-2",pool="default"} 60`:   true,
		`shunt_endpoint_set_aside{endpoint="10.0.0.3:8000",pod="pod-3",pool="default"} 1`:              true,
		`shunt_endpoint_ready{endpoint="10.0.0.4:8000",pod="pod-4",pool="default"} 0`:                  true,
		`shunt_endpoint_ready{endpoint="10.0.0.6:8000",pod="",pool="default"} 0`:                       true,
		`shunt_picks_total{policy="least-request",pool="default"} 1`:                                   true,
		`shunt_refusals_total{code="invalid_json",pool="default"} 1`:                                   true,
		`shunt_drops_total{pool="other",reason="evicted"} 0`:                                           true,
		`shunt_first_byte_seconds_count{pool="default"} 1`:                                             true,
		`shunt_waiting_requests 0`:          true,
		`shunt_config_stale 0`:              true,
		`shunt_build_info{version="dev"} 1`: true,
	} {
		if strings.Contains(body, "\n"+series) != want {
			t.Errorf("%s: present is %v\n%s", series, !want, body)
		}
	}
	w.publish("default")
	if _, body := ask(w.monitorHandler(), "GET", "/metrics"); strings.Contains(body, "10.0.0.") {
		t.Error("endpoints that are gone are still shown")
	}
}

// TestNoCanary: what clients send is in nothing that shunt shows.
func TestNoCanary(t *testing.T) {
	const canary = "CANARY"
	w := newWorld(t, "allowedPolicies: [random]")
	w.register()
	w.publish("default", ep(1, "m"))
	for _, body := range []string{
		`{"model":"m","messages":[{"content":"` + canary + `"}]}`, `{"model":"m","messages":["` + canary,
		`{"model":"m","` + canary + `":1}`, `{"model":{"` + canary + `":1}}`, canary,
	} {
		s := w.stream()
		v := s.chat(t, body, "authorization", canary, "cookie", canary)
		if got := show(v); strings.Contains(got, canary) {
			t.Errorf("%s: %s", body, got)
		}
		s.finish(End{Details: canary})
	}
	_, metrics := ask(w.adminHandler(), "GET", "/metrics")
	_, status := ask(w.adminHandler(), "GET", "/statusz.json")
	for name, text := range map[string]string{"metrics": metrics, "statusz": status, "log": w.log.String()} {
		if strings.Contains(text, canary) {
			t.Errorf("the canary is in %s", name)
		}
	}
}

func TestPortInUseIsRetried(t *testing.T) {
	ln, err := net.Listen("tcp", loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	rt, log := newRuntime(t)
	if _, err := rt.Load([]byte("pools: {p: {static: []}}\nadmin: {address: \"" + ln.Addr().String() + "\"}")); err != nil {
		t.Fatal(err) // never fatal
	}
	log.wait(t, 1, "admin: cannot listen on "+ln.Addr().String())
	_ = ln.Close()
	log.wait(t, 1, "admin listens on "+ln.Addr().String())
	if get(t, "http://"+ln.Addr().String()+"/healthz") != "ok\n" {
		t.Error("it does not answer")
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestListenersFollowTheConfiguration(t *testing.T) {
	rt, log := newRuntime(t)
	one, two, three := loopback.Reserve(t), loopback.Reserve(t), loopback.Reserve(t)
	load := func(admin, metrics string) *Generation {
		t.Helper()
		gen, err := rt.Load([]byte("pools: {p: {static: []}}\nadmin: {address: \"" + admin + "\"}\nmetrics: {address: \"" + metrics + "\"}"))
		if err != nil {
			t.Fatal(err)
		}
		return gen
	}
	first := load(one, three)
	log.wait(t, 1, "admin listens on "+one)
	log.wait(t, 1, "metrics listens on "+three)
	if !strings.Contains(get(t, "http://"+three+"/metrics"), "shunt_build_info") {
		t.Error("no metrics")
	}
	second := load(two, "")
	log.wait(t, 1, "admin listens on "+two)
	closed := func(address string) {
		t.Helper()
		eventually(t, address+" is closed", func() bool {
			c, err := net.Dial("tcp", address)
			if err == nil {
				_ = c.Close()
			}
			return err != nil
		})
	}
	closed(one)
	closed(three)
	// Envoy drops the new one and keeps the old.
	second.Release()
	log.wait(t, 2, "admin listens on "+one)
	log.wait(t, 2, "metrics listens on "+three)
	closed(two)
	first.Release()
	closed(one)
	closed(three)
}

func TestUnixSocket(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "admin.sock")
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listenOn("unix", path); err == nil {
		t.Fatal("took a socket that somebody answers on")
	}
	stale.SetUnlinkOnClose(false)
	_ = stale.Close()
	rt, log := newRuntime(t)
	if _, err := rt.Load([]byte("pools: {p: {static: []}}\nadmin: {address: \"unix:" + path + "\"}")); err != nil {
		t.Fatal(err)
	}
	log.wait(t, 1, "admin listens on unix:"+path)
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		},
	}}
	resp, err := client.Get("http://shunt/healthz")
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %v", resp, err)
	}
	_ = resp.Body.Close()
	rt.Stop()
	if _, err := os.Stat(path); err == nil {
		t.Error("the socket is left")
	}

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenOn("unix", file); err == nil {
		t.Error("listens on a file")
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "precious" {
		t.Errorf("the file is now %q, %v", text, err)
	}
}
