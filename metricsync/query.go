package metricsync

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/common/model"

	"github.com/shuntproxy/shunt/internal/pool"
)

const (
	// minQueryInterval is the floor of QueryConfig.Interval.
	minQueryInterval = 100 * time.Millisecond
	// queriesAtOnce bounds what one round asks of a server at a time.
	queriesAtOnce = 4
)

// QueryConfig is how a Prometheus server is asked. It is not written to once
// handed over. The zero value asks none.
type QueryConfig struct {
	// URL of the server, before /api/v1; "" for none.
	URL string
	// Interval between two rounds, one query each per metric; 15 s, and below
	// 100 ms it is 100 ms. Readings end two intervals and a timeout after they
	// were asked for.
	Interval time.Duration
	// Timeout of one query; 2 s.
	Timeout time.Duration
	// Selector is matchers for all series, such as `job="pods"`, or "".
	Selector string
	// InstanceLabel holds ip:port of an endpoint's metrics page, or its pod's
	// name; "instance". ModelLabel holds the model; "model_name".
	InstanceLabel, ModelLabel string
	// TLS is used where URL is https.
	TLS QueryTLS
	// Username and the file with its password, for basic authentication.
	Username, PasswordFile string
	// BearerTokenFile holds a token. All files are read anew for each round.
	BearerTokenFile string
}

// QueryTLS is how the server is known, and this client to it. All files are
// PEM.
type QueryTLS struct {
	CAFile, CertFile, KeyFile string
	// ServerName is the name in the server's certificate, where it is not the
	// URL's.
	ServerName         string
	InsecureSkipVerify bool
}

func (c QueryConfig) withDefaults() *QueryConfig {
	if c.Interval <= 0 {
		c.Interval = 15 * time.Second
	}
	c.Interval = max(c.Interval, minQueryInterval)
	if c.Timeout <= 0 {
		c.Timeout = 2 * time.Second
	}
	if c.InstanceLabel == "" {
		c.InstanceLabel = "instance"
	}
	if c.ModelLabel == "" {
		c.ModelLabel = "model_name"
	}
	return &c
}

// QueryStats is the state of a Querier.
type QueryStats struct {
	// Configured is false where there is no server to ask.
	Configured bool
	// Up is whether the newest round had an answer to every query, and some
	// series in them.
	Up bool
	// LastGood is when that was last so, zero for never.
	LastGood time.Time
	// Error says why Up is false, "" before the first round.
	Error string
	// Series is how many readings the newest answer to each query held.
	Series [pool.NumQueries]int
	// Rounds and Failed, those of them that did not bring Up, never fall.
	Rounds, Failed uint64
}

// QuerierOptions are what a Querier can't change later.
type QuerierOptions struct {
	// Name of the pool, for log lines.
	Name string
	// Log gets one line per change of state; nil for none. The Querier's
	// goroutines call it.
	Log func(level slog.Level, msg string)
	// Fault is told of each panic that was caught, by any goroutine; nil leaves it
	// to Log.
	Fault func(cause any, stack []byte)
	// Publish gets what each round found, nil once no server is asked any more.
	// It must not block: it is Syncer.SetQueried.
	Publish func(*pool.Queried)
}

// Querier asks a Prometheus server for the query-based metrics of all
// endpoints, one query per metric, on its own clock: nothing that a request
// does waits for it. Its methods are safe for concurrent use, and none but Stop
// waits.
type Querier struct {
	// Immutable.
	o      QuerierOptions
	wake   chan struct{}
	ctx    context.Context
	cancel context.CancelFunc

	// Shared, each safe by itself.
	cfg   atomic.Pointer[QueryConfig]
	stats atomic.Pointer[QueryStats]
	wg    sync.WaitGroup

	// life is held by Start and Stop and protects whether they ran.
	life             sync.Mutex
	started, stopped bool

	// The loop's own.
	client queryClient
	last   *pool.Queried
	said   string // the state as logged
}

// NewQuerier returns a Querier that does nothing until Start.
func NewQuerier(o QuerierOptions, cfg QueryConfig) *Querier {
	q := &Querier{o: o, wake: make(chan struct{}, 1)}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	q.cfg.Store(cfg.withDefaults())
	q.stats.Store(&QueryStats{Configured: cfg.URL != ""})
	return q
}

// Start begins with a first round at once. A second call does nothing.
func (q *Querier) Start() {
	q.life.Lock()
	defer q.life.Unlock()
	if q.started || q.stopped {
		return
	}
	q.started = true
	q.wg.Go(q.loop)
}

// Stop ends the loop, cuts its queries and waits.
func (q *Querier) Stop() {
	q.life.Lock()
	defer q.life.Unlock()
	q.stopped = true
	q.cancel()
	q.wg.Wait()
}

// Apply changes the config; the next round begins at once where it differs.
func (q *Querier) Apply(cfg QueryConfig) {
	next := cfg.withDefaults()
	if reflect.DeepEqual(next, q.cfg.Swap(next)) {
		return
	}
	wake(q.wake)
}

// Stats returns the state.
func (q *Querier) Stats() QueryStats { return *q.stats.Load() }

func (q *Querier) loop() {
	defer q.client.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-q.ctx.Done():
			return
		case <-timer.C:
		case <-q.wake:
		}
		cfg := q.cfg.Load()
		start := time.Now()
		q.guard(func() { q.turn(cfg, start) })
		if q.ctx.Err() != nil {
			return
		}
		if cfg.URL == "" {
			timer.Stop()
		} else {
			timer.Reset(max(cfg.Interval-time.Since(start), minQueryInterval))
		}
	}
}

// guard keeps a panic from ending Envoy; readings that are not renewed end.
func (q *Querier) guard(f func()) {
	defer func() {
		switch r := recover(); {
		case r == nil:
		case q.o.Fault != nil:
			q.o.Fault(r, debug.Stack())
		default:
			q.logf(levelError, "panic: %v\n%s", r, debug.Stack())
		}
	}()
	f()
}

func (q *Querier) logf(level slog.Level, format string, args ...any) {
	if q.o.Log != nil {
		q.o.Log(level, "pool "+q.o.Name+": prometheus: "+fmt.Sprintf(format, args...))
	}
}

// turn is one round.
func (q *Querier) turn(cfg *QueryConfig, start time.Time) {
	if cfg.URL == "" {
		if q.last != nil {
			q.last = nil
			q.o.Publish(nil)
		}
		q.said = ""
		counts := q.Stats()
		q.stats.Store(&QueryStats{Rounds: counts.Rounds, Failed: counts.Failed})
		return
	}
	r := round{q: q, cfg: cfg, text: queryText{cfg.Selector, cfg.InstanceLabel, cfg.ModelLabel}}
	if err := q.client.refresh(cfg); err != nil {
		r.hopeless = err.Error()
	} else {
		r.ask()
	}
	if q.ctx.Err() != nil {
		return
	}
	q.publish(&r, start)
}

// round is what one round found.
type round struct {
	q    *Querier
	cfg  *QueryConfig
	text queryText

	// mu protects the rest.
	mu       sync.Mutex
	vectors  [pool.NumQueries]model.Vector
	ok       [pool.NumQueries]bool
	next     pool.Query
	problems [pool.NumQueries]string
	hopeless string // why no other query needs to be tried
}

// ask asks all queries, a few at a time.
func (r *round) ask() {
	var wg sync.WaitGroup
	for range queriesAtOnce {
		wg.Go(func() {
			r.q.guard(func() {
				for query, ok := r.take(); ok; query, ok = r.take() {
					r.one(query)
				}
			})
		})
	}
	wg.Wait()
}

func (r *round) take() (pool.Query, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hopeless != "" || r.next >= pool.NumQueries || r.q.ctx.Err() != nil {
		return 0, false
	}
	r.next++
	return r.next - 1, true
}

func (r *round) one(query pool.Query) {
	ctx, cancel := context.WithTimeout(r.q.ctx, r.cfg.Timeout)
	defer cancel()
	// The server's clock decides, not ours.
	value, _, _, err := r.q.client.api.Query(ctx, r.text.of(query), time.Time{})
	if err != nil && ctx.Err() != nil {
		err = ctx.Err() // however the client words it
	}
	if err != nil {
		r.fail(query, err)
		return
	}
	vector, ok := value.(model.Vector)
	switch {
	case value == nil: // of an answer without data
		r.fail(query, errors.New("the answer has no data"))
		return
	case !ok:
		r.fail(query, fmt.Errorf("the answer is a %s, not a vector", value.Type()))
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.vectors[query], r.ok[query] = vector, true
}

func (r *round) fail(query pool.Query, err error) {
	why, all := failure(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	if all && r.hopeless == "" {
		r.hopeless = why
	}
	r.problems[query] = why
}

// problem says what went wrong, the same as long as the same does; "" for
// nothing. Nothing else runs any more.
func (r *round) problem() string {
	if r.hopeless != "" {
		return r.hopeless
	}
	series := 0
	for query := range pool.NumQueries {
		switch {
		case r.problems[query] != "":
			return query.String() + ": " + r.problems[query]
		case !r.ok[query]:
			return "internal error" // a panic, logged
		}
		series += len(r.vectors[query])
	}
	if series > 0 {
		return ""
	}
	with := ""
	if r.cfg.Selector != "" {
		with = " with " + r.cfg.Selector
	}
	return "it has no series" + with + " that the queries ask for"
}

// publish hands over what was found and what still holds, and says what changed.
func (q *Querier) publish(r *round, start time.Time) {
	stats := q.Stats()
	stats.Configured, stats.Series = true, [pool.NumQueries]int{}
	stats.Rounds++
	out := pool.NewQueried()
	until := start.Add(2*r.cfg.Interval + r.cfg.Timeout)
	series := 0
	for query := range pool.NumQueries {
		if !r.ok[query] {
			// One lost answer is no reason to route blind.
			out.Keep(query, q.last)
			continue
		}
		out.Answered(query, until)
		for _, s := range r.vectors[query] {
			out.Add(query, string(s.Metric[model.LabelName(r.cfg.InstanceLabel)]), string(s.Metric[model.LabelName(r.cfg.ModelLabel)]), float64(s.Value))
		}
		stats.Series[query] = len(r.vectors[query])
		series += len(r.vectors[query])
	}
	problem := r.problem()
	stats.Up, stats.Error = problem == "", problem
	if stats.Up {
		stats.LastGood = start
	} else {
		stats.Failed++
	}
	q.last = out
	q.stats.Store(&stats)
	q.o.Publish(out)

	switch {
	case problem == "" && q.said != "up":
		q.said = "up"
		q.logf(levelInfo, "%s answers, %d readings", r.cfg.URL, series)
	case problem != "" && q.said != problem:
		q.said = problem
		q.logf(levelWarn, "%s: %s; query-based metrics are absent once their readings are older than %s", r.cfg.URL, problem, 2*r.cfg.Interval+r.cfg.Timeout)
	}
}

// SetQueried makes q part of the snapshots from now on; nil takes it away. It is
// what a Querier's results are handed to.
func (s *Syncer) SetQueried(q *pool.Queried) {
	s.holder.SetQueried(q)
	wake(s.mailWake) // the writer publishes anew
}
