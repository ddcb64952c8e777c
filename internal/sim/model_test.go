package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func testModel(t testing.TB, p Params) *Model {
	t.Helper()
	m, err := NewModel(p, vllm{}.bounds(8192), true)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func submit(t testing.TB, m *Model, now time.Duration, r Request) *Seq {
	t.Helper()
	s, err := m.Submit(now, r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// drain runs the model until it is idle.
func drain(m *Model, events []Event) []Event {
	for at, ok := m.Next(); ok; at, ok = m.Next() {
		events = m.Advance(at, events)
	}
	return events
}

func hashes(family uint64, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = family<<32 | uint64(i+1)
	}
	return out
}

// check holds the books against each other: every block is on the free list or in use, references are those of the
// sequences, the cache index leads to blocks that know of it.
func (m *Model) check() error {
	refs := make([]int32, len(m.kv.blocks))
	for _, s := range m.running {
		if s.state != seqRunning {
			return fmt.Errorf("a sequence in state %d is in the batch", s.state)
		}
		if s.computed+s.planned > len(s.blocks)*m.par.BlockSize {
			return fmt.Errorf("%d + %d tokens in %d blocks", s.computed, s.planned, len(s.blocks))
		}
		for _, id := range s.blocks {
			refs[id]++
		}
	}
	free, last := 0, int32(-1)
	onList := make([]bool, len(refs))
	for id := m.kv.head; id >= 0; id = m.kv.blocks[id].next {
		if m.kv.blocks[id].prev != last {
			return fmt.Errorf("block %d: broken list", id)
		}
		onList[id], last = true, id
		free++
	}
	if free != m.kv.free || last != m.kv.tail {
		return fmt.Errorf("%d blocks on the list, %d counted", free, m.kv.free)
	}
	indexed := 0
	for i, b := range m.kv.blocks {
		if b.ref != refs[i] || onList[i] != (b.ref == 0) {
			return fmt.Errorf("block %d: ref %d, used by %d, on the free list %v", i, b.ref, refs[i], onList[i])
		}
		if b.hashed {
			indexed++
			if m.kv.byHash[b.hash] != int32(i) {
				return fmt.Errorf("block %d: not indexed", i)
			}
		}
	}
	if indexed != len(m.kv.byHash) {
		return fmt.Errorf("%d blocks indexed, %d hashed", len(m.kv.byHash), indexed)
	}
	n := 0
	for s := m.first; s != nil; s = s.next {
		if s.state != seqWaiting || len(s.blocks) != 0 {
			return fmt.Errorf("a sequence in state %d with %d blocks waits", s.state, len(s.blocks))
		}
		n++
	}
	if n != m.waiting || len(m.running) > m.par.MaxRunning {
		return fmt.Errorf("%d wait, %d counted, %d run", n, m.waiting, len(m.running))
	}
	return nil
}

func TestModelTimesOneRequest(t *testing.T) {
	m := testModel(t, Params{PrefillRate: 1000, DecodeRate: 100, ChunkTokens: 100, BatchSlowdown: 0.5, KVSlowdown: 1e-12})
	s := submit(t, m, time.Second, Request{PromptTokens: 250, OutputTokens: 3})
	events := drain(m, nil)
	// Three chunks of 100, 100 and 50 tokens and three lone steps of 10 ms; then two decode steps.
	if want := time.Second + 280*time.Millisecond; s.FirstToken.Round(time.Microsecond) != want {
		t.Errorf("first token at %v, want %v", s.FirstToken, want)
	}
	if want := time.Second + 300*time.Millisecond; s.LastToken.Round(time.Microsecond) != want {
		t.Errorf("last token at %v, want %v", s.LastToken, want)
	}
	var kinds []EventKind
	for _, e := range events {
		kinds = append(kinds, e.Kind)
	}
	if !slices.Equal(kinds, []EventKind{FirstToken, Token, Token, Finished}) {
		t.Errorf("events %v", kinds)
	}
}

func TestModelQueuesFirstComeFirstServed(t *testing.T) {
	m := testModel(t, Params{MaxRunning: 2})
	var all []*Seq
	for range 5 {
		all = append(all, submit(t, m, 0, Request{PromptTokens: 16, OutputTokens: 10}))
	}
	m.Advance(0, nil)
	if m.Running() != 2 || m.Waiting() != 3 {
		t.Fatalf("%d run, %d wait; want 2, 3", m.Running(), m.Waiting())
	}
	m.Abort(0, all[3])
	m.Abort(0, all[0])
	drain(m, nil)
	if all[4].Started < all[2].Started {
		t.Errorf("the fifth started at %v, before the third at %v", all[4].Started, all[2].Started)
	}
	if all[0].Output != 0 || all[3].Output != 0 || m.stats.Finished[Aborted] != 2 || m.stats.Finished[Stop] != 3 {
		t.Errorf("finished %v", m.stats.Finished)
	}
	m.Abort(0, all[1]) // has ended: no effect
	if m.stats.Finished[Aborted] != 2 {
		t.Error("an ended sequence was aborted")
	}
}

func TestModelSlowsWithBatchAndLoad(t *testing.T) {
	decode := func(n int, l Load) time.Duration {
		m := testModel(t, Params{})
		m.SetLoad(0, l)
		var s *Seq
		for range n {
			s = submit(t, m, 0, Request{PromptTokens: 16, OutputTokens: 50})
		}
		drain(m, nil)
		return s.LastToken - s.FirstToken
	}
	alone, batch, loaded := decode(1, Load{}), decode(20, Load{}), decode(1, Load{Running: 100})
	if !(alone < batch && batch < loaded) {
		t.Errorf("decode alone %v, in a batch of 20 %v, beside 100 pretended %v: not ascending", alone, batch, loaded)
	}
	if kv := decode(1, Load{KVUsage: 1}); kv <= alone {
		t.Errorf("decode with a full KV cache %v, with an empty one %v", kv, alone)
	}
	m := testModel(t, Params{WaitingCost: time.Second})
	m.SetLoad(0, Load{Waiting: 3})
	s := submit(t, m, 0, Request{PromptTokens: 16, OutputTokens: 1})
	drain(m, nil)
	if s.Started != 3*time.Second {
		t.Errorf("started at %v behind 3 pretended requests of 1 s", s.Started)
	}
	if snap := m.Snapshot(); snap.Waiting != 3 {
		t.Errorf("waiting %d, want the 3 pretended", snap.Waiting)
	}
}

// A load that takes every slot and block still lets one request through at a time.
func TestModelFullLoadStillServes(t *testing.T) {
	m := testModel(t, Params{MaxRunning: 4, Blocks: 8})
	m.SetLoad(0, Load{Running: 1000, KVUsage: 1})
	for range 3 {
		submit(t, m, 0, Request{PromptTokens: 60, OutputTokens: 60})
	}
	drain(m, nil)
	if m.stats.Finished[Stop] != 3 {
		t.Errorf("finished %v, want 3", m.stats.Finished)
	}
}

func TestModelPrefixCache(t *testing.T) {
	const bs = 16
	for _, tc := range []struct {
		name         string
		off          bool
		blocks       int
		first, again []uint64
		prompt       int
		cached       int
	}{
		{name: "same prompt; the last block is computed for its output", blocks: 100, first: hashes(1, 4), again: hashes(1, 4), prompt: 4 * bs, cached: 3 * bs},
		{name: "longer prompt", blocks: 100, first: hashes(1, 4), again: hashes(1, 6), prompt: 6 * bs, cached: 4 * bs},
		{name: "other prompt", blocks: 100, first: hashes(1, 4), again: hashes(2, 4), prompt: 4 * bs, cached: 0},
		{name: "equal tail does not help", blocks: 100, first: hashes(1, 4), again: append(hashes(2, 1), hashes(1, 4)[1:]...), prompt: 4 * bs, cached: 0},
		{name: "switched off", off: true, blocks: 100, first: hashes(1, 4), again: hashes(1, 4), prompt: 4 * bs, cached: 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := testModel(t, Params{BlockSize: bs, Blocks: tc.blocks, NoPrefixCache: tc.off})
			submit(t, m, 0, Request{PromptTokens: len(tc.first) * bs, OutputTokens: 2, Hashes: tc.first})
			drain(m, nil)
			cold := m.clock
			s := submit(t, m, cold, Request{PromptTokens: tc.prompt, OutputTokens: 2, Hashes: tc.again})
			drain(m, nil)
			if s.Cached != tc.cached {
				t.Errorf("%d tokens cached, want %d", s.Cached, tc.cached)
			}
			if got := m.stats.PrefixHits; got != uint64(tc.cached) {
				t.Errorf("hits %d, want %d", got, tc.cached)
			}
			if err := m.check(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestModelSharesBlocksInFlight(t *testing.T) {
	m := testModel(t, Params{BlockSize: 16, Blocks: 100})
	h := hashes(1, 10)
	submit(t, m, 0, Request{PromptTokens: 160, OutputTokens: 100, Hashes: h})
	for m.Running() == 0 || m.running[0].Output == 0 {
		at, _ := m.Next()
		m.Advance(at, nil)
	}
	used := 100 - m.kv.free
	submit(t, m, m.clock, Request{PromptTokens: 160, OutputTokens: 100, Hashes: h})
	for m.Running() < 2 {
		at, _ := m.Next()
		m.Advance(at, nil)
	}
	if now := 100 - m.kv.free; now != used+1 {
		t.Errorf("a second sequence with the same 10 blocks uses %d more, want 1", now-used)
	}
	drain(m, nil)
	if m.KVUsage() != 0 {
		t.Errorf("KV usage %v when idle", m.KVUsage())
	}
}

func TestModelPreempts(t *testing.T) {
	m := testModel(t, Params{BlockSize: 16, Blocks: 10})
	a := submit(t, m, 0, Request{PromptTokens: 64, OutputTokens: 64})
	b := submit(t, m, 0, Request{PromptTokens: 64, OutputTokens: 64})
	events := drain(m, nil)
	if m.stats.Preemptions == 0 || b.Preempted == 0 || a.Preempted != 0 {
		t.Errorf("preempted %d: first %d, last %d times; want only the last", m.stats.Preemptions, a.Preempted, b.Preempted)
	}
	tokens := map[*Seq]int{}
	for _, e := range events {
		if e.Kind != Finished {
			tokens[e.Seq]++
		}
	}
	if tokens[a] != 64 || tokens[b] != 64 {
		t.Errorf("%d and %d tokens, want 64 each", tokens[a], tokens[b])
	}
}

func TestModelRefuses(t *testing.T) {
	m := testModel(t, Params{BlockSize: 16, Blocks: 10})
	for _, r := range []Request{{PromptTokens: 0, OutputTokens: 1}, {PromptTokens: 1, OutputTokens: 0}, {PromptTokens: 160, OutputTokens: 1}} {
		if _, err := m.Submit(0, r); err == nil {
			t.Errorf("%d + %d tokens accepted", r.PromptTokens, r.OutputTokens)
		}
	}
	if _, err := NewModel(Params{Blocks: -1}, Bounds{}, false); err == nil {
		t.Error("negative block count accepted")
	}
}

func TestModelLora(t *testing.T) {
	m := testModel(t, Params{MaxLoras: 1})
	submit(t, m, 0, Request{PromptTokens: 10, OutputTokens: 2, Adapter: "a"})
	b := submit(t, m, 0, Request{PromptTokens: 10, OutputTokens: 2, Adapter: "b"})
	m.Advance(0, nil)
	now := func() LoraSeries {
		return slices.MaxFunc(m.lora, func(x, y LoraSeries) int { return int(x.At - y.At) })
	}
	if got := now(); got.Running != "a" || got.Waiting != "b" || b.Started >= 0 {
		t.Errorf("running %q, waiting %q", got.Running, got.Waiting)
	}
	drain(m, nil)
	if got := now(); got.Running != "" || got.Waiting != "" || got.At != m.clock {
		t.Errorf("when idle: %+v", got)
	}
	if len(m.lora) != 4 {
		t.Errorf("series %+v, want a|b, |b, b|, |", m.lora)
	}
}

// Random workloads, with aborts and changes of load, keep the books balanced, lose no request and no token, and keep
// time going forward. The same seed gives the same run.
func TestModelConserves(t *testing.T) {
	preempted := uint64(0)
	run := func(seed uint64) (uint64, time.Duration) {
		rng := rand.New(rand.NewPCG(seed, 1))
		m := testModel(t, Params{MaxRunning: 1 + rng.IntN(12), ChunkTokens: 8 + rng.IntN(100), BlockSize: 1 + rng.IntN(16),
			Blocks: 64 + rng.IntN(64), NoPrefixCache: rng.IntN(4) == 0, MaxLoras: 1 + rng.IntN(2)})
		var live []*Seq
		tokens := map[*Seq]int{}
		submitted, ended, aborted := 0, 0, 0
		now, last := time.Duration(0), time.Duration(0)
		note := func(events []Event) {
			for _, e := range events {
				if e.At < last || e.At > now {
					t.Fatalf("seed %d: an event at %v after one at %v, now %v", seed, e.At, last, now)
				}
				last = e.At
				if e.Kind != Finished {
					tokens[e.Seq]++
					continue
				}
				ended++
				if tokens[e.Seq] != e.Seq.OutputTokens {
					t.Fatalf("seed %d: %d tokens, want %d", seed, tokens[e.Seq], e.Seq.OutputTokens)
				}
				live = slices.DeleteFunc(live, func(s *Seq) bool { return s == e.Seq })
			}
			if err := m.check(); err != nil {
				t.Fatalf("seed %d at %v: %v", seed, now, err)
			}
		}
		for range 150 {
			now += time.Duration(rng.IntN(30)) * time.Millisecond
			note(m.Advance(now, nil))
			switch rng.IntN(10) {
			case 0:
				if len(live) > 0 {
					i := rng.IntN(len(live))
					m.Abort(now, live[i])
					live = slices.Delete(live, i, i+1)
					aborted++
				}
			case 1:
				m.SetLoad(now, Load{Running: rng.IntN(10), Waiting: rng.IntN(3), KVUsage: rng.Float64()})
			default:
				prompt, out := 1+rng.IntN(20), 1+rng.IntN(20)
				if rng.IntN(8) == 0 {
					prompt, out = 1+rng.IntN(m.Capacity()/2), 1+rng.IntN(m.Capacity()/4)
				}
				s := submit(t, m, now, Request{PromptTokens: prompt, OutputTokens: out, Reason: Length,
					Hashes:  hashes(uint64(rng.IntN(4)), rng.IntN((prompt+out)/m.par.BlockSize+1)),
					Adapter: []string{"", "", "a", "b", "c"}[rng.IntN(5)]})
				live = append(live, s)
				submitted++
			}
			note(m.Advance(now, nil))
		}
		for at, ok := m.Next(); ok; at, ok = m.Next() {
			now = max(now, at)
			note(m.Advance(now, nil))
		}
		if submitted != ended+aborted || len(live) != 0 || m.Running()+m.Waiting() != 0 || m.kv.free != m.par.Blocks {
			t.Fatalf("seed %d: %d submitted, %d ended, %d aborted, %d live, %d blocks free of %d", seed, submitted, ended, aborted, len(live), m.kv.free, m.par.Blocks)
		}
		if got := m.stats.Finished; int(got[Length]) != ended || int(got[Aborted]) != aborted {
			t.Fatalf("seed %d: finished %v", seed, got)
		}
		preempted += m.stats.Preemptions
		return m.stats.GenerationTokens, m.clock
	}
	for seed := range uint64(10) {
		tok, end := run(seed)
		if tok2, end2 := run(seed); tok != tok2 || end != end2 {
			t.Fatalf("seed %d: %d tokens until %v, then %d until %v", seed, tok, end, tok2, end2)
		}
	}
	if preempted == 0 {
		t.Error("no run preempted")
	}
}

// The cache agrees with one that keeps plain slices.
func TestKVCacheAgainstPlain(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 2))
		c := newKVCache(20)
		free := make([]int32, 20) // plain: least recently used first
		for i := range free {
			free[i] = int32(i)
		}
		content := map[int32]uint64{}
		find := func(h uint64) (int32, bool) {
			for id, x := range content {
				if x == h {
					return id, true
				}
			}
			return 0, false
		}
		var held [][]int32
		for step := range 2000 {
			if len(held) > 0 && (rng.IntN(3) == 0 || len(free) < 6) {
				i := rng.IntN(len(held))
				ids := held[i]
				held = slices.Delete(held, i, i+1)
				c.release(ids)
				for j := len(ids) - 1; j >= 0; j-- {
					if !slices.ContainsFunc(held, func(o []int32) bool { return slices.Contains(o, ids[j]) }) {
						free = append(free, ids[j])
					}
				}
			} else if len(free) >= 6 {
				hs := hashes(uint64(rng.IntN(6)), 1+rng.IntN(5))
				ids, idle := c.prefix(hs, nil)
				n, wantIdle := 0, 0
				for ; n < len(hs); n++ {
					id, ok := find(hs[n])
					if !ok {
						break
					}
					if n >= len(ids) || ids[n] != id {
						t.Fatalf("seed %d step %d: prefix %v, block %d is missing", seed, step, ids, id)
					}
					if slices.Contains(free, id) {
						wantIdle++
					}
				}
				if n != len(ids) || idle != wantIdle {
					t.Fatalf("seed %d step %d: %d hits, %d idle; want %d, %d", seed, step, len(ids), idle, n, wantIdle)
				}
				for _, id := range ids {
					c.share(id)
					free = slices.DeleteFunc(free, func(f int32) bool { return f == id })
				}
				for len(ids) < len(hs) {
					id := c.take()
					if id != free[0] {
						t.Fatalf("seed %d step %d: took %d, the oldest is %d", seed, step, id, free[0])
					}
					free = free[1:]
					delete(content, id)
					ids = append(ids, id)
				}
				for i := n; i < len(hs); i++ {
					c.publish(ids[i], hs[i])
					if _, dup := find(hs[i]); !dup {
						content[ids[i]] = hs[i]
					}
				}
				held = append(held, ids)
			}
			if c.free != len(free) || len(c.byHash) != len(content) {
				t.Fatalf("seed %d step %d: %d free, %d cached; want %d, %d", seed, step, c.free, len(c.byHash), len(free), len(content))
			}
		}
	}
}

// BenchmarkModelFleet is `shunt sim`'s load: 100 engines, b.N requests of a conversation-like size, round robin.
func BenchmarkModelFleet(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	fleet := make([]*Model, 100)
	for i := range fleet {
		m, err := NewModel(Params{BlockSize: 64, Blocks: 8192}, vllm{}.bounds(131_072), false)
		if err != nil {
			b.Fatal(err)
		}
		fleet[i] = m
	}
	b.ReportAllocs()
	var events []Event
	now := time.Duration(0)
	for i := range b.N {
		now += 5 * time.Millisecond
		m := fleet[i%len(fleet)]
		events = m.Advance(now, events[:0])
		prompt := 1 + rng.IntN(14_000)
		if _, err := m.Submit(now, Request{PromptTokens: prompt, OutputTokens: 1 + rng.IntN(700), Hashes: hashes(uint64(rng.IntN(5000)), prompt/64)}); err != nil {
			b.Fatal(err)
		}
		events = m.Advance(now, events[:0])
	}
	tokens := uint64(0)
	for _, m := range fleet {
		drain(m, nil)
		tokens += m.stats.GenerationTokens
	}
	b.ReportMetric(float64(tokens)/float64(b.N), "tokens/op")
}
