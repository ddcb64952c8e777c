package flowcontrol

// The lines a waiter may stand in at a time.
const (
	inSub  = iota // of its flow and lane, or of a Queue
	inBand        // of its band
	numLines
)

// line is waiters in order of arrival. Its fields are protected by the room's
// mutex.
type line struct {
	first, last *Waiter
	kind        int8 // inSub or inBand
}

// link is a waiter's place in a line.
type link struct{ prev, next *Waiter }

// insert puts a waiter in its place. Only one that waits again does not come
// last: it is near the front.
func (l *line) insert(w *Waiter) {
	k := l.kind
	prev := l.last
	if prev != nil && prev.seq > w.seq {
		prev = nil
		for next := l.first; next.seq < w.seq; next = next.links[k].next {
			prev = next
		}
	}
	next := l.first
	if prev != nil {
		next = prev.links[k].next
	}
	w.links[k] = link{prev: prev, next: next}
	if prev == nil {
		l.first = w
	} else {
		prev.links[k].next = w
	}
	if next == nil {
		l.last = w
	} else {
		next.links[k].prev = w
	}
}

func (l *line) remove(w *Waiter) {
	k := l.kind
	prev, next := w.links[k].prev, w.links[k].next
	if prev == nil {
		l.first = next
	} else {
		prev.links[k].next = next
	}
	if next == nil {
		l.last = prev
	} else {
		next.links[k].prev = prev
	}
	w.links[k] = link{}
}
