package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	"github.com/shuntproxy/shunt/filter"
	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/internal/loopback"
	"github.com/shuntproxy/shunt/internal/sim"
)

var (
	modulesFlag = flag.String("modules", "", "folder with the modules to test, built with -tags shunttest; empty builds them")
	doorFlag    = flag.String("door", "", "the one door to test; empty tests all. The contrib doors are for Envoy 1.39, as their SDK is")
	envoyFlag   = flag.String("envoy", "", "release of Envoy to test in, such as 1.40.0; empty is what build/envoy.sh finds")

	envoyBinary string // set once by TestMain
	modulesDir  string // set once by TestMain
)

// patience bounds every wait for an event. It only ends a test that fails.
const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		fmt.Println("e2e: left out, since -short is set")
		return
	}
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func prepare() error {
	root, err := filepath.Abs("..")
	if err != nil {
		return err
	}
	if envoyBinary, err = envoyrun.Binary(context.Background(), root, *envoyFlag); err != nil {
		return err
	}
	if *modulesFlag != "" {
		if modulesDir, err = filepath.Abs(*modulesFlag); err != nil {
			return err
		}
	} else {
		modulesDir = filepath.Join(root, "build", "out", "e2e")
	}
	built := map[string]bool{}
	for _, d := range doors() {
		if *modulesFlag == "" && !built[d.module] {
			if err := build(root, "go", "build", "-tags", "shunttest", "-trimpath", "-buildmode=c-shared", "-o", modulePath(d.module), d.main); err != nil {
				return fmt.Errorf("%w (make build copies abi.h, which it needs)", err)
			}
			built[d.module] = true
		}
		if d.host == bootstrap.HostGolanghost && *modulesFlag == "" {
			if err := buildGolanghost(root); err != nil {
				return err
			}
		}
		for _, name := range d.files() {
			if _, err := os.Stat(modulePath(name)); err != nil {
				return fmt.Errorf("a module of door %s is missing: %w", d.name, err)
			}
		}
	}
	return nil
}

// golanghost stands in for Envoy's golang filter.
const golanghost = "libgolanghost.so"

// files are the modules that a door needs.
func (d door) files() []string {
	if d.host == bootstrap.HostGolanghost {
		return []string{d.module, golanghost}
	}
	return []string{d.module}
}

func build(root, program string, args ...string) error {
	cmd := exec.Command(program, args...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, out)
	}
	return nil
}

func buildGolanghost(root string) error {
	args := []string{"-std=c11", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"}
	for _, pkg := range []string{"source/extensions/dynamic_modules/abi", "contrib/golang/common/go/api"} {
		list := exec.Command("go", "list", "-f", "{{.Dir}}", "github.com/envoyproxy/envoy/"+pkg)
		list.Dir = root
		dir, err := list.Output()
		if err != nil {
			return fmt.Errorf("go list %s: %w", pkg, err)
		}
		args = append(args, "-I"+strings.TrimSpace(string(dir)))
	}
	sources, err := filepath.Glob(filepath.Join(root, "e2e", "golanghost", "*.c"))
	if err != nil {
		return err
	}
	return build(root, "cc", append(append(append(args, "-o", modulePath(golanghost)), sources...), "-ldl")...)
}

func modulePath(name string) string { return filepath.Join(modulesDir, name) }

// setup says how a world differs from one Envoy with two workers, and shunt in
// front of engines that all serve model m.
type setup struct {
	engines int        // 0 is 2
	engine  sim.Config // of each
	// config is further YAML of shunt's document; pools replaces its pools.
	config, pools string
	// routes and clusters go to the bootstrap's options.
	routes, clusters string
	// lds has the listener in a file, configFile shunt's document.
	lds, configFile bool
	edit            func(bootstrap doc)
	expect          []string // patterns of error lines
	notReady        bool     // don't wait for /readyz
	args            []string
}

// world is one Envoy with shunt, its engines and its clients.
type world struct {
	d       door
	dir     string
	envoy   *envoyrun.Envoy
	engines []*sim.Server
	options bootstrap.Options
	setup   setup
	records records
	addr    string // of Envoy's listener
	admin   *http.Client
	h1, h2  *http.Client
}

// start makes a world that ends with the test.
func start(t *testing.T, d door, s setup) *world {
	t.Helper()
	w := prepareWorld(t, d, s)
	w.run(t)
	return w
}

// prepareWorld starts engines and writes files, but no Envoy.
func prepareWorld(t *testing.T, d door, s setup) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "e2e") // t.TempDir is too long a name for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &world{d: d, dir: dir, setup: s}
	if s.engines == 0 {
		s.engines = 2
	}
	for range s.engines {
		w.engines = append(w.engines, startEngine(t, s.engine))
	}
	w.options = bootstrap.Options{
		Door: d.door, Host: d.host, Listen: "127.0.0.1:0", Admin: "127.0.0.1:0", Module: modulePath(d.module),
		Document: []byte(w.document(s.config)), ExtraRoutes: s.routes, ExtraClusters: s.clusters,
	}
	if d.host == bootstrap.HostGolanghost {
		w.options.HostModule = modulePath(golanghost)
	}
	if s.configFile {
		w.options.ConfigFile = w.file("shunt.yaml")
		w.write(t, "shunt.yaml", string(w.options.Document))
	}
	if s.lds {
		w.options.LDSFile = w.file("lds.yaml")
		w.writeListener(t)
	}
	w.admin = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", w.file("admin.sock"))
		},
		DisableKeepAlives: true,
	}}
	return w
}

// document is shunt's: what every world has, and more.
func (w *world) document(more string) string {
	pools := w.setup.pools
	if pools == "" {
		pools = "pools: {default: {static: " + w.static(w.engines...) + "}}\n"
	}
	text := pools + "admin: {address: \"unix:" + w.file("admin.sock") + "\"}\n" + more
	for _, part := range []string{
		"scrape: {interval: 100ms}\n", "health: {interval: 100ms}\n", "explain: {header: true}\n",
	} {
		if key, _, _ := strings.Cut(part, ":"); !strings.Contains("\n"+text, "\n"+key+":") {
			text += part
		}
	}
	return text
}

// static is the list of engines, as JSON.
func (w *world) static(engines ...*sim.Server) string { return endpoints("m", engines...) }

func endpoints(model string, engines ...*sim.Server) string {
	type endpoint struct {
		Address string            `json:"address"`
		Labels  map[string]string `json:"labels"`
	}
	list := []endpoint{}
	for _, e := range engines {
		_, port, _ := net.SplitHostPort(e.Addr())
		list = append(list, endpoint{e.Addr(), map[string]string{
			"model.aibrix.ai/name": model, "model.aibrix.ai/engine": "vllm", "model.aibrix.ai/metric-port": port,
		}})
	}
	text, _ := json.Marshal(list)
	return string(text)
}

func startEngine(t *testing.T, cfg sim.Config) *sim.Server {
	t.Helper()
	if cfg.Models == nil {
		cfg.Models = []string{"m"}
	}
	if cfg.Listen == "" {
		cfg.Listen = loopback.Reserve(t) // also once the engine is killed: another's engine would be taken for it
	}
	if cfg.Output == 0 {
		cfg.Output = 2
	}
	if cfg.Speedup == 0 {
		cfg.Speedup = 1000
	}
	if cfg.IdleTimeout == 0 {
		// Envoy closes idle connections a second before an engine does; a test
		// must not lose its requests when a busy machine takes longer.
		cfg.IdleTimeout = -1
	}
	e, err := sim.NewServer(cfg)
	if err == nil {
		err = e.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	return e
}

// bootstrap is what Envoy starts with.
func (w *world) bootstrap(t *testing.T) []byte {
	t.Helper()
	text, err := bootstrap.Generate(w.options)
	if err != nil {
		t.Fatal(err)
	}
	return w.edited(t, text)
}

// edited changes a bootstrap, or a listener in a discovery response.
func (w *world) edited(t *testing.T, text []byte) []byte {
	t.Helper()
	var b doc
	if err := yaml.Unmarshal(text, &b); err != nil {
		t.Fatal(err)
	}
	if clusters, ok := b.at("static_resources", "clusters").([]any); ok {
		for _, c := range clusters {
			c.(doc)["connect_timeout"] = "60s" // a busy machine needs more than 2 s at times
		}
	}
	if l := b.listener(); l != nil {
		l.at("filter_chains", 0, "filters", 0, "typed_config", "access_log", 0, "typed_config", "log_format", "json_format").(doc)["test_id"] = "%REQ(X-TEST-ID)%"
		if w.setup.edit != nil {
			w.setup.edit(b)
		}
	}
	out, err := yaml.Marshal(b)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// run starts Envoy and waits until shunt is ready.
func (w *world) run(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	e, err := envoyrun.Start(ctx, w.envoyOptions(t))
	if err != nil {
		t.Fatal(err)
	}
	w.envoy, w.addr = e, e.Addr("shunt")
	t.Cleanup(func() {
		if err := e.Stop(); err != nil {
			t.Errorf("Envoy: %v", err)
		}
		if err := e.CheckLog(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("Envoy's log:\n%s", strings.Join(excerpt(e.Log()), "\n"))
		}
	})
	w.h1, w.h2 = client1(t), client2(t)
	if !w.setup.notReady {
		w.ready(t)
	}
}

// excerpt is the end of a log: of its own lines, and of the access log.
func excerpt(lines []string) []string {
	var own, access []string
	for _, l := range lines {
		if strings.HasPrefix(l, "{") {
			access = append(access, l)
		} else {
			own = append(own, l)
		}
	}
	return append(own[max(0, len(own)-60):], access[max(0, len(access)-5):]...)
}

func (w *world) envoyOptions(t *testing.T) envoyrun.Options {
	t.Helper()
	o := envoyrun.Options{
		Binary: cmp.Or(w.d.envoy, envoyBinary), Bootstrap: w.bootstrap(t), Concurrency: 2, Dir: w.dir,
		OnLine: w.records.add,
		Env:    []string{"ENVOY_DYNAMIC_MODULES_SEARCH_PATH=" + modulesDir},
		Args:   append([]string{"--file-flush-interval-msec", "20"}, w.setup.args...),
	}
	for _, p := range append(w.d.errorLines, w.setup.expect...) {
		o.Expect = append(o.Expect, regexp.MustCompile(p))
	}
	return o
}

func (w *world) ready(t *testing.T) {
	t.Helper()
	eventually(t, "/readyz is 200", func() string {
		status, body := w.adminGet("/readyz")
		if status == 200 {
			return ""
		}
		return fmt.Sprint(status, " ", body)
	})
}

// readAll waits until the page of each endpoint has been read: they are ready
// once they take a connection.
func (w *world) readAll(t *testing.T) {
	t.Helper()
	eventually(t, "all have been read", func() string {
		for _, p := range w.status(t).Pools {
			for _, e := range p.Endpoints {
				if e.State != "ready" || e.Running == nil || e.Waiting == nil || e.KV == nil || e.AgeSeconds == nil {
					return fmt.Sprintf("%+v", e)
				}
			}
		}
		return ""
	})
}

func (w *world) file(name string) string { return filepath.Join(w.dir, name) }

// write replaces a file by a rename, as operators and Envoy need it.
func (w *world) write(t *testing.T, name, text string) {
	t.Helper()
	tmp := w.file(name + ".new")
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, w.file(name)); err != nil {
		t.Fatal(err)
	}
}

// writeListener replaces the listener's file by what the options say now.
func (w *world) writeListener(t *testing.T) {
	t.Helper()
	w.write(t, "lds.yaml", string(w.listener(t)))
}

// listener is the listener's file as the options say now.
func (w *world) listener(t *testing.T) []byte {
	t.Helper()
	text, err := bootstrap.Listener(w.options)
	if err != nil {
		t.Fatal(err)
	}
	return w.edited(t, text)
}

// adminGet asks shunt's admin listener; status 0 is no answer.
func (w *world) adminGet(path string) (status int, body string) {
	return w.adminDo(http.MethodGet, path)
}

func (w *world) adminDo(method, path string) (status int, body string) {
	req, err := http.NewRequest(method, "http://admin"+path, nil)
	if err != nil {
		return 0, err.Error()
	}
	req.Header.Set("X-Shunt-Admin", "1")
	resp, err := w.admin.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(b)
}

// status is /statusz.json.
func (w *world) status(t *testing.T) filter.Status {
	t.Helper()
	code, body := w.adminGet("/statusz.json")
	var s filter.Status
	if err := json.Unmarshal([]byte(body), &s); err != nil || code != 200 {
		t.Fatalf("/statusz.json: %d, %v: %s", code, err, body)
	}
	return s
}

// endpoint finds an engine in a status.
func endpoint(s filter.Status, e *sim.Server) *filter.EndpointStatus {
	for i := range s.Pools {
		for j := range s.Pools[i].Endpoints {
			if p := &s.Pools[i].Endpoints[j]; p.Endpoint == e.Addr() {
				return p
			}
		}
	}
	return nil
}

// load is how many requests shunt counts as served and as waiting.
func (w *world) load(t *testing.T) (inFlight int64, waiting int) {
	t.Helper()
	s := w.status(t)
	for _, p := range s.Pools {
		for _, e := range p.Endpoints {
			inFlight += e.InFlight
		}
	}
	return inFlight, s.Waiting
}

func (w *world) waitLoad(t *testing.T, inFlight int64, waiting int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d in flight and %d waiting", inFlight, waiting), func() string {
		f, q := w.load(t)
		if f == inFlight && q == waiting {
			return ""
		}
		return fmt.Sprintf("%d in flight, %d waiting", f, q)
	})
}

func (w *world) waitState(t *testing.T, e *sim.Server, state string) {
	t.Helper()
	eventually(t, e.Addr()+" is "+state, func() string {
		p := endpoint(w.status(t), e)
		switch {
		case p == nil:
			return "no such endpoint"
		case p.State != state:
			return p.State + " " + p.Why
		}
		return ""
	})
}

// metric is the sum of a metric's series that have all the labels, given as
// name, value, name, value.
func (w *world) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	_, page := w.adminGet("/metrics")
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
series:
	for _, m := range families[name].GetMetric() {
		for i := 0; i < len(labels); i += 2 {
			if !slices.ContainsFunc(m.GetLabel(), func(l *labelPair) bool { return l.GetName() == labels[i] && l.GetValue() == labels[i+1] }) {
				continue series
			}
		}
		sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return sum
}

// stat is one of Envoy's counters or gauges.
func (w *world) stat(t *testing.T, name string) int64 {
	t.Helper()
	stats, err := w.envoy.Stats(t.Context(), "^"+regexp.QuoteMeta(name)+"$")
	if err != nil {
		t.Fatal(err)
	}
	return stats[name]
}

func (w *world) waitStat(t *testing.T, name string, ok func(int64) bool) {
	t.Helper()
	eventually(t, name, func() string {
		if v := w.stat(t, name); !ok(v) {
			return strconv.FormatInt(v, 10)
		}
		return ""
	})
}

func (w *world) waitLog(t *testing.T, pattern string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	line, err := w.envoy.WaitLog(ctx, regexp.MustCompile(pattern))
	if err != nil {
		t.Fatalf("no log line matches %s: %v", pattern, err)
	}
	return line
}

// access is the access log's record of the request with that id.
func (w *world) access(t *testing.T, id string) doc {
	t.Helper()
	line := ""
	eventually(t, "request "+id+" is in the access log", func() string {
		if line = w.records.get(id); line == "" {
			return "no"
		}
		return ""
	})
	var record doc
	if err := json.Unmarshal([]byte(line), &record); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	return record
}

// records is the access log by the requests' ids.
type records struct {
	mu   sync.Mutex
	byID map[string]string // protected by mu
}

// add takes a line of Envoy's output.
func (r *records) add(line string) {
	_, rest, ok := strings.Cut(line, `"test_id":"`)
	id, _, _ := strings.Cut(rest, `"`)
	if !ok {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byID == nil {
		r.byID = map[string]string{}
	}
	r.byID[id] = line
}

func (r *records) get(id string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byID[id]
}

// wait waits for counts of an engine.
func wait(t *testing.T, e *sim.Server, cond func(sim.Counters) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := e.Wait(ctx, cond); err != nil {
		t.Fatalf("engine %s: %v", e.Addr(), err)
	}
}

// eventually asks until there is nothing to complain of.
func eventually(t *testing.T, what string, complaint func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for pause := 2 * time.Millisecond; ; pause = min(pause*3/2, 50*time.Millisecond) {
		said := complaint()
		if said == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("never came true: %s; last seen: %s", what, said)
		}
		time.Sleep(pause) // between two looks at a state that sends no event; looking costs what is waited for
	}
}

var lastID atomic.Uint64

// newID names a request, in the header x-test-id.
func newID() string { return "t" + strconv.FormatUint(lastID.Add(1), 10) + "t" }

// doc is a decoded YAML or JSON object.
type doc map[string]any

// at follows keys and indexes; nil where there is nothing.
func (d doc) at(path ...any) any {
	var v any = d
	for _, step := range path {
		switch x := v.(type) {
		case doc:
			v = x[step.(string)]
		case map[string]any:
			v = x[step.(string)]
		case []any:
			if i := step.(int); i < len(x) {
				v = x[i]
			} else {
				return nil
			}
		default:
			return nil
		}
	}
	if m, ok := v.(map[string]any); ok {
		return doc(m)
	}
	return v
}

// listener is the one of a bootstrap, or of a discovery response.
func (d doc) listener() doc {
	l, ok := d.at("static_resources", "listeners", 0).(doc)
	if !ok {
		l, _ = d.at("resources", 0).(doc)
	}
	return l
}

// hcm is the listener's HTTP connection manager, virtualHost its only one.
func (d doc) hcm() doc {
	return d.listener().at("filter_chains", 0, "filters", 0, "typed_config").(doc)
}

// filter is the configuration of the HTTP filter that loads shunt.
func (d doc) filter() doc { return d.hcm().at("http_filters", 0, "typed_config").(doc) }

func (d doc) virtualHost() doc { return d.hcm().at("route_config", "virtual_hosts", 0).(doc) }
