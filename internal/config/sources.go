package config

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/discovery"
	"github.com/shuntproxy/shunt/internal/pool"
)

// DNS is a source of endpoints behind names. A name is looked up again when its
// TTL ends. One that can't be looked up keeps its last good addresses; one that
// does not exist, or has no address, has no endpoints.
type DNS struct {
	// Names are looked up. At least one is required.
	Names []DNSName `json:"names"`

	// Servers are asked in order, as IP or IP:port. Default: those of
	// /etc/resolv.conf, whose search domains count either way.
	Servers []string `json:"servers,omitempty"`

	// Timeout of one question to one server, 10ms to 1m. Default: 2s.
	Timeout time.Duration `json:"timeout,omitempty" default:"2s"`

	// MinInterval is the least time between two look-ups of a name, however short
	// its TTL, 100ms to 1h. It is also the pause after one that failed. Default: 1s.
	MinInterval time.Duration `json:"minInterval,omitempty" default:"1s"`

	// MaxInterval is the longest time between two look-ups of a name, however long
	// its TTL, from MinInterval to 24h. Default: 30s.
	MaxInterval time.Duration `json:"maxInterval,omitempty" default:"30s"`
}

// DNSName is one name.
type DNSName struct {
	// Name, without a dot at its end, is also tried in the search domains. Required.
	Name string `json:"name"`

	// Type is a, for A and AAAA records, or srv, whose records have the ports too:
	// those of the best priority count. Default: a.
	Type string `json:"type,omitempty" default:"a" jsonschema:"enum=a,enum=srv"`

	// Port of the endpoints of type a. Default: 0, which is that of the label
	// model.aibrix.ai/port, else 8000.
	Port int `json:"port,omitempty" default:"0"`

	// Labels of all its endpoints, as in a static list. Default: none.
	Labels map[string]string `json:"labels,omitempty"`
}

// Kubernetes is a source of endpoints in the pods of a cluster. It reads and
// writes nothing there: docs/discovery.md has the permissions that it needs. Away
// or forbidden, the last good set stays.
type Kubernetes struct {
	// Kubeconfig is a file with the server and its credentials. A relative path
	// starts at Envoy's working directory. Default: "", which is the service account
	// of the pod that Envoy runs in.
	Kubeconfig string `json:"kubeconfig,omitempty"`

	// Context is one of kubeconfig's. Default: "", its current one.
	Context string `json:"context,omitempty"`

	// Namespaces that are looked in; ["*"] is all. With inferencePool at most one:
	// that of the resource. Default: none, which is the own one (the pod's, or the
	// context's).
	Namespaces []string `json:"namespaces,omitempty"`

	// Selector of labels that pods must match, as in kubectl get -l. Default:
	// model.aibrix.ai/name, which is all pods that have this label.
	Selector string `json:"selector,omitempty" default:"model.aibrix.ai/name"`

	// InferencePool names a resource (inference.networking.k8s.io/v1) whose selector
	// and targetPorts count instead of selector and targetPorts. The
	// InferenceObjectives and InferenceModelRewrites of its namespace that refer to
	// it count too. Default: "".
	InferencePool string `json:"inferencePool,omitempty"`

	// TargetPorts make each pod an endpoint for each port: the ranks of a
	// data-parallel engine. The annotation llm-d.ai/active-ports of a pod narrows
	// them. Metrics are then read on the same port unless the pod has the label
	// model.aibrix.ai/metric-port. Default: none, and the label model.aibrix.ai/port
	// gives the one port, else 8000.
	TargetPorts []int `json:"targetPorts,omitempty"`
}

// Values of DNSName.Type.
const (
	DNSAddresses = "a"
	DNSServices  = "srv"
)

// ServerAddresses are Servers with their ports. A valid Config gives no invalid
// one.
func (d *DNS) ServerAddresses() []netip.AddrPort {
	var out []netip.AddrPort
	for _, text := range d.Servers {
		if address, ok := parseServer(text); ok {
			out = append(out, address)
		}
	}
	return out
}

func parseServer(text string) (netip.AddrPort, bool) {
	if address, err := netip.ParseAddrPort(text); err == nil {
		return address, address.Port() != 0
	}
	ip, err := netip.ParseAddr(strings.Trim(text, "[]"))
	return netip.AddrPortFrom(ip, 53), err == nil
}

func (c *checker) dns(path string, d *DNS) {
	if len(d.Names) == 0 {
		c.fail(path+".names", "is missing: at least one name is wanted, such as names: [{name: engines.example.com}]")
	}
	for i, n := range d.Names {
		at := indexPath(path+".names", i)
		c.dnsName(at, n)
		first := slices.IndexFunc(d.Names, func(o DNSName) bool { return o.Name == n.Name && o.Type == n.Type && o.Port == n.Port })
		if first < i {
			c.fail(at+".name", "%q is listed before, at %s", n.Name, indexPath(path+".names", first))
		}
	}
	for i, text := range d.Servers {
		if _, ok := parseServer(text); !ok {
			c.fail(indexPath(path+".servers", i), "%q is not IP or IP:port", text)
		}
	}
	inRange(c, path+".timeout", d.Timeout, 10*time.Millisecond, time.Minute)
	inRange(c, path+".minInterval", d.MinInterval, 100*time.Millisecond, time.Hour)
	inRange(c, path+".maxInterval", d.MaxInterval, d.MinInterval, 24*time.Hour)
}

func (c *checker) dnsName(at string, n DNSName) {
	_, ipErr := netip.ParseAddr(n.Name)
	switch {
	case n.Name == "":
		c.fail(at+".name", "is missing: the name to look up")
	case ipErr == nil:
		c.fail(at+".name", "%q is an IP (addresses go under static)", n.Name)
	case strings.ContainsAny(n.Name, " :/"):
		c.fail(at+".name", "%q is not a name; a port goes under port", n.Name)
	}
	c.oneOf(at+".type", "type", n.Type, []string{DNSAddresses, DNSServices})
	if n.Port != 0 {
		inRange(c, at+".port", n.Port, 1, 65535)
		if n.Type == DNSServices {
			c.fail(at+".port", "has no effect beside type: srv, whose records have ports")
		}
	}
	_, port := n.Labels[pool.LabelPort]
	if port && n.Type == DNSServices {
		c.fail(at+".labels", "have %s beside type: srv, whose records have ports", pool.LabelPort)
		return
	}
	address := "127.0.0.1" // any
	if n.Port > 0 && n.Port < 65536 {
		address += ":" + strconv.Itoa(n.Port)
	}
	_, problems := pool.ParseTarget(address, n.Labels, "")
	for _, p := range problems {
		c.fail(at+"."+p.Field, "%s", strings.ReplaceAll(p.Message, "the port in address "+strconv.Quote(address), "port "+strconv.Itoa(n.Port)))
	}
}

// maxTargetPorts is how many ports a pod may have, as in an InferencePool.
const maxTargetPorts = 8

func (c *checker) kubernetes(path string, k *Kubernetes) {
	if k.Context != "" && k.Kubeconfig == "" {
		c.fail(path+".context", "has no effect without kubeconfig")
	}
	for i, ns := range k.Namespaces {
		switch {
		case ns == "":
			c.fail(indexPath(path+".namespaces", i), "is empty: name a namespace, or leave the list out for the own one")
		case ns == "*" && len(k.Namespaces) > 1:
			c.fail(indexPath(path+".namespaces", i), "is all namespaces: the others have no effect beside it")
		case slices.Index(k.Namespaces, ns) < i:
			c.fail(indexPath(path+".namespaces", i), "%q is listed before", ns)
		}
	}
	if err := discovery.CheckSelector(k.Selector); err != nil {
		c.fail(path+".selector", "%q is not a label selector: %v", k.Selector, err)
	}
	if k.InferencePool != "" {
		if len(k.Namespaces) > 1 || slices.Contains(k.Namespaces, "*") {
			c.fail(path+".namespaces", "must name one namespace at most beside inferencePool: the pods of one are those of its own namespace")
		}
		for _, field := range []string{"selector", "targetPorts"} {
			if c.dec.has(path + "." + field) {
				c.fail(path+"."+field, "has no effect beside inferencePool, which has its own")
			}
		}
	}
	if len(k.TargetPorts) > maxTargetPorts {
		c.fail(path+".targetPorts", "has %d ports: %d at most", len(k.TargetPorts), maxTargetPorts)
	}
	for i, port := range k.TargetPorts {
		inRange(c, indexPath(path+".targetPorts", i), port, 1, 65535)
		if slices.Index(k.TargetPorts, port) < i {
			c.fail(indexPath(path+".targetPorts", i), "%d is listed before", port)
		}
	}
}
