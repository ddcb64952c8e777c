package pool

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// The pod labels that describe an endpoint.
const (
	LabelModel      = "model.aibrix.ai/name"
	LabelEngine     = "model.aibrix.ai/engine"
	LabelPort       = "model.aibrix.ai/port"
	LabelMetricPort = "model.aibrix.ai/metric-port"
	LabelHardware   = "model.aibrix.ai/hardware"
)

// DefaultPort is where an engine serves, and where its metrics are scraped,
// when neither the address nor a label says otherwise.
const DefaultPort = 8000

// Target is one endpoint as discovery found it: who it is and what its labels
// say, before anything was measured. A Target is immutable.
type Target struct {
	// Addr is the serving address.
	Addr netip.AddrPort
	// Pod is the name of what owns the endpoint, or "".
	Pod string
	// Incarnation tells a pod from a later one on the same address; "" where
	// the source cannot tell.
	Incarnation string
	// Model is the model label, or "" for an endpoint that has none.
	Model string
	// Engine selects the metric table.
	Engine Engine
	// EngineLabel is the engine label as written.
	EngineLabel string
	// MetricPort is where metrics are scraped, on the address's IP.
	MetricPort uint16
	// Hardware is the hardware label, or "": it selects a cost profile.
	Hardware string
	// Source names the discovery source, as in "static".
	Source string
	// NotReady is the source's reason why the endpoint may take no request
	// yet, or "".
	NotReady string
	// PrefillOnly endpoints are shown and never picked.
	PrefillOnly bool
}

// Problem is one thing wrong with a target: the field, relative to the entry
// that describes it, and what is wrong with it.
type Problem struct {
	// Field is "address" or `labels["model.aibrix.ai/port"]`.
	Field   string
	Message string
}

// Error makes a Problem an error.
func (p Problem) Error() string { return p.Field + ": " + p.Message }

// ParseTarget reads an endpoint from its address, IP or IP:port, and its pod
// labels. The port is the address's, else the label's, else DefaultPort; two
// that differ are a problem. All problems are returned at once.
func ParseTarget(address string, labels map[string]string, pod string) (Target, []Problem) {
	var problems []Problem
	report := func(field, format string, args ...any) {
		problems = append(problems, Problem{field, fmt.Sprintf(format, args...)})
	}
	t := Target{Pod: pod, Model: labels[LabelModel], EngineLabel: labels[LabelEngine], Hardware: labels[LabelHardware], MetricPort: DefaultPort}

	ip, port, err := parseAddress(address)
	if err != nil {
		report("address", "%v", err)
	}
	if label, ok := labels[LabelPort]; ok {
		n, err := parsePort(label)
		switch {
		case err != nil:
			report(labelField(LabelPort), "%v", err)
		case port != 0 && n != port:
			report(labelField(LabelPort), "%d differs from the port in address %q; give one of the two", n, address)
		default:
			port = n
		}
	}
	if port == 0 {
		port = DefaultPort
	}
	t.Addr = netip.AddrPortFrom(ip, port)

	if label, ok := labels[LabelMetricPort]; ok {
		n, err := parsePort(label)
		if err != nil {
			report(labelField(LabelMetricPort), "%v", err)
		} else {
			t.MetricPort = n
		}
	}
	if t.Engine, err = ParseEngine(t.EngineLabel); err != nil {
		report(labelField(LabelEngine), "%v", err)
	}
	return t, problems
}

func labelField(label string) string { return "labels[" + strconv.Quote(label) + "]" }

// parseAddress returns port 0 where the address has none.
func parseAddress(address string) (netip.Addr, uint16, error) {
	if address == "" {
		return netip.Addr{}, 0, fmt.Errorf("is missing; give IP or IP:port")
	}
	if ap, err := netip.ParseAddrPort(address); err == nil {
		if ap.Port() == 0 {
			return netip.Addr{}, 0, fmt.Errorf("%q has port 0; valid ports are 1 to 65535", address)
		}
		return checkIP(address, ap.Addr(), ap.Port())
	}
	bare := address
	if strings.HasPrefix(bare, "[") && strings.HasSuffix(bare, "]") {
		bare = bare[1 : len(bare)-1]
	}
	if ip, err := netip.ParseAddr(bare); err == nil {
		return checkIP(address, ip, 0)
	}
	host := address
	if i := strings.LastIndexByte(address, ':'); i >= 0 {
		host = address[:i]
		if ip, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
			port, err := parsePort(address[i+1:])
			if err != nil {
				return netip.Addr{}, 0, err
			}
			// Both are fine, so the brackets are not: 1:2:3:4:5:6:7:8:8000.
			return netip.Addr{}, 0, fmt.Errorf("%q is not IP:port; write %s", address, netip.AddrPortFrom(ip, port))
		}
	}
	return netip.Addr{}, 0, fmt.Errorf("%q is not an IP (names go under dns)", host)
}

// checkIP refuses what no engine can be dialled at. Envoy's original_dst
// reads no zone, and a 4-in-6 address would be another key than its IPv4 form.
func checkIP(address string, ip netip.Addr, port uint16) (netip.Addr, uint16, error) {
	switch {
	case ip.Zone() != "":
		return netip.Addr{}, 0, fmt.Errorf("%q has a zone; give the address without one", address)
	case ip.IsUnspecified():
		return netip.Addr{}, 0, fmt.Errorf("%q is no address to connect to", address)
	}
	return ip.Unmap(), port, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port; valid ports are 1 to 65535", s)
	}
	return uint16(n), nil
}
