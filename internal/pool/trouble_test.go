package pool

import (
	"sync"
	"testing"
	"time"
)

func TestPushback(t *testing.T) {
	var l Live
	if l.PushedBack(start) {
		t.Error("at first")
	}
	l.Pushback(start)
	if !l.PushedBack(start) || !l.PushedBack(start.Add(999*time.Millisecond)) || l.PushedBack(start.Add(time.Second)) {
		t.Error("not for a second")
	}
}

func TestDoubt(t *testing.T) {
	var l Live
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	if l.Doubted(start) || l.Trust(start) {
		t.Error("at first")
	}
	l.Doubt(start)
	if !l.Doubted(start) || !l.Doubted(at(9999)) || l.Doubted(at(10_000)) {
		t.Error("not for 10 s")
	}
	l.Doubt(at(20))
	l.Doubt(at(10)) // a worker that was slow
	if l.Trust(at(19)) || !l.Doubted(at(20)) {
		t.Error("an answer to who asked before the fault says nothing")
	}
	if !l.Trust(at(20)) || l.Doubted(at(20)) || l.Trust(at(21)) {
		t.Error("an answer ends it, once")
	}
}

// TestDoubtRaces: whoever tells of a fault is believed by the next pick, however
// many tell of older ones and end the doubts in those meanwhile.
func TestDoubtRaces(t *testing.T) {
	for range 200 {
		s := one(new(Live), 0, nil)
		l := s.Live(0)
		var workers sync.WaitGroup
		for i := range 4 {
			at := start.Add(time.Duration(i) * time.Millisecond)
			workers.Go(func() { l.Doubt(at); l.Trust(start.Add(5 * time.Millisecond)) })
			workers.Go(func() {
				l.Doubt(at.Add(10 * time.Millisecond))
				if now := at.Add(20 * time.Millisecond); !l.Doubted(now) || !s.Troubled([]int32{0}, now) {
					t.Error("not doubted")
				}
			})
		}
		workers.Wait()
		if !l.Doubted(start.Add(20 * time.Millisecond)) {
			t.Fatal("an older fault hid a newer one")
		}
	}
}

// TestReport: the endpoint is doubted before the writer hears of it, and where
// the queue is full.
func TestReport(t *testing.T) {
	h := NewHolder()
	h.Report(Fault{})
	if len(h.Faults()) != 0 {
		t.Error("a fault of nobody")
	}
	for range faultQueue + 3 {
		var l Live
		if h.Report(Fault{Live: &l, At: start}); !l.Doubted(start) {
			t.Fatal("not doubted")
		}
	}
	if h.DroppedFaults() != 3 || len(h.Faults()) != faultQueue {
		t.Errorf("dropped %d, kept %d", h.DroppedFaults(), len(h.Faults()))
	}
}
