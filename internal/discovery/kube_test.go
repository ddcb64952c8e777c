//go:build !nokubernetes

package discovery

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/shuntproxy/shunt/internal/pool"
)

// kubeWorld is a server and a source that looks at it.
type kubeWorld struct {
	*kubeServer
	source    *Kubernetes
	resources chan Resources
	log       chan string
}

func newKubeWorld(t *testing.T, s *kubeServer, edit func(o *KubernetesOptions)) *kubeWorld {
	t.Helper()
	w := &kubeWorld{kubeServer: s, resources: make(chan Resources, 100), log: make(chan string, 1000)}
	o := KubernetesOptions{
		Kubeconfig: s.kubeconfig(t), Selector: pool.LabelModel, RetryInterval: 2 * time.Millisecond, RetryCap: 10 * time.Millisecond,
		Resources: func(r Resources) { w.resources <- r },
		Log:       func(_ slog.Level, line string) { w.log <- line },
	}
	if edit != nil {
		edit(&o)
	}
	w.source = NewKubernetes(o)
	return w
}

// line waits for a line with text.
func (w *kubeWorld) line(t *testing.T, text string) {
	t.Helper()
	var seen []string
	for deadline := time.After(20 * time.Second); ; {
		select {
		case line := <-w.log:
			if seen = append(seen, line); strings.Contains(line, text) {
				return
			}
		case <-deadline:
			t.Fatalf("no line with %q in:\n%s", text, strings.Join(seen, "\n"))
		}
	}
}

var modelM = map[string]string{pool.LabelModel: "m"}

// readyText is a set with why an endpoint is not ready.
func why(s Set) string {
	var parts []string
	for _, t := range s.Targets {
		part := t.Addr.String()
		if t.NotReady != "" {
			part += " (" + t.NotReady + ")"
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ")
}

func (s *delivered) until(t *testing.T, want string) {
	t.Helper()
	last := "nothing"
	for deadline := time.After(20 * time.Second); ; {
		select {
		case set := <-s.all:
			if last = why(set); last == want {
				return
			}
		case <-deadline:
			t.Fatalf("got %s, want %s", last, want)
		}
	}
}

// TestKubernetesPanics: a panic while client-go lists or watches is told, where
// it would be swallowed, and the list is asked for again.
func TestKubernetesPanics(t *testing.T) {
	crash, handlers := utilruntime.ReallyCrash, utilruntime.PanicHandlers
	t.Cleanup(func() { utilruntime.ReallyCrash, utilruntime.PanicHandlers = crash, handlers })
	told := make(chan string, 100)
	KeepQuiet(func(cause any, stack []byte) { told <- fmt.Sprintf("%v\n%s", cause, stack) })
	s := newKubeServer(t)
	s.put("pods", "ns/a", podObject("10.0.0.1", modelM))
	w := newKubeWorld(t, s, nil)
	open, panicked := w.source.connect, false
	w.source.connect = func(o KubernetesOptions) (*cluster, error) {
		c, err := open(o)
		if err != nil {
			return nil, err
		}
		pods := c.pods
		c.pods = func(namespace, selector string) listWatch {
			lw := pods(namespace, selector)
			strip := lw.strip
			lw.strip = func(o runtime.Object) runtime.Object {
				if !panicked {
					panicked = true
					panic("in strip")
				}
				return strip(o)
			}
			return lw
		}
		return c, nil
	}
	follow(t, w.source).wait(t, "10.0.0.1:8000=a")
	if len(told) != 1 {
		t.Fatalf("%d panics were told, want 1", len(told))
	}
	if got := <-told; !strings.HasPrefix(got, "in strip\n") || !strings.Contains(got, "TestKubernetesPanics") {
		t.Errorf("got %s", got)
	}
}

// TestKubernetesRunPanics: as TestRunPanics, while it is asked which kinds the
// server has.
func TestKubernetesRunPanics(t *testing.T) {
	s := newKubeServer(t)
	s.put("pods", "ns/a", podObject("10.0.0.1", modelM))
	runPanics(t, "pods", newKubeWorld(t, s, nil).source)
	s.put("pods", "ns/b", podObject("10.0.0.2", map[string]string{"app": "x"}))
	s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "x"}, 8000))
	runPanics(t, "pool", newKubeWorld(t, s, func(o *KubernetesOptions) { o.InferencePool = "p" }).source)
}

func TestKubernetesPods(t *testing.T) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) {
			s := newKubeServer(t)
			s.stream = stream
			s.put("pods", "ns/a", podObject("10.0.0.1", modelM))
			s.put("pods", "ns/none", podObject("10.0.0.7", nil))
			s.put("pods", "elsewhere/b", podObject("10.0.0.8", modelM))
			w := newKubeWorld(t, s, nil)
			got := follow(t, w.source)
			set := got.wait(t, "10.0.0.1:8000=a")
			want := pool.Target{
				Addr: set.Targets[0].Addr, Pod: "a", Incarnation: "u-10.0.0.1", Model: "m", Engine: pool.EngineVLLM, MetricPort: 8000, Source: "kubernetes",
			}
			if set.Targets[0] != want {
				t.Errorf("got %+v, want %+v", set.Targets[0], want)
			}
			s.put("pods", "ns/c", podObject("10.0.0.2", modelM, unreadyPod))
			got.until(t, "10.0.0.1:8000, 10.0.0.2:8000 (the pod is not ready: ContainersNotReady)")
			s.put("pods", "ns/c", podObject("10.0.0.2", modelM))
			got.until(t, "10.0.0.1:8000, 10.0.0.2:8000")
			s.put("pods", "ns/a", podObject("10.0.0.1", modelM, terminating))
			got.until(t, "10.0.0.1:8000 (the pod is terminating), 10.0.0.2:8000")
			s.put("pods", "ns/a", nil)
			got.until(t, "10.0.0.2:8000")
			s.put("pods", "ns/c", podObject("10.0.0.2", nil)) // the label is taken away
			got.until(t, "")
			s.put("pods", "ns/d", podObject("", modelM))
			s.put("pods", "ns/e", podObject("10.0.0.3", modelM))
			got.until(t, "10.0.0.3:8000")
			if st := w.source.Status(); st.Endpoints != 1 || st.Error != "" || fmt.Sprint(st.Passed) != "[pod ns/d has no IP yet]" {
				t.Errorf("status %+v", st)
			}
		})
	}
}

func TestKubernetesNamespaces(t *testing.T) {
	s := newKubeServer(t)
	for _, ns := range []string{"ns", "one", "two"} {
		s.put("pods", ns+"/a", podObject(fmt.Sprintf("10.0.0.%d", len(ns)), modelM))
	}
	s.put("pods", "two/a", podObject("10.0.0.9", modelM))
	for _, c := range []struct {
		namespaces []string
		want       string
	}{
		{nil, "10.0.0.2:8000=a"},
		{[]string{"one"}, "10.0.0.3:8000=a"},
		{[]string{"one", "two"}, "10.0.0.3:8000=one/a 10.0.0.9:8000=two/a"},
		{[]string{"*"}, "10.0.0.2:8000=ns/a 10.0.0.3:8000=one/a 10.0.0.9:8000=two/a"},
	} {
		w := newKubeWorld(t, s, func(o *KubernetesOptions) { o.Namespaces = c.namespaces })
		got := follow(t, w.source)
		got.wait(t, c.want)
		got.stop()
	}
}

// TestKubernetesMisbehaves: what a server does wrong costs no endpoint and hides
// no change.
func TestKubernetesMisbehaves(t *testing.T) {
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) {
			s := newKubeServer(t)
			s.stream = stream
			s.put("pods", "ns/a", podObject("10.0.0.1", modelM))
			w := newKubeWorld(t, s, nil)
			got := follow(t, w.source)
			got.wait(t, "10.0.0.1:8000=a")

			watches := s.count("watch pods")
			s.dropWatches()
			s.await(t, watches+1, "watch pods")
			s.put("pods", "ns/b", podObject("10.0.0.2", modelM))
			got.wait(t, "10.0.0.1:8000=a 10.0.0.2:8000=b")

			s.with(func() { s.twice = true })
			s.put("pods", "ns/b", nil)
			got.wait(t, "10.0.0.1:8000=a")

			// What happens while no watch runs, and is forgotten, is found by a list.
			s.with(func() { s.status["watch pods"] = 500 })
			s.dropWatches()
			got.wait(t, "10.0.0.1:8000=a last-good")
			s.put("pods", "ns/a", nil)
			s.put("pods", "ns/c", podObject("10.0.0.3", modelM))
			s.with(func() { s.compacted, s.status["watch pods"] = s.version, 0 })
			got.wait(t, "10.0.0.3:8000=c")
		})
	}
}

func TestKubernetesSlowList(t *testing.T) {
	s := newKubeServer(t)
	s.hold = make(chan struct{})
	s.put("pods", "ns/a", podObject("10.0.0.1", modelM))
	w := newKubeWorld(t, s, nil)
	got := follow(t, w.source)
	s.await(t, 1, "list pods")
	if len(got.all) != 0 || w.source.Status().Endpoints != 0 {
		t.Error("a set before the first list")
	}
	close(s.hold)
	got.wait(t, "10.0.0.1:8000=a")
}

// TestKubernetesAway: the last good set stays, with one line when the server
// goes and one when it is back; what changed meanwhile arrives.
func TestKubernetesAway(t *testing.T) {
	s := newKubeServer(t)
	s.stream = true
	s.put("pods", "ns/a", podObject("10.0.0.1", modelM))
	w := newKubeWorld(t, s, nil)
	got := follow(t, w.source)
	got.wait(t, "10.0.0.1:8000=a")
	s.with(func() { s.status["watch pods"], s.status["list pods"] = 503, 503 })
	s.dropWatches()
	got.wait(t, "10.0.0.1:8000=a last-good")
	w.line(t, "can't ")
	s.await(t, s.count("watch pods")+5, "watch pods")
	if st := w.source.Status(); st.Error == "" || st.Since.IsZero() || st.Endpoints != 1 {
		t.Errorf("status %+v", st)
	}
	if n := len(w.log); n != 0 {
		t.Errorf("%d more lines, such as %s", n, <-w.log)
	}
	s.put("pods", "ns/a", podObject("10.0.0.1", map[string]string{pool.LabelModel: "n"}))
	s.with(func() { clear(s.status) })
	w.line(t, "all is well again after")
	for deadline := time.After(20 * time.Second); ; {
		select {
		case set := <-got.all:
			if set.State == Complete && set.Targets[0].Model == "n" {
				return
			}
		case <-deadline:
			t.Fatal("the label change did not arrive")
		}
	}
}

func TestKubernetesForbidden(t *testing.T) {
	for namespace, in := range map[string]string{"": "a Role in namespace ns", "*": "a ClusterRole"} {
		s := newKubeServer(t)
		s.status["list pods"], s.status["watch pods"] = 403, 403
		s.put("pods", "ns/a", podObject("10.0.0.1", modelM))
		w := newKubeWorld(t, s, func(o *KubernetesOptions) {
			if namespace != "" {
				o.Namespaces = []string{namespace}
			}
		})
		got := follow(t, w.source)
		w.line(t, "add to "+in+` of this service account the rule {apiGroups: [""], resources: [pods], verbs: [get, list, watch]}`)
		s.await(t, 3, "list pods")
		if len(got.all) != 0 {
			t.Error("a set that was never read")
		}
		s.with(func() { clear(s.status) }) // a retry is enough
		set := <-got.all
		if len(set.Targets) != 1 {
			t.Errorf("got %v", set)
		}
		got.stop()
	}
}

func TestKubernetesPages(t *testing.T) {
	s := newKubeServer(t)
	for i := range 1200 {
		s.put("pods", fmt.Sprintf("ns/p%d", i), podObject(fmt.Sprintf("10.0.%d.%d", i/250, 1+i%250), modelM))
	}
	w := newKubeWorld(t, s, nil)
	got := follow(t, w.source)
	if set := <-got.all; len(set.Targets) != 1200 {
		t.Errorf("%d endpoints", len(set.Targets))
	}
	if n := s.count("list pods"); n != 3 {
		t.Errorf("%d lists, want 3 pages", n)
	}
}

func poolObject(selector map[string]string, ports ...int) object {
	l, list := object{}, []object{}
	for k, v := range selector {
		l[k] = v
	}
	for _, p := range ports {
		list = append(list, object{"number": p})
	}
	return object{
		"kind": "InferencePool", "apiVersion": "inference.networking.k8s.io/v1", "metadata": object{"uid": "p"},
		"spec": object{"selector": object{"matchLabels": l}, "targetPorts": list},
	}
}

const poolsPath = "inference.networking.k8s.io/v1/inferencepools"

func TestKubernetesInferencePool(t *testing.T) {
	s := newKubeServer(t)
	s.put("pods", "ns/a", podObject("10.0.0.1", map[string]string{"app": "x"}))
	s.put("pods", "ns/b", podObject("10.0.0.2", map[string]string{"app": "y"}, func(o object) {
		o["metadata"].(object)["annotations"] = object{annotationPorts: "8001"}
	}))
	w := newKubeWorld(t, s, func(o *KubernetesOptions) { o.InferencePool = "p" })
	got := follow(t, w.source)
	got.wait(t, "") // there is none
	w.line(t, "InferencePool p does not exist in namespace ns")
	s.put(poolsPath, "ns/other", poolObject(map[string]string{"app": "y"}, 9))
	s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "x"}, 8000))
	set := got.wait(t, "10.0.0.1:8000=a")
	if set.Targets[0].MetricPort != 8000 || set.Targets[0].Model != "" {
		t.Errorf("got %+v", set.Targets[0])
	}
	s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "x"}, 8000, 8001))
	set = got.wait(t, "10.0.0.1:8000=a-rank-0 10.0.0.1:8001=a-rank-1")
	if set.Targets[1].MetricPort != 8001 {
		t.Errorf("got %+v", set.Targets[1])
	}
	s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "y"}, 8000, 8001))
	got.wait(t, "10.0.0.2:8001=b-rank-1")
	s.put(poolsPath, "ns/p", poolObject(nil, 8000)) // the last good one stays
	got.wait(t, "10.0.0.2:8001=b-rank-1 last-good")
	w.line(t, "spec.selector.matchLabels is missing")
	s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "y"}, 8001))
	got.wait(t, "10.0.0.2:8001=b")
	s.put(poolsPath, "ns/p", nil)
	got.wait(t, "")
}

func objective(priority any, poolName string) object {
	spec := object{"poolRef": object{"group": groupPool, "kind": "InferencePool", "name": poolName}}
	if priority != nil {
		spec["priority"] = priority
	}
	return object{"kind": "InferenceObjective", "apiVersion": "x/v1alpha2", "metadata": object{"uid": "o"}, "spec": spec}
}

func (w *kubeWorld) wantResources(t *testing.T, want string) {
	t.Helper()
	last := ""
	for deadline := time.After(20 * time.Second); ; {
		select {
		case r := <-w.resources:
			if last = fmt.Sprint(r); last == want {
				return
			}
		case <-deadline:
			t.Fatalf("got %s, want %s", last, want)
		}
	}
}

func TestKubernetesResources(t *testing.T) {
	for group, path := range map[string]string{"llm-d.ai/v1alpha2": "new", "inference.networking.x-k8s.io/v1alpha2": "old"} {
		t.Run(path, func(t *testing.T) {
			s := newKubeServer(t)
			s.has[group] = "inferenceobjectives,inferencemodelrewrites"
			s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "x"}, 8000))
			s.put(group+"/inferenceobjectives", "ns/gold", objective(5, "p"))
			s.put(group+"/inferenceobjectives", "ns/shed", objective(-1, "p"))
			s.put(group+"/inferenceobjectives", "ns/other", objective(9, "q"))
			w := newKubeWorld(t, s, func(o *KubernetesOptions) { o.InferencePool = "p" })
			follow(t, w.source)
			w.wantResources(t, "{[{gold 5} {shed -1}] []}")
			s.put(group+"/inferenceobjectives", "ns/gold", objective(nil, "p"))
			w.wantResources(t, "{[{gold 0} {shed -1}] []}")
			s.put(group+"/inferencemodelrewrites", "ns/r", object{
				"kind": "InferenceModelRewrite", "apiVersion": group, "metadata": object{"uid": "r", "creationTimestamp": "2026-01-01T00:00:00Z"},
				"spec": object{"poolRef": object{"name": "p"}, "rules": []object{{
					"matches": []object{{"model": object{"type": "Exact", "value": "a"}}},
					"targets": []object{{"modelRewrite": "b", "weight": 3}, {"modelRewrite": "c", "weight": 1}},
				}}},
			})
			w.wantResources(t, "{[{gold 0} {shed -1}] [{[a] [{b 3} {c 1}]}]}")
			s.put(group+"/inferenceobjectives", "ns/shed", nil)
			w.wantResources(t, "{[{gold 0}] [{[a] [{b 3} {c 1}]}]}")
		})
	}
	t.Run("none", func(t *testing.T) { // a server without these kinds
		s := newKubeServer(t)
		s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "x"}, 8000))
		w := newKubeWorld(t, s, func(o *KubernetesOptions) { o.InferencePool = "p" })
		got := follow(t, w.source)
		got.wait(t, "")
		w.wantResources(t, "{[] []}")
	})
	t.Run("forbidden", func(t *testing.T) { // endpoints come all the same
		s := newKubeServer(t)
		s.has["llm-d.ai/v1alpha2"] = "inferenceobjectives"
		s.status["list llm-d.ai/v1alpha2/inferenceobjectives"], s.status["watch llm-d.ai/v1alpha2/inferenceobjectives"] = 403, 403
		s.put(poolsPath, "ns/p", poolObject(map[string]string{"app": "x"}, 8000))
		s.put("pods", "ns/a", podObject("10.0.0.1", map[string]string{"app": "x"}))
		w := newKubeWorld(t, s, func(o *KubernetesOptions) { o.InferencePool = "p" })
		got := follow(t, w.source)
		got.wait(t, "10.0.0.1:8000=a")
		w.line(t, "the rule {apiGroups: [\"llm-d.ai\"], resources: [inferenceobjectives], verbs: [get, list, watch]}")
		s.with(func() { clear(s.status) })
		w.wantResources(t, "{[] []}")
	})
}

// TestListIsNotOlder: a list that names a version is of that or a newer one, also
// in pages; pages that follow name none.
func TestListIsNotOlder(t *testing.T) {
	var got metav1.ListOptions
	w := &objectWatch{wake: func() {}, lw: listWatch{list: func(_ context.Context, o metav1.ListOptions) (runtime.Object, error) {
		got = o
		return &corev1.PodList{}, nil
	}}}
	for _, c := range []struct {
		asked metav1.ListOptions
		want  metav1.ResourceVersionMatch
	}{
		{metav1.ListOptions{Limit: 500, ResourceVersion: "7"}, metav1.ResourceVersionMatchNotOlderThan},
		{metav1.ListOptions{Limit: 500, ResourceVersion: "0"}, ""},
		{metav1.ListOptions{Limit: 500}, ""},
		{metav1.ListOptions{Limit: 500, Continue: "x"}, ""},
		{metav1.ListOptions{ResourceVersion: "7", ResourceVersionMatch: metav1.ResourceVersionMatchExact}, metav1.ResourceVersionMatchExact},
	} {
		if _, err := w.List(c.asked); err != nil || got.ResourceVersionMatch != c.want {
			t.Errorf("%+v: asked for %q (%v), want %q", c.asked, got.ResourceVersionMatch, err, c.want)
		}
	}
}
