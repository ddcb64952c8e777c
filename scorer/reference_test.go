package scorer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// The dumb implementation: it works on the description of a world, one formula
// after the other as the documentation states them, collects everything and
// sorts at the end. It shares nothing with the fast one but the description.

type dumb struct {
	world *worldSpec
	eps   []endpointSpec
}

// value is what a policy says of one endpoint. Of two, the one with the smaller
// first unequal rank wins. Score is from 0 to 1, in sums.
type value struct {
	ok    bool
	ranks []float64
	score float64
}

func (d *dumb) metric(i int, m pool.Metric) (float64, bool) {
	e := &d.eps[i]
	v, ok := e.metrics[m]
	return v, ok && e.age <= 5*time.Second && !math.IsNaN(v)
}

func (d *dumb) hit(i int) float64 {
	return math.Max(0, math.Min(float64(min(d.eps[i].holds, d.world.request.blocks)*blockTokens), float64(d.world.request.prompt-1)))
}
func (d *dumb) miss(i int) float64 { return float64(d.world.request.prompt) - d.hit(i) }

func (d *dumb) mean(f func(i int) float64) float64 {
	sum := 0.0
	for i := range d.eps {
		sum += f(i)
	}
	return sum / float64(len(d.eps))
}

func (d *dumb) price(i int) float64 {
	out := 256.0
	if o := d.world.request.output; o >= 0 && o < 256 {
		out = float64(o)
	}
	if room := d.eps[i].kvTokens; room > 0 {
		return (float64(d.world.request.prompt) + out) / float64(room)
	}
	return (float64(d.world.request.prompt) + out) / 131072
}

func (d *dumb) kvUse(i int) float64 {
	if room := d.eps[i].kvTokens; room > 0 {
		return math.Min(1, float64(d.eps[i].tokens)/float64(room))
	}
	if v, ok := d.metric(i, pool.KVCacheUsagePerc); ok {
		return math.Max(0, math.Min(1, v))
	}
	return 0
}

// rates returns each endpoint's reading rate relative to the mean, and the mean.
func (d *dumb) rates() (rel []float64, mean float64) {
	var known []float64
	for i := range d.eps {
		if d.eps[i].readRate > 0 {
			known = append(known, d.eps[i].readRate)
		}
	}
	for _, v := range known {
		mean += v / float64(len(known))
	}
	for i := range d.eps {
		v := 1.0
		if r := d.eps[i].readRate; r > 0 && len(known) > 1 {
			v = r / mean
		}
		if math.Abs(v-1) < 0.25 {
			v = 1
		}
		rel = append(rel, math.Min(8, math.Max(1.0/8, v)))
	}
	return rel, mean
}

// minMax turns costs into scores.
func minMax(values []value) []value {
	low, high := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if v.ok && !math.IsInf(v.ranks[0], 0) {
			low, high = math.Min(low, v.ranks[0]), math.Max(high, v.ranks[0])
		}
	}
	for i := range values {
		v := &values[i]
		switch {
		case !v.ok:
		case math.IsInf(v.ranks[0], 0):
			v.score = 0
			if math.IsInf(low, 0) {
				v.score = 1
			}
		case low == high:
			v.score = 1
		default:
			v.score = (high - v.ranks[0]) / (high - low)
		}
	}
	return values
}

// values are those of one policy.
func (d *dumb) values(name string) []value {
	out := make([]value, len(d.eps))
	cost := func(f func(i int) (float64, bool)) []value {
		for i := range out {
			v, ok := f(i)
			out[i] = value{ok: ok, ranks: []float64{v}}
		}
		return minMax(out)
	}
	costThenRequests := func(f func(i int) float64) []value {
		for i := range out {
			out[i] = value{ok: true, ranks: []float64{f(i), float64(d.eps[i].inFlight)}}
		}
		return minMax(out)
	}
	score := func(f func(i int) (float64, bool)) []value {
		for i := range out {
			v, ok := f(i)
			out[i] = value{ok: ok, ranks: []float64{-v}, score: math.Max(0, math.Min(1, v))}
		}
		return out
	}
	reading := func(m pool.Metric) []value {
		return cost(func(i int) (float64, bool) { return d.metric(i, m) })
	}
	meanP := d.mean(func(i int) float64 { return float64(d.eps[i].prefill) })
	rel, meanRate := d.rates()
	switch name {
	case "least-request":
		return cost(func(i int) (float64, bool) { return float64(d.eps[i].inFlight), true })
	case "slo-least-load":
		return cost(func(i int) (float64, bool) { return d.eps[i].cost, true })
	case "slo-pack-load":
		out = score(func(i int) (float64, bool) {
			return d.eps[i].cost, d.eps[i].cost+d.price(i) <= 1
		})
		if !slices.ContainsFunc(out, func(v value) bool { return v.ok }) {
			return d.values("slo-least-load")
		}
		return out
	case "load-balance":
		var known []float64
		for i := range d.eps {
			if d.eps[i].outputRate > 0 {
				known = append(known, d.eps[i].outputRate)
			}
		}
		for i := range out {
			capacity := d.eps[i].outputRate
			if capacity == 0 {
				capacity = 1
				if len(known) > 0 {
					capacity = 0
					for _, v := range known {
						capacity += v / float64(len(known))
					}
				}
			}
			used, ok := d.metric(i, pool.KVCacheUsagePerc)
			if !ok {
				used = 0
			}
			used = math.Max(0, math.Min(1, used))
			v := float64(d.eps[i].inFlight) / capacity * (1 + 2*used*used)
			if used > 0.9 {
				v = math.Inf(1)
			}
			out[i] = value{ok: true, ranks: []float64{v, used}}
		}
		return minMax(out)
	case "least-kv-cache":
		return reading(pool.KVCacheUsagePerc)
	case "queue":
		return reading(pool.NumRequestsWaiting)
	case "running":
		return reading(pool.NumRequestsRunning)
	case "least-utilization":
		return reading(pool.EngineUtilization)
	case "kv-cache":
		return score(func(i int) (float64, bool) {
			v, ok := d.metric(i, pool.KVCacheUsagePerc)
			return 1 - v, ok
		})
	case "throughput":
		return cost(func(i int) (float64, bool) {
			e := &d.eps[i]
			return 2*e.avgPrompt + e.avgOutput, e.avgPrompt > 0 && e.avgOutput > 0
		})
	case "least-latency":
		prompts, outputs := []float64{}, []float64{}
		for i := range d.eps {
			if v := d.eps[i].avgPrompt; v > 0 {
				prompts = append(prompts, v)
			}
			if v := d.eps[i].avgOutput; v > 0 {
				outputs = append(outputs, v)
			}
		}
		guess := func(known []float64, otherwise float64) float64 {
			if len(known) == 0 {
				return otherwise
			}
			sum := 0.0
			for _, v := range known {
				sum += v
			}
			return sum / float64(len(known))
		}
		return cost(func(i int) (float64, bool) {
			q, ok1 := d.metric(i, pool.RequestQueueTime)
			p, ok2 := d.metric(i, pool.RequestPrefillTime)
			t, ok3 := d.metric(i, pool.RequestDecodeTime)
			e := &d.eps[i]
			if !ok1 || !ok2 || !ok3 || e.avgPrompt == 0 || e.avgOutput == 0 {
				return 0, false
			}
			return q + p/e.avgPrompt*guess(prompts, 10) + t/e.avgOutput*guess(outputs, 100), true
		})
	case "lora-affinity":
		return score(func(i int) (float64, bool) {
			e := &d.eps[i]
			switch {
			case e.loraMax == 0 || e.age > 5*time.Second:
				return 0, false
			case slices.Contains(e.running, testModel):
				return 1, true
			case len(e.running)+len(e.waiting) < e.loraMax:
				return 0.8, true
			case slices.Contains(e.waiting, testModel):
				return 0.6, true
			}
			return 0, true
		})
	case "prefix-cache":
		m := d.mean(func(i int) float64 { return float64(d.eps[i].inFlight) })
		variance := 0.0
		for i := range d.eps {
			variance += math.Pow(float64(d.eps[i].inFlight)-m, 2)
		}
		sigma := 0.0
		if len(d.eps) > 1 {
			sigma = math.Sqrt(variance / float64(len(d.eps)-1))
		}
		for i := range out {
			share := 0.0
			if n := d.world.request.blocks; n > 0 && float64(d.eps[i].inFlight) <= m+math.Max(8, sigma) {
				share = float64(min(d.eps[i].holds, n)) / float64(n)
			}
			out[i] = value{ok: true, ranks: []float64{-share, float64(d.eps[i].inFlight)}, score: share}
		}
		return out
	case "token-load":
		return score(func(i int) (float64, bool) {
			return 1 - math.Min(float64(d.eps[i].prefill)+d.miss(i), 4194304)/4194304, true
		})
	case "prefill-cost":
		return costThenRequests(func(i int) float64 {
			alpha := 1 + 0.5*meanP/8192
			return (float64(d.eps[i].prefill) + alpha*d.miss(i)) / rel[i] * (1 + d.kvUse(i))
		})
	case "expected-ttft":
		rate := 15928.0
		if meanRate > 0 {
			rate = meanRate
		}
		return costThenRequests(func(i int) float64 {
			todo := float64(d.eps[i].prefill) + d.miss(i)
			step, ok := d.metric(i, pool.InterTokenLatency)
			if !ok {
				step = 0.02 * (1 + d.kvUse(i)) / rel[i]
			}
			return todo/(rate*rel[i]) + math.Ceil(todo/8192)*step
		})
	case "slo-headroom":
		return d.headroom()
	case "lmetric":
		return costThenRequests(func(i int) float64 {
			return (float64(d.eps[i].prefill) + d.miss(i)) * float64(d.eps[i].inFlight+1)
		})
	case "preble":
		load := func(i int) float64 { return float64(d.eps[i].prefill + 45*d.eps[i].inFlight) }
		out = costThenRequests(func(i int) float64 { return load(i) + d.miss(i) })
		best := 0
		for i := range d.eps {
			if d.hit(i) > d.hit(best) || d.hit(i) == d.hit(best) && out[i].ranks[0] < out[best].ranks[0] {
				best = i
			}
		}
		hottest := true
		for i := range d.eps {
			hottest = hottest && load(i) <= load(best)
		}
		if d.hit(best) > d.miss(best) && !(hottest && load(best) > 2*d.mean(load) && len(d.eps) > 1) {
			out[best].ranks[0] = -1
		}
		return minMax(out)
	}
	return out // least-busy-time: nobody can be scored
}

// winners are those that a policy may pick.
func (d *dumb) winners(parts []Part) (set map[int]bool, random bool) {
	values := make([]value, len(d.eps))
	if len(parts) == 1 {
		values = d.values(parts[0].Name)
	} else {
		for _, p := range parts {
			one := d.values(p.Name)
			sum, n := 0.0, 0.0
			for _, v := range one {
				if v.ok {
					sum += v.score
					n++
				}
			}
			if n == 0 {
				continue
			}
			for i, v := range one {
				if !v.ok {
					v.score = sum / n
				}
				values[i].ok = true
				values[i].score += p.Weight * v.score
			}
		}
		for i := range values {
			values[i].ranks = []float64{-values[i].score}
		}
	}
	const close = 1e-9 // floats added in another order
	less := func(a, b value) bool {
		for i := range a.ranks {
			if a.ranks[i] < b.ranks[i]-close*(1+math.Abs(b.ranks[i])) {
				return true
			}
			if a.ranks[i] > b.ranks[i]+close*(1+math.Abs(b.ranks[i])) {
				return false
			}
		}
		return false
	}
	set = map[int]bool{}
	for i, v := range values {
		beaten := !v.ok
		for _, other := range values {
			beaten = beaten || other.ok && less(other, v)
		}
		if !beaten {
			set[i] = true
		}
	}
	if len(set) == 0 {
		for i := range d.eps {
			set[i] = true
		}
		return set, true
	}
	return set, false
}

// randomWorld draws few different values, so that there are many ties.
func randomWorld(rng *rand.Rand) *worldSpec {
	ws := &worldSpec{request: requestSpec{
		prompt: rng.IntN(2000), output: rng.IntN(600) - 1, blocks: rng.IntN(12),
		goals: Goals{time.Duration(rng.IntN(4)) * 150 * time.Millisecond, time.Duration(rng.IntN(4)) * 8 * time.Millisecond},
	}}
	maybe := func() bool { return rng.IntN(3) > 0 }
	for i := range 1 + rng.IntN(9) {
		e := endpointSpec{name: fmt.Sprint(i), inFlight: rng.IntN(4) * rng.IntN(7)}
		if e.inFlight > 0 {
			e.prefill, e.tokens, e.cost = 100*rng.IntN(8), 500*rng.IntN(9), float64(rng.IntN(6))/5
		}
		e.outputRate, e.readRate = float64(100*rng.IntN(4)), float64(rng.IntN(3)*(500+rng.IntN(6000)))
		e.pace = time.Duration(rng.IntN(4)) * 10 * time.Millisecond
		if maybe() {
			e.metrics = map[pool.Metric]float64{}
			for _, m := range []pool.Metric{
				pool.KVCacheUsagePerc, pool.NumRequestsWaiting, pool.NumRequestsRunning, pool.EngineUtilization,
				pool.RequestQueueTime, pool.RequestPrefillTime, pool.RequestDecodeTime, pool.InterTokenLatency,
				pool.TimeToFirstToken, pool.RequestRate, pool.KVCacheHitRate,
			} {
				if maybe() {
					e.metrics[m] = float64(rng.IntN(5)) / 4
				}
				if rng.IntN(20) == 0 {
					e.metrics[m] = math.NaN()
				}
			}
			if maybe() {
				e.metrics[pool.PromptTokensPerRequest] = float64(1000 * rng.IntN(3))
			}
			e.age = time.Duration(rng.IntN(7)) * time.Second
			if maybe() {
				e.loraMax = 1 + rng.IntN(3)
				e.running, e.waiting = adapters(rng), adapters(rng)
			}
			if maybe() {
				e.kvTokens = 1000 * (1 + rng.IntN(10))
			}
		}
		if maybe() {
			e.avgPrompt = float64(100 * rng.IntN(4))
		}
		if maybe() {
			e.avgOutput = float64(100 * rng.IntN(4))
		}
		e.holds = rng.IntN(14)
		ws.endpoints = append(ws.endpoints, e)
	}
	return ws
}

func adapters(rng *rand.Rand) []string {
	var names []string
	for _, name := range []string{testModel, "x", "y"} {
		if rng.IntN(3) == 0 {
			names = append(names, name)
		}
	}
	return names
}

// TestAgainstDumb compares both on random worlds, for every policy whose rule
// leaves nothing to chance but ties, and for random sums of them.
func TestAgainstDumb(t *testing.T) {
	var names []string
	for _, name := range Names() {
		switch name {
		case "random", "power-of-two", "session-affinity", "prefix-hrw": // tests of their own
		default:
			names = append(names, name)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	rounds := 600
	if testing.Short() {
		rounds = 200
	}
	for round := range rounds {
		ws := randomWorld(rng)
		in := ws.build(t)
		check := func(parts []Part) {
			t.Helper()
			p, problems := Compile(parts)
			if len(problems) > 0 {
				t.Fatal(problems)
			}
			d := dumb{ws, ws.endpoints}
			want, random := d.winners(parts)
			seen := map[int]bool{}
			for range 8 {
				in.Seed = rng.Uint64()
				c := p.Pick(in)
				seen[int(c.Index)] = true
				if !want[int(c.Index)] || (c.Fallback == FallbackRandom) != random {
					t.Fatalf("round %d: %s picked %d (%v), want one of %v (random %v)\nrequest %+v\n%s",
						round, p, c.Index, c.Fallback, want, random, ws.request, describe(ws))
				}
				if full := c.Fallback == FallbackFull; full && p.String() != "slo-pack-load" {
					t.Fatalf("%s: %v", p, c.Fallback)
				}
			}
		}
		for _, name := range names {
			check([]Part{{Name: name, Weight: 1}})
		}
		var parts []Part
		for _, at := range rng.Perm(len(names))[:2+rng.IntN(4)] {
			if names[at] != "slo-pack-load" {
				parts = append(parts, Part{Name: names[at], Weight: float64(1 + rng.IntN(5))})
			}
		}
		if len(parts) > 1 {
			check(parts)
		}
	}
}

func describe(ws *worldSpec) string {
	out := ""
	for i := range ws.endpoints {
		out += fmt.Sprintf("%+v\n", ws.endpoints[i])
	}
	return out
}
