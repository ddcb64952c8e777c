package metricsync

import (
	"hash/maphash"
	"math"
	"slices"
	"strconv"
)

const (
	// maxSeries of one family are told apart; what is over is added to the last.
	maxSeries = 256
	// maxModels of one page are told apart.
	maxModels = 64
	// maxBounds of one histogram are kept; engines have up to 40.
	maxBounds = 256
)

// page is what the samples of one page add up to, by family and series.
type page struct {
	families []familySeries
	layouts  []layout
	layoutOf []int // by family
	models   []string
	seed     maphash.Seed
}

// identity is what the labels of a sample say of its series.
type identity struct {
	full  uint64 // all labels but le
	group uint64 // those that are not in table.sameLabels
	model int    // in page.models, -1 for none
	// breakdown is a part of another series, which is its total; it counts where
	// that is not there.
	breakdown bool
}

// familySeries are the series of one family.
type familySeries struct {
	series []series
	last   int  // where the sample before went
	broken bool // there is a breakdown

	seen   bool // for formNewest, as are the next
	newest float64
	texts  [][]byte // by family.labels
}

// series are the samples of one set of labels.
type series struct {
	identity
	nan    bool
	has    uint16 // bits by part
	values [numParts]float64
	counts []float64 // by bound of the layout, cumulative, -1 where unseen
}

// layout is the bounds of one histogram, in the order in which they were seen:
// they stay the same from page to page.
type layout struct {
	texts  []string
	bounds []float64
}

func (p *page) init(t *table) {
	p.families = make([]familySeries, len(t.families))
	for i := range t.families {
		p.families[i].texts = make([][]byte, len(t.families[i].labels))
		p.layoutOf = append(p.layoutOf, t.families[i].layout)
	}
	p.layouts = make([]layout, t.layouts)
	p.seed = maphash.MakeSeed()
}

func (p *page) reset() {
	for i := range p.families {
		f := &p.families[i]
		f.series, f.last, f.broken, f.seen = f.series[:0], 0, false, false
	}
	for i := range p.layouts {
		if len(p.layouts[i].bounds) >= maxBounds {
			p.layouts[i] = layout{} // of many engines, or of one gone mad
		}
	}
	p.models = p.models[:0]
}

// identify finds which series a sample is of. The order of labels is no part of
// it.
func (p *page) identify(t *table, labels []label) identity {
	id := identity{model: -1}
	for _, l := range labels {
		switch string(l.name) {
		case "le":
			continue
		case "model_name":
			id.model = p.model(l.value)
		}
		if t.totalLabel != "" && string(l.name) == t.totalLabel && len(l.value) > 0 {
			id.breakdown = true
		}
		h := maphash.Bytes(p.seed, l.name)*0x9e3779b97f4a7c15 ^ maphash.Bytes(p.seed, l.value)
		h *= 0xbf58476d1ce4e5b9
		id.full += h
		if !slices.Contains(t.sameLabels, string(l.name)) {
			id.group += h
		}
	}
	return id
}

// model returns the position of a model's name, -1 for one that names none.
func (p *page) model(raw []byte) int {
	if len(raw) == 0 || len(raw) > maxName || string(raw) == "undefined" { // TensorRT-LLM's, whatever it serves
		return -1
	}
	for i, m := range p.models {
		if m == string(raw) {
			return i
		}
	}
	if len(p.models) >= maxModels {
		return -1
	}
	if n := len(p.models); n < cap(p.models) {
		// Pages have the same models again and again.
		if last := p.models[:n+1]; last[n] == string(raw) {
			p.models = last
			return n
		}
	}
	p.models = append(p.models, string(raw))
	return len(p.models) - 1
}

// seriesOf returns the position of a series, new if need be.
func (p *page) seriesOf(family int, id identity) int {
	f := &p.families[family]
	if f.last < len(f.series) && f.series[f.last].full == id.full {
		return f.last
	}
	for i := range f.series {
		if f.series[i].full == id.full {
			f.last = i
			return i
		}
	}
	if len(f.series) == maxSeries {
		f.last = maxSeries - 1
		if part := slices.IndexFunc(f.series, func(s series) bool { return s.breakdown }); part >= 0 && !id.breakdown {
			// The parts of a total may be many, as clients choose SGLang's priorities.
			f.last = part
			f.series[part] = series{identity: id, counts: f.series[part].counts[:0]}
		}
		return f.last
	}
	f.last = len(f.series)
	if f.last < cap(f.series) {
		f.series = f.series[:f.last+1]
	} else {
		f.series = append(f.series, series{})
	}
	s := &f.series[f.last]
	*s = series{identity: id, counts: s.counts[:0]}
	f.broken = f.broken || id.breakdown
	return f.last
}

// add takes in a number. A series that is there twice counts once.
func (p *page) add(family int, part part, id identity, v float64) {
	s := &p.families[family].series[p.seriesOf(family, id)]
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		s.nan = true
	case s.full != id.full: // beyond maxSeries
		s.set(part, s.values[part]+v)
	case s.has&(1<<part) == 0 || v > s.values[part]:
		s.set(part, v)
	}
}

func (s *series) set(part part, v float64) {
	s.values[part] = v
	s.has |= 1 << part
}

// bucket takes in a bucket's count, whose bound is expected at a position of the
// layout. It returns the position after it.
func (p *page) bucket(family, at, expected int, le []byte, v float64) int {
	f := &p.families[family]
	l := &p.layouts[p.layoutOf[family]]
	if expected >= len(l.texts) || l.texts[expected] != string(le) {
		if expected = l.find(le); expected < 0 {
			return 0
		}
	}
	s := &f.series[at]
	for len(s.counts) < len(l.bounds) {
		s.counts = append(s.counts, -1)
	}
	if v >= 0 && s.counts[expected] < v && !math.IsInf(v, 0) {
		s.counts[expected] = v
		s.has |= 1 << partBucket
	}
	return expected + 1
}

// find returns the position of a bound, new if need be, -1 for none.
func (l *layout) find(le []byte) int {
	for i := range l.texts {
		if l.texts[i] == string(le) {
			return i
		}
	}
	bound, err := strconv.ParseFloat(string(le), 64)
	if err != nil || math.IsNaN(bound) || len(l.bounds) >= maxBounds {
		return -1
	}
	l.texts = append(l.texts, string(le))
	l.bounds = append(l.bounds, bound)
	return len(l.bounds) - 1
}

// newer keeps the labels of the series with the largest value.
func (p *page) newer(family int, names []string, labels []label, v float64) {
	f := &p.families[family]
	if math.IsNaN(v) || f.seen && v <= f.newest {
		return
	}
	f.seen, f.newest = true, v
	for i, name := range names {
		f.texts[i] = append(f.texts[i][:0], valueOf(labels, name)...)
	}
}

// numbers takes in the labels that hold numbers; "None" is none.
func (p *page) numbers(family int, names []string, id identity, labels []label) {
	for i, name := range names {
		if v, ok := parseValue(valueOf(labels, name)); ok {
			p.add(family, part(i), id, v)
		}
	}
}

func valueOf(labels []label, name string) []byte {
	for i := range labels {
		if string(labels[i].name) == name {
			return labels[i].value
		}
	}
	return nil
}
