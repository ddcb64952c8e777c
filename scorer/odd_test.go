package scorer

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// TestOddWorlds asks every policy about endpoints and requests that nobody should
// have: there is a choice, what it says is within bounds and can be written down,
// and what was reserved is given back.
func TestOddWorlds(t *testing.T) {
	odd := []float64{0, 1, 0.5, math.SmallestNonzeroFloat64, 1e-300, 1e300, math.MaxFloat64, math.NaN()}
	rng := rand.New(rand.NewPCG(6, 6))
	for round := range 60 {
		ws := &worldSpec{
			request: requestSpec{
				prompt: []int{0, 1, 63, 64, 65, 1 << 31, 1 << 40}[rng.IntN(7)], output: []int{-1, 0, 1 << 40}[rng.IntN(3)],
				blocks: []int{0, 1, 2, 200}[rng.IntN(4)], session: uint64(rng.IntN(2)),
				goals: Goals{time.Duration(rng.IntN(3)), time.Duration(rng.IntN(2)) * 1000 * time.Hour},
			},
			guards: Guards{Doubted: true, Wedged: true, Pushback: true, OverloadVeto: true, WarmUp: true, SlowStart: time.Second},
		}
		for range 1 + rng.IntN(7) {
			e := endpointSpec{
				inFlight: rng.IntN(3), holds: rng.IntN(201), kvTokens: rng.IntN(2), wedged: rng.IntN(4) == 0, pushedBack: rng.IntN(3) == 0,
				loraMax: rng.IntN(2), metrics: map[pool.Metric]float64{}, avgPrompt: odd[rng.IntN(7)], avgOutput: odd[rng.IntN(7)],
			}
			for m := range pool.NumMetrics {
				if rng.IntN(4) > 0 {
					e.metrics[m] = odd[rng.IntN(len(odd))]
				}
			}
			ws.endpoints = append(ws.endpoints, e)
		}
		in := ws.build(t)
		in.Pins = NewPins()
		in.Request.BlockTokens = []float64{64, 0, 1e300, math.MaxFloat64}[rng.IntN(4)]
		for _, name := range everyPolicy() {
			p := must(t, name)
			in.Seed, in.Explain = rng.Uint64(), new(Explanation)
			before := in.Snapshot.Live(0).InFlight()
			c := p.PickAndReserve(in)
			if c.Index < 0 || int(c.Index) >= len(ws.endpoints) || c.Cached < 0 || c.Cached > max(0, in.Request.Prompt-1) {
				t.Fatalf("round %d: %s chose %+v\nrequest %+v\n%s", round, name, c, ws.request, describe(ws))
			}
			text, err := json.Marshal(in.Explain)
			if err != nil {
				t.Fatalf("round %d: %s: %v\nrequest %+v\n%s", round, name, err, ws.request, describe(ws))
			}
			for _, candidate := range in.Explain.Candidates {
				for part, score := range candidate.Scores {
					if !(score >= 0 && score <= 1) {
						t.Errorf("round %d: %s: %s scores %v: %s", round, name, part, score, text)
					}
				}
			}
			if !strings.Contains(string(text), `"winner":"10.0.0.`) {
				t.Errorf("round %d: %s: no winner: %s", round, name, text)
			}
			c.Reservation.Release(now, true)
			if n := in.Snapshot.Live(0).InFlight(); n != before {
				t.Fatalf("round %d: %s left %d in flight, there were %d", round, name, n, before)
			}
		}
	}
}
