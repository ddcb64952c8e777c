package main

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
)

// maxHead bounds a message's start line and headers, in bytes.
const maxHead = 64 << 10

// message reads one HTTP/1.1 message after another from pieces of any size, and keeps only what the benchmark needs. It
// allocates nothing once its head buffer has grown.
type message struct {
	// response says that a message must have a length (chunked or content-length, unless its status forbids a body); a
	// request without one has no body.
	response bool

	head  []byte // start line and headers as far as they came
	left  int    // bytes of body, or of the present chunk with its CRLF, still to come
	state messageState
	line  []byte // the chunk size line, or trailer line, as far as it came
	begun bool   // a byte of the body came
}

type messageState int

const (
	inHead messageState = iota
	inBody
	inChunkSize
	inChunk
	inTrailers
)

// feed consumes bytes up to the end of a message at most. It returns how many it took and whether the message is
// complete; the head stays readable until the next call.
func (m *message) feed(p []byte) (n int, done bool, err error) {
	for n < len(p) {
		rest := p[n:]
		switch m.state {
		case inHead:
			used, whole := m.feedHead(rest)
			n += used
			if !whole {
				if len(m.head) > maxHead {
					return n, false, fmt.Errorf("a message head of more than %d bytes", maxHead)
				}
				continue
			}
			if done, err = m.startBody(); done || err != nil {
				return n, done, err
			}
		case inBody:
			used := min(m.left, len(rest))
			n, m.left, m.begun = n+used, m.left-used, true
			if m.left == 0 {
				m.state = inHead
				return n, true, nil
			}
		case inChunk:
			used := min(m.left, len(rest))
			n, m.left, m.begun = n+used, m.left-used, true
			if m.left == 0 {
				m.state = inChunkSize
			}
		case inChunkSize, inTrailers:
			used, whole := m.feedLine(rest)
			n += used
			if !whole {
				continue
			}
			if done, err = m.endLine(); done || err != nil {
				return n, done, err
			}
		}
	}
	return n, false, nil
}

var headEnd = []byte("\r\n\r\n")

// feedHead takes bytes up to the end of the head.
func (m *message) feedHead(p []byte) (used int, whole bool) {
	if len(m.head) >= 4 && bytes.HasSuffix(m.head, headEnd) {
		m.head, m.begun = m.head[:0], false // of the message before
	}
	from := max(0, len(m.head)-3) // the end may straddle two pieces
	before := len(m.head)
	m.head = append(m.head, p...)
	i := bytes.Index(m.head[from:], headEnd)
	if i < 0 {
		return len(p), false
	}
	m.head = m.head[:from+i+4]
	return len(m.head) - before, true
}

func (m *message) feedLine(p []byte) (used int, whole bool) {
	i := bytes.IndexByte(p, '\n')
	if i < 0 {
		m.line = append(m.line, p...)
		return len(p), false
	}
	m.line = append(m.line, p[:i]...)
	return i + 1, true
}

// endLine handles a whole chunk size or trailer line.
func (m *message) endLine() (done bool, err error) {
	line := bytes.TrimSuffix(m.line, []byte("\r"))
	m.line = m.line[:0]
	if m.state == inTrailers {
		if len(line) == 0 {
			m.state = inHead
			return true, nil
		}
		return false, nil
	}
	digits, _, _ := bytes.Cut(line, []byte(";"))
	size, err := strconv.ParseUint(string(bytes.TrimSpace(digits)), 16, 31)
	if err != nil {
		return false, fmt.Errorf("chunk size %q: %w", line, err)
	}
	if size == 0 {
		m.state = inTrailers
		return false, nil
	}
	m.left, m.state = int(size)+2, inChunk
	return false, nil
}

// startBody decides from the head how the body is framed.
func (m *message) startBody() (done bool, err error) {
	if bytes.EqualFold(m.header("transfer-encoding"), []byte("chunked")) {
		m.state = inChunkSize
		return false, nil
	}
	if v := m.header("content-length"); v != nil {
		length, err := strconv.ParseUint(string(v), 10, 31)
		if err != nil {
			return false, fmt.Errorf("content-length: %w", err)
		}
		m.left = int(length)
	} else if m.response {
		if s := m.status(); s != 204 && s != 304 {
			return false, errors.New("a response without content-length or chunked encoding")
		}
	}
	if m.left == 0 {
		return true, nil
	}
	m.state = inBody
	return false, nil
}

// header is the value of the first header of that lower-case name, nil if there is none.
func (m *message) header(name string) []byte {
	rest := m.head
	for {
		i := bytes.IndexByte(rest, '\n')
		if i < 0 {
			return nil
		}
		rest = rest[i+1:]
		if len(rest) > len(name) && rest[len(name)] == ':' && bytes.EqualFold(rest[:len(name)], []byte(name)) {
			value, _, _ := bytes.Cut(rest[len(name)+1:], []byte("\r\n"))
			return bytes.TrimSpace(value)
		}
	}
}

// status is the code of a response, 0 if its start line has none.
func (m *message) status() int {
	if len(m.head) < 12 || !bytes.HasPrefix(m.head, []byte("HTTP/1.")) {
		return 0
	}
	s, err := strconv.Atoi(string(m.head[9:12]))
	if err != nil {
		return 0
	}
	return s
}

// path is the target of a request.
func (m *message) path() []byte {
	_, rest, _ := bytes.Cut(m.head, []byte(" "))
	path, _, _ := bytes.Cut(rest, []byte(" "))
	return path
}
