package metricsync

import (
	"maps"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Config is what a reload may change. It is not written to once handed over.
type Config struct {
	// Interval between two scrapes of an endpoint; below 50 ms it is 50 ms.
	Interval time.Duration
	// Jitter is the share of Interval over which the scrapes of a pool are
	// spread, by a hash of their addresses: 0 is all of it, negative none.
	Jitter float64
	// MaxBackOff is how rarely a page that keeps failing is asked, unless
	// Interval is longer.
	MaxBackOff time.Duration
	// Timeout of one scrape, and of one request for the model list.
	Timeout time.Duration
	// ConnectTimeout of one connection for a scrape, within Timeout.
	ConnectTimeout time.Duration
	// StaleAfter is the age at which readings no longer count.
	StaleAfter time.Duration
	// MaxBytes is the largest metrics page, unpacked.
	MaxBytes int64
	// Access is how engines let themselves be asked.
	Access Access
	// Health is how the serving port is probed.
	Health Health
	// Discover asks endpoints for their models. Off, an endpoint without a
	// model label serves any.
	Discover bool
	// ModelMemory is how long a model stays known after its last endpoint.
	ModelMemory time.Duration
	// Known are the models that config names.
	Known []KnownModel
	// Sources are the discovery sources of the pool: what others deliver is
	// ignored, and of two that have one address the first counts.
	Sources []string

	headerNames []string // of Access, sorted
}

// Health is how the serving port is probed.
type Health struct {
	// Path is asked over HTTP each Interval and 200 means ready. Empty, the
	// probe is a TCP connect, and made only while scrapes fail.
	Path     string
	Interval time.Duration
	Timeout  time.Duration
}

// KnownModel is a model that always exists. Endpoints that serve Name also
// serve Adapters.
type KnownModel struct {
	Name     string
	Adapters []string
}

// withDefaults fills in what is zero.
func (c Config) withDefaults() *Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&c.Interval, time.Second)
	c.Interval = max(c.Interval, minInterval)
	def(&c.Timeout, time.Second)
	def(&c.ConnectTimeout, c.Timeout)
	def(&c.MaxBackOff, 30*time.Second)
	def(&c.StaleAfter, 5*time.Second)
	def(&c.Health.Interval, 5*time.Second)
	def(&c.Health.Timeout, 2*time.Second)
	if c.MaxBytes <= 0 {
		c.MaxBytes = 16 << 20
	}
	c.headerNames = slices.Sorted(maps.Keys(c.Access.Headers))
	return &c
}

// spread is how long the scrapes of a pool are spread over.
func (c *Config) spread() time.Duration {
	switch {
	case c.Jitter < 0:
		return 0
	case c.Jitter == 0 || c.Jitter > 1:
		return c.Interval
	default:
		return time.Duration(c.Jitter * float64(c.Interval))
	}
}

// knownNames lists every name that config gives a model.
func (c *Config) knownNames() []string {
	var names []string
	for _, k := range c.Known {
		names = append(append(names, k.Name), k.Adapters...)
	}
	return names
}

// served lists what an endpoint serves beside its label, sorted: the lists,
// and what config knows to come with one of them.
func (c *Config) served(label string, lists ...[]string) []string {
	all := slices.Concat(lists...)
	for _, k := range c.Known {
		if k.Name != "" && (k.Name == label || slices.Contains(all, k.Name)) {
			all = append(all, k.Adapters...)
		}
	}
	slices.Sort(all)
	all = slices.Compact(all)
	return slices.DeleteFunc(all, func(m string) bool { return m == "" || m == label })
}

// State is what a source knows of the set that it delivers.
type State uint8

const (
	// Complete sets are all there is, now.
	Complete State = iota
	// LastGood sets were complete once; the source can't say what changed.
	LastGood
)

// sourceSet is the newest full set of one source.
type sourceSet struct {
	targets   []pool.Target
	state     State
	delivered bool // a complete set, once
}

// merge makes one set of those of the sources, in their order, the first to
// name an address winning. complete means that each delivered a complete set
// once, fresh that each one's newest is.
func merge(sources []string, sets map[string]sourceSet) (targets []pool.Target, complete, fresh bool) {
	complete, fresh = true, true
	seen := make(map[string]struct{})
	for _, name := range sources {
		set := sets[name]
		complete = complete && set.delivered
		fresh = fresh && set.state == Complete
		for _, t := range set.targets {
			key := t.Addr.String()
			if _, dup := seen[key]; dup {
				continue
			}
			seen[key] = struct{}{}
			targets = append(targets, t)
		}
	}
	return targets, complete, fresh
}
