package filter

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// engine is an engine that serves a model.
func engine(t *testing.T, name string) (address string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=%q} 0\n", name)
	})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q}]}`, name)
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return srv.Listener.Addr().String()
}

// entry is an endpoint of a static list or of a file.
func entry(address, model string) string {
	_, port, _ := strings.Cut(address, ":")
	return fmt.Sprintf(`{address: %q, labels: {model.aibrix.ai/name: %s, model.aibrix.ai/metric-port: %q}}`, address, model, port)
}

func staticConfig(entries ...string) string {
	return "admin: {address: \"\"}\npools: {default: {static: [" + strings.Join(entries, ", ") + "]}}"
}

func mustLoad(t *testing.T, rt *Runtime, yaml string) *Generation {
	t.Helper()
	gen, err := rt.Load([]byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	return gen
}

func (g *Generation) stream() *stream {
	s := &stream{host: newHost()}
	s.Init(s.host, g)
	return s
}

// settled is the verdict on a chat request, however often it has to wait.
func (s *stream) settled(t *testing.T) *Verdict {
	t.Helper()
	s.chat(t, chatBody)
	for s.v.Action == Wait {
		select {
		case <-s.posts:
			s.Resume(&s.v)
		case <-time.After(30 * time.Second):
			t.Fatal("never woken")
		}
	}
	return &s.v
}

func (rt *Runtime) pool(name string) *Pool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return rt.pools[name]
}

// TestStaticWaitsForTheFirstAnswer: the first request after the start waits for
// the endpoint's first answer, which wakes it.
func TestStaticWaitsForTheFirstAnswer(t *testing.T) {
	rt, log := newRuntime(t)
	address := engine(t, "m")
	gen := mustLoad(t, rt, staticConfig(entry(address, "m")))
	s := gen.stream()
	if v := s.settled(t); v.Destination != address {
		t.Fatalf("got %s\n%s", show(v), log)
	}
	s.finish(End{})
}

// TestReloadKeepsWhatStays: snapshot, live load and requests in flight belong
// to the pool's name.
func TestReloadKeepsWhatStays(t *testing.T) {
	rt, _ := newRuntime(t)
	one, two := engine(t, "m"), engine(t, "m")
	first := mustLoad(t, rt, staticConfig(entry(one, "m")))
	s := first.stream()
	s.settled(t)
	p, live := rt.pool("default"), s.held.Live()
	seq := p.holder.Load().Seq

	second := mustLoad(t, rt, staticConfig(entry(one, "m"), entry(two, "m")))
	first.Release()
	if rt.pool("default") != p || second.settings.Load().first != p {
		t.Fatal("another pool")
	}
	eventually(t, "the new endpoint is ready", func() bool { return len(p.holder.Load().All().Index) == 2 })
	if p.holder.Load().Seq <= seq {
		t.Error("the sequence began anew")
	}
	if e := p.holder.Load().ByKey(one); e.Live != live || e.Live.InFlight() != 1 {
		t.Errorf("in flight: %d", e.Live.InFlight())
	}
	// The emptier one is picked: the load of the old generation's request counts.
	next := second.stream()
	if v := next.settled(t); v.Destination != two {
		t.Errorf("got %s", show(v))
	}
	s.finish(End{}) // a request outlives the configuration it came under
	next.finish(End{})
	if load(p) != 0 {
		t.Errorf("load %d", load(p))
	}
}

// TestLinger: Envoy may drop the last configuration before it makes the next.
func TestLinger(t *testing.T) {
	log := newLines()
	rt := NewRuntime(Options{Log: log.write, Linger: time.Hour})
	t.Cleanup(rt.Stop)
	address := engine(t, "m")
	yaml := staticConfig(entry(address, "m"))
	gen := mustLoad(t, rt, yaml)
	s := gen.stream()
	s.settled(t)
	p := rt.pool("default")
	gen.Release()
	gen.Release() // a second one does nothing
	if rt.pool("default") != p || !rt.running {
		t.Fatal("stopped at once")
	}
	gen = mustLoad(t, rt, yaml)
	if rt.pool("default") != p || load(p) != 1 {
		t.Fatal("not what was there")
	}
	rt.stopUnused() // the old timer fires: it is used again
	if rt.pool("default") != p {
		t.Fatal("stopped a pool that is in use")
	}
	s.finish(End{})

	rt.options.Linger = time.Millisecond
	gen.Release()
	eventually(t, "everything has stopped", func() bool {
		rt.mu.Lock()
		defer rt.mu.Unlock()
		return len(rt.pools) == 0 && !rt.running
	})
	gen = mustLoad(t, rt, yaml) // and starts anew
	s = gen.stream()
	if v := s.settled(t); v.Destination != address {
		t.Errorf("got %s", show(v))
	}
	if rt.pool("default") == p {
		t.Error("a pool that was stopped is used again")
	}
	s.finish(End{})
}

func TestAPoolThatIsDroppedStops(t *testing.T) {
	rt, _ := newRuntime(t)
	first := mustLoad(t, rt, "admin: {address: \"\"}\npools: {a: {static: []}, b: {static: []}}")
	second := mustLoad(t, rt, "admin: {address: \"\"}\npools: {b: {static: []}}")
	b := rt.pool("b")
	if rt.pool("a") == nil {
		t.Error("a pool in use has stopped")
	}
	first.Release()
	eventually(t, "a has stopped", func() bool { return rt.pool("a") == nil })
	if rt.pool("b") != b || !rt.running {
		t.Error("b has stopped")
	}
	second.Release()
}

// TestDefinitions: the newest configuration defines a pool; a live older one
// that differs is said once and shown.
func TestDefinitions(t *testing.T) {
	rt, log := newRuntime(t)
	const warning = "pool default: the newest configuration defines it differently"
	endpoints := func(want ...string) {
		t.Helper()
		eventually(t, fmt.Sprint("endpoints ", want), func() bool {
			var got []string
			for _, e := range rt.Status().Pools[0].Endpoints {
				got = append(got, e.Endpoint)
			}
			return fmt.Sprint(got) == fmt.Sprint(want)
		})
	}
	status := func(configs int, conflict bool, warnings int) {
		t.Helper()
		p := rt.Status().Pools[0]
		if p.Configs != configs || p.Conflict != conflict || log.count(warning) != warnings {
			t.Errorf("%d configs, conflict %v, %d warnings; want %d, %v, %d", p.Configs, p.Conflict, log.count(warning), configs, conflict, warnings)
		}
	}
	one, two := engine(t, "m"), engine(t, "m")
	first := mustLoad(t, rt, staticConfig(entry(one, "m")))
	status(1, false, 0)
	same := mustLoad(t, rt, staticConfig(entry(one, "m")))
	status(2, false, 0)
	same.Release()
	second := mustLoad(t, rt, staticConfig(entry(two, "m")))
	endpoints(two)
	status(2, true, 1)
	third := mustLoad(t, rt, staticConfig(entry(two, "m")))
	status(3, true, 1)
	second.Release()
	endpoints(two)
	status(2, true, 1)
	// Something else in the update was refused: Envoy drops the newest.
	third.Release()
	endpoints(one)
	status(1, false, 1)
	// Of two older ones the newer defines it.
	second = mustLoad(t, rt, staticConfig(entry(two, "m")))
	third = mustLoad(t, rt, staticConfig(entry(one, "m")))
	endpoints(one)
	third.Release()
	endpoints(two)
	second.Release()
	first.Release()
}

func TestLoadRefuses(t *testing.T) {
	rt, _ := newRuntime(t)
	dir := t.TempDir()
	missing := filepath.Join(dir, "missing.yaml")
	broken := filepath.Join(dir, "broken.yaml")
	write(t, broken, "- {address: engine-1}")
	nested := filepath.Join(dir, "nested.yaml")
	write(t, nested, "configFile: other.yaml")
	for _, c := range []struct{ yaml, want string }{
		{"nonsense: 1", "nonsense"},
		{"pools: {p: {static: []}}\npolicy: x\nfallbacks: 3", "policy"},
		{"pools: {p: {static: []}}\npolicy: x\nfallbacks: 3", "fallbacks"}, // all problems at once
		{"pools: {p: {file: {path: " + missing + "}}}", "pools.p.file.path: open " + missing},
		{"pools: {p: {file: {path: " + broken + "}}}", "[0].address"},
		{"configFile: " + missing, "configFile " + missing},
		{"configFile: " + nested, "names a configFile itself"},
		{"configFile: " + broken, "configFile " + broken},
	} {
		gen, err := rt.Load([]byte(c.yaml))
		if gen != nil || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v", c.yaml, gen, err)
		}
	}
	if n := metricValue(t, rt, "shunt_config_reloads_total", "result", "refused"); n != 8 {
		t.Errorf("%v refusals counted", n)
	}
	if rt.running || len(rt.pools) != 0 || rt.admin != nil {
		t.Error("a refused configuration has started something")
	}
}

func TestValidateStartsNothing(t *testing.T) {
	before := goleak.IgnoreCurrent()
	dir := t.TempDir()
	targets, cfg := filepath.Join(dir, "targets.yaml"), filepath.Join(dir, "shunt.yaml")
	write(t, targets, "[]")
	write(t, cfg, "pools: {a: {static: [{address: 127.0.0.1:1}]}, b: {file: {path: "+targets+"}}}\nmetrics: {address: \"127.0.0.1:0\"}")
	log := newLines()
	rt := NewRuntime(Options{Validate: true, TuneRuntime: true, Concurrency: 1000, Log: log.write})
	for _, yaml := range []string{"configFile: " + cfg, "pools: {a: {static: [{address: 127.0.0.1:1}]}}"} {
		gen := mustLoad(t, rt, yaml)
		if err := goleak.Find(before); err != nil {
			t.Error(err)
		}
		if rt.running || len(rt.pools) != 0 || rt.admin != nil || rt.monitor != nil || gen.watcher != nil || rt.tuned {
			t.Error("something was started")
		}
		gen.Release()
	}
	if _, err := rt.Load([]byte("pools: {a: {file: {path: " + dir + "/missing}}}")); err == nil {
		t.Error("a missing file is valid")
	}
	if len(log.all) != 0 {
		t.Errorf("log:\n%s", log)
	}
}

func TestRoutesAndPools(t *testing.T) {
	rt, log := newRuntime(t)
	for _, yaml := range []string{"policy: nonsense", "pol: x", "{disabled: true, pool: a}", "- a"} {
		if r, err := rt.LoadRoute([]byte(yaml)); r != nil || err == nil {
			t.Errorf("%s: taken", yaml)
		}
	}
	// Envoy builds static routes before filters.
	early, err := rt.LoadRoute([]byte("{pool: b, policy: random}"))
	if err != nil {
		t.Fatal(err)
	}
	gone, err := rt.LoadRoute([]byte("pool: c"))
	if err != nil {
		t.Fatal(err)
	}
	rt.ReleaseRoute(gone)
	mustLoad(t, rt, "admin: {address: \"\"}\npools: {a: {static: []}}")
	if log.count(`ERROR a route names pool "b", which no configuration defines (defined: a); its requests get rejected-no-endpoints`) != 1 {
		t.Errorf("log:\n%s", log)
	}
	if log.count(`pool "c"`) != 0 {
		t.Error("a route that is gone is complained about")
	}
	// And later ones after them.
	for yaml, want := range map[string]string{"pool: a": "", "": "", "pool: b": `pool: "b" is defined by no configuration; defined: a`} {
		r, err := rt.LoadRoute([]byte(yaml))
		if (want == "") != (err == nil) || err != nil && err.Error() != want {
			t.Errorf("%q: %v", yaml, err)
		}
		if r != nil {
			rt.ReleaseRoute(r)
		}
	}
	gen := mustLoad(t, rt, "admin: {address: \"\"}\npools: {a: {static: []}, b: {static: []}}")
	if log.count("a route names pool") != 1 {
		t.Errorf("log:\n%s", log)
	}
	s := gen.stream()
	if s.send(t, post(chatPath), early, chatBody); s.pool.name != "b" || s.policy.String() != "random" {
		t.Errorf("pool %s, policy %s", s.pool.name, s.policy)
	}
	s.finish(End{})
}

// write replaces a file as editors do.
func write(t *testing.T, path, text string) {
	t.Helper()
	next := path + ".new"
	if err := os.WriteFile(next, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, path); err != nil {
		t.Fatal(err)
	}
}

const kept = "keeping the last good configuration"

func TestConfigFile(t *testing.T) {
	rt, log := newRuntime(t)
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	address := engine(t, "m")
	good := staticConfig(entry(address, "m"))
	write(t, path, good)
	gen := mustLoad(t, rt, "configFile: "+path)
	expect := func(stale float64, policy string) {
		t.Helper()
		if got := metricValue(t, rt, "shunt_config_stale"); got != stale {
			t.Errorf("the gauge is %v, want %v", got, stale)
		}
		s := gen.stream()
		if v := s.settled(t); v.Destination != address || v.meta("policy") != policy {
			t.Errorf("got %s", show(v))
		}
		s.finish(End{})
	}
	expect(0, "least-request")
	write(t, path, good+"\npolicy: random")
	log.wait(t, 1, "configFile "+path+": taken")
	expect(0, "random")
	write(t, path, good+"\npolicy: nonsense\nfallbacks: 3")
	log.wait(t, 1, kept)
	if log.count("policy") == 0 || log.count("fallbacks") == 0 {
		t.Errorf("not every problem is logged:\n%s", log)
	}
	expect(1, "random")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	log.wait(t, 2, kept)
	expect(1, "random")
	write(t, path, good+"\npolicy: random") // what is in use
	log.wait(t, 2, "configFile "+path+": taken")
	expect(0, "random")
	if n := metricValue(t, rt, "shunt_config_reloads_total", "result", "refused"); n != 2 {
		t.Errorf("%v refusals counted", n)
	}
	p := rt.pool("default")
	gen.Release()
	write(t, path, good)
	eventually(t, "the pool has stopped", func() bool { return rt.pool("default") == nil })
	if p.users != 0 {
		t.Errorf("%d users", p.users)
	}
}

// TestReloadSaysOnce: the same problem is logged once however often the file is
// looked at, and each file counts for the gauge.
func TestReloadSaysOnce(t *testing.T) {
	rt, log := newRuntime(t)
	dir := t.TempDir()
	one, two := filepath.Join(dir, "1.yaml"), filepath.Join(dir, "2.yaml")
	for _, path := range []string{one, two} {
		write(t, path, "admin: {address: \"\"}\npools: {p"+filepath.Base(path)[:1]+": {static: []}}")
	}
	gens := map[string]*Generation{}
	for _, path := range []string{one, two} {
		gens[path] = mustLoad(t, rt, "configFile: "+path)
		gens[path].watcher.stop() // the test looks instead
	}
	last := map[string]string{}
	look := func(path string) { last[path] = rt.reload(gens[path], path, last[path]) }
	step := func(name string, stale float64, refusals, takings int) {
		t.Helper()
		if got := metricValue(t, rt, "shunt_config_stale"); got != stale || log.count(kept) != refusals || log.count(": taken") != takings {
			t.Errorf("%s: gauge %v, %d refusals, %d takings; want %v, %d, %d", name, got, log.count(kept), log.count(": taken"), stale, refusals, takings)
		}
	}
	look(one)
	look(two)
	step("unchanged", 0, 0, 0)
	good, _ := os.ReadFile(one)
	write(t, one, "nonsense: 1")
	look(one)
	look(one)
	look(two)
	step("one is broken", 1, 1, 0)
	write(t, one, "nonsense: 2\nother: 1")
	look(one)
	step("in another way", 1, 2, 0)
	write(t, two, "nonsense: 1")
	look(two)
	step("both are broken", 1, 3, 0)
	write(t, one, string(good))
	look(one)
	look(one)
	step("one is good again", 1, 3, 1)
	gens[two].Release()
	step("the broken one is gone", 0, 3, 1)
	write(t, two, "admin: {address: \"\"}\npolicy: random\npools: {p2: {static: []}}")
	look(two)
	step("and takes nothing any more", 0, 3, 1)
	if gens[two].refs != nil {
		t.Error("a released configuration refers to pools")
	}
}

// TestReleaseWhileReloading: a configuration may end while its watcher takes a new
// content, or waits for the lock to do so.
func TestReleaseWhileReloading(t *testing.T) {
	rt, _ := newRuntime(t)
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	for i := range 20 {
		write(t, path, "admin: {address: \"\"}\npools: {p: {static: []}}")
		gen := mustLoad(t, rt, "configFile: "+path)
		var wg sync.WaitGroup
		rt.mu.Lock()
		write(t, path, "admin: {address: \"\"}\npolicy: random\npools: {p: {static: []}}")
		wg.Go(func() { rt.reload(gen, path, "") })
		wg.Go(gen.Release)
		if i%2 == 0 {
			wg.Go(gen.Release)
		}
		runtime.Gosched()
		rt.mu.Unlock()
		wg.Wait()
		if gen.refs != nil {
			t.Fatal("released, and it still refers to pools")
		}
	}
	eventually(t, "all have stopped", func() bool { return rt.pool("p") == nil })
}

// TestReleaseWhileReadingHangs: storage that does not answer holds up no thread of
// Envoy's.
func TestReleaseWhileReadingHangs(t *testing.T) {
	rt, _ := newRuntime(t)
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	write(t, path, "admin: {address: \"\"}\npools: {p: {static: []}}")
	gen := mustLoad(t, rt, "configFile: "+path)
	gen.watcher.stop()
	answers := make(chan struct{})
	gen.watcher.done.Go(func() { <-answers }) // as if it were reading
	gen.Release()
	eventually(t, "the pool has stopped", func() bool { return rt.pool("p") == nil })
	close(answers)
}

// TestConfigFileThatIsNone: what is no file is refused, and is not waited for.
func TestConfigFileThatIsNone(t *testing.T) {
	rt, log := newRuntime(t)
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	write(t, path, "admin: {address: \"\"}\npools: {p: {static: []}}")
	mustLoad(t, rt, "configFile: "+path)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	log.wait(t, 1, path+" is no regular file")
	if _, err := rt.Load([]byte("configFile: " + path)); err == nil || !strings.Contains(err.Error(), "is no regular file") {
		t.Errorf("a pipe was loaded: %v", err)
	}
	if _, err := rt.Load([]byte("admin: {address: \"\"}\npools: {q: {file: {path: " + path + "}}}")); err == nil || !strings.Contains(err.Error(), "is no regular file") {
		t.Errorf("endpoints came from a pipe: %v", err)
	}
}

// TestReloadPanicUnlocks: a fault of ours in a reload does not lock out all
// later ones.
func TestReloadPanicUnlocks(t *testing.T) {
	rt, log := newRuntime(t)
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	write(t, path, "admin: {address: \"\"}\npools: {p: {static: []}}")
	gen := mustLoad(t, rt, "configFile: "+path)
	gen.watcher.stop()
	write(t, path, "admin: {address: \"\"}\npools: {q: {static: []}}")
	metrics := rt.metrics.drops
	rt.metrics.drops = nil // a new pool can't be made
	rt.reload(gen, path, "")
	rt.metrics.drops = metrics
	if log.count("internal error in reload") != 1 {
		t.Fatalf("log:\n%s", log)
	}
	if rt.reload(gen, path, "") != "" || log.count(": taken") != 1 {
		t.Fatalf("log:\n%s", log)
	}
}

func TestFilePool(t *testing.T) {
	rt, log := newRuntime(t)
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	one, two := engine(t, "m"), engine(t, "m")
	write(t, path, "- "+entry(one, "m"))
	gen := mustLoad(t, rt, "admin: {address: \"\"}\npools: {default: {file: {path: "+path+"}}}")
	p := rt.pool("default")
	if !p.holder.Load().Complete {
		t.Error("a file is read at load and holds nothing")
	}
	send := func(want string) {
		t.Helper()
		s := gen.stream()
		if v := s.settled(t); v.Destination != want {
			t.Errorf("got %s", show(v))
		}
		s.finish(End{})
	}
	send(one)
	write(t, path, "- {address: engine-1}")
	log.wait(t, 1, "keeping the last good set of 1 endpoints")
	eventually(t, "the view is only the last good", func() bool { return !rt.Status().Pools[0].Fresh })
	send(one)
	// While it runs, a new configuration does not mind the broken file.
	next := mustLoad(t, rt, "admin: {address: \"\"}\npools: {default: {file: {path: "+path+"}}}")
	gen.Release()
	gen = next
	send(one)
	write(t, path, "- "+entry(two, "m"))
	eventually(t, "the change is seen", func() bool {
		s := p.holder.Load()
		return s.Fresh && s.ByKey(one) == nil && len(s.All().Index) == 1
	})
	send(two)
	// Another source in its place.
	next = mustLoad(t, rt, staticConfig(entry(one, "m")))
	gen.Release()
	gen = next
	eventually(t, "the pool is static", func() bool {
		s := p.holder.Load()
		return s.ByKey(two) == nil && len(s.All().Index) == 1
	})
	send(one)
	rt.mu.Lock()
	if len(p.sources) != 0 {
		t.Error("the file is still watched")
	}
	rt.mu.Unlock()
}

// TestLoadsAndRequestsRace has -race look at reloads beside requests and
// scrapes of the admin handlers.
func TestLoadsAndRequestsRace(t *testing.T) {
	rt, _ := newRuntime(t)
	one, two := engine(t, "m"), engine(t, "m")
	first := mustLoad(t, rt, staticConfig(entry(one, "m"), entry(two, "m")))
	s := first.stream()
	s.settled(t)
	s.finish(End{})
	p := rt.pool("default")
	admin := rt.adminHandler()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	loop := func(f func()) {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					f()
				}
			}
		})
	}
	for range 2 {
		loop(func() {
			s := first.stream()
			if v := s.settled(t); v.Action != Continue {
				t.Errorf("dropped: %s", show(v))
			}
			s.Served(one, &s.v)
			s.finish(End{})
		})
	}
	loop(func() {
		ask(admin, "GET", "/statusz.json")
		ask(admin, "GET", "/metrics")
		ask(admin, "GET", "/readyz")
	})
	loop(func() {
		if r, err := rt.LoadRoute([]byte("pool: default")); err == nil {
			rt.ReleaseRoute(r)
		}
	})
	for i := range 100 {
		gen := mustLoad(t, rt, staticConfig(entry(one, "m"), entry(two, "m"))+fmt.Sprintf("\nscrape: {interval: %dms}", 100+i%3))
		gen.Release()
	}
	close(stop)
	wg.Wait()
	if load(p) != 0 {
		t.Errorf("load %d", load(p))
	}
	if n := metricValue(t, rt, "shunt_internal_errors_total"); n != 0 {
		t.Errorf("%v internal errors", n)
	}
}

func TestTune(t *testing.T) {
	gc, limit, procs := debug.SetGCPercent(100), debug.SetMemoryLimit(-1), runtime.GOMAXPROCS(0)
	defer func() {
		debug.SetGCPercent(gc)
		debug.SetMemoryLimit(limit)
		runtime.GOMAXPROCS(procs)
	}()
	type state struct {
		gc    int
		limit int64
		procs int
	}
	now := func() state {
		s := state{debug.SetGCPercent(100), debug.SetMemoryLimit(-1), runtime.GOMAXPROCS(procs)}
		debug.SetMemoryLimit(limit)
		return s
	}
	const cgroup = 4 << 30
	for _, c := range []struct {
		name, yaml  string
		environment string
		want        state
	}{
		{"defaults", "", "", state{400, 1 << 30, procs + 3}},
		{"its own limit", "runtime: {memoryLimit: 512MiB}", "", state{400, 512 << 20, procs + 3}},
		{"the environment wins", "", "GOGC GOMEMLIMIT GOMAXPROCS", state{100, limit, procs}},
		{"each for itself", "", "GOGC", state{100, 1 << 30, procs + 3}},
	} {
		rt := NewRuntime(Options{TuneRuntime: true, Concurrency: procs + 3, MemoryCgroup: cgroup, Linger: time.Millisecond,
			Environment: func(name string) (string, bool) { return "", strings.Contains(c.environment, name) }})
		mustLoad(t, rt, staticConfig()+"\n"+c.yaml)
		if got := now(); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
		mustLoad(t, rt, staticConfig()+"\nruntime: {memoryLimit: 1GiB}") // only the first sets it
		if got, want := now(), (state{100, limit, procs}); got != want {
			t.Errorf("%s, again: %+v", c.name, got)
		}
		rt.Stop()
	}
}
