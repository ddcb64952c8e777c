package filter

import (
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/pool"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// golden compares with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update rewrites it); got:\n%s", path, got)
	}
}

// clock is a clock that only tests move.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// lines is a log.
type lines struct {
	mu  sync.Mutex
	all []string
	new chan struct{} // size 1: a line came
}

func newLines() *lines { return &lines{new: make(chan struct{}, 1)} }

func (l *lines) write(level slog.Level, message string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, level.String()+" "+message)
	select {
	case l.new <- struct{}{}:
	default:
	}
}

// count returns how many lines contain text.
func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.all {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.all, "\n")
}

// wait waits for the nth line that contains text.
func (l *lines) wait(t *testing.T, n int, text string) {
	t.Helper()
	for deadline := time.After(30 * time.Second); l.count(text) < n; {
		select {
		case <-l.new:
		case <-deadline:
			t.Fatalf("no %d lines with %q in:\n%s", n, text, l)
		}
	}
}

// world is a runtime in which nothing runs: tests publish snapshots and move
// the clock.
type world struct {
	*Runtime
	gen   *Generation
	clock *clock
	log   *lines
}

func newWorld(tb testing.TB, yaml string) *world {
	tb.Helper()
	w := &world{clock: &clock{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}, log: newLines()}
	w.Runtime = NewRuntime(Options{Validate: true, Log: w.log.write})
	w.now = w.clock.Now
	w.room = flowcontrol.NewRoom(maxWaiting, 1<<30, w.clock.Now)
	if yaml == "" || !strings.Contains(yaml, "pools:") {
		yaml += "\npools: {default: {static: []}, other: {static: []}}"
	}
	gen, err := w.Load([]byte(yaml))
	if err != nil {
		tb.Fatal(err)
	}
	w.gen = gen
	return w
}

func (w *world) pool(name string) *Pool { return w.gen.settings.Load().pools[name] }

// publish gives a pool its endpoints, as a syncer does.
func (w *world) publish(name string, endpoints ...pool.Endpoint) *pool.Snapshot {
	return w.publishInput(name, pool.Input{Complete: true, Fresh: true, Endpoints: endpoints})
}

func (w *world) publishInput(name string, in pool.Input) *pool.Snapshot {
	p := w.pool(name)
	in.Now, in.Seq, in.StaleAfter = w.now(), p.holder.Load().Seq+1, 5*time.Second
	s := pool.NewSnapshot(in)
	p.holder.Publish(s)
	p.published(s)
	return s
}

// ep makes a ready endpoint 10.0.0.n:8000 that serves models, the first by its
// label.
func ep(n byte, models ...string) pool.Endpoint {
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, n}), 8000)
	e := pool.Endpoint{
		Target: pool.Target{Addr: addr, Pod: fmt.Sprintf("pod-%d", n)}, Live: &pool.Live{Addr: addr.String(), Slot: int(n)},
		Judged: true, Ready: true,
	}
	if len(models) > 0 {
		e.Model, e.Models = models[0], models[1:]
	} else {
		e.AnyModel = true
	}
	return e
}

func unjudged(e pool.Endpoint) pool.Endpoint { e.Judged, e.Ready = false, false; return e }

func notReady(e pool.Endpoint) pool.Endpoint { e.Ready = false; return e }

// host is a door with one worker: the test, which takes the posts.
type host struct {
	prepared int
	onWait   func() // nil for nothing
	posts    chan struct{}
	metadata map[string]string // by namespace and key, with a space between
	hint     []string          // nil for none
	late     bool              // it ends requests only when their engine sends something
	evicts   atomic.Int32      // posted
}

func newHost() *host { return &host{posts: make(chan struct{}, 4)} }

func (h *host) Metadata(namespace, key string) string { return h.metadata[namespace+" "+key] }

func (h *host) SubsetHint() ([]string, bool) { return h.hint, h.hint != nil }

func (h *host) PrepareWait() {
	h.prepared++
	if h.onWait != nil {
		h.onWait()
	}
}

func (h *host) Evictable(streams bool) bool { return streams || !h.late }
func (h *host) PostEvict()                  { h.evicts.Add(1) }

func (h *host) Post() { h.posts <- struct{}{} }

func (h *host) posted() bool {
	select {
	case <-h.posts:
		return true
	default:
		return false
	}
}

// stream is a request under test.
type stream struct {
	Request
	*host
	v Verdict
}

func (w *world) stream() *stream {
	s := &stream{host: newHost()}
	s.Init(s.host, w.gen)
	return s
}

func head(pairs ...string) *Head {
	h := new(Head)
	h.Reset()
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}

func post(path string, pairs ...string) *Head {
	return head(append([]string{":method", "POST", ":path", path, "content-type", "application/json"}, pairs...)...)
}

const (
	chatPath = "/v1/chat/completions"
	chatBody = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
)

// chat sends a whole request: headers, then body.
func (s *stream) chat(t testing.TB, body string, pairs ...string) *Verdict {
	t.Helper()
	return s.send(t, post(chatPath, pairs...), nil, body)
}

func (s *stream) send(t testing.TB, h *Head, route *Route, body string) *Verdict {
	t.Helper()
	s.Headers(h, false, route, &s.v)
	if s.v.Action == NeedBody {
		s.Body([][]byte{[]byte(body)}, &s.v)
	}
	return &s.v
}

func (s *stream) get(pairs ...string) *Verdict {
	s.Headers(head(append([]string{":method", "GET", ":path", "/version"}, pairs...)...), true, nil, &s.v)
	return &s.v
}

func (s *stream) finish(end End) *Verdict {
	s.Finish(end, &s.v)
	return &s.v
}

func (a Action) String() string { return []string{"continue", "need body", "wait", "reply"}[a] }

func (v *Verdict) meta(key string) string {
	for _, f := range v.Metadata {
		if f.Key == key {
			return f.Text
		}
	}
	return ""
}

func (v *Verdict) replyHeader(name string) string {
	for _, h := range v.Reply.Headers {
		if h.Key == name {
			return h.Value
		}
	}
	return ""
}

// show is a verdict without its times and chances.
func show(v *Verdict) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", v.Action)
	if v.BodyLimit != 0 {
		fmt.Fprintf(&b, " %d", v.BodyLimit)
	}
	if len(v.Remove) > 0 {
		fmt.Fprintf(&b, " remove=%s", strings.Join(slices.Sorted(slices.Values(v.Remove)), ","))
	}
	if v.Destination != "" {
		fmt.Fprintf(&b, " to=%s", v.Destination)
	}
	for _, f := range v.Metadata {
		if f.Text != "" {
			fmt.Fprintf(&b, " %s=%s", f.Key, f.Text)
		}
	}
	for _, h := range v.ResponseHeaders {
		fmt.Fprintf(&b, " +%s:%s", h.Key, h.Value)
	}
	if v.Action == Reply {
		fmt.Fprintf(&b, " status=%d details=%s", v.Reply.Status, v.Reply.Details)
		for _, h := range v.Reply.Headers {
			value := h.Value
			if h.Key == "retry-after" {
				value = "N"
			}
			fmt.Fprintf(&b, " <%s:%s>", h.Key, value)
		}
		if v.Reply.GRPC != 0 {
			fmt.Fprintf(&b, " grpc=%d %q", v.Reply.GRPC, v.Reply.Message)
		}
		fmt.Fprintf(&b, " %s", v.Reply.Body)
	}
	return b.String()
}

// load is the sum of the live load of a pool's endpoints.
func load(p *Pool) (inFlight int64) {
	s := p.holder.Load()
	for i := range s.Endpoints {
		inFlight += s.Endpoints[i].Live.InFlight()
	}
	return inFlight
}

// counterValue reads a counter of the registry by name and label values.
func (w *world) counterValue(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	return metricValue(t, w.Runtime, name, labels...)
}

func metricValue(t testing.TB, rt *Runtime, name string, labels ...string) float64 {
	t.Helper()
	families, err := rt.metrics.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			for i := 0; i < len(labels); i += 2 {
				if !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool {
					return l.GetName() == labels[i] && l.GetValue() == labels[i+1]
				}) {
					continue series
				}
			}
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return 0
}

func mustAddr(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// borrowed makes a string of memory that will change, as a door does.
func borrowed(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

func metricOf(c prometheus.Counter) float64 {
	var m dto.Metric
	_ = c.Write(&m) // in memory
	return m.GetCounter().GetValue()
}

// newRuntime returns a runtime that runs, until the test's end.
func newRuntime(t testing.TB) (*Runtime, *lines) {
	log := newLines()
	rt := NewRuntime(Options{Log: log.write, Linger: time.Millisecond})
	t.Cleanup(rt.Stop)
	return rt, log
}

// eventually waits for what no event tells.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
