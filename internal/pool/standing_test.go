package pool

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestStandingFollowsReadings: a snapshot made by changes says the same of its
// endpoints as one made anew, and the one before is as it was.
func TestStandingFollowsReadings(t *testing.T) {
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 9))
		draw := func(at time.Time) *Metrics {
			if rng.IntN(5) == 0 {
				return nil
			}
			m := &Metrics{Taken: at, BlockSize: 16 * rng.IntN(3), NumBlocks: 100 * rng.IntN(3)}
			m.Set(KVCacheUsagePerc, float64(rng.IntN(21))/20)
			m.Set(NumRequestsWaiting, float64(rng.IntN(40)))
			if rng.IntN(3) > 0 {
				m.LoRA.Max = rng.IntN(9)
				all := slices.Clone(names)
				rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
				n := rng.IntN(len(all))
				m.LoRA.Running, m.LoRA.Waiting = all[:n/2], all[n/2:n]
			}
			return m
		}
		var eps []Endpoint
		var read []*Metrics
		for i := range 6 {
			eps = append(eps, ep(i+1, "m"))
			read = append(read, draw(start))
		}
		s := NewSnapshot(Input{Now: start, StaleAfter: 5 * time.Second, Endpoints: slices.Clone(eps), Metrics: slices.Clone(read)})
		for round := range 8 {
			now := start.Add(time.Duration(round+1) * time.Second)
			before := NewSnapshot(Input{Now: start, StaleAfter: 5 * time.Second, Endpoints: slices.Clone(eps), Metrics: slices.Clone(read)})
			var changes []Change
			for range rng.IntN(3) {
				c := Change{int32(rng.IntN(len(eps))), draw(now)}
				changes = append(changes, c)
				read[c.Index] = c.Metrics
			}
			next := s.WithReadings(now, uint64(round), changes)
			want := NewSnapshot(Input{Now: now, StaleAfter: 5 * time.Second, Endpoints: slices.Clone(eps), Metrics: slices.Clone(read)})
			same := func(got, want *Snapshot, at time.Time) {
				t.Helper()
				for i := range int32(len(eps)) {
					if got.KVTokens(i) != want.KVTokens(i) || got.Overloaded(i, at) != want.Overloaded(i, at) || got.Live(i) != want.Live(i) {
						t.Fatalf("seed %d, round %d, endpoint %d: %v %v, want %v %v", seed, round, i,
							got.KVTokens(i), got.Overloaded(i, at), want.KVTokens(i), want.Overloaded(i, at))
					}
					for _, name := range names {
						g, w := got.Adapters(name, at), want.Adapters(name, at)
						if g.At(i) != w.At(i) || w.At(i) != dumbAdapter(want, i, name, at) {
							t.Fatalf("seed %d, round %d, adapter %s at %d: %v, want %v, plainly %v", seed, round, name, i, g.At(i), w.At(i), dumbAdapter(want, i, name, at))
						}
					}
				}
			}
			for _, age := range []time.Duration{0, 3 * time.Second, time.Minute} {
				same(next, want, now.Add(age))
			}
			same(s, before, now)
			s = next
		}
	}
}

// dumbAdapter says how an adapter stands from the lists themselves.
func dumbAdapter(s *Snapshot, i int32, name string, now time.Time) AdapterState {
	m := s.Metrics(i)
	switch {
	case m == nil || now.Sub(m.Taken) > s.StaleAfter || m.LoRA.Max == 0 && len(m.LoRA.Running)+len(m.LoRA.Waiting) == 0:
		return AdapterUnknown
	case slices.Contains(m.LoRA.Running, name):
		return AdapterRunning
	case len(m.LoRA.Running)+len(m.LoRA.Waiting) < m.LoRA.Max:
		return AdapterRoom
	case slices.Contains(m.LoRA.Waiting, name):
		return AdapterWaiting
	}
	return AdapterNone
}

func TestSlots(t *testing.T) {
	var s Slots
	s.Keep(3)
	s.Keep(0)
	if a, b, c := s.Take(), s.Take(), s.Take(); a != 1 || b != 2 || c != 4 {
		t.Errorf("got %d, %d, %d", a, b, c)
	}
	s.Give(2)
	s.Give(0)
	s.Give(99)
	if a, b := s.Take(), s.Take(); a != 2 || b != 5 {
		t.Errorf("got %d, %d", a, b)
	}
}

func TestTroubled(t *testing.T) {
	var in Input
	for i := range 3 {
		in.Endpoints = append(in.Endpoints, ep(i+1, "m"))
	}
	s := NewSnapshot(in)
	all := s.All().Index
	at := start.Add(time.Hour)
	if s.Troubled(all, at) {
		t.Error("idle endpoints")
	}
	r := s.Live(1).Reserve(Load{Talks: true}, at)
	if s.Troubled(all, at.Add(3*time.Second)) || !s.Troubled(all, at.Add(3*time.Second+time.Millisecond)) {
		t.Error("silence is not told at its bound")
	}
	r.Release(at, true)
	if s.Troubled(all, at.Add(time.Minute)) {
		t.Error("silence of one without work")
	}
	s.Live(2).Pushback(at)
	if !s.Troubled(all, at) || s.Troubled(all[:2], at) || s.Troubled(all, at.Add(time.Second)) {
		t.Error("pushback")
	}
	s.Live(0).Doubt(at)
	s.Live(0).Pushback(at)
	if !s.Troubled(all[:1], at.Add(5*time.Second)) || s.Troubled(all, at.Add(doubtSpan)) {
		t.Error("doubt")
	}
}
