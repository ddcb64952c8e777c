package filter

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shuntproxy/shunt/internal/pool"
)

// maxModelPairs bounds the series that models make in one pool, beside the
// names that nothing of ours knows, which are all otherModel.
const maxModelPairs = 1000

// otherModel is the label for a model that clients made up, or one too many.
const otherModel = "other"

// modelCounters are the metrics of one pair of models in one pool: the one that
// clients ask for and the one that engines get. They are the same unless the
// request's model was rewritten.
type modelCounters struct {
	requests prometheus.Counter
	counts   [numUsageSources][numTokenKinds]prometheus.Counter // none of usageAbsent
}

// tokenKind is a label of the token metrics.
type tokenKind uint8

const (
	tokensPrompt tokenKind = iota
	tokensCompletion
	tokensCached
	numTokenKinds
)

func (k tokenKind) String() string {
	return [numTokenKinds]string{"prompt", "completion", "cached"}[k]
}

func (c *modelCounters) tokens(t tokenCounts) {
	for kind, n := range [numTokenKinds]int64{t.prompt, t.completion, t.cached} {
		if n > 0 {
			c.counts[t.source][kind].Add(float64(n))
		}
	}
}

// modelPair is what a client asked for and what the engine gets.
type modelPair struct{ asked, target string }

// modelTable finds the counters of a pair of models without a lock, once they
// have been made.
type modelTable struct {
	make func(modelPair) *modelCounters

	rows atomic.Pointer[map[modelPair]*modelCounters] // replaced under mu
	mu   sync.Mutex                                   // held to make a row; never for long
}

// get returns the counters of a pair whose names are known and not borrowed.
func (t *modelTable) get(p modelPair) *modelCounters {
	if rows := t.rows.Load(); rows != nil {
		if c := (*rows)[p]; c != nil {
			return c
		}
	}
	return t.add(p)
}

func (t *modelTable) add(p modelPair) *modelCounters {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := map[modelPair]*modelCounters{}
	if old := t.rows.Load(); old != nil {
		rows = *old
	}
	if rows[p] == nil && len(rows) >= maxModelPairs {
		p = modelPair{otherModel, otherModel}
	}
	if c := rows[p]; c != nil {
		return c
	}
	c := t.make(p)
	rows = maps.Clone(rows)
	rows[p] = c
	t.rows.Store(&rows)
	return c
}

// models returns the counters of the request's models. Names that neither the
// pool nor the configuration knows share one series: clients can make up any.
func (r *Request) models(snap *pool.Snapshot) *modelCounters {
	p := modelPair{r.asked, r.model}
	if p.target != "" && !snap.Known(p.target) {
		p.target = otherModel
	}
	switch {
	case r.asked == r.model:
		p.asked = p.target
	case p.asked != "" && !snap.Known(p.asked) && !r.rewriter().knows(p.asked):
		p.asked = otherModel
	}
	return r.pool.counters.models.get(p)
}

// ownName returns a model's name in memory that outlives the request's body:
// the snapshot's, where it knows it. Metadata and JSON hold nothing but UTF-8.
func ownName(snap *pool.Snapshot, borrowed string) string {
	if c := snap.ForModel(borrowed); c != nil && c.Model != "" {
		return c.Model
	}
	return strings.ToValidUTF8(strings.Clone(borrowed), "\ufffd")
}
