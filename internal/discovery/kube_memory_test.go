//go:build !nokubernetes

package discovery

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/pool"
)

var podsFlag = flag.Int("pods", 500, "how many pods TestKubernetesMemory lists")

// bigPod is a pod of an engine as an API server sends it: with what deployments,
// admission and the kubelet leave on it, of which shunt reads little.
func bigPod(name, ip string) object {
	o := podObject(ip, map[string]string{
		pool.LabelModel: "llama-3-70b", pool.LabelEngine: "vllm", pool.LabelPort: "8000", "app.kubernetes.io/name": "vllm",
		"app.kubernetes.io/instance": "llama", "app.kubernetes.io/managed-by": "Helm", "pod-template-hash": "6c7d9f8b5d", "topology.kubernetes.io/zone": "eu-1b",
	})
	meta, status := o["metadata"].(object), o["status"].(object)
	meta["uid"], meta["namespace"], meta["name"], meta["resourceVersion"] = "8d0f6a1e-52a7-4b0e-9c1d-"+name, "ns", name, "7"
	meta["annotations"] = object{
		"kubectl.kubernetes.io/restartedAt": "2026-11-30T00:00:00Z", "prometheus.io/scrape": "true", "prometheus.io/port": "8000",
		"example.com/values": strings.Repeat("replicas=4,", 50),
	}
	meta["ownerReferences"] = []object{{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "vllm-llama-3-70b-6c7d9f8b5d", "uid": "0b8c", "controller": true}}
	fields := object{}
	for j := range 40 {
		fields[fmt.Sprintf(`k:{"name":"SETTING_%d"}`, j)] = object{".": object{}, "f:name": object{}, "f:value": object{}}
	}
	meta["managedFields"] = []object{
		{"manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": object{"f:spec": object{"f:env": fields}}},
		{"manager": "kubelet", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "subresource": "status", "fieldsV1": object{"f:status": fields}},
	}
	env := []object{}
	for j := range 40 {
		env = append(env, object{"name": fmt.Sprintf("SETTING_%d", j), "value": strings.Repeat("v", 40)})
	}
	o["spec"] = object{
		"nodeName": "node-7", "serviceAccountName": "engine",
		"containers": []object{{
			"name": "engine", "image": "registry.example.com/vllm/vllm-openai:v0.9.1", "env": env,
			"args":         []string{"--model", "/models/llama-3-70b", "--tensor-parallel-size", "8", "--max-model-len", "131072"},
			"resources":    object{"limits": object{"nvidia.com/gpu": "8", "memory": "900Gi"}, "requests": object{"cpu": "32"}},
			"volumeMounts": []object{{"name": "models", "mountPath": "/models"}, {"name": "shm", "mountPath": "/dev/shm"}},
		}},
		"volumes": []object{
			{"name": "models", "persistentVolumeClaim": object{"claimName": "models"}}, {"name": "shm", "emptyDir": object{"medium": "Memory"}},
			{"name": "token", "projected": object{"sources": []object{{"serviceAccountToken": object{"path": "token", "expirationSeconds": 3607}}}}},
		},
		"tolerations": []object{{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}},
	}
	status["conditions"] = []object{
		{"type": "PodReadyToStartContainers", "status": "True"}, {"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"},
		{"type": "ContainersReady", "status": "True"}, {"type": "PodScheduled", "status": "True"},
	}
	status["podIPs"], status["hostIP"], status["startTime"] = []object{{"ip": ip}}, "192.0.2.7", "2026-11-30T00:00:00Z"
	status["containerStatuses"] = []object{{
		"name": "engine", "image": "registry.example.com/vllm/vllm-openai:v0.9.1", "imageID": "sha256:" + strings.Repeat("a", 64),
		"containerID": "containerd://" + strings.Repeat("b", 64), "ready": true, "started": true, "restartCount": 0,
		"state": object{"running": object{"startedAt": "2026-11-30T00:00:10Z"}},
	}}
	return o
}

// bigPods are n big pods as JSON.
func bigPods(t *testing.T, n int) (pods []string) {
	t.Helper()
	text, err := json.Marshal(bigPod("NAME", "IP"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		name, ip := fmt.Sprintf("vllm-llama-3-70b-6c7d9f8b5d-%05d", i), fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250)
		pods = append(pods, strings.NewReplacer("NAME", name, `"IP"`, strconv.Quote(ip)).Replace(string(text)))
	}
	return pods
}

// podServer lists pods: streamed where a client asks for that, else in pages.
func podServer(t *testing.T, pods []string, stream bool) (kubeconfig string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		w.Header().Set("Content-Type", "application/json")
		switch {
		case q.Get("sendInitialEvents") == "true" && !stream:
			fail(w, 422, "Invalid")
		case q.Get("watch") != "":
			if q.Get("sendInitialEvents") == "true" {
				for _, pod := range pods {
					_, _ = io.WriteString(w, `{"type":"ADDED","object":`+pod+"}\n")
				}
				_, _ = io.WriteString(w, `{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"9","annotations":{"k8s.io/initial-events-end":"true"}}}}`)
			}
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			limit, _ := strconv.Atoi(q.Get("limit"))
			from, _ := strconv.Atoi(q.Get("continue"))
			next := ""
			if limit == 0 || from+limit >= len(pods) {
				limit = len(pods) - from
			} else {
				next = strconv.Itoa(from + limit)
			}
			_, _ = io.WriteString(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9","continue":"`+next+`"},"items":[`+
				strings.Join(pods[from:from+limit], ",")+"]}")
		}
	}))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u, namespace: ns}}],
clusters: [{name: c, cluster: {server: "%s"}}], users: [{name: u, user: {token: t}}]}`, s.URL)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// liveBytes is what the garbage collector finds in use.
func liveBytes() int64 {
	runtime.GC()
	runtime.GC() // what finalizers let go
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestKubernetesMemory: of a pod of 11 KB only what is read is kept, however the
// list comes.
func TestKubernetesMemory(t *testing.T) {
	n := *podsFlag
	pods := bigPods(t, n)
	for name, stream := range map[string]bool{"streamed": true, "in pages": false} {
		t.Run(name, func(t *testing.T) {
			source := NewKubernetes(KubernetesOptions{Kubeconfig: podServer(t, pods, stream), Selector: pool.LabelModel})
			before := liveBytes()
			got := follow(t, source)
			if set := <-got.all; len(set.Targets) != n {
				t.Fatalf("%d endpoints", len(set.Targets))
			}
			kept := liveBytes() - before
			t.Logf("%d pods of %d bytes: the source keeps %.1f MB, %d bytes a pod", n, len(pods[0]), float64(kept)/1e6, kept/int64(n))
			if kept/int64(n) > 4096 {
				t.Errorf("%d bytes are kept of a pod", kept/int64(n))
			}
			runtime.KeepAlive(source)
			runtime.KeepAlive(pods)
		})
	}
}
