package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/shuntproxy/shunt/internal/sim"
)

type labelPair = dto.LabelPair

// client1 speaks HTTP/1.1 and keeps connections.
func client1(t *testing.T) *http.Client {
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 100}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// client2 speaks HTTP/2 in cleartext with prior knowledge.
func client2(t *testing.T) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: protocols, DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// protocols are the clients by protocol.
func (w *world) protocols() map[string]*http.Client {
	return map[string]*http.Client{"h1": w.h1, "h2": w.h2}
}

// reply is a whole answer.
type reply struct {
	id      string
	status  int
	header  http.Header
	trailer http.Header
	body    []byte
	err     error // of reading the body
}

func (r reply) String() string {
	return fmt.Sprintf("%s: %d %v %s (error %v)", r.id, r.status, r.header, r.body, r.err)
}

// call is a request.
type call struct {
	method  string // POST
	path    string // /v1/chat/completions
	header  http.Header
	body    io.Reader
	length  int64 // 0 leaves it to net/http: known for strings and byte slices, else chunked
	trailer http.Header
}

// do sends a request and reads the answer; err says that there was none.
func (w *world) do(ctx context.Context, c *http.Client, q call) (reply, error) {
	if q.method == "" {
		q.method = http.MethodPost
	}
	if q.path == "" {
		q.path = "/v1/chat/completions"
	}
	req, err := http.NewRequestWithContext(ctx, q.method, "http://"+w.addr+q.path, q.body)
	if err != nil {
		return reply{}, err
	}
	if q.length != 0 {
		req.ContentLength = q.length
	}
	req.Header = http.Header{"Content-Type": {"application/json"}}
	for k, v := range q.header {
		req.Header[k] = v
	}
	id := newID()
	req.Header.Set("X-Test-Id", id)
	req.Trailer = q.trailer
	resp, err := c.Do(req)
	if err != nil {
		return reply{id: id}, err
	}
	defer func() { _ = resp.Body.Close() }()
	r := reply{id: id, status: resp.StatusCode, header: resp.Header}
	r.body, r.err = io.ReadAll(resp.Body)
	r.trailer = resp.Trailer
	return r, nil
}

// must is do for requests that must be answered.
func (w *world) must(t *testing.T, c *http.Client, q call) reply {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := w.do(ctx, c, q)
	if err != nil {
		t.Fatalf("%s %s: %v", q.method, q.path, err)
	}
	return r
}

// turns is how many requests each of some clients has begun, one after another.
type turns []atomic.Int64

// pass waits until each client has ended the request that it is at: what they
// began with what they knew until now is over.
func (n turns) pass(t *testing.T) {
	t.Helper()
	for i := range n {
		at := n[i].Load()
		eventually(t, fmt.Sprintf("client %d begins another request", i), func() string {
			if n[i].Load() > at {
				return ""
			}
			return "no"
		})
	}
}

// background is a request that is not answered yet.
type background struct {
	cancel context.CancelFunc
	done   chan struct{}
	reply  reply
	err    error
}

func (w *world) begin(t *testing.T, c *http.Client, q call) *background {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	b := &background{cancel: cancel, done: make(chan struct{})}
	t.Cleanup(cancel)
	go func() {
		defer close(b.done)
		b.reply, b.err = w.do(ctx, c, q)
	}()
	return b
}

func (b *background) wait() (reply, error) {
	<-b.done
	return b.reply, b.err
}

// header makes one of names and values.
func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i+1 < len(pairs); i += 2 {
		h[http.CanonicalHeaderKey(pairs[i])] = append(h[http.CanonicalHeaderKey(pairs[i])], pairs[i+1])
	}
	return h
}

const chat = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`

// chatOf is a chat request of exactly n bytes, at least 60.
func chatOf(n int) string {
	const before, after = `{"model":"m","messages":[{"role":"user","content":"`, `"}]}`
	return before + strings.Repeat("x", n-len(before)-len(after)) + after
}

func sum(body string) string {
	s := sha256.Sum256([]byte(body))
	return hex.EncodeToString(s[:])
}

// pieces reads at most n bytes at a time, so that a client sends so long chunks.
type pieces struct {
	text string
	n    int
}

func (p *pieces) Read(b []byte) (int, error) {
	if p.text == "" {
		return 0, io.EOF
	}
	n := copy(b[:min(len(b), p.n)], p.text)
	p.text = p.text[n:]
	return n, nil
}

// conn is a raw HTTP/1.1 connection.
type conn struct {
	net.Conn
	r *bufio.Reader
}

func (w *world) dial(t *testing.T) *conn {
	t.Helper()
	c, err := net.Dial("tcp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return &conn{c, bufio.NewReader(c)}
}

// send writes raw text, with lines that may end in \n alone.
func (c *conn) send(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

// read takes one answer off the connection.
func (c *conn) read(t *testing.T) reply {
	t.Helper()
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		t.Fatalf("reading an answer: %v", err)
	}
	defer func() { _ = resp.Body.Close() }()
	r := reply{status: resp.StatusCode, header: resp.Header}
	r.body, r.err = io.ReadAll(resp.Body)
	if resp.Close {
		r.header.Set("Connection", "close") // net/http hides it
	}
	return r
}

// rawRequest is a request's text with content-length.
func rawRequest(method, path, headers, body string) string {
	return fmt.Sprintf("%s %s HTTP/1.1\r\nhost: e2e\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n%s",
		method, path, headers, len(body), body)
}

// chunked is the text of a chunked body in pieces of n bytes, with trailers.
func chunked(body string, n int, trailers string) string {
	var b bytes.Buffer
	for ; body != ""; body = body[min(n, len(body)):] {
		piece := body[:min(n, len(body))]
		fmt.Fprintf(&b, "%x\r\n%s\r\n", len(piece), piece)
	}
	return b.String() + "0\r\n" + trailers + "\r\n"
}

// apiError is the OpenAI error object.
type apiError struct {
	Error struct {
		Message string
		Type    string
		Code    string
		Param   *string
	}
}

// errorOf decodes an error body, strictly.
func errorOf(t *testing.T, r reply) apiError {
	t.Helper()
	var e apiError
	dec := json.NewDecoder(bytes.NewReader(r.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil || e.Error.Type == "" {
		t.Fatalf("no OpenAI error object (%v): %v", err, r)
	}
	if got := r.header.Get("Content-Type"); got != "application/json" {
		t.Errorf("content-type %q", got)
	}
	return e
}

// canary is a listener that nothing may ever reach.
type canary struct {
	addr string
	hits chan string
}

func startCanary(t *testing.T) *canary {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &canary{addr: l.Addr().String(), hits: make(chan string, 1000)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			peer, err := l.Accept()
			if err != nil {
				return
			}
			line, _ := bufio.NewReader(peer).ReadString('\n')
			select {
			case c.hits <- line:
			default:
			}
			_, _ = io.WriteString(peer, "HTTP/1.1 418 canary\r\ncontent-length: 0\r\n\r\n")
			_ = peer.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
		c.check(t)
	})
	return c
}

func (c *canary) check(t *testing.T) {
	t.Helper()
	for {
		select {
		case line := <-c.hits:
			t.Errorf("a request reached the canary: %q", line)
		default:
			return
		}
	}
}

// received finds the one request with an id among all engines.
func (w *world) received(t *testing.T, id string) (*sim.Server, sim.Received) {
	t.Helper()
	for _, e := range w.engines {
		for _, r := range e.Requests("") {
			if r.Headers.Get("X-Test-Id") == id {
				return e, r
			}
		}
	}
	t.Fatalf("no engine got request %s", id)
	return nil, sim.Received{}
}
