package bootstrap

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
	"github.com/shuntproxy/shunt/internal/pool"
)

// CheckEndpoints says what a valid config leaves open about its endpoints and the
// files it names: files of endpoints that are broken are problems, what is legal and
// likely a mistake, and what is not here, is a warning. It reads the files, from the working directory where a path is
// relative, as Envoy's process does from its own.
func CheckEndpoints(cfg *config.Config) (problems, warnings config.Problems) {
	e := endpoints{metrics: map[netip.AddrPort]seen{}}
	for _, p := range cfg.Pools {
		at := "pools." + p.Name
		if strings.Contains(p.Name, ".") {
			at = "pools[" + strconv.Quote(p.Name) + "]"
		}
		e.list(at+".static", p.Static)
		if p.File != nil {
			e.file(at+".file.path", p.File.Path)
		}
		if p.Kubernetes != nil {
			e.there(at+".kubernetes.kubeconfig", p.Kubernetes.Kubeconfig, "where it does not exist when Envoy starts, the config is refused")
		}
	}
	if cfg.Destination == config.DestinationEDS {
		e.there("eds.path", filepath.Dir(cfg.EDS.Path), "where it does not exist when Envoy starts, the config is refused")
	}
	const unread = "no engine's metrics are read until it does"
	e.there("scrape.tls.caFile", cfg.Scrape.TLS.CAFile, unread)
	e.there("scrape.bearerTokenFile", cfg.Scrape.BearerTokenFile, unread)
	const unasked = "the server is not asked until it does"
	e.there("prometheus.tls.caFile", cfg.Prometheus.TLS.CAFile, unasked)
	e.there("prometheus.tls.certFile", cfg.Prometheus.TLS.CertFile, unasked)
	e.there("prometheus.tls.keyFile", cfg.Prometheus.TLS.KeyFile, unasked)
	e.there("prometheus.bearerTokenFile", cfg.Prometheus.BearerTokenFile, unasked)
	if b := cfg.Prometheus.BasicAuth; b != nil {
		e.there("prometheus.basicAuth.passwordFile", b.PasswordFile, unasked)
	}
	return e.problems, e.warnings
}

type endpoints struct {
	problems, warnings config.Problems
	// metrics has, by the address of a metrics page, the endpoint that has it first.
	metrics map[netip.AddrPort]seen
}

type seen struct {
	addr netip.AddrPort
	path string
}

func (e *endpoints) warn(path, format string, args ...any) {
	e.warnings = append(e.warnings, config.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
}

// there warns of a file that does not exist, with what follows. An empty name is
// none.
func (e *endpoints) there(path, name, follows string) {
	if name == "" {
		return
	}
	if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
		e.warn(path, "%s does not exist here: %s", name, follows)
	}
}

func (e *endpoints) file(path, name string) {
	_, err := discovery.ReadFile(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.warn(path, "%s does not exist here: where it does not exist when Envoy starts, the config is refused", name)
		return
	case err != nil:
		for _, line := range strings.Split(strings.TrimPrefix(err.Error(), name+": "), "\n") {
			e.problems = append(e.problems, config.Problem{Path: path + "(" + name + ")", Message: line})
		}
		return
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return // It was there a moment ago: whoever replaces it runs the check again.
	}
	// The list alone, or below static. ReadFile has judged the rest.
	var list []config.Endpoint
	if yaml.Unmarshal(text, &list) != nil {
		var below struct{ Static []config.Endpoint }
		if yaml.Unmarshal(text, &below) != nil {
			return
		}
		list = below.Static
	}
	e.list(path+"("+name+")", list)
}

func (e *endpoints) list(path string, list []config.Endpoint) {
	known := []string{pool.LabelModel, pool.LabelEngine, pool.LabelPort, pool.LabelMetricPort, pool.LabelHardware}
	for i, endpoint := range list {
		at := path + "[" + strconv.Itoa(i) + "]"
		for _, label := range slices.Sorted(maps.Keys(endpoint.Labels)) {
			if strings.HasPrefix(label, "model.aibrix.ai/") && !slices.Contains(known, label) {
				e.warn(at+".labels["+strconv.Quote(label)+"]", "is not read; these are: %s", strings.Join(known, ", "))
			}
		}
		target, problems := pool.ParseTarget(endpoint.Address, endpoint.Labels, endpoint.Pod)
		engine := "labels[" + strconv.Quote(pool.LabelEngine) + "]"
		for _, p := range problems {
			if p.Field == engine { // a file may have it, what is static may not
				e.warn(at+"."+p.Field, "%s: it is routed to but not scored", p.Message)
			}
		}
		if len(problems) > 0 {
			continue
		}
		if _, given := endpoint.Labels[pool.LabelMetricPort]; !given && target.Addr.Port() != pool.DefaultPort {
			e.warn(at, "serves on port %d and its metrics are looked for on port %d: if they are on the serving port, add the label %s: %q",
				target.Addr.Port(), pool.DefaultPort, pool.LabelMetricPort, strconv.Itoa(int(target.Addr.Port())))
		}
		page := netip.AddrPortFrom(target.Addr.Addr(), target.MetricPort)
		first, shared := e.metrics[page]
		if !shared {
			e.metrics[page] = seen{target.Addr, at}
		} else if first.addr != target.Addr {
			e.warn(at, "has its metrics at %s, where %s has them: both would be judged by one engine's load", page, first.path)
		}
	}
}
