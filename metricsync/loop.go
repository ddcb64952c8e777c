package metricsync

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// endpoint is one incarnation of one address, with its two goroutines: one
// reads the metrics port, the other asks the serving port, so that a page that
// hangs hides no dead engine.
type endpoint struct {
	// Immutable.
	live  *pool.Live
	phase uint64

	// The signals to the two goroutines: a flag says what, then a channel of
	// one slot wakes.
	scrapeWake, serveWake           chan struct{}
	wantScrape, wantProbe, wantList atomic.Bool
	ready                           atomic.Bool // as the writer sees it
	blind                           atomic.Bool // scrapes fail, or there are none

	// stats is replaced by the scrape goroutine and read by anyone.
	stats atomic.Pointer[EndpointStats]

	endpointState
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (e *endpoint) askScrape() { e.wantScrape.Store(true); wake(e.scrapeWake) }
func (e *endpoint) askProbe()  { e.wantProbe.Store(true); wake(e.serveWake) }
func (e *endpoint) askList()   { e.wantList.Store(true); wake(e.serveWake) }

// event is a result on its way to the writer; one of the pointers is set.
type event struct {
	e      *endpoint
	gen    int // of the scrape loop, for scrape
	scrape *scrape
	probe  *probeResult
	list   *listResult
}

type probeResult struct {
	asked time.Time
	err   error
}

type listResult struct {
	list modelList
	err  error
}

// send hands an event to the writer, unless the loop is ended.
func (s *Syncer) send(ctx context.Context, ev event) {
	select {
	case s.events <- ev:
	case <-ctx.Done():
	}
}

// scrapeLoop reads the metrics of e until ctx ends: at once, then on the grid
// of its phase, more and more rarely while it fails.
func (s *Syncer) scrapeLoop(ctx context.Context, e *endpoint, target pool.Target, gen int) {
	defer s.wg.Done()
	l := newScraper(s, e, target)
	defer func() { l.fetch.client.close() }()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for due := true; ; {
		if due {
			out := l.scrape(ctx)
			if ctx.Err() != nil {
				return
			}
			l.note(out)
			s.send(ctx, event{e: e, gen: gen, scrape: out})
		}
		since := time.Since(s.origin)
		timer.Reset(nextScrape(since, s.cfg.Load(), e.phase, l.failures) - since)
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			due = true
		case <-e.scrapeWake: // asked for, or the config changed
			due = e.wantScrape.Swap(false)
		}
	}
}

// maxKept is the largest page whose parser is used again: its memory grows with
// the pages that it reads.
const maxKept = 4 << 20

// scraper is the state of one scrape loop.
type scraper struct {
	s        *Syncer
	e        *endpoint
	target   pool.Target
	table    *table
	path     int // of table.paths, the last that was not 404
	failures int // in a row
	fetch    fetch
	buckets  bool // of the page are wanted
	adapters adapters
	history  history
	stats    EndpointStats
}

func newScraper(s *Syncer, e *endpoint, target pool.Target) *scraper {
	l := &scraper{s: s, e: e, target: target, table: s.tables.of(target.Engine)}
	addr := netip.AddrPortFrom(target.Addr.Addr(), target.MetricPort)
	l.fetch.client = &client{dial: s.secured, address: addr.String()}
	l.fetch.table, l.fetch.parser = l.table, l.parser
	return l
}

// parser returns one that no other loop uses, for the next page.
func (l *scraper) parser() *parser {
	p, ok := l.s.parsers[l.target.Engine].Get().(*parser)
	if !ok {
		p = newParser(l.table)
	}
	p.noBuckets = !l.buckets
	return p
}

func (l *scraper) scrape(ctx context.Context) (out *scrape) {
	cfg := l.s.cfg.Load()
	start := time.Now()
	out = &scrape{}
	defer func() {
		if r := recover(); r != nil {
			l.s.panicked(r)
			l.fetch.client.close()
			*out = scrape{reason: ScrapeInternal, err: fmt.Errorf("panic: %v", r)}
		}
		if out.taken.IsZero() {
			out.taken = start.Add(time.Since(start))
		}
	}()
	f := &l.fetch
	f.client.use(cfg.Access.TLS)
	f.connect, f.timeout, f.until, f.limit = cfg.ConnectTimeout, cfg.Timeout, start.Add(cfg.Timeout), cfg.MaxBytes
	f.idle = cfg.Interval
	var err error
	if f.headers, err = l.s.headers(cfg); err != nil {
		*out = scrape{reason: ScrapeConnect, err: err}
		return out
	}
	l.buckets = l.history.due(start)
	var p *parser
	for range l.table.paths {
		f.path = l.table.paths[l.path]
		*out, p = f.page(ctx)
		if e, ok := errors.AsType[statusError](out.err); !ok || e.status != http.StatusNotFound {
			break
		}
		l.path = (l.path + 1) % len(l.table.paths)
	}
	out.everywhere(l.table.paths)
	switch out.reason {
	case ScrapeOK:
		l.adapters = p.reading.adapters(l.adapters)
		l.history.observe(&p.reading, l.buckets, out.taken)
		out.metrics = p.columns(&l.history, l.adapters, out.taken)
		out.asleep, out.adapters = p.reading.asleep(), l.adapters
	case ScrapeConnect:
		if l.target.MetricPort != l.target.Addr.Port() {
			out.err = fmt.Errorf("%w; %s says on which port the metrics are", out.err, pool.LabelMetricPort)
		}
	}
	if p != nil && out.bytes <= maxKept { // and not after a panic
		l.s.parsers[l.target.Engine].Put(p)
	}
	return out
}

// note keeps the loop's own books of a scrape.
func (l *scraper) note(out *scrape) {
	l.s.counters.scraped(out)
	if out.reason == ScrapeOK {
		l.failures = 0
		l.stats.LastGood = out.taken
	} else {
		l.failures++
		l.stats.LastError, l.stats.LastReason, l.stats.LastErrorAt = out.err.Error(), out.reason, out.taken
	}
	l.stats.Addr, l.stats.Pod = l.target.Addr, l.target.Pod
	l.stats.Failures = l.failures
	stats := l.stats
	l.e.stats.Store(&stats)

	if failing := l.failures > 0; l.e.blind.Swap(failing) != failing && failing {
		l.e.askProbe()
	}
}

// serveLoop asks the serving port of e until ctx ends: whether it is there,
// and for its models.
func (s *Syncer) serveLoop(ctx context.Context, e *endpoint, t pool.Target) {
	defer s.wg.Done()
	var p probeState
	var l listState
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		cfg := s.cfg.Load()
		now := time.Now()
		if !e.wantProbe.Load() {
			p.asked = time.Time{}
		} else if p.asked.IsZero() {
			p.asked = now
		}
		p.ready, p.blind = e.ready.Load(), e.blind.Load()
		l.asked = e.wantList.Load()
		if l.ready = p.ready; !l.ready {
			l.last, l.failed = time.Time{}, false
		}
		probeAt, probing := nextProbe(p, cfg)
		listAt, listing := nextList(l, cfg, s.origin, e.phase)
		switch {
		case probing && !probeAt.After(now):
			e.wantProbe.Store(false)
			p.asked = time.Time{}
			asked := time.Now() // after that: a fault that this probe says nothing of asks for another
			err := s.probe(ctx, cfg, t)
			if ctx.Err() != nil {
				return
			}
			s.counters.probes.count(err)
			p.last, p.failed = time.Now(), err != nil
			s.send(ctx, event{e: e, probe: &probeResult{asked, err}})
			continue
		case listing && !listAt.After(now):
			e.wantList.Store(false)
			list, err := s.list(ctx, cfg, t)
			if ctx.Err() != nil {
				return
			}
			s.counters.lists.count(err)
			l.last, l.failed = time.Now(), err != nil
			s.send(ctx, event{e: e, list: &listResult{list, err}})
			continue
		}
		var tick <-chan time.Time
		if probing || listing {
			next := probeAt
			if !probing || listing && listAt.Before(probeAt) {
				next = listAt
			}
			timer.Reset(next.Sub(now))
			tick = timer.C
		}
		select {
		case <-ctx.Done():
			return
		case <-tick:
		case <-e.serveWake:
		}
	}
}

func (s *Syncer) probe(ctx context.Context, cfg *Config, t pool.Target) (err error) {
	defer s.caught(&err)
	timeout := cfg.Timeout
	if cfg.Health.Path != "" {
		timeout = cfg.Health.Timeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return s.knock(ctx, cfg, t.Addr)
}

func (s *Syncer) list(ctx context.Context, cfg *Config, t pool.Target) (list modelList, err error) {
	defer s.caught(&err)
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	return s.fetchModels(ctx, cfg, t.Addr)
}

// caught makes a panic an error.
func (s *Syncer) caught(err *error) {
	if r := recover(); r != nil {
		s.panicked(r)
		*err = fmt.Errorf("panic: %v", r)
	}
}

func (s *Syncer) panicked(r any) {
	s.counters.panics.Add(1)
	if s.onFault != nil {
		s.onFault(r, debug.Stack())
		return
	}
	s.logf(levelError, "panic: %v\n%s", r, debug.Stack())
}
