package sim

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Quirks are what versions and ways to run an engine change about its metrics
// page. The zero value changes nothing.
type Quirks struct {
	Ranks     int               `yaml:"ranks" json:"ranks,omitempty"`         // data-parallel ranks on one page: engine=N (vllm), dp_rank=N (sglang); 1
	TPRanks   int               `yaml:"tp_ranks" json:"tp_ranks,omitempty"`   // sglang: every scheduler of a tensor-parallel group says the same; 1
	Priority  bool              `yaml:"priority" json:"priority,omitempty"`   // sglang: totals under priority="", and again by priority
	Undefined bool              `yaml:"undefined" json:"undefined,omitempty"` // model_name and engine_type are "undefined", as trtllm-serve has them
	NoModel   bool              `yaml:"no_model" json:"no_model,omitempty"`   // no model_name
	PID       bool              `yaml:"pid" json:"pid,omitempty"`             // every gauge has a label pid, as in multiprocess mode; trtllm has it anyway
	DeadPIDs  int               `yaml:"dead_pids" json:"dead_pids,omitempty"` // idle processes that ended and left their gauges, with pid
	NaN       []string          `yaml:"nan" json:"nan,omitempty"`             // families whose samples are NaN
	Rename    map[string]string `yaml:"rename" json:"rename,omitempty"`       // families that have another name
	Missing   []string          `yaml:"missing" json:"missing,omitempty"`     // families that are not there
	Extra     map[string]string `yaml:"extra" json:"extra,omitempty"`         // further gauges: name, with labels or not, and value
	Multiproc bool              `yaml:"multiproc" json:"multiproc,omitempty"` // vllm: several API processes: no _created, python_ and process_, sums first, summed timestamps
	Sidecar   bool              `yaml:"sidecar" json:"sidecar,omitempty"`     // the AIBrix runtime's copies under aibrix: follow
	Gzip      *bool             `yaml:"gzip" json:"gzip,omitempty"`           // packed for who accepts it; sglang and trtllm do, vllm and xllm don't
	Paths     []string          `yaml:"paths" json:"paths,omitempty"`         // where the page is, in place of the engine's own
	CRLF      bool              `yaml:"crlf" json:"crlf,omitempty"`           // lines end in \r\n
	Cut       bool              `yaml:"cut" json:"cut,omitempty"`             // no newline at the end
	TwoTypes  bool              `yaml:"two_types" json:"two_types,omitempty"` // every HELP and TYPE line comes twice
	Cold      bool              `yaml:"cold" json:"cold,omitempty"`           // the page is empty until a request finished, as TensorRT-LLM's
}

func (q *Quirks) validate(engine string) error {
	var errs []error
	only := func(field string, set bool, engines ...string) {
		if set && !slices.Contains(engines, engine) {
			errs = append(errs, fmt.Errorf("quirks.%s: %s has none, only %s", field, engine, strings.Join(engines, ", ")))
		}
	}
	only("ranks", q.Ranks > 1, "vllm", "sglang")
	only("tp_ranks", q.TPRanks > 1, "sglang")
	only("priority", q.Priority, "sglang")
	only("multiproc", q.Multiproc, "vllm")
	only("sidecar", q.Sidecar, "vllm")
	if q.Ranks < 0 || q.TPRanks < 0 || q.DeadPIDs < 0 || q.Ranks > 1024 || q.TPRanks > 1024 || q.DeadPIDs > 1024 {
		errs = append(errs, errors.New("quirks: ranks, tp_ranks and dead_pids are 0 to 1024"))
	}
	for _, p := range q.Paths {
		if !strings.HasPrefix(p, "/") {
			errs = append(errs, fmt.Errorf("quirks.paths: %q does not begin with /", p))
		}
	}
	for name, v := range q.Extra {
		if _, err := strconv.ParseFloat(v, 64); err != nil {
			errs = append(errs, fmt.Errorf("quirks.extra: %s is %q, not a number", name, v))
		}
	}
	return errors.Join(errs...)
}

// text reports whether anything of the page's text changes.
func (q *Quirks) text() bool {
	return q.Ranks > 1 || q.TPRanks > 1 || q.Priority || q.Undefined || q.NoModel || q.PID || q.DeadPIDs > 0 || len(q.NaN) > 0 ||
		len(q.Rename) > 0 || len(q.Missing) > 0 || len(q.Extra) > 0 || q.Multiproc || q.Sidecar || q.CRLF || q.Cut || q.TwoTypes
}

// apply changes a page.
func (q *Quirks) apply(page []byte) []byte {
	families := parseFamilies(string(page))
	if q.Multiproc {
		families = multiproc(families)
	}
	for i := range families {
		f := &families[i]
		q.ranks(f)
		q.pids(f)
		if q.Priority {
			f.each(func(p point) []point {
				if !p.has("tp_rank") || !ofQueue(f.name) {
					return []point{p}
				}
				part := math.Floor(p.float() / 3)
				return []point{p.with("priority", ""), p.with("priority", "5").set(part), p.with("priority", "None").set(p.float() - part)}
			})
		}
		f.each(func(p point) []point {
			if q.Undefined {
				for _, l := range []string{"model_name", "engine_type"} {
					if p.has(l) {
						p = p.with(l, "undefined")
					}
				}
			}
			if q.NoModel {
				p.labels = slices.DeleteFunc(slices.Clone(p.labels), func(l pair) bool { return l.name == "model_name" })
			}
			if slices.Contains(q.NaN, f.name) {
				p.value = "NaN"
			}
			return []point{p}
		})
	}
	if q.Sidecar {
		for i, n := 0, len(families); i < n; i++ {
			if stem, ok := strings.CutPrefix(families[i].name, "vllm:"); ok {
				c := families[i].clone()
				c.rename("aibrix:" + stem)
				families = append(families, c)
			}
		}
	}
	families = slices.DeleteFunc(families, func(f family) bool { return slices.Contains(q.Missing, f.name) })
	for i := range families {
		if name, ok := q.Rename[families[i].name]; ok {
			families[i].rename(name)
		}
		if q.TwoTypes {
			families[i].head = append(families[i].head, families[i].head...)
		}
	}
	out := appendFamilies(make([]byte, 0, 2*len(page)), families)
	for _, series := range slices.Sorted(mapsKeys(q.Extra)) {
		name, _, _ := strings.Cut(series, "{")
		out = append(out, "# TYPE "+name+" gauge\n"+series+" "+q.Extra[series]+"\n"...)
	}
	if q.CRLF {
		out = []byte(strings.ReplaceAll(string(out), "\n", "\r\n"))
	}
	if q.Cut {
		out = []byte(strings.TrimRight(string(out), "\r\n"))
	}
	return out
}

func mapsKeys(m map[string]string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// each replaces every sample.
func (f *family) each(into func(point) []point) {
	out := make([]point, 0, 2*len(f.samples))
	for _, p := range f.samples {
		out = append(out, into(p)...)
	}
	f.samples = out
}

func (p *point) float() float64 {
	v, _ := strconv.ParseFloat(p.value, 64) // our own text
	return v
}

func (p point) set(v float64) point {
	p.value = string(appendPyFloat(nil, v))
	return p
}

// What several ranks do to a family.
func ofQueue(name string) bool {
	return slices.Contains([]string{
		"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason",
		"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:gen_throughput", "sglang:num_used_tokens", "sglang:kv_used_tokens", "sglang:kv_available_tokens",
	}, name)
}

func ofRatio(name string) bool {
	return slices.Contains([]string{"vllm:kv_cache_usage_perc", "sglang:token_usage", "sglang:full_token_usage"}, name)
}

// ranks splits the family over data-parallel ranks: counts add up to what one
// rank said, ratios differ around it, and what is the same everywhere stays. It
// writes the second rank first, as SGLang does.
func (q *Quirks) ranks(f *family) {
	n, tp := max(q.Ranks, 1), max(q.TPRanks, 1)
	if n == 1 && tp == 1 {
		return
	}
	created := strings.HasSuffix(f.name, "_created")
	f.each(func(p point) []point {
		label := "engine"
		if p.has("tp_rank") {
			label = "dp_rank"
		} else if !p.has("engine") {
			return []point{p}
		}
		var out []point
		for i := range n {
			rank := i
			if i < 2 && n > 1 {
				rank = 1 - i
			}
			one := p
			if n > 1 {
				one = p.with(label, strconv.Itoa(rank))
			}
			switch v := p.float(); {
			case n == 1 || created || math.IsNaN(v):
			case ofRatio(f.name):
				spread := min(v, 1-v) / 2
				if rank == n-1 && n%2 == 1 {
					spread = 0
				} else if rank%2 == 1 {
					spread = -spread
				}
				one = one.set(v + spread)
			case f.kind == "counter" || f.kind == "histogram" || ofQueue(f.name):
				part := math.Floor(v / float64(n))
				if rank == 0 {
					part = v - part*float64(n-1)
				}
				one = one.set(part)
			}
			if label == "engine" {
				out = append(out, one)
				continue
			}
			for t := range tp {
				out = append(out, one.with("tp_rank", strconv.Itoa(rank*tp+t)))
			}
		}
		return out
	})
}

// pids puts a process into the labels of gauges, and leaves those of processes
// that ended.
func (q *Quirks) pids(f *family) {
	if f.kind != "gauge" || strings.HasSuffix(f.name, "_created") {
		return
	}
	f.each(func(p point) []point {
		if q.PID && !p.has("pid") {
			p = p.with("pid", "12163")
		}
		out := []point{p}
		if p.has("pid") {
			for i := range q.DeadPIDs {
				out = append(out, p.with("pid", strconv.Itoa(11000+i)).set(0))
			}
		}
		return out
	})
}

// multiproc is a page that vLLM gathers from several API processes.
func multiproc(families []family) []family {
	families = slices.DeleteFunc(families, func(f family) bool {
		return strings.HasSuffix(f.name, "_created") || strings.HasPrefix(f.name, "python_") || strings.HasPrefix(f.name, "process_")
	})
	for i := range families {
		f := &families[i]
		if f.kind == "histogram" {
			order := func(p point) int {
				switch {
				case strings.HasSuffix(p.name, "_sum"):
					return 0
				case strings.HasSuffix(p.name, "_count"):
					return 2
				}
				return 1
			}
			// By series first: a family may hold several.
			series := func(p point) string {
				var b strings.Builder
				for _, l := range p.labels {
					if l.name != "le" {
						b.WriteString(l.name + "=" + l.value + ",")
					}
				}
				return b.String()
			}
			seen := map[string]int{}
			for _, p := range f.samples {
				if _, ok := seen[series(p)]; !ok {
					seen[series(p)] = len(seen)
				}
			}
			slices.SortStableFunc(f.samples, func(a, b point) int {
				if d := seen[series(a)] - seen[series(b)]; d != 0 {
					return d
				}
				return order(a) - order(b)
			})
		}
		if f.name == "vllm:lora_requests_info" {
			f.each(func(p point) []point { return []point{p.set(2 * p.float())} })
		}
	}
	return families
}
