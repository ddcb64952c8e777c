package metricsync

import (
	"bytes"
	"errors"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/shuntproxy/shunt/internal/pool"
)

const (
	// bufferSize holds some hundred lines; a longer line makes it grow.
	bufferSize = 16 << 10
	// maxLine is the longest line that is looked at. Longer ones are skipped.
	maxLine = 1 << 20
)

// errTooLarge is a page above the byte cap.
var errTooLarge = errors.New("the page is larger than maxBytes")

// parser reads pages, one after another, and keeps its memory in between. It
// is not safe for concurrent use.
//
// It looks only at lines that begin with a wanted name, and skips what it does
// not understand: engines differ, and one odd line must not hide the others.
type parser struct {
	table  *table
	buf    []byte
	labels []label
	missed []byte // the last unwanted name; its family's lines follow it
	accs   []accumulator

	sniffed   bool
	firstByte byte // the first that is no blank

	lora struct {
		seen             bool
		newest           float64
		running, waiting []byte // raw
	}
	sleepSeen, asleep bool
}

// accumulator sums up one family.
type accumulator struct {
	n     int
	sum   float64
	max   float64
	ranks []rank
}

// rank is the largest value of one data-parallel rank.
type rank struct {
	id  uint64
	max float64
}

// page is what one page said.
type page struct {
	metrics pool.Metrics
	// hasLoRA is false where the page has no adapter info at all.
	hasLoRA bool
	// adapters is the running and waiting adapters of the newest info, comma
	// separated, as written.
	adapters string
	// asleep is true where a rank says that it is not awake.
	asleep bool
	// json is true where the page looks like JSON.
	json bool
}

// parse reads r to its end, or to limit bytes. The page holds what was read so
// far even if there is an error. lastAdapters is the adapters text of the page
// before, reused where it did not change.
func (p *parser) parse(t *table, r io.Reader, limit int64, lastAdapters string) (page, int64, error) {
	p.reset(t)
	n, err := p.read(r, limit)
	return p.reduce(lastAdapters), n, err
}

func (p *parser) reset(t *table) {
	p.table = t
	if p.buf == nil {
		p.buf = make([]byte, bufferSize)
	}
	p.accs = slices.Grow(p.accs[:0], t.size())[:t.size()]
	for i := range p.accs {
		p.accs[i] = accumulator{ranks: p.accs[i].ranks[:0]}
	}
	p.missed = p.missed[:0]
	p.sniffed, p.firstByte = false, 0
	p.lora.seen = false
	p.sleepSeen, p.asleep = false, false
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
			data = data[i+1:]
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

// line looks at one line, without its newline.
func (p *parser) line(b []byte) {
	if len(b) > 0 && b[len(b)-1] == '\r' {
		b = b[:len(b)-1]
	}
	b = skipBlank(b)
	if len(b) == 0 {
		return
	}
	if !p.sniffed {
		p.sniffed, p.firstByte = true, b[0]
	}
	if !p.table.maybe(b) {
		return
	}
	if m := len(p.missed); m > 0 && len(b) > m && !nameByte[b[m]] && bytes.Equal(b[:m], p.missed) {
		return
	}
	n := sampleName(b)
	f, ok := p.table.families[string(b[:n])]
	if !ok {
		p.missed = append(p.missed[:0], b[:n]...)
		return
	}
	var v float64
	if p.labels, v, ok = parseSample(b[n:], p.labels[:0]); ok {
		p.sample(f, v)
	}
}

// sample takes in one sample of a wanted family, whose labels are in p.labels.
func (p *parser) sample(f family, v float64) {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return // not measured yet
	}
	switch f.kind {
	case loraInfo:
		if !p.lora.seen || v > p.lora.newest {
			p.lora.seen, p.lora.newest = true, v
			p.lora.running = append(p.lora.running[:0], p.label("running_lora_adapters")...)
			p.lora.waiting = append(p.lora.waiting[:0], p.label("waiting_lora_adapters")...)
		}
	case sleepState:
		if string(p.label("sleep_state")) == "awake" {
			p.sleepSeen = true
			p.asleep = p.asleep || v == 0
		}
	default:
		if t := p.table.totalLabel; t != "" && len(p.label(t)) > 0 {
			return
		}
		p.accs[f.index].add(v, p.rankID())
	}
}

// rankID is the hash of the rank label's value, and 0 where every series is a
// rank of its own.
func (p *parser) rankID() uint64 {
	if p.table.rankLabel == "" {
		return 0
	}
	const offset, prime = 14695981039346656037, 1099511628211 // FNV-1a
	h := uint64(offset)
	for _, c := range p.label(p.table.rankLabel) {
		h = (h ^ uint64(c)) * prime
	}
	return h
}

func (p *parser) label(name string) []byte {
	for i := range p.labels {
		if string(p.labels[i].name) == name {
			return p.labels[i].value
		}
	}
	return nil
}

func (a *accumulator) add(v float64, id uint64) {
	if id != 0 {
		for i := range a.ranks {
			if r := &a.ranks[i]; r.id == id {
				if v > r.max {
					a.sum += v - r.max
					r.max = v
					a.max = max(a.max, v)
				}
				return
			}
		}
		a.ranks = append(a.ranks, rank{id, v})
	}
	if a.n == 0 || v > a.max {
		a.max = v
	}
	a.n++
	a.sum += v
}

func (a *accumulator) value(r rule) float64 {
	switch r {
	case mean:
		return a.sum / float64(a.n)
	case peak:
		return a.max
	default:
		return a.sum
	}
}

func (p *parser) reduce(lastAdapters string) page {
	out := page{hasLoRA: p.lora.seen, asleep: p.sleepSeen && p.asleep, json: p.firstByte == '[' || p.firstByte == '{'}
	i := 0
	for _, r := range p.table.rows {
		done := false
		for range r.names {
			if a := &p.accs[i]; !done && a.n > 0 {
				out.metrics.Set(r.metric, a.value(r.rule))
				done = true
			}
			i++
		}
	}
	if p.lora.seen {
		p.lora.running = append(append(p.lora.running, ','), p.lora.waiting...)
		out.adapters = lastAdapters
		if string(p.lora.running) != lastAdapters {
			out.adapters = string(p.lora.running)
		}
	}
	return out
}

// splitAdapters returns the names in a page's adapters text.
func splitAdapters(raw string) []string {
	if strings.IndexByte(raw, '\\') >= 0 {
		raw = string(unescape(nil, []byte(raw)))
	}
	var names []string
	for name := range strings.SplitSeq(raw, ",") {
		if name = strings.TrimSpace(name); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}
