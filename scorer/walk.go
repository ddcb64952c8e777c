package scorer

import "math/bits"

// walk is how the blocks of a prompt are looked up: the set of slots that held
// all so far shrinks from block to block, and a slot that drops out has matched
// up to there. Who holds a block holds all before it, so that the walk leaps over
// blocks that all of the set hold.
type walk struct {
	matched []uint32 // by slot

	// few holds the active slots while there are no more than packed, else active
	// does, a bitmap of to words.
	few    [packed]uint64
	n      int
	wide   bool
	to     int
	active []uint64
}

// leap is how many blocks have to be left for the walk to leap: a step costs about
// as much as a look ahead.
const leap = 24

// lookUp fills w.match with the number of blocks, from the first on, that each
// candidate holds.
func (w *pick) lookUp() {
	x, s := w.in.Index, w.in.Snapshot
	roster := x.roster.Load()
	stores := roster.stores
	words := (len(stores) + 63) / 64
	w.walk.active = resize(w.walk.active, words)
	w.walk.matched = resize(w.walk.matched, len(stores))
	clear(w.walk.matched)
	x.walk(&w.walk, w.in.Request.Blocks)
	w.matchM = resize(w.matchM, len(w.cand))
	w.match = w.matchM
	match, matched, slots := w.match, w.walk.matched, s.Slots()
	known := same(s.Lives(), roster.lives) // else a slot may be another's by now
	for k, i := range w.cand {
		match[k] = 0
		slot := int(slots[i])
		if slot < len(matched) && (known || stores[slot] != nil && stores[slot].live == s.Live(i)) {
			match[k] = matched[slot]
		}
	}
}

// walk follows blocks until nobody holds them.
func (x *Index) walk(w *walk, blocks []uint64) {
	if len(blocks) == 0 || !x.begin(w, blocks[0]) {
		return
	}
	for i := 1; i < len(blocks); i++ {
		if left := len(blocks) - i; left > leap {
			i = x.leap(w, blocks, i)
		}
		if !x.step(w, blocks[i], i) {
			return
		}
	}
	w.dropAll(len(blocks))
}

// leap returns the next block, from i on, that not all active slots hold, or the
// last block where they hold all.
func (x *Index) leap(w *walk, blocks []uint64, i int) int {
	last := len(blocks) - 1
	if x.allHold(w, blocks[last]) { // most often the prompt, or what it grew from, was here before
		return last
	}
	// All hold the blocks before low, and not all hold high.
	low, high := i, last
	for size := 1; low+size <= high; size *= 2 {
		at := low + size - 1
		if !x.allHold(w, blocks[at]) {
			high = at
			break
		}
		low = at + 1
	}
	for low < high {
		mid := int(uint(low+high) / 2)
		if x.allHold(w, blocks[mid]) {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}

// holders returns who holds a block: a word of packed slots, or a bitmap where
// wide. It is 0 where nobody does.
func (x *Index) holders(h uint64) (word uint64, row bitmap, wide bool) {
	h = key(h)
	shard := x.shardOf(h)
	t := shard.table.Load()
	at := t.find(h)
	if at < 0 {
		return 0, nil, false
	}
	word = t.entries[at].holders.Load()
	if word&wideBit == 0 {
		return word, nil, false
	}
	return word, shard.row(word), true
}

// begin makes those active that hold the first block, and reports whether any does.
func (x *Index) begin(w *walk, h uint64) bool {
	w.n, w.wide, w.to = 0, false, 0
	word, row, wide := x.holders(h)
	if wide {
		left := 0
		w.to = min(len(row), len(w.active))
		for j := range w.to {
			w.active[j] = row[j].Load()
			left += bits.OnesCount64(w.active[j])
		}
		return w.settle(left)
	}
	for j := range packed {
		if slot := word >> (j * slotBits) & maxSlot; slot != 0 {
			w.few[w.n] = slot
			w.n++
		}
	}
	return w.n > 0
}

// allHold reports whether all active slots hold a block.
func (x *Index) allHold(w *walk, h uint64) bool {
	word, row, wide := x.holders(h)
	switch {
	case word == 0 || w.wide && !wide: // more are active than a word has room for
		return false
	case w.wide:
		for j, slots := range w.active[:w.to] {
			if slots != 0 && (j >= len(row) || slots&^row[j].Load() != 0) {
				return false
			}
		}
		return true
	}
	for _, slot := range w.few[:w.n] {
		if !holds(slot, word, row, wide) {
			return false
		}
	}
	return true
}

func holds(slot, word uint64, row bitmap, wide bool) bool {
	if wide {
		return int(slot/64) < len(row) && row[slot/64].Load()>>(slot%64)&1 == 1
	}
	for j := range packed {
		if word>>(j*slotBits)&maxSlot == slot {
			return true
		}
	}
	return false
}

// step goes on to block i: active slots that don't hold it have matched i. It
// reports whether any is left.
func (x *Index) step(w *walk, h uint64, i int) bool {
	word, row, wide := x.holders(h)
	if !w.wide {
		kept := 0
		for _, slot := range w.few[:w.n] {
			if holds(slot, word, row, wide) {
				w.few[kept] = slot
				kept++
			} else if int(slot) < len(w.matched) {
				w.matched[slot] = uint32(i)
			}
		}
		w.n = kept
		return kept > 0
	}
	if !wide { // at most packed are left
		for j := range packed {
			slot := word >> (j * slotBits) & maxSlot
			if at := int(slot / 64); slot != 0 && at < w.to && w.active[at]>>(slot%64)&1 == 1 {
				w.active[at] &^= 1 << (slot % 64)
				w.few[w.n] = slot
				w.n++
			}
		}
		for j, slots := range w.active[:w.to] {
			w.drop(slots, j, i)
		}
		w.wide = false
		return w.n > 0
	}
	left := 0
	for j, slots := range w.active[:w.to] {
		if slots == 0 {
			continue
		}
		holds := uint64(0)
		if j < len(row) {
			holds = row[j].Load()
		}
		if gone := slots &^ holds; gone != 0 {
			w.drop(gone, j, i)
			w.active[j] = slots & holds
		}
		left += bits.OnesCount64(w.active[j])
	}
	return w.settle(left)
}

// settle says how the slots of a bitmap are held from now on, and reports whether
// there are any.
func (w *walk) settle(left int) bool {
	w.wide = left > packed
	if w.wide {
		return true
	}
	for j, slots := range w.active[:w.to] {
		for ; slots != 0; slots &= slots - 1 {
			w.few[w.n] = uint64(j*64 + bits.TrailingZeros64(slots))
			w.n++
		}
	}
	return w.n > 0
}

// dropAll notes that all active slots matched that many blocks.
func (w *walk) dropAll(matched int) {
	for _, slot := range w.few[:w.n] {
		if int(slot) < len(w.matched) {
			w.matched[slot] = uint32(matched)
		}
	}
	if w.wide {
		for j, slots := range w.active[:w.to] {
			w.drop(slots, j, matched)
		}
	}
}

// drop notes it of the slots in one word of a bitmap.
func (w *walk) drop(slots uint64, word, matched int) {
	for ; slots != 0; slots &= slots - 1 {
		if slot := word*64 + bits.TrailingZeros64(slots); slot < len(w.matched) {
			w.matched[slot] = uint32(matched)
		}
	}
}
