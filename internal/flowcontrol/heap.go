package flowcontrol

// timed is a waiter and its deadline, side by side: comparing touches no other
// memory.
type timed struct {
	at int64
	w  *Waiter
}

// deadlines is a heap of waiters, the earliest deadline first. Four children
// to a node halve its depth: most of a removal is waiting for memory.
type deadlines []timed

const children = 4

func (d deadlines) first() (*Waiter, int64) {
	if len(d) == 0 {
		return nil, 0
	}
	return d[0].w, d[0].at
}

func (d *deadlines) push(w *Waiter) {
	*d = append(*d, timed{})
	d.up(len(*d)-1, timed{w.deadline, w})
}

func (d *deadlines) remove(w *Waiter) {
	i, last := int(w.index), len(*d)-1
	moved := (*d)[last]
	(*d)[last] = timed{}
	*d = (*d)[:last]
	if i < last {
		d.place(i, moved)
	}
}

// move puts a waiter where its new deadline belongs.
func (d *deadlines) move(w *Waiter) { d.place(int(w.index), timed{w.deadline, w}) }

func (d *deadlines) place(i int, t timed) {
	if i > 0 && t.at < (*d)[(i-1)/children].at {
		d.up(i, t)
	} else {
		d.down(i, t)
	}
}

func (d *deadlines) up(i int, t timed) {
	h := *d
	for i > 0 {
		parent := (i - 1) / children
		if h[parent].at <= t.at {
			break
		}
		h[i] = h[parent]
		h[i].w.index = int32(i)
		i = parent
	}
	h[i] = t
	t.w.index = int32(i)
}

func (d *deadlines) down(i int, t timed) {
	h := *d
	for {
		least := children*i + 1
		if least >= len(h) {
			break
		}
		for c := least + 1; c < min(children*i+1+children, len(h)); c++ {
			if h[c].at < h[least].at {
				least = c
			}
		}
		if t.at <= h[least].at {
			break
		}
		h[i] = h[least]
		h[i].w.index = int32(i)
		i = least
	}
	h[i] = t
	t.w.index = int32(i)
}
