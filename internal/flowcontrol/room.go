// Package flowcontrol holds requests that may not be sent yet, and says when
// they may. A waiting request is one struct in a few lists and a heap: it has
// no goroutine, timer or channel of its own.
//
// A Room is the process's: its one timer, and the bodies that all waiting
// requests hold together. A Queue is a first-come list, for requests that wait
// for a pool to start. A Controller is one pool's flow control: priority bands,
// flows and the saturation of endpoints.
package flowcontrol

import (
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Outcome is why a waiting request was woken.
type Outcome uint8

// The outcomes.
const (
	// Granted means look again: what was waited for is there.
	Granted Outcome = iota + 1
	// Expired means the time to live is over.
	Expired
	// ExpiredEmpty is Expired while no endpoint served the request.
	ExpiredEmpty
	// Displaced means that a request of a higher band took the place.
	Displaced
	// Drained means that the process is shutting down.
	Drained
)

// String returns a word for people and scenarios.
func (o Outcome) String() string {
	switch o {
	case Granted:
		return "granted"
	case Expired:
		return "expired"
	case ExpiredEmpty:
		return "expired-empty"
	case Displaced:
		return "displaced"
	case Drained:
		return "drained"
	default:
		return "none"
	}
}

// Wakeable is a request that waits. Wake is called at most once for each time
// that it was queued, from any goroutine, with no lock held; it must not block.
// hold is nil unless the outcome is Granted by a Controller: then it is the
// endpoint on which the request holds a slot, which Wake's side gives back by
// Controller.Return once the request has another, or none.
type Wakeable interface {
	Wake(o Outcome, hold *pool.Live)
}

// Waiter is a request's place in a queue. It is part of the request, so that
// waiting allocates nothing. Its fields are protected by the Room's mutex.
type Waiter struct {
	request Wakeable
	queue   *Queue // what it waits in: this
	sub     *sub   // or this

	links [numLines]link

	flow     *flow  // whose limits it counts under
	seq      uint64 // of its arrival
	arrival  int64
	deadline int64 // when it expires, as things are
	normal   int64 // when it expires once an endpoint serves it
	goal     int64 // what order edf goes by
	urgency  int64 // goal, by order edf; else 0
	bytes    int64
	cost     int64
	index    int32 // in the room's heap
	rank     int32 // in the sub's heap, by order edf
}

// Again reports whether the request has waited in a Controller before.
func (w *Waiter) Again() bool { return w.seq != 0 }

// Room is all requests that wait in this process: their deadlines, on one
// timer, and the bytes that they hold. Start it before use.
//
// Times are nanoseconds since the room was made.
type Room struct {
	// immutable
	clock func() time.Time
	epoch time.Time
	nudge chan struct{} // size 1: the earliest deadline has changed

	draining atomic.Bool // written under mu

	// of whoever calls Start and Stop
	stop, stopped chan struct{}

	mu sync.Mutex // held for microseconds, never while waking
	// protected by mu
	maxQueued   int // requests in Queues
	queued      int
	maxBytes    int64
	bytes       int64
	byDeadline  deadlines
	wakeAt      int64 // when the goroutine looks again
	seq         uint64
	expired     uint64
	controllers []*Controller
}

// NewRoom returns a room in which at most maxQueued requests wait in Queues, and
// all that wait hold at most maxBytes of bodies. clock is time.Now.
func NewRoom(maxQueued int, maxBytes int64, clock func() time.Time) *Room {
	return &Room{maxQueued: maxQueued, maxBytes: maxBytes, clock: clock, epoch: clock(), nudge: make(chan struct{}, 1)}
}

func (r *Room) now() int64 { return int64(r.clock().Sub(r.epoch)) }

// SetLimits changes the bounds. Whoever waits already stays.
func (r *Room) SetLimits(maxQueued int, maxBytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.maxQueued, r.maxBytes = maxQueued, maxBytes
}

// Start runs the room's one goroutine, which expires waiters. The room may be
// started again after Stop. fault is told of a panic in it, after which it goes
// on; nil tells nobody.
func (r *Room) Start(fault func(cause any, stack []byte)) {
	r.stop, r.stopped = make(chan struct{}), make(chan struct{})
	go r.run(r.stop, r.stopped, fault)
}

// Stop ends the goroutine and waits for it. Waiters stay where they are.
func (r *Room) Stop() {
	close(r.stop)
	<-r.stopped
}

func (r *Room) run(stop <-chan struct{}, stopped chan<- struct{}, fault func(cause any, stack []byte)) {
	defer close(stopped)
	timer := time.NewTimer(idle)
	defer timer.Stop()
	for {
		timer.Reset(r.guarded(fault))
		select {
		case <-timer.C:
		case <-r.nudge:
		case <-stop:
			return
		}
	}
}

// faultPause is the pause after a panic, unless something comes before.
const faultPause = time.Second

// guarded is Expire, whose panics would end the process.
func (r *Room) guarded(fault func(cause any, stack []byte)) (left time.Duration) {
	defer func() {
		if cause := recover(); cause != nil {
			left = faultPause
			if fault != nil {
				fault(cause, debug.Stack())
			}
		}
	}()
	return r.Expire()
}

// earlier makes the goroutine look at the earliest deadline anew.
func (r *Room) earlier() {
	select {
	case r.nudge <- struct{}{}:
	default:
	}
}

// idle is how long the timer sleeps when nobody waits.
const idle = time.Hour

// Expire wakes every waiter whose time is over, the earliest first, lets pools
// look again whose readings have become stale meanwhile, and returns the time
// until there is more to do.
func (r *Room) Expire() time.Duration {
	woken := newWakes()
	defer woken.free()
	for {
		left := r.expire(woken)
		again := woken.full()
		woken.wake()
		if !again {
			return left
		}
	}
}

func (r *Room) expire(woken *wakes) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	next := now + int64(idle)
	for !woken.full() {
		w, at := r.byDeadline.first()
		if w == nil {
			break
		}
		if at > now {
			next = at
			break
		}
		o := Expired
		if w.sub != nil && w.sub.lane.empty {
			o = ExpiredEmpty
		}
		r.expired++
		woken.add(w.request, o, nil)
		r.removeLocked(w, o)
	}
	for _, c := range r.controllers {
		next = min(next, c.tickLocked(now, woken))
	}
	r.wakeAt = next
	return max(0, time.Duration(next-now))
}

// Waiting returns how many requests wait, how many bytes of bodies they hold,
// and how many have ever expired.
func (r *Room) Waiting() (requests int, bytes int64, expired uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.byDeadline), r.bytes, r.expired
}

// Remove takes a request out whose client has left, and reports whether it was
// still waiting; if not, it has been or is being woken.
func (r *Room) Remove(w *Waiter) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.queue == nil && w.sub == nil {
		return false
	}
	r.removeLocked(w, 0)
	return true
}

// removeLocked takes a waiter out of all it is in. o is 0 for a client that has
// left.
func (r *Room) removeLocked(w *Waiter, o Outcome) {
	r.byDeadline.remove(w)
	r.bytes -= w.bytes
	if w.queue != nil {
		w.queue.removeLocked(w)
		r.queued--
	} else {
		w.sub.lane.controller.removeLocked(w, o)
	}
	*w = Waiter{seq: w.seq, arrival: w.arrival, normal: w.normal} // should it wait again
}

// Drain answers all that waits, now and until Undrain, with Drained.
func (r *Room) Drain() {
	woken := newWakes()
	defer woken.free()
	for r.drain(woken) {
		woken.wake()
	}
	woken.wake()
}

func (r *Room) drain(woken *wakes) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.draining.Store(true)
	for !woken.full() {
		w, _ := r.byDeadline.first()
		if w == nil {
			return false
		}
		woken.add(w.request, Drained, nil)
		r.removeLocked(w, Drained)
	}
	return true
}

// Undrain lets requests wait again.
func (r *Room) Undrain() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.draining.Store(false)
}

// Draining reports whether Drain was called, and Undrain not since.
func (r *Room) Draining() bool { return r.draining.Load() }

// wakes are requests to wake once the lock is given back. They are reused.
type wakes []wake

type wake struct {
	request Wakeable
	outcome Outcome
	hold    *pool.Live
	victim  Victim // or it is asked to end
}

// wakeBatch bounds how long the lock is held for a crowd.
const wakeBatch = 256

var wakesPool = sync.Pool{New: func() any { return new(wakes) }}

func newWakes() *wakes { return wakesPool.Get().(*wakes) }

// free gives the memory back. What a panic has left there is woken: nobody else
// knows of it any more.
func (ws *wakes) free() {
	ws.wake()
	wakesPool.Put(ws)
}

func (ws *wakes) add(request Wakeable, o Outcome, hold *pool.Live) {
	*ws = append(*ws, wake{request: request, outcome: o, hold: hold})
}

func (ws *wakes) evict(victim Victim) { *ws = append(*ws, wake{victim: victim}) }

func (ws *wakes) full() bool { return len(*ws) >= wakeBatch }

func (ws *wakes) wake() {
	for _, w := range *ws {
		if w.victim != nil {
			w.victim.Evict()
		} else {
			w.request.Wake(w.outcome, w.hold)
		}
	}
	clear(*ws)
	*ws = (*ws)[:0]
}

func (r *Room) forget(c *Controller) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.controllers = slices.DeleteFunc(r.controllers, func(x *Controller) bool { return x == c })
}
