package e2e

import (
	"context"
	"errors"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	"github.com/shuntproxy/shunt/internal/loopback"
	"github.com/shuntproxy/shunt/internal/sim"
)

// TestRefusedAtStart: each problem is a line with its path, and Envoy ends.
func TestRefusedAtStart(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 1})
		static := "{static: " + w.static(w.engines...) + "}"
		w.write(t, "broken.yaml", "pools: {default: {static: [{address: engine-1}]}}\npolicy: fastest\n")
		for _, row := range []struct {
			name, config string
			lines        []string
		}{
			{"unknown fields", "{pools: {default: " + static + ", other: {static: [], nonsense: 1}}, polcy: random}", []string{`pools\.other\.nonsense: `, `polcy: `}},
			{"several problems", "{pools: {default: {static: [{address: engine-1}, {address: \"10.0.0.1:99999\"}]}}, policy: fastest, scrape: {interval: 1ms}}",
				[]string{`pools\.default\.static\[0\]\.address: .*"engine-1"`, `pools\.default\.static\[1\]\.address: `, `policy: unknown policy "fastest"`, `scrape\.interval: `}},
			{"no pool", "{policy: random}", []string{`pools: is missing`}},
			{"a fraction for a whole number", "{pools: {default: " + static + "}, limits: {jsonDepth: 64.5}}", []string{`limits\.jsonDepth: .*64\.5`}},
			{"a missing file", "{configFile: nowhere.yaml}", []string{`nowhere\.yaml: no such file`}},
			{"a broken file", "{configFile: \"" + w.file("broken.yaml") + "\"}", []string{`pools\.default\.static\[0\]\.address.*: `, `policy.*: `}},
			{"a file and more", "{configFile: x.yaml, policy: random}", []string{`configFile`}},
			{"a missing pool file", "{pools: {default: {file: {path: nowhere.yaml}}}}", []string{`pools\.default\.file.*nowhere\.yaml`}},
		} {
			t.Run(row.name, func(t *testing.T) {
				o := w.envoyOptions(t)
				o.Bootstrap = w.withConfig(t, func() []byte { return w.bootstrap(t) }, row.config)
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				e, err := envoyrun.Start(ctx, o)
				if err == nil {
					_ = e.Stop()
					t.Fatal("Envoy started")
				}
				var refused *envoyrun.StartError
				if !errors.As(err, &refused) || !strings.Contains(refused.Reason, "exit status 1") {
					t.Fatalf("%v", err)
				}
				checkLines(t, refused.Log, row.lines)
				ctx2, cancel2 := context.WithTimeout(t.Context(), patience)
				defer cancel2()
				log, err := envoyrun.Validate(ctx2, o)
				if err == nil {
					t.Error("--mode validate takes it")
				}
				checkLines(t, log, row.lines)
			})
		}
	})
}

func checkLines(t *testing.T, log, wanted []string) {
	t.Helper()
	for _, want := range wanted {
		re := regexp.MustCompile(`\[error\].*shunt: .*` + want)
		found := false
		for _, l := range log {
			found = found || re.MatchString(l)
		}
		if !found {
			var said []string
			for _, l := range log {
				if strings.Contains(l, "[error]") || strings.Contains(l, "[critical]") {
					said = append(said, l)
				}
			}
			t.Errorf("no error line matches %s:\n%s", want, strings.Join(said, "\n"))
		}
	}
}

// TestNumbersThroughEnvoysYAML: Envoy makes strings of fractions and of whole
// numbers from 2^32 on.
func TestNumbersThroughEnvoysYAML(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 1})
		o := w.envoyOptions(t)
		o.Bootstrap = w.withConfig(t, func() []byte { return w.bootstrap(t) }, `{pools: {default: {static: `+w.static(w.engines...)+`}},
			admin: {address: "unix:`+w.file("admin.sock")+`"}, scrape: {interval: 0.1s, maxBytes: 1048576.0},
			limits: {requestBody: 2000.0, heldBodies: 5000000000, jsonDepth: "64"}, fallbacks: 0.0, subsetHeader: no, explain: {header: yes}}`)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		e, err := envoyrun.Start(ctx, o)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := e.Stop(); err != nil {
				t.Error(err)
			}
			if err := e.CheckLog(); err != nil {
				t.Error(err)
			}
		}()
		w.envoy, w.addr, w.h1 = e, e.Addr("shunt"), client1(t)
		w.ready(t)
		for n, want := range map[int]int{2000: 200, 2001: 413} {
			if r := w.must(t, w.h1, call{body: strings.NewReader(chatOf(n)), header: header("x-shunt-explain", "1")}); r.status != want {
				t.Errorf("%d bytes: %v", n, r)
			} else if got := r.header.Get("X-Shunt-Endpoint"); want == 200 && got == "" {
				t.Error("explain.header: yes was not read as true")
			}
		}
		deep := `{"model":"m","messages":[{"role":"user","content":"x"}],"x":` + strings.Repeat("[", 70) + strings.Repeat("]", 70) + "}"
		if r := w.must(t, w.h1, call{body: strings.NewReader(deep)}); r.status != 400 {
			t.Errorf("limits.jsonDepth 64: %v", r)
		}
	})
}

// TestValidateStartsNothing: no listener, no scrape, no file watch.
func TestValidateStartsNothing(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 1, configFile: true})
		// The admin address is taken, and to validate needs no address.
		l, err := net.Listen("unix", w.file("admin.sock"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		log, err := envoyrun.Validate(ctx, w.envoyOptions(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range log {
			if strings.Contains(line, "shunt: ") {
				t.Errorf("it said: %s", line)
			}
		}
		if c := w.engines[0].Counters(); c.Scrapes != 0 || c.Received != 0 {
			t.Errorf("the engine was asked: %+v", c)
		}
	})
}

// TestAdmin is the listener for operators.
func TestAdmin(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		w.readAll(t)
		for range 5 {
			w.must(t, w.h1, call{body: strings.NewReader(chat)})
		}
		if code, body := w.adminGet("/healthz"); code != 200 || body != "ok\n" {
			t.Errorf("/healthz: %d %q", code, body)
		}
		if code, _ := w.adminGet("/nothing"); code != 404 {
			t.Errorf("/nothing: %d", code)
		}
		if code, _ := w.adminDo("POST", "/metrics"); code != 405 {
			t.Errorf("POST /metrics: %d", code)
		}
		_, page := w.adminGet("/metrics")
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(page))
		if err != nil {
			t.Fatal(err)
		}
		for name, f := range families {
			if !strings.HasPrefix(name, "shunt_") || f.GetHelp() == "" {
				t.Errorf("metric %s, help %q", name, f.GetHelp())
			}
		}
		for _, name := range []string{"shunt_picks_total", "shunt_drops_total", "shunt_endpoint_ready", "shunt_endpoint_picks_total",
			"shunt_endpoint_num_requests_running", "shunt_endpoint_kv_cache_usage_perc", "shunt_scrapes_total", "shunt_build_info", "shunt_waiting_requests"} {
			if families[name] == nil {
				t.Errorf("%s is missing", name)
			}
		}
		if n := w.metric(t, "shunt_endpoint_ready"); n != 2 {
			t.Errorf("shunt_endpoint_ready sums to %v", n)
		}
		if n := w.metric(t, "shunt_endpoint_picks_total"); n != 5 {
			t.Errorf("shunt_endpoint_picks_total sums to %v", n)
		}
		s := w.status(t)
		if !s.Ready || len(s.Pools) != 1 || len(s.Pools[0].Endpoints) != 2 || s.Pools[0].Configs != 1 || s.Pools[0].Models[0] != "m" {
			t.Errorf("%+v", s)
		}
		for _, e := range s.Pools[0].Endpoints {
			if e.State != "ready" || e.Engine != "vllm" || e.Running == nil || e.Waiting == nil || e.KV == nil || e.AgeSeconds == nil {
				t.Errorf("%+v", e)
			}
		}
	})
}

// TestReadyz is false until every endpoint has been heard of once.
func TestReadyz(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 2, notReady: true, config: "scrape: {interval: 1m, timeout: 1m, staleAfter: 5m}\n"})
		if err := w.engines[1].SetMetricsFault(sim.MetricsFault{Kind: sim.MetricsHang}); err != nil {
			t.Fatal(err)
		}
		// The serving port answers, so readiness needs no page.
		w.run(t)
		w.ready(t)
		if code, _ := w.adminGet("/healthz"); code != 200 {
			t.Errorf("/healthz: %d", code)
		}
	})
}

// startCold is a world whose only engine answers nothing until it is opened,
// so that requests wait for the pool's start.
func startCold(t *testing.T, d door, config string, expect []string) (*world, *hole) {
	t.Helper()
	hole := startHole(t)
	w := prepareWorld(t, d, setup{notReady: true, engines: 1, expect: expect})
	w.setup.pools = "pools: {default: {static: [{address: \"" + hole.addr + "\", labels: {model.aibrix.ai/name: m, model.aibrix.ai/metric-port: \"" + hole.port + "\"}}]}}\n"
	w.options.Document = []byte(w.document(config + "health: {path: /health, timeout: 1m}\nstartupHold: 1m\nscrape: {interval: 1m, timeout: 1m, staleAfter: 5m}\n"))
	w.run(t)
	eventually(t, "shunt's listener answers", func() string {
		if status, text := w.adminGet("/healthz"); status == 0 {
			return text
		}
		return ""
	})
	return w, hole
}

// TestColdStart: requests that come before anything is known of an endpoint wait
// for it, and are served.
func TestColdStart(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w, hole := startCold(t, d, "", nil)
		eventually(t, "/readyz is 503", func() string {
			code, body := w.adminGet("/readyz")
			if code == 503 && strings.Contains(body, "probed") {
				return ""
			}
			return strconv.Itoa(code) + " " + body
		})
		b := w.begin(t, w.h1, call{body: strings.NewReader(chat)})
		g := w.begin(t, w.h2, call{method: "GET", path: "/x"})
		w.waitLoad(t, 0, 2)
		hole.open()
		for _, b := range []*background{b, g} {
			if r, err := b.wait(); err != nil || r.status != 200 {
				t.Errorf("%v %v", err, r)
			}
		}
		w.ready(t)
		w.waitLoad(t, 0, 0)
	})
}

// TestPortInUse is retried, said once, and no reason to fail.
func TestPortInUse(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		l, err := net.Listen("tcp", loopback.Reserve(t))
		if err != nil {
			t.Fatal(err)
		}
		w := start(t, d, setup{config: "metrics: {address: \"" + l.Addr().String() + "\"}\n", expect: []string{`shunt: metrics: cannot listen on`}})
		w.waitLog(t, `\[error\].*shunt: metrics: cannot listen on `+regexp.QuoteMeta(l.Addr().String()))
		if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
			t.Errorf("%v", r)
		}
		_ = l.Close()
		w.waitLog(t, `shunt: metrics listens on `+regexp.QuoteMeta(l.Addr().String()))
		for path, want := range map[string]int{"/metrics": 200, "/healthz": 200, "/readyz": 200, "/": 200, "/statusz.json": 404, "/explain": 404, "/drain": 404} {
			resp, err := w.h1.Get("http://" + l.Addr().String() + path)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != want {
				t.Errorf("%s on the metrics listener: %d", path, resp.StatusCode)
			}
		}
	})
}

// TestNoSecretsInOutputs greps all that shunt and Envoy put out for texts of
// requests and answers.
func TestNoSecretsInOutputs(t *testing.T) {
	const canary = "CANARY-5e0c1f"
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, expect: panicLines})
		secret := header("authorization", "Bearer "+canary, "cookie", "s="+canary, "x-api-key", canary, "x-shunt-explain", "1")
		bodies := []string{
			strings.Replace(chat, "hi", canary, 1),
			`{"model":"m","stream":true,"messages":[{"role":"user","content":"` + canary + `"}]}`,
			`{"messages":"` + canary, canary, `{"model":"m","messages":"` + canary + `"}`,
		}
		for proto, c := range w.protocols() {
			for _, test := range []string{"", "wait-1ms", "panic-headers", "panic-body", "panic-finish"} {
				for _, body := range bodies {
					h := secret.Clone()
					h.Set("X-Shunt-Test", test)
					if r := w.must(t, c, call{body: strings.NewReader(body), path: "/v1/chat/completions?key=" + canary, header: h}); r.status == 0 {
						t.Errorf("%s %s: %v", proto, test, r)
					}
				}
			}
		}
		_ = w.engines[0].SetFaults(sim.Fault{Kind: sim.FaultStatus, Count: 1, Status: 500, Body: canary})
		w.must(t, w.h1, call{body: strings.NewReader(bodies[0]), header: secret})
		_ = w.engines[0].SetFaults(sim.Fault{Kind: sim.FaultReset, Count: 1})
		last := w.must(t, w.h1, call{body: strings.NewReader(bodies[0]), header: secret})
		w.access(t, last.id)
		outputs := map[string]string{"the log": strings.Join(w.envoy.Log(), "\n")}
		for _, path := range []string{"/metrics", "/statusz.json", "/readyz", "/healthz"} {
			_, outputs[path] = w.adminGet(path)
		}
		stats, err := w.envoy.Stats(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		for name := range stats {
			outputs["Envoy's statistics"] += name + "\n"
		}
		for where, text := range outputs {
			if len(text) == 0 {
				t.Errorf("%s is empty", where)
			}
			for line := range strings.SplitSeq(text, "\n") {
				if strings.Contains(line, canary) {
					t.Errorf("%s shows a secret: %s", where, line)
				}
			}
		}
	})
}
