package sim

import (
	"sync/atomic"
	"time"
)

// driver runs a Model on the real clock. One goroutine owns the model; others reach it through commands.
type driver struct {
	model    *Model
	speed    float64 // model time per wall time
	start    time.Time
	commands chan func(now time.Duration)
	quit     chan struct{} // closed to stop the owner
	done     chan struct{} // closed when it has stopped
}

// stream is what a handler and the owner share about one sequence. After done is seen, seq may be read.
type stream struct {
	notify chan struct{} // capacity 1; tokens or the end came
	ready  atomic.Int64  // tokens generated
	ended  atomic.Bool
	whole  bool // wake the handler only at the end
	seq    *Seq // the owner's until ended
}

func newDriver(m *Model, speed float64) *driver {
	d := &driver{
		model: m, speed: speed, start: time.Now(),
		commands: make(chan func(time.Duration), 256), quit: make(chan struct{}), done: make(chan struct{}),
	}
	go d.run()
	return d
}

func (d *driver) stop() {
	close(d.quit)
	<-d.done
}

func (d *driver) now() time.Duration {
	return time.Duration(float64(time.Since(d.start)) * d.speed)
}

// do runs f in the owner, false once the owner has stopped. It doesn't wait for f.
func (d *driver) do(f func(now time.Duration)) bool {
	select {
	case <-d.quit:
		return false
	default:
	}
	select {
	case d.commands <- f:
		return true
	case <-d.done:
		return false
	}
}

// ask runs f in the owner and waits for it.
func (d *driver) ask(f func(now time.Duration)) bool {
	ran := make(chan struct{})
	if !d.do(func(now time.Duration) { f(now); close(ran) }) {
		return false
	}
	select {
	case <-ran:
		return true
	case <-d.done:
		return false
	}
}

func (d *driver) run() {
	defer close(d.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var events []Event
	for {
		events = d.model.Advance(d.now(), events[:0])
		deliver(events)
		if at, ok := d.model.Next(); ok {
			timer.Reset(time.Duration(float64(at-d.now())/d.speed) + 1)
		} else {
			timer.Stop()
		}
		select {
		case <-d.quit:
			return
		case <-timer.C:
		case f := <-d.commands:
			now := d.now()
			events = d.model.Advance(now, events[:0])
			deliver(events)
			f(now)
			for range len(d.commands) {
				(<-d.commands)(now)
			}
		}
	}
}

func deliver(events []Event) {
	for i := range events {
		st := events[i].Seq.Data.(*stream)
		if events[i].Kind == Finished {
			st.ended.Store(true)
		} else {
			st.ready.Add(1)
			if st.whole {
				continue
			}
		}
		select {
		case st.notify <- struct{}{}:
		default: // the handler has a wake-up it hasn't taken yet
		}
	}
}

// submit starts a sequence. The error is the model's, or errStopped.
func (d *driver) submit(r Request, whole bool) (*stream, error) {
	st := &stream{notify: make(chan struct{}, 1), whole: whole}
	r.Data = st
	var err error
	if !d.ask(func(now time.Duration) { st.seq, err = d.model.Submit(now, r) }) {
		return nil, errStopped
	}
	return st, err
}

// abort ends a sequence whose client is gone; one that has ended is left alone.
func (d *driver) abort(st *stream) {
	d.do(func(now time.Duration) { d.model.Abort(now, st.seq) })
}
