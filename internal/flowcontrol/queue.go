package flowcontrol

import "time"

// Queue is a first-come list in a room. Its fields are protected by the room's
// mutex.
type Queue struct {
	room    *Room
	waiters line
	length  int
}

// NewQueue returns an empty queue in the room.
func (r *Room) NewQueue() *Queue { return &Queue{room: r} }

// Add puts a request at the end of the queue and reports whether there was
// room. w must not be in a queue. The request may be woken before Add returns.
func (q *Queue) Add(w *Waiter, request Wakeable, deadline time.Time, bytes int64) bool {
	r := q.room
	r.mu.Lock()
	if r.queued >= r.maxQueued || r.bytes+bytes > r.maxBytes || r.draining.Load() {
		r.mu.Unlock()
		return false
	}
	*w = Waiter{request: request, queue: q, bytes: bytes, deadline: int64(deadline.Sub(r.epoch))}
	q.waiters.insert(w)
	q.length++
	r.queued++
	r.bytes += bytes
	r.byDeadline.push(w)
	earliest := w.index == 0
	r.mu.Unlock()
	if earliest {
		r.earlier()
	}
	return true
}

func (q *Queue) removeLocked(w *Waiter) {
	q.waiters.remove(w)
	q.length--
}

// Grant wakes up to n requests, the first come first, and returns how many.
func (q *Queue) Grant(n int) int {
	for granted := range n {
		request := q.take()
		if request == nil {
			return granted
		}
		request.Wake(Granted, nil)
	}
	return n
}

func (q *Queue) take() Wakeable {
	q.room.mu.Lock()
	defer q.room.mu.Unlock()
	if q.waiters.first == nil {
		return nil
	}
	request := q.waiters.first.request
	q.room.removeLocked(q.waiters.first, Granted)
	return request
}

// Len returns how many requests wait in the queue.
func (q *Queue) Len() int {
	q.room.mu.Lock()
	defer q.room.mu.Unlock()
	return q.length
}
