package scorer

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

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
	entries []entry
}

// entry is one block and who holds it.
type entry struct {
	key     atomic.Uint64 // 0 is free
	holders atomic.Uint64 // packed slots, or wideBit and a position in the shard's rows
}

const minTable = 64

func newTable(size int) *table {
	return &table{mask: uint64(size - 1), entries: make([]entry, size)}
}

// find returns the place of a block, -1 if it has none.
func (t *table) find(h uint64) int {
	for at := h & t.mask; ; at = (at + 1) & t.mask {
		switch t.entries[at].key.Load() {
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
		if s.used*8 >= len(t.entries)*5 {
			t = s.grow(t)
		}
		free := h & t.mask
		for t.entries[free].key.Load() != 0 {
			free = (free + 1) & t.mask
		}
		t.entries[free].holders.Store(uint64(slot))
		t.entries[free].key.Store(h)
		s.used++
		return
	}
	word := t.entries[at].holders.Load()
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
			t.entries[at].holders.Store(word | uint64(slot)<<(i*slotBits))
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
	t.entries[at].holders.Store(s.newRow(row))
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
	word := t.entries[at].holders.Load()
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
		t.entries[at].holders.Store(left)
		return
	}
	s.remove(t, uint64(at))
}

// dropWide turns a bitmap of few into a word again.
func (s *shard) dropWide(t *table, at, slot int) {
	word := t.entries[at].holders.Load()
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
		t.entries[at].holders.Store(left)
	}
	s.freeRow(word)
}

// remove frees a place and moves back what probed past it.
func (s *shard) remove(t *table, at uint64) {
	s.used--
	for next := at; ; {
		next = (next + 1) & t.mask
		k := t.entries[next].key.Load()
		if k == 0 {
			break
		}
		if home := k & t.mask; (next-home)&t.mask >= (next-at)&t.mask {
			t.entries[at].holders.Store(t.entries[next].holders.Load())
			t.entries[at].key.Store(k)
			at = next
		}
	}
	t.entries[at].key.Store(0)
	t.entries[at].holders.Store(0)
}

func (s *shard) grow(old *table) *table {
	t := newTable(2 * len(old.entries))
	for i := range old.entries {
		k := old.entries[i].key.Load()
		if k == 0 {
			continue
		}
		at := k & t.mask
		for t.entries[at].key.Load() != 0 {
			at = (at + 1) & t.mask
		}
		t.entries[at].key.Store(k)
		t.entries[at].holders.Store(old.entries[i].holders.Load())
	}
	s.table.Store(t)
	return t
}
