package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// poller is one thread's epoll instance with a timer of microsecond precision. Load generator and backends use it in
// place of package net because they share one core and must leave Envoy's worker the bottleneck: a request costs them
// little beyond its reads and writes.
type poller struct {
	fd, timer int
	events    []unix.EpollEvent
	armed     bool
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	p := &poller{fd: fd, timer: -1, events: make([]unix.EpollEvent, 256)}
	p.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err == nil {
		err = p.add(p.timer, unix.EPOLLIN)
	}
	if err != nil {
		p.close()
		return nil, fmt.Errorf("timer: %w", err)
	}
	return p, nil
}

func (p *poller) close() {
	_ = unix.Close(p.fd)
	if p.timer >= 0 {
		_ = unix.Close(p.timer)
	}
}

// edge is what connections are watched for: told once per change, so reads and writes go on until they would block.
const edge = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET

func (p *poller) add(fd int, events uint32) error {
	err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
	return os.NewSyscallError("epoll_ctl", err)
}

// wakeIn makes wait return within d at the latest; d ≤ 0 is at once.
func (p *poller) wakeIn(d time.Duration) error {
	p.armed = true
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(d, 1)))}
	return os.NewSyscallError("timerfd_settime", unix.TimerfdSettime(p.timer, 0, &spec, nil))
}

// wait blocks until something happens and returns the descriptors it happened to, the timer's left out.
func (p *poller) wait() ([]unix.EpollEvent, error) {
	n, err := unix.EpollWait(p.fd, p.events, -1)
	if errors.Is(err, unix.EINTR) {
		return nil, nil
	}
	if err != nil {
		return nil, os.NewSyscallError("epoll_wait", err)
	}
	ready := p.events[:n]
	for i, ev := range ready {
		if int(ev.Fd) == p.timer {
			var expirations [8]byte
			_, _ = unix.Read(p.timer, expirations[:])
			p.armed = false
			ready[i] = ready[n-1]
			return ready[:n-1], nil
		}
	}
	return ready, nil
}

// dial connects to addr, an IPv4 address, and makes the socket non-blocking.
func dial(addr netip.AddrPort) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()})
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	if err == nil {
		// Room for a whole 256 KB request, as far as the system allows: fewer wake-ups.
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 512<<10)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("connect to %v: %w", addr, err)
	}
	return fd, nil
}

// onThread runs f on a thread of its own, which ends with it.
func onThread(f func()) {
	go func() {
		runtime.LockOSThread() // never unlocked: the thread has a changed timer slack
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
		f()
	}()
}

// pinSelf keeps all threads of this process, and those they create later, on the given cores.
func pinSelf(cores ...int) error { return pinThreads(os.Getpid(), cores...) }

// pinThreads keeps the present threads of process pid on the given cores.
func pinThreads(pid int, cores ...int) error {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("pin: %w", err)
	}
	for _, e := range entries {
		tid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if err := pinThread(tid, cores...); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

func pinThread(tid int, cores ...int) error {
	var set unix.CPUSet
	for _, c := range cores {
		set.Set(c)
	}
	return os.NewSyscallError("sched_setaffinity", unix.SchedSetaffinity(tid, &set))
}
