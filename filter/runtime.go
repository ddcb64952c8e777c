package filter

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/scorer"
)

// Version is set by the linker.
var Version = "dev"

const (
	// linger is how long background work outlives the last configuration that
	// needs it: Envoy drops the old one after it has made the new.
	linger = 5 * time.Second
	// maxWaiting bounds the requests that wait in this process.
	maxWaiting = 5000
)

const onErrorRoute = config.OnErrorRoute

// Options are what a Runtime needs of its host.
type Options struct {
	// Log writes one line to the host's log, from any goroutine.
	Log func(slog.Level, string)
	// Validate is true where the host only checks a configuration: then nothing
	// is started.
	Validate bool
	// Concurrency is the host's number of workers, 0 if unknown.
	Concurrency int
	// MemoryCgroup is the memory limit of the process's cgroup in bytes, 0 if it
	// has none.
	MemoryCgroup int64
	// TuneRuntime lets the first configuration set what a process has one of: the Go
	// runtime's limits, and that libraries keep quiet.
	TuneRuntime bool
	// Environment is os.LookupEnv: GOGC, GOMEMLIMIT and GOMAXPROCS win over what
	// would be set.
	Environment func(string) (string, bool)
	// Linger replaces the time that background work outlives its last
	// configuration, for tests.
	Linger time.Duration
}

// Runtime is everything of shunt's that is process-wide. A host makes one.
// Load, LoadRoute, Generation.Release and Stop are called by any goroutine.
type Runtime struct {
	// immutable
	options Options
	metrics *metrics
	now     func() time.Time
	room    *flowcontrol.Room
	bodies  heldBodies
	pages   *pages
	faults  faultLog

	explained explained
	yield     atomic.Bool // of the newest configuration
	flights   flights

	mu sync.Mutex // serialises changes of configuration; never taken by a request
	// protected by mu
	running    bool // the room's goroutine
	pools      map[string]*Pool
	live       map[*Generation]struct{}
	routes     map[*Route]struct{}
	admin      *listener
	monitor    *listener
	stopTimer  *time.Timer
	tuned      bool
	generation uint64
	drain      drainState
	edsFiles   map[string]*edsFile // by path

	background sync.WaitGroup // of the stop timer, and of listeners being closed
}

// NewRuntime returns a runtime in which nothing runs yet.
func NewRuntime(options Options) *Runtime {
	if options.Log == nil {
		options.Log = func(slog.Level, string) {}
	}
	if options.Linger == 0 {
		options.Linger = linger
	}
	rt := &Runtime{
		options: options, metrics: newMetrics(Version), now: time.Now,
		pools: make(map[string]*Pool), live: make(map[*Generation]struct{}), routes: make(map[*Route]struct{}), edsFiles: make(map[string]*edsFile),
	}
	rt.pages = newPages(rt.metrics.busy)
	rt.bodies.limit.Store(math.MaxInt64)
	rt.room = flowcontrol.NewRoom(maxWaiting, 0, rt.now)
	rt.metrics.registry.MustRegister(endpointCollector{rt}, flowCollector{rt}, queryCollector{rt}, discoveryCollector{rt})
	return rt
}

// Yield reports whether a door should yield to the Go scheduler now and then.
func (rt *Runtime) Yield() bool { return rt.yield.Load() }

func (rt *Runtime) log(l slog.Level, message string) { rt.options.Log(l, message) }

// settings are one state of a configuration, as requests read it. Immutable.
type settings struct {
	cfg     *config.Config
	pools   map[string]*Pool
	first   *Pool
	policy  *scorer.Policy
	allowed map[string]*scorer.Policy
	costs   *scorer.Costs
	scan    openai.Options

	rewriter   *rewriter
	flow       flowcontrol.Config
	objectives map[string]*config.Objective
}

// Generation is one filter configuration of the host: the background work
// belongs to the process, a generation only refers to it.
type Generation struct {
	runtime  *Runtime
	settings atomic.Pointer[settings]
	watcher  *fileWatch // of configFile, or nil

	// protected by runtime.mu
	order    uint64  // of its Load, or of its last reload
	refs     []*Pool // that it counts as a user of
	stale    bool    // its configFile is broken
	released bool
}

// Route is the configuration of one route.
type Route struct {
	config.Route
	policy *scorer.Policy
	broken bool
}

// BrokenRoute stands for a route's configuration that was refused where the
// host can't take an error: its requests get 503.
func BrokenRoute() *Route { return &Route{broken: true} }

// Load takes a filter configuration: YAML or JSON. It never waits for the
// network. An error lists every problem, one a line, each with its path.
func (rt *Runtime) Load(raw []byte) (*Generation, error) {
	cfg, path, err := parse(raw)
	if err == nil {
		err = rt.checkSources(cfg)
	}
	if err != nil {
		rt.metrics.reloads.WithLabelValues("refused").Inc()
		return nil, err
	}
	gen := &Generation{runtime: rt}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.options.Validate {
		set, err := rt.settingsLocked(cfg, rt.scratchPools(cfg))
		if err != nil {
			return nil, err
		}
		gen.settings.Store(set)
		return gen, nil
	}
	rt.startLocked(cfg)
	if err := rt.adoptLocked(gen, cfg); err != nil {
		return nil, err
	}
	rt.live[gen] = struct{}{}
	rt.metrics.reloads.WithLabelValues("taken").Inc()
	rt.checkRoutesLocked()
	if path != "" {
		gen.watcher = rt.watchConfig(gen, path)
	}
	return gen, nil
}

// parse reads a configuration, or the file that it names.
func parse(raw []byte) (cfg *config.Config, path string, err error) {
	cfg, err = config.Parse(raw)
	if err != nil || cfg.ConfigFile == "" {
		return cfg, "", err
	}
	path = cfg.ConfigFile
	cfg, err = config.ParseFile(path)
	if err != nil {
		return nil, "", inFile(path, err)
	}
	return cfg, path, nil
}

// inFile puts a configFile's name before each line of an error: a line of the
// log names it even where another stands between.
func inFile(path string, err error) error {
	at := "configFile " + path + ": "
	return errors.New(at + strings.ReplaceAll(err.Error(), "\n", "\n"+at))
}

// adoptLocked makes cfg the newest definition of its pools and the state of
// gen.
func (rt *Runtime) adoptLocked(gen *Generation, cfg *config.Config) error {
	pools := make(map[string]*Pool, len(cfg.Pools))
	for i := range cfg.Pools {
		pools[cfg.Pools[i].Name] = rt.poolLocked(cfg.Pools[i].Name)
	}
	set, err := rt.settingsLocked(cfg, pools)
	if err != nil {
		rt.dropUnusedLocked() // what was made for it
		return err
	}
	rt.generation++
	gen.order = rt.generation
	for _, p := range gen.refs { // what it referred to before a reload
		p.users--
	}
	gen.refs = nil
	for i := range cfg.Pools {
		p := pools[cfg.Pools[i].Name]
		p.users++
		gen.refs = append(gen.refs, p)
		rt.definePoolLocked(p, &cfg.Pools[i], cfg, gen)
	}
	gen.settings.Store(set)
	rt.processLocked(cfg)
	rt.dropUnusedLocked()
	return nil
}

// processLocked sets what the process has one of, by the newest configuration.
func (rt *Runtime) processLocked(cfg *config.Config) {
	rt.bodies.limit.Store(cfg.Limits.HeldBodiesIn(rt.options.MemoryCgroup))
	rt.room.SetLimits(maxWaiting, cfg.Limits.HeldBodiesIn(rt.options.MemoryCgroup))
	rt.yield.Store(cfg.Runtime.Yield)
	rt.admin = rt.relistenLocked(rt.admin, "admin", cfg.Admin.Address, rt.adminHandler)
	rt.monitor = rt.relistenLocked(rt.monitor, "metrics", cfg.Metrics.Address, func() http.Handler { return rt.monitorHandler() })
}

func (rt *Runtime) settingsLocked(cfg *config.Config, pools map[string]*Pool) (*settings, error) {
	set := &settings{cfg: cfg, pools: pools, first: pools[cfg.Pools[0].Name]}
	var err error
	if set.policy, err = cfg.Policy.Compile(); err != nil {
		return nil, fmt.Errorf("policy: %w", err)
	}
	if set.allowed, err = allowedPolicies(cfg); err != nil {
		return nil, fmt.Errorf("allowedPolicies: %w", err)
	}
	set.costs = cfg.CostList()
	set.rewriter = newRewriter(cfg)
	if set.flow, err = cfg.FlowControl.Compile(); err != nil {
		return nil, err
	}
	set.objectives = objectives(cfg)
	set.scan = openai.Options{MaxDepth: cfg.Limits.JSONDepth}
	return set, nil
}

// Release ends a generation. What only it used stops a little later; requests
// that still hold it stay valid.
func (g *Generation) Release() {
	rt := g.runtime
	if g.watcher != nil {
		g.watcher.cancel()
		// It may be reading: from storage that hangs for as long as that does, and the
		// caller is Envoy's main thread.
		rt.background.Go(g.watcher.stop)
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if g.released {
		return
	}
	g.released = true
	delete(rt.live, g)
	for _, p := range g.refs {
		p.users--
	}
	rt.revertLocked(g)
	g.refs = nil
	rt.showStaleLocked()
	rt.dropUnusedLocked()
}

// revertLocked gives back to an older configuration what g had defined anew:
// Envoy drops a new one, and keeps the old, when something else in the same
// update is refused.
func (rt *Runtime) revertLocked(g *Generation) {
	newest := func(p *Pool) (newest *Generation) {
		for l := range rt.live {
			if (p == nil || slices.Contains(l.refs, p)) && (newest == nil || l.order > newest.order) {
				newest = l
			}
		}
		return newest
	}
	for _, p := range g.refs {
		if heir := newest(p); heir != nil && p.owner == g {
			cfg := heir.settings.Load().cfg
			def, _ := cfg.Pools.Lookup(p.name)
			rt.definePoolLocked(p, def, cfg, heir)
		}
	}
	if heir := newest(nil); heir != nil && heir.order < g.order {
		rt.processLocked(heir.settings.Load().cfg)
	}
}

// dropUnusedLocked stops pools, and with the last generation everything else,
// once they have been unused for the linger.
func (rt *Runtime) dropUnusedLocked() {
	unused := len(rt.live) == 0 && rt.running
	for _, p := range rt.pools {
		unused = unused || p.users == 0
	}
	if !unused {
		return
	}
	rt.endTimerLocked()
	rt.background.Add(1)
	rt.stopTimer = time.AfterFunc(rt.options.Linger, func() {
		defer rt.background.Done()
		defer rt.contain("stopping unused pools")
		rt.stopUnused()
	})
}

func (rt *Runtime) endTimerLocked() {
	if rt.stopTimer != nil && rt.stopTimer.Stop() {
		rt.background.Done()
	}
}

func (rt *Runtime) stopUnused() {
	rt.mu.Lock()
	var stopping []*Pool
	for name, p := range rt.pools {
		if p.users == 0 {
			stopping = append(stopping, p)
			rt.useEDSLocked(p, nil)
			delete(rt.pools, name)
		}
	}
	var listeners []*listener
	stopRoom := false
	if len(rt.live) == 0 {
		listeners = []*listener{rt.admin, rt.monitor}
		rt.admin, rt.monitor = nil, nil
		stopRoom, rt.running = rt.running, false
	}
	if stopRoom {
		rt.room.Stop()
	}
	rt.mu.Unlock()
	for _, p := range stopping {
		p.stop()
	}
	for _, l := range listeners {
		if l != nil {
			l.stop()
		}
	}
}

// Stop ends all background work at once and waits: for tests and tools; a
// host's process ends without it.
func (rt *Runtime) Stop() {
	rt.mu.Lock()
	gens := make([]*Generation, 0, len(rt.live))
	for g := range rt.live {
		gens = append(gens, g)
	}
	rt.mu.Unlock()
	for _, g := range gens {
		g.Release()
	}
	rt.mu.Lock()
	if rt.drain.timer != nil {
		rt.drain.timer.Stop()
	}
	rt.endTimerLocked()
	rt.mu.Unlock()
	rt.stopUnused()
	rt.background.Wait()
}

// startLocked starts what the first configuration needs.
func (rt *Runtime) startLocked(cfg *config.Config) {
	if !rt.tuned && rt.options.TuneRuntime {
		rt.tuned = true
		rt.tune(cfg)
		discovery.KeepQuiet(rt.faultIn("discovery"))
	}
	if !rt.running {
		rt.running = true
		rt.room.Start(rt.faultIn(whereWaiting))
	}
}

// gcPercent trades memory, which the limit bounds, for fewer collections on
// Envoy's cores.
const gcPercent = 400

// tune sets the Go runtime for life inside a proxy. The environment wins.
func (rt *Runtime) tune(cfg *config.Config) {
	set := func(name string) bool {
		if rt.options.Environment == nil {
			return false
		}
		_, ok := rt.options.Environment(name)
		return ok
	}
	if limit := cfg.Runtime.MemoryLimitIn(rt.options.MemoryCgroup); limit > 0 && !set("GOMEMLIMIT") {
		debug.SetMemoryLimit(limit)
	}
	if !set("GOGC") {
		debug.SetGCPercent(gcPercent)
	}
	if n := rt.options.Concurrency; n > runtime.GOMAXPROCS(0) && !set("GOMAXPROCS") {
		runtime.GOMAXPROCS(n)
	}
}

func (rt *Runtime) relistenLocked(l *listener, name, address string, handler func() http.Handler) *listener {
	if l != nil && l.address == address {
		return l
	}
	if l != nil {
		rt.background.Go(func() { // its goroutine may be waiting for a connection to a socket
			defer rt.contain("closing a listener")
			l.stop()
		})
	}
	if address == "" {
		return nil
	}
	return rt.listen(name, address, handler())
}

// LoadRoute takes a route's configuration. Its pool is checked as soon as it
// can be: now where a filter configuration is live, else at the next.
func (rt *Runtime) LoadRoute(raw []byte) (*Route, error) {
	parsed, err := config.ParseRoute(raw)
	if err != nil {
		return nil, err
	}
	r := &Route{Route: *parsed}
	if r.Policy.Set() {
		if r.policy, err = r.Policy.Compile(); err != nil {
			return nil, fmt.Errorf("policy: %w", err)
		}
	}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if r.Pool != "" && len(rt.live) > 0 && !rt.definedLocked(r.Pool) {
		return nil, fmt.Errorf("pool: %q is defined by no configuration; defined: %s", r.Pool, strings.Join(rt.poolNamesLocked(), ", "))
	}
	rt.routes[r] = struct{}{}
	return r, nil
}

// ReleaseRoute forgets a route's configuration.
func (rt *Runtime) ReleaseRoute(r *Route) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	delete(rt.routes, r)
}

func (rt *Runtime) definedLocked(name string) bool {
	for g := range rt.live {
		if g.settings.Load().pools[name] != nil {
			return true
		}
	}
	return false
}

func (rt *Runtime) poolNamesLocked() []string {
	var names []string
	for g := range rt.live {
		for name := range g.settings.Load().pools {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// checkRoutesLocked says which routes name a pool that nobody defines. Envoy
// builds static routes before filters, so it is too late to refuse them.
func (rt *Runtime) checkRoutesLocked() {
	for r := range rt.routes {
		if r.Pool != "" && !rt.definedLocked(r.Pool) {
			rt.log(slog.LevelError, fmt.Sprintf("a route names pool %q, which no configuration defines (defined: %s); its requests get %s",
				r.Pool, strings.Join(rt.poolNamesLocked(), ", "), DropNoEndpoints))
		}
	}
}

// poolList returns the pools by name.
func (rt *Runtime) poolList() []*Pool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	list := make([]*Pool, 0, len(rt.pools))
	for _, p := range rt.pools {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b *Pool) int { return strings.Compare(a.name, b.name) })
	return list
}

func (rt *Runtime) users(p *Pool) (configs int, conflict bool) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return p.users, rt.conflictLocked(p)
}

// notReady says why the process should get no traffic yet, or "".
func (rt *Runtime) notReady() string {
	if rt.draining() {
		return "draining"
	}
	pools := rt.poolList()
	pools = slices.DeleteFunc(pools, func(p *Pool) bool { users, _ := rt.users(p); return users == 0 })
	if len(pools) == 0 {
		return "no configuration is loaded"
	}
	for _, p := range pools {
		switch {
		case p.judged.Load():
		case !p.holder.Load().Complete:
			return "pool " + p.name + ": discovery has not delivered yet"
		default:
			return "pool " + p.name + ": endpoints are being probed"
		}
	}
	return ""
}
