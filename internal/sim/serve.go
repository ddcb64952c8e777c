package sim

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"hash"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// exchange is one request on its way through the server; one handler owns it.
type exchange struct {
	s      *Server
	w      http.ResponseWriter
	r      *http.Request
	rec    *Received // fields are written under s.mu
	body   []byte
	delays Delays
	fault  *Fault // nil = none
	unhang <-chan struct{}
	status int  // sent so far; 0 = none
	whole  bool // the answer was sent to its end
	short  bool // the body never came to its end
	begun  time.Time
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	x := s.begin(w, r)
	if x == nil {
		abortConn(r)
	}
	defer x.end()
	x.handle()
	if !x.whole {
		abortConn(r) // else net/http would end the answer as if all were well
	}
}

func (x *exchange) handle() {
	s, r := x.s, x.r
	if x.fault != nil && x.fault.Kind == FaultEarlyStatus {
		x.failure(x.fault)
		return
	}
	if !x.readBody() {
		return
	}
	if f := x.fault; f != nil {
		switch f.Kind {
		case FaultStatus:
			if x.pause(time.Duration(x.delays.BeforeHeaders)) {
				x.failure(f)
			}
			return
		case FaultReset:
			if x.pause(time.Duration(x.delays.BeforeHeaders)) {
				abortConn(r)
			}
			return
		case FaultHang:
			if !x.hang() {
				return
			}
		}
	}
	if !x.waitRelease() {
		return
	}
	path := r.URL.Path
	if e, ok := endpoints[path]; ok && slices.Contains(e.engines, s.cfg.Engine) {
		if r.Method != http.MethodPost {
			x.w.Header().Set("Allow", "POST")
			x.json(http.StatusMethodNotAllowed, map[string]string{"detail": "Method Not Allowed"})
			return
		}
		e.serve(x)
		return
	} else if ok {
		x.json(http.StatusNotFound, map[string]string{"detail": "Not Found"})
		return
	}
	switch path {
	case "/v1/models":
		x.models()
	case "/health":
		s.mu.Lock()
		status := s.health
		s.mu.Unlock()
		x.bytes(status, "", nil)
	default:
		x.json(http.StatusOK, map[string]string{"method": r.Method, "path": path})
	}
}

// begin counts the request in; nil if the server is closing.
func (s *Server) begin(w http.ResponseWriter, r *http.Request) *exchange {
	x := &exchange{s: s, w: w, r: r, begun: time.Now()}
	x.rec = received(r)
	x.rec.At = x.begun
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.handlers.Add(1)
	s.counters.Received++
	s.counters.InFlight++
	s.ring.add(x.rec)
	x.delays, x.unhang = s.delays, s.unhang
	for i, f := range s.faults {
		if f.Path != r.URL.Path && (f.Path != "" || quiet(r.URL.Path)) {
			continue
		}
		x.fault = &f.Fault
		if f.left > 0 {
			f.left--
			if f.left == 0 {
				s.faults = slices.Delete(s.faults, i, i+1)
			}
		}
		break
	}
	s.signal()
	return x
}

// quiet are the paths that faults without a path spare.
func quiet(path string) bool { return path == "/health" || path == "/v1/models" }

func received(r *http.Request) *Received {
	return &Received{
		Method: r.Method, Path: r.URL.Path, Query: r.URL.RawQuery, Proto: r.Proto, Host: r.Host, Remote: r.RemoteAddr,
		Headers: r.Header.Clone(), ContentLength: r.ContentLength,
	}
}

// end counts the request out. It runs while a panic that cuts the connection passes, too.
func (x *exchange) end() {
	s := x.s
	gone := x.short || x.r.Context().Err() != nil // the context may not know yet of an incomplete body
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.handlers.Done()
	s.counters.InFlight--
	x.rec.Status, x.rec.Done = x.status, true
	switch {
	case x.whole:
		s.counters.Answered++
		s.counters.ByStatus[x.status]++
	case gone && !s.closed:
		x.rec.Aborted = true
		s.counters.Aborted++
	default:
		s.counters.Reset++
	}
	if x.status != 0 {
		handler := x.r.URL.Path
		switch handler {
		case "/v1/chat/completions", "/v1/completions", "/v1/models":
		default:
			handler = "none"
		}
		if x.r.URL.Path != "/health" { // the instrumentator excludes it
			size, _ := strconv.ParseInt(x.w.Header().Get("Content-Length"), 10, 64)
			s.stats.observe(handler, x.r.Method, x.status, x.r.ContentLength, size, time.Since(x.begun))
		}
	}
	s.signal()
}

var hashers = sync.Pool{New: func() any { return sha256.New() }}

// readBody reads the body and the trailers; false if the client left or sent too much.
func (x *exchange) readBody() bool {
	h := hashers.Get().(hash.Hash)
	h.Reset()
	defer hashers.Put(h)
	if n := x.r.ContentLength; n > 0 && n <= x.s.cfg.MaxBody {
		x.body = make([]byte, 0, n+1)
	}
	var err error
	for err == nil {
		if len(x.body) == cap(x.body) {
			x.body = slices.Grow(x.body, max(len(x.body), 4096))
		}
		var n int
		n, err = x.r.Body.Read(x.body[len(x.body):cap(x.body)])
		x.body = x.body[:len(x.body)+n]
		if int64(len(x.body)) > x.s.cfg.MaxBody {
			x.openAIError(http.StatusRequestEntityTooLarge, "the body is larger than max_body", "")
			return false
		}
	}
	h.Write(x.body)
	sum := hex.EncodeToString(h.Sum(nil))
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	x.rec.BodySHA256, x.rec.BodyLen = sum, int64(len(x.body))
	if len(x.r.Trailer) > 0 {
		x.rec.Trailers = x.r.Trailer.Clone()
	}
	x.short = err != io.EOF
	return !x.short
}

// waitRelease holds the request if the server is told to; false if the client left or the server closes.
func (x *exchange) waitRelease() bool {
	s := x.s
	if quiet(x.r.URL.Path) {
		return true
	}
	s.mu.Lock()
	if !s.hold {
		s.mu.Unlock()
		return true
	}
	ch := make(chan struct{})
	s.held = append(s.held, ch)
	s.counters.Held = len(s.held)
	s.signal()
	s.mu.Unlock()
	select {
	case <-ch:
		return true
	case <-x.r.Context().Done():
	case <-s.quit:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.held, ch); i >= 0 {
		s.held = slices.Delete(s.held, i, i+1)
		s.counters.Held = len(s.held)
	}
	return false
}

// hang waits until the faults are replaced; false if the client left or the server closes meanwhile.
func (x *exchange) hang() bool {
	select {
	case <-x.unhang:
		return true
	case <-x.r.Context().Done():
	case <-x.s.quit:
	}
	return false
}

// pause waits; false if the client left or the server closes meanwhile.
func (x *exchange) pause(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-x.r.Context().Done():
	case <-x.s.quit:
	}
	return false
}

func (x *exchange) header(status int, contentType string) {
	h := x.w.Header()
	h["Server"] = []string{"uvicorn"}
	if contentType != "" {
		h["Content-Type"] = []string{contentType}
	} else {
		h["Content-Type"] = nil // else net/http guesses one
	}
	x.status = status
	x.w.WriteHeader(status)
}

// bytes sends a whole answer, with the delays and the mid-body fault.
func (x *exchange) bytes(status int, contentType string, body []byte) {
	if !x.pause(time.Duration(x.delays.BeforeHeaders)) {
		return
	}
	if x.s.cfg.Compress && status < 300 && strings.Contains(x.r.Header.Get("Accept-Encoding"), "gzip") {
		body = packed(body)
		x.w.Header()["Content-Encoding"] = []string{"gzip"}
	}
	x.w.Header()["Content-Length"] = []string{strconv.Itoa(len(body))}
	x.header(status, contentType)
	flush := http.NewResponseController(x.w)
	if d := time.Duration(x.delays.BeforeBody); d > 0 {
		_ = flush.Flush()
		if !x.pause(d) {
			return
		}
	}
	if f := x.fault; f != nil && (f.Kind == FaultResetMid || f.Kind == FaultHangMid) {
		_, _ = x.w.Write(body[:len(body)/2])
		_ = flush.Flush()
		if f.Kind == FaultResetMid {
			abortConn(x.r)
		}
		if !x.hang() {
			return
		}
		body = body[len(body)/2:]
	}
	_, err := x.w.Write(body)
	x.whole = err == nil || len(body) == 0 || x.r.Method == http.MethodHead
}

func (x *exchange) json(status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // only our own structs come here
		status, body = http.StatusInternalServerError, []byte(`{"detail":"unencodable"}`)
	}
	x.bytes(status, "application/json", body)
}

func packed(b []byte) []byte {
	var z bytes.Buffer
	zw := gzip.NewWriter(&z)
	_, _ = zw.Write(b) // to memory
	_ = zw.Close()
	return z.Bytes()
}

// openAIError answers in the engine's form.
func (x *exchange) openAIError(status int, message, param string) {
	kind := "InternalServerError"
	switch {
	case status == http.StatusNotFound:
		kind = "NotFoundError"
	case status < 500:
		kind = "BadRequestError"
	}
	var p any
	if param != "" {
		p = param
	}
	switch x.s.cfg.Engine {
	case "sglang", "trtllm":
		x.json(status, map[string]any{"object": "error", "message": message, "type": kind, "param": p, "code": status})
	case "xllm":
		x.bytes(status, "text/plain", []byte("[E"+strconv.Itoa(status)+"]"+message)) // brpc's, not JSON
	default:
		if strings.HasPrefix(x.r.URL.Path, "/v1/messages") {
			kind = map[bool]string{true: "not_found_error", false: "invalid_request_error"}[status == http.StatusNotFound]
			if status >= 500 {
				kind = "api_error"
			}
			x.json(status, map[string]any{"type": "error", "error": map[string]string{"type": kind, "message": message}})
			return
		}
		x.json(status, map[string]any{"error": map[string]any{"message": message, "type": kind, "param": p, "code": status}})
	}
}

func (x *exchange) failure(f *Fault) {
	for k, v := range f.Headers {
		x.w.Header().Set(k, v)
	}
	x.delays.BeforeHeaders = 0 // taken already
	if f.Body != "" {
		x.bytes(f.Status, cmp.Or(x.w.Header().Get("Content-Type"), "text/plain; charset=utf-8"), []byte(f.Body))
		return
	}
	x.openAIError(f.Status, "simulated failure", "")
}

// abortConn ends the handler and resets the connection: a TCP reset in HTTP/1.1, a stream reset in HTTP/2.
func abortConn(r *http.Request) {
	if tcp, ok := r.Context().Value(connKey{}).(*net.TCPConn); ok && r.ProtoMajor == 1 {
		_ = tcp.SetLinger(0)
	}
	panic(http.ErrAbortHandler) // net/http's way to cut an answer; it recovers it
}

var fastBody = []byte(`{"id":"chatcmpl-fast","object":"chat.completion","created":1,"model":"sim-model","choices":[{"index":0,` +
	`"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}}`)

var (
	fastLength = []string{strconv.Itoa(len(fastBody))}
	fastType   = []string{"application/json"}
)

// serveFast answers at next to no cost, for benchmarks.
func (s *Server) serveFast(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return
	}
	if d := time.Duration(s.cfg.FastDelay); d > 0 {
		time.Sleep(d)
	}
	h := w.Header()
	h["Content-Type"], h["Content-Length"] = fastType, fastLength
	_, _ = w.Write(fastBody)
}

func (s *Server) serveMetrics(w http.ResponseWriter, r *http.Request) {
	rec := received(r)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		abortConn(r)
	}
	s.handlers.Add(1)
	defer s.handlers.Done()
	s.counters.Scrapes++
	s.scraped = rec
	fault, frozen, quirks := s.metrics, s.frozen, s.quirks
	s.signal()
	s.mu.Unlock()

	w.Header().Set("Server", "uvicorn")
	w.Header().Set("Content-Type", s.dialect.contentType())
	packs := s.dialect.gzips()
	if quirks.Gzip != nil {
		packs = *quirks.Gzip
	}
	packs = packs && strings.Contains(r.Header.Get("Accept-Encoding"), "gzip")
	send := func(b []byte) {
		if packs {
			b = packed(b)
			w.Header().Set("Content-Encoding", "gzip")
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b)
	}
	sendPage := func() {
		s.rendering.Lock()
		gone := r.Context().Err() != nil
		var b []byte
		if !gone {
			b = s.page()
		}
		s.rendering.Unlock()
		if gone {
			abortConn(r)
		}
		send(b)
	}
	switch fault.Kind {
	case MetricsStatus:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(fault.Status)
		_, _ = io.WriteString(w, `{"detail":"`+http.StatusText(fault.Status)+`"}`)
	case MetricsEmpty:
		send(nil)
	case MetricsGarbage:
		send([]byte("\x00\xff{{{ not a page\nvllm:num_requests_running{engine=\"0\" oops\n# TYPE\n= 1e\n"))
	case MetricsJSON:
		w.Header().Set("Content-Type", "application/json")
		send([]byte("[]"))
	case MetricsSlow:
		x := exchange{s: s, r: r}
		if x.pause(time.Duration(fault.Delay)) {
			sendPage()
		}
	case MetricsHuge:
		chunk := make([]byte, 0, 64<<10)
		for sent, i := 0, 0; sent < fault.Bytes; sent += len(chunk) {
			for chunk = chunk[:0]; len(chunk) < 60<<10; i++ {
				chunk = append(chunk, "other_requests_total{endpoint=\"/junk/"...)
				chunk = strconv.AppendInt(chunk, int64(i), 10)
				chunk = append(chunk, "\"} 1.0\n"...)
			}
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
		_, _ = w.Write(s.page())
	case MetricsFrozen:
		send(frozen)
	case MetricsMoved:
		if strings.HasSuffix(r.URL.Path, "/") {
			sendPage()
			return
		}
		w.Header().Set("Location", "http://"+r.Host+r.URL.Path+"/")
		w.WriteHeader(http.StatusTemporaryRedirect)
	case MetricsReset:
		abortConn(r)
	case MetricsHang:
		select {
		case <-r.Context().Done():
		case <-s.quit:
		}
		abortConn(r)
	default:
		sendPage()
	}
}
