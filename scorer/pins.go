package scorer

import (
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Pins remembers where sessions were last sent. It is a table of fixed size in
// which a new session takes the place of an old one: what is lost is a hint. The
// zero value is not usable; it is safe for concurrent use, and no one waits.
type Pins struct{ entries []pin }

// pin is one entry. A reader that comes in the middle of a change finds a key
// that is not its own, or another's endpoint for one pick.
type pin struct {
	key   atomic.Uint64
	value atomic.Uint64 // seconds of pool.Stamp until when << 32 | slot
}

const pinEntries = 1 << 15

// NewPins returns an empty table of half a megabyte.
func NewPins() *Pins { return &Pins{entries: make([]pin, pinEntries)} }

// get returns the slot that a session is pinned to, 0 for none.
func (p *Pins) get(session uint64, now time.Time) int {
	e := &p.entries[session%pinEntries]
	if e.key.Load() != session {
		return 0
	}
	v := e.value.Load()
	if v>>32 < seconds(now) {
		return 0
	}
	return int(v & (1<<32 - 1))
}

// set pins a session for a while.
func (p *Pins) set(session uint64, slot int, now time.Time, ttl time.Duration) {
	e := &p.entries[session%pinEntries]
	e.value.Store(seconds(now.Add(ttl))<<32 | uint64(slot))
	e.key.Store(session)
}

func seconds(t time.Time) uint64 { return uint64(pool.Stamp(t) / int64(time.Second)) }
