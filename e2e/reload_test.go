package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
)

// traffic is requests without a pause, each of which must succeed.
type traffic struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
	begun  turns
	done   atomic.Int64
	failed atomic.Pointer[string]
}

// startTraffic runs until its stop, or the test's end.
func (w *world) startTraffic(t *testing.T) *traffic {
	ctx, cancel := context.WithCancel(context.Background())
	tr := &traffic{cancel: cancel, begun: make(turns, 8)}
	for p, c := range []*http.Client{w.h1, w.h2} {
		for i := range 4 {
			begun := &tr.begun[4*p+i]
			tr.wg.Go(func() {
				body := chatOf(100 + 1000*i)
				if i%2 == 1 {
					body = strings.Replace(body, "{", `{"stream":true,"max_tokens":20,`, 1)
				}
				for ctx.Err() == nil {
					begun.Add(1)
					// A request that has begun ends: stop cuts none off.
					r, err := w.do(context.Background(), c, call{body: strings.NewReader(body)})
					if err != nil || r.status != 200 || r.err != nil {
						text := fmt.Sprint(err, " ", r)
						tr.failed.CompareAndSwap(nil, &text)
						return
					}
					tr.done.Add(1)
				}
			})
		}
	}
	t.Cleanup(func() { tr.cancel(); tr.wg.Wait() })
	return tr
}

// more waits for n further answers.
func (tr *traffic) more(t *testing.T, n int64) {
	t.Helper()
	before := tr.done.Load()
	eventually(t, fmt.Sprint(n, " more answers"), func() string {
		if f := tr.failed.Load(); f != nil {
			t.Fatalf("a request failed: %s", *f)
		}
		if got := tr.done.Load() - before; got < n {
			return fmt.Sprint(got)
		}
		return ""
	})
}

func (tr *traffic) stop(t *testing.T) {
	t.Helper()
	tr.cancel()
	tr.wg.Wait()
	if f := tr.failed.Load(); f != nil {
		t.Errorf("a request failed: %s", *f)
	}
}

// policy waits until a request says that it was picked by a policy.
func (w *world) waitPolicy(t *testing.T, want string) {
	t.Helper()
	eventually(t, "requests are picked by "+want, func() string {
		c := client1(t) // a new connection, which only a new listener takes
		defer c.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		r, err := w.do(ctx, c, call{body: strings.NewReader(chat), header: header("x-shunt-explain", "1")})
		if err != nil { // the old listener took it, and its drain time has ended
			return err.Error()
		}
		if got := r.header.Get("X-Shunt-Policy"); got != want {
			return fmt.Sprint(got, " ", r.status)
		}
		return ""
	})
}

// slow begins a request that ends only when its engine is told so.
func (w *world) slow(t *testing.T) (end func()) {
	t.Helper()
	for _, e := range w.engines {
		if err := e.SetFaults(sim.Fault{Kind: sim.FaultHang, Path: "/slow"}); err != nil {
			t.Fatal(err)
		}
	}
	b := w.begin(t, w.h1, call{method: "GET", path: "/slow"})
	eventually(t, "the slow request has arrived", func() string {
		for _, e := range w.engines {
			if len(e.Requests("/slow")) > 0 {
				return ""
			}
		}
		return "no"
	})
	return func() {
		t.Helper()
		for _, e := range w.engines {
			if err := e.SetFaults(); err != nil {
				t.Fatal(err)
			}
		}
		if r, err := b.wait(); err != nil || r.status != 200 {
			t.Errorf("a request that was under way: %v %v", err, r)
		}
	}
}

// TestListenerReload replaces the listener with its filters under load. Nothing
// is lost, and one that shunt refuses changes nothing.
func TestListenerReload(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := start(t, d, setup{lds: true, expect: []string{`shunt: configuration refused`, `shunt: policy`, `shunt: scrape`, `shunt: route configuration refused`}})
		end := w.slow(t)
		waiting := w.begin(t, w.h2, call{body: strings.NewReader(chat), header: header("x-shunt-test", "wait-10m")})
		w.waitLoad(t, 1, 1)
		tr := w.startTraffic(t)
		tr.more(t, 50)
		for _, policy := range []string{"random", "least-kv-cache", "least-request"} {
			w.options.Document = []byte(w.document("policy: " + policy + "\n"))
			w.writeListener(t)
			w.waitPolicy(t, policy)
			tr.more(t, 50)
		}
		w.waitStat(t, "listener_manager.lds.update_success", func(n int64) bool { return n >= 4 })

		t.Run("refused by shunt", func(t *testing.T) {
			w.write(t, "lds.yaml", string(w.withConfig(t, func() []byte { return w.listener(t) },
				oneLine(t, w.document("policy: fastest\nscrape: {interval: 1ms, nonsense: true}\n")))))
			w.waitStat(t, "listener_manager.lds.update_rejected", func(n int64) bool { return n == 1 })
			for _, problem := range []string{`policy.*: unknown policy "fastest"`, `scrape\.interval.*: `, `scrape\.nonsense.*: `} {
				w.waitLog(t, `\[error\].*shunt: .*`+problem)
			}
			w.waitPolicy(t, "least-request")
		})
		t.Run("a route's unknown pool", func(t *testing.T) {
			w.options.ExtraRoutes = d.route("/v1/completions", "shunt_engines", "pool: nobody")
			w.writeListener(t)
			w.waitStat(t, "listener_manager.lds.update_rejected", func(n int64) bool { return n == 2 })
			w.waitLog(t, `\[error\].*shunt: route configuration refused: pool: "nobody" is defined by no configuration; defined: default`)
			w.options.ExtraRoutes = d.route("/v1/completions", "shunt_engines", "policy: fastest")
			w.writeListener(t)
			w.waitStat(t, "listener_manager.lds.update_rejected", func(n int64) bool { return n == 3 })
			w.waitLog(t, `\[error\].*shunt: .*policy.*: unknown policy "fastest"`)
			w.options.ExtraRoutes = d.route("/v1/completions", "shunt_engines", "{pool: default, policy: random}")
			w.writeListener(t)
			eventually(t, "the route's policy counts", func() string {
				c := client1(t)
				r := w.must(t, c, call{path: "/v1/completions", body: strings.NewReader(`{"model":"m","prompt":"x"}`), header: header("x-shunt-explain", "1")})
				c.CloseIdleConnections()
				if got := r.header.Get("X-Shunt-Policy"); got != "random" {
					return got
				}
				return ""
			})
		})
		tr.more(t, 50)
		tr.stop(t)
		end()
		w.adminDo("POST", "/test/grant?n=1")
		if r, err := waiting.wait(); err != nil || r.status != 200 {
			t.Errorf("a request that waited meanwhile: %v %v", err, r)
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestNewestDefinitionCounts: while Envoy drains the old listener two live
// configurations define the pool differently.
func TestNewestDefinitionCounts(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		const noLists = "models: {discover: false}\n" // which engines count as requests
		w := start(t, d, setup{lds: true, config: noLists})
		gone, kept := w.engines[0], w.engines[1]
		w.setup.pools = "pools: {default: {static: " + w.static(kept) + "}}\n"
		w.options.Document = []byte(w.document(noLists))
		w.writeListener(t)
		eventually(t, "one endpoint is left", func() string {
			if s := w.status(t).Pools[0]; len(s.Endpoints) != 1 || s.Configs != 2 || !s.Conflict {
				return fmt.Sprintf("%d endpoints, %d configurations, conflict %v", len(s.Endpoints), s.Configs, s.Conflict)
			}
			return ""
		})
		w.waitLog(t, `\[warning\].*shunt: pool default: the newest configuration defines it differently`)
		before := gone.Counters().Received
		for range 30 {
			if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
				t.Errorf("%v", r)
			}
		}
		if n := gone.Counters().Received; n != before {
			t.Errorf("the endpoint that is gone got %d requests", n-before)
		}
	})
}

// TestOldConfigurationsEnd waits for Envoy to drop the old filter config: what
// stays in use keeps running.
func TestOldConfigurationsEnd(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{lds: true, args: []string{"--drain-time-s", "1", "--drain-strategy", "immediate"}})
		before := w.status(t)
		// What is still open when the drain time ends is cut, and leaves nothing.
		for _, e := range w.engines {
			if err := e.SetFaults(sim.Fault{Kind: sim.FaultHang, Path: "/hang"}); err != nil {
				t.Fatal(err)
			}
		}
		open := []*background{
			w.begin(t, w.h1, call{method: "GET", path: "/hang"}),
			w.begin(t, w.h2, call{method: "GET", path: "/hang"}),
			w.begin(t, w.h1, call{body: strings.NewReader(chat), header: header("x-shunt-test", "wait-10m")}),
			w.begin(t, w.h2, call{body: strings.NewReader(chat), header: header("x-shunt-test", "wait-10m")}),
		}
		w.waitLoad(t, 2, 2)
		w.options.Document = []byte(w.document("policy: random\n"))
		w.writeListener(t)
		w.waitPolicy(t, "random")
		eventually(t, "one configuration is left", func() string {
			if n := w.status(t).Pools[0].Configs; n != 1 {
				return fmt.Sprint(n)
			}
			return ""
		})
		for _, b := range open {
			if r, err := b.wait(); err == nil && r.err == nil {
				t.Errorf("answered: %v", r)
			}
		}
		w.waitLoad(t, 0, 0)
		// The pool is the process's: its picks are still counted, and it scrapes.
		after := w.status(t)
		if after.Pools[0].Snapshot < before.Pools[0].Snapshot || !after.Ready {
			t.Errorf("the pool began anew: snapshot %d, then %d; ready %v %s", before.Pools[0].Snapshot, after.Pools[0].Snapshot, after.Ready, after.Why)
		}
		scrapes := w.engines[0].Counters().Scrapes
		wait(t, w.engines[0], func(c sim.Counters) bool { return c.Scrapes > scrapes+2 })
		if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
			t.Errorf("%v", r)
		}
	})
}

// TestConfigFileReload replaces the file in the two ways that are usual, under
// load, without touching Envoy's listener.
func TestConfigFileReload(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		t.Run("by rename", func(t *testing.T) {
			w := start(t, d, setup{configFile: true, expect: []string{`shunt: configFile `, `shunt: keeping`}})
			end := w.slow(t)
			tr := w.startTraffic(t)
			tr.more(t, 50)
			for _, policy := range []string{"random", "least-kv-cache", "least-request"} {
				w.write(t, "shunt.yaml", w.document("policy: "+policy+"\n"))
				w.waitPolicy(t, policy)
				tr.more(t, 50)
			}
			w.write(t, "shunt.yaml", w.document("policy: fastest\nlimits: {requestBody: 1}\nscrape: {intervall: 1s}\n"))
			for _, problem := range []string{`configFile \S+: policy.*: unknown policy "fastest"`, `configFile \S+: limits\.requestBody.*: `, `configFile \S+: scrape\.intervall.*: `, `keeping the last good configuration`} {
				w.waitLog(t, `\[error\].*shunt: .*`+problem)
			}
			w.waitPolicy(t, "least-request")
			if w.metric(t, "shunt_config_stale") != 1 || w.metric(t, "shunt_config_reloads_total", "result", "refused") != 1 {
				t.Error("a broken file is not shown in /metrics")
			}
			tr.more(t, 50)
			if err := os.Remove(w.file("shunt.yaml")); err != nil {
				t.Fatal(err)
			}
			w.waitLog(t, `\[error\].*shunt: .*no such file`)
			tr.more(t, 50)
			w.write(t, "shunt.yaml", w.document("policy: random\n"))
			w.waitPolicy(t, "random")
			if w.metric(t, "shunt_config_stale") != 0 {
				t.Error("shunt_config_stale stays")
			}
			tr.stop(t)
			end()
			if n := w.stat(t, "listener_manager.listener_modified") + w.stat(t, "http.shunt.downstream_cx_drain_close"); n != 0 {
				t.Error("a listener was touched")
			}
			w.waitLoad(t, 0, 0)
		})
		t.Run("as a ConfigMap", func(t *testing.T) {
			w := prepareWorld(t, d, setup{})
			swap := func(n int, more string) {
				folder := fmt.Sprintf("..%d", n)
				if err := os.Mkdir(w.file(folder), 0o700); err != nil {
					t.Fatal(err)
				}
				w.write(t, folder+"/shunt.yaml", w.document(more))
				if err := os.Symlink(folder, w.file("..data_tmp")); err != nil {
					t.Fatal(err)
				}
				if err := os.Rename(w.file("..data_tmp"), w.file("..data")); err != nil {
					t.Fatal(err)
				}
			}
			swap(1, "")
			if err := os.Symlink("..data/shunt.yaml", w.file("shunt.yaml")); err != nil {
				t.Fatal(err)
			}
			w.options.ConfigFile = w.file("shunt.yaml")
			w.run(t)
			tr := w.startTraffic(t)
			tr.more(t, 20)
			for i, policy := range []string{"random", "least-kv-cache", "least-request"} {
				swap(2+i, "policy: "+policy+"\n")
				w.waitPolicy(t, policy)
				tr.more(t, 20)
			}
			tr.stop(t)
			w.waitLoad(t, 0, 0)
		})
	})
}

// TestPoolFile changes the list of endpoints under load.
func TestPoolFile(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 3, expect: []string{`shunt: .*keeping the last good set`}})
		a, b, c := w.engines[0], w.engines[1], w.engines[2]
		w.write(t, "pool.yaml", w.static(a, b))
		w.setup.pools = "pools: {default: {file: {path: " + w.file("pool.yaml") + "}}}\n"
		w.options.Document = []byte(w.document("models: {discover: false}\n"))
		w.run(t)
		tr := w.startTraffic(t)
		tr.more(t, 50)
		if n := c.Counters().Received; n != 0 {
			t.Errorf("an endpoint that is not listed got %d requests", n)
		}

		w.write(t, "pool.yaml", w.static(b, c))
		eventually(t, "the first endpoint is gone", func() string {
			if endpoint(w.status(t), a) != nil {
				return "it is there"
			}
			return ""
		})
		// What was picked before may still be on its way; then no more come.
		tr.begun.pass(t)
		before := a.Counters().Received
		wait(t, c, func(n sim.Counters) bool { return len(c.Requests("/v1/chat/completions")) > 10 })
		tr.more(t, 100)
		if n := a.Counters().Received; n != before {
			t.Errorf("the removed endpoint got %d more requests", n-before)
		}

		for _, broken := range []string{"[{address: }", "[{address: \"host:1\"}]"} {
			w.write(t, "pool.yaml", broken)
			eventually(t, "the set is not fresh", func() string {
				if s := w.status(t).Pools[0]; s.Fresh || len(s.Endpoints) != 2 {
					return fmt.Sprint("fresh ", s.Fresh, " endpoints ", len(s.Endpoints))
				}
				return ""
			})
			tr.more(t, 20)
		}
		w.waitLog(t, `\[error\].*pool\.yaml.*keeping the last good set of 2 endpoints`)

		w.write(t, "pool.yaml", w.static(a, b, c))
		w.waitState(t, a, "ready")
		tr.more(t, 50)
		// Each of these sets has nothing in common with the one before.
		w.write(t, "pool.yaml", w.static(a))
		for range 3 {
			w.waitState(t, a, "ready")
			w.write(t, "pool.yaml", w.static(b, c))
			w.waitState(t, b, "ready")
			tr.more(t, 20)
			w.write(t, "pool.yaml", w.static(a))
		}
		w.waitState(t, a, "ready")
		w.write(t, "pool.yaml", w.static(a, b, c))
		w.waitState(t, b, "ready")
		tr.stop(t)
		if s := w.status(t).Pools[0]; !s.Fresh || !s.Complete || len(s.Endpoints) != 3 {
			t.Errorf("after the repair: %+v", s)
		}
		w.waitLoad(t, 0, 0)

		w.write(t, "pool.yaml", "[]")
		eventually(t, "an empty pool", func() string {
			r := w.must(t, w.h1, call{body: strings.NewReader(chat)})
			if r.status != http.StatusServiceUnavailable || errorOf(t, r).Error.Code != "rejected-no-endpoints" {
				return r.String()
			}
			return ""
		})
	})
}
