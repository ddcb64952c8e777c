package scorer

import (
	"math"
	"testing"
)

// TestScale is of values that engines should not have, and may.
func TestScale(t *testing.T) {
	inf, nan, tiny, most := math.Inf(1), math.NaN(), math.SmallestNonzeroFloat64, math.MaxFloat64
	for _, c := range []struct {
		name      string
		policy    string
		raw, want []float64
		none      bool
	}{
		{name: "least", policy: "queue", raw: []float64{0, 5, 10}, want: []float64{1, 0.5, 0}},
		{name: "all equal", policy: "queue", raw: []float64{7, 7}, want: []float64{1, 1}},
		{name: "one alone", policy: "queue", raw: []float64{7}, want: []float64{1}},
		{name: "some missing", policy: "queue", raw: []float64{0, nan, 10, 5}, want: []float64{1, 0.5, 0, 0.5}},
		{name: "all missing", policy: "queue", raw: []float64{nan, nan}, none: true},
		{name: "as bad as can be", policy: "queue", raw: []float64{inf, 0, 10}, want: []float64{0, 1, 0}},
		{name: "and one missing", policy: "queue", raw: []float64{inf, 4, nan}, want: []float64{0, 1, 0.5}},
		{name: "all as bad as can be", policy: "queue", raw: []float64{inf, inf}, want: []float64{1, 1}},
		{name: "hardly any difference", policy: "queue", raw: []float64{0, tiny}, want: []float64{1, 1}},
		{name: "the largest difference", policy: "queue", raw: []float64{0, most, most / 2}, want: []float64{1, 0, 0.5}},
		{name: "a sum that is too large", policy: "queue", raw: []float64{most, most, most, 0}, want: []float64{0, 0, 0, 1}},
		{name: "scores", policy: "prefix-cache", raw: []float64{0, 0.5, 1}, want: []float64{0, 0.5, 1}},
		{name: "scores that are equal", policy: "prefix-cache", raw: []float64{0.5, 0.5}, want: []float64{0.5, 0.5}},
		{name: "scores, some missing", policy: "lora-affinity", raw: []float64{nan, 0.5, 1}, want: []float64{0.75, 0.5, 1}},
		{name: "scores, all missing", policy: "lora-affinity", raw: []float64{nan}, none: true},
	} {
		pt := &must(t, c.policy).parts[0]
		w := &pick{raw: c.raw}
		n, ok := w.scale(pt)
		if ok == c.none {
			t.Errorf("%s: a scale %v", c.name, ok)
			continue
		}
		if c.none {
			continue
		}
		total := make([]float64, len(c.raw))
		n.add(total, c.raw, 3)
		for k, want := range c.want {
			if got := n.of(c.raw[k]); !(math.Abs(got-want) < 1e-12) {
				t.Errorf("%s: %v of %v scores %v, want %v", c.name, c.raw[k], c.raw, got, want)
			}
			if !(math.Abs(total[k]-3*want) < 1e-12) {
				t.Errorf("%s: %v of %v adds %v, want %v", c.name, c.raw[k], c.raw, total[k], 3*want)
			}
		}
	}
}
