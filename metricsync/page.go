package metricsync

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
)

const (
	// bufferSize holds most pages whole; a longer line than it makes it grow.
	bufferSize = 64 << 10
	// maxLine is the longest line that is looked at. Longer ones are skipped.
	maxLine = 1 << 20
)

var (
	// errTooLarge is a page above the byte cap.
	errTooLarge   = errors.New("the page is larger than scrape.maxBytes")
	byteOrderMark = []byte("\xef\xbb\xbf")
)

// parser reads pages of one engine, one after another, and keeps its memory in
// between. It is not safe for concurrent use.
//
// It looks only at lines that begin with a wanted name, and skips what it does
// not understand: engines differ, and one odd line must not hide the others.
// Lines come in any order, but those of the usual order are cheap: each is
// compared with the one before and, where it continues that, only its bucket and
// its value are read.
type parser struct {
	table  *table
	buf    []byte
	labels []label
	gzip   *gzip.Reader

	// What the lines before were: the name that was not wanted, the name that
	// was, and the labels of the sample before.
	missed  []byte
	hit     []byte
	hitWant wanted
	script  []scripted // names in the order of the page before
	scene   int        // of the script, expected next
	block   []byte
	blockID identity
	known   []recalled // label sets in the order of the page before
	stage   int        // of known, expected next

	// A bucket of the same series begins with prefix, up to and with le=", and
	// goes on with suffix after the bound.
	prefix, suffix []byte
	bucketFamily   int
	bucketSeries   int
	bucketAt       int // of the layout, expected next

	// noBuckets passes over the buckets of histograms, four fifths of a page.
	noBuckets bool

	sniffed   bool
	firstByte byte // the first that is no blank

	page
	reading reading // of the page, once it is reduced
}

// scripted is one name of a page, and what it leads to. Pages have their names in
// the same order again and again, so that one comparison finds most of them.
type scripted struct {
	name string
	want wanted
	ok   bool
}

// maxScript is the most names of a page that are remembered.
const maxScript = 1024

// recalled is one set of labels as it is written, and what it identifies.
type recalled struct {
	text  []byte
	model string
	id    identity
}

// maxKnown is the most sets of labels of a page that are remembered, and maxText
// the longest.
const (
	maxKnown = 256
	maxText  = 512
)

func newParser(t *table) *parser {
	p := &parser{table: t}
	p.page.init(t)
	p.reading.init(t)
	return p
}

// parse reads r to its end, or to limit bytes. What was read so far is in the
// page even if there is an error.
func (p *parser) parse(r io.Reader, limit int64) (int64, error) {
	if p.buf == nil {
		p.buf = make([]byte, bufferSize)
	}
	p.missed, p.hit, p.block, p.prefix = p.missed[:0], p.hit[:0], p.block[:0], p.prefix[:0]
	p.sniffed, p.firstByte, p.scene, p.stage = false, 0, 0, 0
	p.page.reset()
	return p.read(r, limit)
}

func (p *parser) read(r io.Reader, limit int64) (int64, error) {
	var total int64
	filled := 0
	skipping := false // inside a line over maxLine
	for {
		if filled == len(p.buf) {
			if len(p.buf) >= maxLine {
				filled, skipping = 0, true
			} else {
				p.buf = append(p.buf, make([]byte, len(p.buf))...)
			}
		}
		n, err := r.Read(p.buf[filled:])
		total += int64(n)
		if total > limit {
			return total, errTooLarge
		}
		data := p.buf[:filled+n]
		for {
			i := bytes.IndexByte(data, '\n')
			if i < 0 {
				break
			}
			if !skipping {
				p.line(data[:i])
			}
			skipping = false
			data = p.pass(p.run(data[i+1:]))
		}
		filled = copy(p.buf, data)
		if err == io.EOF {
			if filled > 0 && !skipping {
				p.line(p.buf[:filled])
			}
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// json reports whether the page looks like JSON.
func (p *parser) json() bool { return p.firstByte == '[' || p.firstByte == '{' }

// line looks at one line, without its newline.
func (p *parser) line(b []byte) {
	if len(b) > 0 && b[0] == '#' {
		p.sniffed = true
		return
	}
	if n := len(p.prefix); n > 0 && len(b) > n && string(b[:n]) == string(p.prefix) && p.sameSeries(b[n:]) {
		return
	}
	if len(b) > 0 && b[len(b)-1] == '\r' {
		b = b[:len(b)-1]
	}
	b = skipBlank(b)
	if len(b) == 0 {
		return
	}
	if !p.sniffed {
		b = bytes.TrimPrefix(b, byteOrderMark) // of a page that an editor saved
		if p.sniffed = true; len(b) > 0 {
			p.firstByte = b[0]
		}
	}
	if !p.table.maybe(b) {
		return
	}
	w, n, ok := p.name(b)
	if !ok {
		return
	}
	f := &p.table.families[w.family]
	if f.where.name == "" && f.labels == nil && w.part != partBucket {
		if m := len(p.block); m > 0 && len(b) > n+m && string(b[n:n+m]) == string(p.block) {
			if v, ok := parseRest(b[n+m:]); ok {
				p.add(int(w.family), w.part, p.blockID, v)
				return
			}
		}
		if id, m := p.recall(b[n:]); m > 0 {
			if v, ok := parseRest(b[n+m:]); ok {
				p.add(int(w.family), w.part, id, v)
				return
			}
		}
	}
	p.sample(w, b, n)
}

// recall returns what a line's labels identify, and their length, if they are
// those that came here in the page before; else 0.
func (p *parser) recall(b []byte) (identity, int) {
	if p.stage == len(p.known) {
		return identity{}, 0
	}
	l := &p.known[p.stage]
	m := len(l.text)
	if m == 0 || len(b) <= m || string(b[:m]) != string(l.text) {
		return identity{}, 0
	}
	p.stage++
	id := l.id
	if id.model = -1; l.model != "" {
		id.model = p.model([]byte(l.model))
	}
	p.block, p.blockID = append(p.block[:0], l.text...), id
	return id, m
}

// remember keeps a set of labels for recall.
func (p *parser) remember(text []byte, id identity) {
	if p.stage >= maxKnown || len(text) > maxText || len(p.models) >= maxModels { // whose model may not be told apart
		return
	}
	if p.stage == len(p.known) {
		p.known = append(p.known, recalled{})
	}
	l := &p.known[p.stage]
	l.text, l.id, l.model = append(l.text[:0], text...), id, ""
	if id.model >= 0 {
		l.model = p.models[id.model]
	}
	p.stage++
}

// run takes in the lines at the front of data that are the next buckets of the
// series before, in the order of the page before and with whole counts, and
// returns what is behind them. Other lines are left to line.
func (p *parser) run(data []byte) []byte {
	n, m := len(p.prefix), len(p.suffix)
	if n == 0 || len(data) <= n || string(data[:n]) != string(p.prefix) {
		return data
	}
	l := &p.layouts[p.layoutOf[p.bucketFamily]]
	s := &p.families[p.bucketFamily].series[p.bucketSeries]
	for at := p.bucketAt; at < len(l.texts) && at < len(s.counts); at++ {
		le := l.texts[at]
		k := n + len(le)
		if len(data) <= k+m || string(data[:n]) != string(p.prefix) || string(data[n:k]) != le || string(data[k:k+m]) != string(p.suffix) {
			break
		}
		v, i := uint64(0), k+m
		for i < len(data) && data[i] >= '0' && data[i] <= '9' && i < k+m+15 {
			v = v*10 + uint64(data[i]-'0')
			i++
		}
		if i == k+m {
			break
		}
		if len(data) > i+1 && data[i] == '.' && data[i+1] == '0' {
			i += 2
		}
		if i >= len(data) || data[i] != '\n' {
			break
		}
		if c := float64(v); s.counts[at] < c {
			s.counts[at] = c
			s.has |= 1 << partBucket
		}
		p.bucketAt = at + 1
		data = data[i+1:]
	}
	return data
}

// pass returns data from the first line on that is no comment and whose name is
// another than the one that was not wanted: behind the first bucket of a
// histogram whose buckets are passed over, that is some twenty lines further.
func (p *parser) pass(data []byte) []byte {
	n := len(p.missed)
	for len(data) > 0 {
		known := 1
		switch {
		case data[0] == '#':
			p.sniffed = true
		case n > 0 && len(data) > n && !nameByte[data[n]] && string(data[:n]) == string(p.missed):
			known = n
		default:
			return data
		}
		i := bytes.IndexByte(data[known:], '\n')
		if i < 0 {
			break
		}
		data = data[known+i+1:]
	}
	return data
}

// name finds what the line's name leads to, and its length.
func (p *parser) name(b []byte) (wanted, int, bool) {
	if n := len(p.hit); n > 0 && len(b) > n && !nameByte[b[n]] && string(b[:n]) == string(p.hit) {
		return p.hitWant, n, true
	}
	if n := len(p.missed); n > 0 && len(b) > n && !nameByte[b[n]] && string(b[:n]) == string(p.missed) {
		return wanted{}, 0, false
	}
	if p.scene < len(p.script) {
		next := &p.script[p.scene]
		if n := len(next.name); len(b) > n && !nameByte[b[n]] && string(b[:n]) == next.name {
			p.scene++
			return p.found(b[:n], next.want, next.ok)
		}
	}
	n := sampleName(b)
	w, ok := p.table.names[string(b[:n])]
	if p.scene < maxScript {
		p.script = append(p.script[:p.scene], scripted{string(b[:n]), w, ok})
		p.scene++
	}
	return p.found(b[:n], w, ok)
}

func (p *parser) found(name []byte, w wanted, ok bool) (wanted, int, bool) {
	if !ok || w.part == partBucket && p.noBuckets {
		p.missed = append(p.missed[:0], name...)
		return w, 0, false
	}
	p.hit, p.hitWant = append(p.hit[:0], name...), w
	return w, len(name), true
}

// sameSeries takes in the next bucket of the series before, from its bound on.
func (p *parser) sameSeries(b []byte) bool {
	q := 0
	for q < len(b) && b[q] != '"' {
		q++
	}
	rest := b[q:]
	m := len(p.suffix)
	if len(rest) <= m || string(rest[:m]) != string(p.suffix) {
		return false
	}
	v, ok := parseRest(rest[m:])
	if !ok {
		return false
	}
	p.bucketAt = p.bucket(p.bucketFamily, p.bucketSeries, p.bucketAt, b[:q], v)
	return true
}

// sample takes in a line whose name, n bytes, is wanted.
func (p *parser) sample(w wanted, b []byte, n int) {
	rest := skipBlank(b[n:])
	p.labels = p.labels[:0]
	if len(rest) > 0 && rest[0] == '{' {
		labels, after, ok := parseLabels(rest[1:], p.labels)
		if p.labels = labels; !ok {
			return
		}
		rest = after
	}
	v, ok := parseRest(rest)
	if !ok {
		return
	}
	f := &p.table.families[w.family]
	if f.where.name != "" && string(valueOf(p.labels, f.where.name)) != f.where.value {
		return
	}
	id := p.identify(p.table, p.labels)
	switch {
	case w.part == partBucket:
		le := valueOf(p.labels, "le")
		if le == nil {
			return
		}
		s := p.seriesOf(int(w.family), id)
		at := p.bucket(int(w.family), s, 0, le, v)
		p.learn(b, le, rest)
		p.bucketFamily, p.bucketSeries, p.bucketAt = int(w.family), s, at
	case f.form == formNewest:
		p.newer(int(w.family), f.labels, p.labels, v)
	case f.form == formNumber:
		p.numbers(int(w.family), f.labels, id, p.labels)
	default:
		if end := len(b) - len(rest); f.where.name == "" && end > n {
			p.block, p.blockID = append(p.block[:0], b[n:end]...), id
			p.remember(p.block, id)
		}
		p.add(int(w.family), w.part, id, v)
	}
}

// learn remembers how a bucket's line is written around its bound.
func (p *parser) learn(line, le, rest []byte) {
	p.prefix = p.prefix[:0]
	from := cap(line) - cap(le) // le is a part of line
	to, end := from+len(le), len(line)-len(rest)
	if end < len(line) && line[end] == ' ' {
		end++
	}
	p.prefix = append(p.prefix, line[:from]...)
	p.suffix = append(p.suffix[:0], line[to:end]...)
}
