package filter

import (
	"slices"
	"strings"
	"sync/atomic"

	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/pool"
)

// storedSlots bounds the stored responses that a pool remembers: a newer one
// takes the place of an older one in the same slot.
const storedSlots = 1 << 14

// storedResponses remember which endpoint made a response: only that engine has
// it. Any worker uses them.
type storedResponses struct {
	slots atomic.Pointer[[storedSlots]atomic.Pointer[storedResponse]] // nil before the first
}

// storedResponse is immutable.
type storedResponse struct {
	id       uint64 // openai.IDHash
	endpoint string // its key
}

func (s *storedResponses) add(id uint64, endpoint string) {
	slots := s.slots.Load()
	if slots == nil {
		s.slots.CompareAndSwap(nil, new([storedSlots]atomic.Pointer[storedResponse]))
		slots = s.slots.Load()
	}
	slots[id%storedSlots].Store(&storedResponse{id, endpoint})
}

// find returns the endpoint that made a response, "" if that is not known.
func (s *storedResponses) find(id uint64) string {
	slots := s.slots.Load()
	if slots == nil {
		return ""
	}
	if at := slots[id%storedSlots].Load(); at != nil && at.id == id {
		return at.endpoint
	}
	return ""
}

// stores reports whether the request makes a response that may be asked for by
// its id.
func (r *Request) stores() bool { return r.rules.Name == "responses" }

// follow notes that the request is about a response that an engine has stored.
func (r *Request) follow(id uint64) {
	if endpoint := r.pool.stored.find(id); endpoint != "" {
		r.identity.wish().endpoint = endpoint
	}
}

// keeper narrows candidates to the endpoint that has what the request is about,
// if it is one of them: an unknown one is the engine's to judge. From then on
// the request keeps to it, also while it waits for room.
func (r *Request) keeper(snap *pool.Snapshot, index []int32) []int32 {
	endpoint := r.identity.wishes().endpoint
	if endpoint == "" {
		return index
	}
	at := slices.IndexFunc(index, func(i int32) bool { return snap.Endpoints[i].Key == endpoint })
	if at < 0 {
		return index
	}
	r.identity.wish().kept = true
	return index[at : at+1]
}

// unkeep begins a decision anew.
func (r *Request) unkeep() {
	if r.identity.more != nil {
		r.identity.more.kept = false
	}
}

// keepsTo is the subset of the candidates that the request keeps to: what keeper
// found, else what it or a hop before shunt says.
func (r *Request) keepsTo() string {
	if wish := r.identity.wishes(); wish.kept {
		return wish.endpoint
	}
	return r.subset
}

// responseID is the id in what follows /v1/responses/.
func responseID(rest string) uint64 {
	id, _, _ := strings.Cut(rest, "/")
	return openai.IDHash(id)
}
