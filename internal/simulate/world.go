package simulate

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/sim"
)

// Config describes a fleet and the Envoys before it. Zero fields take the
// default.
type Config struct {
	// Endpoints is the number of engines at the start; 8.
	Endpoints int
	// Envoys share nothing: each request goes to one of them by lot; 1.
	Envoys int
	// Engine are the parameters of each engine. Its BlockSize is BlockTokens.
	Engine sim.Params
	// ScrapeInterval is that of shunt's scraper, 1 s, and RivalInterval that of the
	// other routers which scrape, 50 ms. A page is known ScrapeDelay, 5 ms, after it
	// was made; readings older than StaleAfter, 5 s, are stale.
	ScrapeInterval, RivalInterval, ScrapeDelay, StaleAfter time.Duration
	// SlowStart is shunt's; 10 s, negative = off.
	SlowStart time.Duration
	// Seed draws lots: ties, which Envoy, when each endpoint is scraped.
	Seed uint64
	// GoalTTFT and GoalTPOT are what a request has to keep to count as attained;
	// 2 s, and 0 for none.
	GoalTTFT, GoalTPOT time.Duration
	// Flow is shunt's flow control.
	Flow Flow
}

// DefaultEngine is about the default timing of NVIDIA Dynamo's replay: 48,000
// prompt tokens per second, steps of 6 ms that grow to 34 ms as the KV cache fills,
// 1,048,576 tokens of KV cache.
func DefaultEngine() sim.Params {
	return sim.Params{
		PrefillRate: 48_000, DecodeRate: 170, BatchSlowdown: 0.005, KVSlowdown: 4.8,
		BlockSize: BlockTokens, Blocks: 16_384, MaxRunning: 256, ChunkTokens: 8192,
	}
}

func (c *Config) setDefaults() error {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Endpoints == 0 {
		c.Endpoints = 8
	}
	if c.Envoys == 0 {
		c.Envoys = 1
	}
	if c.Engine == (sim.Params{}) {
		c.Engine = DefaultEngine()
	}
	c.Engine.BlockSize = BlockTokens
	def(&c.ScrapeInterval, time.Second)
	def(&c.RivalInterval, 50*time.Millisecond)
	def(&c.ScrapeDelay, 5*time.Millisecond)
	def(&c.StaleAfter, 5*time.Second)
	def(&c.SlowStart, 10*time.Second)
	def(&c.GoalTTFT, 2*time.Second)
	def(&c.Flow.TTL, time.Minute)
	if err := c.Flow.check(); err != nil {
		return err
	}
	switch {
	case c.Endpoints < 1 || c.Endpoints > 10_000:
		return fmt.Errorf("%d endpoints: 1 to 10000 are wanted", c.Endpoints)
	case c.Envoys < 1 || c.Envoys > 1000:
		return fmt.Errorf("%d Envoys: 1 to 1000 are wanted", c.Envoys)
	case c.ScrapeInterval < time.Millisecond || c.RivalInterval < time.Millisecond:
		return errors.New("the scrape interval must be at least 1ms")
	case c.ScrapeDelay < 0 || c.ScrapeDelay >= min(c.ScrapeInterval, c.RivalInterval):
		return fmt.Errorf("a scrape delay of %v: 0 to less than the interval is wanted", c.ScrapeDelay)
	}
	return nil
}

// Run replays a workload under a policy, one of Policies or what scorer.Parse
// reads.
func Run(w *Workload, policy string, cfg Config) (*Result, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	s, err := newWorld(w, policy, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.run(); err != nil {
		return nil, err
	}
	return s.result(policy), nil
}

// epoch is model time 0.
var epoch = time.Unix(1_000_000_000, 0)

// job is one request on its way.
type job struct {
	req      *Request
	arrival  time.Duration // its first
	seq      *sim.Seq
	envoy    int32
	endpoint int32
	tries    int32
	slot     int32 // position among the engine's jobs
	seed     uint64
	held     held // what the picker keeps of it
	waiter   flowcontrol.Waiter
	gate     *gate // where it waits, or has waited
	first    time.Duration
	end      time.Duration
	state    jobState
}

type jobState uint8

const (
	waiting jobState = iota
	sent
	completed
	broken // lost after the first token, or given up
	refused
	dropped // by flow control
)

// engine is one endpoint.
type engine struct {
	model *sim.Model
	up    bool
	jobs  []*job // in flight
	meter meter
	at    int // position in the heap of next steps, -1 for none
	next  time.Duration
}

// retryDelay is Envoy's first back-off, and maxTries how often a request is sent.
const (
	retryDelay = 25 * time.Millisecond
	maxTries   = 4
)

// world is one run.
type world struct {
	cfg     Config
	w       *Workload
	rng     *rand.Rand
	engines []*engine
	envoys  []*envoy
	jobs    []job
	steps   stepHeap // engines by next
	retries []*job   // by time of their next try, which is first
	scrapes scrapes
	events  []sim.Event
	changes []Change
	gates   []*gate
	woken   []wokenJob

	arrived  int
	finished int
	now      time.Duration
	load     loadMeter
}

func newWorld(w *Workload, policy string, cfg Config) (*world, error) {
	s := &world{cfg: cfg, w: w, rng: rand.New(rand.NewPCG(cfg.Seed, 0x57a7)), changes: w.Changes}
	for i := range cfg.Endpoints {
		if err := s.addEngine(); err != nil {
			return nil, err
		}
		if i < len(w.Slowdowns) {
			s.engines[i].model.SetSlowdown(w.Slowdowns[i])
		}
	}
	total := cfg.Endpoints
	for _, c := range w.Changes {
		switch {
		case c.Kind == Join:
			total++
		case c.Endpoint < 0 || c.Endpoint >= total:
			return nil, fmt.Errorf("a change of endpoint %d of %d", c.Endpoint, total)
		}
	}
	interval := cfg.ScrapeInterval
	for range cfg.Envoys {
		p, own, err := newPicker(policy, s)
		if err != nil {
			return nil, err
		}
		if !own {
			interval = cfg.RivalInterval
		}
		if t, ok := p.(*shunt); ok && len(cfg.Flow.Objectives) > 0 {
			t.gate = newGate(t, s)
			s.gates = append(s.gates, t.gate)
		}
		s.envoys = append(s.envoys, newEnvoy(p, total))
	}
	s.scrapes = newScrapes(s.rng, cfg.Envoys, total, interval, cfg.ScrapeDelay)
	for _, e := range s.envoys {
		for i := range cfg.Endpoints {
			e.ready[i] = true
		}
		e.picker.fleet(epoch, e.ready)
	}
	s.jobs = make([]job, len(w.Requests))
	for i := range s.jobs {
		s.jobs[i] = job{req: &w.Requests[i], arrival: w.Requests[i].At, first: -1}
	}
	return s, nil
}

func (s *world) addEngine() error {
	m, err := sim.NewModel(s.cfg.Engine, sim.Bounds{}, true)
	if err != nil {
		return err
	}
	s.engines = append(s.engines, &engine{model: m, up: true, at: -1})
	return nil
}

// run goes from event to event. Of those at the same time, engines come first,
// then changes, scrapes and requests.
func (s *world) run() error {
	for s.finished < len(s.jobs) {
		step, change, scrape, retry, arrive := never, never, s.scrapes.next(), never, never
		if len(s.steps) > 0 {
			step = s.steps[0].next
		}
		if len(s.changes) > 0 {
			change = s.changes[0].At
		}
		if len(s.retries) > 0 {
			retry = s.retries[0].first
		}
		if s.arrived < len(s.jobs) {
			arrive = s.jobs[s.arrived].arrival
		}
		if s.arrived == s.finished && len(s.retries) == 0 { // idle until then
			scrape = s.scrapes.skip(s.now, min(change, arrive)-2*s.cfg.StaleAfter)
		}
		expire := s.nextExpiry()
		at := min(step, change, scrape, retry, arrive, expire)
		s.load.upTo(at, s.engines)
		switch {
		case at == never:
			return errors.New("nothing happens any more")
		case at == step:
			s.now = at
			s.advance(s.steps[0])
		case at == change:
			s.now = at
			if err := s.change(s.changes[0]); err != nil {
				return err
			}
			s.changes = s.changes[1:]
		case at == scrape:
			s.now = at
			s.scrape()
		case at == expire:
			s.now = at // resume does it
		case at == retry:
			s.now = at
			j := s.retries[0]
			s.retries = s.retries[1:]
			j.first = -1
			s.send(j)
		default:
			s.now = at
			j := &s.jobs[s.arrived]
			s.arrived++
			j.envoy, j.seed = int32(s.rng.IntN(len(s.envoys))), s.rng.Uint64()
			if j.req.Prompt+j.req.Output > s.engines[0].model.Capacity() {
				s.end(j, refused)
				continue
			}
			s.send(j)
		}
		s.resume()
	}
	return nil
}

// send lets the job's Envoy pick, and submits, or lets it wait.
func (s *world) send(j *job) {
	e := s.envoys[j.envoy]
	now := epoch.Add(s.now)
	j.tries++
	j.seed = mix(j.seed)
	i := -1
	if t, ok := e.picker.(*shunt); ok && t.gate != nil && e.any() {
		t.fresh(now)
		var result pickResult
		switch i, result = t.gate.enter(now, j); result {
		case queued:
			j.state = waiting
			return
		case over:
			s.end(j, dropped)
			return
		}
	} else if e.any() {
		i = e.picker.pick(now, j)
	}
	if i < 0 {
		s.again(j)
		return
	}
	s.submit(j, i)
}

// submit gives the job to the endpoint that was picked.
func (s *world) submit(j *job, i int) {
	e := s.envoys[j.envoy]
	now := epoch.Add(s.now)
	j.endpoint = int32(i)
	eng := s.engines[i]
	if !eng.up {
		e.picker.done(now, j, false)
		e.failed(now, i)
		s.again(j)
		return
	}
	s.collect(eng)
	seq, err := eng.model.Submit(s.now, sim.Request{
		PromptTokens: j.req.Prompt, OutputTokens: j.req.Output, Hashes: j.req.Blocks, Data: j,
	})
	if err != nil { // checked on arrival: engines are alike
		e.picker.done(now, j, false)
		s.end(j, refused)
		return
	}
	j.seq, j.state = seq, sent
	j.slot = int32(len(eng.jobs))
	eng.jobs = append(eng.jobs, j)
	s.collect(eng)
	s.steps.update(eng)
}

// again sends a job once more after a pause, or gives it up.
func (s *world) again(j *job) {
	if j.tries >= maxTries {
		s.end(j, broken)
		return
	}
	j.state = waiting
	j.first = s.now + retryDelay
	at, _ := slices.BinarySearchFunc(s.retries, j, func(a, b *job) int { return cmp.Or(cmp.Compare(a.first, b.first), -1) })
	s.retries = slices.Insert(s.retries, at, j)
}

func (s *world) end(j *job, state jobState) {
	j.state, j.end = state, s.now
	s.finished++
}

// advance runs an engine to now.
func (s *world) advance(eng *engine) {
	s.collect(eng)
	s.steps.update(eng)
}

// progressEvery is after how many tokens an Envoy is told of them.
const progressEvery = 8

// collect takes what happened in an engine up to now.
func (s *world) collect(eng *engine) {
	s.events = eng.model.Advance(s.now, s.events[:0])
	for i := range s.events {
		ev := &s.events[i]
		j := ev.Seq.Data.(*job)
		p := s.envoys[j.envoy].picker
		switch ev.Kind {
		case sim.FirstToken:
			j.first = ev.At
			p.first(epoch.Add(ev.At), j)
		case sim.Token:
			if n := ev.Seq.Output; n%progressEvery == 0 {
				p.progress(epoch.Add(ev.At), j, n)
			}
		default:
			p.progress(epoch.Add(ev.At), j, ev.Seq.Output)
			p.done(epoch.Add(ev.At), j, true)
			eng.drop(j)
			s.end(j, completed)
		}
	}
}

func (e *engine) drop(j *job) {
	last := len(e.jobs) - 1
	e.jobs[j.slot] = e.jobs[last]
	e.jobs[j.slot].slot = j.slot
	e.jobs = e.jobs[:last]
}

func (s *world) change(c Change) error {
	switch c.Kind {
	case Join:
		return s.addEngine()
	case Slow:
		eng := s.engines[c.Endpoint]
		s.collect(eng)
		eng.model.SetSlowdown(c.Factor)
		s.steps.update(eng)
	default:
		eng := s.engines[c.Endpoint]
		s.collect(eng)
		eng.up = false
		s.steps.remove(eng)
		lost := eng.jobs
		eng.jobs = nil
		for _, j := range lost {
			e := s.envoys[j.envoy]
			e.picker.done(epoch.Add(s.now), j, false)
			e.failed(epoch.Add(s.now), int(j.endpoint))
			if j.first >= 0 {
				s.end(j, broken)
			} else {
				s.again(j)
			}
		}
	}
	return nil
}

// scrape makes one Envoy read one endpoint's page, or lets it know what it read.
func (s *world) scrape() {
	envoy, i, read := s.scrapes.take()
	e := s.envoys[envoy]
	now := epoch.Add(s.now)
	if !read {
		if p := e.pages[i]; p.ok {
			e.fails[i] = 0
			if !e.ready[i] && !e.gone[i] {
				e.ready[i] = true
				e.picker.fleet(now, e.ready)
			}
			e.picker.scraped(now, i, p)
		} else if i < len(s.engines) {
			e.failed(now, i)
		}
		return
	}
	e.pages[i] = page{}
	if i < len(s.engines) && s.engines[i].up {
		eng := s.engines[i]
		s.collect(eng)
		s.steps.update(eng)
		e.pages[i] = eng.page(now)
	}
}

// envoy is one Envoy: its picker, and what it knows of who is there. An endpoint
// is gone after two failures in a row; its source takes it out then.
type envoy struct {
	picker picker
	ready  []bool
	gone   []bool
	fails  []int
	pages  []page
}

func newEnvoy(p picker, endpoints int) *envoy {
	return &envoy{
		picker: p, ready: make([]bool, endpoints), gone: make([]bool, endpoints), fails: make([]int, endpoints),
		pages: make([]page, endpoints),
	}
}

func (e *envoy) any() bool { return slices.Contains(e.ready, true) }

func (e *envoy) failed(now time.Time, i int) {
	if e.fails[i]++; e.fails[i] >= 2 && e.ready[i] {
		e.ready[i], e.gone[i] = false, true
		e.picker.fleet(now, e.ready)
	}
}

// stepHeap orders engines by their next step, and those of the same time by when
// they came to it.
type stepHeap []*engine

func (h *stepHeap) update(eng *engine) {
	next, ok := eng.model.Next()
	if !ok {
		h.remove(eng)
		return
	}
	eng.next = next
	if eng.at < 0 {
		eng.at = len(*h)
		*h = append(*h, eng)
	}
	h.up(eng.at)
	h.down(eng.at)
}

func (h *stepHeap) remove(eng *engine) {
	at := eng.at
	if at < 0 {
		return
	}
	last := len(*h) - 1
	h.swap(at, last)
	*h = (*h)[:last]
	eng.at = -1
	if at < last {
		h.up(at)
		h.down(at)
	}
}

func (h stepHeap) swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].at, h[b].at = a, b
}

func (h stepHeap) up(at int) {
	for at > 0 && h[at].next < h[(at-1)/2].next {
		h.swap(at, (at-1)/2)
		at = (at - 1) / 2
	}
}

func (h stepHeap) down(at int) {
	for {
		least := at
		for _, child := range [2]int{2*at + 1, 2*at + 2} {
			if child < len(h) && h[child].next < h[least].next {
				least = child
			}
		}
		if least == at {
			return
		}
		h.swap(at, least)
		at = least
	}
}
