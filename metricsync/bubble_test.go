package metricsync

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "-serve-sample" {
		serveSample(os.Args[2])
	}
	goleak.VerifyTestMain(m)
}

// engine is a simulated engine in memory. Fields are set between two waits of
// the bubble, and under mu because its handlers run meanwhile.
type engine struct {
	conns chan net.Conn
	done  chan struct{}

	mu     sync.Mutex
	down   bool
	page   string
	status int    // of the page, 0 is 200
	models string // JSON; "" is 404
	health int    // status
	hits   map[string]int
	dials  int
	open   []net.Conn
}

// crash ends the engine's process.
func (e *engine) crash() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.down = true
	for _, c := range e.open {
		_ = c.Close()
	}
	e.open = nil
}

func (e *engine) set(f func()) { e.mu.Lock(); defer e.mu.Unlock(); f() }

func (e *engine) hit(path string) int { e.mu.Lock(); defer e.mu.Unlock(); return e.hits[path] }

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.hits[r.URL.Path]++
	switch r.URL.Path {
	case "/v1/models":
		if e.models == "" {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = w.Write([]byte(e.models))
	case "/health":
		w.WriteHeader(max(e.health, http.StatusOK))
	default:
		w.WriteHeader(max(e.status, http.StatusOK))
		_, _ = w.Write([]byte(e.page))
	}
}

func (e *engine) Accept() (net.Conn, error) {
	select {
	case c := <-e.conns:
		return c, nil
	case <-e.done:
		return nil, net.ErrClosed
	}
}
func (e *engine) Close() error   { close(e.done); return nil }
func (e *engine) Addr() net.Addr { return &net.TCPAddr{} }

// world is a pool in a bubble of fake time: engines, a Syncer, what it said.
type world struct {
	*testing.T
	holder  *pool.Holder
	syncer  *Syncer
	engines map[string]*engine

	mu        sync.Mutex
	lines     []string
	published int
	first     func(*pool.Snapshot) // is called with the next snapshot, nil for nothing
}

// bubble runs f in fake time with engines at 10.0.0.1:8000 and so on.
func bubble(t *testing.T, engines int, cfg Config, f func(w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t, holder: pool.NewHolder(), engines: map[string]*engine{}}
		for i := range engines {
			e := &engine{conns: make(chan net.Conn), done: make(chan struct{}), page: goodPage, hits: map[string]int{}}
			w.engines[addrOf(i+1)] = e
			srv := &http.Server{Handler: e}
			go func() { _ = srv.Serve(e) }()
			defer srv.Close()
		}
		if cfg.Sources == nil {
			cfg.Sources = []string{"static"}
		}
		w.syncer = w.newSyncer(cfg)
		defer func() { w.syncer.Stop() }()
		f(w)
	})
}

func addrOf(i int) string { return fmt.Sprintf("10.0.0.%d:8000", i) }

func (w *world) newSyncer(cfg Config) *Syncer {
	return New(Options{
		Name: "p", Holder: w.holder, Dial: w.dial,
		Log: func(_ slog.Level, msg string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.lines = append(w.lines, msg)
		},
		OnPublish: func(s *pool.Snapshot) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.published++
			if w.first != nil {
				w.first(s)
				w.first = nil
			}
			if s != w.holder.Load() {
				w.Error("OnPublish is told of what the holder has not")
			}
		},
	}, cfg)
}

func (w *world) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	e := w.engines[addr]
	if e != nil {
		e.mu.Lock()
		e.dials++
		if e.down {
			e.mu.Unlock()
			e = nil
		} else {
			e.mu.Unlock()
		}
	}
	if e == nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	ours, theirs := net.Pipe()
	e.set(func() { e.open = append(e.open, theirs) })
	select {
	case e.conns <- theirs:
		return ours, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// begin starts the syncer with the engines as static targets, each changed by
// edit, and lets it settle.
func (w *world) begin(edit ...func(*pool.Target)) {
	w.Helper()
	w.targets(edit...)
	w.syncer.Start()
	w.settle()
}

func (w *world) targets(edit ...func(*pool.Target)) {
	w.Helper()
	var all []pool.Target
	for i := range w.engines { // any order
		one := target(w, i)
		for _, f := range edit {
			f(&one)
		}
		all = append(all, one)
	}
	w.syncer.SetTargets("static", all, Complete)
}

// settle waits until all is quiet, and what is published late is out.
func (w *world) settle() {
	synctest.Wait()
	w.pass(readingsGap + publishGap)
}

// pass lets fake time pass.
func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// show renders the snapshot's endpoints: readiness, reading, models.
func (w *world) show() string {
	s := w.holder.Load()
	var parts []string
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		state := "down"
		if e.Ready {
			state = "up"
		}
		if e.Passed {
			state += " aside"
		}
		reading := "-"
		if v, ok := s.Readings(pool.NumRequestsRunning, time.Now()).At(int32(i)); ok {
			reading = fmt.Sprint(v)
		}
		models := strings.Join(append([]string{e.Model}, e.Models...), ",")
		if e.AnyModel {
			models = "*"
		}
		parts = append(parts, state+" "+reading+" "+models)
	}
	return strings.Join(parts, "; ")
}

func (w *world) want(shown string) {
	w.Helper()
	if got := w.show(); got != shown {
		w.Errorf("got %q, want %q", got, shown)
	}
}

// said checks the log lines since the last call, each by a part.
func (w *world) said(parts ...string) {
	w.Helper()
	w.mu.Lock()
	lines := w.lines
	w.lines = nil
	w.mu.Unlock()
	for i := range max(len(lines), len(parts)) {
		if i >= len(lines) || i >= len(parts) || !strings.Contains(lines[i], parts[i]) {
			w.Errorf("logged %q, want %q", lines, parts)
			return
		}
	}
}

func (w *world) snapshots() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.published
}

func (w *world) live(i int) *pool.Live {
	w.Helper()
	e := w.holder.Load().ByKey(addrOf(i))
	if e == nil {
		w.Fatalf("%s is not in the snapshot", addrOf(i))
	}
	return e.Live
}

func labelled(name string) func(*pool.Target) { return func(t *pool.Target) { t.Model = name } }
