//go:build !nokubernetes

package discovery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/pool"
)

// TestKubernetesBrokenPools: an InferencePool that can't be used leaves the pods
// of its last good definition, and goes on to follow them.
func TestKubernetesBrokenPools(t *testing.T) {
	good := func() object { return poolObject(map[string]string{"app": "x"}, 8000) }
	spec := func(key string, value any) object {
		o := good()
		o["spec"].(object)[key] = value
		return o
	}
	for name, broken := range map[string]object{
		"a value that adds a term":    poolObject(map[string]string{"app": "x,app=y"}, 8000),
		"a value that is none":        poolObject(map[string]string{"app": "a b"}, 8000),
		"a key that is none":          poolObject(map[string]string{"a/b/c": "x"}, 8000),
		"a selector of text":          spec("selector", "app=x"),
		"labels that are a list":      spec("selector", object{"matchLabels": []any{"app"}}),
		"labels that are numbers":     spec("selector", object{"matchLabels": object{"app": 5}}),
		"no ports":                    poolObject(map[string]string{"app": "x"}),
		"nine ports":                  poolObject(map[string]string{"app": "x"}, 1, 2, 3, 4, 5, 6, 7, 8, 9),
		"port 0":                      poolObject(map[string]string{"app": "x"}, 0),
		"port 65536":                  poolObject(map[string]string{"app": "x"}, 65536),
		"a port that is a fraction":   spec("targetPorts", []any{object{"number": 80.5}}),
		"ports that are text":         spec("targetPorts", []any{"8000"}),
		"ports that are no list":      spec("targetPorts", "8000"),
		"a specification of nothing":  {"kind": "InferencePool", "apiVersion": "inference.networking.k8s.io/v1", "metadata": object{"uid": "p"}},
		"a specification that is one": {"kind": "InferencePool", "apiVersion": "inference.networking.k8s.io/v1", "metadata": object{"uid": "p"}, "spec": 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := newKubeServer(t)
			s.stream = true
			s.put("pods", "ns/a", podObject("10.0.0.1", map[string]string{"app": "x"}))
			s.put("pods", "ns/other", podObject("10.0.0.9", map[string]string{"app": "y"}))
			s.put(poolsPath, "ns/p", good())
			w := newKubeWorld(t, s, func(o *KubernetesOptions) { o.InferencePool = "p" })
			got := follow(t, w.source)
			got.wait(t, "10.0.0.1:8000=a")
			s.put(poolsPath, "ns/p", broken)
			got.wait(t, "10.0.0.1:8000=a last-good")
			w.line(t, "InferencePool p: ")
			s.put("pods", "ns/b", podObject("10.0.0.2", map[string]string{"app": "x"}))
			got.wait(t, "10.0.0.1:8000=a 10.0.0.2:8000=b last-good")
			s.put(poolsPath, "ns/p", nil)
			got.wait(t, "")
			s.put(poolsPath, "ns/p", good()) // made anew
			got.wait(t, "10.0.0.1:8000=a 10.0.0.2:8000=b")
		})
	}
}

// TestKubernetesGroups: a server that does not say which kinds it has delays no
// pod, and that it does not is said.
func TestKubernetesGroups(t *testing.T) {
	s := newKubeServer(t)
	s.holdGroup = make(chan struct{})
	s.has["llm-d.ai/v1alpha2"] = "inferenceobjectives"
	s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "x"}, 8000))
	s.put("llm-d.ai/v1alpha2/inferenceobjectives", "ns/gold", objective(5, "p"))
	w := newKubeWorld(t, s, func(o *KubernetesOptions) { o.InferencePool = "p" })
	got := follow(t, w.source)
	got.wait(t, "")
	s.await(t, 2, "group llm-d.ai/v1alpha2")
	s.put("pods", "ns/a", podObject("10.0.0.1", map[string]string{"app": "x"}))
	got.wait(t, "10.0.0.1:8000=a")
	s.put("pods", "ns/a", podObject("10.0.0.1", map[string]string{"app": "x"}, terminating))
	got.until(t, "10.0.0.1:8000 (the pod is terminating)")
	if len(w.resources) != 0 {
		t.Errorf("told %v, which nobody said", <-w.resources)
	}
	s.with(func() { s.status["group llm-d.ai/v1alpha2"] = 503 })
	close(s.holdGroup)
	w.line(t, "inferenceobjectives: can't ask which version the server has: ")
	s.with(func() { clear(s.status) })
	w.wantResources(t, "{[{gold 5}] []}")
}

// TestKubernetesNotes: a label that is wrong on many pods does not flood the log.
func TestKubernetesNotes(t *testing.T) {
	s := newKubeServer(t)
	for i := range 200 {
		s.put("pods", fmt.Sprintf("ns/p%03d", i), podObject(fmt.Sprintf("10.0.0.%d", i+1), map[string]string{pool.LabelModel: "m", pool.LabelPort: "http"}))
	}
	w := newKubeWorld(t, s, nil)
	got := follow(t, w.source)
	if set := <-got.all; len(set.Targets) != 200 {
		t.Fatalf("%d endpoints", len(set.Targets))
	}
	var lines []string
	for len(w.log) > 0 {
		lines = append(lines, <-w.log)
	}
	if len(lines) != maxNotes+1 || !strings.Contains(lines[0], `pod ns/p000: labels["model.aibrix.ai/port"]: "http" is not a port`) || lines[maxNotes] != "kubernetes: the like of 180 more" {
		t.Errorf("%d lines: %v", len(lines), lines)
	}
	s.put("pods", "ns/p200", podObject("10.0.0.201", modelM))
	for len((<-got.all).Targets) != 201 {
	}
	if len(w.log) > 0 {
		t.Errorf("said again: %s", <-w.log)
	}
}
