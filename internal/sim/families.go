package sim

import (
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// family is one family of a metrics page, in the order of the page.
type family struct {
	name    string
	kind    string   // of the TYPE line
	head    []string // HELP and TYPE as written
	samples []point
}

// point is one sample.
type point struct {
	name   string // with _bucket, _sum and the like
	labels []pair // in the order of the page
	value  string
}

type pair struct{ name, value string } // value as written, with its escapes

// parseFamilies reads a page as this package and the real engines write it.
func parseFamilies(page string) []family {
	var out []family
	for line := range strings.Lines(page) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case strings.HasPrefix(line, "# HELP "):
			name, _, _ := strings.Cut(strings.TrimPrefix(line, "# HELP "), " ")
			out = append(out, family{name: name, head: []string{line}})
		case strings.HasPrefix(line, "# TYPE "):
			name, kind, _ := strings.Cut(strings.TrimPrefix(line, "# TYPE "), " ")
			if len(out) == 0 || out[len(out)-1].name != name {
				out = append(out, family{name: name})
			}
			f := &out[len(out)-1]
			f.kind, f.head = kind, append(f.head, line)
		case line != "" && len(out) > 0:
			f := &out[len(out)-1]
			f.samples = append(f.samples, parsePoint(line))
		}
	}
	return out
}

func parsePoint(line string) point {
	space := strings.LastIndexByte(line, ' ')
	p := point{name: line[:space], value: line[space+1:]}
	open := strings.IndexByte(p.name, '{')
	if open < 0 {
		return p
	}
	rest := strings.TrimSuffix(p.name[open+1:], "}")
	p.name = p.name[:open]
	for rest != "" {
		eq := strings.Index(rest, `="`)
		name := rest[:eq]
		rest = rest[eq+2:]
		end := 0
		for rest[end] != '"' {
			if rest[end] == '\\' {
				end++
			}
			end++
		}
		p.labels = append(p.labels, pair{name, rest[:end]})
		rest = strings.TrimPrefix(rest[end+1:], ",")
	}
	return p
}

// appendFamilies writes a page.
func appendFamilies(b []byte, families []family) []byte {
	for i := range families {
		f := &families[i]
		for _, h := range f.head {
			b = append(append(b, h...), '\n')
		}
		for j := range f.samples {
			b = f.samples[j].append(b)
		}
	}
	return b
}

func (p *point) append(b []byte) []byte {
	b = append(b, p.name...)
	for i, l := range p.labels {
		if i == 0 {
			b = append(b, '{')
		} else {
			b = append(b, ',')
		}
		b = append(append(append(append(b, l.name...), `="`...), l.value...), '"')
	}
	if len(p.labels) > 0 {
		b = append(b, '}')
	}
	return append(append(append(b, ' '), p.value...), '\n')
}

func (p *point) label(name string) string {
	for _, l := range p.labels {
		if l.name == name {
			return l.value
		}
	}
	return ""
}

func (p *point) has(name string) bool {
	return slices.ContainsFunc(p.labels, func(l pair) bool { return l.name == name })
}

// with is the sample with a label set, in its place by name where it is new.
func (p point) with(name, value string) point {
	old := p.labels
	p.labels = append(make([]pair, 0, len(old)+1), old...)
	for i := range p.labels {
		if p.labels[i].name == name {
			p.labels[i].value = value
			return p
		}
	}
	at := sort.Search(len(old), func(i int) bool { return old[i].name > name })
	p.labels = slices.Insert(p.labels, at, pair{name, value})
	return p
}

// rename gives a family another name.
func (f *family) rename(name string) {
	for i, h := range f.head {
		f.head[i] = strings.Replace(h, f.name, name, 1)
	}
	for i := range f.samples {
		f.samples[i].name = name + strings.TrimPrefix(f.samples[i].name, f.name)
	}
	f.name = name
}

// clone is a copy whose heads and samples may be changed; labels are shared.
func (f *family) clone() family {
	c := *f
	c.head, c.samples = slices.Clone(f.head), slices.Clone(f.samples)
	return c
}

// values of a family by point; a histogram stands for the whole of its series.
type reader struct {
	value func(pg *page, p *point) float64
	hist  func(st *Stats, p *point) *Histogram
	// double is printed by C++ as a double, else as an integer. xLLM only.
	double bool
}

// template is a real engine's page, whose text is kept and whose values are the
// simulated engine's: what is not in values stays as it was in a gauge, and is 0
// in counters and histograms.
type template struct {
	families []family
	values   map[string]reader
	format   func(float64, reader) string
	// share of the requests that a series of is_streaming counts; the model does
	// not know which were.
	streams bool
}

// render is the page of the moment.
func (t *template) render(pg *page) []family {
	out := make([]family, len(t.families))
	for i := range t.families {
		f := t.families[i].clone()
		r, known := t.values[f.name]
		for j := range f.samples {
			p := f.samples[j]
			switch {
			case f.kind == "histogram":
				p.value = t.format(t.histogram(pg, &p, r), r)
			case known:
				v := r.value(pg, &p)
				if t.streams {
					v = streamed(&p, v)
				}
				p.value = t.format(v, r)
			case f.kind == "counter":
				p.value = t.format(0, r)
			}
			f.samples[j] = p
		}
		out[i] = f
	}
	return out
}

// streamed splits a count over is_streaming: two of three requests stream.
func streamed(p *point, v float64) float64 {
	plain := math.Floor(v / 3)
	switch p.label("is_streaming") {
	case "false":
		return plain
	case "true":
		return v - plain
	}
	return v
}

// histogram is the value of one line of a histogram. The model's own bounds are
// all those that any family has, so that nothing is estimated.
func (t *template) histogram(pg *page, p *point, r reader) float64 {
	if r.hist == nil {
		return 0
	}
	h := r.hist(&pg.snap.Stats, p)
	if h == nil {
		return 0
	}
	part := func(n uint64) float64 {
		if t.streams {
			return streamed(p, float64(n))
		}
		return float64(n)
	}
	switch {
	case strings.HasSuffix(p.name, "_sum"):
		if t.streams && h.N > 0 && p.has("is_streaming") {
			return h.Sum * part(h.N) / float64(h.N)
		}
		return h.Sum
	case strings.HasSuffix(p.name, "_count"):
		return part(h.N)
	}
	bound, _ := strconv.ParseFloat(p.label("le"), 64) // +Inf too
	n := uint64(0)
	for i, c := range h.Counts {
		if i < len(h.Bounds) && h.Bounds[i] > bound || i == len(h.Bounds) && !math.IsInf(bound, 1) {
			break
		}
		n += c
	}
	return part(n)
}

// boundsOf is the union of the buckets of some histograms.
func (t *template) boundsOf(names ...string) []float64 {
	var out []float64
	for i := range t.families {
		if !slices.Contains(names, t.families[i].name) {
			continue
		}
		for j := range t.families[i].samples {
			if v, err := strconv.ParseFloat(t.families[i].samples[j].label("le"), 64); err == nil && !math.IsInf(v, 1) {
				out = append(out, v)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// quantile is estimated inside its bucket, as Prometheus does; 0 without data.
func (h *Histogram) quantile(q float64) float64 {
	rank, before := q*float64(h.N), 0.0
	for i, c := range h.Counts {
		if before+float64(c) < rank || c == 0 {
			before += float64(c)
			continue
		}
		low := 0.0
		if i > 0 {
			low = h.Bounds[i-1]
		}
		if i == len(h.Bounds) {
			return low
		}
		return low + (h.Bounds[i]-low)*(rank-before)/float64(c)
	}
	return 0
}

func (h *Histogram) mean() float64 {
	if h.N == 0 {
		return 0
	}
	return h.Sum / float64(h.N)
}
