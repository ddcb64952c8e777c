package simulate

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// picker is what one Envoy picks with, and what it is told.
type picker interface {
	// pick returns the number of an endpoint that is ready, and counts the job
	// there until done.
	pick(now time.Time, j *job) int
	first(now time.Time, j *job)
	progress(now time.Time, j *job, tokens int)
	done(now time.Time, j *job, completed bool)
	// scraped tells what an endpoint's page said, and fleet who is ready.
	scraped(now time.Time, endpoint int, p page)
	fleet(now time.Time, ready []bool)
}

// held is what pickers keep of a job in flight.
type held struct {
	reservation pool.Reservation // shunt's
	uncached    int              // tokens of the prompt that were believed to be uncached; a rival's
	prefilling  bool
}

// newPicker makes the picker of one Envoy. own is whether it is shunt's.
func newPicker(policy string, s *world) (p picker, own bool, err error) {
	if r, ok := rivalOf(policy); ok {
		return newRival(r, s), false, nil
	}
	compiled, err := parsePolicy(policy)
	if err != nil {
		return nil, false, err
	}
	return newShunt(compiled, s), true, nil
}

// Policies are the names that Run knows: rivals first, then shunt's own, which may
// also be weighted, as in "queue:2,kv-cache:2,prefix-cache:3".
func Policies() []string { return append(Rivals(), scorer.Names()...) }

// CheckPolicy says what is wrong with a policy's name.
func CheckPolicy(policy string) error {
	if _, ok := rivalOf(policy); ok {
		return nil
	}
	_, err := parsePolicy(policy)
	return err
}

// parsePolicy reads scorer's string form, in which a part may have parameters:
// "prefill-cost(backlogWeight=1;kv=false):2,queue".
func parsePolicy(text string) (*scorer.Policy, error) {
	if !strings.Contains(text, "(") {
		p, err := scorer.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("policy %q: %w; other routers' rules: %s", text, err, strings.Join(Rivals(), ", "))
		}
		return p, nil
	}
	var parts []scorer.Part
	for entry := range strings.SplitSeq(text, ",") {
		part := scorer.Part{Weight: 1}
		name, rest, given := strings.Cut(entry, "(")
		if given {
			params, after, closed := strings.Cut(rest, ")")
			if !closed {
				return nil, fmt.Errorf("policy %q: a bracket is not closed", text)
			}
			part.Params = map[string]string{}
			for p := range strings.SplitSeq(params, ";") {
				key, value, ok := strings.Cut(p, "=")
				if !ok {
					return nil, fmt.Errorf("policy %q: %q is no parameter: name=value is wanted", text, p)
				}
				part.Params[strings.TrimSpace(key)] = strings.TrimSpace(value)
			}
			name += after
		}
		name, weight, weighted := strings.Cut(name, ":")
		part.Name = strings.TrimSpace(name)
		if weighted {
			if _, err := fmt.Sscanf(weight, "%g", &part.Weight); err != nil {
				return nil, fmt.Errorf("policy %q: %q is no weight", text, weight)
			}
		}
		parts = append(parts, part)
	}
	p, problems := scorer.Compile(parts)
	if len(problems) > 0 {
		return nil, fmt.Errorf("policy %q: %s %s", text, problems[0].Field, problems[0].Message)
	}
	return p, nil
}

// model is the one that all simulated engines serve.
const model = "m"

// shunt picks as the filter does: with a compiled policy over a snapshot, live
// loads and a prefix index of its own.
type shunt struct {
	policy *scorer.Policy
	guards scorer.Guards
	index  *scorer.Index
	pins   *scorer.Pins
	holder *pool.Holder
	slots  pool.Slots
	cfg    *Config
	gate   *gate // nil without flow control

	lives   []*pool.Live // by endpoint number
	since   []time.Time  // when it became ready
	metrics []*pool.Metrics
	pages   []page
	numbers []int   // by position in the snapshot
	place   []int32 // by endpoint number, -1 for none
	dirty   []int32 // endpoint numbers with readings that the snapshot lacks
	seq     uint64
	queried time.Time
}

func newShunt(p *scorer.Policy, s *world) *shunt {
	t := &shunt{policy: p, holder: pool.NewHolder(), cfg: &s.cfg}
	t.guards = scorer.Guards{Wedged: true, Pushback: true, WarmUp: p.NeedsPrefix(), SlowStart: s.cfg.SlowStart}
	if p.NeedsPrefix() {
		t.index = scorer.NewIndex()
	}
	if p.NeedsSession() {
		t.pins = scorer.NewPins()
	}
	return t
}

// indexBlocks bounds the index of one Envoy, as the filter does where no memory
// limit is known: 256 MiB.
const indexBlocks = 256 << 20 / scorer.BytesPerBlock

// follow makes the index that of the newest snapshot, and sends what waits.
func (t *shunt) follow() {
	if t.index != nil {
		t.index.Sync(t.holder.Load(), scorer.Limits{Total: indexBlocks, BlockTokens: BlockTokens})
	}
	if t.gate != nil {
		t.gate.ctl.Changed()
	}
}

func address(endpoint int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(endpoint >> 16), byte(endpoint >> 8), byte(endpoint)}), pool.DefaultPort)
}

func (t *shunt) fleet(now time.Time, ready []bool) {
	for len(t.lives) < len(ready) {
		t.lives, t.since = append(t.lives, nil), append(t.since, time.Time{})
		t.metrics, t.pages, t.place = append(t.metrics, nil), append(t.pages, page{}), append(t.place, -1)
	}
	var endpoints []pool.Endpoint
	var metrics []*pool.Metrics
	t.numbers = t.numbers[:0]
	for i, is := range ready {
		t.place[i] = -1
		switch l := t.lives[i]; {
		case !is && l != nil:
			t.slots.Give(l.Slot)
			t.lives[i] = nil
		case is && l == nil:
			t.lives[i] = &pool.Live{Addr: address(i).String(), Slot: t.slots.Take()}
			t.since[i] = now
		}
		if !is {
			continue
		}
		t.place[i] = int32(len(endpoints))
		t.numbers = append(t.numbers, i)
		endpoints = append(endpoints, pool.Endpoint{
			Target: pool.Target{Addr: address(i), Model: model, Engine: pool.EngineVLLM, MetricPort: pool.DefaultPort, Source: "sim"},
			Live:   t.lives[i], Judged: true, Ready: true, ReadySince: t.since[i],
		})
		metrics = append(metrics, t.metrics[i])
	}
	t.dirty = t.dirty[:0]
	t.seq++
	t.holder.Publish(pool.NewSnapshot(pool.Input{
		Now: now, Seq: t.seq, Complete: true, Fresh: true, StaleAfter: t.cfg.StaleAfter, Endpoints: endpoints, Metrics: metrics,
	}))
	t.follow()
}

// queryEvery is how often Prometheus is asked.
const queryEvery = 15 * time.Second

func (t *shunt) scraped(now time.Time, endpoint int, p page) {
	m := &pool.Metrics{Taken: p.taken, BlockSize: BlockTokens, NumBlocks: p.blocks}
	m.Set(pool.NumRequestsWaiting, float64(p.waiting))
	m.Set(pool.NumRequestsRunning, float64(p.running))
	m.Set(pool.KVCacheUsagePerc, p.kv)
	for _, v := range [...]struct {
		metric pool.Metric
		value  float64
	}{
		{pool.RequestQueueTime, p.queue}, {pool.RequestPrefillTime, p.prefill}, {pool.RequestDecodeTime, p.decode},
		{pool.TimeToFirstToken, p.ttft}, {pool.InterTokenLatency, p.between},
		{pool.PromptTokensPerRequest, p.promptTokens}, {pool.KVCacheHitRate, p.hits}, {pool.RequestRate, p.rate},
	} {
		if !math.IsNaN(v.value) {
			m.Set(v.metric, v.value)
		}
	}
	t.metrics[endpoint], t.pages[endpoint] = m, p
	t.dirty = append(t.dirty, int32(endpoint))
	if now.Sub(t.queried) >= queryEvery {
		t.queried = now
		t.query(now)
	}
	if t.gate != nil && t.gate.ctl.Waiting() > 0 && len(t.dirty) > 0 {
		t.publish(now)
	}
}

// query is what Prometheus would answer.
func (t *shunt) query(now time.Time) {
	q := pool.NewQueried()
	for _, query := range []pool.Query{pool.AvgPromptToksPerReq, pool.AvgGenerationToksPerReq} {
		q.Answered(query, now.Add(4*queryEvery))
		for _, i := range t.numbers {
			v := t.pages[i].prompt
			if query == pool.AvgGenerationToksPerReq {
				v = t.pages[i].output
			}
			if t.pages[i].ok {
				q.Add(query, address(i).String(), model, v)
			}
		}
	}
	t.holder.SetQueried(q)
	t.publish(now)
}

// publish makes a snapshot of the readings that came since the last.
func (t *shunt) publish(now time.Time) {
	slices.Sort(t.dirty)
	t.dirty = slices.Compact(t.dirty)
	var changes []pool.Change
	for _, i := range t.dirty {
		if at := t.place[i]; at >= 0 {
			changes = append(changes, pool.Change{Index: at, Metrics: t.metrics[i]})
		}
	}
	t.dirty = t.dirty[:0]
	t.seq++
	t.holder.Publish(t.holder.Load().WithReadings(now, t.seq, changes))
	t.follow()
}

func (t *shunt) pick(now time.Time, j *job) int {
	t.fresh(now)
	return t.take(j, t.choose(now, j, candidatesOf(t.holder.Load()), nil))
}

// fresh publishes what nobody has looked at yet.
func (t *shunt) fresh(now time.Time) {
	if len(t.dirty) > 0 {
		t.publish(now)
	}
}

// choose picks among candidates, unless admit finds the winner full. No admit is
// nil.
func (t *shunt) choose(now time.Time, j *job, candidates []int32, admit *gate) scorer.Choice {
	snap := t.holder.Load()
	in := scorer.Input{
		Snapshot: snap, Candidates: candidates, Now: now, Seed: j.seed,
		Request: scorer.Request{
			Model: model, Prompt: int64(j.req.Prompt), Output: -1, Talks: true, BlockTokens: BlockTokens, Session: j.req.Session,
			Goals: scorer.Goals{TTFT: t.cfg.GoalTTFT, TPOT: t.cfg.GoalTPOT},
		},
		Index: t.index, Pins: t.pins, Guards: t.guards,
	}
	if admit != nil {
		in.Admit = admit
	}
	if t.index != nil {
		blocks := j.req.prompt()
		in.Request.Blocks = blocks[:min(len(blocks), scorer.MaxBlocks)]
	}
	return t.policy.PickAndReserve(&in)
}

// take notes what a choice reserved, and returns its endpoint.
func (t *shunt) take(j *job, c scorer.Choice) int {
	j.held.reservation = c.Reservation
	return t.numbers[c.Index]
}

func (t *shunt) first(now time.Time, j *job) {
	j.held.reservation.FirstToken(now)
	j.held.reservation.Progress(1, now)
}

func (t *shunt) progress(now time.Time, j *job, tokens int) {
	j.held.reservation.Progress(int64(tokens), now)
}

func (t *shunt) done(now time.Time, j *job, completed bool) {
	live := j.held.reservation.Live()
	j.held.reservation.Release(now, completed)
	if t.gate != nil && live != nil {
		t.gate.ctl.Released(live)
	}
}
