package pool

import (
	"sync"
	"testing"
	"time"
	"unsafe"
)

func TestLiveUnderContention(t *testing.T) {
	const workers, rounds = 8, 2000
	var l Live
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for range rounds {
				if w%2 == 0 {
					for !l.TryReserve(l.InFlight()) {
					}
				} else {
					l.Reserve()
				}
				if n := l.InFlight(); n < 1 || n > workers {
					t.Errorf("%d in flight", n)
				}
				l.Release()
			}
		})
	}
	wg.Wait()
	if l.InFlight() != 0 || l.Picks() != workers*rounds {
		t.Errorf("%d in flight, %d picks", l.InFlight(), l.Picks())
	}
}

func TestTryReserveOfAnOldCount(t *testing.T) {
	var l Live
	l.Reserve()
	if l.TryReserve(0) || l.Picks() != 1 {
		t.Error("reserved what another took")
	}
	if !l.TryReserve(1) || l.InFlight() != 2 {
		t.Error("not reserved")
	}
}

func TestLivesShareNoCacheLine(t *testing.T) {
	var pair [2]Live
	if gap := uintptr(unsafe.Pointer(&pair[1].inFlight)) - uintptr(unsafe.Pointer(&pair[0].picks)); gap < 64 {
		t.Errorf("counters of two Lives are %d bytes apart", gap)
	}
}

func TestHolder(t *testing.T) {
	h := NewHolder()
	if s := h.Load(); s == nil || s.Complete || s.ForModel("m") != nil || len(s.All().Index) != 0 {
		t.Fatalf("a new holder has %+v", s)
	}
	s := NewSnapshot(Input{Seq: 7})
	h.Publish(s)
	if h.Load() != s {
		t.Error("not what was published")
	}
	for range faultQueue + 3 {
		h.Report(Fault{Kind: FaultConnect, At: time.Unix(1, 0)})
	}
	if h.DroppedFaults() != 3 || len(h.Faults()) != faultQueue {
		t.Errorf("dropped %d, kept %d", h.DroppedFaults(), len(h.Faults()))
	}
}
