package pool

import (
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"
)

// standing is what a pick reads of each endpoint beside its metrics, by
// position. Snapshots share the columns that did not change.
type standing struct {
	lives    []*Live
	slots    []int32
	hashes   []uint64  // of the address
	kvTokens []float64 // room of the KV cache in tokens, 0 where the engine does not say
	block    int       // the largest block of a KV cache, in tokens, 0 where no engine says
	full     []bool    // overloaded in absolute terms, as of the last reading
	adapters []adapterCell

	oldest, newest time.Time // when the first and the last endpoint became ready
}

// The readings that make an endpoint overloaded whatever the others do.
const (
	overloadKV      = 0.95 // share of KV blocks in use
	overloadWaiting = 32   // requests queued in the engine
)

func newStanding(endpoints []Endpoint) standing {
	st := standing{
		lives: make([]*Live, len(endpoints)), slots: make([]int32, len(endpoints)), hashes: make([]uint64, len(endpoints)),
		kvTokens: make([]float64, len(endpoints)), full: make([]bool, len(endpoints)), adapters: make([]adapterCell, len(endpoints)),
	}
	for i := range endpoints {
		e := &endpoints[i]
		st.lives[i] = e.Live
		st.slots[i] = int32(e.Live.Slot)
		st.hashes[i] = xxhash.Sum64String(e.Live.Addr)
		if !e.Ready {
			continue
		}
		if st.oldest.IsZero() || e.ReadySince.Before(st.oldest) {
			st.oldest = e.ReadySince
		}
		if e.ReadySince.After(st.newest) {
			st.newest = e.ReadySince
		}
	}
	return st
}

// change takes in new readings.
func (st *standing) change(changes []Change) {
	kvCopied, fullCopied, adaptersCopied := false, false, false
	for _, c := range changes {
		room, full := 0.0, false
		var adapters adapterCell
		if m := c.Metrics; m != nil {
			room = float64(m.BlockSize) * float64(m.NumBlocks)
			st.block = max(st.block, m.BlockSize)
			kv, _ := m.Get(KVCacheUsagePerc)
			waiting, _ := m.Get(NumRequestsWaiting)
			full = kv >= overloadKV || waiting >= overloadWaiting
			adapters = cellOf(&m.LoRA)
		}
		if st.adapters[c.Index] != adapters {
			if !adaptersCopied {
				st.adapters, adaptersCopied = slices.Clone(st.adapters), true
			}
			st.adapters[c.Index] = adapters
		}
		if st.kvTokens[c.Index] != room {
			if !kvCopied {
				st.kvTokens, kvCopied = slices.Clone(st.kvTokens), true
			}
			st.kvTokens[c.Index] = room
		}
		if st.full[c.Index] != full {
			if !fullCopied {
				st.full, fullCopied = slices.Clone(st.full), true
			}
			st.full[c.Index] = full
		}
	}
}

// adapterCell is what an engine says of its adapters, short enough to be scanned:
// names are hashes, and where they do not fit the lists themselves are asked.
type adapterCell struct {
	says             bool
	room             bool // for one more
	long             bool // the names do not fit
	running, waiting uint8
	names            [6]uint32 // the running ones, then the waiting
}

func cellOf(l *LoRA) adapterCell {
	n := len(l.Running) + len(l.Waiting)
	c := adapterCell{says: l.Max > 0 || n > 0, room: n < l.Max, long: n > len(adapterCell{}.names)}
	if c.long {
		return c
	}
	c.running, c.waiting = uint8(len(l.Running)), uint8(len(l.Waiting))
	for i, name := range l.Running {
		c.names[i] = uint32(xxhash.Sum64String(name))
	}
	for i, name := range l.Waiting {
		c.names[len(l.Running)+i] = uint32(xxhash.Sum64String(name))
	}
	return c
}

// AdapterState is how an adapter stands with an endpoint.
type AdapterState uint8

// The states of an adapter.
const (
	AdapterUnknown AdapterState = iota // the engine says nothing of adapters, or said it too long ago
	AdapterRunning                     // it is in use
	AdapterRoom                        // there is room for another
	AdapterWaiting                     // its requests are queued
	AdapterNone
)

// Adapters tells how one adapter stands with endpoints, as of one time.
type Adapters struct {
	s    *Snapshot
	name string
	hash uint32
	age  time.Duration
}

// Adapters returns how an adapter stands with the endpoints as of now.
func (s *Snapshot) Adapters(name string, now time.Time) Adapters {
	return Adapters{s, name, uint32(xxhash.Sum64String(name)), now.Sub(s.base)}
}

// At is the adapter's state at the endpoint at a position.
func (a *Adapters) At(i int32) AdapterState {
	c := &a.s.standing.adapters[i]
	if !c.says || a.age > a.s.until[i] {
		return AdapterUnknown
	}
	at := -1
	if c.long {
		l := &a.s.metrics[i].LoRA
		switch {
		case slices.Contains(l.Running, a.name):
			return AdapterRunning
		case slices.Contains(l.Waiting, a.name):
			at = len(l.Running)
		}
	} else {
		for j := range c.running + c.waiting {
			if c.names[j] == a.hash {
				at = int(j)
				break
			}
		}
		if at >= 0 && at < int(c.running) {
			return AdapterRunning
		}
	}
	switch {
	case c.room:
		return AdapterRoom
	case at >= 0:
		return AdapterWaiting
	default:
		return AdapterNone
	}
}

// Troubled reports whether any endpoint at these positions may be wedged, doubted,
// or have pushed back: most often none is, and this is the quick way to know.
func (s *Snapshot) Troubled(positions []int32, now time.Time) bool {
	lives, at := s.standing.lives, Stamp(now)
	silent := at - int64(wedgedAfter)
	for _, i := range positions {
		l := lives[i]
		if l.trouble.Load() > at || l.sign.Load() < silent && l.inFlight.Load() != 0 {
			return true
		}
	}
	return false
}

// Slots are Live.Slot by position in Endpoints.
func (s *Snapshot) Slots() []int32 { return s.standing.slots }

// Slots hands out the numbers of Live.Slot, the lowest free one first. The zero
// value has handed out none. It is a value of the snapshot's one writer.
type Slots struct{ taken []bool }

// Take returns a free slot.
func (s *Slots) Take() int {
	for i, taken := range s.taken {
		if !taken {
			s.taken[i] = true
			return i + 1
		}
	}
	s.taken = append(s.taken, true)
	return len(s.taken)
}

// Keep marks a slot as taken; 0 is none.
func (s *Slots) Keep(slot int) {
	for len(s.taken) < slot {
		s.taken = append(s.taken, false)
	}
	if slot > 0 {
		s.taken[slot-1] = true
	}
}

// Give frees a slot; 0 is none.
func (s *Slots) Give(slot int) {
	if slot > 0 && slot <= len(s.taken) {
		s.taken[slot-1] = false
	}
}

// Live returns the live load of the endpoint at a position in Endpoints.
func (s *Snapshot) Live(i int32) *Live { return s.standing.lives[i] }

// Lives are the live loads by position in Endpoints; snapshots that differ in
// readings alone share the slice.
func (s *Snapshot) Lives() []*Live { return s.standing.lives }

// AddrHash is a hash of the address of the endpoint at a position: the same in
// every process, for choices that several Envoys have to agree on.
func (s *Snapshot) AddrHash(i int32) uint64 { return s.standing.hashes[i] }

// KVTokens is the room of the KV cache of the endpoint at a position, in tokens,
// 0 where its engine does not say.
func (s *Snapshot) KVTokens(i int32) float64 { return s.standing.kvTokens[i] }

// KVRoom is KVTokens by position; snapshots in which it did not change share the
// slice.
func (s *Snapshot) KVRoom() []float64 { return s.standing.kvTokens }

// BlockSize is the largest block of the endpoints' KV caches in tokens, 0 where
// no engine says it.
func (s *Snapshot) BlockSize() int { return s.standing.block }

// Overloaded reports whether the endpoint at a position was overloaded in
// absolute terms at its last reading, and that is recent enough.
func (s *Snapshot) Overloaded(i int32, now time.Time) bool {
	return s.standing.full[i] && now.Sub(s.base) <= s.until[i]
}

// ReadySpan is when the first and the last of the ready endpoints became so.
func (s *Snapshot) ReadySpan() (oldest, newest time.Time) {
	return s.standing.oldest, s.standing.newest
}
