package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// load says how requests are sent.
type load struct {
	rate  float64 // per second, open loop; 0 is a closed loop: each connection sends as soon as it has its answer
	conns int     // connections; an open loop whose connections are all busy sends late (see schedule)
	warm  time.Duration
	count time.Duration // length of the window that counts, after warm
	first bool          // a request's latency ends with the first byte of the answer's body
}

// drainLimit is how long the answers may take after the window.
const drainLimit = 10 * time.Second

// client is one connection of the generator.
type client struct {
	fd       int
	busy     bool
	written  int           // bytes of the request handed to the kernel
	intended time.Duration // when the request should have been sent, since the run's start
	begun    time.Duration // when the first byte of the answer's body came, 0 before
	in       message
}

// generator sends one pre-rendered request again and again. One thread uses it.
type generator struct {
	request []byte
	load    load
	cpu     func() (time.Duration, error) // of the process under test

	poll    *poller
	start   time.Time
	clients map[int32]*client
	free    []*client       // open loop: idle connections, the last used on top
	late    []time.Duration // open loop: intended times that wait for a connection
	plan    schedule
	buf     []byte

	win                window
	counting           bool
	ended              bool
	cpuFrom, cpuTo     time.Duration
	exactFrom, exactTo time.Duration // when the CPU clock was read
	inFlight           int
	answers            int
	latencies          []time.Duration
}

// generate runs one load against addr. Every answer must be 200; anything else fails the run. The sample's rps is 0 if no
// answer fell into the window.
func generate(addr netip.AddrPort, request []byte, l load, cpu func() (time.Duration, error)) (sample, error) {
	type result struct {
		s   sample
		err error
	}
	c := make(chan result, 1)
	onThread(func() {
		s, err := newGenerator(request, l, cpu).run(addr)
		c <- result{s, err}
	})
	r := <-c
	return r.s, r.err
}

func newGenerator(request []byte, l load, cpu func() (time.Duration, error)) *generator {
	return &generator{request: request, load: l, cpu: cpu, plan: schedule{rate: l.rate}, buf: make([]byte, 64<<10),
		clients: map[int32]*client{}, latencies: make([]time.Duration, 0, 1<<17), win: window{l.warm, l.warm + l.count}}
}

func (g *generator) run(addr netip.AddrPort) (sample, error) {
	var err error
	if g.poll, err = newPoller(); err != nil {
		return sample{}, err
	}
	defer g.poll.close()
	defer func() {
		for _, c := range g.clients {
			_ = unix.Close(c.fd)
		}
	}()
	for range g.load.conns {
		fd, err := dial(addr)
		if err != nil {
			return sample{}, err
		}
		c := &client{fd: fd, in: message{response: true}}
		g.clients[int32(fd)] = c
		g.free = append(g.free, c)
		if err := g.poll.add(fd, edge); err != nil {
			return sample{}, err
		}
	}
	g.start = time.Now()
	if g.load.rate == 0 {
		g.free = nil
		for _, c := range g.clients {
			if err := g.send(c, g.now()); err != nil {
				return sample{}, err
			}
		}
	}
	for {
		finished, err := g.step()
		if err != nil {
			return sample{}, err
		}
		if finished {
			break
		}
	}
	return summarize(g.answers, g.exactTo-g.exactFrom, g.cpuTo-g.cpuFrom, g.latencies), nil
}

func (g *generator) now() time.Duration { return time.Since(g.start) }

// step sends what is due and handles what has happened.
func (g *generator) step() (finished bool, err error) {
	now := g.now()
	if err := g.clockWindow(now); err != nil {
		return false, err
	}
	wake := 10 * time.Millisecond
	if g.load.rate > 0 {
		due := min(now, g.win.to-1) // a loop that wakes after the end still owes what was due before
		for at, ok := g.plan.take(due); ok; at, ok = g.plan.take(due) {
			if len(g.free) == 0 {
				g.late = append(g.late, at)
				continue
			}
			c := g.free[len(g.free)-1]
			g.free = g.free[:len(g.free)-1]
			if err := g.send(c, at); err != nil {
				return false, err
			}
		}
		if !g.ended {
			wake = min(wake, g.plan.due()-g.now())
		}
	}
	if g.ended {
		if g.inFlight == 0 && len(g.late) == 0 {
			return true, nil
		}
		if now > g.win.to+drainLimit {
			return false, fmt.Errorf("%d requests have no answer %v after the run: Envoy can't keep up, or hangs",
				g.inFlight+len(g.late), drainLimit)
		}
	}
	// A closed loop needs the timer only to see its window end while nothing is answered.
	if g.load.rate > 0 || !g.poll.armed {
		if err := g.poll.wakeIn(wake); err != nil {
			return false, err
		}
	}
	ready, err := g.poll.wait()
	if err != nil {
		return false, err
	}
	for _, ev := range ready {
		if err := g.handle(g.clients[ev.Fd], ev.Events); err != nil {
			return false, err
		}
	}
	return false, nil
}

// clockWindow reads the CPU clock as the window begins and ends.
func (g *generator) clockWindow(now time.Duration) (err error) {
	if !g.counting && !g.ended && now >= g.win.from {
		g.counting = true
		if g.cpuFrom, err = g.cpu(); err != nil {
			return err
		}
		g.exactFrom = g.now()
	}
	if g.counting && now >= g.win.to {
		g.counting, g.ended = false, true
		if g.cpuTo, err = g.cpu(); err != nil {
			return err
		}
		g.exactTo = g.now()
	}
	return nil
}

func (g *generator) send(c *client, intended time.Duration) error {
	c.busy, c.written, c.intended, c.begun = true, 0, intended, 0
	g.inFlight++
	return g.write(c)
}

// write hands the kernel as much of the request as it takes; the rest follows when epoll says so.
func (g *generator) write(c *client) error {
	for c.written < len(g.request) {
		n, err := unix.Write(c.fd, g.request[c.written:])
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		c.written += n
	}
	return nil
}

func (g *generator) handle(c *client, events uint32) error {
	if c.busy && c.written < len(g.request) && events&unix.EPOLLOUT != 0 {
		if err := g.write(c); err != nil {
			return err
		}
	}
	if events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		return nil
	}
	for {
		n, err := unix.Read(c.fd, g.buf)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		case n == 0:
			return errors.New("receive: Envoy closed the connection")
		}
		if err := g.received(c, g.buf[:n]); err != nil {
			return err
		}
		if n < len(g.buf) && events&unix.EPOLLRDHUP == 0 {
			return nil // drained; more would be a new edge
		}
	}
}

func (g *generator) received(c *client, p []byte) error {
	if !c.busy {
		return fmt.Errorf("bytes without a request: %.80q", p)
	}
	n, done, err := c.in.feed(p)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	now := g.now()
	if c.in.begun && c.begun == 0 {
		c.begun = now
	}
	if !done {
		return nil
	}
	if n < len(p) {
		return fmt.Errorf("bytes after the answer: %.80q", p[n:])
	}
	if s := c.in.status(); s != 200 {
		return fmt.Errorf("answered %d, 200 expected: %.600q", s, c.in.head)
	}
	if c.written < len(g.request) {
		return errors.New("answered before the request was sent")
	}
	if g.win.has(c.intended) {
		end := now
		if g.load.first {
			end = c.begun
		}
		g.latencies = append(g.latencies, end-c.intended)
	}
	if g.counting {
		g.answers++
	}
	c.busy = false
	g.inFlight--
	switch {
	case len(g.late) > 0: // sent even after the window: they belong into it
		at := g.late[0]
		g.late = g.late[1:]
		return g.send(c, at)
	case g.load.rate == 0 && !g.ended:
		return g.send(c, now)
	default:
		g.free = append(g.free, c)
		return nil
	}
}
