package metricsync

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// Reason is why a scrape failed, a closed set for a counter's label.
type Reason uint8

// The outcomes of a scrape.
const (
	ScrapeOK       Reason = iota
	ScrapeConnect         // no connection
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
	// listLimit bounds a model list.
	listLimit = 4 << 20
	// idleTimeout closes idle connections before uvicorn does, at 5 s.
	idleTimeout = 4 * time.Second
)

var errRedirect = errors.New("redirected to another host, or twice")

// dialFunc opens a connection, as net.Dialer.DialContext does.
type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// newClient returns the client of one Syncer. It follows one redirect to the
// same host, uses no proxy and asks for no compression: that is CPU in the
// engine's event loop.
func newClient(dial dialFunc) (*http.Client, *http.Transport) {
	t := &http.Transport{
		DialContext:            dial,
		DisableCompression:     true,
		MaxIdleConns:           0, // no bound over all endpoints
		MaxIdleConnsPerHost:    2,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: 64 << 10,
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
	page     page
	bytes    int64
	took     time.Duration
	taken    time.Time
}

// get fetches one URL. The caller closes the body if err is nil.
func get(ctx context.Context, c *http.Client, addr netip.AddrPort, path, accept string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr.String()+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header["Accept"] = []string{accept}
	req.Header["User-Agent"] = []string{"shunt"}
	return c.Do(req)
}

// fetchPage reads one metrics page. It never returns metrics beside an error.
func fetchPage(ctx context.Context, c *http.Client, addr netip.AddrPort, path string, t *table, p *parser, limit int64, lastAdapters string) (out scrape) {
	fail := func(r Reason, err error) scrape {
		if r != ScrapeStatus && r != ScrapeRedirect && isTimeout(ctx, err) {
			r = ScrapeTimeout
		}
		out.reason, out.err, out.page = r, err, page{}
		return out
	}
	// OpenMetrics must never be negotiated: it renames counters.
	resp, err := get(ctx, c, addr, path, "text/plain;version=0.0.4")
	if err != nil {
		if errors.Is(err, errRedirect) {
			out.answered = true
			return fail(ScrapeRedirect, err)
		}
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return fail(ScrapeConnect, op)
		}
		return fail(ScrapeRead, plain(err))
	}
	defer resp.Body.Close()
	out.answered = true
	if resp.StatusCode != http.StatusOK {
		drain(resp.Body)
		return fail(ScrapeStatus, statusError{path, resp.StatusCode, t.hint})
	}
	body := io.Reader(resp.Body)
	if resp.Header.Get("Content-Encoding") == "gzip" {
		if body, err = gzip.NewReader(resp.Body); err != nil {
			return fail(ScrapeFormat, err)
		}
	}
	out.page, out.bytes, err = p.parse(t, body, limit, lastAdapters)
	out.taken = time.Now()
	switch {
	case errors.Is(err, errTooLarge):
		return fail(ScrapeTooLarge, fmt.Errorf("%w (%d bytes)", err, limit))
	case err != nil:
		return fail(ScrapeRead, err)
	case out.page.metrics.Empty() && out.page.json:
		return fail(ScrapeFormat, fmt.Errorf("%s is JSON and not metrics%s", path, hintText(t.hint)))
	case out.page.metrics.Empty():
		return fail(ScrapeEmpty, fmt.Errorf("%s has none of the engine's metrics (%d bytes)", path, out.bytes))
	}
	out.page.metrics.Taken = out.taken
	return out
}

// statusError is an answer other than 200.
type statusError struct {
	path   string
	status int
	hint   string
}

func (e statusError) Error() string {
	s := fmt.Sprintf("%s answers %d", e.path, e.status)
	if e.status == http.StatusNotFound {
		s += hintText(e.hint)
	}
	return s
}

func hintText(hint string) string {
	if hint == "" {
		return ""
	}
	return "; " + hint
}

// plain strips the URL that net/http puts before each error.
func plain(err error) error {
	if u := errors.Unwrap(err); u != nil {
		return u
	}
	return err
}

func isTimeout(ctx context.Context, err error) bool {
	var ne net.Error
	return errors.Is(ctx.Err(), context.DeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &ne) && ne.Timeout()
}

func drain(r io.Reader) { _, _ = io.CopyN(io.Discard, r, drainLimit) }

// probe asks the serving port whether it is there: over HTTP if path is set,
// where only 200 counts, else by connecting.
func probe(ctx context.Context, c *http.Client, dial dialFunc, addr netip.AddrPort, path string) error {
	if path == "" {
		conn, err := dial(ctx, "tcp", addr.String())
		if err != nil {
			return err
		}
		return conn.Close()
	}
	resp, err := get(ctx, c, addr, path, "*/*")
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
func fetchModels(ctx context.Context, c *http.Client, addr netip.AddrPort) (modelList, error) {
	resp, err := get(ctx, c, addr, modelsPath, "application/json")
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
	return modelList{status: resp.StatusCode, ids: ids}, err
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
	var ids []string
	for _, m := range *list.Data {
		if m.ID != "" {
			ids = append(ids, m.ID)
		}
	}
	return ids, nil
}
