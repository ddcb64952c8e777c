package filter

import (
	"math/rand/v2"
	"time"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// pick chooses among candidates by the request's policy and reserves the
// winner, unless admit finds it full. No admit is nil.
func (r *Request) pick(snap *pool.Snapshot, index []int32, now time.Time, admit *admission) scorer.Choice {
	in := scorer.Input{
		Snapshot: snap, Candidates: index, Now: now, Seed: rand.Uint64(),
		Request: scorer.Request{
			Model: r.model, Prompt: r.prompt, Output: r.maxTokens, Talks: r.streams && r.watched(),
			Blocks: r.blocks, BlockTokens: r.blockTokens, Session: r.session,
		},
		Index: r.pool.index, Pins: r.pool.pins,
		Explain: r.why, Costs: r.set.costs, Guards: r.set.guardsOf(r.policy),
	}
	if admit != nil {
		in.Admit = admit
	}
	if r.identity.more != nil || r.wait.objective != nil { // else it has no goals
		in.Request.Goals, in.Admission = r.goals(), r.admission()
	}
	c := r.policy.PickAndReserve(&in)
	r.pool.fallbacks.note(r.pool, r.policy, r.model, c.Fallback, now, r.gen.runtime.log)
	for g := scorer.Guard(0); c.Guarded>>g != 0; g++ {
		if c.Guarded.Has(g) {
			r.pool.counters.guarded[g].Inc()
		}
	}
	return c
}

// guardsOf are the guards around a policy.
func (s *settings) guardsOf(p *scorer.Policy) scorer.Guards {
	g := &s.cfg.Guards
	return scorer.Guards{
		Doubted: g.Doubted, Wedged: g.Wedged, Pushback: g.Pushback, OverloadVeto: g.OverloadVeto, WarmUp: g.WarmUpFor(p),
		SlowStart: s.cfg.SlowStart,
	}
}

// policyOf reads the header routing-strategy: a name, or names with weights,
// each of them allowed.
func (s *settings) policyOf(asked string) (*scorer.Policy, bool) {
	if p, ok := s.allowed[asked]; ok {
		return p, true
	}
	if len(asked) > maxName {
		return nil, false // of names that may be, eight with weights are shorter
	}
	for _, name := range scorer.Mentioned(asked) {
		if _, ok := s.allowed[name]; !ok {
			return nil, false
		}
	}
	p, err := scorer.Parse(asked)
	return p, err == nil
}

// allowedPolicies compiles the names that the header may use.
func allowedPolicies(cfg *config.Config) (map[string]*scorer.Policy, error) {
	allowed := make(map[string]*scorer.Policy, len(cfg.AllowedPolicies))
	for _, name := range cfg.AllowedPolicies {
		p, err := scorer.Parse(name)
		if err != nil {
			return nil, err
		}
		allowed[name] = p
	}
	return allowed, nil
}
