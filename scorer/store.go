package scorer

import (
	"sync"
	"sync/atomic"

	"github.com/shuntproxy/shunt/internal/pool"
)

// store is one endpoint's blocks in order of use. They lie in pieces: a few blocks
// that follow each other in a prompt and have always been used together, so that a
// long prompt is noted by a fraction of its blocks. Where prompts part inside a
// piece, it is cut there. Pieces are found by their first block.
type store struct {
	live *pool.Live
	size atomic.Int64

	mu sync.Mutex
	// protected by mu
	gone        bool
	capacity    int      // in blocks
	pieces      []piece  // piece 0 is none
	table       []uint32 // places in pieces, open addressing; 0 is free
	newest, old uint32   // ends of the list by use
	free        uint32   // list of free pieces
	used        int      // pieces
	count       int      // blocks
}

// pieceBlocks is how many blocks a piece holds: enough to make a prompt of 1,000
// blocks cheap, and not so many that prompts of one block waste most of it.
const pieceBlocks = 4

// piece is a run of blocks of one prompt. In the list by use each of its blocks is
// newer than the next.
type piece struct {
	blocks       [pieceBlocks]uint64
	newer, older uint32 // older is the next free one in a free piece
	after        uint32 // the piece that followed in the prompt that used it last: a hint
	n            uint32 // blocks
}

func newStore(l *pool.Live, capacity int) *store {
	return &store{live: l, capacity: capacity, pieces: make([]piece, 1), table: make([]uint32, 16)}
}

// home is where a piece belongs in a table of any size.
func (p *piece) home() uint32 { return uint32(p.blocks[0] >> 20) }

// beginning returns the piece that begins with a block, 0 if there is none.
func (s *store) beginning(h uint64) uint32 {
	mask := uint32(len(s.table) - 1)
	for p := uint32(h>>20) & mask; ; p = (p + 1) & mask {
		if at := s.table[p]; at == 0 || s.pieces[at].blocks[0] == h {
			return at
		}
	}
}

// following returns the piece that begins with a block, 0 if there is none. It is
// likely the one that followed prev, which may be 0, the last time.
func (s *store) following(prev uint32, h uint64) uint32 {
	if at := s.pieces[prev].after; at != 0 && s.pieces[at].n > 0 && s.pieces[at].blocks[0] == h {
		return at
	}
	at := s.beginning(h)
	if prev != 0 {
		s.pieces[prev].after = at
	}
	return at
}

// use makes as many of the blocks as are held the newest, the first of them the
// newest of all, and returns how many they are, and the last piece of them, which
// ends with the last of them; 0 for none.
func (s *store) use(blocks []uint64) (held int, last uint32) {
	for held < len(blocks) {
		at := s.following(last, blocks[held])
		if at == 0 || at == last { // a block that follows itself: someone made hashes collide
			break
		}
		p := &s.pieces[at]
		n := 1
		for most := min(int(p.n), len(blocks)-held); n < most && p.blocks[n] == blocks[held+n]; n++ {
		}
		if n < int(p.n) {
			s.cut(at, n)
		}
		s.moveAfter(last, at)
		held += n
		last = at
	}
	return held, last
}

// cut leaves the first n blocks in a piece and puts the others into one of their
// own, which is as old as they were.
func (s *store) cut(at uint32, n int) {
	tail := s.take() // may move the pieces
	p, t := &s.pieces[at], &s.pieces[tail]
	t.n = uint32(copy(t.blocks[:], p.blocks[n:p.n]))
	t.after, p.after, p.n = p.after, tail, uint32(n)
	s.enter(tail)
	s.link(at, tail)
}

// moveAfter makes a piece the next older one than prev, or the newest where that
// is 0.
func (s *store) moveAfter(prev, at uint32) {
	if prev == 0 && s.newest == at || prev != 0 && s.pieces[prev].older == at {
		return
	}
	s.unlink(at)
	s.link(prev, at)
}

func (s *store) unlink(at uint32) {
	p := &s.pieces[at]
	if p.newer != 0 {
		s.pieces[p.newer].older = p.older
	} else {
		s.newest = p.older
	}
	if p.older != 0 {
		s.pieces[p.older].newer = p.newer
	} else {
		s.old = p.newer
	}
}

// link puts a piece that is not in the list behind prev, or first where that is 0.
func (s *store) link(prev, at uint32) {
	p := &s.pieces[at]
	p.newer = prev
	if prev != 0 {
		p.older = s.pieces[prev].older
		s.pieces[prev].older = at
	} else {
		p.older = s.newest
		s.newest = at
	}
	if p.older != 0 {
		s.pieces[p.older].newer = at
	} else {
		s.old = at
	}
}

// add appends blocks that are not held to the prompt that ends with the piece
// last, 0 for none: they come behind it in the list by use.
func (s *store) add(last uint32, blocks []uint64) {
	s.count += len(blocks)
	if last != 0 { // no other prompt loses by it: it would be cut there again
		p := &s.pieces[last]
		n := copy(p.blocks[p.n:], blocks)
		p.n += uint32(n)
		blocks = blocks[n:]
	}
	for len(blocks) > 0 {
		at := s.take()
		p := &s.pieces[at]
		p.n = uint32(copy(p.blocks[:], blocks))
		p.after = 0
		blocks = blocks[p.n:]
		s.enter(at)
		s.link(last, at)
		s.pieces[last].after = at
		last = at
	}
	s.pieces[0].after = 0
}

// take returns a free piece.
func (s *store) take() uint32 {
	s.used++
	at := s.free
	if at != 0 {
		s.free = s.pieces[at].older
		return at
	}
	s.pieces = append(s.pieces, piece{})
	return uint32(len(s.pieces) - 1)
}

// enter makes a piece one that can be found.
func (s *store) enter(at uint32) {
	if 2*s.used > len(s.table) {
		s.table = make([]uint32, 2*len(s.table))
		for other := s.newest; other != 0; other = s.pieces[other].older {
			s.table[s.freePlace(other)] = other
		}
	}
	s.table[s.freePlace(at)] = at
}

// freePlace is the place in the table for a piece that is not in it.
func (s *store) freePlace(at uint32) uint32 {
	mask := uint32(len(s.table) - 1)
	p := s.pieces[at].home() & mask
	for s.table[p] != 0 {
		p = (p + 1) & mask
	}
	return p
}

// evict removes the block that was used the longest ago and returns it. There
// must be one.
func (s *store) evict() uint64 {
	at := s.old
	p := &s.pieces[at]
	p.n--
	s.count--
	h := p.blocks[p.n]
	if p.n > 0 {
		return h
	}
	s.unlink(at)
	s.forget(at)
	p.older, s.free = s.free, at
	s.used--
	return h
}

// forget takes a piece out of the table and moves back what probed past it.
func (s *store) forget(at uint32) {
	mask := uint32(len(s.table) - 1)
	place := s.pieces[at].home() & mask
	for s.table[place] != at { // others may begin with the same block
		place = (place + 1) & mask
	}
	s.table[place] = 0
	for q := (place + 1) & mask; s.table[q] != 0; q = (q + 1) & mask {
		if home := s.pieces[s.table[q]].home() & mask; (q-home)&mask >= (q-place)&mask {
			s.table[place], s.table[q] = s.table[q], 0
			place = q
		}
	}
}
