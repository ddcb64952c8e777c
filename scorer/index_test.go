package scorer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/shuntproxy/shunt/internal/pool"
)

// endpointsOf makes a snapshot of endpoints with these slots.
func endpointsOf(lives ...*pool.Live) *pool.Snapshot {
	var in pool.Input
	for i, l := range lives {
		e := pool.Endpoint{Live: l, Ready: true}
		e.Addr = addrOf(i)
		in.Endpoints = append(in.Endpoints, e)
	}
	return pool.NewSnapshot(in)
}

// dumbIndex is a list of hashes per endpoint, newest first.
type dumbIndex map[*pool.Live][]uint64

func (d dumbIndex) add(l *pool.Live, blocks []uint64, capacity int) {
	blocks = blocks[:min(len(blocks), capacity)]
	list := d[l]
	for _, h := range slices.Backward(blocks) {
		list = slices.DeleteFunc(list, func(x uint64) bool { return x == h })
		list = append([]uint64{h}, list...)
	}
	d[l] = list[:min(len(list), capacity)]
}

func (d dumbIndex) match(l *pool.Live, blocks []uint64) uint32 {
	n := 0
	for n < len(blocks) && slices.Contains(d[l], blocks[n]) {
		n++
	}
	return uint32(n)
}

// matches looks a prompt up as a pick does.
func matches(x *Index, s *pool.Snapshot, blocks []uint64) []uint32 {
	w := new(pick)
	w.in = Input{Snapshot: s, Index: x, Request: Request{Blocks: blocks}}
	for i := range s.Endpoints {
		w.cand = append(w.cand, int32(i))
	}
	w.lookUp()
	return w.match
}

// TestIndexAgainstDumb sends random prompts of a tree to random endpoints, which
// come and go. Long ones are those over which a look-up leaps.
func TestIndexAgainstDumb(t *testing.T) {
	for seed := range uint64(12) {
		rng := rand.New(rand.NewPCG(seed, 3))
		capacity := []int{3, 17, 60, 1000}[rng.IntN(4)]
		size, rounds, longest, parts := []int{3, 20, 150}[seed%3], 3000, 25, 2
		if seed >= 6 {
			size, rounds, longest, parts = []int{2, 9, 40}[seed%3], 400, 300, 40
		}
		x, dumb := NewIndex(), dumbIndex{}
		limits := func() Limits { return Limits{PerEndpoint: capacity, Total: 1 << 30} }
		var slots pool.Slots
		var lives []*pool.Live
		join := func() {
			lives = append(lives, &pool.Live{Addr: fmt.Sprint(len(lives)), Slot: slots.Take()})
		}
		for range size {
			join()
		}
		s := endpointsOf(lives...)
		x.Sync(s, limits())
		prompt := func() []uint64 {
			var blocks []uint64
			chain := uint64(1)
			for range rng.IntN(longest) {
				other := uint64(0) // most go the same way
				if rng.IntN(parts) == 0 {
					other = uint64(rng.IntN(2))
				}
				chain = mix(chain ^ other)
				blocks = append(blocks, chain)
			}
			return blocks
		}
		for range rounds {
			switch rng.IntN(200) {
			case 0: // one goes, another takes its slot
				at := rng.IntN(len(lives))
				slots.Give(lives[at].Slot)
				delete(dumb, lives[at])
				lives = slices.Delete(lives, at, at+1)
				join()
				s = endpointsOf(lives...)
				x.Sync(s, limits())
			case 1:
				capacity = 1 + rng.IntN(80)
				x.Sync(s, limits())
				for l, list := range dumb {
					dumb[l] = list[:min(len(list), capacity)]
				}
			}
			blocks := prompt()
			got := matches(x, s, blocks)
			for i, l := range lives {
				if want := dumb.match(l, blocks); got[i] != want {
					t.Fatalf("seed %d: endpoint %d holds %d of %d, want %d", seed, i, got[i], len(blocks), want)
				}
				if x.Len(l) != len(dumb[l]) {
					t.Fatalf("seed %d: endpoint %d holds %d, want %d", seed, i, x.Len(l), len(dumb[l]))
				}
			}
			l := lives[rng.IntN(len(lives))]
			x.Add(l, blocks)
			dumb.add(l, blocks, capacity)
			x.storeOf(l).check(t)
		}
		for _, l := range lives {
			slots.Give(l.Slot)
		}
		x.Sync(endpointsOf(), Limits{})
		x.checkEmpty(t)
	}
}

// checkEmpty wants nothing to be held of anybody.
func (x *Index) checkEmpty(t *testing.T) {
	t.Helper()
	for i := range x.shards {
		sh := &x.shards[i]
		if sh.used != 0 {
			t.Fatalf("%d blocks of nobody are left", sh.used)
		}
		for j := range *sh.rows.Load() {
			if (*sh.rows.Load())[j].Load() != nil {
				t.Fatal("a bitmap of nobody is left")
			}
		}
		for j := range sh.table.Load().entries {
			if sh.table.Load().entries[j].key.Load() != 0 {
				t.Fatal("a key of nobody is left")
			}
		}
	}
}

// check wants each piece to be in the list and in the table once, and the counts
// to be theirs.
func (s *store) check(t *testing.T) {
	t.Helper()
	listed := map[uint32]bool{}
	blocks, newer := 0, uint32(0)
	for at := s.newest; at != 0; newer, at = at, s.pieces[at].older {
		p := &s.pieces[at]
		if listed[at] || p.n == 0 || p.newer != newer {
			t.Fatalf("piece %d of %d blocks: listed before %v, comes after %d, says %d", at, p.n, listed[at], newer, p.newer)
		}
		listed[at] = true
		blocks += int(p.n)
	}
	entries := map[uint32]bool{}
	for _, at := range s.table {
		if at == 0 {
			continue
		}
		if entries[at] || !listed[at] {
			t.Fatalf("piece %d is found twice or is none", at)
		}
		entries[at] = true
	}
	if newer != s.old || len(listed) != s.used || len(entries) != s.used || blocks != s.count || s.count > s.capacity {
		t.Fatalf("%d pieces, %d found, %d blocks; counted %d and %d of %d", len(listed), len(entries), blocks, s.used, s.count, s.capacity)
	}
}

// TestIndexOfCollisions: who makes hashes collide can bring blocks in any order,
// again and again in one prompt. It costs him hits, and breaks nothing.
func TestIndexOfCollisions(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 9))
		x := NewIndex()
		lives := []*pool.Live{{Addr: "a", Slot: 1}, {Addr: "b", Slot: 2}}
		s := endpointsOf(lives...)
		x.Sync(s, Limits{PerEndpoint: 1 + rng.IntN(60), Total: 1 << 20})
		different := 1 + rng.IntN(12)
		for range 500 {
			blocks := make([]uint64, rng.IntN(80))
			for i := range blocks {
				blocks[i] = mix(uint64(rng.IntN(different)))
				if i > 0 && rng.IntN(3) > 0 {
					blocks[i] = mix(blocks[i-1] % 5)
				}
			}
			for i, n := range matches(x, s, blocks) {
				if int(n) > len(blocks) {
					t.Fatalf("endpoint %d holds %d of %d", i, n, len(blocks))
				}
			}
			l := lives[rng.IntN(2)]
			x.Add(l, blocks)
			x.storeOf(l).check(t)
		}
		x.Sync(endpointsOf(), Limits{})
		x.checkEmpty(t)
	}
}

// TestIndexUnderContention reads, adds and syncs at the same time: nothing races,
// and in the end the index holds what was added last.
func TestIndexUnderContention(t *testing.T) {
	x := NewIndex()
	limits := Limits{PerEndpoint: 200, Total: 1 << 30}
	lives := make([]*pool.Live, 40)
	for i := range lives {
		lives[i] = &pool.Live{Addr: fmt.Sprint(i), Slot: i + 1}
	}
	all, half := endpointsOf(lives...), endpointsOf(lives[:20]...)
	x.Sync(all, limits)
	stop := make(chan struct{})
	var wg, syncing sync.WaitGroup
	syncing.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				limits := limits
				limits.PerEndpoint += i % 50
				x.Sync([]*pool.Snapshot{all, half}[i%2], limits)
			}
		}
	})
	for g := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for range 3000 {
				blocks := make([]uint64, 1+rng.IntN(30))
				chain := uint64(rng.IntN(20))
				for i := range blocks {
					chain = mix(chain)
					blocks[i] = chain
				}
				for _, m := range matches(x, all, blocks) {
					if int(m) > len(blocks) {
						t.Errorf("holds %d of %d", m, len(blocks))
					}
				}
				x.Add(lives[rng.IntN(len(lives))], blocks)
			}
		})
	}
	wg.Wait()
	close(stop)
	syncing.Wait()
	x.Sync(all, limits)
	last := blocksOf(100)
	for _, l := range lives {
		x.Add(l, last)
	}
	for i, m := range matches(x, all, last) {
		if m != 100 {
			t.Errorf("endpoint %d holds %d", i, m)
		}
	}
	x.Sync(endpointsOf(), limits)
	x.checkEmpty(t)
}

// TestIndexOfMany has more endpoints than a word of holders and than a bitmap's
// word, and slots past what is indexed.
func TestIndexOfMany(t *testing.T) {
	x := NewIndex()
	lives := make([]*pool.Live, 300)
	for i := range lives {
		lives[i] = &pool.Live{Addr: fmt.Sprint(i), Slot: i + 1}
	}
	lives[299].Slot = maxSlot + 1
	s := endpointsOf(lives...)
	x.Sync(s, Limits{Total: 1 << 30})
	blocks := blocksOf(300)
	for i, l := range lives {
		x.Add(l, blocks[:i])
	}
	for i, m := range matches(x, s, blocks) {
		want := uint32(i)
		if i == 299 {
			want = 0 // no room for its slot: never a hit, never a fault
		}
		if m != want {
			t.Errorf("endpoint %d holds %d", i, m)
		}
	}
}

func TestLookUpAllocatesNothing(t *testing.T) {
	ws := &worldSpec{request: requestSpec{prompt: 64000, blocks: 1000}}
	for i := range 100 {
		ws.endpoints = append(ws.endpoints, endpointSpec{holds: i * 10})
	}
	in := ws.build(t)
	w := new(pick)
	w.in, w.cand = *in, in.Candidates
	w.lookUp()
	if n := testing.AllocsPerRun(100, w.lookUp); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestLimits(t *testing.T) {
	for _, c := range []struct {
		limits Limits
		room   float64
		n      int
		want   int
	}{
		{Limits{Total: 1 << 30, BlockTokens: 64}, 64000, 10, 1000},
		{Limits{Total: 1 << 30, BlockTokens: 64}, 0, 10, DefaultBlocks},
		{Limits{PerEndpoint: 500, Total: 1 << 30, BlockTokens: 64}, 64000, 10, 500},
		{Limits{Total: 1000, BlockTokens: 64}, 64000, 10, 100},
		{Limits{Total: 5, BlockTokens: 64}, 64000, 10, 1},
		{Limits{Total: 1000}, 0, 0, 1000},
	} {
		if got := c.limits.of(c.room, c.n); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}
