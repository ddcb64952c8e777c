//go:build !nokubernetes

package discovery

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/shuntproxy/shunt/internal/pool"
)

// aPod is a ready one with labels, given as key and value in turn.
func aPod(ip string, pairs ...string) *corev1.Pod {
	p := &corev1.Pod{}
	p.Namespace, p.Name, p.UID = "ns", "p", "u"
	p.Labels, p.Annotations = map[string]string{}, map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		p.Labels[pairs[i]] = pairs[i+1]
	}
	p.Status.Phase, p.Status.PodIP = corev1.PodRunning, ip
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodInitialized, Status: corev1.ConditionFalse}, {Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return p
}

func annotated(p *corev1.Pod, key, value string) *corev1.Pod {
	p.Annotations[key] = value
	return p
}

func phased(p *corev1.Pod, phase corev1.PodPhase) *corev1.Pod { p.Status.Phase = phase; return p }

func conditionless(p *corev1.Pod) *corev1.Pod { p.Status.Conditions = nil; return p }

func deleted(p *corev1.Pod) *corev1.Pod {
	p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	return p
}

func TestPodRules(t *testing.T) {
	ranks := podRules{ports: []uint16{8000, 8001}}
	for _, c := range []struct {
		name  string
		rules podRules
		pod   *corev1.Pod
		want  string
	}{
		{"plain", podRules{}, aPod("10.0.0.1", pool.LabelModel, "m"), "10.0.0.1:8000 p m vllm metrics 8000"},
		{"IPv6", podRules{}, aPod("fd00::1"), "[fd00::1]:8000 p  vllm metrics 8000"},
		{"model by annotation", podRules{}, annotated(aPod("10.0.0.1"), pool.LabelModel, "org/m"), "10.0.0.1:8000 p org/m vllm metrics 8000"},
		{"the label beats the annotation", podRules{}, annotated(aPod("10.0.0.1", pool.LabelModel, "m"), pool.LabelModel, "org/m"), "10.0.0.1:8000 p m vllm metrics 8000"},
		{"ports", podRules{}, aPod("10.0.0.1", pool.LabelPort, "30000", pool.LabelMetricPort, "30001"), "10.0.0.1:30000 p  vllm metrics 30001"},
		{"port that is none", podRules{}, aPod("10.0.0.1", pool.LabelPort, "http"), `10.0.0.1:8000 p  vllm metrics 8000; note labels["model.aibrix.ai/port"]: "http" is not a port; valid ports are 1 to 65535; 8000 is used`},
		{"AIBrix engine", podRules{}, aPod("10.0.0.1", pool.LabelEngine, "sglang", labelEngineType, "vllm"), "10.0.0.1:8000 p  sglang metrics 8000"},
		{"llm-d engine", podRules{}, aPod("10.0.0.1", labelEngineType, "trtllm-serve"), "10.0.0.1:8000 p  trtllm metrics 8000"},
		{"old llm-d engine", podRules{}, aPod("10.0.0.1", labelEngineTypeOld, "sglang"), "10.0.0.1:8000 p  sglang metrics 8000"},
		{"unknown engine", podRules{}, aPod("10.0.0.1", pool.LabelEngine, "other"), "10.0.0.1:8000 p  unknown metrics 8000"},
		{"namespace", podRules{qualify: true}, aPod("10.0.0.1"), "10.0.0.1:8000 ns/p  vllm metrics 8000"},
		{"no IP", podRules{}, aPod(""), "passed: has no IP yet"},
		{"no IP that is one", podRules{}, aPod("x"), `passed: has IP "x", which is none`},
		{"succeeded", podRules{}, phased(aPod("10.0.0.1"), corev1.PodSucceeded), "passed: has ended (phase Succeeded)"},
		{"failed", podRules{}, phased(aPod("10.0.0.1"), corev1.PodFailed), "passed: has ended (phase Failed)"},
		{"pending but ready", podRules{}, phased(aPod("10.0.0.1"), corev1.PodPending), "10.0.0.1:8000 p  vllm metrics 8000"},
		{"terminating", podRules{}, deleted(aPod("10.0.0.1")), "10.0.0.1:8000 p  vllm metrics 8000 not ready: the pod is terminating"},
		{"no condition", podRules{}, conditionless(aPod("10.0.0.1")), "10.0.0.1:8000 p  vllm metrics 8000 not ready: the pod is not ready"},
		{"Ray worker", podRules{}, aPod("10.0.0.1", labelRayNode, "worker"), "passed: is a Ray worker (ray.io/node-type)"},
		{"Ray head", podRules{}, aPod("10.0.0.1", labelRayNode, "head"), "10.0.0.1:8000 p  vllm metrics 8000"},
		{"second of a group", podRules{}, aPod("10.0.0.1", labelGroupIndex, "1"), "passed: is not the first of its group (stormservice.orchestration.aibrix.ai/pod-group-index)"},
		{"first of a group", podRules{}, aPod("10.0.0.1", labelGroupIndex, "0"), "10.0.0.1:8000 p  vllm metrics 8000"},
		{"prefill of llm-d", podRules{}, aPod("10.0.0.1", labelRole, "prefill"), "10.0.0.1:8000 p  vllm metrics 8000 prefill-only"},
		{"decode of llm-d", podRules{}, aPod("10.0.0.1", labelRole, "decode", labelRoleSet, "s", labelRoleName, "prefill"), "10.0.0.1:8000 p  vllm metrics 8000"},
		{"both of llm-d", podRules{}, aPod("10.0.0.1", labelRole, "prefill-decode"), "10.0.0.1:8000 p  vllm metrics 8000"},
		{"prefill of AIBrix", podRules{}, aPod("10.0.0.1", labelRoleSet, "s", labelRoleName, "prefill"), "10.0.0.1:8000 p  vllm metrics 8000 prefill-only"},
		{"another's role-name", podRules{}, aPod("10.0.0.1", labelRoleName, "prefill"), "10.0.0.1:8000 p  vllm metrics 8000"},
		{"ranks", ranks, aPod("10.0.0.1", pool.LabelPort, "9"), "10.0.0.1:8000 p-rank-0  vllm metrics 8000, 10.0.0.1:8001 p-rank-1  vllm metrics 8001"},
		{"ranks with one page", ranks, aPod("10.0.0.1", pool.LabelMetricPort, "9"), "10.0.0.1:8000 p-rank-0  vllm metrics 9, 10.0.0.1:8001 p-rank-1  vllm metrics 9"},
		{"active ports", ranks, annotated(aPod("10.0.0.1"), annotationPorts, " 8001, 9"), "10.0.0.1:8001 p-rank-1  vllm metrics 8001"},
		{"old active ports", ranks, annotated(aPod("10.0.0.1"), annotationPortsOld, "8000"), "10.0.0.1:8000 p-rank-0  vllm metrics 8000"},
		{"no active port", ranks, annotated(aPod("10.0.0.1"), annotationPorts, ""), "passed: has none of the pool's ports active (llm-d.ai/active-ports)"},
		{"active ports that are none", ranks, annotated(aPod("10.0.0.1"), annotationPorts, "a"), `10.0.0.1:8000 p-rank-0  vllm metrics 8000, 10.0.0.1:8001 p-rank-1  vllm metrics 8001; note annotation llm-d.ai/active-ports: "a" is not a port; all ports of the pool are used`},
		{"old active ports that are none", ranks, annotated(aPod("10.0.0.1"), annotationPortsOld, "a"), `10.0.0.1:8000 p-rank-0  vllm metrics 8000, 10.0.0.1:8001 p-rank-1  vllm metrics 8001; note annotation ` + annotationPortsOld + `: "a" is not a port; all ports of the pool are used`},
		{"a model that has no end", podRules{}, annotated(aPod("10.0.0.1"), pool.LabelModel, strings.Repeat("m", 1<<18)), "passed: has a model of more than 512 bytes (annotation model.aibrix.ai/name)"},
		{"such a model beside a label", podRules{}, annotated(aPod("10.0.0.1", pool.LabelModel, "m"), pool.LabelModel, strings.Repeat("m", 1<<18)), "10.0.0.1:8000 p m vllm metrics 8000"},
		{"active ports without end", ranks, annotated(aPod("10.0.0.1"), annotationPorts, strings.Repeat("8001,", 1<<15)), `10.0.0.1:8000 p-rank-0  vllm metrics 8000, 10.0.0.1:8001 p-rank-1  vllm metrics 8001; note annotation llm-d.ai/active-ports has more than 512 bytes; all ports of the pool are used`},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := c.rules.endpoints(strippedPod(c.pod)) // what is read is what is kept
			var parts []string
			for _, e := range f.targets {
				if e.Incarnation != "u" || e.Source != "kubernetes" {
					t.Errorf("%+v", e)
				}
				part := fmt.Sprintf("%s %s %s %s metrics %d", e.Addr, e.Pod, e.Model, e.Engine, e.MetricPort)
				if e.NotReady != "" {
					part += " not ready: " + e.NotReady
				}
				if e.PrefillOnly {
					part += " prefill-only"
				}
				parts = append(parts, part)
			}
			got := strings.Join(parts, ", ")
			if f.passed != "" {
				got += "passed: " + f.passed
			}
			for _, n := range f.notes {
				got += "; note " + n
			}
			if got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// TestPodsOfOneAddress: an IP is another pod's as soon as its first owner is
// gone, and both may be seen for a while.
func TestPodsOfOneAddress(t *testing.T) {
	named := func(p *corev1.Pod, name string, created int64) *corev1.Pod {
		p.Name, p.UID, p.CreationTimestamp = name, "u", metav1.Time{Time: time.Unix(created, 0)}
		return p
	}
	for _, c := range []struct {
		name string
		a, b *corev1.Pod
		want string
	}{
		{"not terminating", named(deleted(aPod("10.0.0.1")), "a", 2), named(conditionless(aPod("10.0.0.1")), "b", 1), "b"},
		{"ready", named(conditionless(aPod("10.0.0.1")), "a", 2), named(aPod("10.0.0.1"), "b", 1), "b"},
		{"newer", named(aPod("10.0.0.1"), "a", 2), named(aPod("10.0.0.1"), "b", 1), "a"},
		{"name", named(aPod("10.0.0.1"), "a", 1), named(aPod("10.0.0.1"), "b", 1), "a"},
	} {
		for _, pods := range [][]*corev1.Pod{{c.a, c.b}, {c.b, c.a}} {
			g := podRules{}.gather(pods)
			if len(g.targets) != 1 || g.targets[0].Pod != c.want {
				t.Errorf("%s: got %v", c.name, g.targets)
			}
		}
	}
}

func rewriteObject(name, created string, rules ...any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": name, "creationTimestamp": created},
		"spec":     map[string]any{"poolRef": map[string]any{"name": "p"}, "rules": rules},
	}}
}

func rule(models string, targets ...any) map[string]any {
	r := map[string]any{"targets": targets}
	if models != "" {
		var list []any
		for m := range strings.SplitSeq(models, ",") {
			list = append(list, map[string]any{"model": map[string]any{"type": "Exact", "value": m}})
		}
		r["matches"] = list
	}
	return r
}

func to(model string, weight ...int64) map[string]any {
	t := map[string]any{"modelRewrite": model}
	if len(weight) > 0 {
		t["weight"] = weight[0]
	}
	return t
}

func TestReadRewrites(t *testing.T) {
	const early, late = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
	other := rewriteObject("x", early, rule("a", to("z")))
	_ = unstructured.SetNestedField(other.Object, "q", "spec", "poolRef", "name")
	for _, c := range []struct {
		name    string
		objects []*unstructured.Unstructured
		want    string
		note    string
	}{
		{"exact and for all", []*unstructured.Unstructured{rewriteObject("r", early, rule("", to("all")), rule("a,b", to("x")))}, "[{[] [{all 0}]} {[a b] [{x 0}]}]", ""},
		{"the oldest wins", []*unstructured.Unstructured{rewriteObject("a", late, rule("a", to("late"))), rewriteObject("b", early, rule("a", to("early")))}, "[{[a] [{early 0}]}]", ""},
		{"then the name", []*unstructured.Unstructured{rewriteObject("b", early, rule("a", to("b"))), rewriteObject("a", early, rule("a", to("a")))}, "[{[a] [{a 0}]}]", ""},
		{"then the first", []*unstructured.Unstructured{rewriteObject("r", early, rule("a", to("1")), rule("a,b", to("2")), rule("", to("3")), rule("", to("4")))}, "[{[a] [{1 0}]} {[b] [{2 0}]} {[] [{3 0}]}]", ""},
		{"weights", []*unstructured.Unstructured{rewriteObject("r", early, rule("a", to("x", 3), to("y", 1)))}, "[{[a] [{x 3} {y 1}]}]", ""},
		{"mixed weights", []*unstructured.Unstructured{rewriteObject("r", early, rule("a", to("x", 3), to("y")))}, "[{[a] [{x 3}]}]", "InferenceModelRewrite r: spec.rules[0].targets: some have a weight, so those without are never chosen"},
		{"no target", []*unstructured.Unstructured{rewriteObject("r", early, rule("a"))}, "[]", "InferenceModelRewrite r: spec.rules[0].targets is missing; it is passed over"},
		{"weight too large", []*unstructured.Unstructured{rewriteObject("r", early, rule("a", to("x", 1_000_001)))}, "[]", "InferenceModelRewrite r: spec.rules[0].targets[0] has no modelRewrite, or a weight that is not 1 to 1000000; it is passed over"},
		{"unknown match", []*unstructured.Unstructured{rewriteObject("r", early, map[string]any{
			"matches": []any{map[string]any{"model": map[string]any{"type": "Regex", "value": "a"}}}, "targets": []any{to("x")},
		})}, "[]", `InferenceModelRewrite r: spec.rules[0].matches[0].model.type "Regex" is unknown, valid: Exact; it is passed over`},
		{"another's", []*unstructured.Unstructured{other}, "[]", ""},
		{"nonsense", []*unstructured.Unstructured{rewriteObject("r", early, "x", int64(5))}, "[]", "InferenceModelRewrite r: spec.rules[0].targets is missing; it is passed over"},
	} {
		rules, notes := readRewrites(c.objects, "p")
		if fmt.Sprint(rules) != c.want || c.note != "" && (len(notes) == 0 || notes[0] != c.note) || c.note == "" && len(notes) > 0 {
			t.Errorf("%s: got %v, notes %q", c.name, rules, notes)
		}
	}
}
