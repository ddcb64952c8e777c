package filter

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
)

// The names of discovery sources, in the order in which they win an address
// that two of them find.
const (
	sourceStatic     = "static"
	sourceFile       = "file"
	sourceDNS        = "dns"
	sourceKubernetes = "kubernetes"
)

// sourceNames lists the sources that a pool has.
func sourceNames(def *config.Pool) []string {
	var names []string
	for _, s := range []struct {
		name string
		has  bool
	}{
		{sourceStatic, def.Static != nil}, {sourceFile, def.File != nil}, {sourceDNS, def.DNS != nil}, {sourceKubernetes, def.Kubernetes != nil},
	} {
		if s.has {
			names = append(names, s.name)
		}
	}
	return names
}

// sourceDef is the definition of one source in a pool's, nil for none.
func sourceDef(def *config.Pool, name string) any {
	switch {
	case name == sourceFile && def.File != nil:
		return *def.File
	case name == sourceDNS && def.DNS != nil:
		return *def.DNS
	case name == sourceKubernetes && def.Kubernetes != nil:
		return *def.Kubernetes
	default:
		return nil
	}
}

// SourceHooks are what a source tells beside endpoints.
type SourceHooks struct {
	Log func(slog.Level, string)
	// Fault is told of panics that the source went on after.
	Fault discovery.Fault
	// Resources gets what an InferencePool's namespace says of its requests; nil for
	// nobody.
	Resources func(discovery.Resources)
}

// NewSource makes a source of a pool, by its name in the configuration. It
// reads at most a file.
func NewSource(def *config.Pool, name string, hooks SourceHooks) (discovery.Source, error) {
	switch {
	case name == sourceStatic && def.Static != nil:
		return discovery.NewStatic(staticTargets(def)), nil
	case name == sourceFile && def.File != nil:
		initial, err := discovery.ReadFile(def.File.Path)
		if err == nil && initial == nil {
			initial = []pool.Target{}
		}
		return discovery.NewFile(def.File.Path, initial, hooks.Log), nil
	case name == sourceDNS && def.DNS != nil:
		return discovery.NewDNS(dnsOptions(def.DNS, hooks)), nil
	case name == sourceKubernetes && def.Kubernetes != nil:
		return discovery.NewKubernetes(kubernetesOptions(def.Kubernetes, hooks)), nil
	default:
		return nil, fmt.Errorf("pool %s has no source %q", def.Name, name)
	}
}

func dnsOptions(d *config.DNS, hooks SourceHooks) discovery.DNSOptions {
	o := discovery.DNSOptions{
		Servers: d.ServerAddresses(), Timeout: d.Timeout, MinInterval: d.MinInterval, MaxInterval: d.MaxInterval,
		RetryInterval: d.MinInterval, Log: hooks.Log, Fault: hooks.Fault,
	}
	for _, n := range d.Names {
		o.Names = append(o.Names, discovery.DNSName{Name: n.Name, SRV: n.Type == config.DNSServices, Port: uint16(n.Port), Labels: n.Labels})
	}
	return o
}

func kubernetesOptions(k *config.Kubernetes, hooks SourceHooks) discovery.KubernetesOptions {
	o := discovery.KubernetesOptions{
		Kubeconfig: k.Kubeconfig, Context: k.Context, Namespaces: k.Namespaces, Selector: k.Selector,
		InferencePool: k.InferencePool, Log: hooks.Log, Fault: hooks.Fault, Resources: hooks.Resources,
	}
	for _, port := range k.TargetPorts {
		o.Ports = append(o.Ports, uint16(port))
	}
	return o
}

// SourceNames lists the sources that a pool of a valid configuration has, in
// the order in which they win an address.
func SourceNames(def *config.Pool) []string { return sourceNames(def) }

// runningSource is a discovery source and the goroutine it runs in.
type runningSource struct {
	name   string
	def    any                              // its definition
	source atomic.Pointer[discovery.Source] // another after a panic
	cancel context.CancelFunc
	done   sync.WaitGroup

	// mu is held while a set is handed on, and protects ended: a source that is
	// being replaced says nothing more.
	mu    sync.Mutex
	ended bool
}

func (s *runningSource) status() discovery.Status { return (*s.source.Load()).Status() }

// end keeps the source from delivering and tells it to stop. It does not wait
// for that: a source may be in the midst of a question.
func (s *runningSource) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.cancel()
}

func (s *runningSource) stop() {
	s.end()
	s.done.Wait()
}

// sourcesLocked starts, keeps, replaces and ends the sources of a pool. What a
// replaced one found last stays until the new one has found all.
func (rt *Runtime) sourcesLocked(p *Pool, def *config.Pool) {
	p.keepFed(append(sourceNames(def), sourceStatic))
	p.feed(sourceStatic, staticTargets(def), metricsync.Complete)
	kept := p.sources[:0:0]
	for _, s := range p.sources {
		if reflect.DeepEqual(s.def, sourceDef(def, s.name)) {
			kept = append(kept, s)
			continue
		}
		s.end()
		rt.background.Go(s.done.Wait)
	}
	p.sources = kept
	p.resources.Store(resourcesLeft(p.resources.Load(), def))
	for _, name := range sourceNames(def) {
		running := slices.ContainsFunc(p.sources, func(s *runningSource) bool { return s.name == name })
		if name != sourceStatic && !running {
			rt.startSourceLocked(p, def, name)
		}
	}
}

func (rt *Runtime) startSourceLocked(p *Pool, def *config.Pool, name string) {
	s := &runningSource{name: name, def: sourceDef(def, name)}
	hand := func(f func()) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.ended {
			f()
		}
	}
	hooks := SourceHooks{
		Log:   func(l slog.Level, line string) { rt.log(l, "pool "+p.name+": "+line) },
		Fault: rt.faultIn("discovery of pool " + p.name),
		Resources: func(r discovery.Resources) {
			hand(func() { rt.takeResources(p, r) })
		},
	}
	source, err := NewSource(def, name, hooks)
	if err != nil { // a switch above misses a name
		rt.log(slog.LevelError, fmt.Sprintf("pool %s: %v", p.name, err))
		return
	}
	s.source.Store(&source)
	if name == sourceFile {
		if initial, err := discovery.ReadFile(def.File.Path); err == nil {
			p.feed(sourceFile, initial, metricsync.Complete) // hold no request for it
		}
	}
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(context.Background())
	run := func(again bool) {
		if again {
			fresh, err := NewSource(def, name, hooks)
			if err != nil {
				panic(err) // it could be made
			}
			s.source.Store(&fresh)
		}
		err := (*s.source.Load()).Run(ctx, func(set discovery.Set) {
			state := metricsync.Complete
			if set.State == discovery.LastGood {
				state = metricsync.LastGood
				if again && len(set.Targets) == 0 {
					return // it knows less than the one that panicked
				}
			}
			hand(func() { p.feed(name, set.Targets, state) })
		})
		if err != nil {
			rt.log(slog.LevelError, fmt.Sprintf("pool %s: %s: %v", p.name, name, err))
		}
	}
	s.done.Go(func() { rt.outlive(ctx, "discovery of pool "+p.name, run) })
	p.sources = append(p.sources, s)
}

// checkSources looks at the sources of pools that do not run yet, as far as
// that asks no network: broken at the start is an error, later the last good
// set is kept.
func (rt *Runtime) checkSources(cfg *config.Config) error {
	if cfg.Destination == config.DestinationEDS && !rt.options.Validate {
		if dir := filepath.Dir(cfg.EDS.Path); !isDir(dir) {
			return fmt.Errorf("eds.path: there is no folder %s to keep the file in", dir)
		}
	}
	for i := range cfg.Pools {
		def := &cfg.Pools[i]
		if def.File != nil && !rt.runsAs(def, sourceFile) {
			if _, err := discovery.ReadFile(def.File.Path); err != nil {
				return fmt.Errorf("pools.%s.file.path: %w", def.Name, err)
			}
		}
		// A configuration may be checked elsewhere than where it will run.
		if def.Kubernetes != nil && !rt.options.Validate && !rt.runsAs(def, sourceKubernetes) {
			if err := discovery.CheckKubernetes(kubernetesOptions(def.Kubernetes, SourceHooks{})); err != nil {
				return fmt.Errorf("pools.%s.kubernetes: %w", def.Name, err)
			}
		}
	}
	return nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// runsAs reports whether a pool's source runs as it is defined.
func (rt *Runtime) runsAs(def *config.Pool, name string) bool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	p := rt.pools[def.Name]
	return p != nil && p.owner != nil && reflect.DeepEqual(sourceDef(&p.def, name), sourceDef(def, name))
}

// SourceStatus is one source of a pool.
type SourceStatus struct {
	Source string `json:"source"`
	Where  string `json:"where"`
	// Delivered is false until the source has told its first full set.
	Delivered bool `json:"delivered"`
	Endpoints int  `json:"endpoints"`
	// AgeSeconds is how long ago the set in use was told, null before the first.
	AgeSeconds *float64 `json:"age_seconds"`
	// Error is why it can't tell now what there is, and FailingSeconds since when.
	Error          string   `json:"error,omitempty"`
	FailingSeconds *float64 `json:"failing_seconds,omitempty"`
	// Passed are things that it found and that are no endpoints.
	Passed []string `json:"passed,omitempty"`
}

// sourceStatus describes the sources of a pool.
func (rt *Runtime) sourceStatus(p *Pool) []SourceStatus {
	rt.mu.Lock()
	sources := slices.Clone(p.sources)
	def := p.def
	rt.mu.Unlock()
	var out []SourceStatus
	if def.Static != nil {
		out = append(out, SourceStatus{Source: sourceStatic, Where: "config", Delivered: true, Endpoints: len(def.Static)})
	}
	now := rt.now()
	for _, s := range sources {
		st := s.status()
		row := SourceStatus{Source: s.name, Where: st.Where, Delivered: !st.Loaded.IsZero(), Endpoints: st.Endpoints, Error: st.Error, Passed: st.Passed}
		if row.Delivered {
			age := now.Sub(st.Loaded).Seconds()
			row.AgeSeconds = &age
		}
		if !st.Since.IsZero() {
			age := now.Sub(st.Since).Seconds()
			row.FailingSeconds = &age
		}
		out = append(out, row)
	}
	return out
}
