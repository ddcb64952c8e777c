package scorer

import (
	"math/bits"
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
// prompt: each use of a block is a use of all before it, and they are touched
// last to first. So an endpoint holds the first m blocks of a prompt for some m.
type Index struct {
	shards [indexShards]shard
	stores atomic.Pointer[[]*store] // by slot, nil where there is none

	mu     sync.Mutex // of Sync
	seen   []*pool.Live
	room   []float64
	limits Limits
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
	x.stores.Store(&[]*store{})
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
	if same(lives, x.seen) && same(room, x.room) && l == x.limits {
		return
	}
	x.seen, x.room, x.limits = lives, room, l
	old := *x.stores.Load()
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
	x.stores.Store(&next)
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
	stores := *x.stores.Load()
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
	for i := len(blocks) - 1; i >= 0; i-- {
		h := blocks[i]
		if st.touch(h) {
			continue
		}
		if st.count >= st.capacity {
			old := st.evict()
			x.shardOf(old).drop(old, l.Slot)
		}
		st.insert(h)
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

// shard is a part of the map from blocks to who holds them: open addressing with
// linear probing. A reader that comes in the middle of a change may miss an
// entry or see one that just went; both only make one pick a little worse.
type shard struct {
	table atomic.Pointer[table]
	rows  atomic.Pointer[[]atomic.Pointer[bitmap]] // of blocks with many holders
	mu    sync.Mutex                               // of writers
	// protected by mu
	used int
	free []int // positions in rows
}

// bitmap is a set of slots.
type bitmap []atomic.Uint64

// row returns the bitmap that a word stands for, nil if it is just being changed.
func (s *shard) row(word uint64) bitmap {
	rows := *s.rows.Load()
	if at := int(word &^ wideBit); at < len(rows) {
		if row := rows[at].Load(); row != nil {
			return *row
		}
	}
	return nil
}

// newRow keeps a bitmap and returns the word that stands for it.
func (s *shard) newRow(row bitmap) uint64 {
	rows := *s.rows.Load()
	if len(s.free) == 0 {
		more := make([]atomic.Pointer[bitmap], 2*len(rows)+4)
		for i := range rows {
			more[i].Store(rows[i].Load())
		}
		for i := len(more) - 1; i >= len(rows); i-- {
			s.free = append(s.free, i)
		}
		rows = more
		s.rows.Store(&more)
	}
	at := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	rows[at].Store(&row)
	return wideBit | uint64(at)
}

// freeRow forgets the bitmap that a word stands for.
func (s *shard) freeRow(word uint64) {
	at := int(word &^ wideBit)
	(*s.rows.Load())[at].Store(nil)
	s.free = append(s.free, at)
}

type table struct {
	mask    uint64
	keys    []atomic.Uint64 // 0 is free
	holders []atomic.Uint64 // packed slots, or wideBit and a position in the shard's rows
}

const minTable = 64

func newTable(size int) *table {
	return &table{
		mask: uint64(size - 1), keys: make([]atomic.Uint64, size), holders: make([]atomic.Uint64, size),
	}
}

// find returns the place of a block, -1 if it has none.
func (t *table) find(h uint64) int {
	for at := h & t.mask; ; at = (at + 1) & t.mask {
		switch t.keys[at].Load() {
		case h:
			return int(at)
		case 0:
			return -1
		}
	}
}

// key keeps 0 for free places.
func key(h uint64) uint64 {
	if h == 0 {
		return 1
	}
	return h
}

// add notes that a slot holds a block.
func (s *shard) add(h uint64, slot int) {
	h = key(h)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	at := t.find(h)
	if at < 0 {
		if s.used*8 >= len(t.keys)*5 {
			t = s.grow(t)
		}
		free := h & t.mask
		for t.keys[free].Load() != 0 {
			free = (free + 1) & t.mask
		}
		t.holders[free].Store(uint64(slot))
		t.keys[free].Store(h)
		s.used++
		return
	}
	word := t.holders[at].Load()
	if word&wideBit != 0 {
		row := s.row(word)
		if slot/64 >= len(row) {
			more := make(bitmap, slot/64+1)
			for i := range row {
				more[i].Store(row[i].Load())
			}
			row = more
			(*s.rows.Load())[word&^wideBit].Store(&row)
		}
		row[slot/64].Or(1 << (slot % 64))
		return
	}
	largest := slot
	for i := range packed {
		switch have := int(word >> (i * slotBits) & maxSlot); have {
		case slot:
			return
		case 0:
			t.holders[at].Store(word | uint64(slot)<<(i*slotBits))
			return
		default:
			largest = max(largest, have)
		}
	}
	row := make(bitmap, largest/64+1)
	row[slot/64].Or(1 << (slot % 64))
	for i := range packed {
		have := int(word >> (i * slotBits) & maxSlot)
		row[have/64].Or(1 << (have % 64))
	}
	t.holders[at].Store(s.newRow(row))
}

// drop notes that a slot holds a block no longer.
func (s *shard) drop(h uint64, slot int) {
	h = key(h)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	at := t.find(h)
	if at < 0 {
		return
	}
	word := t.holders[at].Load()
	if word&wideBit != 0 {
		s.dropWide(t, at, slot)
		return
	}
	left := uint64(0)
	n := 0
	for i := range packed {
		if have := word >> (i * slotBits) & maxSlot; have != 0 && int(have) != slot {
			left |= have << (n * slotBits)
			n++
		}
	}
	if left != 0 {
		t.holders[at].Store(left)
		return
	}
	s.remove(t, uint64(at))
}

// dropWide turns a bitmap of few into a word again.
func (s *shard) dropWide(t *table, at, slot int) {
	word := t.holders[at].Load()
	row := s.row(word)
	if slot/64 < len(row) {
		row[slot/64].And(^(uint64(1) << (slot % 64)))
	}
	left, n := uint64(0), 0
	for i := range row {
		for set := row[i].Load(); set != 0; set &= set - 1 {
			if n == packed-1 { // leave room, or one that comes and goes would cost a bitmap each time
				return
			}
			left |= uint64(i*64+bits.TrailingZeros64(set)) << (n * slotBits)
			n++
		}
	}
	if n == 0 {
		s.remove(t, uint64(at))
	} else {
		t.holders[at].Store(left)
	}
	s.freeRow(word)
}

// remove frees a place and moves back what probed past it.
func (s *shard) remove(t *table, at uint64) {
	s.used--
	for next := at; ; {
		next = (next + 1) & t.mask
		k := t.keys[next].Load()
		if k == 0 {
			break
		}
		if home := k & t.mask; (next-home)&t.mask >= (next-at)&t.mask {
			t.holders[at].Store(t.holders[next].Load())
			t.keys[at].Store(k)
			at = next
		}
	}
	t.keys[at].Store(0)
	t.holders[at].Store(0)
}

func (s *shard) grow(old *table) *table {
	t := newTable(2 * len(old.keys))
	for i := range old.keys {
		k := old.keys[i].Load()
		if k == 0 {
			continue
		}
		at := k & t.mask
		for t.keys[at].Load() != 0 {
			at = (at + 1) & t.mask
		}
		t.keys[at].Store(k)
		t.holders[at].Store(old.holders[i].Load())
	}
	s.table.Store(t)
	return t
}

// store is one endpoint's blocks in order of use.
type store struct {
	live *pool.Live
	size atomic.Int64

	mu sync.Mutex
	// protected by mu
	gone        bool
	capacity    int
	nodes       []node
	table       []uint32 // places in nodes, open addressing; 0 is free
	newest, old uint32   // ends of the list by use
	free        uint32   // list of free nodes
	count       int
}

// node 0 is none.
type node struct {
	hash        uint64
	newer, next uint32 // next is the one used before it, or the next free one
}

func newStore(l *pool.Live, capacity int) *store {
	return &store{live: l, capacity: capacity, nodes: make([]node, 1), table: make([]uint32, 16)}
}

func (s *store) find(h uint64) (place, at uint32) {
	mask := uint32(len(s.table) - 1)
	for p := uint32(h>>20) & mask; ; p = (p + 1) & mask {
		if at = s.table[p]; at == 0 || s.nodes[at].hash == h {
			return p, at
		}
	}
}

// touch makes a block the newest and reports whether it is held.
func (s *store) touch(h uint64) bool {
	_, at := s.find(h)
	if at == 0 {
		return false
	}
	if s.newest != at {
		s.unlink(at)
		s.link(at)
	}
	return true
}

func (s *store) unlink(at uint32) {
	n := &s.nodes[at]
	if n.newer != 0 {
		s.nodes[n.newer].next = n.next
	} else {
		s.newest = n.next
	}
	if n.next != 0 {
		s.nodes[n.next].newer = n.newer
	} else {
		s.old = n.newer
	}
}

func (s *store) link(at uint32) {
	n := &s.nodes[at]
	n.newer, n.next = 0, s.newest
	if s.newest != 0 {
		s.nodes[s.newest].newer = at
	} else {
		s.old = at
	}
	s.newest = at
}

// insert adds a block that is not held.
func (s *store) insert(h uint64) {
	if 2*(s.count+1) > len(s.table) {
		s.growTable()
	}
	at := s.free
	if at != 0 {
		s.free = s.nodes[at].next
	} else {
		s.nodes = append(s.nodes, node{})
		at = uint32(len(s.nodes) - 1)
	}
	s.nodes[at].hash = h
	place, _ := s.find(h)
	s.table[place] = at
	s.link(at)
	s.count++
}

func (s *store) growTable() {
	s.table = make([]uint32, 2*len(s.table))
	for at := s.newest; at != 0; at = s.nodes[at].next {
		place, _ := s.find(s.nodes[at].hash)
		s.table[place] = at
	}
}

// evict removes the block that was used the longest ago and returns it. There
// must be one.
func (s *store) evict() uint64 {
	at := s.old
	h := s.nodes[at].hash
	place, _ := s.find(h)
	s.unlink(at)
	mask := uint32(len(s.table) - 1)
	s.table[place] = 0
	for p := (place + 1) & mask; s.table[p] != 0; p = (p + 1) & mask {
		if home := uint32(s.nodes[s.table[p]].hash>>20) & mask; (p-home)&mask >= (p-place)&mask {
			s.table[place], s.table[p] = s.table[p], 0
			place = p
		}
	}
	s.nodes[at] = node{next: s.free}
	s.free = at
	s.count--
	return h
}
