package e2e

import (
	"bufio"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/filter"
	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/internal/sim"
)

var (
	kubernetesFlag = flag.String("kubernetes", "", "folder with kube-apiserver and etcd, as build/kubernetes.sh prints it; empty leaves TestKubernetes out")
	podsFlag       = flag.Int("pods", 250, "how many pods TestKubernetes makes to see what they cost")
	awayFlag       = flag.Duration("away", 20*time.Second, "how long TestKubernetes keeps the API server away")
)

// enginePort is the one on which all pods serve, each at an address of its own.
const (
	enginePort       = "18080"
	enginePortNumber = 18080
)

// kubeWorld is a world whose endpoints are pods of a namespace.
type kubeWorld struct {
	*world
	api       *apiServer
	namespace string
	net       int // 127.net.0.0/16 has its pods
	next      int
	pods      map[string]*sim.Server
	models    map[string][]string // that a pod was made with
}

// kubernetes starts a world in a namespace of its own. definition is what stands
// beside kubeconfig in the pool.
func kubernetes(t *testing.T, d door, api *apiServer, namespace string, network int, definition, config string) *kubeWorld {
	t.Helper()
	api.namespace(t, namespace)
	w := prepareWorld(t, d, setup{engines: 1, config: config, expect: []string{"shunt: pool default: kubernetes: can't (list|watch) "}})
	if strings.Contains(config, viaEDS) {
		w.write(t, "eds.json", string(bootstrap.Endpoints()))
		config += "eds: {path: " + w.file("eds.json") + "}\n"
	}
	w.write(t, "kubeconfig.yaml", api.kubeconfig(namespace))
	w.setup.pools = fmt.Sprintf("pools: {default: {kubernetes: {kubeconfig: %s%s}}}\n", w.file("kubeconfig.yaml"), definition)
	w.options.Document = []byte(w.document(config))
	k := &kubeWorld{world: w, api: api, namespace: namespace, net: network, pods: map[string]*sim.Server{}, models: map[string][]string{}}
	return k
}

// pod starts an engine and makes its pod.
func (k *kubeWorld) pod(t *testing.T, name, model string) *sim.Server {
	t.Helper()
	k.next++
	host := fmt.Sprintf("127.%d.%d.%d", k.net, k.next/250, 1+k.next%250)
	e := startEngine(t, sim.Config{Listen: host + ":" + enginePort, Models: []string{"m", "n"}, Output: 4})
	k.pods[name], k.models[name] = e, []string{model}
	k.api.createPod(t, k.namespace, name, host, doc{
		"model.aibrix.ai/name": model, "model.aibrix.ai/port": enginePort, "model.aibrix.ai/metric-port": enginePort, "app": "engine",
	})
	return e
}

// status of a pod's endpoint, nil if it has none.
func (k *kubeWorld) endpointOf(t *testing.T, name string) *filter.EndpointStatus {
	t.Helper()
	return endpoint(k.status(t), k.pods[name])
}

// waitPod waits until a pod's endpoint is in a state, "" for none.
func (k *kubeWorld) waitPod(t *testing.T, name, state string) {
	t.Helper()
	eventually(t, fmt.Sprintf("pod %s is %q", name, state), func() string {
		got := ""
		if e := k.endpointOf(t, name); e != nil {
			got = e.State
		}
		if got != state {
			return fmt.Sprintf("%q", got)
		}
		return ""
	})
}

// asked is how many requests an engine has got, up to the newest for an answer.
func (k *kubeWorld) asked(e *sim.Server) int {
	if all := e.Requests("/v1/chat/completions"); len(all) > 0 {
		return all[len(all)-1].Seq
	}
	return 0
}

// TestKubernetes is the kubernetes source against a real API server, in a real
// Envoy, through both doors.
func TestKubernetes(t *testing.T) {
	if *kubernetesFlag == "" {
		t.Skip("make test-kubernetes has the API server that this needs")
	}
	api := startAPIServer(t, *kubernetesFlag)
	api.installCRDs(t)
	t.Run("docs", func(t *testing.T) { discoveryCommands(t, api) })
	t.Run("manifests", func(t *testing.T) { manifestsAreAccepted(t, api) })
	network := 100
	eachDoor(t, func(t *testing.T, d door) {
		network += 10
		t.Run("rollout", func(t *testing.T) { rollout(t, kubernetes(t, d, api, d.name+"-rollout", network, "", "")) })
		t.Run("labels", func(t *testing.T) {
			labelChanges(t, kubernetes(t, d, api, d.name+"-labels", network+1, "", "models: {discover: false}\n"))
		})
		t.Run("deleted in the middle of a stream", func(t *testing.T) {
			deletedMidStream(t, kubernetes(t, d, api, d.name+"-stream", network+2, "", "models: {discover: false}\n"))
		})
		t.Run("objective", func(t *testing.T) {
			objectiveChanges(t, kubernetes(t, d, api, d.name+"-objective", network+3, ", inferencePool: engines",
				"flowControl: {enabled: true, saturation: concurrency, maxConcurrency: 1, ttl: 10m}\nslowStart: 0s\nmodels: {discover: false}\n"))
		})
		t.Run("rollout with EDS", func(t *testing.T) {
			rollout(t, kubernetes(t, d, api, d.name+"-rollout-eds", network+4, "", viaEDS))
		})
		t.Run("labels with EDS", func(t *testing.T) {
			labelChanges(t, kubernetes(t, d, api, d.name+"-labels-eds", network+5, "", viaEDS+"models: {discover: false}\n"))
		})
		t.Run("killed with EDS", func(t *testing.T) {
			podsKilled(t, kubernetes(t, d, api, d.name+"-killed", network+6, "", viaEDS+"models: {discover: false}\n"))
		})
		t.Run("permissions", func(t *testing.T) { permissions(t, d, api, network+7) })
		t.Run("many pods", func(t *testing.T) {
			manyPods(t, kubernetes(t, d, api, d.name+"-many", network, "", viaEDS+"runtime: {memoryLimit: 256MiB}\nscrape: {interval: 1m, timeout: 10s, staleAfter: 10m}\nhealth: {interval: 1m}\n"), *podsFlag)
		})
		t.Run("server away", func(t *testing.T) {
			serverAway(t, api, kubernetes(t, d, api, d.name+"-away", network+8, "", "models: {discover: false}\n"),
				kubernetes(t, d, api, d.name+"-away-eds", network+9, "", viaEDS+"models: {discover: false}\n"))
		})
	})
}

// discoveryCommands runs the commands of docs/discovery.md as they are written
// there, but for the folder that the machine may not have.
func discoveryCommands(t *testing.T, api *apiServer) {
	dir := t.TempDir()
	if err := build("..", "go", "build", "-o", filepath.Join(dir, "shunt"), "./cmd/shunt"); err != nil {
		t.Fatal(err)
	}
	api.namespace(t, "docs")
	api.createPod(t, "docs", "one", "127.99.0.1", doc{"model.aibrix.ai/name": "llama", "model.aibrix.ai/engine": "sglang"})
	api.createPod(t, "docs", "two", "127.99.0.2", doc{"model.aibrix.ai/name": "llama"})
	api.podStatus(t, "docs", "two", "127.99.0.2", "False")
	for name, text := range map[string]string{
		"kubeconfig.yaml": api.kubeconfig("docs"),
		"shunt.yaml":      "pools: {laptop: {kubernetes: {kubeconfig: kubeconfig.yaml, context: test}}}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	output := ""
	commands := 0
	for _, block := range discoveryPage(t) {
		for line := range strings.SplitSeq(block, "\n") {
			if !strings.HasPrefix(line, "shunt ") {
				continue
			}
			commands++
			cmd := exec.Command("sh", "-ec", strings.ReplaceAll(line, "/run/shunt", "."))
			cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v\n%s", line, err, out)
			}
			output += string(out)
		}
	}
	if commands < 3 {
		t.Errorf("the page has %d commands", commands)
	}
	for _, want := range []string{`127\.99\.0\.1:8000 +one +llama +sglang +yes`, `127\.99\.0\.2:8000 +two +llama +vllm +.*[Rr]eady`} {
		if !regexp.MustCompile(want).MatchString(output) {
			t.Errorf("nothing matches %s in:\n%s", want, output)
		}
	}
	for _, file := range []string{"envoy.yaml", "endpoints.json"} {
		if text, err := os.ReadFile(filepath.Join(dir, file)); err != nil || len(text) == 0 {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// rollout replaces 50 pods under load, five at a time: no request is lost, and a
// pod that is terminating gets none once its event has arrived.
func rollout(t *testing.T, k *kubeWorld) {
	const pods, step = 50, 5
	for i := range pods {
		k.pod(t, fmt.Sprintf("old-%d", i), "m")
	}
	k.run(t)
	for i := range pods {
		k.waitPod(t, fmt.Sprintf("old-%d", i), "ready")
	}
	l := k.startLoad(t, 8, "m")
	l.more(t, 100)
	var slowest, latest time.Duration
	late := map[string]int{}
	for i := 0; i < pods; i += step {
		for j := i; j < i+step; j++ {
			k.pod(t, fmt.Sprintf("new-%d", j), "m")
		}
		for j := i; j < i+step; j++ {
			k.waitPod(t, fmt.Sprintf("new-%d", j), "ready")
		}
		deleted := map[string]time.Time{}
		for j := i; j < i+step; j++ {
			name := fmt.Sprintf("old-%d", j)
			deleted[name] = time.Now()
			k.api.deletePod(t, k.namespace, name, 30)
		}
		for name, at := range deleted {
			k.waitPod(t, name, "not-ready")
			slowest = max(slowest, time.Since(at))
		}
		l.begun.pass(t) // what was picked before may still be on its way
		for name := range deleted {
			late[name] = k.asked(k.pods[name])
		}
		if k.eds() {
			k.draining(t, slices.Collect(maps.Keys(deleted))...)
		}
		l.more(t, 20)
		for name, at := range deleted { // as a kubelet does once the containers have ended
			if got := k.asked(k.pods[name]); got != late[name] {
				t.Errorf("%s got %d requests after its end was known", name, got-late[name])
			}
			if all := k.pods[name].Requests("/v1/chat/completions"); len(all) > 0 {
				latest = max(latest, all[len(all)-1].At.Sub(at))
			}
			if err := k.pods[name].Close(); err != nil {
				t.Fatal(err)
			}
			k.api.deletePod(t, k.namespace, name, 0)
		}
	}
	for i := range pods {
		k.waitPod(t, fmt.Sprintf("old-%d", i), "")
	}
	l.check(t)
	if n := l.cut.Load(); n > 0 {
		t.Errorf("%d answers were cut", n)
	}
	t.Logf("%d requests answered; the slowest deletion was seen in /statusz.json after %v; the latest request came to a pod %v after its deletion",
		l.answered.Load(), slowest, latest)
	k.waitLoad(t, 0, 0)
	k.ownModelsOnly(t)
	if k.eds() {
		k.inEDS(t, func(name string) bool { return strings.HasPrefix(name, "new-") })
	}
}

// labelChanges moves a pod to another model, makes one unready, and takes the
// label away.
func labelChanges(t *testing.T, k *kubeWorld) {
	stays, moves := k.pod(t, "stays", "m"), k.pod(t, "moves", "m")
	k.run(t)
	k.waitPod(t, "stays", "ready")
	k.waitPod(t, "moves", "ready")
	l := k.startLoad(t, 4, "m")
	wait(t, moves, func(c sim.Counters) bool { return c.Answered > 5 })
	wait(t, stays, func(c sim.Counters) bool { return c.Answered > 5 })

	k.api.patch(t, podsResource, k.namespace, "moves", doc{"metadata": doc{"labels": doc{"model.aibrix.ai/name": "n"}}})
	eventually(t, "the pod serves the other model", func() string {
		if e := k.endpointOf(t, "moves"); e == nil || e.Model != "n" {
			return fmt.Sprintf("%+v", e)
		}
		return ""
	})
	l.begun.pass(t) // what was picked before may still be on its way
	before := k.asked(moves)
	l.more(t, 50)
	if got := k.asked(moves); got != before {
		t.Errorf("a pod of another model got %d requests", got-before)
	}
	k.must(t, k.h1, call{body: strings.NewReader(strings.Replace(chat, `"m"`, `"n"`, 1))})
	if got := k.asked(moves); got != before+1 {
		t.Errorf("the model's pod got %d requests, want 1", got-before)
	}
	if k.eds() {
		k.inEDS(t, func(string) bool { return true })
	}

	k.api.patch(t, podsResource, k.namespace, "moves", doc{"metadata": doc{"labels": doc{"model.aibrix.ai/name": "m"}}})
	wait(t, moves, func(sim.Counters) bool { return k.asked(moves) > before+5 })
	k.api.podStatus(t, k.namespace, "moves", strings.TrimSuffix(moves.Addr(), ":"+enginePort), "False")
	k.waitPod(t, "moves", "not-ready")
	k.api.podStatus(t, k.namespace, "moves", strings.TrimSuffix(moves.Addr(), ":"+enginePort), "True")
	k.waitPod(t, "moves", "ready")

	k.api.patch(t, podsResource, k.namespace, "moves", doc{"metadata": doc{"labels": doc{"model.aibrix.ai/name": nil}}})
	k.waitPod(t, "moves", "")
	if k.eds() {
		k.inEDS(t, func(name string) bool { return name == "stays" })
	}
	l.more(t, 20)
	l.check(t)
}

// deletedMidStream deletes a pod while it answers: the answer goes on and
// counts, and nothing new comes.
func deletedMidStream(t *testing.T, k *kubeWorld) {
	e := k.pod(t, "leaves", "m")
	k.run(t)
	k.waitPod(t, "leaves", "ready")
	if err := e.SetFaults(sim.Fault{Kind: sim.FaultHangMid, AfterTokens: 5, Count: 1}); err != nil { // until the test lets it go on
		t.Fatal(err)
	}
	resp, err := k.h1.Post("http://"+k.addr+"/v1/chat/completions", "application/json",
		strings.NewReader(`{"model":"m","stream":true,"max_tokens":300,"messages":[{"role":"user","content":"hi"}]}`))
	if err != nil || resp.StatusCode != 200 {
		t.Fatal(resp, err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer := bufio.NewScanner(resp.Body)
	if !answer.Scan() {
		t.Fatal(answer.Err())
	}
	k.pod(t, "comes", "m")
	k.waitPod(t, "comes", "ready")
	k.api.deletePod(t, k.namespace, "leaves", 30)
	k.waitPod(t, "leaves", "not-ready")
	if got := k.endpointOf(t, "leaves"); got.Why != "the pod is terminating" || got.InFlight != 1 {
		t.Errorf("the pod that leaves: %+v", got)
	}
	for range 20 {
		k.must(t, k.h1, call{body: strings.NewReader(chat)})
	}
	if got := k.asked(e); got != 1 {
		t.Errorf("a pod that is terminating got %d requests", got-1)
	}
	if err := e.SetFaults(); err != nil {
		t.Fatal(err)
	}
	last := ""
	for answer.Scan() {
		if answer.Text() != "" {
			last = answer.Text()
		}
	}
	if answer.Err() != nil || last != "data: [DONE]" {
		t.Errorf("the answer ends in %q (%v)", last, answer.Err())
	}
	k.api.deletePod(t, k.namespace, "leaves", 0)
	k.waitPod(t, "leaves", "")
	k.waitLoad(t, 0, 0)
}

// objectiveChanges raises an objective's priority while requests queue: what
// comes after that passes what waits.
func objectiveChanges(t *testing.T, k *kubeWorld) {
	for _, name := range []string{"first", "second"} {
		k.api.create(t, objectivesGVR, k.namespace, doc{
			"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": doc{"name": name},
			"spec": doc{"priority": 1, "poolRef": doc{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "engines"}},
		})
	}
	k.api.create(t, poolsGVR, k.namespace, doc{
		"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": doc{"name": "engines"},
		"spec": doc{"selector": doc{"matchLabels": doc{"app": "engine"}}, "targetPorts": []any{doc{"number": enginePortNumber}}},
	})
	e := k.pod(t, "busy", "m")
	k.pod(t, "idle", "n")
	k.run(t)
	k.waitPod(t, "busy", "ready")
	k.waitPod(t, "idle", "ready")
	// priority is what a request of an objective gets now.
	priority := func(objective string) any {
		r := k.must(t, k.h1, call{body: strings.NewReader(strings.Replace(chat, `"m"`, `"n"`, 1)), header: header("x-llm-d-inference-objective", objective)})
		return k.access(t, r.id).at("shunt", "priority")
	}
	becomes := func(objective string, want float64) {
		eventually(t, fmt.Sprintf("objective %s has priority %v", objective, want), func() string {
			if got := priority(objective); got != want {
				return fmt.Sprint(got)
			}
			return ""
		})
	}
	becomes("first", 1)
	becomes("second", 1)
	e.SetHold(true)
	send := func(objective string) *background {
		return k.begin(t, k.h1, call{body: strings.NewReader(chat), header: header("x-llm-d-inference-objective", objective)})
	}
	running := send("first")
	wait(t, e, func(c sim.Counters) bool { return c.Held == 1 })
	waits := send("first")
	k.waitLoad(t, 1, 1)
	k.api.patch(t, objectivesGVR, k.namespace, "second", doc{"spec": doc{"priority": 5}})
	becomes("second", 5)
	passes := send("second")
	k.waitLoad(t, 1, 2)
	for range 3 { // each is answered before the next is let go
		wait(t, e, func(c sim.Counters) bool { return c.Held == 1 })
		answered := e.Counters().Answered
		e.Release(1)
		wait(t, e, func(c sim.Counters) bool { return c.Answered > answered })
	}
	names := map[string]string{}
	for name, b := range map[string]*background{"running": running, "waits": waits, "passes": passes} {
		r, err := b.wait()
		if err != nil || r.status != 200 {
			t.Errorf("%s: %v %v", name, r, err)
		}
		names[r.id] = name
	}
	var order []string
	for _, r := range e.Requests("/v1/chat/completions") {
		order = append(order, names[r.Headers.Get("X-Test-Id")])
	}
	if !slices.Equal(order, []string{"running", "passes", "waits"}) {
		t.Errorf("the order was %v", order)
	}
}

// serverAway kills the API server under load and starts it again: nothing
// fails, it shows, and a change made on its return arrives.
func serverAway(t *testing.T, api *apiServer, worlds ...*kubeWorld) {
	var loads []*load
	for _, k := range worlds {
		k.pod(t, "one", "m")
		k.pod(t, "two", "m")
		k.run(t)
		k.waitPod(t, "one", "ready")
		k.waitPod(t, "two", "ready")
		k.sourceUp(t, 1)
		loads = append(loads, k.startLoad(t, 4, "m"))
	}
	api.kill(t)
	away := time.NewTimer(*awayFlag)
	defer away.Stop()
	for _, k := range worlds {
		k.sourceUp(t, 0)
	}
	<-away.C
	for i, k := range worlds {
		loads[i].more(t, 50)
		k.waitPod(t, "one", "ready")
		k.waitPod(t, "two", "ready")
	}
	api.start(t)
	for i, k := range worlds {
		k.api.patch(t, podsResource, k.namespace, "two", doc{"metadata": doc{"labels": doc{"model.aibrix.ai/name": "n"}}})
		began := time.Now()
		eventually(t, "the change arrives", func() string {
			if e := k.endpointOf(t, "two"); e == nil || e.Model != "n" {
				return fmt.Sprintf("%+v", e)
			}
			return ""
		})
		took := time.Since(began)
		k.must(t, k.h1, call{body: strings.NewReader(strings.Replace(chat, `"m"`, `"n"`, 1))})
		if k.asked(k.pods["two"]) == 0 {
			t.Error("the pod that moved got nothing")
		}
		k.sourceUp(t, 1)
		loads[i].check(t)
		if n := strings.Count(strings.Join(k.envoy.Log(), "\n"), "keeping the last good set"); n != 1 {
			t.Errorf("that the server is away is logged %d times", n)
		}
		t.Logf("%d requests answered; the change arrived %v after the server", loads[i].answered.Load(), took)
	}
}

// sourceUp waits until shunt says that the API server can, or can't, be asked.
func (k *kubeWorld) sourceUp(t *testing.T, want float64) {
	t.Helper()
	eventually(t, fmt.Sprintf("shunt_discovery_up is %v", want), func() string {
		if up := k.metric(t, "shunt_discovery_up"); up != want {
			return fmt.Sprint(up)
		}
		return ""
	})
}
