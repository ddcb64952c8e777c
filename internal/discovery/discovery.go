// Package discovery finds the endpoints of a pool. Each kind of source is one
// file here; what they find is merged and measured elsewhere.
package discovery

import (
	"context"

	"github.com/shuntproxy/shunt/internal/pool"
)

// State is what a source knows of the set that it delivers.
type State uint8

const (
	// Complete sets are all endpoints there are, now.
	Complete State = iota
	// LastGood sets were complete once; the source can't say what changed.
	LastGood
)

// Set is all that one source found.
type Set struct {
	// Targets, each with Source set and no address twice. The receiver owns
	// them.
	Targets []pool.Target
	State   State
}

// Source is one source of endpoints.
//
// Run delivers a full set first, as soon as it has one, and then a full set at
// each change, also of State, until ctx ends; only then it returns, and only
// what went wrong in starting is an error. It calls deliver from one goroutine
// at a time, never after it returned, and outlives what goes wrong on its way:
// it keeps the last good set and says so in the set's State. deliver does not
// block.
type Source interface {
	Run(ctx context.Context, deliver func(Set)) error
}

// Static is a source whose endpoints never change.
type Static struct {
	targets []pool.Target
}

// NewStatic returns a source of endpoints that were validated already.
func NewStatic(targets []pool.Target) *Static {
	return &Static{withSource(targets, "static")}
}

// Run delivers the endpoints once and waits for the end of ctx.
func (s *Static) Run(ctx context.Context, deliver func(Set)) error {
	deliver(Set{Targets: append([]pool.Target(nil), s.targets...)})
	<-ctx.Done()
	return nil
}

func withSource(targets []pool.Target, source string) []pool.Target {
	out := append([]pool.Target(nil), targets...)
	for i := range out {
		out[i].Source = source
	}
	return out
}
