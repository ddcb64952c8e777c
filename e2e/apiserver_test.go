package e2e

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	kube "k8s.io/client-go/rest"

	"github.com/shuntproxy/shunt/internal/loopback"
)

// apiServer is a Kubernetes API server with its etcd, and nothing else of a
// cluster: what a kubelet would do, the test does.
type apiServer struct {
	owner    *testing.T // with which it ends
	dir      string     // with its files
	binaries string
	addr     string // ip:port
	etcdURL  string
	process  *exec.Cmd // of the API server, nil while it is down
	client   dynamic.Interface
}

const (
	adminToken = "admin-of-the-test"
	shuntToken = "shunt-of-the-test"
)

// startAPIServer starts both; they end with the test.
func startAPIServer(t *testing.T, binaries string) *apiServer {
	t.Helper()
	s := &apiServer{owner: t, dir: t.TempDir(), binaries: binaries, addr: loopback.Reserve(t)}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	s.write(t, "sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})))
	s.write(t, "sa.pub", string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})))
	s.write(t, "tokens.csv", adminToken+",admin,admin,\"system:masters\"\n"+shuntToken+",shunt,shunt\n")
	s.etcdURL = "http://" + loopback.Reserve(t)
	peers := "http://" + loopback.Reserve(t)
	s.run(t, "etcd", "--data-dir", filepath.Join(s.dir, "etcd"), "--listen-client-urls", s.etcdURL, "--advertise-client-urls", s.etcdURL,
		"--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", "default="+peers)
	s.client, err = dynamic.NewForConfig(&kube.Config{
		Host: s.url(), BearerToken: adminToken, TLSClientConfig: kube.TLSClientConfig{Insecure: true}, QPS: 1000, Burst: 1000,
	})
	if err != nil {
		t.Fatal(err)
	}
	s.start(t)
	return s
}

func (s *apiServer) url() string { return "https://" + s.addr }

func (s *apiServer) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// run starts a program whose output is shown if the test fails.
func (s *apiServer) run(t *testing.T, program string, args ...string) *exec.Cmd {
	t.Helper()
	log, err := os.CreateTemp(s.dir, program+"-*.log")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(s.binaries, program), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.owner.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && s.owner.Failed() {
			s.owner.Logf("the end of what %s said:\n%s", program, text[max(0, len(text)-4000):])
		}
		_ = log.Close()
	})
	return cmd
}

// start starts the API server and waits until it is ready.
func (s *apiServer) start(t *testing.T) {
	t.Helper()
	file := func(name string) string { return filepath.Join(s.dir, name) }
	_, port, _ := net.SplitHostPort(s.addr)
	s.process = s.run(t, "kube-apiserver", "--etcd-servers", s.etcdURL, "--bind-address", "127.0.0.1", "--endpoint-reconciler-type", "none",
		"--advertise-address", "192.0.2.10", "--secure-port", port, "--cert-dir", file("certs"),
		"--service-cluster-ip-range", "10.99.0.0/24", "--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", file("sa.pub"), "--service-account-signing-key-file", file("sa.key"),
		"--authorization-mode", "RBAC", "--token-auth-file", file("tokens.csv"), "--disable-admission-plugins", "ServiceAccount")
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true, // its certificate is of its own making
	}}
	eventually(t, "the API server is ready", func() string {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url()+"/readyz", nil)
		if err != nil {
			return err.Error()
		}
		req.Header.Set("Authorization", "Bearer "+adminToken)
		resp, err := client.Do(req)
		if err != nil {
			return err.Error()
		}
		_ = resp.Body.Close()
		if resp.StatusCode != 200 {
			return resp.Status
		}
		return ""
	})
}

// kill ends the API server without notice.
func (s *apiServer) kill(t *testing.T) {
	t.Helper()
	if err := s.process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = s.process.Wait() // it was killed
}

// kubeconfig is that of shunt, whose permissions a Role gives.
func (s *apiServer) kubeconfig(namespace string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: shunt, namespace: %s}}]
clusters: [{name: test, cluster: {server: "%s", insecure-skip-tls-verify: true}}]
users: [{name: shunt, user: {token: %s}}]
`, namespace, s.url(), shuntToken)
}

var (
	podsResource  = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	spacesGVR     = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
	rolesGVR      = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"}
	bindingsGVR   = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "rolebindings"}
	crdsGVR       = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	poolsGVR      = schema.GroupVersionResource{Group: "inference.networking.k8s.io", Version: "v1", Resource: "inferencepools"}
	objectivesGVR = schema.GroupVersionResource{Group: "llm-d.ai", Version: "v1alpha2", Resource: "inferenceobjectives"}
	rewritesGVR   = schema.GroupVersionResource{Group: "llm-d.ai", Version: "v1alpha2", Resource: "inferencemodelrewrites"}
)

// create makes an object of JSON or of a map.
func (s *apiServer) create(t *testing.T, gvr schema.GroupVersionResource, namespace string, object map[string]any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	u := &unstructured.Unstructured{Object: plain(t, object)}
	if _, err := s.client.Resource(gvr).Namespace(namespace).Create(ctx, u, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// patch merges into an object, or into its status.
func (s *apiServer) patch(t *testing.T, gvr schema.GroupVersionResource, namespace, name string, with map[string]any, subresources ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	text, err := json.Marshal(with)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Resource(gvr).Namespace(namespace).Patch(ctx, name, types.MergePatchType, text, metav1.PatchOptions{}, subresources...); err != nil {
		t.Fatal(err)
	}
}

// remove deletes an object and returns what it was.
func (s *apiServer) remove(t *testing.T, gvr schema.GroupVersionResource, namespace, name string) doc {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	u, err := s.client.Resource(gvr).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.client.Resource(gvr).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	return u.Object
}

// plain is an object as the client wants it: of JSON's types.
func plain(t *testing.T, object map[string]any) map[string]any {
	t.Helper()
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	u := &unstructured.Unstructured{}
	if err := json.Unmarshal(text, &u.Object); err != nil {
		t.Fatal(err)
	}
	return u.Object
}

// installCRDs installs the kinds that shunt reads, with the fields it reads.
func (s *apiServer) installCRDs(t *testing.T) {
	t.Helper()
	for gvr, kind := range map[schema.GroupVersionResource]string{
		poolsGVR: "InferencePool", objectivesGVR: "InferenceObjective", rewritesGVR: "InferenceModelRewrite",
	} {
		s.create(t, crdsGVR, "", doc{
			"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
			"metadata": doc{
				"name": gvr.GroupResource().String(),
				// Without it the server keeps the groups *.k8s.io for itself.
				"annotations": doc{"api-approved.kubernetes.io": "unapproved, for a test"},
			},
			"spec": doc{
				"group": gvr.Group, "scope": "Namespaced",
				"names": doc{"kind": kind, "plural": gvr.Resource, "singular": strings.ToLower(kind)},
				"versions": []any{doc{"name": gvr.Version, "served": true, "storage": true, "schema": doc{"openAPIV3Schema": doc{
					"type": "object", "properties": doc{"spec": doc{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
				}}}},
			},
		})
		eventually(t, kind+" is served", func() string {
			if _, err := s.client.Resource(gvr).Namespace("default").List(t.Context(), metav1.ListOptions{}); err != nil {
				return err.Error()
			}
			return ""
		})
	}
}

// discoveryPage returns what docs/discovery.md shows as code, block by block,
// without its indentation.
func discoveryPage(t *testing.T) []string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join("..", "docs", "discovery.md"))
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	block := ""
	for line := range strings.SplitSeq(string(page)+"\n", "\n") {
		if code, ok := strings.CutPrefix(line, "    "); ok {
			block += code + "\n"
		} else if block != "" {
			blocks = append(blocks, block)
			block = ""
		}
	}
	return blocks
}

// namespace makes one in which shunt may read, by the Role of docs/discovery.md.
func (s *apiServer) namespace(t *testing.T, name string) {
	t.Helper()
	s.create(t, spacesGVR, "", doc{"apiVersion": "v1", "kind": "Namespace", "metadata": doc{"name": name}})
	var role doc
	for _, block := range discoveryPage(t) {
		if strings.HasPrefix(block, "apiVersion: rbac") {
			if err := yaml.Unmarshal([]byte(block), &role); err != nil {
				t.Fatal(err)
			}
		}
	}
	if role == nil {
		t.Fatal("docs/discovery.md has no Role")
	}
	s.create(t, rolesGVR, name, role)
	s.create(t, bindingsGVR, name, doc{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": doc{"name": "shunt"},
		"roleRef":  doc{"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "shunt"},
		"subjects": []any{doc{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "shunt"}},
	})
}

// createPod makes a pod at an address as a kubelet would have it run.
func (s *apiServer) createPod(t *testing.T, namespace, name, host string, labels doc) {
	t.Helper()
	s.create(t, podsResource, namespace, doc{
		"apiVersion": "v1", "kind": "Pod", "metadata": doc{"name": name, "labels": labels},
		// With a node, so that its end is graceful.
		"spec": doc{"nodeName": "node", "containers": []any{doc{"name": "engine", "image": "engine"}}},
	})
	s.podStatus(t, namespace, name, host, "True")
}

func (s *apiServer) podStatus(t *testing.T, namespace, name, host, ready string) {
	t.Helper()
	s.patch(t, podsResource, namespace, name, doc{"status": doc{
		"phase": "Running", "podIP": host, "podIPs": []any{doc{"ip": host}},
		"conditions": []any{doc{"type": "Ready", "status": ready, "lastTransitionTime": time.Now().UTC().Format(time.RFC3339)}},
	}}, "status")
}

// deletePod ends a pod: with a grace it is terminating until it is deleted
// without one.
func (s *apiServer) deletePod(t *testing.T, namespace, name string, grace int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := s.client.Resource(podsResource).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &grace}); err != nil {
		t.Fatal(err)
	}
}
