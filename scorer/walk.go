package scorer

import "math/bits"

// walk is how the blocks of a prompt are looked up: the set of slots that held
// all so far shrinks from block to block, and a slot that drops out has matched
// up to there.
type walk struct {
	active  []uint64 // bitmap of slots
	matched []uint32 // by slot
}

// lookUp fills w.match with the number of blocks, from the first on, that each
// candidate holds.
func (w *pick) lookUp() {
	x := w.in.Index
	stores := *x.stores.Load()
	words := (len(stores) + 63) / 64
	w.walk.active = resize(w.walk.active, words)
	w.walk.matched = resize(w.walk.matched, len(stores))
	clear(w.walk.matched)
	x.walk(&w.walk, w.in.Request.Blocks)
	w.matchM = resize(w.matchM, len(w.cand))
	w.match = w.matchM
	for k, i := range w.cand {
		w.match[k] = 0
		slot := int(w.in.Snapshot.SlotOf(i))
		if slot >= len(stores) || w.walk.matched[slot] == 0 {
			continue
		}
		if stores[slot] != nil && stores[slot].live == w.in.Snapshot.Live(i) {
			w.match[k] = w.walk.matched[slot]
		}
	}
}

// walk follows blocks until nobody holds them.
func (x *Index) walk(w *walk, blocks []uint64) {
	// few holds the active slots while there are no more than packed, else active
	// does, from word from up to word to.
	var few [packed]uint64
	n, wide, to := 0, false, 0
	for i, h := range blocks {
		h = key(h)
		shard := x.shardOf(h)
		t := shard.table.Load()
		at := t.find(h)
		if at < 0 {
			w.dropAll(few[:n], wide, to, i)
			return
		}
		word := t.holders[at].Load()
		var row bitmap
		isWide := word&wideBit != 0
		if isWide {
			row = shard.row(word)
		}
		switch {
		case i == 0 && isWide:
			wide, to = true, min(len(row), len(w.active))
			for j := range to {
				w.active[j] = row[j].Load()
			}
		case i == 0:
			for j := range packed {
				if slot := word >> (j * slotBits) & maxSlot; slot != 0 {
					few[n] = slot
					n++
				}
			}
		case wide && isWide:
			left := uint64(0)
			for j := range to {
				was, holds := w.active[j], uint64(0)
				if j < len(row) {
					holds = row[j].Load()
				}
				if gone := was &^ holds; gone != 0 {
					w.drop(gone, j, i)
					w.active[j] = was & holds
				}
				left |= w.active[j]
			}
			if left == 0 {
				return
			}
		case wide: // at most packed are left
			for j := range packed {
				slot := word >> (j * slotBits) & maxSlot
				if j64 := int(slot / 64); slot != 0 && j64 < to && w.active[j64]>>(slot%64)&1 == 1 {
					w.active[j64] &^= 1 << (slot % 64)
					few[n] = slot
					n++
				}
			}
			w.dropAll(nil, true, to, i)
			wide = false
		default:
			kept := 0
			for _, slot := range few[:n] {
				holds := false
				if isWide {
					holds = int(slot/64) < len(row) && row[slot/64].Load()>>(slot%64)&1 == 1
				} else {
					for j := range packed {
						holds = holds || word>>(j*slotBits)&maxSlot == slot
					}
				}
				if holds {
					few[kept] = slot
					kept++
				} else if int(slot) < len(w.matched) {
					w.matched[slot] = uint32(i)
				}
			}
			n = kept
		}
		if n == 0 && !wide {
			return
		}
	}
	w.dropAll(few[:n], wide, to, len(blocks))
}

// dropAll notes that all active slots matched that many blocks.
func (w *walk) dropAll(few []uint64, wide bool, to, matched int) {
	for _, slot := range few {
		if int(slot) < len(w.matched) {
			w.matched[slot] = uint32(matched)
		}
	}
	if wide {
		for j := range to {
			w.drop(w.active[j], j, matched)
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
