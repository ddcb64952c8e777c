package main

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestPercentile(t *testing.T) {
	hundred := make([]int, 100)
	for i := range hundred {
		hundred[i] = 100 - i
	}
	for _, c := range []struct {
		values []int
		p      float64
		want   int
	}{
		{nil, 50, 0}, {[]int{7}, 50, 7}, {[]int{7}, 99, 7}, {[]int{2, 1}, 50, 1}, {[]int{3, 1, 2}, 50, 2},
		{hundred, 50, 50}, {hundred, 99, 99}, {hundred, 100, 100}, {hundred, 0.1, 1},
	} {
		if got := percentile(c.values, c.p); got != c.want {
			t.Errorf("percentile(%v, %v) = %d, want %d", c.values, c.p, got, c.want)
		}
	}
	if hundred[0] != 100 {
		t.Error("percentile sorted its argument")
	}
}

// The definition, word by word: the smallest value that at least p percent of the values do not exceed.
func TestPercentileAgainstItsDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		values := make([]int, 1+rng.IntN(60))
		for i := range values {
			values[i] = rng.IntN(40)
		}
		p := 1 + rng.IntN(100)
		want := slices.Max(values)
		for _, v := range values {
			below := 0
			for _, x := range values {
				if x <= v {
					below++
				}
			}
			if 100*below >= p*len(values) {
				want = min(want, v)
			}
		}
		if got := percentile(values, float64(p)); got != want {
			t.Fatalf("percentile(%v, %d) = %d, want %d", values, p, got, want)
		}
	}
}

func TestRoundRobin(t *testing.T) {
	loaded := []bool{false, true, true}
	for n, want := range []int{0, 0, 1, 2, 2, 3, 4} {
		if got := roundRobin(n, loaded); got != want {
			t.Errorf("roundRobin(%d) = %d, want %d", n, got, want)
		}
	}
}

func TestShare(t *testing.T) {
	list := pods()
	addresses := []string{"a:1", "b:1", "c:1", "q:1"}
	var outcomes []outcome
	add := func(n int, endpoint string, o outcome) {
		o.endpoint = endpoint
		for range n {
			outcomes = append(outcomes, o)
		}
	}
	add(5, "a:1", outcome{chat: chat{model: bigModel, stream: true}, firstByte: time.Millisecond})
	add(1, "b:1", outcome{chat: chat{model: bigModel}, firstByte: time.Second})
	add(2, "c:1", outcome{chat: chat{model: bigModel, stream: true}, firstByte: time.Minute})
	add(9, "q:1", outcome{chat: chat{model: smallModel}, firstByte: time.Second})
	add(3, "b:1", outcome{chat: chat{model: bigModel}, err: errors.New("failed")})
	add(4, "", outcome{chat: chat{model: bigModel}})

	got := rows(list, addresses, outcomes)
	for i, want := range []struct{ requests, streamed, whole int }{{5, 5, 0}, {1, 0, 1}, {2, 2, 0}, {9, 0, 9}} {
		r := got[i]
		if r.requests != want.requests || len(r.streamed) != want.streamed || len(r.whole) != want.whole || r.endpoint != addresses[i] {
			t.Errorf("row %d: %+v, want %+v", i, r, want)
		}
	}
	if got, want := shareOf(bigModel, got), (share{requests: 8, loaded: 3, roundRobin: 5}); got != want {
		t.Errorf("share %+v, want %+v", got, want)
	}
	if got, want := shareOf(smallModel, got), (share{requests: 9}); got != want {
		t.Errorf("share %+v, want %+v", got, want)
	}
	if got := shareOf("none", got); got != (share{}) {
		t.Errorf("share of an unknown model: %+v", got)
	}
}

func TestWords(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{percent(1, 3), "33.3 %"}, {percent(0, 3), "0.0 %"}, {percent(0, 0), "–"},
		{millis([]time.Duration{3 * time.Millisecond, time.Second}, 50), "3"}, {millis(nil, 50), "–"},
		{number(nil, 1), "?"}, {number(new(0.92), 100), "92"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
	var b strings.Builder
	table(&b, 1, [][]string{{"pod", "n", ""}, {"é", "12", "← x"}, {"long", "", ""}})
	if want := "  pod    n\n  é     12  ← x\n  long\n"; b.String() != want {
		t.Errorf("table:\n%s\nwant:\n%s", b.String(), want)
	}
}
