package filter

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shuntproxy/shunt/internal/loopback"
)

// patience is more than any turn takes.
const patience = 30 * time.Second

func somePages() *pages { return newPages(prometheus.NewCounter(prometheus.CounterOpts{Name: "busy"})) }

func writes(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
}

func TestPagesAreMadeOneAfterAnother(t *testing.T) {
	l := somePages()
	var now, most atomic.Int32
	h := l.alone(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if n := now.Add(1); n > most.Load() {
			most.Store(n)
		}
		w.Header().Set("x-made", "yes")
		w.WriteHeader(http.StatusTeapot)
		for range 100 {
			_, _ = io.WriteString(w, "x")
		}
		now.Add(-1)
	}), patience)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, httptest.NewRequest("GET", "/", nil))
			if rec.Code != http.StatusTeapot || rec.Header().Get("x-made") != "yes" || rec.Body.Len() != 100 {
				t.Errorf("%d %q %d bytes", rec.Code, rec.Header(), rec.Body.Len())
			}
		})
	}
	wg.Wait()
	if most.Load() != 1 {
		t.Errorf("%d pages were made at once", most.Load())
	}
}

// reader is a client that reads nothing until it is told to.
type reader struct {
	*httptest.ResponseRecorder
	begun, read chan struct{}
}

func (r *reader) Write(b []byte) (int, error) {
	r.begun <- struct{}{}
	<-r.read
	return r.ResponseRecorder.Write(b)
}

func TestPagesThatNobodyReads(t *testing.T) {
	l := somePages()
	request := httptest.NewRequest("GET", "/", nil)
	slow := &reader{begun: make(chan struct{}), read: make(chan struct{})}
	var wg sync.WaitGroup
	one := func() {
		r := *slow
		r.ResponseRecorder = httptest.NewRecorder()
		wg.Go(func() { l.alone(writes("x"), patience).ServeHTTP(&r, request) })
		<-slow.begun
	}
	for range maxPages - 1 {
		one()
	}
	rec := httptest.NewRecorder()
	l.alone(writes("x"), patience).ServeHTTP(rec, request)
	if rec.Code != 200 || rec.Body.String() != "x" {
		t.Errorf("beside readers that are slow: %d %q", rec.Code, rec.Body)
	}
	one()
	never := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a page was made") })
	rec = httptest.NewRecorder()
	l.alone(never, time.Millisecond).ServeHTTP(rec, request)
	if rec.Code != http.StatusServiceUnavailable || !strings.Contains(rec.Body.String(), "busy") {
		t.Errorf("with all pages held: %d %q", rec.Code, rec.Body)
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	rec = httptest.NewRecorder()
	l.alone(never, patience).ServeHTTP(rec, request.WithContext(gone))
	if rec.Body.Len() != 0 {
		t.Errorf("who left got %q", rec.Body)
	}
	close(slow.read)
	wg.Wait()
	rec = httptest.NewRecorder()
	l.alone(writes("x"), patience).ServeHTTP(rec, request)
	if rec.Code != 200 {
		t.Errorf("once they were read: %d", rec.Code)
	}
}

func TestPagePanics(t *testing.T) {
	l := somePages()
	for range maxPages + 1 {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic was swallowed: the server logs it and closes the connection")
				}
			}()
			l.alone(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("x") }), patience).
				ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
		}()
	}
	rec := httptest.NewRecorder()
	l.alone(writes("x"), patience).ServeHTTP(rec, httptest.NewRequest("GET", "/", nil))
	if rec.Code != 200 {
		t.Errorf("after panics: %d", rec.Code)
	}
}

func TestListenerBoundsItsConnections(t *testing.T) {
	rt, log := newRuntime(t)
	address := loopback.Reserve(t)
	l := rt.listen("metrics", address, rt.monitorHandler())
	defer l.stop()
	log.wait(t, 1, "metrics listens on "+address)
	connect := func() (net.Conn, *bufio.Reader) {
		t.Helper()
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := fmt.Fprint(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		return c, bufio.NewReader(c)
	}
	answered := func(r *bufio.Reader) error {
		resp, err := http.ReadResponse(r, nil)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
		}
		return err
	}
	var conns []net.Conn
	for range maxConnections {
		c, r := connect()
		if err := answered(r); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	late, r := connect()
	if err := late.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if err := answered(r); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connection %d: %v, want no answer", maxConnections+1, err)
	}
	if err := late.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	_ = conns[0].Close()
	if err := answered(r); err != nil {
		t.Errorf("once another closed: %v", err)
	}
}
