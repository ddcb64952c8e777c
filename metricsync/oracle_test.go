package metricsync

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/shuntproxy/shunt/internal/pool"
)

// flat is a reading as numbers by name, for comparison.
type flat map[string]float64

// flatten renders what the parser reads.
func (r *reading) flatten() flat {
	out := flat{}
	for m := range numDefinitions {
		name := m.String()
		switch {
		case r.states[m] != present || m == kvCacheHitRate && r.derivedHitRate:
		case m == runningLoRA || m == waitingLoRA:
			out[name+" "+strings.Join(splitAdapters(string(r.texts[m])), ",")] = 1
		case definitions[m].kind == histogram:
			d := r.of(m)
			out[name+".sum"], out[name+".count"], out[name+".mean"] = d.sum, d.count, d.mean()
			if d.recorder {
				out[name+".p90"] = d.p90
			}
			for i, b := range d.bounds {
				out[fmt.Sprint(name, ".le=", b)] = d.counts[i]
			}
		default:
			out[name] = r.values[m]
		}
	}
	maps.DeleteFunc(out, func(_ string, v float64) bool { return math.IsNaN(v) })
	return out
}

// differ lists what is not the same within rounding.
func (f flat) differ(want flat) []string {
	var out []string
	for name := range maps.Keys(f) {
		if _, ok := want[name]; !ok {
			out = append(out, fmt.Sprintf("%s is %v, want none", name, f[name]))
		}
	}
	for name, w := range want {
		if g, ok := f[name]; !ok || math.Abs(g-w) > 1e-9*math.Abs(w) {
			out = append(out, fmt.Sprintf("%s is %v (%v), want %v", name, g, ok, w))
		}
	}
	slices.Sort(out)
	return out
}

// oracle reads a page the slow way, through prometheus/common's parser; ok is
// false where that refuses the page. Comments are taken away, so that each name
// is a family of its own.
func oracle(t *table, text string) (out flat, ok bool) {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		if line = strings.Trim(line, " \t\r"); line != "" && line[0] != '#' && !strings.Contains(line, `quantile="avg"`) {
			b.WriteString(line + "\n")
		}
	}
	p := expfmt.NewTextParser(model.LegacyValidation)
	families, err := p.TextToMetricFamilies(strings.NewReader(b.String()))
	if err != nil {
		return nil, false
	}
	out = flat{}
	for _, r := range t.rows {
		for _, name := range r.names() {
			if o := (oracleRow{t, &r, families, out}); o.read(name) {
				break
			}
		}
	}
	maps.DeleteFunc(out, func(_ string, v float64) bool { return math.IsNaN(v) })
	if _, ok := out[ambiguous]; ok {
		return nil, false
	}
	return out, true
}

// ambiguous is in what the oracle read where a page can be read in two ways.
const ambiguous = "ambiguous"

type oracleRow struct {
	*table
	row      *row
	families map[string]*dto.MetricFamily
	out      flat
}

// one is a series: its labels but le, its samples by part or bound.
type one struct {
	labels map[string]string
	values map[string]float64
}

// collect returns the series of a name and of those with its suffixes, the
// largest value of each, in order.
func (o oracleRow) collect(name string, suffixes ...string) (all []*one) {
	byKey := map[string]*one{}
	for _, suffix := range suffixes {
		for _, s := range o.families[name+suffix].GetMetric() {
			labels, le := map[string]string{}, ""
			for _, l := range s.GetLabel() {
				if l.GetName() == "le" {
					le = l.GetValue()
				} else {
					labels[l.GetName()] = l.GetValue()
				}
			}
			v := s.GetUntyped().GetValue()
			if math.IsNaN(v) || math.IsInf(v, 0) {
				continue
			}
			key := fmt.Sprint(labels)
			if byKey[key] == nil {
				byKey[key] = &one{labels, map[string]float64{}}
				all = append(all, byKey[key])
			}
			if suffix == "_bucket" {
				if bound, err := strconv.ParseFloat(le, 64); err != nil || math.IsNaN(bound) || v < 0 {
					continue
				}
				suffix := "le=" + le
				if old, ok := byKey[key].values[suffix]; !ok || v > old {
					byKey[key].values[suffix] = v
				}
				continue
			}
			if old, ok := byKey[key].values[suffix]; !ok || v > old {
				byKey[key].values[suffix] = v
			}
		}
	}
	all = slices.DeleteFunc(all, func(s *one) bool { return len(s.values) == 0 })
	return o.totals(all)
}

// totals drops the parts of a breakdown, if there is a total.
func (o oracleRow) totals(all []*one) []*one {
	part := func(s *one) bool { return o.totalLabel != "" && s.labels[o.totalLabel] != "" }
	if slices.ContainsFunc(all, func(s *one) bool { return !part(s) }) {
		return slices.DeleteFunc(all, part)
	}
	return all
}

// distinct drops series that count the same things again.
func (o oracleRow) distinct(all []*one, by string) []*one {
	best := map[string]*one{}
	for _, s := range all {
		group := maps.Clone(s.labels)
		for _, l := range o.sameLabels {
			delete(group, l)
		}
		key := fmt.Sprint(group)
		b := best[key]
		switch {
		case b == nil || s.values[by] > b.values[by] || s.values[by] == b.values[by] && s.values["_sum"] > b.values["_sum"]:
			best[key] = s
		case s.values[by] == b.values[by] && s.values["_sum"] == b.values["_sum"] && !maps.Equal(s.values, b.values):
			o.out[ambiguous] = 1 // which of them counts, nothing says
		}
	}
	return slices.DeleteFunc(all, func(s *one) bool {
		for _, b := range best {
			if b == s {
				return false
			}
		}
		return true
	})
}

func (o oracleRow) read(name string) bool {
	key := o.row.metric.String()
	switch {
	case o.row.rule == newest:
		return o.newest(name, key)
	case o.row.recorder:
		all := o.collect(name, "_latency", "_latency_80", "_latency_90", "_latency_99", "_count")
		for _, s := range all[:min(1, len(all))] {
			for suffix, part := range map[string]string{"_latency": ".mean", "_latency_90": ".p90", "_count": ".count"} {
				if v, ok := s.values[suffix]; ok && v >= 0 {
					o.out[key+part] = v
					if suffix != "_count" {
						o.out[key+part] *= o.row.unit
					}
				}
			}
		}
		return len(all) > 0
	case definitions[o.row.metric].kind == histogram:
		return o.histogram(name, key)
	}
	all := o.collect(name, "")
	var values []float64
	if o.row.where.name != "" {
		all = slices.DeleteFunc(all, func(s *one) bool { return s.labels[o.row.where.name] != o.row.where.value })
	}
	if o.row.label != "" {
		for _, s := range all {
			v, ok := parseValue([]byte(s.labels[o.row.label]))
			delete(s.values, "")
			if ok && !math.IsNaN(v) && !math.IsInf(v, 0) {
				s.values[""] = v
			}
		}
		all = slices.DeleteFunc(all, func(s *one) bool { return len(s.values) == 0 })
	}
	for _, s := range o.distinct(all, "") {
		values = append(values, s.values[""])
	}
	if len(values) == 0 {
		return false
	}
	total := 0.0
	for _, v := range values {
		total += v
	}
	v := total
	switch o.row.rule {
	case mean:
		v = total / float64(len(values))
	case peak:
		v = slices.Max(values)
	case least:
		v = slices.Min(values)
	}
	if v < 0 || math.IsInf(v, 0) {
		return false
	}
	o.out[key] = v
	return true
}

func (o oracleRow) newest(name, key string) bool {
	var best *dto.Metric
	for _, s := range o.families[name].GetMetric() {
		if v := s.GetUntyped().GetValue(); !math.IsNaN(v) && (best == nil || v > best.GetUntyped().GetValue()) {
			best = s
		}
	}
	if best == nil {
		return false
	}
	text := ""
	for _, l := range best.GetLabel() {
		if l.GetName() == o.row.label {
			text = l.GetValue()
		}
	}
	if o.row.metric != maxLoRA {
		o.out[key+" "+strings.Join(splitAdapters(strings.ReplaceAll(text, `\`, `\\`)), ",")] = 1
		return true
	}
	v, ok := parseValue([]byte(text))
	if ok {
		o.out[key] = v
	}
	return ok
}

func (o oracleRow) histogram(name, key string) bool {
	all := o.distinct(o.collect(name, "_bucket", "_sum", "_count"), "_count")
	if len(all) == 0 {
		return false
	}
	byBound := map[float64]float64{}
	for _, s := range all {
		for part, v := range s.values {
			if le, ok := strings.CutPrefix(part, "le="); ok {
				bound, _ := strconv.ParseFloat(le, 64)
				byBound[bound] += v
				continue
			}
			o.out[key+"."+part[1:]] += v
		}
	}
	for bound, v := range byBound {
		byBound[bound] = min(v, math.MaxFloat64)
	}
	for _, part := range []string{".sum", ".count"} {
		if v := o.out[key+part]; v < 0 || math.IsInf(v, 0) {
			delete(o.out, key+part)
		}
	}
	most := 0.0
	for _, bound := range slices.Sorted(maps.Keys(byBound)) {
		most = max(most, byBound[bound])
		o.out[fmt.Sprint(key, ".le=", bound)] = most
	}
	if _, ok := o.out[key+".count"]; !ok && len(byBound) > 0 {
		o.out[key+".count"] = most
	}
	sum, ok := o.out[key+".sum"]
	if count := o.out[key+".count"]; ok && count > 0 && !math.IsInf(sum/count, 0) {
		o.out[key+".mean"] = sum / count
	}
	return true
}

func readFlat(t testing.TB, e pool.Engine, r io.Reader) flat {
	t.Helper()
	p := newParser(testTables.of(e))
	if _, err := p.parse(r, math.MaxInt64); err != nil {
		t.Fatal(err)
	}
	p.reading.reduce(&p.page, anyModel)
	return p.reading.flatten()
}

// TestSamplesAgainstOracle compares with prometheus/common's parser on each
// sample, as it is and disfigured.
func TestSamplesAgainstOracle(t *testing.T) {
	for _, path := range samples(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		engine := engineOf(t, path)
		want, ok := oracle(testTables.of(engine), string(data))
		if !ok || len(want) < 15 {
			t.Fatalf("%s: the oracle has %d values", path, len(want))
		}
		lines := strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
		backward := slices.Clone(lines)
		slices.Reverse(backward)
		shuffled := slices.Clone(lines)
		rng := rand.New(rand.NewPCG(1, 2))
		rng.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		for how, text := range map[string]string{
			"as it is":         string(data),
			"CRLF":             strings.ReplaceAll(string(data), "\n", "\r\n"),
			"no final newline": strings.TrimSuffix(string(data), "\n"),
			"backward":         strings.Join(backward, "\n"),
			"shuffled":         strings.Join(shuffled, "\n"),
			"labels shuffled":  strings.Join(relabel(lines, rng), "\n"),
			"foreign families": strings.ReplaceAll(string(data), "\n", "\n# TYPE aibrix:num_requests_running gauge\naibrix:num_requests_running{a=\"b\"} 99\nother_bucket{le=\"1\"} 1\n"),
			"every line twice": strings.Join(slices.Concat(lines, shuffled), "\n"),
			"indented":         "  " + strings.ReplaceAll(string(data), "\n", "\n\t "),
			"timestamps":       strings.Join(stamp(lines), "\n"),
			"long line":        "# " + strings.Repeat("x", 3*maxLine) + "\n" + string(data),
		} {
			if diff := readFlat(t, engine, strings.NewReader(text)).differ(want); diff != nil {
				t.Errorf("%s, %s: %s", path, how, strings.Join(diff[:min(5, len(diff))], "; "))
			}
		}
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		_, _ = z.Write(data)
		_ = z.Close()
		unpacked, err := newParser(testTables.of(engine)).unpacked(&packed, true)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range []io.Reader{
			iotest.OneByteReader(bytes.NewReader(data)), iotest.DataErrReader(bytes.NewReader(data)),
			iotest.HalfReader(bytes.NewReader(data)), unpacked,
		} {
			if diff := readFlat(t, engine, r).differ(want); diff != nil {
				t.Errorf("%s, in pieces: %s", path, diff[0])
			}
		}
	}
}

// relabel shuffles the labels of each line.
func relabel(lines []string, rng *rand.Rand) []string {
	out := slices.Clone(lines)
	for i, l := range out {
		from, to := strings.IndexByte(l, '{'), strings.LastIndexByte(l, '}')
		if strings.HasPrefix(l, "#") || from < 0 {
			continue
		}
		labels, _, ok := parseLabels([]byte(l[from+1:]), nil)
		if !ok {
			continue
		}
		var parts []string
		for _, one := range labels {
			parts = append(parts, fmt.Sprintf(`%s="%s"`, one.name, one.value))
		}
		rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		out[i] = l[:from+1] + strings.Join(parts, ",") + l[to:]
	}
	return out
}

func stamp(lines []string) []string {
	out := slices.Clone(lines)
	for i, l := range out {
		if !strings.HasPrefix(l, "#") {
			out[i] = l + " 1700000000000"
		}
	}
	return out
}

// TestRenamedFamily: without a family, just what is read of it is lost, or comes
// from an alternate.
func TestRenamedFamily(t *testing.T) {
	for _, path := range samples(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		engine := engineOf(t, path)
		table := testTables.of(engine)
		p := parsed(t, engine, string(data))
		p.reading.reduce(&p.page, anyModel)
		before := p.reading.flatten()
		sources := map[string][]metric{}
		for m := range numDefinitions {
			if p.reading.states[m] == present && (m != kvCacheHitRate || !p.reading.derivedHitRate) {
				name := table.families[p.reading.family(m)].name
				sources[name] = append(sources[name], m)
			}
		}
		for name, of := range sources {
			var lines []string
			for line := range strings.Lines(string(data)) {
				n := sampleName([]byte(line))
				if rest, ok := strings.CutPrefix(line[:n], name); ok && (rest == "" || strings.HasPrefix(rest, "_")) && table.isOf(line[:n], name) {
					line = "renamed_" + line
				}
				lines = append(lines, line)
			}
			after := readFlat(t, engine, strings.NewReader(strings.Join(lines, "")))
			want := maps.Clone(before)
			for _, m := range of {
				maps.DeleteFunc(want, func(k string, _ float64) bool { return ownKey(k, m) })
			}
			if now, ok := oracle(table, strings.Join(lines, "")); !ok || after.differ(now) != nil {
				t.Errorf("%s without %s: what is left: %v", filepath.Base(path), name, after.differ(now))
			}
			for _, m := range of { // an alternate may have another
				maps.DeleteFunc(after, func(k string, _ float64) bool { return ownKey(k, m) && len(rowOf(table, m).names()) > 1 })
			}
			if diff := after.differ(want); diff != nil {
				t.Errorf("%s without %s: %s", filepath.Base(path), name, strings.Join(diff, "; "))
			}
		}
	}
}

// isOf reports whether a sample's name is of a family.
func (t *table) isOf(sample, family string) bool {
	w, ok := t.names[sample]
	return ok && t.families[w.family].name == family
}

func ownKey(key string, m metric) bool {
	rest, ok := strings.CutPrefix(key, m.String())
	return ok && (rest == "" || rest[0] == '.' || rest[0] == ' ')
}

// Notes on golden values that need a word.
var notes = map[string]map[metric]string{
	"vllm_v1_dp2": {
		kvCacheUsage:       "(0.1372549 + 0.4472549) / 2",
		numRequestsRunning: "3 + 8",
		numBlocks:          "of both ranks",
		requestSuccess:     "8+25 stop, 6+10 length, 4+2 abort",
	},
	"vllm_v1": {
		timePerOutputToken: "0.33 has the new name alone",
		gpuCacheUsage:      "renamed; the same quantity",
		requestSuccess:     "all finish reasons",
	},
	"vllm_v0":   {kvCacheUsage: "the name of V0"},
	"vllm_lora": {waitingLoRA: "the newest of four series by value, which is not the last"},
	"sglang": {
		numPrefillPrealloc: "renamed by 0.5.23",
		requestSuccess:     "27 + 53, streaming or not",
		perStageLatency:    "all stages together",
	},
	"trtllm": {kvCacheUsage: "896 of 4096 blocks"},
	"xllm":   {promptTokens: "6 digits are all that brpc prints"},
}

// TestSamples compares every row with the reviewed values of each sample.
func TestSamples(t *testing.T) {
	for _, path := range samples(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		report, err := Inspect(engineOf(t, path), bytes.NewReader(data), math.MaxInt64)
		if err != nil || !report.Usable {
			t.Fatalf("%s: %v, %+v", path, err, report)
		}
		name := strings.TrimSuffix(filepath.Base(path), ".prom")
		var b bytes.Buffer
		byName := map[string]string{}
		for m := range numDefinitions {
			if note := notes[name][m]; note != "" {
				byName[m.String()] = "  # " + note
			}
		}
		show := func(v *float64) string {
			if v == nil {
				return "-"
			}
			return fmt.Sprintf("%.10g", *v)
		}
		for _, f := range report.Metrics {
			fmt.Fprintf(&b, "%s = ", f.Name)
			switch h := f.Histogram; {
			case h != nil:
				fmt.Fprintf(&b, "sum %s, count %s, p50 %s, p99 %s", show(h.Sum), show(h.Count), show(h.P50), show(h.P99))
			case f.Names != nil:
				fmt.Fprintf(&b, "%q", f.Names)
			default:
				b.WriteString(show(f.Value))
			}
			fmt.Fprintf(&b, " from %s%s\n", f.Source, byName[f.Name])
		}
		b.WriteByte('\n')
		for _, m := range report.Missing {
			fmt.Fprintf(&b, "%s: %s\n", m.Name, m.Why)
		}
		checkFile(t, "testdata/"+name+".golden", b.Bytes())
	}
}

func FuzzParse(f *testing.F) {
	for _, path := range samples(f) {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		table := testTables.of(engineOf(f, path))
		var wanted []string // few enough for the fuzzer to move them about
		perName := map[string]int{}
		for line := range strings.Lines(string(data)) {
			name := line[:sampleName([]byte(line))]
			if _, ok := table.names[name]; ok && perName[name] < 2 && len(line) < 300 {
				perName[name]++
				wanted = append(wanted, line)
			}
		}
		for few := range slices.Chunk(wanted, 5) {
			f.Add(uint8(engineOf(f, path)-1), strings.Join(few, ""))
		}
	}
	f.Add(uint8(0), "vllm:num_requests_running{a=\"\\\"}\\n\",} NaN 1\r\nvllm:num_requests_running 1e999")
	parsers := map[pool.Engine]*parser{} // one page must not show in the next
	for _, e := range allEngines {
		parsers[e] = newParser(testTables.of(e))
	}
	f.Fuzz(func(t *testing.T, engine uint8, text string) {
		e := pool.EngineVLLM + pool.Engine(engine)%(pool.EngineXLLM)
		p := parsers[e]
		if _, err := p.parse(strings.NewReader(text), math.MaxInt64); err != nil {
			t.Fatal(err)
		}
		p.reading.reduce(&p.page, anyModel)
		got := p.reading.flatten()
		p.columns(&history{}, p.reading.adapters(adapters{}), time.Time{})

		// Without buckets, and in pieces, all else is the same, but where a histogram
		// has no count: buckets stand in for it, and without them another name may.
		p.noBuckets = true
		_, err := p.parse(iotest.HalfReader(strings.NewReader(text)), math.MaxInt64)
		p.noBuckets = false
		if err != nil {
			t.Fatal(err)
		}
		p.reading.reduce(&p.page, anyModel)
		few := p.reading.flatten()
		if bucketsCounted(text) {
			for key, v := range got {
				if w, ok := few[key]; ok && v != w || !ok && !strings.Contains(key, ".le=") {
					t.Errorf("%s is %v, %v without buckets", key, v, w)
				}
				delete(few, key)
			}
			if len(few) > 0 {
				t.Errorf("without buckets only: %v", few)
			}
		}
		want, ok := oracle(testTables.of(e), text)
		if !ok || differs(text) {
			return
		}
		if diff := got.differ(want); diff != nil {
			t.Errorf("%s", strings.Join(diff, "; "))
		}
	})
}

// plainCount is a line of a count about which no two readers differ.
var plainCount = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*_count(\{([a-z_]+="[^"\\]*"(,[a-z_]+="[^"\\]*")*,?)?\})? [0-9]{1,9}(\.[0-9]+)?(e\+0[0-9])?$`)

// bucketsCounted reports whether every bucket has a count beside it: of the same
// histogram, with the same labels but le, in a plain line.
func bucketsCounted(text string) bool {
	counts, buckets := map[string]bool{}, map[string]bool{}
	for line := range strings.SplitSeq(text, "\n") {
		name := line[:sampleName([]byte(line))]
		labels, _, _ := strings.Cut(strings.TrimPrefix(line[len(name):], "{"), "}")
		pairs := slices.DeleteFunc(strings.Split(labels, ","), func(p string) bool { return p == "" || strings.HasPrefix(p, `le="`) })
		slices.Sort(pairs)
		if stem, ok := strings.CutSuffix(name, "_bucket"); ok {
			buckets[stem+"{"+strings.Join(pairs, ",")] = true
		} else if plainCount.MatchString(line) {
			if line[len(name)] != '{' {
				pairs = nil
			}
			counts[strings.TrimSuffix(name, "_count")+"{"+strings.Join(pairs, ",")] = true
		} else if strings.Contains(line, "_bucket") {
			return false // indented, or a comment
		}
	}
	for b := range buckets {
		if !counts[b] {
			return false
		}
	}
	return true
}

// differs tells what the oracle reads in another way on purpose: UTF-8 names,
// labels of one name, which it takes or refuses by their order, and blanks that
// are none for us.
func differs(text string) bool {
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimLeft(line, " \t")
		if strings.HasPrefix(line, "{") || strings.Contains(line, `{"`) || strings.Contains(line, `,"`) || strings.ContainsAny(line, "\v\f\x00") {
			return true
		}
		if quote := strings.IndexByte(line, '"'); quote >= 0 && !strings.Contains(line[:quote], "{") && !strings.HasPrefix(line, "#") {
			return true // a name in part or whole in quotes
		}
		if strings.Count(line, "le=") > 1 || strings.Contains(line, "\r") {
			return true
		}
	}
	return false
}
