package pool

import (
	"math"
	"slices"
	"sort"
	"sync/atomic"
	"time"
)

// Endpoint is one endpoint as a snapshot sees it, but for its readings. All but
// Live is immutable.
type Endpoint struct {
	Target
	// Key is the address as it is sent to Envoy: ip:port, IPv6 in brackets.
	Key string
	// Live is shared by all snapshots of one incarnation.
	Live *Live
	// Models are the ids the endpoint serves beside its label: adapters and
	// what its /v1/models lists.
	Models []string
	// AnyModel endpoints have no label and list no model: they serve any.
	AnyModel bool
	// Judged is false until the serving port has answered or failed once.
	Judged bool
	// Ready endpoints may take requests.
	Ready bool
	// ReadySince is when it last became ready; zero where that is not known.
	ReadySince time.Time
	// Why says why an endpoint is not ready, or "".
	Why string
	// SetAsideSince and SetAsideUntil are zero unless resets have set the
	// endpoint aside.
	SetAsideSince, SetAsideUntil time.Time
	// Passed is true for an endpoint that is ready and still no candidate of
	// any model: it is set aside.
	Passed bool
}

// Candidates are the endpoints that may be picked for one model.
type Candidates struct {
	// Model is the name in memory of the snapshot, for callers who asked with
	// bytes that they do not own; "" for requests without a model.
	Model string
	// Index holds positions in Snapshot.Endpoints, ascending.
	Index []int32
}

// Snapshot is everything a request needs to know of a pool, at one moment. It
// is immutable; a request loads it once.
type Snapshot struct {
	// Seq grows by one with each snapshot of a pool.
	Seq uint64
	// Built is when it was made.
	Built time.Time
	// Complete is false until every source has delivered a full set.
	Complete bool
	// Fresh is false while a source only has its last good set.
	Fresh bool
	// Judged is false until every endpoint of the first full sets has answered
	// or failed once.
	Judged bool
	// Uncertain is true while an endpoint without a model label has not said what
	// it serves: a model that nobody is known to serve may be its.
	Uncertain bool
	// StaleAfter is how old a reading may be, to be used.
	StaleAfter time.Duration
	// Endpoints is sorted by address. Snapshots that differ in readings alone share
	// it.
	Endpoints []Endpoint

	// metrics are the newest good scrapes, by endpoint.
	metrics []*Metrics
	// columns hold each metric by endpoint, as Values.cell has it, and until how
	// long after base those readings may be used: a pick scans them without
	// touching the endpoints. Metrics that no endpoint has share the column none.
	columns [NumMetrics][]float64
	none    []float64
	base    time.Time
	until   []time.Duration
	fresh   time.Duration // the least of until, of endpoints that have readings
	// own are the readings of single models, by model; nil for none.
	own      map[string][]ownValues
	queried  queriedRows // set by Holder.Publish
	standing standing

	all     Candidates
	any     *Candidates
	byModel map[string]*Candidates
	known   map[string]struct{}
}

// Input is what a snapshot is built from. NewSnapshot takes ownership.
type Input struct {
	Now        time.Time
	Seq        uint64
	Complete   bool
	Fresh      bool
	StaleAfter time.Duration
	// Endpoints need all fields but Key, Passed. Any order.
	Endpoints []Endpoint
	// Metrics are the newest good scrapes by position in Endpoints, nil for an
	// endpoint before the first; a nil slice for none at all.
	Metrics []*Metrics
	// Known are models whose absence is an outage and not a mistake: those the
	// config names, and those an endpoint served a while ago.
	Known []string
}

// NewSnapshot indexes the endpoints. It is pure: the same input gives the same
// snapshot.
func NewSnapshot(in Input) *Snapshot {
	s := &Snapshot{
		Seq: in.Seq, Built: in.Now, Complete: in.Complete, Fresh: in.Fresh, Judged: in.Complete,
		StaleAfter: in.StaleAfter, Endpoints: in.Endpoints, metrics: in.Metrics,
		byModel: make(map[string]*Candidates), known: make(map[string]struct{}, len(in.Known)),
	}
	for _, m := range in.Known {
		s.known[m] = struct{}{}
	}
	if s.metrics == nil {
		s.metrics = make([]*Metrics, len(s.Endpoints))
	}
	if byAddr := (endpointsByAddr{s.Endpoints, s.metrics}); !sort.IsSorted(byAddr) {
		sort.Sort(byAddr)
	}
	s.fillColumns()

	ready := make(map[string][]int32)
	var wild, all []int32
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		e.Key = e.Live.Addr
		s.Judged = s.Judged && e.Judged
		usable := e.Ready && !e.PrefillOnly
		if e.Model == "" && len(e.Models) == 0 && !(e.AnyModel && e.Ready) {
			s.Uncertain = true
		}
		if usable {
			all = append(all, int32(i))
		}
		if e.AnyModel {
			if usable {
				wild = append(wild, int32(i))
			}
			continue
		}
		for m := range e.served {
			ids := ready[m]
			if usable && (len(ids) == 0 || ids[len(ids)-1] != int32(i)) {
				ids = append(ids, int32(i))
			}
			ready[m] = ids // a model with no ready endpoint is known all the same
		}
	}
	s.all = Candidates{Index: s.inUse(all, in.Now)}
	if len(wild) > 0 {
		s.any = &Candidates{Index: s.inUse(wild, in.Now)}
	}
	for m, ids := range ready {
		if len(wild) > 0 {
			ids = append(ids, wild...)
			slices.Sort(ids)
		}
		s.byModel[m] = &Candidates{Model: m, Index: s.inUse(ids, in.Now)}
		s.known[m] = struct{}{}
	}
	s.markPassed(in.Now)
	return s
}

func (s *Snapshot) fillColumns() {
	n := len(s.Endpoints)
	s.base = s.Built
	s.standing = newStanding(s.Endpoints)
	s.until = make([]time.Duration, n)
	s.none = make([]float64, n)
	for i := range s.none {
		s.none[i] = math.NaN()
	}
	for m := range s.columns {
		s.columns[m] = s.none
	}
	all := make([]Change, n)
	for i := range all {
		all[i] = Change{int32(i), s.metrics[i]}
	}
	s.setCells(all)
	s.gatherOwn()
}

// Change is a new reading of the endpoint at a position in Endpoints.
type Change struct {
	Index   int32
	Metrics *Metrics
}

// WithReadings returns a snapshot that differs from s in readings alone, for a
// fraction of what indexing costs.
func (s *Snapshot) WithReadings(now time.Time, seq uint64, changes []Change) *Snapshot {
	next := *s
	next.Built, next.Seq = now, seq
	next.metrics = slices.Clone(s.metrics)
	next.until = slices.Clone(s.until)
	own := s.own != nil
	for _, c := range changes {
		next.metrics[c.Index] = c.Metrics
		own = own || c.Metrics != nil && len(c.Metrics.Models) > 0
	}
	next.setCells(changes)
	if own {
		next.gatherOwn()
	}
	return &next
}

// setCells copies the columns that have a reading, before the changes or after,
// and makes the changes in the copies.
func (s *Snapshot) setCells(changes []Change) {
	s.standing.change(changes)
	var has uint32 // by metric
	for _, c := range changes {
		if c.Metrics != nil {
			has |= c.Metrics.has | c.Metrics.nan
		}
	}
	n, kept := len(s.none), 0
	for m := range s.columns {
		if has&(1<<m) != 0 || !s.unread(m) {
			has |= 1 << m
			kept++
		}
	}
	room := make([]float64, kept*n)
	for m := range s.columns {
		if has&(1<<m) == 0 {
			continue
		}
		copy(room[:n], s.columns[m])
		s.columns[m], room = room[:n:n], room[n:]
		for _, c := range changes {
			if c.Metrics != nil {
				s.columns[m][c.Index] = c.Metrics.cell(Metric(m))
			} else {
				s.columns[m][c.Index] = math.NaN()
			}
		}
	}
	for _, c := range changes {
		s.until[c.Index] = math.MinInt64
		if c.Metrics != nil {
			s.until[c.Index] = c.Metrics.Taken.Sub(s.base) + s.StaleAfter
		}
	}
	s.fresh = math.MaxInt64
	for i, m := range s.metrics {
		if m != nil {
			s.fresh = min(s.fresh, s.until[i])
		}
	}
}

// unread reports whether no endpoint has a reading of the metric.
func (s *Snapshot) unread(m int) bool {
	return len(s.none) == 0 || &s.columns[m][0] == &s.none[0]
}

// ownValues are a model's own readings on the endpoint at a position.
type ownValues struct {
	index  int32
	values *Values
}

func (s *Snapshot) gatherOwn() {
	s.own = nil
	for i, read := range s.metrics {
		if read == nil {
			continue
		}
		for j := range read.Models {
			if s.own == nil {
				s.own = make(map[string][]ownValues)
			}
			m := &read.Models[j]
			s.own[m.Model] = append(s.own[m.Model], ownValues{int32(i), &m.Values})
		}
	}
}

// endpointsByAddr sorts endpoints by address, and their metrics with them.
type endpointsByAddr struct {
	endpoints []Endpoint
	metrics   []*Metrics
}

func (s endpointsByAddr) Len() int { return len(s.endpoints) }

func (s endpointsByAddr) Less(i, j int) bool {
	return s.endpoints[i].Addr.Compare(s.endpoints[j].Addr) < 0
}

func (s endpointsByAddr) Swap(i, j int) {
	s.endpoints[i], s.endpoints[j] = s.endpoints[j], s.endpoints[i]
	s.metrics[i], s.metrics[j] = s.metrics[j], s.metrics[i]
}

// served yields the label's model and the others, each perhaps twice.
func (e *Endpoint) served(yield func(string) bool) {
	if e.Model != "" && !yield(e.Model) {
		return
	}
	for _, m := range e.Models {
		if !yield(m) {
			return
		}
	}
}

// inUse takes the endpoints that are set aside out of ready, the longest so
// first, and at most half (rounded down): a fault that all share is not one of
// theirs.
func (s *Snapshot) inUse(ready []int32, now time.Time) []int32 {
	var aside []int32
	for _, i := range ready {
		if now.Before(s.Endpoints[i].SetAsideUntil) {
			aside = append(aside, i)
		}
	}
	if len(aside) == 0 {
		return ready
	}
	slices.SortStableFunc(aside, func(a, b int32) int {
		return s.Endpoints[a].SetAsideSince.Compare(s.Endpoints[b].SetAsideSince)
	})
	aside = aside[:min(len(aside), len(ready)/2)]
	return slices.DeleteFunc(slices.Clone(ready), func(i int32) bool { return slices.Contains(aside, i) })
}

func (s *Snapshot) markPassed(now time.Time) {
	candidate := make([]bool, len(s.Endpoints))
	mark := func(c *Candidates) {
		for _, i := range c.Index {
			candidate[i] = true
		}
	}
	mark(&s.all)
	if s.any != nil {
		mark(s.any)
	}
	for _, c := range s.byModel {
		mark(c)
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		e.Passed = now.Before(e.SetAsideUntil) && !candidate[i]
	}
}

// ForModel returns the candidates of a model, or nil where no endpoint, ready
// or not, serves it. The name is only read.
func (s *Snapshot) ForModel(name string) *Candidates {
	if c, ok := s.byModel[name]; ok {
		return c
	}
	return s.any
}

// Metrics returns the newest good scrape of the endpoint at a position in
// Endpoints, nil before the first. It says nothing of its age.
func (s *Snapshot) Metrics(i int32) *Metrics { return s.metrics[i] }

// ByKey returns the endpoint of an address, or nil.
func (s *Snapshot) ByKey(address string) *Endpoint {
	for i := range s.Endpoints {
		if s.Endpoints[i].Key == address {
			return &s.Endpoints[i]
		}
	}
	return nil
}

// All returns every ready endpoint, for requests that name no model.
func (s *Snapshot) All() *Candidates { return &s.all }

// Known reports whether a model exists although it may have no endpoint.
func (s *Snapshot) Known(name string) bool {
	_, ok := s.known[name]
	return ok
}

// ModelNames returns the models that endpoints serve, sorted.
func (s *Snapshot) ModelNames() []string {
	names := make([]string, 0, len(s.byModel))
	for m := range s.byModel {
		names = append(names, m)
	}
	slices.Sort(names)
	return names
}

// Readings are one metric of all endpoints at one time.
type Readings struct {
	values []float64
	until  []time.Duration
	fresh  time.Duration // the least of until, of endpoints that have readings
	age    time.Duration
	metric Metric
	own    []ownValues
}

// Readings returns a metric's readings as of now, of all that an endpoint serves.
func (s *Snapshot) Readings(m Metric, now time.Time) Readings {
	return Readings{values: s.columns[m], until: s.until, fresh: s.fresh, age: now.Sub(s.base), metric: m}
}

// ReadingsFor returns a metric's readings as of now for one model: its own where
// an endpoint tells its models apart, else those of all that it serves.
func (s *Snapshot) ReadingsFor(model string, m Metric, now time.Time) Readings {
	r := s.Readings(m, now)
	r.own = s.own[model]
	return r
}

// At returns the reading of the endpoint at a position in Endpoints; ok is
// false where it is absent, not a number or stale.
func (r Readings) At(i int32) (v float64, ok bool) {
	v = r.values[i]
	if r.own != nil {
		v = r.ownOr(i, v)
	}
	return v, v == v && r.age <= r.until[i]
}

// Fill sets out to the readings of the endpoints at positions, NaN where At has
// none.
func (r Readings) Fill(out []float64, positions []int32) {
	if r.own != nil {
		for k, i := range positions {
			v, ok := r.At(i)
			if !ok {
				v = math.NaN()
			}
			out[k] = v
		}
		return
	}
	out = out[:len(positions)]
	if r.age <= r.fresh {
		for k, i := range positions {
			out[k] = r.values[i]
		}
		return
	}
	for k, i := range positions {
		out[k] = r.values[i]
		if r.age > r.until[i] {
			out[k] = math.NaN()
		}
	}
}

// Known says what is known of the reading of the endpoint at a position.
func (r Readings) Known(i int32) Known {
	v := r.values[i]
	if r.own != nil {
		v = r.ownOr(i, v)
	}
	switch {
	case v != v && math.Float64bits(v) == notNumber:
		return NotNumber
	case v != v:
		return Absent
	case r.age > r.until[i]:
		return Stale
	default:
		return Fresh
	}
}

func (r Readings) ownOr(i int32, v float64) float64 {
	at, ok := slices.BinarySearchFunc(r.own, i, func(o ownValues, i int32) int { return int(o.index) - int(i) })
	if ok {
		if x, ok := r.own[at].values.Get(r.metric); ok {
			return x
		}
	}
	return v
}

// faultQueue bounds the faults on their way to the writer. The writer handles
// one in microseconds; only an outage of everything fills it.
const faultQueue = 1024

// Holder is where a pool's newest snapshot is found. Any number of readers
// call Load and Report; exactly one goroutine calls Publish.
type Holder struct {
	current atomic.Pointer[Snapshot]
	queried atomic.Pointer[Queried]
	dropped atomic.Uint64
	faults  chan Fault
}

// NewHolder returns a holder of an empty, incomplete snapshot, so that Load is
// never nil.
func NewHolder() *Holder {
	h := &Holder{faults: make(chan Fault, faultQueue)}
	h.current.Store(NewSnapshot(Input{}))
	return h
}

// Load returns the newest snapshot.
func (h *Holder) Load() *Snapshot { return h.current.Load() }

// Publish replaces the snapshot, after it has given it the newest readings of
// SetQueried.
func (h *Holder) Publish(s *Snapshot) {
	last := h.current.Load()
	s.queried = h.queried.Load().rowsFor(s.Endpoints, last.Endpoints, last.queried)
	h.current.Store(s)
}

// Report tells the writer of a fault, after which the endpoint is doubted. It
// never blocks: a fault over the queue's bound is dropped and counted, and the
// writer then probes whoever is doubted.
func (h *Holder) Report(f Fault) {
	if f.Live == nil {
		return
	}
	f.Live.Doubt(f.At)
	select {
	case h.faults <- f:
	default:
		h.dropped.Add(1)
	}
}

// Faults is what the writer receives reports from.
func (h *Holder) Faults() <-chan Fault { return h.faults }

// DroppedFaults is the number of faults dropped for a full queue.
func (h *Holder) DroppedFaults() uint64 { return h.dropped.Load() }
