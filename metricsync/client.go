package metricsync

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

const (
	// headBuffer holds most response heads, and headLimit is the largest.
	headBuffer = 2 << 10
	headLimit  = 64 << 10
	// framing bounds what an answer may be on the wire: so many times its limit,
	// in chunks and with extensions, and what may come before it.
	framing = 2
	// maxLimit is the largest limit that can be told from none.
	maxLimit = 1 << 50
)

var (
	errHead  = errors.New("the answer is not HTTP/1")
	errLarge = fmt.Errorf("the answer's head is larger than %d bytes", headLimit)
	errChunk = errors.New("the answer's chunks are malformed")
	// errEndless is an answer that is far longer than what it holds: chunks of one
	// byte, interim answers without end, a packed page of nothing.
	errEndless = errors.New("the answer is far longer than its page may be")
)

// dialFunc opens a connection, as net.Dialer.DialContext does.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// client asks one server for pages, one request at a time, over a connection
// that it keeps. It is HTTP/1.1 and GET alone: net/http's client does the same
// with three goroutine switches and some 60 allocations a request
// (BenchmarkClient). It is not safe for concurrent use, and its owner closes it.
type client struct {
	dial    dialFunc // with TLS, if that is wanted
	address string
	secure  bool // over TLS
	// limit is the largest body that is of use. It bounds what is read of the
	// connection for one answer, however the server wraps it up.
	limit int64

	conn   net.Conn
	stop   func() bool // of what ends the connection with its context
	idle   time.Time   // since when
	reused bool

	buf   []byte // buf[r:w] is read and not used
	r, w  int
	spare int64 // of what may be read for this answer
	body
}

// body is how the rest of an answer ends.
type body struct {
	kind bodyKind
	left int64 // of the body, or of the chunk
	keep bool  // the connection may be used again
	some bool  // a chunk was begun
}

type bodyKind uint8

const (
	bodyNone bodyKind = iota // read to its end
	bodyLength
	bodyChunked
	bodyToClose
)

// answer is the head of a response. The client is the body's reader.
type answer struct {
	status   int
	gzip     bool
	packed   string // the content-encoding, if it is another
	location string
}

// use makes the next connection one with TLS or without.
func (c *client) use(secure bool) {
	if c.secure != secure {
		c.close()
		c.secure = secure
	}
}

// get sends a request that ends with its blank line and reads the head of the
// answer. A connection that the server has closed meanwhile is replaced once. The
// deadline is that of the body too.
func (c *client) get(ctx context.Context, request []byte, connect time.Duration, deadline time.Time) (answer, error) {
	for {
		if err := c.open(ctx, connect, deadline); err != nil {
			return answer{}, err
		}
		reused := c.reused
		c.reused = true
		c.spare = framing*min(c.limit, maxLimit) + headLimit
		_, err := c.conn.Write(request)
		var out answer
		if err == nil {
			out, err = c.head()
		}
		if err == nil {
			return out, nil
		}
		untouched := c.w == 0
		c.close()
		var ne net.Error
		if !reused || !untouched || errors.As(err, &ne) && ne.Timeout() || ctx.Err() != nil {
			return answer{}, err
		}
	}
}

// open makes sure that there is a connection with nothing left to read on it.
func (c *client) open(ctx context.Context, connect time.Duration, deadline time.Time) error {
	if c.conn != nil && (c.kind != bodyNone || !c.keep || c.r != c.w || time.Since(c.idle) >= idleTimeout) {
		c.close()
	}
	c.r, c.w, c.body = 0, 0, body{}
	if c.conn == nil {
		until := time.Now().Add(connect)
		if deadline.Before(until) {
			until = deadline
		}
		dialing, cancel := context.WithDeadline(ctx, until)
		conn, err := c.dial(dialing, "tcp", c.address)
		cancel()
		if err != nil {
			return dialError{err}
		}
		c.conn, c.reused = conn, false
		// Whoever ends ctx does not wait for the deadline.
		c.stop = context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	}
	if err := c.conn.SetDeadline(deadline); err != nil {
		c.close()
		return err
	}
	if err := ctx.Err(); err != nil { // before that deadline replaced the one of AfterFunc
		c.close()
		return err
	}
	return nil
}

// dialError is a connection that could not be opened.
type dialError struct{ error }

func (e dialError) Unwrap() error { return e.error }

func (c *client) close() {
	if c.conn != nil {
		c.stop()
		_ = c.conn.Close()
		c.conn = nil
	}
}

// done ends an answer: a connection with more of it to come, or that would stay
// idle for too long, is closed.
func (c *client) done(idle time.Duration) {
	if c.conn == nil {
		return
	}
	if c.kind != bodyNone || !c.keep || c.r != c.w || idle >= idleTimeout {
		c.close()
		return
	}
	c.idle = time.Now()
}

// fill reads more behind what is buffered.
func (c *client) fill() error {
	if c.r == c.w {
		c.r, c.w = 0, 0
	}
	if c.w == len(c.buf) {
		switch {
		case c.r > 0:
			c.w = copy(c.buf, c.buf[c.r:c.w])
			c.r = 0
		case len(c.buf) >= headLimit:
			return errLarge
		default:
			c.buf = append(c.buf, make([]byte, max(headBuffer, len(c.buf)))...)
		}
	}
	n, err := c.receive(c.buf[c.w:])
	c.w += n
	return err
}

// receive reads from the connection; err is nil if n is not 0.
func (c *client) receive(into []byte) (n int, err error) {
	if c.spare <= 0 {
		return 0, errEndless
	}
	n, err = c.conn.Read(into)
	if c.spare -= int64(n); n > 0 {
		return n, nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return 0, err
}

// line returns the next line, valid until more is read.
func (c *client) line() ([]byte, error) {
	for from := c.r; ; {
		if i := bytes.IndexByte(c.buf[from:c.w], '\n'); i >= 0 {
			l := c.buf[c.r : from+i]
			c.r = from + i + 1
			return bytes.TrimSuffix(l, []byte("\r")), nil
		}
		seen := c.w - c.r
		if seen >= headLimit {
			return nil, errLarge
		}
		if err := c.fill(); err != nil {
			return nil, err
		}
		from = c.r + seen
	}
}

// head reads a response up to its body, past those of status 1xx.
func (c *client) head() (answer, error) {
	for {
		out, err := c.oneHead()
		if err != nil || out.status >= 200 {
			return out, err
		}
		if out.status == 101 { // nobody asked for another protocol
			return out, errHead
		}
	}
}

func (c *client) oneHead() (out answer, err error) {
	l, err := c.line()
	if err != nil {
		return out, err
	}
	// HTTP/1.1 200 OK
	if len(l) < len("HTTP/1.1 200") || string(l[:7]) != "HTTP/1." || l[8] != ' ' || len(l) > 12 && l[12] != ' ' {
		return out, errHead
	}
	if out.status, err = strconv.Atoi(string(l[9:12])); err != nil || out.status < 100 {
		return out, errHead
	}
	old := l[7] == '0' // HTTP/1.0
	b := body{kind: bodyToClose, keep: !old}
	length := int64(-1)
	for size := len(l); ; {
		if l, err = c.line(); err != nil {
			return out, err
		}
		if size += len(l); size > headLimit {
			return out, errLarge
		}
		if len(l) == 0 {
			break
		}
		name, value, ok := bytes.Cut(l, []byte(":"))
		if !ok {
			return out, errHead
		}
		value = bytes.TrimSpace(value)
		switch {
		case isToken(name, "content-length"):
			n, err := strconv.ParseUint(string(value), 10, 62)
			if err != nil || length >= 0 && length != int64(n) {
				return out, errHead
			}
			length = int64(n)
		case isToken(name, "transfer-encoding"):
			if old {
				continue // it has no meaning there, and net/http ignores it too
			}
			if !isToken(value, "chunked") {
				return out, errHead
			}
			b.kind = bodyChunked
		case isToken(name, "connection"):
			if isToken(value, "close") {
				b.keep = false
			}
		case isToken(name, "content-encoding"):
			switch out.gzip = isToken(value, "gzip") || isToken(value, "x-gzip"); {
			case out.gzip || len(value) == 0 || isToken(value, "identity"):
				out.packed = ""
			default:
				out.packed = string(value)
			}
		case isToken(name, "location"):
			out.location = string(value)
		}
	}
	switch {
	case out.status < 200 || out.status == 204 || out.status == 304:
		b.kind = bodyNone
	case b.kind == bodyChunked: // which a length does not change
	case length == 0:
		b.kind = bodyNone
	case length > 0:
		b.kind, b.left = bodyLength, length
	}
	if b.kind == bodyToClose {
		b.keep = false
	}
	c.body = b
	return out, nil
}

// isToken compares a header's name or value with one in lower case.
func isToken(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, ch := range b {
		if ch >= 'A' && ch <= 'Z' {
			ch += 'a' - 'A'
		}
		if ch != lower[i] {
			return false
		}
	}
	return true
}

// Read reads the body of the answer that get returned.
func (c *client) Read(into []byte) (int, error) {
	switch c.kind {
	case bodyNone:
		return 0, io.EOF
	case bodyToClose:
		n, err := c.read1(into)
		if errors.Is(err, io.ErrUnexpectedEOF) {
			c.kind, err = bodyNone, io.EOF
		}
		return n, err
	case bodyChunked:
		if c.left == 0 {
			if err := c.chunk(); err != nil {
				return 0, err
			}
			if c.kind == bodyNone {
				return 0, io.EOF
			}
		}
	}
	if int64(len(into)) > c.left {
		into = into[:c.left]
	}
	n, err := c.read1(into)
	if c.left -= int64(n); c.left == 0 && c.kind == bodyLength {
		c.kind = bodyNone
	}
	return n, err
}

// read1 reads what is buffered, else straight from the connection.
func (c *client) read1(into []byte) (int, error) {
	if c.r < c.w {
		n := copy(into, c.buf[c.r:c.w])
		c.r += n
		return n, nil
	}
	return c.receive(into)
}

// chunk reads up to the data of the next chunk; after the last, up to the end of
// the trailers.
func (c *client) chunk() error {
	if c.some {
		if l, err := c.line(); err != nil {
			return err
		} else if len(l) > 0 {
			return errChunk
		}
	}
	c.some = true
	l, err := c.line()
	if err != nil {
		return err
	}
	size, _, _ := bytes.Cut(l, []byte(";"))
	n, err := strconv.ParseUint(string(bytes.TrimRight(size, " \t")), 16, 62)
	if err != nil {
		return errChunk
	}
	if c.left = int64(n); n > 0 {
		return nil
	}
	for total := 0; ; {
		if l, err = c.line(); err != nil {
			return err
		}
		if len(l) == 0 {
			c.kind = bodyNone
			return nil
		}
		if total += len(l); total > headLimit {
			return errChunk
		}
	}
}

// drain reads what is left of a body that nobody wants, if that is little.
func (c *client) drain() {
	if c.kind == bodyLength && c.left > drainLimit || c.kind == bodyToClose {
		return
	}
	_, _ = io.CopyN(io.Discard, c, drainLimit)
}
