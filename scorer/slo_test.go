package scorer

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// latency is what documentation says of one endpoint of a described world: the
// seconds until the first token and from token to token, NaN for unknown, and the
// line by which the first token goes.
type latency struct {
	first, pace, base, perToken, tokens float64
}

func (d *dumb) latency(i int, blind bool) latency {
	e := &d.eps[i]
	read := func(m pool.Metric) float64 {
		if v, ok := d.metric(i, m); ok {
			return v
		}
		return math.NaN()
	}
	l := latency{first: math.NaN(), pace: math.NaN(), base: math.NaN(), perToken: math.NaN()}
	l.tokens = float64(e.prefill) + d.miss(i)
	if blind {
		l.tokens = float64(e.prefill + d.world.request.prompt)
	}
	busy := read(pool.NumRequestsRunning) > 0 || read(pool.NumRequestsWaiting) > 0 || read(pool.RequestRate) > 0
	if e.pace > 0 {
		l.pace = e.pace.Seconds()
	} else if busy {
		l.pace = read(pool.InterTokenLatency)
	}
	if e.readRate > 0 { // one first token was seen, of as much as it reads in 10 s
		l.base, l.perToken = 0, 1/e.readRate
		l.first = l.tokens / e.readRate
		return l
	}
	if !busy {
		return l
	}
	mean := read(pool.PromptTokensPerRequest)
	if hits := read(pool.KVCacheHitRate); hits > 0 && hits < 1 && !blind {
		mean *= 1 - hits
	}
	prefill, step := read(pool.RequestPrefillTime), read(pool.InterTokenLatency)
	if math.IsNaN(mean) || mean < 512 || math.IsNaN(prefill) {
		most := 512.0
		if mean >= 512 {
			most = 2 * mean
		}
		if l.tokens <= most {
			l.base, l.perToken, l.first = read(pool.TimeToFirstToken), 0, read(pool.TimeToFirstToken)
		}
		return l
	}
	if math.IsNaN(step) {
		step = 0
	}
	l.perToken = math.Max(0, prefill-step) / mean
	l.base = math.Min(prefill, step)
	waiting, running := read(pool.NumRequestsWaiting), read(pool.NumRequestsRunning)
	if math.IsNaN(running) {
		running = 0
	}
	if waiting > 0 {
		l.tokens += math.Max(0, math.Min(waiting, running+waiting-float64(e.inFlight))) * mean
	}
	l.first = l.base + l.perToken*l.tokens
	return l
}

// headroom is slo-headroom with its default parameters.
func (d *dumb) headroom() []value {
	n := len(d.eps)
	all := make([]latency, n)
	var bases, prices, paces []float64
	for i := range all {
		all[i] = d.latency(i, d.world.request.blocks == 0)
		if !math.IsNaN(all[i].first) {
			bases, prices = append(bases, all[i].base), append(prices, all[i].perToken)
		}
		if !math.IsNaN(all[i].pace) {
			paces = append(paces, all[i].pace)
		}
	}
	mean := func(list []float64) float64 {
		sum := 0.0
		for _, v := range list {
			sum += v
		}
		return sum / float64(len(list))
	}
	goals := d.world.request.goals
	byFirst, byPace := goals.TTFT > 0 || goals.TPOT == 0, goals.TPOT > 0 || goals.TTFT == 0
	byFirst, byPace = byFirst && len(bases) > 0, byPace && len(paces) > 0
	out := make([]value, n)
	if !byFirst && !byPace {
		return out
	}
	tiers := make([]string, n)
	for i := range all {
		l := &all[i]
		if math.IsNaN(l.first) && len(bases) > 0 {
			l.first = mean(bases) + mean(prices)*l.tokens
		}
		if math.IsNaN(l.pace) && len(paces) > 0 {
			l.pace = mean(paces)
		}
		late := byFirst && l.first > goals.TTFT.Seconds()
		slow := byPace && l.pace > goals.TPOT.Seconds()
		switch {
		case goals == Goals{}, !late && !slow:
			tiers[i] = "keeps"
		case d.eps[i].inFlight == 0:
			tiers[i] = "idle"
		case !late:
			tiers[i] = "slow"
		case !slow:
			tiers[i] = "late"
		default:
			tiers[i] = "both"
		}
	}
	floors := map[string]float64{"keeps": 0.5, "idle": 0.375, "slow": 0.25, "late": 0.125, "both": 0}
	for i := range all {
		earliness := func(of func(l latency) float64) (float64, bool) {
			low, high := math.Inf(1), math.Inf(-1)
			for j := range all {
				if tiers[j] == tiers[i] {
					low, high = math.Min(low, of(all[j])), math.Max(high, of(all[j]))
				}
			}
			return (high - of(all[i])) / (high - low), high > low
		}
		sum, weight := 0.0, 0.0
		if v, ok := earliness(func(l latency) float64 { return l.first }); ok && byFirst {
			sum, weight = sum+0.8*v, weight+0.8
		}
		if v, ok := earliness(func(l latency) float64 { return l.pace }); ok && byPace {
			sum, weight = sum+0.2*v, weight+0.2
		}
		early := 1.0
		if weight > 0 {
			early = sum / weight
		}
		score := floors[tiers[i]] + 0.8*0.125*early
		switch {
		case goals == Goals{}:
			score = early
		case tiers[i] == "keeps":
			score = 0.5 + 0.5*early
		}
		out[i] = value{ok: true, ranks: []float64{-score, float64(d.eps[i].inFlight)}, score: score}
	}
	return out
}

// TestAdmissionAgainstDumb compares what goals leave of the candidates on random
// worlds.
func TestAdmissionAgainstDumb(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	seen := map[SLOOutcome]int{}
	for round := range 2000 {
		ws := randomWorld(rng)
		ws.admission = Admission(rng.IntN(3))
		in := ws.build(t)
		d := dumb{ws, ws.endpoints}
		name := []string{"least-request", "prefill-cost"}[rng.IntN(2)]
		p := must(t, name)
		var keep, all []int
		goals := ws.request.goals
		for i := range ws.endpoints {
			l := d.latency(i, name == "least-request" || ws.request.blocks == 0)
			all = append(all, i)
			if !(goals.TTFT > 0 && l.first > goals.TTFT.Seconds()) && !(goals.TPOT > 0 && l.pace > goals.TPOT.Seconds()) {
				keep = append(keep, i)
			}
		}
		want := SLONarrowed
		switch {
		case ws.admission == AdmitAny || goals == Goals{}:
			want, keep = SLONone, all
		case len(keep) == len(all):
			want = SLOKept
		case len(keep) == 0 && ws.admission == AdmitOnly:
			want = SLORefused
		case len(keep) == 0:
			want, keep = SLOMissed, all
		}
		seen[want]++
		for range 4 {
			in.Seed = rng.Uint64()
			c := p.Pick(in)
			if c.SLO != want || (c.Index < 0) != (want == SLORefused) || c.Index >= 0 && !slices.Contains(keep, int(c.Index)) ||
				c.Guarded.Has(GuardSLO) != (want == SLONarrowed) {
				t.Fatalf("round %d: %s picked %d, %v, guards %b; want one of %v, %v\nrequest %+v\n%s",
					round, p, c.Index, c.SLO, c.Guarded, keep, want, ws.request, describe(ws))
			}
		}
	}
	for o := range NumSLOOutcomes {
		if seen[o] < 20 {
			t.Errorf("%v came %d times", o, seen[o])
		}
	}
}

// TestRefusalReservesNothing: a refused request leaves no trace on any endpoint.
func TestRefusalReservesNothing(t *testing.T) {
	ws := &worldSpec{
		request:   requestSpec{prompt: 1000, output: -1, blocks: 10, goals: Goals{TTFT: 10 * time.Millisecond}},
		endpoints: []endpointSpec{{name: "a", readRate: 1000}, {name: "b", readRate: 2000}},
		admission: AdmitOnly,
	}
	in := ws.build(t)
	before := []uint64{in.Snapshot.Live(0).Picks(), in.Snapshot.Live(1).Picks()}
	var why Explanation
	in.Explain = &why
	c := must(t, "prefill-cost").PickAndReserve(in)
	if c.SLO != SLORefused || c.Index != -1 || c.Reservation.Live() != nil {
		t.Errorf("%+v", c)
	}
	for i, n := range before {
		if l := in.Snapshot.Live(int32(i)); l.Picks() != n || l.InFlight() != 0 || in.Index.Len(l) != 0 {
			t.Errorf("endpoint %d: %d picks, %d in flight", i, l.Picks(), l.InFlight())
		}
	}
	want := []string{"slo: first token after 1s, wanted after 10ms", "slo: first token after 500ms, wanted after 10ms"}
	if why.Winner != "" || len(why.Candidates) != 2 || why.Candidates[0].Skipped != want[0] || why.Candidates[1].Skipped != want[1] {
		t.Errorf("explained as %+v", why)
	}
}
