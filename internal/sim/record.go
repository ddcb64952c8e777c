package sim

import (
	"net/http"
	"time"
)

// Received is one request as it arrived. Header names are in Go's canonical form; repeated ones keep every value.
type Received struct {
	Seq           int         `json:"seq"` // 1, 2, 3 … since the last reset
	At            time.Time   `json:"at"`  // its headers came
	Method        string      `json:"method"`
	Path          string      `json:"path"`
	Query         string      `json:"query,omitempty"`
	Proto         string      `json:"proto"`
	Host          string      `json:"host"`
	Remote        string      `json:"remote"`
	Headers       http.Header `json:"headers"`
	Trailers      http.Header `json:"trailers,omitempty"`
	ContentLength int64       `json:"content_length"` // -1 = chunked or unknown
	BodySHA256    string      `json:"body_sha256,omitempty"`
	BodyLen       int64       `json:"body_len"`
	Model         string      `json:"model,omitempty"`
	Status        int         `json:"status"` // 0 = not answered yet, or never
	Aborted       bool        `json:"aborted,omitempty"`
	Done          bool        `json:"done"`
}

// ring remembers the newest requests. Its owner holds the lock.
type ring struct {
	buf  []*Received
	next int // Seq of the next - 1
}

func newRing(size int) ring { return ring{buf: make([]*Received, size)} }

func (r *ring) add(rec *Received) {
	r.buf[r.next%len(r.buf)] = rec
	r.next++
	rec.Seq = r.next
}

func (r *ring) list(path string) []Received {
	out := make([]Received, 0, min(r.next, len(r.buf)))
	for i := max(r.next-len(r.buf), 0); i < r.next; i++ {
		if rec := r.buf[i%len(r.buf)]; path == "" || rec.Path == path {
			out = append(out, *rec)
		}
	}
	return out
}

func (r *ring) reset() {
	clear(r.buf)
	r.next = 0
}
