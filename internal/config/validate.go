package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// checker collects the problems of one document. It is silent about values that
// could not be decoded.
type checker struct {
	dec      *decoder
	problems Problems
}

func (c *checker) fail(path, format string, args ...any) {
	if !c.dec.failed(path) {
		c.problems = append(c.problems, c.dec.problem(path, format, args...))
	}
}

func validate(cfg *Config, dec *decoder) Problems {
	c := &checker{dec: dec}
	c.pools(cfg.Pools)
	c.scoring(cfg)
	c.paths(cfg.Paths)
	c.models(cfg.Models)
	c.rewrites(cfg.Rewrites, cfg.Models)
	c.scrape(cfg.Scrape)
	c.prometheus(cfg.Prometheus)
	c.limits(cfg.Limits)
	c.health(cfg.Health)
	c.flow(cfg)
	inRange(c, "startupHold", cfg.StartupHold, 0, time.Minute)
	if limit := cfg.Runtime.MemoryLimit; limit != 0 {
		inRange(c, "runtime.memoryLimit", limit, 64<<20, 1<<50)
	}
	c.destination(cfg)
	c.oneOf("onInternalError", "value", cfg.OnInternalError, []string{OnErrorReject, OnErrorRoute})
	c.listeners(cfg.Admin.Address, cfg.Metrics.Address)
	return c.problems
}

// maxSocketPath is what Linux takes as the path of a socket, in bytes.
const maxSocketPath = 107

// listeners checks the addresses of shunt's own, "" for none: what can't be
// listened on would be tried again for ever.
func (c *checker) listeners(admin, metrics string) {
	switch file, ok := strings.CutPrefix(admin, "unix:"); {
	case admin == "":
	case !ok:
		c.listen("admin.address", admin, "IP:port or unix:PATH")
	case file == "":
		c.fail("admin.address", "names no file: write unix:PATH")
	case len(file) > maxSocketPath:
		c.fail("admin.address", "names a file with %d bytes: the path of a socket has %d at the most", len(file), maxSocketPath)
	}
	if metrics == "" {
		return
	}
	c.listen("metrics.address", metrics, "IP:port")
	one, _ := netip.ParseAddrPort(admin)
	two, _ := netip.ParseAddrPort(metrics)
	a, b := one.Addr().Unmap(), two.Addr().Unmap()
	if one.Port() != 0 && one.Port() == two.Port() && (a == b || a.IsUnspecified() || b.IsUnspecified()) {
		c.fail("metrics.address", "has the port of admin.address, %s: one of them can't listen", admin)
	}
}

// destination checks what only one kind of cluster can do.
func (c *checker) destination(cfg *Config) {
	c.oneOf("destination", "destination", cfg.Destination, []string{DestinationOriginalDst, DestinationEDS})
	if cfg.Destination != DestinationEDS {
		if cfg.Fallbacks != 0 {
			c.fail("fallbacks", "is %d, but with destination %s it must be 0: such a cluster can't read a list", cfg.Fallbacks, cfg.Destination)
		}
		if cfg.EDS.Path != "" {
			c.fail("eds.path", "has no effect without destination: eds")
		}
		return
	}
	inRange(c, "fallbacks", cfg.Fallbacks, 0, MaxFallbacks)
	switch path := cfg.EDS.Path; {
	case path == "":
		c.fail("eds.path", "is missing: destination: eds needs the file that Envoy's cluster reads")
	case !strings.HasSuffix(path, ".yaml") && !strings.HasSuffix(path, ".json"):
		c.fail("eds.path", "%q ends neither in .yaml nor in .json: Envoy reads by the ending", path)
	}
}

func validateRoute(route *Route, dec *decoder) Problems {
	c := &checker{dec: dec}
	if dec.has("policy") {
		c.policy("policy", &route.Policy)
	}
	if dec.has("pool") {
		c.poolName("pool", route.Pool)
	}
	if route.Disabled {
		for _, name := range []string{"pool", "policy"} {
			if dec.has(name) {
				c.fail(name, "has no effect beside disabled: true")
			}
		}
	}
	return c.problems
}

func (c *checker) oneOf(path, what, value string, valid []string) {
	if !slices.Contains(valid, value) {
		c.fail(path, "unknown %s %q%s", what, value, suggest(value, valid))
	}
}

var poolNameRule = regexp.MustCompile(`^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$`)

func (c *checker) poolName(path, name string) {
	if !poolNameRule.MatchString(name) {
		c.fail(path, "%q is not a pool name: up to 63 letters, digits, and - _ . between them", name)
	}
}

func (c *checker) pools(pools Pools) {
	if len(pools) == 0 {
		c.fail("pools", "is missing: at least one pool is needed, such as pools: {default: {static: [{address: \"10.0.0.1:8000\"}]}}")
	}
	for i := range pools {
		p := &pools[i]
		path := fieldPath("pools", p.Name)
		c.poolName(path, p.Name)
		if p.Static == nil && p.File == nil && p.DNS == nil && p.Kubernetes == nil {
			c.fail(path, "has no source of endpoints: give it static, file, dns or kubernetes")
		}
		if p.File != nil && p.File.Path == "" {
			c.fail(path+".file.path", "is missing: name the file that lists the endpoints")
		}
		c.static(path+".static", p.Static)
		if p.DNS != nil {
			c.dns(path+".dns", p.DNS)
		}
		if p.Kubernetes != nil {
			c.kubernetes(path+".kubernetes", p.Kubernetes)
		}
	}
}

func (c *checker) static(path string, endpoints []Endpoint) {
	seen := map[netip.AddrPort]string{}
	for i, endpoint := range endpoints {
		at := indexPath(path, i)
		address, ok := c.endpoint(at, endpoint)
		if !ok {
			continue
		}
		if first, dup := seen[address]; dup {
			c.fail(at+".address", "%s is listed before, at %s", address, first)
			continue
		}
		seen[address] = at
	}
}

func (c *checker) models(m Models) {
	inRange(c, "models.memory", m.Memory, 0, 24*time.Hour)
	if m.NotFoundStatus != 400 && m.NotFoundStatus != 404 {
		c.fail("models.notFoundStatus", "is %d: 400 or 404 is wanted", m.NotFoundStatus)
	}
	seen := map[string]string{}
	name := func(path, value string) {
		if value == "" {
			c.fail(path, "is missing: name the model")
		} else if first, dup := seen[value]; dup {
			c.fail(path, "%q is listed before, at %s", value, first)
		} else {
			seen[value] = path
		}
	}
	for i, known := range m.Known {
		at := indexPath("models.known", i)
		name(at+".name", known.Name)
		for j, alias := range known.Aliases {
			name(indexPath(at+".aliases", j), alias)
		}
		for j, adapter := range known.Adapters {
			name(indexPath(at+".adapters", j), adapter)
		}
	}
}

func (c *checker) scrape(s Scrape) {
	inRange(c, "scrape.interval", s.Interval, 50*time.Millisecond, 5*time.Minute)
	inRange(c, "scrape.timeout", s.Timeout, 10*time.Millisecond, time.Minute)
	inRange(c, "scrape.maxBytes", s.MaxBytes, 1<<10, 1<<30)
	if s.StaleAfter < s.Interval {
		c.fail("scrape.staleAfter", "is %v, shorter than scrape.interval %v: every reading would be stale; a few intervals are wanted", s.StaleAfter, s.Interval)
	} else {
		inRange(c, "scrape.staleAfter", s.StaleAfter, 50*time.Millisecond, time.Hour)
	}
	if s.ConnectTimeout != 0 {
		inRange(c, "scrape.connectTimeout", s.ConnectTimeout, 10*time.Millisecond, s.Timeout)
	}
	inRange(c, "scrape.jitter", s.Jitter, 0, 1)
	inRange(c, "scrape.maxBackOff", s.MaxBackOff, 50*time.Millisecond, 10*time.Minute)
	if tls := s.TLS; !tls.Enabled {
		for _, field := range []struct {
			name string
			set  bool
		}{{"caFile", tls.CAFile != ""}, {"serverName", tls.ServerName != ""}, {"insecureSkipVerify", tls.InsecureSkipVerify}} {
			if field.set {
				c.fail("scrape.tls."+field.name, "has no effect without scrape.tls.enabled: true")
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.Headers)) {
		if err := CheckHeader(name, s.Headers[name]); err != nil {
			c.fail(fieldPath("scrape.headers", name), "%v", err)
		}
	}
}

var headerNameRule = regexp.MustCompile("^[-!#$%&'*+.^_`|~0-9A-Za-z]+$")

// CheckHeader checks one that goes along with requests to engines. What the
// request itself needs is not for config to say.
func CheckHeader(name, value string) error {
	switch strings.ToLower(name) {
	case "host", "accept", "accept-encoding", "connection", "content-length", "transfer-encoding", "user-agent", "authorization":
		return errors.New("can't be set: shunt's own requests need it as it is; scrape.bearerTokenFile sets authorization")
	}
	if !headerNameRule.MatchString(name) {
		return errors.New("is not a header name")
	}
	if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
		return errors.New("holds a control character")
	}
	return nil
}

func (c *checker) limits(l Limits) {
	inRange(c, "limits.requestBody", l.RequestBody, 1<<10, 1<<30)
	inRange(c, "limits.jsonDepth", l.JSONDepth, 8, 1024)
	if l.HeldBodies != 0 && l.HeldBodies < l.RequestBody {
		c.fail("limits.heldBodies", "is %v, less than limits.requestBody %v: the largest body could never wait", l.HeldBodies, l.RequestBody)
	}
}

func (c *checker) health(h Health) {
	inRange(c, "health.interval", h.Interval, 100*time.Millisecond, 10*time.Minute)
	inRange(c, "health.timeout", h.Timeout, 10*time.Millisecond, time.Minute)
	if h.Path != "" && (h.Path[0] != '/' || strings.ContainsAny(h.Path, " \t\r\n#")) {
		c.fail("health.path", "%q is not a path: it starts with / and has no spaces", h.Path)
	}
}

func (c *checker) listen(path, address, want string) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		c.fail(path, "%q is not %s", address, want)
	}
}

func inRange[T cmp.Ordered](c *checker, path string, value, least, most T) {
	if value < least || value > most {
		c.fail(path, "is %s: %s to %s is wanted", text(value), text(least), text(most))
	}
}

// text writes numbers as people do: 1000000 and not 1e+06.
func text(value any) string {
	if f, ok := value.(float64); ok {
		return strconv.FormatFloat(f, 'f', -1, 64)
	}
	return fmt.Sprint(value)
}

// endpoint checks an entry as discovery will read it.
func (c *checker) endpoint(path string, endpoint Endpoint) (netip.AddrPort, bool) {
	target, problems := pool.ParseTarget(endpoint.Address, endpoint.Labels, endpoint.Pod)
	for _, problem := range problems {
		// The field is relative to the entry: address, or labels["…"].
		c.fail(path+"."+problem.Field, "%s", problem.Message)
	}
	return target.Addr, len(problems) == 0
}
