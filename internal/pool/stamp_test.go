package pool

import (
	"testing"
	"time"
	"unsafe"
)

// steppedBy is t after a step of the wall clock, of whole seconds: a time that has
// both clocks holds that one's seconds from bit 30 of its first word on.
func steppedBy(t time.Time, step time.Duration) time.Time {
	*(*uint64)(unsafe.Pointer(&t)) += uint64(step/time.Second) << 30
	return t
}

// TestStampFollowsNoStepOfTheClock: a time of the process's own clock counts from
// its beginning, whatever the wall clock says meanwhile; one without it is what it
// says.
func TestStampFollowsNoStepOfTheClock(t *testing.T) {
	if at := time.Unix(1000, 7); Stamp(at) != at.UnixNano() {
		t.Errorf("%v is %d", at, Stamp(at))
	}
	const later = 5 * time.Second
	now := time.Now()
	before := Stamp(now)
	for _, step := range []time.Duration{time.Hour, -time.Hour} {
		stepped := steppedBy(now.Add(later), step)
		if d := stepped.Round(0).Sub(now.Round(0)); d != later+step {
			t.Fatalf("the wall clock went on by %v", d)
		}
		if got := time.Duration(Stamp(stepped) - before); got != later {
			t.Errorf("after a step of %v: %v, want %v", step, got, later)
		}
	}
	l := &Live{Addr: "a"}
	l.Pushback(now)
	if l.PushedBack(steppedBy(now.Add(2*pushbackSpan), -time.Hour)) {
		t.Error("a clock that is set back makes a refusal last for an hour")
	}
}
