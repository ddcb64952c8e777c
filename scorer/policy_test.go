package scorer

import (
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

var now = time.Unix(1000, 0)

// TestBurstSpreads sends equal requests from several goroutines, which release
// none: the counts of equal endpoints may differ by one.
func TestBurstSpreads(t *testing.T) {
	const workers, each, endpoints = 4, 1000, 8
	in := (&worldSpec{endpoints: make([]endpointSpec, endpoints)}).build(t)
	s := in.Snapshot
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			in := *in
			for i := range each {
				in.Seed = uint64(w*each + i)
				LeastRequest().PickAndReserve(&in)
			}
		})
	}
	wg.Wait()
	lowest, highest, sum := int64(math.MaxInt64), int64(0), int64(0)
	for i := range s.Endpoints {
		n := s.Endpoints[i].Live.InFlight()
		lowest, highest, sum = min(lowest, n), max(highest, n), sum+n
	}
	if sum != workers*each || highest-lowest > 1 {
		t.Fatalf("in flight from %d to %d, %d in all; want %d within one", lowest, highest, sum, workers*each)
	}
}

// overtaking is another worker that takes a slot of the winner between the pick
// and the reservation, a number of times.
type overtaking struct {
	s     *pool.Snapshot
	times int
	took  map[int32]int
}

func (o *overtaking) Full(i int32, extra int64) bool {
	if extra == 0 && o.times > 0 {
		o.times--
		o.took[i]++
		o.s.Live(i).Reserve(pool.Load{}, now)
	}
	return false
}

// TestPickedAnew: who is overtaken looks again, under every policy that reads
// what a reservation changes.
func TestPickedAnew(t *testing.T) {
	for _, name := range []string{"least-request", "lmetric", "prefix-cache", "least-request:1,queue:1"} {
		for times := range 3 {
			in := (&worldSpec{endpoints: make([]endpointSpec, 3), request: requestSpec{prompt: 100}}).build(t)
			o := &overtaking{in.Snapshot, times, map[int32]int{}}
			in.Admit = o
			c := must(t, name).PickAndReserve(in)
			if n := in.Snapshot.Live(c.Index).InFlight(); n != 1 || o.took[c.Index] != 0 {
				t.Errorf("%s, overtaken %d times: %d in flight where it went", name, times, n)
			}
		}
	}
	// Nobody looks for ever.
	in := (&worldSpec{endpoints: make([]endpointSpec, 2)}).build(t)
	in.Admit = &overtaking{in.Snapshot, 1 << 30, map[int32]int{}}
	if c := LeastRequest().PickAndReserve(in); c.Reservation.Live() == nil {
		t.Error("nothing reserved")
	}
}

func must(tb testing.TB, text string) *Policy {
	tb.Helper()
	p, err := Parse(text)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func TestParse(t *testing.T) {
	for _, name := range Names() {
		p, err := Parse(name)
		if err != nil || p.String() != name || Labels()[p.LabelIndex()] != name {
			t.Errorf("Parse(%q) = %v, %v", name, p, err)
		}
	}
	for text, want := range map[string]string{
		"prefix-cache-aware":                   "prefix-cache",
		"prefix-cache:2,least-request:1":       "prefix-cache:2,least-request:1",
		" queue:2 , kv-cache: 2, prefix-cache": "queue:2,kv-cache:2,prefix-cache:1",
		"least-request,random:0":               "least-request",
	} {
		p, err := Parse(text)
		if err != nil || p.String() != want {
			t.Errorf("Parse(%q) = %v, %v", text, p, err)
			continue
		}
		if label := Labels()[p.LabelIndex()]; label != want && (label != "weighted" || !strings.Contains(want, ",")) {
			t.Errorf("%q counts as %s", text, label)
		}
	}
	for text, want := range map[string]string{
		"round-robin":                     `unknown policy "round-robin", valid: random, `,
		"":                                `unknown policy "", valid: random, `,
		"least-request,":                  `unknown policy ""`,
		"least-request:x":                 `"x" is not a weight`,
		"least-request:-1":                `"-1" is not a weight`,
		"least-request:1:2":               `"1:2" is not a weight`,
		"least-request:1000001":           `is not a weight`,
		"least-request:0":                 "no part has a weight above 0",
		"queue,queue":                     "queue is given twice",
		"prefix-cache,prefix-cache-aware": "prefix-cache is given twice",
		"slo-pack-load:1,queue:1":         "slo-pack-load stands alone",
		"power-of-two,queue":              "power-of-two stands alone",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Parse(%q): %v, want %s", text, err, want)
		}
	}
}

func TestCompile(t *testing.T) {
	p, problems := Compile([]Part{{Name: "load-balance", Weight: 1.5, Params: map[string]string{"queuedWeight": "1", "kvCriticalFree": "0.2"}}, {Name: "prefill-cost", Weight: 1, Params: map[string]string{"kv": "false"}}})
	if len(problems) > 0 || p.parts[0].p != [maxParams]float64{1, 2, 0.2} || p.parts[1].p[2] != 0 || p.parts[1].p[3] != 1 || p.String() != "load-balance:1.5,prefill-cost:1" {
		t.Errorf("%+v, %v", p, problems)
	}
	_, problems = Compile([]Part{
		{Name: "load-balance", Weight: 1, Params: map[string]string{"alpha": "1", "kvCriticalFree": "2"}},
		{Name: "fastest", Weight: 1},
		{Name: "prefill-cost", Weight: -1, Params: map[string]string{"kv": "1"}},
		{Name: "queue", Weight: 1, Params: map[string]string{"x": "1"}},
	})
	for i, want := range []Problem{
		{"[0].params.alpha", "is no parameter of load-balance; valid: queuedWeight, kvPressureAlpha, kvCriticalFree"},
		{"[0].params.kvCriticalFree", `is "2": a number from 0 to 1 is wanted`},
		{"[1].policy", `unknown policy "fastest"`},
		{"[2].weight", "is -1: 0 to 1000000 is wanted"},
		{"[2].params.kv", `is "1": true or false is wanted`},
		{"[3].params.x", "is no parameter of queue; it has none"},
	} {
		if i >= len(problems) || problems[i].Field != want.Field || !strings.HasPrefix(problems[i].Message, want.Message) {
			t.Fatalf("problem %d of %+v, want %+v", i, problems, want)
		}
	}
	many := make([]Part, 0, maxParts+1)
	for _, name := range Names() {
		if k, _ := kindOf(name); !kinds[k].alone && len(many) <= maxParts {
			many = append(many, Part{Name: name, Weight: 1})
		}
	}
	if _, problems := Compile(many); len(problems) != 1 || !strings.Contains(problems[0].Message, "8 are the limit") {
		t.Errorf("%v", problems)
	}
	if _, problems := Compile(nil); len(problems) != 1 {
		t.Errorf("%v", problems)
	}
	for k := range kinds {
		if len(kinds[k].params) > maxParams {
			t.Errorf("%s has %d parameters", kinds[k].name, len(kinds[k].params))
		}
		for _, def := range kinds[k].params {
			if def.value < def.least || def.value > def.most {
				t.Errorf("%s: the default of %s is out of its range", kinds[k].name, def.name)
			}
		}
	}
}
