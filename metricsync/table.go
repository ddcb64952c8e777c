package metricsync

import (
	"github.com/shuntproxy/shunt/internal/pool"
)

// rule says how several series of one family become one value.
type rule uint8

const (
	sum    rule = iota // counts: each data-parallel rank has its own
	mean               // ratios of ranks that share the load
	peak               // settings that all ranks share, ratios where a dead process's series may linger
	least              // flags: one rank that is not is enough
	newest             // the series with the largest value, whatever the value is
)

func (r rule) String() string {
	return [...]string{"sum", "mean", "largest", "smallest", "newest"}[r]
}

// row is one abstract metric in the words of one engine.
type row struct {
	metric metric
	rule   rule
	// spec is the name in the AIBrix table, "" where that says N/A.
	spec string
	// also are the names that versions of the engine really export. All names
	// are tried in order, spec first; the first with a value wins.
	also []string
	// where is the one value of a label that counts, as in sleep_state="awake".
	where labelValue
	// label holds the value, which is then not the sample's.
	label string
	// recorder rows read a family of brpc's LatencyRecorder: gauges of a recent
	// window under one stem. unit is what their values are multiplied with.
	recorder bool
	unit     float64
}

type labelValue struct{ name, value string }

// names lists the families of a row in the order in which they are tried.
func (r *row) names() []string {
	if r.spec == "" {
		return r.also
	}
	return append([]string{r.spec}, r.also...)
}

// table is how one engine's metrics are found and read. It is immutable.
type table struct {
	engine pool.Engine
	// paths are tried in order while the answer is 404.
	paths []string
	// hint tells the operator what to set where no path has metrics.
	hint string
	rows []row
	// sameLabels tell apart series that count the same things again: of those
	// that differ in nothing else the largest counts.
	sameLabels []string
	// totalLabel is empty on the series that sums a breakdown; series with a
	// value there are the breakdown and count only where there is no such sum. ""
	// where there is none.
	totalLabel string

	families []family
	// choices are the families of each row, in the order in which they are tried.
	choices [][]int
	names   map[string]wanted
	// layouts is the number of histogram families, which have a layout each.
	layouts int
	// next holds the first two bytes of all wanted names: they tell nearly all
	// comments, and other names, apart.
	next [1 << 16 / 64]uint64 // a set of bits
}

// family is one family of samples that rows read.
type family struct {
	name   string
	form   form
	where  labelValue
	labels []string // those whose text is read, for formNewest and formNumber
	layout int      // for formHistogram
}

// form is how a family holds its values.
type form uint8

const (
	formValue     form = iota // a number a series
	formHistogram             // _bucket, _sum, _count
	formRecorder              // _latency, _latency_80 and so on, _count
	formNumber                // a number in a label
	formNewest                // text in labels
)

// wanted is what a sample's name leads to.
type wanted struct {
	family uint8
	part   part
}

// part is which sample of its family a name is.
type part uint8

const (
	partValue part = iota
	partBucket
	partSum
	partCount
	partMean // of a recorder, as are the next
	part80
	part90
	part99
	numParts = part99 + 1
)

// suffixes are the names of the parts of a family, after its own.
func (f form) suffixes() map[string]part {
	switch f {
	case formHistogram:
		return map[string]part{"_bucket": partBucket, "_sum": partSum, "_count": partCount}
	case formRecorder:
		return map[string]part{"_latency": partMean, "_latency_80": part80, "_latency_90": part90, "_latency_99": part99, "_count": partCount}
	default:
		return map[string]part{"": partValue}
	}
}

// tables holds one table for each engine; nil where there is none.
type tables [pool.EngineXLLM + 1]*table

func (t *tables) of(e pool.Engine) *table {
	if int(e) >= len(t) {
		return nil
	}
	return t[e]
}

func newTables() *tables {
	t := &tables{pool.EngineVLLM: vllm(), pool.EngineSGLang: sglang(), pool.EngineTRTLLM: trtllm(), pool.EngineXLLM: xllm()}
	for e, one := range t {
		if one != nil {
			one.engine = pool.Engine(e)
			one.index()
		}
	}
	return t
}

// index builds what parsing needs from the rows.
func (t *table) index() {
	t.names = make(map[string]wanted)
	byName := make(map[string]int)
	t.choices = make([][]int, len(t.rows))
	for i := range t.rows {
		r := &t.rows[i]
		for _, name := range r.names() {
			at, known := byName[name]
			if !known {
				at = len(t.families)
				byName[name] = at
				t.families = append(t.families, t.family(name, r))
			}
			if f := &t.families[at]; r.label != "" {
				f.labels = append(f.labels, r.label)
			}
			t.choices[i] = append(t.choices[i], at)
		}
	}
	for i, f := range t.families {
		for suffix, p := range f.form.suffixes() {
			name := f.name + suffix
			t.names[name] = wanted{uint8(i), p}
			pair := uint16(name[0])<<8 | uint16(name[1])
			t.next[pair/64] |= 1 << (pair % 64)
		}
	}
}

func (t *table) family(name string, r *row) family {
	f := family{name: name, where: r.where}
	switch {
	case r.recorder:
		f.form = formRecorder
	case definitions[r.metric].kind == histogram:
		f.form = formHistogram
		f.layout = t.layouts
		t.layouts++
	case r.rule == newest:
		f.form = formNewest
	case r.label != "":
		f.form = formNumber
	}
	return f
}

// maybe is false for nearly all lines that begin with no wanted name.
func (t *table) maybe(line []byte) bool {
	if len(line) < 2 {
		return false
	}
	pair := uint16(line[0])<<8 | uint16(line[1])
	return t.next[pair/64]&(1<<(pair%64)) != 0
}
