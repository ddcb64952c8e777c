package metricsync

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Report is what shunt reads of one metrics page, for people.
type Report struct {
	Engine pool.Engine
	// Bytes of the page, unpacked, and Path where it was asked for.
	Bytes int64
	Path  string
	// Usable is true if the page tells the engine's load: its queue or its cache.
	Usable bool
	// Problem says why it is not usable, "" if it is.
	Problem string
	// Metrics are what was read, in the order of the table.
	Metrics []Found
	// Missing are the others.
	Missing []Missing

	none bool // of the engine's metrics are there
}

// Found is one metric that a page has. One of Value, Histogram and Names holds
// it.
type Found struct {
	Name, Unit string
	// Source is the engine's name for it.
	Source    string
	Value     *float64
	Histogram *Histogram
	Names     []string
}

// Histogram is what a histogram says; nil is what it does not say.
type Histogram struct {
	Sum, Count, Mean, P50, P99 *float64
}

// Missing is a metric that a page does not have.
type Missing struct{ Name, Why string }

// Inspect reads a page, gzip or not, of at most limit bytes. An error means that
// it could not be read.
func Inspect(engine pool.Engine, page io.Reader, limit int64) (*Report, error) {
	t := newTables().of(engine)
	if t == nil {
		return nil, fmt.Errorf("engine %s has no metrics that are known", engine)
	}
	p := newParser(t)
	var head [2]byte
	n, err := io.ReadFull(page, head[:])
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, err
	}
	page = io.MultiReader(strings.NewReader(string(head[:n])), page)
	if head == [2]byte{0x1f, 0x8b} {
		if page, err = gzip.NewReader(page); err != nil {
			return nil, fmt.Errorf("the page begins as gzip does, and is none: %w", err)
		}
	}
	var read bytes.Buffer
	size, err := p.parse(io.TeeReader(page, &read), limit)
	switch {
	case errors.Is(err, errTooLarge):
		return nil, fmt.Errorf("%w (%d bytes)", err, limit)
	case err != nil:
		return nil, fmt.Errorf("the page broke off after %d bytes: %w", size, err)
	}
	p.reading.reduce(&p.page, anyModel)
	out := p.report(size, "")
	out.mistaken(func(other *table) bool {
		p := newParser(other)
		_, err := p.parse(bytes.NewReader(read.Bytes()), limit)
		p.reading.reduce(&p.page, anyModel)
		return err == nil && p.report(0, "").Usable
	})
	return out, nil
}

// mistaken says so where a page that is not usable has another engine's metrics.
func (r *Report) mistaken(usable func(*table) bool) {
	if r.Usable || r.Bytes == 0 {
		return
	}
	for _, other := range newTables() {
		if other != nil && other.engine != r.Engine && usable(other) {
			r.Problem += fmt.Sprintf("; it has %s's: is the engine right?", other.engine)
			return
		}
	}
	if r.none {
		r.Problem += ", nor another engine's: is it a metrics page?"
	}
}

// InspectURL asks for a page as a scrape would. Without a path in address, those
// of the engine are tried. An error means that no page could be read.
func InspectURL(ctx context.Context, engine pool.Engine, address string, cfg Config) (*Report, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	switch {
	case u.Scheme == "https":
		cfg.Access.TLS = true
	case u.Scheme != "http":
		return nil, fmt.Errorf("%s is not a URL of http or https", address)
	}
	switch {
	case u.Hostname() == "":
		return nil, errors.New("the URL has no host")
	case u.User != nil:
		return nil, errors.New("the user and password of a URL are not sent: scrape.headers says what is")
	}
	s := New(Options{Holder: pool.NewHolder()}, cfg)
	defer s.Stop()
	t := s.tables.of(engine)
	if t == nil {
		return nil, fmt.Errorf("engine %s has no metrics that are known", engine)
	}
	host := u.Host
	if u.Port() == "" {
		host += map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
	}
	paths := t.paths
	if u.Path != "" && u.Path != "/" || u.RawQuery != "" {
		paths = []string{u.RequestURI()}
	}
	in := s.cfg.Load()
	headers, err := s.headers(in)
	if err != nil {
		return nil, err
	}
	f := fetch{
		client: &client{dial: s.secured, address: host, secure: in.Access.TLS}, headers: headers,
		table: t, parser: func() *parser { return newParser(t) },
		connect: in.ConnectTimeout, timeout: in.Timeout, limit: in.MaxBytes, idle: idleTimeout,
	}
	defer f.client.close()
	var out scrape
	var p *parser
	for _, f.path = range paths {
		f.until = time.Now().Add(in.Timeout)
		out, p = f.page(ctx)
		if e, ok := errors.AsType[statusError](out.err); !ok || e.status != http.StatusNotFound {
			break
		}
	}
	out.everywhere(paths)
	switch {
	case p == nil:
		return nil, out.err // of what did not begin to arrive there is nothing to report
	case out.reason == ScrapeOK, out.reason == ScrapeEmpty:
		r := p.report(out.bytes, f.path)
		r.mistaken(func(other *table) bool {
			p := newParser(other)
			f.parser, f.until = func() *parser { return p }, time.Now().Add(in.Timeout)
			f.page(ctx)
			return p.report(0, "").Usable
		})
		return r, nil
	case out.reason == ScrapeFormat:
		r := p.report(out.bytes, f.path)
		r.Problem = out.err.Error()
		return r, nil
	default:
		return nil, out.err
	}
}

// report describes the reading.
func (p *parser) report(size int64, path string) *Report {
	r := &p.reading
	out := &Report{Engine: p.table.engine, Bytes: size, Path: path}
	load := []metric{numRequestsRunning, numRequestsWaiting, kvCacheUsage}
	out.Usable = slices.ContainsFunc(load, func(m metric) bool { return r.states[m] == present })
	switch {
	case out.Usable:
	case p.json():
		out.Problem = "the page is JSON and not metrics" + jsonHint(p.table)
	case size == 0:
		out.Problem = "the page is empty" + hintText(p.table.hint)
	case r.empty():
		out.none = true
		out.Problem = fmt.Sprintf("the page has none of %s's metrics%s", p.table.engine, hintText(p.table.hint))
	default:
		out.Problem = "the page has neither num_requests_running, num_requests_waiting nor kv_cache_usage_perc"
	}
	for m := range processStart {
		if r.states[m] == present {
			out.Metrics = append(out.Metrics, r.found(m))
		} else {
			out.Missing = append(out.Missing, Missing{m.String(), r.why(m)})
		}
	}
	return out
}

func (r *reading) found(m metric) Found {
	f := Found{Name: m.String(), Unit: definitions[m].unit}
	if m == kvCacheHitRate && r.derivedHitRate {
		f.Source = r.table.families[r.family(prefixCacheHits)].name + " / " + r.table.families[r.family(prefixCacheQueries)].name
	} else {
		f.Source = r.table.families[r.family(m)].name
	}
	switch {
	case m == runningLoRA || m == waitingLoRA:
		f.Names = append([]string{}, splitAdapters(string(r.texts[m]))...)
	case definitions[m].kind == histogram:
		d := r.of(m)
		f.Histogram = &Histogram{
			Sum: number(d.sum), Count: number(d.count), Mean: number(d.mean()),
			P50: number(d.percentile(0.5)), P99: number(d.percentile(0.99)),
		}
	default:
		f.Value = number(r.values[m])
	}
	return f
}

// number returns nil for what is no finite number.
func number(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// why says why a metric is missing.
func (r *reading) why(m metric) string {
	for i := range r.table.rows {
		row := &r.table.rows[i]
		if row.metric != m {
			continue
		}
		if r.states[m] == notNumber {
			name := r.table.families[r.table.choices[i][r.choice[m]]].name
			return name + " is there without a number: not measured yet, or switched off"
		}
		return "not on the page: " + strings.Join(row.names(), ", ")
	}
	return r.table.engine.String() + " has no such metric"
}
