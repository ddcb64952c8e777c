package simulate

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// forecaster notes at each pick what was predicted for the endpoint that won: by
// all that is known, and by pages alone, as an Envoy does that has sent nothing.
type forecaster struct {
	*shunt
	passive *shunt
	seen    map[*job]forecast
}

type forecast struct{ own, pages, between float64 } // seconds

func (f *forecaster) fleet(now time.Time, ready []bool) {
	f.shunt.fleet(now, ready)
	f.passive.fleet(now, ready)
}

func (f *forecaster) scraped(now time.Time, endpoint int, p page) {
	f.shunt.scraped(now, endpoint, p)
	f.passive.scraped(now, endpoint, p)
}

func (f *forecaster) pick(now time.Time, j *job) int {
	before := make([]int64, len(f.lives))
	for i, l := range f.lives {
		if l != nil {
			before[i] = l.Prefill()
		}
	}
	i := f.shunt.pick(now, j)
	uncached := float64(f.lives[i].Prefill() - before[i])
	f.passive.publish(now)
	whole := !f.policy.NeedsPrefix()
	known := f.holder.Load().Predictor(model, whole, now)
	pages := f.passive.holder.Load().Predictor(model, whole, now)
	var latency, byPages pool.Latency
	known.Predict(f.place[i], &latency)
	pages.Predict(f.passive.place[i], &byPages)
	f.seen[j] = forecast{latency.TTFT(0), byPages.TTFT(uncached), latency.Between} // its own prompt is ahead already
	return i
}

// accuracy is how predictions compare with what was seen.
type accuracy struct {
	n, unknown int
	median     float64 // of |predicted/seen − 1|
	ratio      float64 // of the means
	within     float64 // share that is off by less than a factor of 2
}

func compare(predicted, seen []float64) accuracy {
	var a accuracy
	var off []float64
	sumP, sumS, near := 0.0, 0.0, 0
	for i, p := range predicted {
		if p != p {
			a.unknown++
			continue
		}
		a.n++
		off = append(off, math.Abs(p/seen[i]-1))
		sumP, sumS = sumP+p, sumS+seen[i]
		if p < 2*seen[i] && 2*p > seen[i] {
			near++
		}
	}
	if a.n == 0 {
		return a
	}
	slices.Sort(off)
	a.median, a.ratio, a.within = off[len(off)/2], sumP/sumS, float64(near)/float64(a.n)
	return a
}

func (a accuracy) String() string {
	return fmt.Sprintf("median error %.0f %%, mean predicted/seen %.2f, %.0f %% within a factor of 2, %d of %d unknown",
		100*a.median, a.ratio, 100*a.within, a.unknown, a.n+a.unknown)
}

// forecasts runs a workload and compares.
func forecasts(t *testing.T, workload, policy string, speed float64, requests int) (own, pages, between accuracy) {
	t.Helper()
	w, err := Generate(workload, 4, requests, 1)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Endpoints: 4}
	if err := cfg.setDefaults(); err != nil {
		t.Fatal(err)
	}
	s, err := newWorld(w.WithSpeed(speed), policy, cfg)
	if err != nil {
		t.Fatal(err)
	}
	compiled, err := parsePolicy("random")
	if err != nil {
		t.Fatal(err)
	}
	f := &forecaster{shunt: s.envoys[0].picker.(*shunt), passive: newShunt(compiled, s), seen: map[*job]forecast{}}
	f.passive.fleet(epoch, s.envoys[0].ready)
	s.envoys[0].picker = f
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	var predicted [3][]float64
	var seen, paces []float64
	for i := range s.jobs {
		j := &s.jobs[i]
		if j.state != completed || i < requests/10 { // the first are what the rest is predicted by
			continue
		}
		was := f.seen[j]
		predicted[0], predicted[1] = append(predicted[0], was.own), append(predicted[1], was.pages)
		seen = append(seen, (j.first - j.arrival).Seconds())
		if j.seq.Output >= sampledTokens {
			predicted[2] = append(predicted[2], was.between)
			paces = append(paces, (j.end-j.first).Seconds()/float64(j.seq.Output-1))
		}
	}
	return compare(predicted[0], seen), compare(predicted[1], seen), compare(predicted[2], paces)
}

// sampledTokens is the shortest answer whose pace says something.
const sampledTokens = 8

// TestPredictionsAgainstSimulator holds docs/slo.md to what it says: how far
// predictions are from what engines do then. Beyond the cliff queues grow without
// end, and an answer's pace is another at its end than at its beginning.
func TestPredictionsAgainstSimulator(t *testing.T) {
	type bound struct {
		off       float64 // the most that the median error may be
		low, high float64 // of the means
		near      float64 // the least share within a factor of 2
	}
	type bounds struct{ own, between, pages bound }
	sustained := bounds{bound{0.2, 0.9, 1.1, 0.9}, bound{0.4, 0.75, 1.25, 0.8}, bound{0.6, 0.7, 1.3, 0.7}}
	blind := bounds{bound{0.4, 0.9, 1.1, 0.7}, bound{0.4, 0.75, 1.25, 0.8}, bound{0.6, 0.7, 1.3, 0.7}}
	beyond := bounds{bound{0.3, 0.65, 1.1, 0.85}, bound{0.85, 0.65, 2.2, 0.3}, bound{0.85, 0.15, 2, 0.05}}
	for _, c := range []struct {
		workload, policy string
		speed            float64
		want             bounds
	}{
		{"shared-prefix", "prefill-cost", 8, sustained},
		{"multi-turn", "prefill-cost", 1, sustained},
		{"multi-turn", "prefill-cost", 5, sustained},
		{"bursts", "prefill-cost", 1, sustained},
		{"long-context", "prefill-cost", 1, sustained},
		{"slow-pod", "prefill-cost", 3, sustained},
		{"multi-turn", "least-request", 1, blind}, // it looks no prefixes up
		{"bursts", "prefill-cost", 5, beyond},
		{"long-context", "prefill-cost", 5, beyond},
	} {
		own, pages, between := forecasts(t, c.workload, c.policy, c.speed, 1000)
		for _, one := range []struct {
			what string
			a    accuracy
			b    bound
		}{{"first token", own, c.want.own}, {"each token", between, c.want.between}, {"first token by pages", pages, c.want.pages}} {
			t.Logf("%s %s %g, %s: %v", c.workload, c.policy, c.speed, one.what, one.a)
			if a, b := one.a, one.b; a.median > b.off || a.ratio < b.low || a.ratio > b.high || a.within < b.near || a.n < 500 {
				t.Errorf("that is more than %.0f %%, outside %.2f to %.2f, or less than %.0f %%", 100*b.off, b.low, b.high, 100*b.near)
			}
		}
	}
}
