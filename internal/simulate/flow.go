package simulate

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// Objective is what a share of the requests name: their band.
type Objective struct {
	Name     string
	Priority int
	Share    float64
}

// Flow is the flow control of each Envoy. Without objectives there is none.
type Flow struct {
	Objectives []Objective
	// MaxConcurrency is the number of an Envoy's requests at which an engine is full;
	// 0 goes by the engine's queue and KV cache, with shunt's default thresholds.
	MaxConcurrency int
	// TTL is how long a request waits at the most; 60 s.
	TTL time.Duration
}

func (f *Flow) check() error {
	names := map[string]bool{}
	for _, o := range f.Objectives {
		switch {
		case o.Name == "" || names[o.Name]:
			return fmt.Errorf("objective %q: a name of its own is wanted", o.Name)
		case !(o.Share > 0):
			return fmt.Errorf("objective %s: a share of %v, more than 0 is wanted", o.Name, o.Share)
		}
		names[o.Name] = true
	}
	if f.MaxConcurrency < 0 {
		return errors.New("the concurrency must not be negative")
	}
	return nil
}

// config is that of the core. Its thresholds are shunt's defaults.
func (f *Flow) config() flowcontrol.Config {
	c := flowcontrol.Config{
		Enabled: true, TTL: f.TTL, FlowLabels: len(f.Objectives),
		Detector: flowcontrol.Detector{QueueThreshold: 5, KVThreshold: 0.8, MaxConcurrency: 100},
	}
	if f.MaxConcurrency > 0 {
		c.Detector.Saturation, c.Detector.MaxConcurrency = flowcontrol.Concurrency, int64(f.MaxConcurrency)
	}
	return c
}

// highest is the position of the objective with the highest priority.
func (f *Flow) highest() int {
	at := 0
	for i := range f.Objectives {
		if f.Objectives[i].Priority > f.Objectives[at].Priority {
			at = i
		}
	}
	return at
}

// withObjectives returns the workload with an objective drawn by lot for each
// request.
func (w *Workload) withObjectives(list []Objective, seed uint64) *Workload {
	out := *w
	out.Requests = slices.Clone(w.Requests)
	rng := rand.New(rand.NewPCG(seed, 0x0b1ec))
	sum := 0.0
	for _, o := range list {
		sum += o.Share
	}
	for i := range out.Requests {
		lot := rng.Float64() * sum
		for k, o := range list {
			out.Requests[i].objective = k
			if lot -= o.Share; lot < 0 {
				break
			}
		}
	}
	return &out
}

// only returns the workload without the requests of other objectives.
func (w *Workload) only(objective int) *Workload {
	out := *w
	out.Requests = slices.DeleteFunc(slices.Clone(w.Requests), func(r Request) bool { return r.objective != objective })
	return &out
}

// runObjectives runs a workload with all its requests, and again with those of the
// highest band alone.
func runObjectives(w *Workload, policy string, cfg Config) (*Result, error) {
	w = w.withObjectives(cfg.Flow.Objectives, cfg.Seed)
	r, err := Run(w, policy, cfg)
	if err != nil {
		return nil, err
	}
	at := cfg.Flow.highest()
	alone := w.only(at)
	if len(alone.Requests) == 0 {
		return r, nil
	}
	other, err := Run(alone, policy, cfg)
	if err != nil {
		return nil, err
	}
	r.Objectives[at].Alone = &other.Objectives[at].TTFT
	return r, nil
}

// gate is the flow control of one Envoy: the core that the filter has, on the
// world's clock, and what the filter does with its answers.
type gate struct {
	t    *shunt
	s    *world
	room *flowcontrol.Room
	ctl  *flowcontrol.Controller
	next time.Duration // when the room has something to do; never where nobody waits

	// of the pick at hand
	detector flowcontrol.Detector
	view     flowcontrol.View
	hold     *pool.Live
	open     []int32
}

const never = time.Duration(1<<63 - 1)

func newGate(t *shunt, s *world) *gate {
	g := &gate{t: t, s: s, next: never}
	g.room = flowcontrol.NewRoom(0, 1<<40, func() time.Time { return epoch.Add(s.now) })
	g.ctl = g.room.NewController(flowcontrol.Options{
		Snapshot: t.holder.Load, Candidates: func(snap *pool.Snapshot, _, _ string) []int32 { return candidatesOf(snap) },
	})
	config := s.cfg.Flow.config()
	g.detector = config.Detector
	g.ctl.Apply(config)
	return g
}

// candidatesOf are a snapshot's.
func candidatesOf(snap *pool.Snapshot) []int32 {
	if c := snap.ForModel(model); c != nil {
		return c.Index
	}
	return nil
}

// Full implements scorer.Admitter.
func (g *gate) Full(i int32, own int64) bool {
	if g.hold != nil && g.view.Live(i) == g.hold || own > 0 && g.detector.Saturation == flowcontrol.Utilization {
		return false
	}
	return g.view.Full(i, own)
}

// pickResult is what became of a request that wants an endpoint.
type pickResult uint8

const (
	picked pickResult = iota
	queued
	over
	nobody
)

// maxEnters bounds how often a request looks again that is let pass and finds no
// room.
const maxEnters = 16

// enter picks where there is room and nobody waits for it, and else puts the job
// in line.
func (g *gate) enter(now time.Time, j *job) (endpoint int, result pickResult) {
	ahead := g.ctl.Waiting() > 0
	for range maxEnters {
		if !ahead {
			if c, ok := g.take(now, j); ok {
				return g.t.take(j, c), picked
			}
		}
		o := &g.s.cfg.Flow.Objectives[j.req.objective]
		j.gate = g
		result, _ := g.ctl.Enter(&j.waiter, j, &flowcontrol.Ask{Model: model, Flow: o.Name, Priority: o.Priority, Cost: int64(j.req.Prompt)})
		switch result {
		case flowcontrol.Queued:
			return -1, queued
		case flowcontrol.Pass:
			ahead = false
		case flowcontrol.Empty:
			return -1, nobody
		default:
			return -1, over
		}
	}
	return g.t.take(j, g.t.choose(now, j, candidatesOf(g.t.holder.Load()), nil)), picked
}

// take picks among the candidates with room; ok is false where there is none.
func (g *gate) take(now time.Time, j *job) (c scorer.Choice, ok bool) {
	snap := g.t.holder.Load()
	g.view, g.hold = g.detector.View(snap, now), nil
	index := candidatesOf(snap)
	if c = g.t.choose(now, j, index, g); !c.Full {
		return c, true
	}
	g.open = g.open[:0]
	for _, i := range index {
		if !g.view.Full(i, 0) {
			g.open = append(g.open, i)
		}
	}
	if len(g.open) == 0 {
		return c, false
	}
	c = g.t.choose(now, j, g.open, g)
	return c, !c.Full
}

// redeem picks for a job that holds a slot; ok is false where its endpoint has
// gone and no other has room.
func (g *gate) redeem(now time.Time, j *job, hold *pool.Live) (endpoint int, ok bool) {
	snap := g.t.holder.Load()
	g.view, g.hold = g.detector.View(snap, now), hold
	var held int32
	g.open, held = g.ctl.Open(snap, candidatesOf(snap), hold, g.open[:0])
	c := scorer.Choice{Full: true}
	if len(g.open) > 0 {
		c = g.t.choose(now, j, g.open, g)
	}
	if c.Full {
		if held < 0 {
			return -1, false
		}
		c = g.t.choose(now, j, []int32{held}, nil)
	}
	return g.t.take(j, c), true
}

// Wake implements flowcontrol.Wakeable: the world goes on with the job once the
// event at hand is over.
func (j *job) Wake(o flowcontrol.Outcome, hold *pool.Live) {
	j.gate.s.woken = append(j.gate.s.woken, wokenJob{j, o, hold})
}

// wokenJob is one whose wait is over.
type wokenJob struct {
	job     *job
	outcome flowcontrol.Outcome
	hold    *pool.Live
}

// resume goes on with the jobs whose wait is over, and finds when the next one's
// will be.
func (s *world) resume() {
	for {
		for len(s.woken) > 0 {
			w := s.woken[0]
			s.woken = s.woken[1:]
			s.wake(w)
		}
		for _, g := range s.gates {
			g.next = never
			if g.ctl.Waiting() > 0 {
				g.next = s.now + max(1, g.room.Expire())
			}
		}
		if len(s.woken) == 0 {
			return
		}
	}
}

func (s *world) wake(w wokenJob) {
	if w.outcome != flowcontrol.Granted {
		s.end(w.job, dropped)
		return
	}
	g := w.job.gate
	i, ok := g.redeem(epoch.Add(s.now), w.job, w.hold)
	if ok {
		s.submit(w.job, i)
	}
	g.ctl.Return(w.hold)
	if !ok {
		s.send(w.job)
	}
}

// nextExpiry is when the first of the gates has something to do.
func (s *world) nextExpiry() time.Duration {
	next := never
	for _, g := range s.gates {
		next = min(next, g.next)
	}
	return next
}
