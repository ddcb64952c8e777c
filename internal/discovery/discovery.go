// Package discovery finds the endpoints of a pool. Each kind of source is one
// file here; what they find is merged and measured elsewhere.
package discovery

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

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
	// Status returns the present state. Any goroutine may call it.
	Status() Status
}

// Static is a source whose endpoints never change.
type Static struct {
	targets []pool.Target
	since   time.Time
}

// Status is what a source says of itself. Every source has a method of that
// name, which any goroutine may call.
type Status struct {
	// Where the source looks: a path, names, namespaces.
	Where string
	// Endpoints of the set in use, and when it was delivered; zero before the
	// first.
	Endpoints int
	Loaded    time.Time
	// Error is why the source can't tell what there is now, "" if it can, and
	// Since when it began.
	Error string
	Since time.Time
	// Changes counts sets that were taken over after the first, Failures how often
	// an error began; of a file, also that it became another.
	Changes, Failures uint64
	// Passed are things that were found and are no endpoints, with the reason: at
	// most maxPassed.
	Passed []string
}

// Fault is told of a panic that was caught, or is nil.
type Fault func(cause any, stack []byte)

// caught tells of a panic, and makes an error of it.
func (f Fault) caught(cause any) error {
	if f != nil {
		f(cause, debug.Stack())
	}
	return fmt.Errorf("internal error: %v", cause)
}

// maxPassed bounds Status.Passed.
const maxPassed = 1000

// Status returns the present state.
func (s *Static) Status() Status {
	return Status{Where: "config", Endpoints: len(s.targets), Loaded: s.since}
}

// NewStatic returns a source of endpoints that were validated already.
func NewStatic(targets []pool.Target) *Static {
	return &Static{withSource(targets, "static"), time.Now()}
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
