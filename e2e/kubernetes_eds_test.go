package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	"github.com/shuntproxy/shunt/internal/sim"
)

// viaEDS is the configuration with which Envoy's cluster has a list of the pods.
const viaEDS = "destination: eds\nfallbacks: 3\n"

func (k *kubeWorld) eds() bool { return strings.Contains(k.setup.config, viaEDS) }

// hosts are those of Envoy's cluster of engines.
func (w *world) hosts(t *testing.T) map[string]envoyrun.Host {
	t.Helper()
	hosts, err := w.envoy.Hosts(t.Context(), "shunt_engines")
	if err != nil {
		t.Fatal(err)
	}
	return hosts
}

// draining waits until Envoy knows that pods take no new requests.
func (k *kubeWorld) draining(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		eventually(t, name+" is draining in /clusters", func() string {
			if h := k.hosts(t)[k.pods[name].Addr()]; h.Health != "DRAINING" {
				return fmt.Sprintf("%+v", h)
			}
			return ""
		})
	}
}

// inEDS waits until the EDS file, and Envoy's cluster, have the pods that want
// says, and no others.
func (k *kubeWorld) inEDS(t *testing.T, want func(name string) bool) {
	t.Helper()
	var wanted []string
	for name, e := range k.pods {
		if want(name) {
			wanted = append(wanted, e.Addr())
		}
	}
	slices.Sort(wanted)
	eventually(t, fmt.Sprintf("%d pods are in the EDS file", len(wanted)), func() string {
		if got := k.edsFile(t); !slices.Equal(got, wanted) {
			return fmt.Sprint(got)
		}
		return ""
	})
	eventually(t, fmt.Sprintf("Envoy knows these %d pods", len(wanted)), func() string {
		var got []string
		for address := range k.hosts(t) {
			got = append(got, address)
		}
		if slices.Sort(got); !slices.Equal(got, wanted) {
			return fmt.Sprint(got)
		}
		return ""
	})
}

// edsFile lists the addresses that shunt has written for Envoy.
func (k *kubeWorld) edsFile(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(k.file("eds.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Resources []struct {
			Endpoints []struct {
				Hosts []struct {
					Endpoint struct {
						Address struct {
							Socket struct {
								Address string `json:"address"`
								Port    int    `json:"port_value"`
							} `json:"socket_address"`
						} `json:"address"`
					} `json:"endpoint"`
				} `json:"lb_endpoints"`
			} `json:"endpoints"`
		} `json:"resources"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, r := range file.Resources {
		for _, e := range r.Endpoints {
			for _, h := range e.Hosts {
				list = append(list, fmt.Sprintf("%s:%d", h.Endpoint.Address.Socket.Address, h.Endpoint.Address.Socket.Port))
			}
		}
	}
	slices.Sort(list)
	return list
}

// ownModelsOnly reports engines that got a request of a model that their pod was
// not made with.
func (k *kubeWorld) ownModelsOnly(t *testing.T) {
	t.Helper()
	for name, e := range k.pods {
		for _, r := range e.Requests("/v1/chat/completions") {
			if r.Model != "" && !slices.Contains(k.models[name], r.Model) {
				t.Errorf("pod %s, whose models are %v, got a request of model %q", name, k.models[name], r.Model)
				break
			}
		}
	}
}

// podsKilled kills engines under load, two at a time, and says nothing to the
// API server: what had not begun to be answered is answered by others, what had
// begun ends with a reset and is counted, and no pod of another model helps out.
// What a kubelet says of them only later, and that they are deleted, loses
// nothing either.
func podsKilled(t *testing.T, k *kubeWorld) {
	const pods = 8
	for i := range pods {
		k.pod(t, fmt.Sprintf("m-%d", i), "m")
		if i < 2 {
			k.pod(t, fmt.Sprintf("n-%d", i), "n")
		}
	}
	for _, e := range k.pods { // so that a kill finds requests in the midst of things
		e.SetDelays(sim.Delays{BetweenTokens: sim.Duration(10 * time.Millisecond)})
	}
	k.run(t)
	alive := map[string]string{} // names of the pods of m, by address
	for name, e := range k.pods {
		k.waitPod(t, name, "ready")
		if strings.HasPrefix(name, "m-") {
			alive[e.Addr()] = name
		}
	}
	cutBefore := k.metric(t, "shunt_incomplete_answers_total")
	l, other := k.startLoad(t, 8, "m"), k.startLoad(t, 2, "n")
	l.more(t, 50)
	begun := int64(0)
	for len(alive) > 2 {
		// One of the two has an answer that has begun and does not end by itself, the
		// other a request that it has not begun to answer.
		at, cut := k.endless(t)
		killed := []string{alive[at]}
		delete(alive, at)
		for address, name := range alive {
			killed = append(killed, name)
			delete(alive, address)
			break
		}
		begun++
		holds := k.pods[killed[1]]
		holds.SetHold(true)
		wait(t, holds, func(c sim.Counters) bool { return c.Held > 0 })
		for _, name := range killed {
			if err := k.pods[name].Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := cut(); err == nil {
			t.Error("an answer that was cut ended as if it were whole")
		}
		for _, name := range killed {
			k.waitPod(t, name, "not-ready") // by its connections alone
			host, _, _ := strings.Cut(k.pods[name].Addr(), ":")
			k.api.podStatus(t, k.namespace, name, host, "False")
		}
		k.draining(t, killed...)
		l.more(t, 20)
		for _, name := range killed {
			k.api.deletePod(t, k.namespace, name, 0)
			k.waitPod(t, name, "")
		}
	}
	l.check(t)
	other.check(t)
	k.waitLoad(t, 0, 0)
	cut := l.cut.Load() + begun
	if counted := k.metric(t, "shunt_incomplete_answers_total") - cutBefore; counted != float64(cut) {
		t.Errorf("%v answers are counted as incomplete, %d were", counted, cut)
	}
	moved := k.metric(t, "shunt_moved_total")
	if moved < float64(begun) {
		t.Errorf("%v requests were answered by another than the picked pod, of %d kills", moved, begun)
	}
	if n := other.cut.Load(); n > 0 {
		t.Errorf("%d answers of the other model were cut", n)
	}
	k.ownModelsOnly(t)
	k.inEDS(t, func(name string) bool { return alive[k.pods[name].Addr()] != "" || strings.HasPrefix(name, "n-") })
	t.Logf("%d requests answered, %v of them by another than the picked pod; %d cut after they had begun", l.answered.Load(), moved, cut)
}

// endless begins an answer that does not end by itself, and returns the engine
// that gives it. rest reads it to its end.
func (w *world) endless(t *testing.T) (engine string, rest func() error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+w.addr+"/v1/chat/completions",
		strings.NewReader(`{"model":"m","stream":true,"max_tokens":100000,"messages":[{"role":"user","content":"hi"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header = header("Content-Type", "application/json", "X-Shunt-Explain", "1")
	resp, err := w.h1.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	if _, err := io.ReadFull(resp.Body, make([]byte, 10)); err != nil || resp.StatusCode != 200 {
		t.Fatal(resp.Status, err)
	}
	return resp.Header.Get("X-Shunt-Endpoint"), func() error {
		_, err := io.Copy(io.Discard, resp.Body)
		return err
	}
}

// permissions starts shunt before its Role is there: the log names what is
// missing, /readyz says no, and the Role is all that it takes.
func permissions(t *testing.T, d door, api *apiServer, network int) {
	k := kubernetes(t, d, api, d.name+"-permissions", network, ", inferencePool: engines", viaEDS+"models: {discover: false}\nstartupHold: 1s\n")
	role := api.remove(t, rolesGVR, k.namespace, "shunt")
	k.setup.notReady = true
	k.setup.expect = []string{"the API server forbids to (list|watch) "}
	k.pod(t, "one", "m")
	k.api.create(t, poolsGVR, k.namespace, doc{
		"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": doc{"name": "engines"},
		"spec": doc{"selector": doc{"matchLabels": doc{"app": "engine"}}, "targetPorts": []any{doc{"number": enginePortNumber}}},
	})
	k.run(t)
	rule := func(group, resource string) string {
		return `the API server forbids to (list|watch) ` + resource + ` in namespace ` + k.namespace + `: .* add to a Role in namespace ` + k.namespace +
			` of this service account the rule \{apiGroups: \["` + group + `"\], resources: \[` + resource + `\], verbs: \[get, list, watch\]\}`
	}
	k.waitLog(t, rule("inference.networking.k8s.io", "inferencepools"))
	if status, body := k.adminGet("/readyz"); status != 503 {
		t.Errorf("/readyz: %d %s", status, body)
	}
	if r := k.must(t, k.h1, call{body: strings.NewReader(chat)}); r.status != 503 || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "rejected-no-endpoints" {
		t.Errorf("without permission: %v", r)
	}
	// One rule after the other, as an operator does who reads the log.
	rules := role.at("rules").([]any)
	role["metadata"] = doc{"name": "shunt"}
	role["rules"] = rules[1:2]
	k.api.create(t, rolesGVR, k.namespace, role)
	k.waitLog(t, rule("", "pods"))
	k.api.patch(t, rolesGVR, k.namespace, "shunt", doc{"rules": rules[:2]})
	k.ready(t)
	k.waitPod(t, "one", "ready")
	if r := k.must(t, k.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
		t.Errorf("with permission: %v", r)
	}
	k.waitLog(t, rule("llm-d.ai", "inferenceobjectives"))
}

// manyPods makes as many pods as -pods says, all of one engine, and tells what
// Envoy's memory grows by.
func manyPods(t *testing.T, k *kubeWorld, pods int) {
	e := startEngine(t, sim.Config{Listen: "0.0.0.0:0"})
	_, port, err := net.SplitHostPort(e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	k.pod(t, "first", "m")
	k.run(t)
	k.waitPod(t, "first", "ready")
	before, err := k.envoy.RSS()
	if err != nil {
		t.Fatal(err)
	}
	numbers := make(chan int)
	var making sync.WaitGroup
	for range 16 {
		making.Go(func() {
			for i := range numbers {
				k.api.createPod(t, k.namespace, fmt.Sprintf("many-%d", i), fmt.Sprintf("127.%d.%d.%d", k.net, 100+i/250, 1+i%250), doc{
					"model.aibrix.ai/name": "m", "model.aibrix.ai/port": port, "model.aibrix.ai/metric-port": port,
				})
			}
		})
	}
	for i := range pods {
		numbers <- i
	}
	close(numbers)
	making.Wait()
	k.waitStat(t, "cluster.shunt_engines.membership_healthy", func(n int64) bool { return n == int64(pods)+1 })
	eventually(t, fmt.Sprintf("%d endpoints are ready", pods+1), func() string {
		if n := k.metric(t, "shunt_endpoint_ready"); n != float64(pods+1) {
			return fmt.Sprint(n)
		}
		return ""
	})
	after, err := k.envoy.RSS()
	if err != nil {
		t.Fatal(err)
	}
	grown := after - before
	for range 20 {
		if r := k.must(t, k.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
			t.Fatalf("%v", r)
		}
	}
	t.Logf("%d pods: Envoy's memory grew by %d MiB, %d KiB a pod", pods, grown>>20, grown/int64(pods)>>10)
}
