package sim

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// dialect is how one kind of engine shows its state. Another engine is another implementation and one line in
// newDialect.
type dialect interface {
	metricsPaths() []string
	contentType() string
	bounds(maxModelLen int) Bounds
	page(b []byte, pg *page) []byte // appends the whole page
	gzips() bool                    // the page, for who accepts that
	owner() string                  // owned_by in the model list
}

func newDialect(engine, model string) (dialect, error) {
	switch engine {
	case "vllm":
		return vllm{}, nil
	case "sglang":
		return newSGLang(model), nil
	case "trtllm":
		return newTRTLLM(model), nil
	case "xllm":
		return newXLLM(), nil
	default:
		return nil, fmt.Errorf("engine: unknown engine %q, valid: vllm, sglang, trtllm, xllm", engine)
	}
}

// page is all that a metrics page is made of.
type page struct {
	snap        Snapshot
	http        *httpStats
	model       string
	maxModelLen int
	lora        bool
	asleep      bool
	start       time.Time // model time 0
	speedup     float64   // model time per wall time
	created     float64   // unix seconds
}

// unix is the wall time of a model time, in seconds since 1970.
func (p *page) unix(at time.Duration) float64 {
	return float64(p.start.UnixNano())/1e9 + at.Seconds()/p.speedup
}

type sample struct {
	labels string // rendered, without braces
	v      float64
}

// promWriter writes the text format as Python's prometheus_client does, which adds a gauge _created to each counter,
// histogram and summary.
type promWriter struct {
	b       []byte
	created float64
}

func (w *promWriter) head(name, help, kind string) {
	w.b = append(w.b, "# HELP "+name+" "+help+"\n# TYPE "+name+" "+kind+"\n"...)
}

func (w *promWriter) line(name, suffix, labels string, v float64) {
	w.b = append(w.b, name...)
	w.b = append(w.b, suffix...)
	if labels != "" {
		w.b = append(w.b, '{')
		w.b = append(w.b, labels...)
		w.b = append(w.b, '}')
	}
	w.b = append(w.b, ' ')
	w.b = appendPyFloat(w.b, v)
	w.b = append(w.b, '\n')
}

func (w *promWriter) gauge(name, help string, samples []sample) {
	w.head(name, help, "gauge")
	for _, s := range samples {
		w.line(name, "", s.labels, s.v)
	}
}

// counter takes the name without _total.
func (w *promWriter) counter(name, help string, samples []sample) {
	w.plainCounter(name, help, samples)
	w.head(name+"_created", help, "gauge")
	for _, s := range samples {
		w.line(name, "_created", s.labels, w.created)
	}
}

func (w *promWriter) plainCounter(name, help string, samples []sample) {
	w.head(name+"_total", help, "counter")
	for _, s := range samples {
		w.line(name, "_total", s.labels, s.v)
	}
}

// buckets writes one histogram's samples; le sorts between the labels before and those after it.
func (w *promWriter) buckets(name, before, after string, h *Histogram) {
	open, end, plain := `le="`, `"`, before
	if before != "" {
		open = before + "," + open
	}
	if after != "" {
		end += "," + after
		if plain != "" {
			plain += ","
		}
		plain += after
	}
	sum := uint64(0)
	for i, n := range h.Counts {
		sum += n
		bound := math.Inf(1)
		if i < len(h.Bounds) {
			bound = h.Bounds[i]
		}
		w.b = append(w.b, name...)
		w.b = append(w.b, "_bucket{"...)
		w.b = append(w.b, open...)
		w.b = appendPyFloat(w.b, bound)
		w.b = append(w.b, end...)
		w.b = append(w.b, "} "...)
		w.b = appendPyFloat(w.b, float64(sum))
		w.b = append(w.b, '\n')
	}
	w.line(name, "_count", plain, float64(h.N))
	w.line(name, "_sum", plain, h.Sum)
}

func (w *promWriter) histogram(name, help, before, after string, h *Histogram) {
	w.head(name, help, "histogram")
	w.buckets(name, before, after, h)
	w.head(name+"_created", help, "gauge")
	labels := before
	if before != "" && after != "" {
		labels += ","
	}
	w.line(name, "_created", labels+after, w.created)
}

// pythonProcess writes the default collectors of the Python client. The numbers are made up but move plausibly.
func (w *promWriter) pythonProcess(pg *page) {
	gens := func(a, b, c float64) []sample {
		return []sample{{`generation="0"`, a}, {`generation="1"`, b}, {`generation="2"`, c}}
	}
	steps := float64(pg.snap.Stats.Steps)
	w.plainCounter("python_gc_objects_collected", "Objects collected during gc", gens(1505+steps, 295, 15))
	w.plainCounter("python_gc_objects_uncollectable", "Uncollectable objects found during GC", gens(0, 0, 0))
	w.plainCounter("python_gc_collections", "Number of times this generation was collected", gens(132+math.Floor(steps/700), 11, 1))
	w.gauge("python_info", "Python platform information",
		[]sample{{`implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"`, 1}})
	bare := func(v float64) []sample { return []sample{{"", v}} }
	w.gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", bare(208224256))
	w.gauge("process_resident_memory_bytes", "Resident memory size in bytes.", bare(49795072))
	w.gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", bare(math.Floor(pg.created*100)/100))
	w.plainCounter("process_cpu_seconds", "Total user and system CPU time spent in seconds.", bare(0.62+math.Floor(steps/10)/100))
	w.gauge("process_open_fds", "Number of open file descriptors.", bare(7))
	w.gauge("process_max_fds", "Maximum number of open file descriptors.", bare(20000))
}

// appendPyFloat writes a float as prometheus_client's floatToGoString: Python's repr, but with an exponent from 1e6 on.
func appendPyFloat(b []byte, v float64) []byte {
	switch {
	case math.IsInf(v, 1):
		return append(b, "+Inf"...)
	case math.IsInf(v, -1):
		return append(b, "-Inf"...)
	case math.IsNaN(v):
		return append(b, "NaN"...)
	}
	abs := math.Abs(v)
	if abs != 0 && (abs < 1e-4 || abs >= 1e16) { // where repr uses an exponent
		return strconv.AppendFloat(b, v, 'e', -1, 64)
	}
	start := len(b)
	b = strconv.AppendFloat(b, v, 'f', -1, 64)
	dot := strings.IndexByte(string(b[start:]), '.')
	if dot < 0 {
		dot = len(b) - start
		b = append(b, ".0"...)
	}
	if v < 0 || dot <= 6 {
		return b
	}
	s := string(b[start:])
	mantissa := strings.TrimRight(s[:1]+"."+s[1:dot]+s[dot+1:], "0.")
	return append(b[:start], mantissa+"e+0"+strconv.Itoa(dot-1)...)
}

var labelEscaper = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)

func escapeLabel(s string) string { return labelEscaper.Replace(s) }

// httpStats are what the FastAPI instrumentator counts, by handler, method and status class.
type httpStats struct {
	requests  []keyed // handler, method, status
	handlers  []handlerStats
	durations []durationStats
	all       Histogram // seconds
}

type keyed struct {
	labels string
	n      float64
}

type handlerStats struct {
	labels             string
	n, request, answer float64
}

type durationStats struct {
	handler, method string
	h               Histogram
}

func newHTTPStats() *httpStats {
	return &httpStats{all: newHistogram([]float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60})}
}

// observe counts one answered request. handler is a known path or "none"; the sizes are those of the headers.
func (s *httpStats) observe(handler, method string, status int, request, answer int64, took time.Duration) {
	class := strconv.Itoa(status/100) + "xx"
	labels := `handler="` + handler + `",method="` + escapeLabel(method) + `",status="` + class + `"`
	i := 0
	for ; i < len(s.requests) && s.requests[i].labels != labels; i++ {
	}
	if i == len(s.requests) {
		s.requests = append(s.requests, keyed{labels: labels})
	}
	s.requests[i].n++
	labels = `handler="` + handler + `"`
	for i = 0; i < len(s.handlers) && s.handlers[i].labels != labels; i++ {
	}
	if i == len(s.handlers) {
		s.handlers = append(s.handlers, handlerStats{labels: labels})
	}
	s.handlers[i].n++
	s.handlers[i].request += float64(max(request, 0))
	s.handlers[i].answer += float64(max(answer, 0))
	for i = 0; i < len(s.durations) && (s.durations[i].handler != handler || s.durations[i].method != method); i++ {
	}
	if i == len(s.durations) {
		s.durations = append(s.durations, durationStats{handler, method, newHistogram([]float64{0.1, 0.5, 1})})
	}
	s.durations[i].h.observe(took.Seconds())
	s.all.observe(took.Seconds())
}

func (s *httpStats) clone() *httpStats {
	c := &httpStats{all: s.all.clone()}
	c.requests = append(c.requests, s.requests...)
	c.handlers = append(c.handlers, s.handlers...)
	for _, d := range s.durations {
		c.durations = append(c.durations, durationStats{d.handler, d.method, d.h.clone()})
	}
	return c
}

func (s *httpStats) write(w *promWriter) {
	if len(s.requests) == 0 {
		return
	}
	requests := make([]sample, 0, len(s.requests))
	for _, r := range s.requests {
		requests = append(requests, sample{r.labels, r.n})
	}
	w.counter("http_requests", "Total number of requests by method, status and handler.", requests)
	summary := func(name, help string, sum func(handlerStats) float64) {
		w.head(name, help, "summary")
		for _, h := range s.handlers {
			w.line(name, "_count", h.labels, h.n)
			w.line(name, "_sum", h.labels, sum(h))
		}
		w.head(name+"_created", help, "gauge")
		for _, h := range s.handlers {
			w.line(name, "_created", h.labels, w.created)
		}
	}
	const ofHeader = " by handler. Only value of header is respected. Otherwise ignored. No percentile calculated. "
	summary("http_request_size_bytes", "Content length of incoming requests"+ofHeader, func(h handlerStats) float64 { return h.request })
	summary("http_response_size_bytes", "Content length of outgoing responses"+ofHeader, func(h handlerStats) float64 { return h.answer })
	w.histogram("http_request_duration_highr_seconds",
		"Latency with many buckets but no API specific labels. Made for more accurate percentile calculations. ", "", "", &s.all)
	const name, help = "http_request_duration_seconds",
		"Latency with only few buckets by handler. Made to be only used if aggregation by handler is important. "
	w.head(name, help, "histogram")
	for i := range s.durations {
		d := &s.durations[i]
		w.buckets(name, `handler="`+d.handler+`"`, `method="`+escapeLabel(d.method)+`"`, &d.h)
	}
	w.head(name+"_created", help, "gauge")
	for _, d := range s.durations {
		w.line(name, "_created", `handler="`+d.handler+`",method="`+escapeLabel(d.method)+`"`, w.created)
	}
}
