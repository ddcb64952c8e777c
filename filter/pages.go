package filter

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// maxConnections bounds the connections of one listener: they take memory and
	// file descriptors of Envoy's. Further ones wait in the kernel.
	maxConnections = 512
	// maxPages bounds the pages that are in memory at once, and pageWait how long a
	// request waits for its turn.
	maxPages = 8
	pageWait = 5 * time.Second
)

// pages makes the answers that walk over all endpoints, of all listeners, one
// after another: each page takes megabytes and a core for a while, and the
// callbacks of Envoy's workers wait for that core.
type pages struct {
	held   chan struct{} // has an element for each page in memory
	making chan struct{} // has one while a page is made
	busy   prometheus.Counter
}

func newPages(busy prometheus.Counter) *pages {
	return &pages{held: make(chan struct{}, maxPages), making: make(chan struct{}, 1), busy: busy}
}

// page is an http.ResponseWriter that keeps the answer, so that a client that
// reads slowly holds up nobody else's.
type page struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (p *page) Header() http.Header         { return p.header }
func (p *page) WriteHeader(status int)      { p.status = status }
func (p *page) Write(b []byte) (int, error) { return p.body.Write(b) }

// alone returns a handler that serves next's answers in turn. Where no turn comes
// within wait it says 503.
func (l *pages) alone(next http.Handler, wait time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		for _, turn := range []chan struct{}{l.held, l.making} {
			select {
			case turn <- struct{}{}:
			case <-r.Context().Done():
				return
			case <-timer.C:
				l.busy.Inc()
				http.Error(w, fmt.Sprintf("busy with other requests for %v", wait), http.StatusServiceUnavailable)
				return
			}
			if turn == l.held {
				defer func() { <-l.held }()
			}
		}
		p := &page{header: make(http.Header), status: http.StatusOK}
		l.make(next, p, r)
		maps.Copy(w.Header(), p.header)
		w.WriteHeader(p.status)
		_, _ = p.body.WriteTo(w) // a client that has gone needs no answer
	})
}

// make lets next write the page, and ends the turn however that ends.
func (l *pages) make(next http.Handler, p *page, r *http.Request) {
	defer func() { <-l.making }()
	next.ServeHTTP(p, r)
}
