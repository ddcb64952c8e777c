package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// thinkTime is how long a backend takes from the last byte of a request to its answer.
const thinkTime = time.Millisecond

// backends are fake engines, each on a port of its own, all served by one thread. Chat requests get a fixed small JSON
// after thinkTime, or an event each thinkTime; /metrics and /v1/models are answered at once.
type backends struct {
	// Addrs are where they listen.
	addrs []netip.AddrPort

	stop    int // eventfd
	stopped chan error

	// The thread's own.
	poll      *poller
	listeners map[int32]bool
	conns     map[int32]*backendConn
	waiting   []answer // ordered by due: thinkTime is the same for all
	start     time.Time
	buf       []byte

	chat, stream [][]byte // the answers in pieces
}

type backendConn struct {
	fd     int
	closed bool
	in     message
}

type answer struct {
	due  time.Duration
	conn *backendConn
	rest [][]byte // what to send, each thinkTime after the one before
}

const chatAnswer = `{"id":"chatcmpl-0","object":"chat.completion","created":1790000000,"model":"` + modelName + `","choices":[{"index":0,` +
	`"message":{"role":"assistant","content":"The quick brown fox jumps over the lazy dog."},"finish_reason":"stop"}],` +
	`"usage":{"prompt_tokens":210,"completion_tokens":11,"total_tokens":221}}`

// chatStream is an answer in events, in chunks: the head with the first, those with a token, the usage, the end.
func chatStream() (pieces [][]byte) {
	event := func(text string) []byte {
		text = "data: " + text + "\n\n"
		return fmt.Appendf(nil, "%x\r\n%s\r\n", len(text), text)
	}
	const head = `{"id":"chatcmpl-0","object":"chat.completion.chunk","created":1790000000,"model":"` + modelName + `","choices":`
	first := []byte("HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
	pieces = append(pieces, append(first, event(head+`[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`)...))
	for _, word := range []string{"The", " quick", " brown", " fox", " jumps", " over", " it."} {
		pieces = append(pieces, event(head+`[{"index":0,"delta":{"content":"`+word+`"},"finish_reason":null}]}`))
	}
	last := event(head + `[],"usage":{"prompt_tokens":210,"completion_tokens":7,"total_tokens":217}}`)
	return append(pieces, append(append(last, event("[DONE]")...), "0\r\n\r\n"...))
}

const modelsAnswer = `{"object":"list","data":[{"id":"` + modelName + `","object":"model","owned_by":"vllm"}]}`

// metricsAnswer is the part of a vLLM page that a picker needs.
const metricsAnswer = `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="` + modelName + `"} 1.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="` + modelName + `"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="` + modelName + `"} 0.25
`

func render(contentType, body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s",
		contentType, len(body), body)
}

// startBackends starts n backends on free loopback ports.
func startBackends(n int) (_ *backends, err error) {
	b := &backends{stop: -1, stopped: make(chan error, 1), listeners: map[int32]bool{}, conns: map[int32]*backendConn{},
		start: time.Now(), buf: make([]byte, 256<<10)}
	defer func() {
		if err != nil {
			b.release()
		}
	}()
	if b.poll, err = newPoller(); err != nil {
		return nil, err
	}
	if b.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	if err := b.poll.add(b.stop, unix.EPOLLIN); err != nil {
		return nil, err
	}
	for range n {
		if err := b.listen(); err != nil {
			return nil, fmt.Errorf("backend: %w", err)
		}
	}
	onThread(func() {
		err := b.serve()
		b.release()
		b.stopped <- err
	})
	return b, nil
}

// close ends the backends and returns what made them fail, if anything did.
func (b *backends) close() error {
	if _, err := unix.Write(b.stop, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		return fmt.Errorf("backends: %w", err)
	}
	return <-b.stopped
}

func (b *backends) release() {
	for fd := range b.listeners {
		_ = unix.Close(int(fd))
	}
	for fd := range b.conns {
		_ = unix.Close(int(fd))
	}
	if b.poll != nil {
		b.poll.close()
	}
}

func (b *backends) listen() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	b.listeners[int32(fd)] = true
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(fd, 4096); err != nil {
		return os.NewSyscallError("listen", err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return os.NewSyscallError("getsockname", err)
	}
	in4, ok := sa.(*unix.SockaddrInet4)
	if !ok {
		return fmt.Errorf("unexpected address %v", sa)
	}
	b.addrs = append(b.addrs, netip.AddrPortFrom(netip.AddrFrom4(in4.Addr), uint16(in4.Port)))
	return b.poll.add(fd, unix.EPOLLIN)
}

func (b *backends) serve() error {
	b.chat, b.stream = [][]byte{render("application/json", chatAnswer)}, chatStream()
	models, metrics := render("application/json", modelsAnswer), render("text/plain; version=0.0.4; charset=utf-8", metricsAnswer)
	for {
		ready, err := b.poll.wait()
		if err != nil {
			return err
		}
		for _, ev := range ready {
			switch c := b.conns[ev.Fd]; {
			case int(ev.Fd) == b.stop:
				_ = unix.Close(b.stop)
				return nil
			case b.listeners[ev.Fd]:
				if err := b.accept(int(ev.Fd)); err != nil {
					return err
				}
			case c != nil && ev.Events&^uint32(unix.EPOLLOUT) != 0:
				b.read(c, models, metrics)
			}
		}
		if err := b.answerDue(); err != nil {
			return err
		}
	}
}

func (b *backends) accept(listener int) error {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("accept4", err)
		}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
			_ = unix.Close(fd)
			return os.NewSyscallError("setsockopt", err)
		}
		b.conns[int32(fd)] = &backendConn{fd: fd}
		if err := b.poll.add(fd, edge); err != nil {
			return err
		}
	}
}

func (b *backends) read(c *backendConn, models, metrics []byte) {
	for {
		n, err := unix.Read(c.fd, b.buf)
		if errors.Is(err, unix.EAGAIN) {
			return
		}
		if err != nil || n == 0 {
			b.drop(c)
			return
		}
		for p := b.buf[:n]; len(p) > 0; {
			used, done, err := c.in.feed(p)
			if err != nil {
				b.drop(c)
				return
			}
			p = p[used:]
			if !done {
				continue
			}
			switch string(c.in.path()) {
			case "/metrics":
				b.write(c, metrics)
			case "/v1/models":
				b.write(c, models)
			default:
				rest := b.chat
				if string(c.in.header("accept")) == eventStream {
					rest = b.stream
				}
				b.waiting = append(b.waiting, answer{time.Since(b.start) + thinkTime, c, rest})
			}
		}
	}
}

func (b *backends) answerDue() error {
	if len(b.waiting) == 0 {
		return nil
	}
	now := time.Since(b.start)
	n := 0
	for ; n < len(b.waiting) && b.waiting[n].due <= now; n++ {
		a := b.waiting[n]
		if a.conn.closed {
			continue
		}
		b.write(a.conn, a.rest[0])
		if a.rest = a.rest[1:]; len(a.rest) > 0 {
			a.due = now + thinkTime
			b.waiting = append(b.waiting, a)
		}
	}
	b.waiting = b.waiting[:copy(b.waiting, b.waiting[n:])]
	if len(b.waiting) > 0 && (n > 0 || !b.poll.armed) {
		return b.poll.wakeIn(b.waiting[0].due - now)
	}
	return nil
}

// write sends a whole answer. Answers are small and Envoy reads them, so one that doesn't fit the socket is a broken peer.
func (b *backends) write(c *backendConn, p []byte) {
	if n, err := unix.Write(c.fd, p); err != nil || n < len(p) {
		b.drop(c)
	}
}

func (b *backends) drop(c *backendConn) {
	if !c.closed {
		c.closed = true
		delete(b.conns, int32(c.fd))
		_ = unix.Close(c.fd)
	}
}
