//go:build !nokubernetes

package discovery

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// object is a resource as JSON has it.
type object = map[string]any

// kubeEvent is one change, in the order of resource versions.
type kubeEvent struct {
	version       int
	resource      string
	before, after object // nil for none
}

// kubeServer lists and watches, as an API server does, and misbehaves as tests
// tell it.
type kubeServer struct {
	*httptest.Server

	mu       sync.Mutex
	version  int
	objects  map[string]map[string]object // by resource, then namespace/name
	events   []kubeEvent
	changed  chan struct{} // closed and replaced at each change
	requests []string      // "list pods", "watch pods", as they came

	stream    bool              // it can stream a list
	compacted int               // watches from before are 410
	status    map[string]int    // of all requests for a resource, as in "list pods"
	hold      chan struct{}     // lists wait until it is closed, if it is not nil
	drop      chan struct{}     // closed: all watches end
	twice     bool              // each event comes two times
	has       map[string]string // resources by "group/version"
	holdGroup chan struct{}     // the question which it has waits until it is closed, if it is not nil
}

func newKubeServer(t *testing.T) *kubeServer {
	t.Helper()
	s := &kubeServer{
		version: 10, objects: map[string]map[string]object{}, changed: make(chan struct{}), drop: make(chan struct{}),
		status: map[string]int{}, has: map[string]string{},
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// kubeconfig writes one that leads to the server.
func (s *kubeServer) kubeconfig(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u, namespace: ns}}],
clusters: [{name: c, cluster: {server: "%s"}}], users: [{name: u, user: {token: t}}]}`, s.URL)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (s *kubeServer) with(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

// put creates or replaces an object; nil removes it.
func (s *kubeServer) put(resource, key string, o object) {
	s.with(func() {
		s.version++
		if s.objects[resource] == nil {
			s.objects[resource] = map[string]object{}
		}
		before := s.objects[resource][key]
		if o == nil {
			delete(s.objects[resource], key)
			gone := maps.Clone(before)
			gone["metadata"] = maps.Clone(before["metadata"].(object))
			gone["metadata"].(object)["resourceVersion"] = strconv.Itoa(s.version)
			before = gone
		} else {
			namespace, name, _ := strings.Cut(key, "/")
			meta := o["metadata"].(object)
			meta["namespace"], meta["name"], meta["resourceVersion"] = namespace, name, strconv.Itoa(s.version)
			s.objects[resource][key] = o
		}
		s.events = append(s.events, kubeEvent{s.version, resource, before, o})
	})
}

// dropWatches ends all watches that run.
func (s *kubeServer) dropWatches() {
	s.with(func() {
		close(s.drop)
		s.drop = make(chan struct{})
	})
}

// count returns how often something was asked for.
func (s *kubeServer) count(request string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range s.requests {
		if r == request {
			n++
		}
	}
	return n
}

// await waits until something was asked for n times.
func (s *kubeServer) await(t *testing.T, n int, request string) {
	t.Helper()
	for deadline := time.After(20 * time.Second); s.count(request) < n; {
		select {
		case <-deadline:
			t.Fatalf("%q was not asked for %d times", request, n)
		case <-time.After(time.Millisecond):
		}
	}
}

func fail(w http.ResponseWriter, code int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(failure(code, reason))
}

func failure(code int, reason string) object {
	return object{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "test: " + reason}
}

func (s *kubeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	group, namespace := "v1", ""
	if parts[0] == "apis" {
		group = parts[1] + "/" + parts[2]
		parts = parts[3:]
	} else {
		parts = parts[2:]
	}
	if len(parts) == 0 {
		s.groups(w, r, group)
		return
	}
	if parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	q := r.URL.Query()
	resource, verb := parts[0], "list"
	if group != "v1" {
		resource = group + "/" + resource
	}
	if q.Get("watch") != "" && q.Get("watch") != "false" && q.Get("watch") != "0" {
		verb = "watch"
	}
	selector, _ := labels.Parse(q.Get("labelSelector"))
	match := func(o object) bool {
		if o == nil {
			return false
		}
		meta := o["metadata"].(object)
		set := labels.Set{}
		if l, ok := meta["labels"].(object); ok {
			for k, v := range l {
				set[k] = v.(string)
			}
		}
		name := strings.TrimPrefix(q.Get("fieldSelector"), "metadata.name=")
		return (namespace == "" || meta["namespace"] == namespace) && selector.Matches(set) && (name == "" || meta["name"] == name)
	}
	s.mu.Lock()
	s.requests = append(s.requests, verb+" "+resource)
	status, hold := s.status[verb+" "+resource], s.hold
	s.mu.Unlock()
	switch {
	case status == 403:
		fail(w, 403, "Forbidden")
	case status == 404:
		fail(w, 404, "NotFound")
	case status != 0:
		fail(w, status, "InternalError")
	case verb == "list":
		if hold != nil {
			select {
			case <-hold:
			case <-r.Context().Done():
				return
			}
		}
		s.list(w, r, resource, match)
	default:
		s.watch(w, r, resource, match)
	}
}

func (s *kubeServer) groups(w http.ResponseWriter, r *http.Request, group string) {
	s.mu.Lock()
	s.requests = append(s.requests, "group "+group)
	hold := s.holdGroup
	s.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-r.Context().Done():
			return
		}
	}
	s.mu.Lock()
	names, status := s.has[group], s.status["group "+group]
	s.mu.Unlock()
	if status != 0 {
		fail(w, status, "ServiceUnavailable")
		return
	}
	if names == "" {
		fail(w, 404, "NotFound")
		return
	}
	list := []object{}
	for name := range strings.SplitSeq(names, ",") {
		list = append(list, object{"name": name, "namespaced": true, "kind": name, "verbs": []string{"list", "watch"}})
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": list})
}

func (s *kubeServer) list(w http.ResponseWriter, r *http.Request, resource string, match func(object) bool) {
	q := r.URL.Query()
	s.mu.Lock()
	items := []object{}
	for _, key := range slices.Sorted(maps.Keys(s.objects[resource])) {
		if o := s.objects[resource][key]; match(o) {
			items = append(items, o)
		}
	}
	version := s.version
	s.mu.Unlock()
	limit, _ := strconv.Atoi(q.Get("limit"))
	from, _ := strconv.Atoi(q.Get("continue"))
	meta := object{"resourceVersion": strconv.Itoa(version)}
	items = items[min(from, len(items)):]
	if limit > 0 && len(items) > limit {
		items = items[:limit]
		meta["continue"] = strconv.Itoa(from + limit)
	}
	w.Header().Set("Content-Type", "application/json")
	kind, api := "PodList", "v1"
	if resource != "pods" {
		kind, api = "List", resource[:strings.LastIndexByte(resource, '/')]
	}
	_ = json.NewEncoder(w).Encode(object{"kind": kind, "apiVersion": api, "metadata": meta, "items": items})
}

func (s *kubeServer) watch(w http.ResponseWriter, r *http.Request, resource string, match func(object) bool) {
	q := r.URL.Query()
	s.mu.Lock()
	stream, compacted, drop := s.stream, s.compacted, s.drop
	s.mu.Unlock()
	after, _ := strconv.Atoi(q.Get("resourceVersion"))
	initial := q.Get("sendInitialEvents") == "true"
	if initial && !stream {
		fail(w, 422, "Invalid")
		return
	}
	if !initial && after < compacted {
		fail(w, 410, "Expired")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	send := func(kind string, o object) {
		_ = json.NewEncoder(w).Encode(object{"type": kind, "object": o})
		w.(http.Flusher).Flush()
	}
	w.(http.Flusher).Flush()
	if initial {
		s.mu.Lock()
		var all []object
		for _, o := range s.objects[resource] {
			if match(o) {
				all = append(all, o)
			}
		}
		after = s.version
		s.mu.Unlock()
		for _, o := range all {
			send("ADDED", o)
		}
		kind, api := "Pod", "v1"
		if resource != "pods" {
			kind, api = "Object", resource[:strings.LastIndexByte(resource, '/')]
		}
		send("BOOKMARK", object{"kind": kind, "apiVersion": api, "metadata": object{
			"resourceVersion": strconv.Itoa(after), "annotations": object{"k8s.io/initial-events-end": "true"},
		}})
	}
	for {
		s.mu.Lock()
		changed, twice := s.changed, s.twice
		var due []kubeEvent
		for _, e := range s.events {
			if e.version > after && e.resource == resource {
				due = append(due, e)
			}
		}
		after = max(after, s.version)
		s.mu.Unlock()
		for _, e := range due {
			var kind string
			o := e.after
			switch before, now := match(e.before), match(e.after); {
			case now && before:
				kind = "MODIFIED"
			case now:
				kind = "ADDED"
			case before:
				kind, o = "DELETED", e.before
			default:
				continue
			}
			send(kind, o)
			if twice {
				send(kind, o)
			}
		}
		select {
		case <-changed:
		case <-drop:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// podObject is a ready pod; edits change it.
func podObject(ip string, podLabels map[string]string, edits ...func(o object)) object {
	l := object{}
	for k, v := range podLabels {
		l[k] = v
	}
	o := object{
		"kind": "Pod", "apiVersion": "v1",
		"metadata": object{"uid": "u-" + ip, "labels": l, "creationTimestamp": "2026-01-01T00:00:00Z"},
		"status":   object{"phase": "Running", "podIP": ip, "conditions": []object{{"type": "Ready", "status": "True"}}},
	}
	for _, edit := range edits {
		edit(o)
	}
	return o
}

func terminating(o object) { o["metadata"].(object)["deletionTimestamp"] = "2026-01-01T00:00:01Z" }

func unreadyPod(o object) {
	o["status"].(object)["conditions"] = []object{{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}}
}
