package metricsync

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

const (
	// retireKeep is how long a removed endpoint's Live waits for the same
	// incarnation to return; as long as requests are in flight, it waits on.
	retireKeep = time.Minute
	// maxGone models that nobody serves any more are remembered: an engine may
	// report other adapters in each page.
	maxGone = 10_000
	// failuresLogged failed scrapes in a row are a change of state.
	failuresLogged = 2
)

// writerState belongs to the writer's goroutine, and to Start before it runs.
type writerState struct {
	sets     map[string]sourceSet
	byAddr   map[netip.AddrPort]*endpoint
	order    []*endpoint // by address
	retired  map[netip.AddrPort]retired
	slots    pool.Slots           // of all Lives above
	gone     map[string]time.Time // models no longer served, and since when
	goneFull bool                 // as logged
	lost     uint64               // faults, as far as was seen to it
	complete bool
	fresh    bool

	seq       uint64
	dirty     bool           // more than readings changed since the last snapshot
	changes   []pool.Change  // of readings, since then
	last      *pool.Snapshot // what they change, nil before the first
	published time.Time
	cost      time.Duration // of building the last snapshot
	due       time.Time     // when tidy has work, zero for never
}

// retired is what is left of an endpoint that was removed.
type retired struct {
	live        *pool.Live
	incarnation string
	at          time.Time
}

// endpointState is the writer's part of an endpoint.
type endpointState struct {
	target    pool.Target
	readiness pool.Readiness
	setAside  pool.SetAside
	aside     bool // as logged
	cause     error
	asleep    bool

	at      int   // in order
	shown   shape // in the last snapshot
	metrics *pool.Metrics

	adapters   adapters
	listed     []string
	listedNone bool // it answered, and lists none
	listedOnce bool // it answered or failed
	noListSaid bool
	labelSaid  bool     // that it does not list the model of its label
	models     []string // all that it serves beside its label

	failures     int // of scrapes, in a row
	failingSince time.Time
	failingSaid  bool
	wasReady     bool
	readySince   time.Time // zero before it was
	said         bool      // readiness was logged once

	ctx        context.Context
	cancel     context.CancelFunc // both loops
	stopScrape context.CancelFunc // nil without a scrape loop
	gen        int
	removed    bool
}

// init takes over what the last writer of the holder left.
func (w *writerState) init(last *pool.Snapshot, now time.Time) {
	w.sets = make(map[string]sourceSet)
	w.byAddr = make(map[netip.AddrPort]*endpoint)
	w.retired = make(map[netip.AddrPort]retired)
	w.gone = make(map[string]time.Time)
	w.seq = last.Seq
	for i := range last.Endpoints {
		e := &last.Endpoints[i]
		w.retired[e.Addr] = retired{e.Live, e.Incarnation, now}
		w.slots.Keep(e.Live.Slot)
	}
	if len(w.retired) > 0 {
		w.dueBy(now.Add(retireKeep))
	}
}

func (w *writerState) dueBy(t time.Time) {
	if w.due.IsZero() || t.Before(w.due) {
		w.due = t
	}
}

// open takes in what callers handed over.
func (s *Syncer) open(m mail, now time.Time) {
	cfg := s.cfg.Load()
	if m.cfg != nil {
		cfg = m.cfg
		s.cfg.Store(cfg)
		for name := range s.sets {
			if !slices.Contains(cfg.Sources, name) {
				delete(s.sets, name)
			}
		}
	}
	for name, set := range m.sets {
		set.delivered = set.delivered || s.sets[name].delivered
		s.sets[name] = set
	}
	targets, complete, fresh := merge(cfg.Sources, s.sets)
	if fresh != s.fresh && s.published != (time.Time{}) {
		if fresh {
			s.logf(levelInfo, "discovery is fresh again")
		} else if complete {
			s.logf(levelWarn, "discovery has only its last good set of endpoints")
		}
	}
	s.complete, s.fresh, s.dirty = complete, fresh, true
	s.replace(targets, now)
	if m.cfg != nil {
		s.dueBy(now) // memory may have become shorter
		for _, e := range s.order {
			s.learn(e, now)
			s.settle(e, now)
			wake(e.scrapeWake)
			wake(e.serveWake)
		}
	}
}

// replace makes the endpoints those of targets, and keeps what stays.
func (s *Syncer) replace(targets []pool.Target, now time.Time) {
	var added, removed, changed int
	keep := make(map[netip.AddrPort]struct{}, len(targets))
	for _, t := range targets {
		keep[t.Addr] = struct{}{}
		e := s.byAddr[t.Addr]
		switch {
		case e == nil:
			s.add(t, now)
			added++
		case e.target.Incarnation != t.Incarnation:
			s.remove(e, now)
			s.add(t, now)
			changed++
		case e.target != t:
			s.relabel(e, t, now)
			changed++
		}
	}
	for addr, e := range s.byAddr {
		if _, ok := keep[addr]; !ok {
			s.remove(e, now)
			removed++
		}
	}
	if added+removed+changed == 0 {
		return
	}
	s.order = s.order[:0:0]
	for _, e := range s.byAddr {
		s.order = append(s.order, e)
	}
	sortByAddr(s.order)
	for i, e := range s.order {
		e.at = i
	}
	order := s.order
	s.endpoints.Store(&order)
	s.logf(levelInfo, "%d endpoints: %s", len(order), describe(added, removed, changed))
}

func (s *Syncer) add(t pool.Target, now time.Time) {
	e := &endpoint{phase: phase(t.Addr), scrapeWake: make(chan struct{}, 1), serveWake: make(chan struct{}, 1)}
	e.target = t
	if r, ok := s.retired[t.Addr]; ok && r.incarnation == t.Incarnation && (r.live.InFlight() > 0 || now.Sub(r.at) < retireKeep) {
		e.live = r.live
		delete(s.retired, t.Addr)
	} else {
		e.live = &pool.Live{Addr: t.Addr.String(), Slot: s.slots.Take()}
	}
	e.stats.Store(&EndpointStats{Addr: t.Addr, Pod: t.Pod})
	e.ctx, e.cancel = context.WithCancel(s.ctx)
	s.byAddr[t.Addr] = e
	s.learn(e, now)
	s.startScrape(e)
	s.wg.Add(1)
	go s.serveLoop(e.ctx, e, t)
}

// startScrape starts the scrape loop that the labels ask for, in place of the
// one before. An unknown engine has none.
func (s *Syncer) startScrape(e *endpoint) {
	if e.stopScrape != nil {
		e.stopScrape()
		e.stopScrape = nil
	}
	e.gen++
	if s.tables.of(e.target.Engine) == nil {
		e.blind.Store(true)
		s.logf(levelWarn, "endpoint %s is routed to but not scored: engine %q is unknown, valid: vllm, sglang, trtllm, xllm", e.name(), e.target.EngineLabel)
		return
	}
	var ctx context.Context
	ctx, e.stopScrape = context.WithCancel(e.ctx)
	s.wg.Add(1)
	go s.scrapeLoop(ctx, e, e.target, e.gen)
}

func (s *Syncer) remove(e *endpoint, now time.Time) {
	e.removed = true
	e.cancel()
	delete(s.byAddr, e.target.Addr)
	if older, ok := s.retired[e.target.Addr]; ok {
		s.slots.Give(older.live.Slot)
	}
	s.retired[e.target.Addr] = retired{e.live, e.target.Incarnation, now}
	s.dueBy(now.Add(retireKeep))
	s.forget(append(slices.Clone(e.models), e.target.Model), nil, now)
}

func (s *Syncer) relabel(e *endpoint, t pool.Target, now time.Time) {
	old := e.target
	e.target = t
	if old.Model != t.Model {
		s.forget([]string{old.Model}, nil, now)
	}
	if old.NotReady != "" && t.NotReady == "" {
		e.setAside.End()
	}
	if old.Engine != t.Engine {
		e.metrics, e.adapters, e.asleep = nil, adapters{}, false
	}
	if old.Engine != t.Engine || old.MetricPort != t.MetricPort || old.Pod != t.Pod {
		s.startScrape(e)
	}
	s.learn(e, now)
	s.settle(e, now)
}

// forget remembers the models of before that are not in after.
func (s *Syncer) forget(before, after []string, now time.Time) {
	memory := s.cfg.Load().ModelMemory
	if memory <= 0 {
		return
	}
	for _, m := range before {
		if m == "" || slices.Contains(after, m) {
			continue
		}
		if _, again := s.gone[m]; !again && len(s.gone) >= maxGone {
			if !s.goneFull {
				s.goneFull = true
				s.logf(levelWarn, "%d models were served within the last %s and are no more: others that go are not remembered, and requests for them are refused as for a model that never was", maxGone, memory)
			}
			continue
		}
		s.gone[m] = now
		s.dueBy(now.Add(memory))
	}
}

// learn sets the models that an endpoint serves, from what is known of it.
func (s *Syncer) learn(e *endpoint, now time.Time) {
	cfg := s.cfg.Load()
	var listed []string
	if cfg.Discover {
		listed = e.listed
	}
	models := cfg.served(e.target.Model, listed, e.adapters.running, e.adapters.waiting)
	if slices.Equal(models, e.models) {
		return
	}
	s.forget(e.models, models, now)
	e.models = models
	s.dirty = true
}

// handle takes in what a loop reports.
func (s *Syncer) handle(ev event, now time.Time) {
	e := ev.e
	if e.removed {
		return
	}
	switch {
	case ev.scrape != nil:
		if ev.gen != e.gen {
			return
		}
		s.scraped(e, ev.scrape, now)
	case ev.probe != nil:
		s.probed(e, ev.probe, now)
	case ev.list != nil:
		s.listed(e, ev.list, now)
	}
	s.settle(e, now)
	if e.shape(s.cfg.Load()) != e.shown {
		s.dirty = true
	}
}

func (s *Syncer) probed(e *endpoint, p *probeResult, now time.Time) {
	if e.cause = p.err; e.cause == nil {
		e.readiness.Answered()
		s.trust(e, p.asked)
	} else {
		e.readiness.Failed()
	}
	if e.readiness.Ready() && e.live.Doubted(now) {
		e.askProbe() // it failed, or there was a fault since: nothing is sent there until it is known
	}
}

// trust ends the doubt in an endpoint that answered. What waits for it is told by
// the snapshot.
func (s *Syncer) trust(e *endpoint, asked time.Time) {
	if e.live.Trust(asked) {
		s.dirty = true
	}
}

func (s *Syncer) scraped(e *endpoint, sc *scrape, now time.Time) {
	if sc.answered && e.target.MetricPort == e.target.Addr.Port() && s.cfg.Load().Health.Path == "" {
		e.readiness.Answered()
		e.cause = nil
	}
	if sc.reason != ScrapeOK {
		if e.failures == 0 {
			e.failingSince = now
		}
		e.failures++
		if e.failures >= failuresLogged && e.wasReady && !e.failingSaid {
			e.failingSaid = true
			s.logf(levelWarn, "endpoint %s: metrics fail since %s ago, routing by live load alone once they are stale: %s: %v",
				e.name(), now.Sub(e.failingSince).Round(time.Millisecond), sc.reason, sc.err)
		}
		return
	}
	if e.failingSaid {
		e.failingSaid = false
		s.logf(levelInfo, "endpoint %s: metrics are back after %s", e.name(), now.Sub(e.failingSince).Round(time.Millisecond))
	}
	e.failures = 0
	e.metrics = sc.metrics
	e.asleep = sc.asleep
	s.changes = append(s.changes, pool.Change{Index: int32(e.at), Metrics: e.metrics})
	if old := &e.adapters; sc.adapters.runningText != old.runningText || sc.adapters.waitingText != old.waitingText {
		e.adapters = sc.adapters
		s.learn(e, now)
	}
}

func (s *Syncer) listed(e *endpoint, r *listResult, now time.Time) {
	e.listedOnce = true
	switch {
	case r.err != nil:
		// What it listed before holds until it says otherwise.
	case r.list.none:
		if !e.noListSaid {
			e.noListSaid = true
			s.logf(levelInfo, "endpoint %s: %s answers %d, so it lists no models", e.name(), modelsPath, r.list.status)
		}
		// A proxy's 404 must not turn an endpoint of one model into one of all.
		e.listedNone = len(e.listed) == 0
	default:
		e.listed = r.list.ids
		e.listedNone = len(r.list.ids) == 0
		if label := e.target.Model; label != "" && len(r.list.ids) > 0 && !slices.Contains(r.list.ids, label) && !e.labelSaid {
			e.labelSaid = true
			s.logf(levelWarn, "endpoint %s: its label says it serves %q, but its %s lists %s: requests for %q go there and may be refused",
				e.name(), label, modelsPath, few(r.list.ids), label)
		}
		s.learn(e, now)
	}
}

// few names what a list begins with.
func few(names []string) string {
	const shown = 8
	if len(names) <= shown {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:shown], ", "), len(names)-shown)
}

// fault takes in a failed request.
func (s *Syncer) fault(f pool.Fault, now time.Time) {
	if lost := s.holder.DroppedFaults(); lost != s.lost { // nobody knows whose
		s.lost = lost
		for _, e := range s.order {
			if e.live.Doubted(now) {
				e.askProbe()
			}
		}
	}
	addr, err := netip.ParseAddrPort(f.Live.Addr)
	if err != nil {
		return
	}
	e := s.byAddr[addr]
	if e == nil || e.live != f.Live {
		return // a former incarnation's
	}
	e.askProbe()
	if f.Kind == pool.FaultReset && e.setAside.Reset(now) {
		e.aside, s.dirty = true, true
		s.dueBy(e.setAside.Until())
		s.logf(levelWarn, "endpoint %s is set aside for %s: it reset 3 requests within 10s", e.name(), e.setAside.Until().Sub(now))
	}
}

// settle follows whether the endpoint is ready and tells its loops.
func (s *Syncer) settle(e *endpoint, now time.Time) {
	ready, why := e.isReady()
	if e.aside && !e.setAside.Active(now) {
		e.aside, s.dirty = false, true
		s.logf(levelInfo, "endpoint %s is no longer set aside", e.name())
	}
	if ready == e.wasReady && (e.said || !ready && !e.readiness.Judged()) {
		return
	}
	e.said = true
	s.dirty = true
	if e.wasReady = ready; ready {
		e.readySince = now
		s.trust(e, now)
		s.logf(levelInfo, "endpoint %s is ready", e.name())
	} else {
		s.logf(levelWarn, "endpoint %s is not ready: %s", e.name(), why)
	}
	e.ready.Store(ready)
	wake(e.serveWake)
	if ready && e.failures > 0 {
		e.askScrape() // the back-off was for an engine that was gone
	}
}

// tidy ends what ran out and finds when the next does.
func (s *Syncer) tidy(now time.Time) {
	s.due = time.Time{}
	for _, e := range s.order {
		if e.aside {
			if s.settle(e, now); e.aside {
				s.dueBy(e.setAside.Until())
			}
		}
	}
	memory := s.cfg.Load().ModelMemory
	for m, at := range s.gone {
		if end := at.Add(memory); now.Before(end) {
			s.dueBy(end)
		} else {
			delete(s.gone, m)
			s.dirty = true
		}
	}
	s.goneFull = s.goneFull && len(s.gone) >= maxGone
	for addr, r := range s.retired {
		switch end := r.at.Add(retireKeep); {
		case now.Before(end):
			s.dueBy(end)
		case r.live.InFlight() > 0:
			s.dueBy(now.Add(retireKeep))
		default:
			s.slots.Give(r.live.Slot)
			delete(s.retired, addr)
		}
	}
}

func (e *endpoint) name() string {
	if e.target.Pod == "" {
		return e.live.Addr
	}
	return e.live.Addr + " (" + e.target.Pod + ")"
}

// isReady returns whether an endpoint may take requests and, if not, why.
func (e *endpoint) isReady() (bool, string) {
	switch {
	case e.target.NotReady != "":
		return false, e.target.NotReady
	case !e.readiness.Ready() && e.cause != nil:
		return false, e.cause.Error()
	case !e.readiness.Ready():
		return false, "has not answered yet"
	case e.asleep:
		return false, "the engine is asleep"
	default:
		return true, ""
	}
}

// shape is what a snapshot's index depends on, beside targets and models.
type shape struct {
	judged, ready, anyModel bool
	why                     string
	since, until            time.Time // of the setting-aside
}

func (e *endpoint) shape(cfg *Config) shape {
	asked := e.target.Model != "" || !cfg.Discover || e.listedOnce
	var out shape
	out.ready, out.why = e.isReady()
	// One that has to be asked first is judged when it was: until then the
	// requests of a cold start wait for what it serves.
	out.judged = e.readiness.Judged() && (asked || !out.ready)
	out.anyModel = e.target.Model == "" && (!cfg.Discover || e.listedNone)
	if e.aside {
		out.since, out.until = e.setAside.Since(), e.setAside.Until()
	}
	return out
}

// view is the endpoint as the snapshot shows it.
func (e *endpoint) view(cfg *Config) pool.Endpoint {
	e.shown = e.shape(cfg)
	return pool.Endpoint{
		Target: e.target, Live: e.live, Models: e.models,
		Judged: e.shown.judged, Ready: e.shown.ready, Why: e.shown.why, AnyModel: e.shown.anyModel,
		ReadySince:    e.readySince,
		SetAsideSince: e.shown.since, SetAsideUntil: e.shown.until,
	}
}
