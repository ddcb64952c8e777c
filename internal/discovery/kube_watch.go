//go:build !nokubernetes

package discovery

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

const (
	// listTimeout ends a list that does not come; the next try may reach another
	// server.
	listTimeout = time.Minute
	// watchTimeout ends the wait for a watch to begin.
	watchTimeout = 30 * time.Second
	// pageSize is how many objects one answer to a list may have, where the server
	// does not stream them.
	pageSize = 500
)

// listWatch is how one kind of object is listed and watched.
type listWatch struct {
	// what is "pods in namespace x", for messages; group and resource name the
	// permission.
	what, group, resource, namespace string

	list  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error)
	watch func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
	// noStream is true for fakes, which can't stream a list.
	noStream bool
	// example is an object of the kind.
	example runtime.Object
	// strip returns an object with what is read of it.
	strip func(runtime.Object) runtime.Object
}

// objectWatch follows all objects of a listWatch: the list-and-watch half of a
// client-go informer (a Reflector) on a store of our own, which has no queue and
// keeps what is read of an object and no more.
type objectWatch struct {
	lw     listWatch
	wake   func() // after each change
	fault  func(cause any)
	cancel context.CancelFunc
	done   sync.WaitGroup

	// mu protects what follows.
	mu      sync.Mutex
	objects map[string]runtime.Object // by namespace/name
	changes uint64                    // of objects
	synced  bool                      // a full list came once
	failed  [2]error                  // of list and watch, until it succeeds
}

const (
	verbList = iota
	verbWatch
)

// startWatch begins to follow. cancel ends it, done waits for it.
func startWatch(lw listWatch, first, most time.Duration, wake func(), fault func(cause any)) *objectWatch {
	w := &objectWatch{lw: lw, wake: wake, fault: fault, objects: map[string]runtime.Object{}}
	logger := logr.Discard()
	r := cache.NewReflectorWithOptions(w, lw.example, w, cache.ReflectorOptions{
		Name: "shunt", Logger: &logger,
		Backoff: &wait.Backoff{Duration: first, Cap: most, Factor: 1.6, Jitter: 0.5, Steps: 100},
	})
	r.WatchListPageSize = pageSize
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
	w.cancel = cancel
	w.done.Go(func() {
		for ctx.Err() == nil {
			w.follow(ctx, r)
			pause(ctx, most) // it returned early: it panicked
		}
	})
	return w
}

// pause waits for d and reports whether ctx lasted as long.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

func (w *objectWatch) follow(ctx context.Context, r *cache.Reflector) {
	defer func() {
		if cause := recover(); cause != nil {
			w.fault(cause)
		}
	}()
	r.RunWithContext(ctx)
}

// state returns whether a full list has come, and what is wrong now.
func (w *objectWatch) state() (synced bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, err := range w.failed {
		if err != nil {
			return w.synced, err
		}
	}
	return w.synced, nil
}

// healthy reports whether a full list has come and nothing is wrong now.
func (w *objectWatch) healthy() bool {
	synced, err := w.state()
	return synced && err == nil
}

// version changes with the objects.
func (w *objectWatch) version() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changes
}

// all returns the objects, in no order.
func (w *objectWatch) all() []runtime.Object {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := make([]runtime.Object, 0, len(w.objects))
	for _, o := range w.objects {
		out = append(out, o)
	}
	return out
}

func (w *objectWatch) change(f func()) {
	w.mu.Lock()
	f()
	w.mu.Unlock()
	w.wake()
}

// note keeps the outcome of a request. A watch that begins shows that the list
// before it was good.
func (w *objectWatch) note(verb int, err error) {
	if errors.Is(err, context.Canceled) {
		return
	}
	w.change(func() {
		switch {
		case err != nil:
			w.failed[verb] = w.explain(verb, err)
		case verb == verbWatch:
			w.failed = [2]error{}
		default:
			w.failed[verb] = nil
		}
	})
}

// explain says what to do about an error.
func (w *objectWatch) explain(verb int, err error) error {
	name := [2]string{"list", "watch"}[verb]
	switch {
	case apierrors.IsForbidden(err):
		in := "a Role in namespace " + w.lw.namespace
		if w.lw.namespace == "" {
			in = "a ClusterRole"
		}
		return fmt.Errorf("the API server forbids to %s %s: %w; add to %s of this service account the rule {apiGroups: [%q], resources: [%s], verbs: [get, list, watch]}",
			name, w.lw.what, err, in, w.lw.group, w.lw.resource)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server refuses the credentials to %s %s: %w", name, w.lw.what, err)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("the API server does not know %s.%s; is its CRD installed?: %w", w.lw.resource, w.lw.group, err)
	default:
		return fmt.Errorf("can't %s %s: %w", name, w.lw.what, err)
	}
}

// List implements cache.ListerWatcher.
func (w *objectWatch) List(o metav1.ListOptions) (runtime.Object, error) {
	return w.ListWithContext(context.Background(), o)
}

// ListWithContext implements cache.ListerWatcherWithContext.
func (w *objectWatch) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	// With a page size a version means exactly that one, unless one says otherwise:
	// after a restart of the server that is the state from before, over and over.
	if o.ResourceVersion != "" && o.ResourceVersion != "0" && o.Continue == "" && o.ResourceVersionMatch == "" {
		o.ResourceVersionMatch = metav1.ResourceVersionMatchNotOlderThan
	}
	list, err := w.lw.list(ctx, o)
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) { // the reflector asks anew
		w.note(verbList, err)
	}
	return list, err
}

// Watch implements cache.ListerWatcher.
func (w *objectWatch) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return w.WatchWithContext(context.Background(), o)
}

// WatchWithContext implements cache.ListerWatcherWithContext.
func (w *objectWatch) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	ctx, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(watchTimeout, cancel)
	events, err := w.lw.watch(ctx, o)
	if !late.Stop() && err != nil {
		err = fmt.Errorf("no answer within %s: %w", watchTimeout, io.ErrUnexpectedEOF)
	}
	if err != nil {
		cancel()
		// 410 is a reason to list, and a server too old to stream a list refuses that.
		streaming := o.SendInitialEvents != nil && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err))
		if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) && !streaming {
			w.note(verbWatch, err)
		}
		return nil, err
	}
	w.note(verbWatch, nil)
	return &endingWatch{events, cancel}, nil
}

// endingWatch frees the context of a watch with it.
type endingWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

func (w *endingWatch) Stop() {
	w.Interface.Stop()
	w.cancel()
}

// IsWatchListSemanticsUnSupported tells client-go whether a list may be
// streamed.
func (w *objectWatch) IsWatchListSemanticsUnSupported() bool { return w.lw.noStream }

// Transformer implements cache.TransformingStore: what comes is stripped before
// it is kept anywhere.
func (w *objectWatch) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if o, ok := object.(runtime.Object); ok {
			return w.lw.strip(o), nil
		}
		return object, nil
	}
}

// Add implements cache.ReflectorStore.
func (w *objectWatch) Add(object any) error { return w.set(object) }

// Update implements cache.ReflectorStore.
func (w *objectWatch) Update(object any) error { return w.set(object) }

func (w *objectWatch) set(object any) error {
	key, err := cache.MetaNamespaceKeyFunc(object)
	if err != nil {
		return err
	}
	o := w.lw.strip(object.(runtime.Object))
	w.change(func() { w.objects[key] = o; w.changes++ })
	return nil
}

// Delete implements cache.ReflectorStore.
func (w *objectWatch) Delete(object any) error {
	key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(object)
	if err != nil {
		return err
	}
	w.change(func() { delete(w.objects, key); w.changes++ })
	return nil
}

// Replace implements cache.ReflectorStore.
func (w *objectWatch) Replace(list []any, _ string) error {
	objects := make(map[string]runtime.Object, len(list))
	var errs []string
	for _, object := range list {
		key, err := cache.MetaNamespaceKeyFunc(object)
		if err != nil {
			errs = append(errs, err.Error())
			continue
		}
		objects[key] = w.lw.strip(object.(runtime.Object))
	}
	if len(errs) > 0 {
		return errors.New(strings.Join(errs, "; "))
	}
	w.change(func() { w.objects, w.synced = objects, true; w.changes++ })
	return nil
}

// Resync implements cache.ReflectorStore.
func (w *objectWatch) Resync() error { return nil }
