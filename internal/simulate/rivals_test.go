package simulate

import (
	"math"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
)

// pod is what a rival knows of an endpoint in a case computed by hand.
type pod struct {
	waiting, running int
	kv               float64
	blocks           int // of the prompt that were sent there
	prefill          int // tokens
	active           int // blocks of other requests
	rate             float64
}

// The prompt of these cases has 10 whole blocks of 64 tokens.
func TestRivalsByHand(t *testing.T) {
	for _, c := range []struct {
		name, policy string
		pods         []pod
		want         int
	}{
		// 2·queue + 2·(1−kv) + 3·match.
		// 0: 2·(4−0)/4 + 2·0.5 + 0 = 3; 1: 2·(4−4)/4 + 2·0.4 + 3·0.8 = 3.2; 2: 2·0.5 + 2·0.9 + 0 = 2.8
		{"a long match outweighs the longest queue", "llm-d", []pod{{kv: 0.5}, {waiting: 4, kv: 0.6, blocks: 8}, {waiting: 2, kv: 0.1}}, 1},
		// 1 now: 0 + 0.8 + 3·0.7 = 2.9
		{"a shorter one does not", "llm-d", []pod{{kv: 0.5}, {waiting: 4, kv: 0.6, blocks: 7}, {waiting: 2, kv: 0.1}}, 0},
		// All wait alike: queue is 1 for each. 0: 2 + 1.9 = 3.9; 1: 2 + 1.2 + 0.6 = 3.8
		{"equal queues say nothing", "llm-d", []pod{{waiting: 9, kv: 0.05}, {waiting: 9, kv: 0.4, blocks: 2}}, 0},

		// The gate: 20−2 ≥ 8, 20 > 2·(11/4+1)=7.5, so only pods with 2 are left, and 1 of
		// these matches more.
		{"the gate takes the busiest out", "aibrix", []pod{{running: 20, blocks: 10}, {running: 2, blocks: 3}, {running: 2, blocks: 1}, {running: 4, blocks: 9}, {running: 3}}, 1},
		// No gate (9−5 < 8). Match 100, 0, 0 → median 0, MAD 0: 1, 0, 0. Load 9, 5, 5 (rate
		// 1, no KV) as −9, −5, −5 → 0, 1, 1. 5/9 against 4/9.
		{"affinity outweighs load, five to four", "aibrix", []pod{{running: 9, blocks: 10}, {running: 5}, {running: 5}}, 0},
		// Match 50, 50, 0 → 1, 1, 0. Load/rate: 6/3000, 6/6000, 0/4000 → 0.002, 0.001, 0 →
		// 0, 0.5, 1. 5/9, 7/9, 4/9.
		{"capacity divides load", "aibrix", []pod{{running: 6, rate: 3000, blocks: 5}, {running: 6, rate: 6000, blocks: 5}, {rate: 4000}}, 1},
		// 2 has 5 % free: infinite, scores 0. Match 0, 0, 100 → 0, 0, 1: 5/9. Load 4, 2 →
		// −4, −2 → 0, 1: 4/9 at 1. Affinity wins all the same.
		{"no room is the worst load and no veto", "aibrix", []pod{{running: 4}, {running: 2}, {kv: 0.95, blocks: 10}}, 2},

		// Mean 10/3, spread √(((0.67)²+(1.67)²+(2.33)²)/2)... of 4, 5, 1: 2.08. At most 5.4.
		{"the longest match within a deviation", "aibrix-prefix-cache", []pod{{running: 4, blocks: 2}, {running: 5, blocks: 6}, {running: 1}}, 1},
		// 2, 8, 2: mean 4, spread 3.46: at most 7.46.
		{"a pod over a deviation is skipped", "aibrix-prefix-cache", []pod{{running: 2, blocks: 2}, {running: 8, blocks: 6}, {running: 2}}, 0},
		{"nobody matches", "aibrix-prefix-cache", []pod{{running: 4}, {running: 3}, {running: 5}}, 1},
		// 10−1 > 8: only pods with 1 are matched.
		{"an imbalance restricts the match", "aibrix-prefix-cache", []pod{{running: 10, blocks: 10}, {running: 1, blocks: 1}, {running: 9, blocks: 9}}, 1},

		// tokens/64 + blocks: 0: (640+640)/64 + 10+10 = 40; 1: (0+640−512)/64 + 30+10 = 42;
		{"Dynamo weighs prefill and decode alike", "dynamo-kv", []pod{{prefill: 640, active: 10}, {blocks: 8, active: 30}}, 0},
		// 0: 256·20 + 20; 1: 256·2 + 40
		{"with a scale of 256 prefill decides", "dynamo-kv-256", []pod{{prefill: 640, active: 10}, {blocks: 8, active: 30}}, 1},

		{"over 0.3 of the prompt", "sglang-cache-aware", []pod{{}, {running: 60, blocks: 4}}, 1},
		{"not over 0.3 of it", "sglang-cache-aware", []pod{{}, {running: 60, blocks: 3}}, 0},
		// 65 more than the least, and over 1.5 times it.
		{"imbalanced", "sglang-cache-aware", []pod{{running: 1}, {running: 66, blocks: 10}}, 0},
		// 65 more, but not 1.5 times it.
		{"not imbalanced relative to the least", "sglang-cache-aware", []pod{{running: 140}, {running: 205, blocks: 10}}, 1},
	} {
		cfg := Config{Endpoints: len(c.pods)}
		if err := cfg.setDefaults(); err != nil {
			t.Fatal(err)
		}
		req := unique(1, 0, 640, 5)
		w, err := newWorld(&Workload{Requests: []Request{req}}, c.policy, cfg)
		if err != nil {
			t.Fatal(err)
		}
		r := w.envoys[0].picker.(*rivalPicker)
		for i, p := range c.pods {
			r.pages[i] = page{ok: true, waiting: p.waiting, kv: p.kv}
			r.running[i], r.prefill[i], r.rates[i].ewma = p.running, p.prefill, p.rate
			if r.index != nil {
				r.index.add(i, req.Blocks[:p.blocks])
			} else {
				other := unique(uint64(100+i), 0, p.active*BlockTokens, 1)
				r.active.add(i, &other, 1)
				fill(t, w.engines[i], req.Blocks[:p.blocks])
			}
		}
		j := &job{req: &req, seed: 1}
		if got := r.pick(epoch, j); got != c.want {
			t.Errorf("%s: %s: picked %d, want %d", c.policy, c.name, got, c.want)
		}
	}
}

// fill makes an engine cache blocks.
func fill(t *testing.T, e *engine, blocks []uint64) {
	t.Helper()
	if len(blocks) == 0 {
		return
	}
	m := e.model
	if _, err := m.Submit(0, simRequest(len(blocks)*BlockTokens, blocks)); err != nil {
		t.Fatal(err)
	}
	for at, ok := m.Next(); ok; at, ok = m.Next() {
		m.Advance(at, nil)
	}
	if m.Cached(blocks) != len(blocks) {
		t.Fatalf("%d of %d blocks are cached", m.Cached(blocks), len(blocks))
	}
}

// TestDynamoSharesActiveBlocks: blocks that a running request has count once.
func TestDynamoSharesActiveBlocks(t *testing.T) {
	a := newActiveBlocks(2)
	one := Request{Prompt: 650, Blocks: chain(nil, 1, 10)}
	two := Request{Prompt: 640, Blocks: chain(chain(nil, 1, 6), 2, 4)}
	a.add(1, &one, 1)
	a.add(1, &two, 1)
	shared := make([]int, 2)
	a.shared(one.Blocks, shared)
	if a.total[1] != 11+4 || a.total[0] != 0 || shared[1] != 10 || shared[0] != 0 {
		t.Errorf("total %v, shared %v", a.total, shared)
	}
	a.add(1, &one, -1)
	a.shared(one.Blocks, shared)
	if a.total[1] != 10 || shared[1] != 6 {
		t.Errorf("total %v, shared %v", a.total, shared)
	}
	a.add(1, &two, -1)
	if a.total[1] != 0 || len(a.refs) != 0 {
		t.Errorf("left: %v, %v", a.total, a.refs)
	}
}

// TestWinsorise: of 0, 10, 20, 30, 1000 the median is 20 and the deviations' median
// 10, so 1000 counts as 50.
func TestWinsorise(t *testing.T) {
	v := []float64{0, 10, 20, 30, 1000, math.Inf(-1)}
	scaleAIBrix(v)
	for i, want := range []float64{0, 0.2, 0.4, 0.6, 1, 0} {
		if math.Abs(v[i]-want) > 1e-12 {
			t.Errorf("%d: %v, want %v", i, v[i], want)
		}
	}
}

// TestDrainRate: 100 tokens each second.
func TestDrainRate(t *testing.T) {
	d := drainRate{}
	for s := range 120 {
		d.completed = 100 * s
		d.sample(epoch.Add(time.Duration(s) * time.Second))
		if s < 10 && d.ewma != 0 {
			t.Errorf("a rate after %d s", s)
		}
	}
	if math.Abs(d.ewma-100) > 1e-9 {
		t.Errorf("rate %v", d.ewma)
	}
	kept := 0.0
	for s := 120; s < 400; s++ { // nothing completes: first the window empties, then the estimate stays
		d.sample(epoch.Add(time.Duration(s) * time.Second))
		if s == 300 {
			kept = d.ewma
		}
	}
	if d.ewma != kept || kept <= 0 || kept >= 100 {
		t.Errorf("rate %v after silence, %v before", d.ewma, kept)
	}
}

func simRequest(prompt int, blocks []uint64) sim.Request {
	return sim.Request{PromptTokens: prompt, OutputTokens: 1, Hashes: blocks}
}
