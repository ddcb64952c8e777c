//go:build !nokubernetes

package discovery

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/shuntproxy/shunt/internal/pool"
)

const (
	// deliverGap is the least time between two sets: a rollout comes as a storm of
	// events. Where gathering takes long the gap grows to gapPerCost times that.
	deliverGap = 20 * time.Millisecond
	gapPerCost = 20
	// groupCheck is how often a server is asked which groups it has.
	groupCheck = 30 * time.Second
	groupRetry = 2 * time.Second
)

// Kubernetes is a source of endpoints in the pods of a cluster, and of the
// objectives and rewrites of an InferencePool. An API server that is away, or
// refuses, leaves the last good set.
type Kubernetes struct {
	options KubernetesOptions
	log     func(level slog.Level, msg string)
	connect func(KubernetesOptions) (*cluster, error) // replaced in tests
	wake    chan struct{}                             // size 1: a watch has news

	// mu protects status.
	mu     sync.Mutex
	status Status

	// What follows belongs to Run's goroutine.
	cluster   *cluster
	pool      *objectWatch   // of the InferencePool, or nil
	spec      *poolSpec      // that pods are watched by, nil before and without
	pods      []*objectWatch // one for each namespace
	extras    [2]*extra      // objectives, rewrites
	asking    bool           // for their groups
	read      [2]reading     // of extras, for resources
	resources *Resources
	last      *Set
	noted     map[string]bool // what was logged of pods and resources that are there
	ending    sync.WaitGroup  // watches that were stopped
}

// extra follows one optional kind.
type extra struct {
	candidates []schema.GroupVersionResource
	current    schema.GroupVersionResource
	watch      *objectWatch
	checked    bool // it is known which group the server has

	// answer is the newest of the server's to which group it has; its goroutine
	// writes it, and wakes Run's.
	answer atomic.Pointer[groupAnswer]
}

// groupAnswer is which of its candidates a server has, the zero value for none,
// or why it could not say.
type groupAnswer struct {
	found schema.GroupVersionResource
	err   error
}

// NewKubernetes returns a source that asks once it runs.
func NewKubernetes(o KubernetesOptions) *Kubernetes {
	k := &Kubernetes{options: o, log: o.Log, connect: connect, wake: make(chan struct{}, 1), noted: map[string]bool{}}
	if k.log == nil {
		k.log = func(slog.Level, string) {}
	}
	k.extras = [2]*extra{{candidates: objectiveResources()}, {candidates: rewriteResources()}}
	k.status.Where = k.where()
	return k
}

func (k *Kubernetes) where() string {
	in := "the own namespace"
	if len(k.options.Namespaces) > 0 {
		in = "namespaces " + strings.Join(k.options.Namespaces, ", ")
	}
	if k.options.InferencePool != "" {
		return "InferencePool " + k.options.InferencePool + " in " + in
	}
	return "pods with " + k.options.Selector + " in " + in
}

// Status implements Source.
func (k *Kubernetes) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	st := k.status
	st.Passed = slices.Clone(st.Passed)
	return st
}

// Run implements Source.
func (k *Kubernetes) Run(ctx context.Context, deliver func(Set)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer k.stop()
	defer cancel() // also where this panics: stop waits
	first, most := k.options.retry()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-k.wake:
		case <-timer.C:
		}
		if k.cluster == nil {
			c, err := k.connect(k.options)
			if err != nil {
				k.say(err, true)
				timer.Reset(most)
				continue
			}
			k.cluster = c
		}
		began := time.Now()
		k.turn(ctx, deliver, first, most)
		gap := max(deliverGap, gapPerCost*time.Since(began))
		if !pause(ctx, min(gap, time.Second)) {
			return nil
		}
	}
}

// stop ends all watches and waits for them.
func (k *Kubernetes) stop() {
	for _, w := range k.pods {
		k.end(w)
	}
	k.end(k.pool)
	for _, e := range k.extras {
		k.end(e.watch)
	}
	k.ending.Wait()
}

// end stops a watch, if it is one, without waiting: client-go may be in a pause
// after a failure.
func (k *Kubernetes) end(w *objectWatch) {
	if w != nil {
		w.cancel()
		k.ending.Go(w.done.Wait)
	}
}

// turn looks at what the watches know, starts and ends them, and delivers what
// is new.
func (k *Kubernetes) turn(ctx context.Context, deliver func(Set), first, most time.Duration) {
	start := func(lw listWatch) *objectWatch {
		return startWatch(lw, first, most, k.notify, func(cause any) {
			k.log(slog.LevelError, fmt.Sprintf("kubernetes: watching %s: %v", lw.what, k.options.Fault.caught(cause)))
		})
	}
	namespaces := k.namespaces()
	if k.options.InferencePool != "" && k.pool == nil {
		k.pool = start(k.cluster.objects(poolResource(), namespaces[0], k.options.InferencePool))
	}
	problem := k.followPods(namespaces, start)
	k.giveTargets(deliver, problem)
	if k.options.InferencePool != "" && k.options.Resources != nil {
		k.followExtras(ctx, namespaces[0], start)
		k.giveResources()
	}
}

func (k *Kubernetes) notify() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// namespaces are those to look in, "" for all.
func (k *Kubernetes) namespaces() []string {
	switch {
	case len(k.options.Namespaces) == 0:
		return []string{k.cluster.namespace}
	case slices.Contains(k.options.Namespaces, "*"):
		return []string{""}
	default:
		return k.options.Namespaces
	}
}

// followPods makes the watches of pods those of the selector that counts now.
func (k *Kubernetes) followPods(namespaces []string, start func(listWatch) *objectWatch) (problem error) {
	spec := &poolSpec{selector: k.options.Selector, ports: k.options.Ports}
	if k.pool != nil {
		synced, _ := k.pool.state()
		if !synced {
			return nil
		}
		spec, problem = k.readPool()
		if problem != nil && (spec == nil && k.spec != nil && k.poolBroken()) {
			return problem // the last good definition stays
		}
	}
	if spec.equal(k.spec) && (spec == nil || len(k.pods) > 0) {
		return problem
	}
	if spec == nil || k.spec == nil || spec.selector != k.spec.selector {
		for _, w := range k.pods {
			k.end(w)
		}
		k.pods = nil
		if spec != nil {
			for _, ns := range namespaces {
				k.pods = append(k.pods, start(k.cluster.pods(ns, spec.selector)))
			}
		}
	}
	k.spec = spec
	return problem
}

// readPool returns nil where the InferencePool does not exist or is broken.
func (k *Kubernetes) readPool() (*poolSpec, error) {
	for _, o := range k.pool.all() {
		if u, ok := o.(*unstructured.Unstructured); ok && u.GetName() == k.options.InferencePool {
			spec, err := readPool(u)
			return spec, err
		}
	}
	return nil, fmt.Errorf("InferencePool %s does not exist in namespace %s", k.options.InferencePool, k.pool.lw.namespace)
}

// poolBroken reports whether the InferencePool is there and can't be read.
func (k *Kubernetes) poolBroken() bool { return len(k.pool.all()) > 0 }

// giveTargets delivers the endpoints once each watch has had its first list.
func (k *Kubernetes) giveTargets(deliver func(Set), problem error) {
	ready, err := true, error(nil)
	watches := k.pods
	if k.pool != nil {
		watches = append([]*objectWatch{k.pool}, watches...)
	}
	for _, w := range watches {
		synced, failed := w.state()
		ready = ready && synced
		if err == nil {
			err = failed
		}
	}
	set := Set{Targets: []pool.Target{}}
	if err != nil {
		set.State = LastGood
	}
	if err == nil {
		err = problem
		if problem != nil && k.pool != nil && k.poolBroken() {
			set.State = LastGood
		}
	}
	k.say(err, set.State == LastGood)
	if !ready || k.spec == nil && set.State == LastGood {
		if k.last != nil && k.last.State != set.State && set.State == LastGood {
			k.last.State = LastGood
			deliver(Set{Targets: slices.Clone(k.last.Targets), State: LastGood})
		}
		return
	}
	if k.spec != nil {
		var pods []*corev1.Pod
		for _, w := range k.pods {
			for _, o := range w.all() {
				if pod, ok := o.(*corev1.Pod); ok {
					pods = append(pods, pod)
				}
			}
		}
		rules := podRules{ports: k.spec.ports, qualify: len(k.pods) > 1 || k.pods[0].lw.namespace == ""}
		g := rules.gather(pods)
		set.Targets = g.targets
		k.sayNotes("pod", g.notes)
		k.mu.Lock()
		k.status.Passed = g.passed
		k.mu.Unlock()
	}
	if k.last != nil && k.last.State == set.State && slices.Equal(k.last.Targets, set.Targets) {
		return
	}
	k.mu.Lock()
	k.status.Endpoints, k.status.Loaded = len(set.Targets), time.Now()
	if k.last != nil {
		k.status.Changes++
	}
	k.mu.Unlock()
	k.last = &Set{Targets: slices.Clone(set.Targets), State: set.State}
	deliver(set)
}

// say notes the present error, nil for none, and logs its begin and its end.
func (k *Kubernetes) say(err error, keeping bool) {
	msg := ""
	if err != nil {
		msg = err.Error()
	}
	now := time.Now()
	k.mu.Lock()
	before, since := k.status.Error, k.status.Since
	if before != "" && msg != "" { // it may read a little different each time
		k.status.Error = msg
	} else {
		k.status.setError(msg, now)
	}
	endpoints := k.status.Endpoints
	k.mu.Unlock()
	switch {
	case before == "" && msg != "":
		if keeping {
			msg = fmt.Sprintf("%s; keeping the last good set of %d endpoints", msg, endpoints)
		}
		k.log(slog.LevelError, "kubernetes: "+msg)
	case before != "" && msg == "":
		k.log(slog.LevelInfo, fmt.Sprintf("kubernetes: all is well again after %s", now.Sub(since).Round(time.Millisecond)))
	}
}

// maxNotes is how many pods or resources are named at once in the log.
const maxNotes = 20

// sayNotes logs what is odd, once for each pod or resource.
func (k *Kubernetes) sayNotes(prefix string, notes map[string][]string) {
	for id := range k.noted {
		if strings.HasPrefix(id, prefix+" ") && notes[strings.TrimPrefix(id, prefix+" ")] == nil {
			delete(k.noted, id)
		}
	}
	said, left := 0, 0
	for _, id := range slices.Sorted(maps.Keys(notes)) {
		key := prefix + " " + id
		if k.noted[key] {
			continue
		}
		k.noted[key] = true
		if said++; said > maxNotes {
			left++
			continue
		}
		name := id
		if _, after, ok := strings.Cut(id, " "); ok && prefix == "pod" {
			name = "pod " + after
		}
		k.log(slog.LevelWarn, fmt.Sprintf("kubernetes: %s: %s", name, strings.Join(notes[id], "; ")))
	}
	if left > 0 {
		k.log(slog.LevelWarn, fmt.Sprintf("kubernetes: the like of %d more", left))
	}
}

// followExtras watches the objectives and rewrites of the first group that the
// server has. None at all is no fault.
func (k *Kubernetes) followExtras(ctx context.Context, namespace string, start func(listWatch) *objectWatch) {
	if !k.asking {
		k.asking = true
		for _, e := range k.extras {
			k.ending.Go(func() { k.askGroups(ctx, e) })
		}
	}
	for i, e := range k.extras {
		answer := e.answer.Load()
		if answer == nil {
			continue
		}
		notes := map[string][]string{}
		if answer.err != nil && k.pool.healthy() { // else its watch says that the server is away
			notes[e.candidates[0].Resource] = []string{"can't ask which version the server has: " + answer.err.Error()}
		}
		k.sayNotes(fmt.Sprintf("group%d", i), notes)
		if answer.err != nil {
			continue
		}
		e.checked = true
		if answer.found == e.current {
			continue
		}
		k.end(e.watch)
		e.watch = nil
		if e.current = answer.found; e.current != (schema.GroupVersionResource{}) {
			e.watch = start(k.cluster.objects(e.current, namespace, ""))
		}
	}
}

// groupTimeout bounds the question which groups a server has.
const groupTimeout = 5 * time.Second

// askGroups asks the server again and again which group of a kind it has. It
// runs beside the watches: a server that answers late delays no pod's end.
func (k *Kubernetes) askGroups(ctx context.Context, e *extra) {
	for {
		found, err := k.group(ctx, e.candidates)
		if ctx.Err() != nil {
			return
		}
		e.answer.Store(&groupAnswer{found, err})
		k.notify()
		wait := groupCheck
		if err != nil {
			wait = groupRetry
		}
		if !pause(ctx, wait) {
			return
		}
	}
}

func (k *Kubernetes) group(ctx context.Context, candidates []schema.GroupVersionResource) (found schema.GroupVersionResource, err error) {
	defer func() { // it runs in a goroutine of its own
		if cause := recover(); cause != nil {
			err = k.options.Fault.caught(cause)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
	defer cancel()
	for _, c := range candidates {
		has, err := k.cluster.has(ctx, c)
		if err != nil {
			return schema.GroupVersionResource{}, err
		}
		if has {
			return c, nil
		}
	}
	return schema.GroupVersionResource{}, nil
}

// reading is what was read of one kind, and of which state of its watch.
type reading struct {
	watch   *objectWatch
	version uint64
}

// giveResources hands objectives and rewrites over, once each kind has been
// read or can't be. A kind that can't be read keeps what was read last.
func (k *Kubernetes) giveResources() {
	for i, e := range k.extras {
		if !e.checked {
			return // not known yet
		}
		if e.watch == nil {
			continue
		}
		synced, err := e.watch.state()
		notes := map[string][]string{}
		if err != nil {
			notes[e.current.Resource] = []string{err.Error()}
		}
		k.sayNotes(fmt.Sprintf("kind%d", i), notes)
		if !synced && err == nil {
			return // its first list is on its way
		}
	}
	var next Resources
	if k.resources != nil {
		next = *k.resources
	}
	changed := k.resources == nil
	for i, e := range k.extras {
		now := reading{watch: e.watch}
		if e.watch != nil {
			if synced, _ := e.watch.state(); !synced {
				continue
			}
			now.version = e.watch.version()
		}
		if k.resources != nil && k.read[i] == now {
			continue // a pod's event costs no second look at these
		}
		changed, k.read[i] = true, now
		if objects := unstructuredOf(e.watch); i == 0 {
			next.Objectives = readObjectives(objects, k.options.InferencePool)
		} else {
			next.Rewrites = k.readRewrites(objects)
		}
	}
	if !changed || k.resources != nil && reflect.DeepEqual(*k.resources, next) {
		return
	}
	k.resources = &next
	k.options.Resources(next)
}

// readRewrites reads the rewrites of the pool and logs what is passed over.
func (k *Kubernetes) readRewrites(objects []*unstructured.Unstructured) []Rewrite {
	rules, odd := readRewrites(objects, k.options.InferencePool)
	notes := map[string][]string{}
	for _, text := range odd {
		at, what, _ := strings.Cut(text, "]")
		notes[at+"]"] = append(notes[at+"]"], what)
	}
	k.sayNotes("rewrites", notes)
	return rules
}

// unstructuredOf are the objects of a watch, none where there is no watch.
func unstructuredOf(w *objectWatch) (objects []*unstructured.Unstructured) {
	if w == nil {
		return nil
	}
	for _, o := range w.all() {
		if u, ok := o.(*unstructured.Unstructured); ok {
			objects = append(objects, u)
		}
	}
	return objects
}
