// Package simulate replays requests over simulated engines in virtual time, under
// shunt's own policies and under restatements of those of other routers, and
// measures what clients would see. It drives the state machines of internal/sim
// and picks with the code of scorer over real snapshots and live loads: only the
// clock, the network and the engines are simulated. The same input gives the same
// result.
package simulate

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"
)

// BlockTokens is the size of one block of content, for the engines' KV caches and
// for the prefix indexes: 256 bytes of text, the least that scorer hashes.
const BlockTokens = 64

// Request is one request of a workload.
type Request struct {
	// At is when it arrives, from the start of the run.
	At time.Duration
	// Prompt and Output are tokens, each at least 1.
	Prompt, Output int
	// Blocks are chained hashes of the content in whole blocks of BlockTokens, the
	// prompt's first, then the output's as far as a later prompt repeats it. Equal
	// hashes mean equal content up to there.
	Blocks []uint64
	// Session is who asks, 0 for nobody in particular.
	Session uint64

	objective int // its position in Flow.Objectives
}

// prompt returns the blocks of the prompt.
func (r *Request) prompt() []uint64 { return r.Blocks[:min(len(r.Blocks), r.Prompt/BlockTokens)] }

// ChangeKind says what a Change does.
type ChangeKind uint8

// The changes of a fleet.
const (
	// Lose ends an endpoint: what runs there breaks, and it refuses connections.
	Lose ChangeKind = iota
	// Join starts a further endpoint with an empty cache.
	Join
	// Slow makes an endpoint's steps last Factor times as long.
	Slow
)

// Change is something that happens to an endpoint in the middle of a run.
type Change struct {
	At       time.Duration
	Kind     ChangeKind
	Endpoint int // its number, from 0; Join ignores it
	Factor   float64
}

// Workload is what is replayed.
type Workload struct {
	Name     string
	Requests []Request // by At
	Changes  []Change  // by At
	// Slowdowns are those of the endpoints from the start on, by number; what is
	// missing is 1.
	Slowdowns []float64
	// Dropped is how many lines of a trace are no requests.
	Dropped int
}

// WithSpeed returns the workload with all times divided by speed.
func (w *Workload) WithSpeed(speed float64) *Workload {
	out := *w
	out.Requests, out.Changes = slices.Clone(w.Requests), slices.Clone(w.Changes)
	for i := range out.Requests {
		out.Requests[i].At = time.Duration(float64(out.Requests[i].At) / speed)
	}
	for i := range out.Changes {
		out.Changes[i].At = time.Duration(float64(out.Changes[i].At) / speed)
	}
	return &out
}

// Smoothed returns the workload with arrivals of the same moment spread at random
// until the next: some traces have a clock of several seconds.
func (w *Workload) Smoothed(seed uint64) *Workload {
	out := *w
	out.Requests = slices.Clone(w.Requests)
	rng := rand.New(rand.NewPCG(seed, 0x51307))
	rs := out.Requests
	for from := 0; from < len(rs); {
		to := from + 1
		for to < len(rs) && rs[to].At == rs[from].At {
			to++
		}
		if to < len(rs) {
			gap := float64(rs[to].At - rs[from].At)
			for i := from; i < to; i++ {
				rs[i].At += time.Duration(gap * rng.Float64())
			}
		}
		from = to
	}
	sortRequests(rs)
	return &out
}

func sortRequests(rs []Request) {
	slices.SortStableFunc(rs, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
}

// mix is the output function of SplitMix64 (Steele, Lea, Flood 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// chain appends blocks whose content is told by id, after the block parent.
func chain(blocks []uint64, id uint64, n int) []uint64 {
	parent := uint64(0)
	if len(blocks) > 0 {
		parent = blocks[len(blocks)-1]
	}
	for range n {
		parent = mix(parent ^ mix(id))
		blocks = append(blocks, parent)
	}
	return blocks
}
