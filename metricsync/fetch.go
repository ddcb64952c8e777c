package metricsync

import (
	"compress/flate"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Reason is why a scrape failed, a closed set for a counter's label.
type Reason uint8

// The outcomes of a scrape.
const (
	ScrapeOK       Reason = iota
	ScrapeConnect         // no connection, or no credentials for one
	ScrapeTimeout         // no whole page in time
	ScrapeStatus          // another status than 200
	ScrapeRedirect        // to another host, or more than one
	ScrapeTooLarge        // above the byte cap
	ScrapeEmpty           // a page without one known metric
	ScrapeFormat          // JSON, or content that can't be unpacked
	ScrapeRead            // the connection broke within the page
	ScrapeInternal        // a fault of ours
	numReasons
)

// String returns the label value.
func (r Reason) String() string {
	names := [numReasons]string{"ok", "connect", "timeout", "status", "redirect", "too_large", "empty", "format", "read", "internal"}
	if r < numReasons {
		return names[r]
	}
	return "unknown"
}

const (
	// drainLimit bounds what is read of a body nobody wants, to keep its
	// connection.
	drainLimit = 64 << 10
	// listLimit bounds a model list, maxListed its entries and maxName the name of
	// a model or an adapter: each is a key of every snapshot.
	listLimit = 4 << 20
	maxListed = 4096
	maxName   = 1024
	// idleTimeout closes idle connections before uvicorn does, at 5 s.
	idleTimeout = 4 * time.Second
)

var errRedirect = errors.New("redirected to another host, or twice")

// newClient returns the client of one Syncer for what is asked rarely: health
// and model lists. It follows one redirect to the same host, uses no proxy and
// asks for no compression: that is CPU in the engine's event loop.
func newClient(dial dialFunc) (*http.Client, *http.Transport) {
	t := &http.Transport{
		DialContext:            dial,
		DialTLSContext:         dial,
		DisableCompression:     true,
		MaxIdleConns:           0, // no bound over all endpoints
		MaxIdleConnsPerHost:    2,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: headLimit,
	}
	return &http.Client{
		Transport: t,
		CheckRedirect: func(req *http.Request, via []*http.Request) error {
			if len(via) > 1 || req.URL.Host != via[0].URL.Host || req.URL.Scheme != via[0].URL.Scheme {
				return errRedirect
			}
			return nil
		},
	}, t
}

// scrape is the outcome of one scrape.
type scrape struct {
	reason Reason
	err    error // nil if reason is ScrapeOK
	// answered is true where an HTTP server answered, whatever it said.
	answered bool
	bytes    int64
	taken    time.Time
	// metrics is nil unless reason is ScrapeOK.
	metrics  *pool.Metrics
	asleep   bool
	adapters adapters
}

// everywhere says in the error that none of the paths has a page, where that is
// so.
func (s *scrape) everywhere(paths []string) {
	if e, ok := errors.AsType[statusError](s.err); ok && e.status == http.StatusNotFound {
		e.path = strings.Join(paths, " and ")
		s.err = e
	}
}

// fetch is what a page is asked with.
type fetch struct {
	client *client
	table  *table
	// parser returns one to read the page with. It is asked for once the page
	// begins to arrive: of a pool's endpoints that are asked at one moment few are
	// read at the same time, with memory that is still in the core's cache.
	parser  func() *parser
	path    string
	headers []byte // lines that Access adds
	connect time.Duration
	timeout time.Duration // that until is made of
	until   time.Time
	limit   int64
	idle    time.Duration // how long the connection will wait for the next
	request []byte        // room to build it in
}

// page reads one metrics page into p, which is nil where none began to arrive, and
// holds no metrics that count if there is an error.
func (f *fetch) page(ctx context.Context) (out scrape, p *parser) {
	out, p = f.read(ctx)
	if out.reason != ScrapeOK && out.reason != ScrapeStatus && out.reason != ScrapeRedirect && isTimeout(ctx, out.err) {
		out.reason, out.err = ScrapeTimeout, f.late(&out)
	}
	f.client.done(f.idle)
	return out, p
}

func (f *fetch) read(ctx context.Context) (out scrape, p *parser) {
	fail := func(r Reason, err error) (scrape, *parser) {
		out.reason, out.err = r, err
		return out, p
	}
	path := f.path
	var head answer
	f.client.limit = f.limit
	for redirects := 0; ; redirects++ {
		var err error
		if head, err = f.ask(ctx, path); err != nil {
			if _, ok := errors.AsType[dialError](err); ok {
				return fail(ScrapeConnect, err)
			}
			return fail(wireReason(err), f.broken(err, &out))
		}
		out.answered = true
		if head.status < 300 || head.status > 308 || head.location == "" {
			break
		}
		path = f.sameHost(path, head.location)
		f.client.drain()
		switch {
		case path == "":
			return fail(ScrapeRedirect, fmt.Errorf("%s redirects to %.200q, which is another server and not asked; %s and scrape.tls say where shunt asks", f.path, head.location, pool.LabelMetricPort))
		case redirects == 1:
			return fail(ScrapeRedirect, fmt.Errorf("%s redirects to a path that redirects to %.200q; one redirect is followed", f.path, head.location))
		}
	}
	if head.status != http.StatusOK {
		f.client.drain()
		return fail(ScrapeStatus, statusError{f.path, head.status, f.table.hint, !f.client.secure})
	}
	if head.packed != "" {
		return fail(ScrapeFormat, fmt.Errorf("%s is packed with %.50q, which nobody asked for and shunt can't unpack", f.path, head.packed))
	}
	p = f.parser()
	body, err := p.unpacked(f.client, head.gzip)
	if err == nil {
		out.bytes, err = p.parse(body, f.limit)
	}
	out.taken = time.Now()
	var corrupt flate.CorruptInputError
	switch {
	case errors.Is(err, errTooLarge):
		return fail(ScrapeTooLarge, fmt.Errorf("%w (%d bytes), the rest was not read", err, f.limit))
	case errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum), errors.As(err, &corrupt):
		return fail(ScrapeFormat, fmt.Errorf("%s says that it is gzip, and is not: %w", f.path, err))
	case err != nil:
		return fail(wireReason(err), f.broken(err, &out))
	}
	p.reading.reduce(&p.page, anyModel)
	switch {
	case p.reading.empty() && p.json():
		return fail(ScrapeFormat, fmt.Errorf("%s is JSON and not metrics%s", f.path, jsonHint(f.table)))
	case p.reading.empty() && out.bytes == 0:
		return fail(ScrapeEmpty, fmt.Errorf("%s is an empty page%s", f.path, hintText(f.table.hint)))
	case p.reading.empty():
		return fail(ScrapeEmpty, fmt.Errorf("%s has none of %s's metrics (%d bytes)%s%s", f.path, f.table.engine, out.bytes, hintText(engineHint), hintText(f.table.hint)))
	}
	return out, p
}

// late says what has not come in time.
func (f *fetch) late(out *scrape) error {
	if _, ok := errors.AsType[dialError](out.err); ok {
		if f.connect < f.timeout {
			return fmt.Errorf("no connection to %s within %s (scrape.connectTimeout)", f.client.address, f.connect)
		}
		return fmt.Errorf("no connection to %s within %s (scrape.timeout)", f.client.address, f.timeout)
	}
	if !out.answered {
		return fmt.Errorf("no answer for %s within %s (scrape.timeout)", f.path, f.timeout)
	}
	return fmt.Errorf("no whole page of %s within %s, only %d bytes of it (scrape.timeout)", f.path, f.timeout, out.bytes)
}

// broken says where an answer broke off.
func (f *fetch) broken(err error, out *scrape) error {
	switch {
	case out.answered:
		return fmt.Errorf("%s broke off after %d bytes: %w", f.path, out.bytes, err)
	case f.client.secure || errors.Is(err, errEndless) || errors.Is(err, errLarge):
		return fmt.Errorf("no answer for %s: %w", f.path, err)
	default: // what a server that waits for TLS makes of a request without
		return fmt.Errorf("no answer for %s: %w%s", f.path, err, hintText(secureHint))
	}
}

// wireReason tells an answer without end from a connection that broke.
func wireReason(err error) Reason {
	if errors.Is(err, errEndless) {
		return ScrapeTooLarge
	}
	return ScrapeRead
}

// ask sends the request for a path.
func (f *fetch) ask(ctx context.Context, path string) (answer, error) {
	// OpenMetrics must never be negotiated: it renames counters.
	f.request = append(f.request[:0], "GET "...)
	f.request = append(f.request, path...)
	f.request = append(f.request, " HTTP/1.1\r\nHost: "...)
	f.request = append(f.request, f.client.address...)
	f.request = append(f.request, "\r\nUser-Agent: shunt\r\nAccept: text/plain;version=0.0.4\r\n"...)
	f.request = append(f.request, f.headers...)
	f.request = append(f.request, "\r\n"...)
	return f.client.get(ctx, f.request, f.connect, f.until)
}

// sameHost returns the path of a redirect, "" if it leaves the host.
func (f *fetch) sameHost(from, location string) string {
	base := &url.URL{Scheme: "http", Host: f.client.address, Path: from}
	if f.client.secure {
		base.Scheme = "https"
	}
	to, err := base.Parse(location)
	if err != nil || to.Scheme != base.Scheme || to.Host != base.Host {
		return ""
	}
	return to.RequestURI()
}

// unpacked returns the body without its compression.
func (p *parser) unpacked(body io.Reader, packed bool) (io.Reader, error) {
	switch {
	case !packed:
		return body, nil
	case p.gzip == nil:
		var err error
		p.gzip, err = gzip.NewReader(body)
		if err != nil {
			p.gzip = nil
			return nil, err
		}
		return p.gzip, nil
	default:
		return p.gzip, p.gzip.Reset(body)
	}
}

// get fetches one URL of what is asked rarely, next time after every. The caller
// closes the body if err is nil.
func (s *Syncer) get(ctx context.Context, cfg *Config, addr netip.AddrPort, path, accept string, every time.Duration) (*http.Response, error) {
	scheme := "http://"
	if cfg.Access.TLS {
		scheme = "https://"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+addr.String()+path, nil)
	if err != nil {
		return nil, err
	}
	token, _, err := s.credentials.read(cfg, time.Now())
	if err != nil {
		return nil, err
	}
	for name, value := range cfg.Access.Headers {
		req.Header.Set(name, value)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	req.Close = every >= idleTimeout // it would wait for nothing, with two goroutines
	req.Header["Accept"] = []string{accept}
	req.Header["User-Agent"] = []string{"shunt"}
	return s.client.Do(req)
}

// statusError is an answer other than 200.
type statusError struct {
	path   string
	status int
	hint   string
	plain  bool // it was asked without TLS
}

func (e statusError) Error() string {
	s := fmt.Sprintf("%s answers %d", e.path, e.status)
	if strings.Contains(e.path, " and ") {
		s = fmt.Sprintf("%s answer %d", e.path, e.status)
	}
	switch e.status {
	case http.StatusNotFound:
		s += hintText(e.hint)
	case http.StatusUnauthorized, http.StatusForbidden:
		s += "; scrape.bearerTokenFile and scrape.headers say how to ask"
	case http.StatusBadRequest:
		if e.plain {
			s += hintText(secureHint)
		}
	}
	return s
}

// What may be wrong where a page is not what it should be.
const (
	engineHint = "is it that engine? " + pool.LabelEngine + " says so"
	secureHint = "does it want HTTPS? scrape.tls says so"
)

// jsonHint says what may be wrong where a page is JSON: TensorRT-LLM's is, at the
// path where other engines have their metrics.
func jsonHint(t *table) string {
	if t.engine == pool.EngineTRTLLM {
		return hintText(t.hint)
	}
	return hintText("TensorRT-LLM answers so: " + engineHint)
}

func hintText(hint string) string {
	if hint == "" {
		return ""
	}
	return "; " + hint
}

// plain strips the URL that net/http puts before each error.
func plain(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		return u.Err
	}
	return err
}

func isTimeout(ctx context.Context, err error) bool {
	var ne net.Error
	return errors.Is(ctx.Err(), context.DeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &ne) && ne.Timeout()
}

func drain(r io.Reader) { _, _ = io.CopyN(io.Discard, r, drainLimit) }

// knock asks the serving port whether it is there: over HTTP if there is a
// health path, where only 200 counts, else by connecting.
func (s *Syncer) knock(ctx context.Context, cfg *Config, addr netip.AddrPort) error {
	path := cfg.Health.Path
	if path == "" {
		conn, err := s.dial(ctx, "tcp", addr.String())
		if err != nil {
			return err
		}
		return conn.Close()
	}
	resp, err := s.get(ctx, cfg, addr, path, "*/*", cfg.Health.Interval)
	if err != nil {
		return fmt.Errorf("GET %s: %w", path, plain(err))
	}
	defer resp.Body.Close()
	drain(resp.Body)
	if resp.StatusCode != http.StatusOK {
		return statusError{path: path, status: resp.StatusCode}
	}
	return nil
}

// modelList is what an endpoint said about its models.
type modelList struct {
	// none is true where the endpoint answers that it has no list for us:
	// 401, 403, 404.
	none   bool
	status int
	ids    []string
}

const modelsPath = "/v1/models"

// fetchModels asks an endpoint which models it serves.
func (s *Syncer) fetchModels(ctx context.Context, cfg *Config, addr netip.AddrPort) (modelList, error) {
	resp, err := s.get(ctx, cfg, addr, modelsPath, "application/json", listEvery)
	if err != nil {
		return modelList{}, plain(err)
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
		drain(resp.Body)
		return modelList{none: true, status: resp.StatusCode}, nil
	default:
		drain(resp.Body)
		return modelList{}, statusError{path: modelsPath, status: resp.StatusCode}
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, listLimit+1))
	if err != nil {
		return modelList{}, err
	}
	if len(body) > listLimit {
		return modelList{}, fmt.Errorf("%s is larger than %d bytes", modelsPath, listLimit)
	}
	ids, err := decodeModels(body)
	if err != nil {
		return modelList{}, err
	}
	return modelList{status: resp.StatusCode, ids: ids}, nil
}

// decodeModels reads the ids of an OpenAI model list.
func decodeModels(body []byte) ([]string, error) {
	var list struct {
		Data *[]struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("%s is not a model list: %w", modelsPath, err)
	}
	if list.Data == nil {
		return nil, fmt.Errorf("%s is not a model list: no data", modelsPath)
	}
	if len(*list.Data) > maxListed {
		return nil, fmt.Errorf("%s lists %d models, more than the %d that are read", modelsPath, len(*list.Data), maxListed)
	}
	var ids []string
	for _, m := range *list.Data {
		switch {
		case len(m.ID) > maxName:
			return nil, fmt.Errorf("%s lists a model whose name has %d bytes, more than the %d that are read", modelsPath, len(m.ID), maxName)
		case m.ID != "":
			ids = append(ids, m.ID)
		}
	}
	return ids, nil
}
