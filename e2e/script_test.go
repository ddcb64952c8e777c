package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// script is an engine whose answers a test writes itself: play runs for each
// request with a body.
type script struct {
	addr string

	mu   sync.Mutex
	play func(*stage) // protected by mu
}

// stage is one answer of a script's. Its methods are for the play only.
type stage struct {
	http.ResponseWriter
	req  *http.Request
	body []byte
}

// send writes a piece of the body and sees to it that it leaves.
func (s *stage) send(piece string) {
	_, _ = io.WriteString(s, piece)
	_ = http.NewResponseController(s.ResponseWriter).Flush()
}

// begin sends headers, given as names and values.
func (s *stage) begin(status int, headers ...string) {
	for i := 0; i < len(headers); i += 2 {
		s.Header().Set(headers[i], headers[i+1])
	}
	s.WriteHeader(status)
	_ = http.NewResponseController(s.ResponseWriter).Flush()
}

// wait returns when the channel says go on, or the client has left.
func (s *stage) wait(ch <-chan struct{}) {
	select {
	case <-ch:
	case <-s.req.Context().Done():
	}
}

func startScript(t *testing.T) *script {
	t.Helper()
	s := new(script)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		s.mu.Lock()
		play := s.play
		s.mu.Unlock()
		if r.Method != http.MethodPost || play == nil {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		play(&stage{w, r, body})
	}))
	t.Cleanup(server.Close)
	s.addr = server.Listener.Addr().String()
	return s
}

// plays sets what is answered from now on.
func (s *script) plays(play func(*stage)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.play = play
}

// pools is shunt's document for a pool of scripts that serve model m.
func pools(scripts ...*script) string {
	var list []string
	for _, s := range scripts {
		_, port, _ := net.SplitHostPort(s.addr)
		list = append(list, fmt.Sprintf(`{address: %q, labels: {model.aibrix.ai/name: m, model.aibrix.ai/metric-port: %q}}`, s.addr, port))
	}
	return "pools: {default: {static: [" + strings.Join(list, ", ") + "]}}\n"
}

// open sends a request and returns the answer before its body has been read.
func (w *world) open(t *testing.T, c *http.Client, q call) (*http.Response, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	if q.path == "" {
		q.path = "/v1/chat/completions"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+w.addr+q.path, q.body)
	if err != nil {
		t.Fatal(err)
	}
	id := newID()
	req.Header = http.Header{"Content-Type": {"application/json"}, "X-Test-Id": {id}}
	for k, v := range q.header {
		req.Header[k] = v
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp, id
}

// readN reads n bytes of an answer as they come.
func readN(t *testing.T, r io.Reader, n int) string {
	t.Helper()
	b := make([]byte, n)
	if got, err := io.ReadFull(r, b); err != nil {
		t.Fatalf("%v after %d of %d bytes: %q", err, got, n, b[:got])
	}
	return string(b)
}

// rest reads an answer to its end.
func rest(t *testing.T, r io.Reader) string {
	t.Helper()
	var b bytes.Buffer
	if _, err := b.ReadFrom(r); err != nil {
		t.Fatalf("%v after %q", err, b.String())
	}
	return b.String()
}
