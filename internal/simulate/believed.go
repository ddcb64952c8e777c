package simulate

import "math/bits"

// believed is what a rival remembers of prompts and where they went: sets of
// endpoints by block, bounded by one LRU for each endpoint or one for all.
type believed struct {
	words   int
	holders map[uint64][]uint64 // bitmaps of endpoints
	lrus    []lru               // by endpoint, or a single one
	active  []uint64
}

func newBelieved(endpoints, lrus, capacity int) *believed {
	b := &believed{words: (endpoints + 63) / 64, holders: make(map[uint64][]uint64), lrus: make([]lru, lrus)}
	for i := range b.lrus {
		b.lrus[i] = lru{capacity: max(1, capacity), at: make(map[uint64]int32), nodes: make([]lruNode, 1)}
	}
	b.active = make([]uint64, b.words)
	return b
}

// add notes that a prompt goes to an endpoint. Its last blocks are the first to be
// forgotten.
func (b *believed) add(endpoint int, blocks []uint64) {
	l, own := &b.lrus[0], false
	if len(b.lrus) > 1 {
		l, own = &b.lrus[endpoint], true
	}
	blocks = blocks[:min(len(blocks), l.capacity)]
	for k := len(blocks) - 1; k >= 0; k-- {
		h := blocks[k]
		if old, evicted := l.touch(h); evicted {
			set := b.holders[old]
			if own {
				set[endpoint/64] &^= 1 << (endpoint % 64)
			}
			if !own || empty(set) {
				delete(b.holders, old)
			}
		}
		set := b.holders[h]
		if set == nil {
			set = make([]uint64, b.words)
			b.holders[h] = set
		}
		set[endpoint/64] |= 1 << (endpoint % 64)
	}
}

func empty(set []uint64) bool {
	for _, w := range set {
		if w != 0 {
			return false
		}
	}
	return true
}

// longest fills in how many blocks, from the first on without a gap, each endpoint
// was sent.
func (b *believed) longest(blocks []uint64, match []int) {
	clear(match)
	for w := range b.active {
		b.active[w] = ^uint64(0)
	}
	for k, h := range blocks {
		set, any := b.holders[h], uint64(0)
		for w := range b.active {
			has := uint64(0)
			if set != nil {
				has = set[w]
			}
			b.note(b.active[w]&^has, w, k, match)
			b.active[w] &= has
			any |= b.active[w]
		}
		if any == 0 {
			return
		}
	}
	for w := range b.active {
		b.note(b.active[w], w, len(blocks), match)
	}
}

func (b *believed) note(set uint64, word, n int, match []int) {
	for ; set != 0; set &= set - 1 {
		if i := word*64 + bits.TrailingZeros64(set); i < len(match) {
			match[i] = n
		}
	}
}

// count fills in how many of the blocks each endpoint was sent, up to the first that
// none was.
func (b *believed) count(blocks []uint64, match []int) {
	clear(match)
	for _, h := range blocks {
		set := b.holders[h]
		if set == nil {
			return
		}
		for w, word := range set {
			for ; word != 0; word &= word - 1 {
				match[w*64+bits.TrailingZeros64(word)]++
			}
		}
	}
}

// lru is a bounded set. Node 0 is the ends of the list.
type lru struct {
	capacity int
	at       map[uint64]int32
	nodes    []lruNode
}

type lruNode struct {
	hash         uint64
	newer, older int32
}

// touch makes a hash the newest and returns what had to go for it.
func (l *lru) touch(h uint64) (evicted uint64, ok bool) {
	id, held := l.at[h]
	switch {
	case held:
		l.unlink(id)
	case len(l.at) < l.capacity:
		l.nodes = append(l.nodes, lruNode{hash: h})
		id = int32(len(l.nodes) - 1)
		l.at[h] = id
	default:
		id = l.nodes[0].newer // the oldest
		l.unlink(id)
		evicted, ok = l.nodes[id].hash, true
		delete(l.at, evicted)
		l.nodes[id].hash = h
		l.at[h] = id
	}
	last := l.nodes[0].older // the newest
	l.nodes[id].older, l.nodes[id].newer = last, 0
	l.nodes[last].newer = id
	l.nodes[0].older = id
	return evicted, ok
}

func (l *lru) unlink(id int32) {
	n := l.nodes[id]
	l.nodes[n.older].newer, l.nodes[n.newer].older = n.newer, n.older
}

// activeBlocks counts the different blocks of the requests in flight at each
// endpoint.
type activeBlocks struct {
	refs  map[uint64][]blockRef
	total []int // by endpoint
}

type blockRef struct{ endpoint, n int32 }

func newActiveBlocks(endpoints int) *activeBlocks {
	return &activeBlocks{refs: make(map[uint64][]blockRef), total: make([]int, endpoints)}
}

// add takes a request in (by 1) or out (by -1). What its prompt has over whole
// blocks is a block of its own.
func (a *activeBlocks) add(endpoint int, r *Request, by int32) {
	if r.Prompt%BlockTokens > 0 {
		a.total[endpoint] += int(by)
	}
	for _, h := range r.prompt() {
		refs := a.refs[h]
		at := 0
		for at < len(refs) && refs[at].endpoint != int32(endpoint) {
			at++
		}
		if at == len(refs) {
			refs = append(refs, blockRef{endpoint: int32(endpoint)})
			a.total[endpoint]++
		}
		if refs[at].n += by; refs[at].n == 0 {
			a.total[endpoint]--
			refs[at] = refs[len(refs)-1]
			refs = refs[:len(refs)-1]
		}
		if len(refs) == 0 {
			delete(a.refs, h)
		} else {
			a.refs[h] = refs
		}
	}
}

// shared fills in how many of the blocks are active at each endpoint.
func (a *activeBlocks) shared(blocks []uint64, out []int) {
	clear(out)
	for _, h := range blocks {
		for _, ref := range a.refs[h] {
			out[ref.endpoint]++
		}
	}
}
