package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
)

// countRequests is how many requests the figures are means of. A step takes some 60 µs, a request half a minute.
const countRequests = 3

// countable are the cases whose requests can be stepped through while all other threads are stopped. With the yield, a
// worker would hand its place in Go's scheduler to one of those, and wait for it.
var countable = []string{"bare", "floor", "hold", "stock-noyield"}

// count steps the worker's thread through requests, one instruction at a time, and prints how many there are in Envoy, in
// the module, and in Envoy on the module's behalf. Unlike times these figures are the same in each run, on any machine
// with the same binaries. What the kernel executes is not in them.
func (b *bench) count(ctx context.Context) error {
	for _, name := range b.cases {
		if !slices.Contains(countable, name) {
			return fmt.Errorf("-count: case %s can't be stepped through, valid: %s", name, strings.Join(countable, ", "))
		}
	}
	for _, name := range b.cases {
		for _, body := range b.bodies {
			if bodyNamed(body).stream {
				continue
			}
			if err := b.countOne(ctx, name, body); err != nil {
				return fmt.Errorf("case %s, body %s: %w", name, body, err)
			}
		}
	}
	return nil
}

func (b *bench) countOne(ctx context.Context, name, body string) (err error) {
	e, err := b.start(ctx, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.end(e)) }()
	client, err := dialCount(e.Addr("bench"), b.requests[body])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.close()) }()
	for range 200 { // pools are warm, symbols bound
		if err := client.request(); err != nil {
			return err
		}
	}
	t, err := newTally(e.Pid(), b.setup.envoy, b.setup.outDir)
	if err != nil {
		return err
	}
	if err := stepThrough(ctx, e, client, t); err != nil {
		return err
	}
	t.print(os.Stdout, fmt.Sprintf("case %s, body %s", name, body))
	return nil
}

// countClient sends one request after another over one connection.
type countClient struct {
	conn    net.Conn
	read    *bufio.Reader
	payload []byte
}

func dialCount(addr string, payload []byte) (*countClient, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &countClient{conn: conn, read: bufio.NewReader(conn), payload: payload}, nil
}

func (c *countClient) request() error {
	if _, err := c.conn.Write(c.payload); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.read, nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("answered %s", resp.Status)
	}
	return errors.Join(err, resp.Body.Close())
}

func (c *countClient) close() error {
	if err := c.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// stepThrough stops an Envoy, and lets its worker alone go on, an instruction at a time, until the client has its answers.
func stepThrough(ctx context.Context, e *envoyrun.Envoy, client *countClient, t *tally) error {
	threads, err := e.Threads()
	if err != nil {
		return err
	}
	worker := 0
	for tid, name := range threads {
		if name == "wrk:worker_0" {
			worker = tid
		}
	}
	if worker == 0 {
		return errors.New("Envoy has no thread wrk:worker_0")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	// A worker that waits for a stopped thread never ends its step: only Envoy's end does.
	defer context.AfterFunc(ctx, func() { _ = e.Signal(syscall.SIGKILL) })()

	attached, stepped := make(chan error, 1), make(chan error, 1)
	var answered atomic.Bool
	go func() {
		runtime.LockOSThread() // a tracer is a thread; it ends with this goroutine
		if err := attach(e, worker); err != nil {
			attached <- err
			return
		}
		attached <- nil
		err := t.follow(worker, &answered)
		err = errors.Join(err, os.NewSyscallError("ptrace detach", unix.PtraceDetach(worker)))
		stepped <- errors.Join(err, e.Signal(syscall.SIGCONT))
	}()
	if err := <-attached; err != nil {
		return err
	}
	for range countRequests {
		err = cmp.Or(err, client.request())
	}
	answered.Store(true)
	err = errors.Join(err, client.close()) // wakes a worker that waits for events
	return errors.Join(err, <-stepped, ctx.Err())
}

// attach stops the whole process by a signal, with its worker traced: only a traced thread can go on by itself.
func attach(e *envoyrun.Envoy, worker int) error {
	if err := unix.PtraceSeize(worker); err != nil {
		return os.NewSyscallError("ptrace seize", err)
	}
	if err := e.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for {
		var status unix.WaitStatus
		if _, err := unix.Wait4(worker, &status, unix.WALL, nil); err != nil {
			return os.NewSyscallError("wait", err)
		}
		if !status.Stopped() {
			return fmt.Errorf("the worker's thread has ended (%#x)", status)
		}
		if int(status)>>16 == unix.PTRACE_EVENT_STOP {
			return nil
		}
		// The signal came to this thread: it stops the process once it is delivered.
		if err := unix.PtraceCont(worker, int(status.StopSignal())); err != nil {
			return os.NewSyscallError("ptrace continue", err)
		}
	}
}

// follow steps a stopped thread until the answers are there, and then until its next step ends.
func (t *tally) follow(tid int, answered *atomic.Bool) error {
	deliver := 0
	for !answered.Load() {
		if _, _, no := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SINGLESTEP, uintptr(tid), 0, uintptr(deliver), 0, 0); no != 0 {
			return os.NewSyscallError("ptrace step", no)
		}
		var status unix.WaitStatus
		if _, err := unix.Wait4(tid, &status, unix.WALL, nil); err != nil {
			return os.NewSyscallError("wait", err)
		}
		if !status.Stopped() {
			return fmt.Errorf("the worker's thread has ended (%#x): it waited for a thread that is stopped, or Envoy crashed", status)
		}
		deliver = 0
		if s := status.StopSignal(); s != unix.SIGTRAP && s != unix.SIGSTOP {
			deliver = int(s)
		}
		var regs syscall.PtraceRegs
		if err := syscall.PtraceGetRegs(tid, &regs); err != nil {
			return os.NewSyscallError("ptrace registers", err)
		}
		t.step(regs.PC())
	}
	return nil
}

// place is whose code an instruction is.
type place uint8

const (
	inLibrary place = iota // libc and the like: who called it pays
	inEnvoy
	inModule
)

type region struct {
	from, to uint64
	place    place
}

// tally counts instructions by whose work they are.
type tally struct {
	regions   []region          // by address
	callbacks map[uint64]string // of Envoy's ABI, by the address of their first instruction

	now    string // the callback that runs, or one of the two below
	counts map[string]int64
	calls  map[string]int64
}

const (
	byEnvoy  = "Envoy"
	byModule = "the module"
)

// step takes the address of the next instruction. A callback runs from where the module enters it until the thread is
// back in the module.
func (t *tally) step(at uint64) {
	i, _ := slices.BinarySearchFunc(t.regions, at, func(r region, at uint64) int {
		if r.to <= at {
			return -1
		}
		return 1
	})
	where := inLibrary
	if i < len(t.regions) && t.regions[i].from <= at {
		where = t.regions[i].place
	}
	switch {
	case where == inModule:
		t.now = byModule
	case where == inEnvoy && t.now == byModule:
		t.now = byEnvoy
		if name, ok := t.callbacks[at]; ok {
			t.now = name
			t.calls[name]++
		}
	}
	t.counts[t.now]++
}

const callbackPrefix = "envoy_dynamic_module_callback_"

// newTally reads where a process's code lies; a module is what comes from outDir.
func newTally(pid int, envoy, outDir string) (*tally, error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/maps")
	if err != nil {
		return nil, err
	}
	if envoy, err = filepath.EvalSymlinks(envoy); err != nil { // as the kernel names it
		return nil, err
	}
	file, err := elf.Open(envoy)
	if err != nil {
		return nil, fmt.Errorf("Envoy's symbols: %w", err)
	}
	defer func() { _ = file.Close() }() // only read
	t := &tally{callbacks: map[uint64]string{}, now: byEnvoy, counts: map[string]int64{}, calls: map[string]int64{}}
	var base uint64 // 0 where the binary is not position independent
	found := false
	for line := range bytes.Lines(text) {
		fields := strings.Fields(string(line)) // from-to permissions offset device inode path
		if len(fields) < 6 || !strings.Contains(fields[1], "x") {
			continue
		}
		var from, to, offset uint64
		if _, err := fmt.Sscanf(fields[0]+" "+fields[2], "%x-%x %x", &from, &to, &offset); err != nil {
			return nil, fmt.Errorf("maps of process %d: %q: %w", pid, line, err)
		}
		r := region{from: from, to: to}
		switch {
		case fields[5] == envoy:
			r.place = inEnvoy
			for _, p := range file.Progs {
				if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 && p.Off&^0xfff == offset {
					base, found = from-p.Vaddr&^0xfff, true
				}
			}
		case filepath.Dir(fields[5]) == outDir:
			r.place = inModule
		}
		t.regions = append(t.regions, r)
	}
	slices.SortFunc(t.regions, func(a, b region) int { return cmp.Compare(a.from, b.from) })
	if !found {
		return nil, fmt.Errorf("process %d does not run %s", pid, envoy)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("Envoy's symbols: %w", err)
	}
	for _, s := range symbols {
		if name, ok := strings.CutPrefix(s.Name, callbackPrefix); ok && s.Value != 0 {
			t.callbacks[base+s.Value] = name
		}
	}
	return t, nil
}

func (t *tally) print(w io.Writer, title string) {
	var sum, called int64
	for name, n := range t.counts {
		sum += n
		if name != byEnvoy && name != byModule {
			called += n
		}
	}
	per := func(n int64) float64 { return float64(n) / countRequests }
	_, _ = fmt.Fprintf(w, "%s: %.0f instructions a request, without the kernel's: %.0f Envoy's own, %.0f of the module, %.0f of the callbacks it makes\n",
		title, per(sum), per(t.counts[byEnvoy]), per(t.counts[byModule]), per(called))
	names := slices.SortedFunc(maps.Keys(t.calls), func(a, b string) int {
		return cmp.Or(cmp.Compare(t.counts[b], t.counts[a]), cmp.Compare(a, b))
	})
	for _, name := range names {
		_, _ = fmt.Fprintf(w, "%10.0f  %4.1f × %s\n", per(t.counts[name]), per(t.calls[name]), name)
	}
}
