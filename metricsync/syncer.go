// Package metricsync turns what discovery found into the snapshot that
// requests read. A Syncer runs a loop for each endpoint, which reads its
// metrics, follows whether it answers and asks which models it serves; one
// goroutine, the writer, takes in what the loops report and publishes.
package metricsync

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

const (
	levelInfo  = slog.LevelInfo
	levelWarn  = slog.LevelWarn
	levelError = slog.LevelError

	// publishGap is the least time between two snapshots under load. Where
	// building one takes long the gap grows to gapPerCost times that, which
	// bounds the writer's share of a core to 2 %, but not over maxPublishGap.
	publishGap = 10 * time.Millisecond
	// readingsGap bounds the gap where readings alone changed: a twentieth of the
	// interval at which they change.
	readingsGap   = 50 * time.Millisecond
	gapPerCost    = 50
	maxPublishGap = 100 * time.Millisecond
	// missingGap is how often ModelMissing may ask the endpoints.
	missingGap = 5 * time.Second
	// eventQueue lets loops go on while the writer publishes.
	eventQueue = 256
)

// Options are what a Syncer can't change later.
type Options struct {
	// Name of the pool, for log lines.
	Name string
	// Holder gets the snapshots. No other Syncer may run on it; one that ran
	// before leaves its Lives and the sequence to this one.
	Holder *pool.Holder
	// Log gets one line per change of state; nil for none. Any goroutine calls it.
	Log func(level slog.Level, msg string)
	// Fault is told of each panic that was caught, by any goroutine; nil leaves it
	// to Log.
	Fault func(cause any, stack []byte)
	// OnPublish, if set, is called after each snapshot, by Start for the first
	// and by the writer's goroutine for all others. It must not block, nor call
	// Start or Stop.
	OnPublish func(*pool.Snapshot)
	// Dial replaces TCP in tests.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Syncer is the one writer of a pool's snapshot. All methods are safe for
// concurrent use, and none but Stop waits for anything.
type Syncer struct {
	// Immutable.
	name      string
	holder    *pool.Holder
	log       func(slog.Level, string)
	onFault   func(cause any, stack []byte)
	onPublish func(*pool.Snapshot)
	dial      dialFunc
	client    *http.Client
	transport *http.Transport
	tables    *tables
	origin    time.Time
	events    chan event
	mailWake  chan struct{}
	missing   chan struct{}
	ctx       context.Context
	cancel    context.CancelFunc

	// Shared, each safe by itself.
	cfg         atomic.Pointer[Config]
	counters    counters
	credentials credentials
	parsers     [len(tables{})]sync.Pool // of *parser, by engine
	lastMissing atomic.Int64             // since origin, plus missingGap
	endpoints   atomic.Pointer[[]*endpoint]
	wg          sync.WaitGroup

	// mu protects what callers hand over.
	mu   sync.Mutex
	mail mail

	// life is held by Start and Stop and protects whether they ran.
	life             sync.Mutex
	started, stopped bool

	writerState
}

// mail is what came since the writer last looked; later replaces earlier.
type mail struct {
	cfg  *Config
	sets map[string]sourceSet
}

// New returns a Syncer that does nothing until Start.
func New(o Options, cfg Config) *Syncer {
	s := &Syncer{
		name: o.Name, holder: o.Holder, log: o.Log, onFault: o.Fault, onPublish: o.OnPublish, dial: o.Dial,
		tables: newTables(), origin: time.Now(),
		events: make(chan event, eventQueue), mailWake: make(chan struct{}, 1), missing: make(chan struct{}, 1),
	}
	if s.dial == nil {
		s.dial = (&net.Dialer{}).DialContext
	}
	s.client, s.transport = newClient(s.secured)
	s.credentials.log = func(format string, args ...any) { s.logf(levelWarn, format, args...) }
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.cfg.Store(cfg.withDefaults())
	s.endpoints.Store(new([]*endpoint))
	s.writerState.init(s.holder.Load(), s.origin)
	return s
}

// Start publishes a snapshot of what SetTargets delivered so far and starts
// the loops. A second call does nothing.
func (s *Syncer) Start() {
	s.life.Lock()
	defer s.life.Unlock()
	if s.started || s.stopped {
		return
	}
	s.started = true
	s.guard(func() {
		now := time.Now()
		s.open(s.takeMail(), now)
		s.publish(now)
	})
	s.wg.Add(1)
	go s.write()
}

// Stop ends all loops and waits for them. The last snapshot stays. A second
// call, and one without Start, only waits.
func (s *Syncer) Stop() {
	s.life.Lock()
	defer s.life.Unlock()
	s.stopped = true
	s.cancel()
	s.wg.Wait()
	s.transport.CloseIdleConnections()
}

func (s *Syncer) takeMail() mail {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.mail
	s.mail = mail{}
	return m
}

// SetTargets replaces the full set of one source. The Syncer owns targets from
// here on.
func (s *Syncer) SetTargets(source string, targets []pool.Target, state State) {
	s.mu.Lock()
	if s.mail.sets == nil {
		s.mail.sets = make(map[string]sourceSet)
	}
	// A complete set that a last-good one overtakes was delivered all the same.
	before := s.mail.sets[source]
	s.mail.sets[source] = sourceSet{targets: targets, state: state, delivered: before.delivered || state == Complete}
	s.mu.Unlock()
	wake(s.mailWake)
}

// Apply changes the config. Endpoints, their live load and their readings stay.
func (s *Syncer) Apply(cfg Config) {
	s.mu.Lock()
	s.mail.cfg = cfg.withDefaults()
	s.mu.Unlock()
	wake(s.mailWake)
}

// ModelMissing asks all ready endpoints for their models, at most every 5 s:
// a request named one that no endpoint serves. It is for the request path and
// costs a clock reading and an atomic load.
func (s *Syncer) ModelMissing() {
	if !s.cfg.Load().Discover {
		return
	}
	now := int64(time.Since(s.origin) + missingGap)
	last := s.lastMissing.Load()
	if now-last >= int64(missingGap) && s.lastMissing.CompareAndSwap(last, now) {
		wake(s.missing)
	}
}

// Stats returns the counters.
func (s *Syncer) Stats() Stats { return s.counters.stats() }

// Endpoints yields the scrape state of each endpoint, in order of address.
func (s *Syncer) Endpoints(yield func(EndpointStats) bool) {
	for _, e := range *s.endpoints.Load() {
		if st := e.stats.Load(); !yield(*st) {
			return
		}
	}
}

func (s *Syncer) logf(level slog.Level, format string, args ...any) {
	if s.log != nil {
		s.log(level, "pool "+s.name+": "+fmt.Sprintf(format, args...))
	}
}

// write is the writer.
func (s *Syncer) write() {
	defer s.wg.Done()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for s.ctx.Err() == nil {
		s.guard(func() {
			select {
			case <-s.ctx.Done():
				return
			case <-s.mailWake:
				s.open(s.takeMail(), time.Now())
			case ev := <-s.events:
				s.handle(ev, time.Now())
				s.drainEvents()
			case f := <-s.holder.Faults():
				s.fault(f, time.Now())
			case <-s.missing:
				for _, e := range s.order {
					e.askList()
				}
			case <-timer.C:
			}
		})
		s.guard(func() { timer.Reset(s.turn(time.Now())) })
	}
}

// drainEvents takes in what else has come: results come many at a time.
func (s *Syncer) drainEvents() {
	for range eventQueue {
		select {
		case ev := <-s.events:
			s.handle(ev, time.Now())
		default:
			return
		}
	}
}

// turn publishes and tidies what is due and returns how long nothing else is.
func (s *Syncer) turn(now time.Time) time.Duration {
	if !s.due.IsZero() && !now.Before(s.due) {
		s.tidy(now)
	}
	wait := time.Hour
	if !s.due.IsZero() {
		wait = min(wait, s.due.Sub(now))
	}
	if s.dirty || len(s.changes) > 0 {
		gap := min(max(publishGap, gapPerCost*s.cost), maxPublishGap)
		if !s.dirty {
			gap = max(gap, min(s.cfg.Load().Interval/20, readingsGap))
		}
		if rest := s.published.Add(gap).Sub(now); rest > 0 {
			return min(wait, rest)
		}
		s.publish(now)
	}
	return wait
}

// guard keeps a panic from ending Envoy. What f had begun stays as it is: the
// next event of an endpoint sets its state anew.
func (s *Syncer) guard(f func()) {
	defer func() {
		if r := recover(); r != nil {
			s.panicked(r)
		}
	}()
	f()
}

// publish builds the snapshot and hands it out. Where only readings changed, most
// of the last one is in it.
func (s *Syncer) publish(now time.Time) {
	s.seq++
	var snap *pool.Snapshot
	if !s.dirty && s.last != nil {
		snap = s.last.WithReadings(now, s.seq, s.changes)
	} else {
		snap = s.build(now)
	}
	clear(s.changes) // else they keep readings alive
	s.dirty, s.changes, s.published, s.last = false, s.changes[:0], now, snap
	s.holder.Publish(snap)
	s.cost = time.Since(now)
	s.counters.published.Add(1)
	s.counters.publishNanos.Add(int64(s.cost))
	if s.onPublish != nil {
		s.onPublish(snap)
	}
}

func (s *Syncer) build(now time.Time) *pool.Snapshot {
	cfg := s.cfg.Load()
	in := pool.Input{
		Now: now, Seq: s.seq, Complete: s.complete, Fresh: s.fresh, StaleAfter: cfg.StaleAfter,
		Endpoints: make([]pool.Endpoint, len(s.order)), Metrics: make([]*pool.Metrics, len(s.order)), Known: s.known(cfg),
	}
	for i, e := range s.order {
		in.Endpoints[i], in.Metrics[i] = e.view(cfg), e.metrics
	}
	return pool.NewSnapshot(in)
}

// known lists the models that exist although no endpoint may serve them.
func (s *Syncer) known(cfg *Config) []string {
	names := cfg.knownNames()
	for m := range s.gone {
		names = append(names, m)
	}
	return names
}

// describe counts a change of the set for a log line.
func describe(added, removed, relabelled int) string {
	var parts []string
	for _, p := range []struct {
		n    int
		what string
	}{{added, "added"}, {removed, "removed"}, {relabelled, "changed"}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	return strings.Join(parts, ", ")
}

func sortByAddr(order []*endpoint) {
	slices.SortFunc(order, func(a, b *endpoint) int { return a.target.Addr.Compare(b.target.Addr) })
}
