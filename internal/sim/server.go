package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

var errStopped = errors.New("engine stopped")

// Server is one simulated engine behind an HTTP/1.1 and cleartext HTTP/2 listener. Its methods may be called from any
// goroutine between Start and Close; Close may be called more than once.
type Server struct {
	cfg     Config
	dialect dialect
	drv     *driver
	http    *http.Server
	created time.Time
	quit    chan struct{} // closed by Close: hung and held requests end

	// mu protects what the control API sets and counts.
	mu       sync.Mutex
	closed   bool
	counters Counters
	ring     ring
	scraped  *Received // the newest request for the metrics page
	stats    *httpStats
	changed  chan struct{} // closed at the next change of counters; nil if nobody waits
	hold     bool
	held     []chan struct{} // in order of arrival; closed to release
	load     Load
	delays   Delays
	faults   []*fault
	unhang   chan struct{} // closed when the faults are replaced
	metrics  MetricsFault
	frozen   []byte
	asleep   bool
	quirks   Quirks
	health   int // status of /health

	// rendering is held while a page is made for a request: who scrapes faster
	// than this machine can waits, and who left meanwhile costs nothing.
	rendering sync.Mutex

	// connMu protects the listener and the connections.
	connMu   sync.Mutex
	addr     net.Addr
	listener net.Listener // nil while refusing
	conns    map[net.Conn]http.ConnState
	reopen   *time.Timer
	down     bool

	handlers sync.WaitGroup // Add under mu while not closed
	serving  sync.WaitGroup // accept loops and the reopen timer; Add under connMu while not down
}

type fault struct {
	Fault
	left int // -1 = until cleared
}

// Counters are what a server has seen since its start or the last reset. Metrics pages and the control API don't count
// as requests.
type Counters struct {
	InFlight int         `json:"in_flight"` // arrived, not yet answered in full
	Held     int         `json:"held"`      // waiting for Release
	Received int         `json:"received"`
	Answered int         `json:"answered"` // in full
	Aborted  int         `json:"aborted"`  // the client left first
	Reset    int         `json:"reset"`    // cut by a fault or by Close
	Scrapes  int         `json:"scrapes"`  // of the metrics page
	ByStatus map[int]int `json:"by_status"`
}

// NewServer checks cfg; nothing runs before Start.
func NewServer(cfg Config) (*Server, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, fmt.Errorf("engine %q: %w", cfg.Name, err)
	}
	d, err := newDialect(cfg.Engine, cfg.Models[0])
	if err != nil {
		return nil, fmt.Errorf("engine %q: %w", cfg.Name, err)
	}
	s := &Server{
		cfg: cfg, dialect: d, quit: make(chan struct{}), ring: newRing(cfg.Requests), stats: newHTTPStats(),
		hold: cfg.Hold, asleep: cfg.Asleep, quirks: cfg.Quirks, metrics: cfg.Metrics, load: cfg.Load, delays: cfg.Delays, unhang: make(chan struct{}), health: http.StatusOK,
		conns: map[net.Conn]http.ConnState{}, counters: Counters{ByStatus: map[int]int{}},
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	s.http = &http.Server{
		Handler: s, Protocols: protocols, HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 4096},
		IdleTimeout: max(time.Duration(cfg.IdleTimeout), 0),
		ErrorLog:    log.New(io.Discard, "", 0), // resets are what this server is for
		ConnState:   s.noteConn,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	return s, nil
}

type connKey struct{}

// Start opens the listener and runs the engine. It fails if the address can't be bound; call it once.
func (s *Server) Start() error {
	model, err := NewModel(s.cfg.Params, s.dialect.bounds(s.cfg.MaxModelLen), true)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", s.cfg.Listen)
	if err != nil {
		return fmt.Errorf("engine %q: listen: %w", s.cfg.Name, err)
	}
	model.SetLoad(0, s.cfg.Load)
	s.created = time.Now()
	s.drv = newDriver(model, s.cfg.Speedup)
	s.connMu.Lock()
	defer s.connMu.Unlock()
	s.addr = l.Addr()
	s.serveOn(l)
	return nil
}

// serveOn is called with connMu held and the server not down.
func (s *Server) serveOn(l net.Listener) {
	s.listener = l
	s.serving.Add(1)
	go func() {
		defer s.serving.Done()
		_ = s.http.Serve(l) // ends when the listener is closed, by Refuse or Close
	}()
}

// Addr is ip:port as bound; "" before Start.
func (s *Server) Addr() string {
	s.connMu.Lock()
	defer s.connMu.Unlock()
	if s.addr == nil {
		return ""
	}
	return s.addr.String()
}

// Name is the configured name, or the address.
func (s *Server) Name() string {
	if s.cfg.Name != "" {
		return s.cfg.Name
	}
	return s.Addr()
}

// Config is the configuration in force, defaults filled in.
func (s *Server) Config() Config { return s.cfg }

// Close cuts every connection, stops the engine and waits for all that Start began.
func (s *Server) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.quit)
	}
	s.mu.Unlock()
	s.connMu.Lock()
	first := !s.down
	s.down = true
	s.stopReopen()
	s.listener = nil
	s.connMu.Unlock()
	err := s.http.Close()
	if errors.Is(err, net.ErrClosed) { // of a listener that Refuse has closed just now
		err = nil
	}
	s.handlers.Wait()
	s.serving.Wait()
	if first && s.drv != nil {
		s.drv.stop()
	}
	return err
}

func (s *Server) noteConn(c net.Conn, st http.ConnState) {
	s.connMu.Lock()
	defer s.connMu.Unlock()
	if st == http.StateClosed || st == http.StateHijacked {
		delete(s.conns, c)
		return
	}
	s.conns[c] = st
	if st == http.StateIdle && s.listener == nil { // it was busy when Refuse came
		_ = c.Close()
	}
}

// Refuse closes the listener and the idle connections, with cut all connections, so that new ones are refused. It
// lasts for d, or with 0 until Accept.
func (s *Server) Refuse(cut bool, d time.Duration) {
	s.connMu.Lock()
	defer s.connMu.Unlock()
	if s.down {
		return
	}
	s.stopReopen()
	if s.listener != nil {
		_ = s.listener.Close()
		s.listener = nil
	}
	for c, st := range s.conns {
		if cut || st != http.StateActive {
			_ = c.Close()
		}
	}
	if d > 0 {
		s.scheduleReopen(d)
	}
}

func (s *Server) scheduleReopen(d time.Duration) {
	s.serving.Add(1)
	s.reopen = time.AfterFunc(d, func() {
		defer s.serving.Done()
		s.connMu.Lock()
		defer s.connMu.Unlock()
		s.reopen = nil
		if s.down || s.listener != nil {
			return
		}
		if err := s.relisten(); err != nil { // another process has the port for now
			s.scheduleReopen(50 * time.Millisecond)
		}
	})
}

func (s *Server) stopReopen() {
	if s.reopen != nil && s.reopen.Stop() {
		s.serving.Done()
	}
	s.reopen = nil
}

func (s *Server) relisten() error {
	l, err := net.Listen("tcp", s.addr.String())
	if err != nil {
		return err
	}
	s.serveOn(l)
	return nil
}

// Accept ends Refuse, on the same port. It fails if another process has taken that.
func (s *Server) Accept() error {
	s.connMu.Lock()
	defer s.connMu.Unlock()
	if s.down || s.listener != nil {
		return nil
	}
	s.stopReopen()
	return s.relisten()
}

// SetLoad sets what the engine pretends to have.
func (s *Server) SetLoad(l Load) {
	s.mu.Lock()
	s.load = l
	s.mu.Unlock()
	s.drv.ask(func(now time.Duration) { s.drv.model.SetLoad(now, l) })
}

// SetDelays sets the delays of requests that arrive from now on.
func (s *Server) SetDelays(d Delays) {
	s.mu.Lock()
	s.delays = d
	s.mu.Unlock()
}

// SetFaults replaces the list of faults; a request meets the first that fits it. Requests that hang go on.
func (s *Server) SetFaults(faults ...Fault) error {
	list := make([]*fault, 0, len(faults))
	for i, f := range faults {
		if err := f.validate(); err != nil {
			return fmt.Errorf("faults[%d]: %w", i, err)
		}
		left := f.Count
		if left == 0 {
			left = -1
		}
		list = append(list, &fault{Fault: f, left: left})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = list
	close(s.unhang)
	s.unhang = make(chan struct{})
	return nil
}

// SetMetricsFault replaces what is wrong with the metrics page; the zero value is nothing.
func (s *Server) SetMetricsFault(f MetricsFault) error {
	if err := f.validate(); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	var frozen []byte
	if f.Kind == MetricsFrozen {
		frozen = s.page()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metrics, s.frozen = f, frozen
	return nil
}

// SetQuirks replaces what is odd about the metrics page; the zero value is nothing.
func (s *Server) SetQuirks(q Quirks) error {
	if err := q.validate(s.cfg.Engine); err != nil {
		return err
	}
	s.mu.Lock()
	s.quirks = q
	s.mu.Unlock()
	return nil
}

// SetAsleep makes the metrics say that the engine sleeps, or not.
func (s *Server) SetAsleep(asleep bool) {
	s.mu.Lock()
	s.asleep = asleep
	s.mu.Unlock()
}

// SetHealth sets the status of /health.
func (s *Server) SetHealth(status int) error {
	if status < 200 || status > 599 {
		return fmt.Errorf("health: %d is not 200 to 599", status)
	}
	s.mu.Lock()
	s.health = status
	s.mu.Unlock()
	return nil
}

// SetHold says whether requests that arrive are held before they reach the engine. Off releases all.
func (s *Server) SetHold(hold bool) {
	s.mu.Lock()
	s.hold = hold
	s.mu.Unlock()
	if !hold {
		s.Release(0)
	}
}

// Release lets the n oldest held requests go on, all of them with n ≤ 0, and says how many it was.
func (s *Server) Release(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n <= 0 || n > len(s.held) {
		n = len(s.held)
	}
	for _, ch := range s.held[:n] {
		close(ch)
	}
	s.held = slices.Delete(s.held, 0, n)
	s.counters.Held = len(s.held)
	s.signal()
	return n
}

// Requests are the remembered requests with that path, "" = all, oldest first.
func (s *Server) Requests(path string) []Received {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ring.list(path)
}

// LastScrape is the newest request for the metrics page, false if there was none.
func (s *Server) LastScrape() (Received, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.scraped == nil {
		return Received{}, false
	}
	return *s.scraped, true
}

// ResetRequests forgets requests and counters; what is in flight stays counted.
func (s *Server) ResetRequests() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ring.reset()
	s.scraped = nil
	s.counters = Counters{InFlight: s.counters.InFlight, Held: s.counters.Held, ByStatus: map[int]int{}}
	s.signal()
}

// Reset ends every fault, delay, load and hold, accepts connections, and forgets requests, counters and the prefix
// cache.
func (s *Server) Reset() error {
	s.SetLoad(Load{})
	s.SetDelays(Delays{})
	err := errors.Join(s.SetFaults(), s.SetMetricsFault(MetricsFault{}), s.SetQuirks(Quirks{}), s.SetHealth(http.StatusOK), s.Accept())
	s.SetAsleep(false)
	s.SetHold(false)
	s.drv.ask(func(time.Duration) { s.drv.model.ClearCache() })
	s.ResetRequests()
	return err
}

// Counters are the present counts.
func (s *Server) Counters() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.countersLocked()
}

func (s *Server) countersLocked() Counters {
	c := s.counters
	c.ByStatus = make(map[int]int, len(s.counters.ByStatus))
	for k, v := range s.counters.ByStatus {
		c.ByStatus[k] = v
	}
	return c
}

// Wait returns when the counters satisfy cond, or with ctx's error and the last counts.
func (s *Server) Wait(ctx context.Context, cond func(Counters) bool) error {
	for {
		s.mu.Lock()
		c := s.countersLocked()
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		if cond(c) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("engine %s has %+v: %w", s.Name(), c, ctx.Err())
		case <-s.quit:
			return errStopped
		}
	}
}

// signal wakes Wait; mu is held.
func (s *Server) signal() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// Snapshot is the engine's state as its metrics show it; the zero value after Close.
func (s *Server) Snapshot() Snapshot {
	var snap Snapshot
	s.drv.ask(func(time.Duration) { snap = s.drv.model.Snapshot() })
	return snap
}

// page renders the metrics page.
func (s *Server) page() []byte {
	pg := page{
		snap: s.Snapshot(), model: s.cfg.Models[0], maxModelLen: s.cfg.MaxModelLen, lora: len(s.cfg.Adapters) > 0,
		start: s.drv.start, speedup: s.cfg.Speedup, created: float64(s.created.UnixNano()) / 1e9,
	}
	s.mu.Lock()
	pg.http, pg.asleep = s.stats.clone(), s.asleep
	quirks := s.quirks
	s.mu.Unlock()
	if quirks.Cold && finished(&pg) == 0 {
		return nil
	}
	b := s.dialect.page(make([]byte, 0, 80<<10), &pg)
	if quirks.text() {
		b = quirks.apply(b)
	}
	return b
}

// isMetrics reports whether the page, or what is wrong with it, is at path.
func (s *Server) isMetrics(path string) bool {
	s.mu.Lock()
	paths, moved := s.quirks.Paths, s.metrics.Kind == MetricsMoved
	s.mu.Unlock()
	if len(paths) == 0 {
		paths = s.dialect.metricsPaths()
	}
	return slices.Contains(paths, path) || moved && slices.Contains(paths, strings.TrimSuffix(path, "/"))
}

// ServeHTTP is the handler behind the listener.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	switch {
	case strings.HasPrefix(path, "/_sim/"):
		s.Control().ServeHTTP(w, r)
	case s.isMetrics(path):
		s.serveMetrics(w, r)
	case path == "/metrics" && s.cfg.Engine == "xllm":
		http.Error(w, "[E1002]Fail to find method on `/metrics'", http.StatusNotFound) // brpc's
	case path == "/metrics" && s.cfg.Engine == "trtllm":
		// Statistics of iterations, and usually none: who reads them takes them away.
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "[]")
	case s.cfg.Fast && path != "/health" && path != "/v1/models":
		s.serveFast(w, r)
	default:
		s.serve(w, r)
	}
}
