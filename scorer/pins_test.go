package scorer

import (
	"testing"
	"time"
	"unsafe"
)

// TestPinsFollowNoStepOfTheClock: a session stays where it is when somebody sets
// the clock, and no longer than it should.
func TestPinsFollowNoStepOfTheClock(t *testing.T) {
	for _, step := range []time.Duration{time.Hour, -time.Hour} {
		p, now := NewPins(), time.Now()
		p.set(7, 3, now, time.Minute)
		at := func(later time.Duration) int {
			stepped := now.Add(later)
			// A time that has both clocks holds the wall's seconds from bit 30 of its first
			// word on.
			*(*uint64)(unsafe.Pointer(&stepped)) += uint64(step/time.Second) << 30
			if d := stepped.Round(0).Sub(now.Round(0)); d != later+step {
				t.Fatalf("the wall clock went on by %v", d)
			}
			return p.get(7, stepped)
		}
		if got := at(50 * time.Second); got != 3 {
			t.Errorf("after a step of %v, within the minute: %d, want 3", step, got)
		}
		if got := at(70 * time.Second); got != 0 {
			t.Errorf("after a step of %v, after the minute: %d, want 0", step, got)
		}
	}
}
