package flowcontrol

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type request struct {
	Waiter
	id    int
	woken func(id int, o Outcome)
}

func (r *request) Wake(o Outcome, _ *pool.Live) { r.woken(r.id, o) }

func TestQueueOrderDeadlinesAndBounds(t *testing.T) {
	now := time.Unix(100, 0)
	room := NewRoom(4, 100, func() time.Time { return now })
	q, other := room.NewQueue(), room.NewQueue()
	var log []int // id, negative when expired
	add := func(q *Queue, id int, after time.Duration, bytes int64) *request {
		r := &request{id: id, woken: func(id int, o Outcome) {
			if o == Expired {
				id = -id
			}
			log = append(log, id)
		}}
		if !q.Add(&r.Waiter, r, now.Add(after), bytes) {
			return nil
		}
		return r
	}
	want := func(step string, ids ...int) {
		t.Helper()
		if len(log) != len(ids) {
			t.Fatalf("%s: woke %v, want %v", step, log, ids)
		}
		for i := range ids {
			if log[i] != ids[i] {
				t.Fatalf("%s: woke %v, want %v", step, log, ids)
			}
		}
		log = nil
	}
	add(q, 1, 3*time.Second, 10)
	two := add(q, 2, time.Second, 10)
	add(q, 3, 2*time.Second, 10)
	add(other, 4, 5*time.Second, 10)
	if add(q, 5, time.Second, 0) != nil {
		t.Fatal("a fifth request found room for four")
	}
	if n := q.Grant(1); n != 1 {
		t.Fatalf("granted %d of 1", n)
	}
	want("grant takes the first come", 1)
	if add(q, 6, time.Second, 71) != nil {
		t.Fatal("101 bytes found room for 100")
	}
	if add(q, 6, 4*time.Second, 70) == nil {
		t.Fatal("100 bytes found no room for 100")
	}
	if !room.Remove(&two.Waiter) || room.Remove(&two.Waiter) {
		t.Fatal("a waiter is removed once")
	}
	if left := room.Expire(); left != 2*time.Second {
		t.Fatalf("next deadline in %v, want 2s", left)
	}
	want("nothing is due")
	now = now.Add(4 * time.Second)
	if left := room.Expire(); left != time.Second {
		t.Fatalf("next deadline in %v, want 1s", left)
	}
	want("the due ones, earliest first", -3, -6)
	if n := other.Grant(9); n != 1 || other.Len() != 0 {
		t.Fatalf("granted %d of the 1 left", n)
	}
	want("queues are apart", 4)
	if n, bytes, expired := room.Waiting(); n != 0 || bytes != 0 || expired != 2 {
		t.Fatalf("%d waiting, %d bytes, %d expired; want 0, 0, 2", n, bytes, expired)
	}
	if left := room.Expire(); left != idle {
		t.Fatalf("an empty room waits %v", left)
	}
}

// TestPanicsEndNothing: a panic in the room's goroutine is told, and the next
// waiter is woken all the same, as is the one whose time was over already.
func TestPanicsEndNothing(t *testing.T) {
	room := NewRoom(4, 100, time.Now)
	told := make(chan any, 1)
	c := room.NewController(Options{
		Snapshot: func() *pool.Snapshot { panic("on purpose") },
	})
	room.Start(func(cause any, _ []byte) {
		select {
		case told <- cause:
		default:
		}
	})
	defer room.Stop()
	room.mu.Lock()
	c.waiting.Add(1) // else it has nothing to look at
	c.staleAt = 1
	room.mu.Unlock()
	q := room.NewQueue()
	woken := make(chan int, 2)
	for id := range 2 {
		r := &request{id: id, woken: func(id int, _ Outcome) { woken <- id }}
		if !q.Add(&r.Waiter, r, time.Now(), 1) {
			t.Fatal("no room")
		}
		if got := <-woken; got != id {
			t.Errorf("%d was woken, want %d", got, id)
		}
		if cause := <-told; cause != "on purpose" {
			t.Errorf("told of %v", cause)
		}
	}
}

// TestEveryWaiterEndsOnce lets grants, removals and deadlines race for the same
// waiters.
func TestEveryWaiterEndsOnce(t *testing.T) {
	const n = 20000
	room := NewRoom(n, n, time.Now)
	room.Start(nil)
	defer room.Stop()
	q := room.NewQueue()
	ends := make([]atomic.Int32, n)
	var done sync.WaitGroup
	done.Add(n)
	requests := make([]*request, n)
	for i := range n {
		requests[i] = &request{id: i, woken: func(id int, _ Outcome) {
			ends[id].Add(1)
			done.Done()
		}}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(1, 1))
		for _, r := range requests {
			if !q.Add(&r.Waiter, r, time.Now().Add(time.Duration(rng.IntN(20))*time.Millisecond), 1) {
				t.Error("no room")
			}
			if rng.IntN(3) == 0 && room.Remove(&r.Waiter) {
				ends[r.id].Add(1)
				done.Done()
			}
		}
	})
	stop := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				q.Grant(1)
			}
		}
	})
	done.Wait()
	close(stop)
	wg.Wait()
	for i := range ends {
		if ends[i].Load() != 1 {
			t.Fatalf("waiter %d ended %d times", i, ends[i].Load())
		}
	}
	if n, bytes, _ := room.Waiting(); n != 0 || bytes != 0 {
		t.Fatalf("%d waiting, %d bytes are left", n, bytes)
	}
}

func BenchmarkAddGrant(b *testing.B) {
	room := NewRoom(1<<20, 1<<40, time.Now)
	q := room.NewQueue()
	waiting := make([]*request, 10000)
	for i := range waiting {
		waiting[i] = &request{woken: func(int, Outcome) {}}
		q.Add(&waiting[i].Waiter, waiting[i], time.Now().Add(time.Hour), 1)
	}
	b.ReportAllocs()
	for i := range b.N {
		q.Grant(1)
		r := waiting[i%len(waiting)]
		q.Add(&r.Waiter, r, time.Now().Add(time.Hour), 1)
	}
}

// TestFilledWhileLookingElsewhere: the time to live of an empty pool is over as
// soon as an endpoint is there, whoever sees the new snapshot first.
func TestFilledWhileLookingElsewhere(t *testing.T) {
	config := defaultConfig()
	config.EmptyPoolTTL = time.Second
	w := newWorld(config)
	w.models["e"] = []string{"m"}
	first := w.arrive("first", Ask{Model: "m"})
	w.live["e"] = &pool.Live{Addr: "e"}
	w.live["e"].Hold(w.clock) // full
	w.names = []string{"e"}
	w.snap = pool.NewSnapshot(pool.Input{Now: w.clock, Seq: w.snap.Seq + 1, Complete: true, Fresh: true, StaleAfter: 5 * time.Second,
		Endpoints: []pool.Endpoint{{Target: pool.Target{Addr: address(0), Model: "m"}, Live: w.live["e"], Judged: true, Ready: true}}})
	w.arrive("second", Ask{Model: "m"}) // looks before anybody has told of it
	w.ctl.Changed()
	w.advance(2 * time.Second)
	if first.state != "waiting" {
		t.Errorf("the first: %s", first.state)
	}
}
