// Package flowcontrol holds requests that may not be sent yet. A waiting
// request is one struct in a list and a heap: it has no goroutine, timer or
// channel of its own.
package flowcontrol

import (
	"container/heap"
	"sync"
	"time"
)

// Outcome is why a waiting request was woken.
type Outcome uint8

// The outcomes.
const (
	// Granted means look again: what was waited for may be there.
	Granted Outcome = iota + 1
	// Expired means the deadline passed.
	Expired
)

// Wakeable is a request that waits. Wake is called at most once for each
// Queue.Add that succeeded, from any goroutine, with no lock held; it must not
// block.
type Wakeable interface{ Wake(Outcome) }

// Waiter is a request's place in a queue. It is part of the request, so that
// waiting allocates nothing. Its fields are protected by the Room's mutex.
type Waiter struct {
	request    Wakeable
	queue      *Queue
	prev, next *Waiter
	deadline   time.Time
	bytes      int64
	index      int // in the heap
}

// Room is all requests that wait in this process: their deadlines, on one
// timer, and the bounds on their number and bytes. Start it before use.
type Room struct {
	// immutable
	now   func() time.Time
	nudge chan struct{} // size 1: the earliest deadline has changed

	// of whoever calls Start and Stop
	stop, stopped chan struct{}

	mu sync.Mutex // held for O(log n) at the most, never while waking
	// protected by mu
	maxRequests int
	maxBytes    int64
	byDeadline  deadlines
	bytes       int64
	expired     uint64
}

// NewRoom returns a room for at most maxRequests waiting requests which hold at
// most maxBytes of bodies together. now is the clock.
func NewRoom(maxRequests int, maxBytes int64, now func() time.Time) *Room {
	return &Room{maxRequests: maxRequests, maxBytes: maxBytes, now: now, nudge: make(chan struct{}, 1)}
}

// SetLimits changes the bounds. Whoever waits already stays.
func (r *Room) SetLimits(maxRequests int, maxBytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.maxRequests, r.maxBytes = maxRequests, maxBytes
}

// Start runs the room's one goroutine, which expires waiters. The room may be
// started again after Stop.
func (r *Room) Start() {
	r.stop, r.stopped = make(chan struct{}), make(chan struct{})
	go r.run(r.stop, r.stopped)
}

// Stop ends the goroutine and waits for it. Waiters stay where they are.
func (r *Room) Stop() {
	close(r.stop)
	<-r.stopped
}

func (r *Room) run(stop <-chan struct{}, stopped chan<- struct{}) {
	defer close(stopped)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		timer.Reset(r.Expire())
		select {
		case <-timer.C:
		case <-r.nudge:
		case <-stop:
			return
		}
	}
}

// idle is how long the timer sleeps when nobody waits.
const idle = time.Hour

// Expire wakes every waiter whose deadline has passed, the earliest first, and
// returns the time until the next deadline.
func (r *Room) Expire() time.Duration {
	for {
		r.mu.Lock()
		if len(r.byDeadline) == 0 {
			r.mu.Unlock()
			return idle
		}
		w := r.byDeadline[0]
		if left := w.deadline.Sub(r.now()); left > 0 {
			r.mu.Unlock()
			return left
		}
		request := r.removeLocked(w)
		r.expired++
		r.mu.Unlock()
		request.Wake(Expired)
	}
}

// Waiting returns how many requests wait, how many bytes of bodies they hold,
// and how many have ever expired.
func (r *Room) Waiting() (requests int, bytes int64, expired uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.byDeadline), r.bytes, r.expired
}

// removeLocked takes a waiter out of its queue and the heap.
func (r *Room) removeLocked(w *Waiter) Wakeable {
	heap.Remove(&r.byDeadline, w.index)
	r.bytes -= w.bytes
	q, request := w.queue, w.request
	if w.prev == nil {
		q.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		q.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	q.length--
	*w = Waiter{}
	return request
}

// Queue is a first-come list in a room. Its fields are protected by the room's
// mutex.
type Queue struct {
	room        *Room
	first, last *Waiter
	length      int
}

// NewQueue returns an empty queue in the room.
func (r *Room) NewQueue() *Queue { return &Queue{room: r} }

// Add puts a request at the end of the queue and reports whether there was
// room. w must not be in a queue. The request may be woken before Add returns.
func (q *Queue) Add(w *Waiter, request Wakeable, deadline time.Time, bytes int64) bool {
	r := q.room
	r.mu.Lock()
	if len(r.byDeadline) >= r.maxRequests || r.bytes+bytes > r.maxBytes {
		r.mu.Unlock()
		return false
	}
	*w = Waiter{request: request, queue: q, prev: q.last, deadline: deadline, bytes: bytes}
	if q.last == nil {
		q.first = w
	} else {
		q.last.next = w
	}
	q.last = w
	q.length++
	r.bytes += bytes
	heap.Push(&r.byDeadline, w)
	earliest := w.index == 0
	r.mu.Unlock()
	if earliest {
		select {
		case r.nudge <- struct{}{}:
		default:
		}
	}
	return true
}

// Remove takes a request out whose client has left, and reports whether it was
// still waiting; if not, it has been or is being woken.
func (r *Room) Remove(w *Waiter) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.queue == nil {
		return false
	}
	r.removeLocked(w)
	return true
}

// Grant wakes up to n requests, the first come first, and returns how many.
func (q *Queue) Grant(n int) int {
	for woken := range n {
		q.room.mu.Lock()
		if q.first == nil {
			q.room.mu.Unlock()
			return woken
		}
		request := q.room.removeLocked(q.first)
		q.room.mu.Unlock()
		request.Wake(Granted)
	}
	return n
}

// Len returns how many requests wait in the queue.
func (q *Queue) Len() int {
	q.room.mu.Lock()
	defer q.room.mu.Unlock()
	return q.length
}

// deadlines is a heap of waiters, the earliest deadline first.
type deadlines []*Waiter

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].deadline.Before(d[j].deadline) }
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}
func (d *deadlines) Push(x any) {
	w := x.(*Waiter)
	w.index = len(*d)
	*d = append(*d, w)
}
func (d *deadlines) Pop() any {
	old := *d
	w := old[len(old)-1]
	old[len(old)-1] = nil
	*d = old[:len(old)-1]
	return w
}
