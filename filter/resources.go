package filter

import (
	"fmt"
	"log/slog"
	"maps"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
)

// maxPriority bounds the priorities of resources, as config bounds its own.
const maxPriority = 1_000_000

// resources are what the namespace of a pool's InferencePool says of requests.
// But for merged they are immutable.
type resources struct {
	found discovery.Resources
	// objectives are the InferenceObjectives by name. They have a priority and no
	// goals.
	objectives map[string]*config.Objective

	// merged is the rewriter of the configuration that asked last, with the rules of
	// these resources.
	merged atomic.Pointer[mergedRewriter]
}

type mergedRewriter struct{ own, all *rewriter }

func newResources(found discovery.Resources) *resources {
	r := &resources{found: found, objectives: make(map[string]*config.Objective, len(found.Objectives))}
	for _, o := range found.Objectives {
		r.objectives[o.Name] = &config.Objective{Name: o.Name, Priority: min(max(o.Priority, -maxPriority), maxPriority)}
	}
	return r
}

// takeResources makes what a source found count, for the next request on.
func (rt *Runtime) takeResources(p *Pool, found discovery.Resources) {
	p.resources.Store(newResources(found))
	rt.log(slog.LevelInfo, fmt.Sprintf("pool %s: %d objectives and %d rewrite rules of the InferencePool count",
		p.name, len(found.Objectives), len(found.Rewrites)))
}

// resourcesLeft is what is left of the resources under a new definition.
func resourcesLeft(r *resources, def *config.Pool) *resources {
	if def.Kubernetes == nil || def.Kubernetes.InferencePool == "" {
		return nil
	}
	return r
}

// rewriter is what decides about the request's model: the rules of the
// configuration, then those of the pool's resources. A rule that names the model
// beats one for all, wherever it stands.
func (r *Request) rewriter() *rewriter {
	own := r.set.rewriter
	if r.pool == nil {
		return own
	}
	res := r.pool.resources.Load()
	if res == nil || len(res.found.Rewrites) == 0 {
		return own
	}
	if m := res.merged.Load(); m != nil && m.own == own {
		return m.all
	}
	m := &mergedRewriter{own, own.with(res.found.Rewrites)}
	res.merged.Store(m)
	return m.all
}

// objectiveOf finds an objective by name: the configuration's, else that of the
// pool's resources. Nil for none.
func (r *Request) objectiveOf(name string) *config.Objective {
	if o := r.set.objectives[name]; o != nil {
		return o
	}
	if res := r.pool.resources.Load(); res != nil {
		return res.objectives[name]
	}
	return nil
}

// with returns a rewriter that has rules behind its own.
func (w *rewriter) with(rules []discovery.Rewrite) *rewriter {
	all := &rewriter{aliases: w.aliases, exact: maps.Clone(w.exact), generic: w.generic}
	for _, found := range rules {
		rule, sum := new(rewriteRule), uint64(0)
		for _, t := range found.Targets {
			sum += uint64(max(t.Weight, 1)) // all have one, or none has
			rule.targets, rule.bounds = append(rule.targets, t.Model), append(rule.bounds, sum)
		}
		if len(found.Models) == 0 && all.generic == nil {
			all.generic = rule
		}
		for _, model := range found.Models {
			if all.exact[model] == nil {
				all.exact[model] = rule
			}
		}
	}
	return all
}

// discoveryCollector describes the sources of all pools.
type discoveryCollector struct{ runtime *Runtime }

var (
	descSourceUp        = sourceDesc("discovery_up", "1 if the source can tell what there is now, 0 while it has only its last good set, or none.")
	descSourceEndpoints = sourceDesc("discovery_endpoints", "Endpoints in the source's set.")
	descSourceChanges   = sourceDesc("discovery_changes_total", "Sets that were taken over after the first.")
	descSourceFailures  = sourceDesc("discovery_failures_total", "Times that the source began to fail; of a file, also that it failed in another way.")
)

func sourceDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("shunt_"+name, help, []string{"pool", "source"}, nil)
}

// Describe implements prometheus.Collector.
func (c discoveryCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descSourceUp, descSourceEndpoints, descSourceChanges, descSourceFailures} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c discoveryCollector) Collect(ch chan<- prometheus.Metric) {
	defer c.runtime.contain("metrics") // the registry calls it in goroutines of its own
	for _, p := range c.runtime.poolList() {
		c.runtime.mu.Lock()
		sources := append([]*runningSource(nil), p.sources...)
		c.runtime.mu.Unlock()
		for _, s := range sources {
			st := s.status()
			put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64) {
				ch <- prometheus.MustNewConstMetric(d, kind, v, p.name, s.name)
			}
			put(descSourceUp, prometheus.GaugeValue, boolean(st.Error == "" && !st.Loaded.IsZero()))
			put(descSourceEndpoints, prometheus.GaugeValue, float64(st.Endpoints))
			put(descSourceChanges, prometheus.CounterValue, float64(st.Changes))
			put(descSourceFailures, prometheus.CounterValue, float64(st.Failures))
		}
	}
}
