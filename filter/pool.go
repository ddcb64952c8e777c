package filter

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
	"github.com/shuntproxy/shunt/scorer"
)

// Pool is a pool of the process: snapshot, live load and queue belong to its
// name, and survive the configurations that refer to it.
type Pool struct {
	// immutable
	name     string
	started  time.Time
	holder   *pool.Holder
	syncer   *metricsync.Syncer
	querier  *metricsync.Querier
	queue    *flowcontrol.Queue // for its start
	flow     *flowcontrol.Controller
	counters *poolCounters
	stored   storedResponses
	tokens   pool.Tokenizers
	// fallbacks is atomics of its own
	fallbacks fallbackLog
	prefixes

	// judged becomes true, for good, once every endpoint of the first full sets
	// has answered or failed: an endpoint that joins later unreadies nobody.
	judged atomic.Bool
	// arrived is since when, by pool.Stamp, there are endpoints that have not answered
	// or failed yet, 0 while there is none; from judged on.
	arrived atomic.Int64

	// resources are what an InferencePool's namespace says of requests; nil for
	// nothing.
	resources atomic.Pointer[resources]

	// feedMu is held while a set of a source is handed on.
	feedMu sync.Mutex
	// protected by feedMu
	eds *edsFile        // by which Envoy learns of the endpoints, nil for none
	fed map[string]gift // the newest set of each source

	// protected by Runtime.mu
	users   int         // generations that refer to it
	def     config.Pool // the newest definition
	scrape  metricsync.Config
	owner   *Generation // whose definition it is
	sources []*runningSource
}

// poolLocked returns the pool of a name, new if need be.
func (rt *Runtime) poolLocked(name string) *Pool {
	if p := rt.pools[name]; p != nil {
		return p
	}
	p := rt.newPool(name)
	rt.pools[name] = p
	return p
}

func (rt *Runtime) newPool(name string) *Pool {
	p := &Pool{
		name: name, started: rt.now(), holder: pool.NewHolder(), queue: rt.room.NewQueue(),
		counters: rt.metrics.forPool(name), prefixes: prefixes{index: scorer.NewIndex(), pins: scorer.NewPins()},
	}
	p.flow = rt.room.NewController(flowcontrol.Options{Snapshot: p.holder.Load, Candidates: laneCandidates})
	p.syncer = metricsync.New(metricsync.Options{
		Name: name, Holder: p.holder, Log: rt.options.Log, Fault: rt.faultIn(whereScraping), OnPublish: p.published,
	}, metricsync.Config{})
	p.querier = metricsync.NewQuerier(metricsync.QuerierOptions{
		Name: name, Log: rt.options.Log, Fault: rt.faultIn(whereQuerying), Publish: p.syncer.SetQueried,
	}, metricsync.QueryConfig{})
	return p
}

// published follows a new snapshot. The pool's writer calls it, and nobody else.
func (p *Pool) published(s *pool.Snapshot) {
	p.follow(s)
	switch {
	case s.Complete && s.Judged:
		p.judged.Store(true)
		p.arrived.Store(0)
	case p.judged.Load():
		p.arrived.CompareAndSwap(0, pool.Stamp(s.Built))
	}
	p.begin(s)
	p.flow.Changed()
}

// begin lets requests look again that wait for the pool's start, if a snapshot
// may have what they wait for.
func (p *Pool) begin(s *pool.Snapshot) {
	if s.Complete && (s.Judged || len(s.All().Index) > 0) {
		p.queue.Grant(p.queue.Len())
	}
}

// definePoolLocked makes def the pool's definition, that of gen.
func (rt *Runtime) definePoolLocked(p *Pool, def *config.Pool, cfg *config.Config, gen *Generation) {
	first := p.owner == nil
	changed := first || !reflect.DeepEqual(p.def, *def)
	if changed && !first && p.users > 1 {
		rt.log(slog.LevelWarn, fmt.Sprintf("pool %s: the newest configuration defines it differently from one that is still in use; the newest counts", p.name))
	}
	p.owner, p.def = gen, *def
	p.limits.Store(limitsOf(cfg, rt.options.MemoryCgroup))
	scrape := scrapeConfig(cfg, sourceNames(def))
	if first || !reflect.DeepEqual(scrape, p.scrape) {
		p.scrape = scrape
		p.syncer.Apply(scrape)
	}
	p.querier.Apply(queryConfig(&cfg.Prometheus))
	p.control(cfg)
	rt.edsLocked(p, cfg)
	if changed {
		rt.sourcesLocked(p, def)
	}
	if first {
		p.syncer.Start()
		p.querier.Start()
	}
}

// scratchPools are pools in which nothing runs, to check a configuration with.
func (rt *Runtime) scratchPools(cfg *config.Config) map[string]*Pool {
	pools := make(map[string]*Pool, len(cfg.Pools))
	for _, name := range cfg.Pools.Names() {
		pools[name] = rt.newPool(name)
		pools[name].limits.Store(limitsOf(cfg, rt.options.MemoryCgroup))
		pools[name].control(cfg)
	}
	return pools
}

func (p *Pool) stop() {
	for _, s := range p.sources {
		s.stop()
	}
	p.querier.Stop()
	p.syncer.Stop()
	p.flow.Close()
}

// conflictLocked reports whether an older live configuration defines the pool
// in another way.
func (rt *Runtime) conflictLocked(p *Pool) bool {
	for g := range rt.live {
		if set := g.settings.Load(); set.pools[p.name] == p {
			if def, ok := set.cfg.Pools.Lookup(p.name); ok && !reflect.DeepEqual(*def, p.def) {
				return true
			}
		}
	}
	return false
}

// staticTargets makes endpoints of a validated list.
func staticTargets(def *config.Pool) []pool.Target {
	targets := make([]pool.Target, 0, len(def.Static))
	for _, e := range def.Static {
		t, _ := pool.ParseTarget(e.Address, e.Labels, e.Pod) // problems were reported by validation
		t.Source = sourceStatic
		targets = append(targets, t)
	}
	return targets
}

func scrapeConfig(cfg *config.Config, sources []string) metricsync.Config {
	c := metricsync.Config{
		Interval: cfg.Scrape.Interval, Timeout: cfg.Scrape.Timeout, StaleAfter: cfg.Scrape.StaleAfter,
		ConnectTimeout: cfg.Scrape.ConnectTimeout, Jitter: cfg.Scrape.Jitter, MaxBackOff: cfg.Scrape.MaxBackOff,
		Access: metricsync.Access{
			TLS: cfg.Scrape.TLS.Enabled, CA: cfg.Scrape.TLS.CAFile, ServerName: cfg.Scrape.TLS.ServerName,
			SkipVerify: cfg.Scrape.TLS.InsecureSkipVerify, TokenFile: cfg.Scrape.BearerTokenFile, Headers: cfg.Scrape.Headers,
		},
		MaxBytes:    int64(cfg.Scrape.MaxBytes),
		Health:      metricsync.Health{Path: cfg.Health.Path, Interval: cfg.Health.Interval, Timeout: cfg.Health.Timeout},
		Discover:    cfg.Models.Discover,
		ModelMemory: cfg.Models.Memory,
		Sources:     sources,
	}
	if c.Jitter == 0 {
		c.Jitter = -1 // zero is the default there
	}
	for _, k := range cfg.Models.Known {
		c.Known = append(c.Known, metricsync.KnownModel{Name: k.Name, Adapters: k.Adapters})
	}
	return c
}

func queryConfig(p *config.Prometheus) metricsync.QueryConfig {
	c := metricsync.QueryConfig{
		URL: p.URL, Interval: p.Interval, Timeout: p.Timeout, Selector: p.Selector,
		InstanceLabel: p.Labels.Instance, ModelLabel: p.Labels.Model,
		TLS:             metricsync.QueryTLS(p.TLS),
		BearerTokenFile: p.BearerTokenFile,
	}
	if p.BasicAuth != nil {
		c.Username, c.PasswordFile = p.BasicAuth.Username, p.BasicAuth.PasswordFile
	}
	return c
}

// fileWatch follows a configuration file.
type fileWatch struct {
	path   string
	cancel context.CancelFunc
	done   sync.WaitGroup
}

func (w *fileWatch) stop() {
	w.cancel()
	w.done.Wait()
}

// watchConfig applies changes of a configuration file to gen. A broken one
// leaves what is in use.
func (rt *Runtime) watchConfig(gen *Generation, path string) *fileWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &fileWatch{path: path, cancel: cancel}
	last := ""
	look := func() { last = rt.reload(gen, path, last) }
	w.done.Go(func() { rt.outlive(ctx, "watching "+path, func(bool) { discovery.Watch(ctx, path, look) }) })
	return w
}

// newestOf reports whether gen is the newest of the configurations that follow
// a file: Envoy keeps old ones for its drain time, and they all see it change.
func (rt *Runtime) newestOf(gen *Generation, path string) bool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	for g := range rt.live {
		if g.watcher != nil && g.watcher.path == path && g.order > gen.order {
			return false
		}
	}
	return true
}

// reload reads a configuration file again. It returns the error it logged, so
// that the same one is logged once.
func (rt *Runtime) reload(gen *Generation, path, last string) (failed string) {
	defer func() {
		if cause := recover(); cause != nil {
			rt.fault("reload", cause, debug.Stack())
		}
	}()
	cfg, err := config.ParseFile(path)
	if err == nil {
		err = rt.checkSources(cfg)
	}
	if err == nil && last == "" && reflect.DeepEqual(cfg, gen.settings.Load().cfg) {
		return ""
	}
	released, err := rt.adopt(gen, cfg, err)
	if released {
		return last
	}
	if err != nil {
		if err.Error() != last && rt.newestOf(gen, path) {
			rt.metrics.reloads.WithLabelValues("refused").Inc()
			rt.log(slog.LevelError, inFile(path, err).Error()+"\nkeeping the last good configuration")
		}
		return err.Error()
	}
	rt.metrics.reloads.WithLabelValues("taken").Inc()
	rt.log(slog.LevelInfo, "configFile "+path+": taken")
	return ""
}

// adopt takes what reload has read, or notes why it could not be.
func (rt *Runtime) adopt(gen *Generation, cfg *config.Config, problem error) (released bool, err error) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if gen.released {
		return true, nil
	}
	if err = problem; err == nil {
		err = rt.adoptLocked(gen, cfg)
	}
	gen.stale = err != nil
	rt.showStaleLocked()
	if err == nil {
		rt.checkRoutesLocked()
	}
	return false, err
}

// showStaleLocked sets the gauge: one broken file is enough.
func (rt *Runtime) showStaleLocked() {
	stale := false
	for g := range rt.live {
		stale = stale || g.stale
	}
	rt.metrics.configStale.Set(boolean(stale))
}
