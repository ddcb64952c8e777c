package scorer

import (
	"sync"
	"sync/atomic"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Index holds which prefixes the endpoints of one pool are believed to have in
// their caches: those of the requests that were sent there, bounded per endpoint,
// the least recently used going first. Readers take no lock. It is safe for
// concurrent use, but Sync, which the pool's one writer calls.
//
// A block of an endpoint is never dropped before those that follow it in a
// prompt: each use of a block is a use of all before it, and leaves them newer. So
// an endpoint holds the first m blocks of a prompt for some m.
type Index struct {
	shards [indexShards]shard
	roster atomic.Pointer[roster]

	mu     sync.Mutex // of Sync
	room   []float64
	limits Limits
}

// roster are the endpoints of an Index. It is immutable.
type roster struct {
	stores []*store     // by slot, nil where there is none
	lives  []*pool.Live // of the snapshot that it is of
}

const (
	indexShards = 64
	// slotBits is the width of a slot in a packed set of holders.
	slotBits = 15
	// maxSlot is the largest slot that is indexed.
	maxSlot = 1<<slotBits - 1
	// packed is how many holders fit into one word.
	packed = 4
	// wideBit marks a word that stands for a bitmap.
	wideBit = 1 << 63
	// DefaultBlocks is how many blocks are kept of an endpoint that does not say
	// how large its cache is.
	DefaultBlocks = 31250
	// BytesPerBlock is about what one block of one endpoint takes in memory.
	BytesPerBlock = 64
)

// NewIndex returns an empty index.
func NewIndex() *Index {
	x := &Index{}
	for i := range x.shards {
		x.shards[i].table.Store(newTable(minTable))
		x.shards[i].rows.Store(&[]atomic.Pointer[bitmap]{})
	}
	x.roster.Store(&roster{})
	return x
}

// Limits bound an Index.
type Limits struct {
	// PerEndpoint is the most blocks of one endpoint; 0 is what its KV cache holds,
	// or DefaultBlocks where its engine does not say.
	PerEndpoint int
	// Total is the most blocks of all endpoints together; each gets an equal part.
	Total int
	// BlockTokens is the size of one block in tokens.
	BlockTokens float64
}

// of is the most blocks of an endpoint whose KV cache holds that many tokens, one
// of n.
func (l *Limits) of(room float64, n int) int {
	blocks := l.PerEndpoint
	switch {
	case blocks > 0:
	case room > 0 && l.BlockTokens > 0:
		blocks = int(room / l.BlockTokens)
	default:
		blocks = DefaultBlocks
	}
	return max(1, min(blocks, l.Total/max(1, n)))
}

// Sync makes the index that of a snapshot's endpoints: what it holds of others
// is forgotten.
func (x *Index) Sync(s *pool.Snapshot, l Limits) {
	lives, room := s.Lives(), s.KVRoom()
	x.mu.Lock()
	defer x.mu.Unlock()
	last := x.roster.Load()
	if same(lives, last.lives) && same(room, x.room) && l == x.limits {
		return
	}
	x.room, x.limits = room, l
	old := last.stores
	size := 0
	for _, l := range lives {
		if l.Slot <= maxSlot {
			size = max(size, l.Slot+1)
		}
	}
	next := make([]*store, size)
	for i, one := range lives {
		capacity := l.of(room[i], len(lives))
		switch {
		case one.Slot <= 0 || one.Slot > maxSlot:
		case one.Slot < len(old) && old[one.Slot] != nil && old[one.Slot].live == one:
			next[one.Slot] = old[one.Slot]
			x.trim(next[one.Slot], capacity)
		default:
			next[one.Slot] = newStore(one, capacity)
		}
	}
	for slot, st := range old {
		if st != nil && (slot >= len(next) || next[slot] != st) {
			x.trim(st, 0) // before another takes its slot
		}
	}
	x.roster.Store(&roster{next, lives})
}

func same[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// Len is how many blocks are held of an endpoint.
func (x *Index) Len(l *pool.Live) int {
	if st := x.storeOf(l); st != nil {
		return int(st.size.Load())
	}
	return 0
}

func (x *Index) storeOf(l *pool.Live) *store {
	stores := x.roster.Load().stores
	if l.Slot <= 0 || l.Slot >= len(stores) || stores[l.Slot] == nil || stores[l.Slot].live != l {
		return nil
	}
	return stores[l.Slot]
}

// Add notes that a prompt was sent to an endpoint.
func (x *Index) Add(l *pool.Live, blocks []uint64) {
	st := x.storeOf(l)
	if st == nil || len(blocks) == 0 {
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.gone {
		return
	}
	blocks = blocks[:min(len(blocks), st.capacity)]
	held, last := st.use(blocks)
	blocks = blocks[held:]
	for st.count+len(blocks) > st.capacity { // others than those just used
		old := st.evict()
		x.shardOf(old).drop(old, l.Slot)
	}
	st.add(last, blocks)
	for _, h := range blocks {
		x.shardOf(h).add(h, l.Slot)
	}
	st.size.Store(int64(st.count))
}

// trimStep is how many blocks are evicted under one lock: a worker that adds to
// the same endpoint waits no longer than that.
const trimStep = 64

// trim evicts until a store holds no more than that many; 0 ends it.
func (x *Index) trim(st *store, capacity int) {
	for more := true; more; {
		st.mu.Lock()
		st.capacity, st.gone = max(1, capacity), capacity == 0
		for n := 0; n < trimStep && st.count > capacity; n++ {
			old := st.evict()
			x.shardOf(old).drop(old, st.live.Slot)
		}
		more = st.count > capacity
		st.size.Store(int64(st.count))
		st.mu.Unlock()
	}
}

func (x *Index) shardOf(h uint64) *shard { return &x.shards[h>>58] }
