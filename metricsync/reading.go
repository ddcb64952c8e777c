package metricsync

import "math"

// state says what a page says of a metric: absent, not a number and a number,
// perhaps zero, are three things. That a number is old is a fourth, which the
// snapshot knows.
type state uint8

const (
	absent state = iota
	notNumber
	present
)

// reading is what one page says, by metric. Its memory is reused.
type reading struct {
	table  *table
	states [numDefinitions]state
	// choice is which of the row's families the value is from.
	choice [numDefinitions]int8
	// values of gauges and counters; of max_lora too.
	values [numDefinitions]float64
	// distributions by family, for histograms.
	distributions []distribution
	ready         []bool // by family, distributions is filled
	// texts of the newest LoRA info, raw.
	texts [numDefinitions][]byte
	// derivedHitRate is true where kv_cache_hit_rate is hits over queries.
	derivedHitRate bool

	chosen []*series
}

func (r *reading) init(t *table) {
	r.table = t
	r.distributions = make([]distribution, len(t.families))
	r.ready = make([]bool, len(t.families))
}

// anyModel makes a reading one of the whole page.
const anyModel = -2

// reduce fills r from the samples of a page: of the whole page, or of the series
// of one model.
func (r *reading) reduce(p *page, model int) {
	clear(r.states[:])
	clear(r.ready)
	for i := range r.table.rows {
		row := &r.table.rows[i]
		for nth, family := range r.table.choices[i] {
			switch st := r.take(p, row, family, model); {
			case st == present:
				r.states[row.metric], r.choice[row.metric] = present, int8(nth)
			case st > r.states[row.metric]:
				r.states[row.metric], r.choice[row.metric] = st, int8(nth)
			}
			if r.states[row.metric] == present {
				break
			}
		}
	}
	r.deriveHitRate()
}

// take reads one family as a row wants it.
func (r *reading) take(p *page, row *row, family, model int) state {
	f := &r.table.families[family]
	samples := &p.families[family]
	switch f.form {
	case formNewest:
		if !samples.seen || model != anyModel {
			return absent
		}
		return r.text(row, f, samples)
	case formHistogram, formRecorder:
		return r.distribute(p, row, family, model)
	}
	part := partValue
	for i, name := range f.labels {
		if name == row.label {
			part = partOf(i)
		}
	}
	v, st := r.aggregate(samples, row.rule, part, model)
	if st == present && (v < 0 || math.IsInf(v, 0)) {
		st = notNumber // switched off, or nonsense: nothing that is counted is below 0, or adds up to infinity
	}
	if st == present {
		r.values[row.metric] = v
	}
	return st
}

// partOf is where page.numbers puts the nth label of a family.
func partOf(i int) part { return part(i) }

func (r *reading) text(row *row, f *family, samples *familySeries) state {
	for i, name := range f.labels {
		if name != row.label {
			continue
		}
		if row.metric != maxLoRA {
			r.texts[row.metric] = samples.texts[i]
			return present
		}
		v, ok := parseValue(samples.texts[i])
		if !ok {
			return absent
		}
		r.values[row.metric] = v
		return present
	}
	return absent
}

// aggregate makes one value of the series.
func (r *reading) aggregate(f *familySeries, rule rule, part part, model int) (float64, state) {
	var total, n, most, fewest float64
	st := absent
	broken := f.broken && f.whole(model, 1<<part)
	for i := range f.series {
		s := &f.series[i]
		if model != anyModel && s.model != model || broken && s.breakdown {
			continue
		}
		if s.nan {
			st = max(st, notNumber)
		}
		if s.has&(1<<part) == 0 || r.again(f, i, part, 1<<part) {
			continue
		}
		v := s.values[part]
		if n == 0 || v > most {
			most = v
		}
		if n == 0 || v < fewest {
			fewest = v
		}
		total += v
		n++
	}
	if n == 0 {
		return 0, st
	}
	switch rule {
	case mean:
		return total / n, present
	case peak:
		return most, present
	case least:
		return fewest, present
	default:
		return total, present
	}
}

// whole reports whether there is a total beside a breakdown, with a part of mask.
func (f *familySeries) whole(model int, mask uint16) bool {
	for i := range f.series {
		s := &f.series[i]
		if !s.breakdown && s.has&mask != 0 && (model == anyModel || s.model == model) {
			return true
		}
	}
	return false
}

// again reports whether another series of the same group, of those that have a
// part of mask, stands for this one: the one with the larger value, of equal ones
// that with the larger sum, else the first.
func (r *reading) again(f *familySeries, i int, part part, mask uint16) bool {
	if len(r.table.sameLabels) == 0 {
		return false
	}
	s := &f.series[i]
	for j := range f.series {
		o := &f.series[j]
		if j == i || o.group != s.group || o.has&mask == 0 {
			continue
		}
		v, w := o.values[part], s.values[part]
		if v == w { // of histograms that count the same, whatever the order on the page
			v, w = o.values[partSum], s.values[partSum]
		}
		if v > w || v == w && j < i {
			return true
		}
	}
	return false
}

// distribute fills the distribution of a family.
func (r *reading) distribute(p *page, row *row, family, model int) state {
	f := &p.families[family]
	form := r.table.families[family].form
	d := &r.distributions[family]
	if r.ready[family] {
		return present
	}
	r.chosen = r.chosen[:0]
	st := absent
	broken := f.broken && f.whole(model, ^uint16(0))
	for i := range f.series {
		s := &f.series[i]
		if model != anyModel && s.model != model || broken && s.breakdown {
			continue
		}
		if s.nan {
			st = notNumber
		}
		if s.has != 0 && !r.again(f, i, partCount, ^uint16(0)) {
			r.chosen = append(r.chosen, s)
		}
	}
	if len(r.chosen) == 0 {
		return st
	}
	if form == formRecorder {
		d.record(r.chosen[0], row.unit)
	} else {
		d.gather(&p.layouts[r.table.families[family].layout], r.chosen)
		if math.IsNaN(d.count) && len(d.counts) > 0 {
			d.count = d.counts[len(d.counts)-1]
		}
	}
	r.ready[family] = true
	return present
}

// deriveHitRate takes hits over queries where the engine has no rate itself.
func (r *reading) deriveHitRate() {
	r.derivedHitRate = r.states[kvCacheHitRate] != present && r.states[prefixCacheQueries] == present &&
		r.states[prefixCacheHits] == present && r.values[prefixCacheQueries] > 0
	if r.derivedHitRate {
		r.states[kvCacheHitRate] = present
		r.values[kvCacheHitRate] = min(r.values[prefixCacheHits]/r.values[prefixCacheQueries], 1)
	}
}

// get returns the value of a gauge or a counter.
func (r *reading) get(m metric) (float64, bool) { return r.values[m], r.states[m] == present }

// of returns the distribution of a histogram, or nil.
func (r *reading) of(m metric) *distribution {
	if r.states[m] != present || definitions[m].kind != histogram {
		return nil
	}
	return &r.distributions[r.family(m)]
}

// family returns the family that a present metric was read from.
func (r *reading) family(m metric) int {
	for i := range r.table.rows {
		if r.table.rows[i].metric == m {
			return r.table.choices[i][r.choice[m]]
		}
	}
	return -1
}

// empty reports whether the page had none of the engine's metrics. What any
// Python process and any web server has is not one.
func (r *reading) empty() bool {
	for m, st := range r.states {
		switch metric(m) {
		case processStart, httpRequests, httpDuration, httpDurationHighr:
		default:
			if st != absent {
				return false
			}
		}
	}
	return true
}
