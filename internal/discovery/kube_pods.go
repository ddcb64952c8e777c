//go:build !nokubernetes

package discovery

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/shuntproxy/shunt/internal/pool"
)

// The labels and annotations of llm-d and AIBrix that say what a pod is, beside
// those of internal/pool.
const (
	labelEngineType    = "llm-d.ai/engine-type"
	labelEngineTypeOld = "inference.networking.k8s.io/engine-type"
	labelRole          = "llm-d.ai/role"
	labelRoleName      = "role-name"    // AIBrix: prefill, decode or another
	labelRoleSet       = "roleset-name" // AIBrix: such a pod has a role
	labelRayNode       = "ray.io/node-type"
	labelGroupIndex    = "stormservice.orchestration.aibrix.ai/pod-group-index"

	annotationPorts    = "llm-d.ai/active-ports"
	annotationPortsOld = "inference.networking.k8s.io/active-ports"
)

// keptLabels and keptAnnotations are all that is read of a pod.
func keptLabels() []string {
	return []string{
		pool.LabelModel, pool.LabelEngine, pool.LabelPort, pool.LabelMetricPort, pool.LabelHardware,
		labelEngineType, labelEngineTypeOld, labelRole, labelRoleName, labelRoleSet, labelRayNode, labelGroupIndex,
	}
}

func keptAnnotations() []string {
	return []string{pool.LabelModel, annotationPorts, annotationPortsOld}
}

// strippedPod is a pod with what is read of it, and nothing else: 5,000 whole
// ones take much memory.
func strippedPod(pod *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{}
	out.Namespace, out.Name, out.UID, out.ResourceVersion = pod.Namespace, pod.Name, pod.UID, pod.ResourceVersion
	out.CreationTimestamp, out.DeletionTimestamp = pod.CreationTimestamp, pod.DeletionTimestamp
	out.Labels, out.Annotations = kept(pod.Labels, keptLabels()), kept(pod.Annotations, keptAnnotations())
	out.Status.Phase, out.Status.PodIP = pod.Status.Phase, pod.Status.PodIP
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			out.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status, Reason: c.Reason}}
		}
	}
	return out
}

func kept(from map[string]string, keys []string) map[string]string {
	var out map[string]string
	for _, key := range keys {
		if value, ok := from[key]; ok {
			if out == nil {
				out = make(map[string]string, 4)
			}
			out[key] = strings.Clone(value[:min(len(value), maxValue+1)]) // an annotation may have 256 KiB
		}
	}
	return out
}

// maxValue is how many bytes of a label or annotation are read.
const maxValue = 512

// podRules say how pods become endpoints.
type podRules struct {
	// ports make each pod an endpoint per port; none means the port label's.
	ports []uint16
	// qualify puts the namespace before a pod's name.
	qualify bool
}

// foundPod is what one pod comes to.
type foundPod struct {
	targets []pool.Target
	passed  string   // why it is no endpoint, or ""
	notes   []string // what is odd about it
}

// endpoints reads one pod. It is pure.
func (r podRules) endpoints(pod *corev1.Pod) foundPod {
	var f foundPod
	name := pod.Name
	if r.qualify {
		name = pod.Namespace + "/" + pod.Name
	}
	ip, err := netip.ParseAddr(pod.Status.PodIP)
	index, _ := strconv.Atoi(pod.Labels[labelGroupIndex])
	switch {
	case pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
		f.passed = "has ended (phase " + string(pod.Status.Phase) + ")" // and its IP may be another's
	case pod.Status.PodIP == "":
		f.passed = "has no IP yet"
	case err != nil:
		f.passed = fmt.Sprintf("has IP %q, which is none", pod.Status.PodIP)
	case pod.Labels[labelRayNode] == "worker":
		f.passed = "is a Ray worker (" + labelRayNode + ")"
	case index > 0:
		f.passed = "is not the first of its group (" + labelGroupIndex + ")"
	case len(pod.Annotations[pool.LabelModel]) > maxValue && pod.Labels[pool.LabelModel] == "":
		f.passed = fmt.Sprintf("has a model of more than %d bytes (annotation %s)", maxValue, pool.LabelModel)
	}
	if f.passed != "" {
		return f
	}
	labels := map[string]string{}
	for _, key := range []string{pool.LabelModel, pool.LabelEngine, pool.LabelPort, pool.LabelMetricPort, pool.LabelHardware} {
		if value, ok := pod.Labels[key]; ok {
			labels[key] = value
		}
	}
	if labels[pool.LabelModel] == "" { // a label can't hold a slash
		labels[pool.LabelModel] = pod.Annotations[pool.LabelModel]
	}
	for _, key := range []string{labelEngineType, labelEngineTypeOld} {
		if labels[pool.LabelEngine] == "" {
			labels[pool.LabelEngine] = pod.Labels[key]
		}
	}
	if len(r.ports) == 0 {
		f.add(ip.String(), labels, name, pod)
		return f
	}
	delete(labels, pool.LabelPort)
	active, note := activePorts(pod)
	if note != "" {
		f.notes = append(f.notes, note)
	}
	_, ownMetrics := labels[pool.LabelMetricPort]
	for i, port := range r.ports {
		if active != nil && !slices.Contains(active, port) {
			continue
		}
		rank := name
		if len(r.ports) > 1 {
			rank = name + "-rank-" + strconv.Itoa(i)
		}
		before := len(f.targets)
		f.add(netip.AddrPortFrom(ip, port).String(), labels, rank, pod)
		if len(f.targets) > before && !ownMetrics { // each rank has its own page
			f.targets[before].MetricPort = port
		}
	}
	if len(f.targets) == 0 && f.passed == "" {
		f.passed = "has none of the pool's ports active (" + annotationPorts + ")"
	}
	return f
}

func (f *foundPod) add(address string, labels map[string]string, name string, pod *corev1.Pod) {
	t, problems := pool.ParseTarget(address, labels, name)
	for _, p := range problems {
		switch p.Field {
		case "address":
			f.passed = "address " + p.Message
			return
		case "labels[" + strconv.Quote(pool.LabelEngine) + "]": // routed to, not scored; said elsewhere
		default: // a bad port is the default one
			f.notes = append(f.notes, fmt.Sprintf("%s: %s; %d is used", p.Field, p.Message, pool.DefaultPort))
		}
	}
	t.Source, t.Incarnation = "kubernetes", string(pod.UID)
	t.NotReady, t.PrefillOnly = unready(pod), prefillOnly(pod.Labels)
	f.targets = append(f.targets, t)
}

// unready is why a pod may take no request, or "".
func unready(pod *corev1.Pod) string {
	if pod.DeletionTimestamp != nil {
		return "the pod is terminating"
	}
	for _, c := range pod.Status.Conditions {
		if c.Type != corev1.PodReady {
			continue
		}
		switch {
		case c.Status == corev1.ConditionTrue:
			return ""
		case c.Reason != "":
			return "the pod is not ready: " + c.Reason
		}
	}
	return "the pod is not ready"
}

// prefillOnly reports whether a pod's role leaves generating to others: such a
// pod can't answer a request.
func prefillOnly(labels map[string]string) bool {
	switch labels[labelRole] {
	case "prefill", "encode", "encode-prefill":
		return true
	case "":
		return labels[labelRoleSet] != "" && labels[labelRoleName] == "prefill"
	default: // decode, both, prefill-decode
		return false
	}
}

// activePorts are those of the annotation, nil where there is none.
func activePorts(pod *corev1.Pod) (active []uint16, note string) {
	name := annotationPorts
	text, ok := pod.Annotations[name]
	if !ok {
		name = annotationPortsOld
		if text, ok = pod.Annotations[name]; !ok {
			return nil, ""
		}
	}
	if len(text) > maxValue {
		return nil, fmt.Sprintf("annotation %s has more than %d bytes; all ports of the pool are used", name, maxValue)
	}
	active = []uint16{}
	for field := range strings.SplitSeq(text, ",") {
		if field = strings.TrimSpace(field); field == "" {
			continue
		}
		n, err := strconv.ParseUint(field, 10, 16)
		if err != nil || n == 0 {
			return nil, fmt.Sprintf("annotation %s: %q is not a port; all ports of the pool are used", name, field)
		}
		active = append(active, uint16(n))
	}
	return active, ""
}

// better reports whether pod a, and not b, is what an address belongs to now.
func better(a, b *corev1.Pod) bool {
	if x, y := a.DeletionTimestamp == nil, b.DeletionTimestamp == nil; x != y {
		return x
	}
	if x, y := unready(a) == "", unready(b) == ""; x != y {
		return x
	}
	if x, y := a.CreationTimestamp.Time, b.CreationTimestamp.Time; !x.Equal(y) {
		return x.After(y)
	}
	return a.Namespace+"/"+a.Name < b.Namespace+"/"+b.Name
}

// gathered is what all pods come to.
type gathered struct {
	targets []pool.Target
	passed  []string
	notes   map[string][]string // by UID and name of a pod
}

// gather reads all pods. It is pure; the result is in order of address.
func (r podRules) gather(pods []*corev1.Pod) gathered {
	g := gathered{targets: make([]pool.Target, 0, len(pods)), notes: map[string][]string{}}
	type owner struct {
		pod *corev1.Pod
		at  int
	}
	owners := make(map[netip.AddrPort]owner, len(pods))
	for _, pod := range pods {
		f := r.endpoints(pod)
		if f.passed != "" && len(g.passed) < maxPassed {
			g.passed = append(g.passed, "pod "+pod.Namespace+"/"+pod.Name+" "+f.passed)
		}
		if len(f.notes) > 0 {
			g.notes[string(pod.UID)+" "+pod.Namespace+"/"+pod.Name] = f.notes
		}
		for _, t := range f.targets {
			o, dup := owners[t.Addr]
			switch {
			case !dup:
				owners[t.Addr] = owner{pod, len(g.targets)}
				g.targets = append(g.targets, t)
			case better(pod, o.pod):
				owners[t.Addr] = owner{pod, o.at}
				g.targets[o.at] = t
			}
		}
	}
	slices.SortFunc(g.targets, func(a, b pool.Target) int { return a.Addr.Compare(b.Addr) })
	slices.Sort(g.passed)
	return g
}

// age of a resource for precedence: the oldest wins, then the first by name.
func older(aTime time.Time, aName string, bTime time.Time, bName string) int {
	if c := aTime.Compare(bTime); c != 0 {
		return c
	}
	return strings.Compare(aName, bName)
}
