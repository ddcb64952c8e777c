package scorer

import "math"

// scale maps the raw values of a part to scores.
type scale struct {
	from, per float64 // score = (from - raw) * per
	unit      bool    // raw values are scores
	equal     bool    // all that have a value have the same: 1
	whole     bool    // all have a finite value, and no one needs mean
	mean      float64 // the score of an endpoint without a value
}

// scale finds the scale of the part's values in w.raw; ok is false where none
// has one. An infinite value scores 0 and takes no part in the range.
func (w *pick) scale(pt *part) (n scale, ok bool) {
	n.unit = kinds[pt.kind].mode == unit
	low, high, sum := math.Inf(1), math.Inf(-1), 0.0
	for _, v := range w.raw {
		if v < low {
			low = v
		}
		if v > high {
			high = v
		}
		sum += v
	}
	if n.whole = sum-sum == 0; !n.whole { // else no value is NaN or infinite
		return n.ragged(w.raw)
	}
	n.over(low, high)
	return n, true
}

// over settles how values between low and high score.
func (n *scale) over(low, high float64) {
	n.from, n.per = high, 1/(high-low)
	n.equal = !n.unit && math.IsInf(n.per, 0) // there is no difference, or none that counts
}

// ragged is scale for values that are not all finite.
func (n scale) ragged(raw []float64) (scale, bool) {
	low, high := math.Inf(1), math.Inf(-1)
	count, infinite := 0, 0
	for _, v := range raw {
		switch {
		case v != v:
		case v == math.Inf(1):
			infinite++
		default:
			low, high = min(low, v), max(high, v)
			count++
		}
	}
	if count+infinite == 0 {
		return n, false
	}
	if count == 0 && !n.unit { // all are as bad as can be
		n.equal, n.mean = true, 1
		return n, true
	}
	n.over(low, high)
	sum := 0.0
	for _, v := range raw {
		if v == v {
			sum += n.of(v)
		}
	}
	n.mean = sum / float64(count+infinite)
	return n, true
}

// of returns the score of a raw value.
func (n scale) of(v float64) float64 {
	switch {
	case v != v:
		return n.mean
	case n.unit:
		return min(1, max(0, v))
	case n.equal && v == math.Inf(1) && n.mean < 1:
		return 0
	case n.equal:
		return 1
	case v == math.Inf(1):
		return 0
	default:
		return min(1, (n.from-v)*n.per) // which rounding may have passed
	}
}

// add adds the weighted scores of raw values to total.
func (n scale) add(total, raw []float64, weight float64) {
	total = total[:len(raw)]
	switch {
	case n.whole && n.unit: // they are from 0 to 1
		for k, v := range raw {
			total[k] += weight * v
		}
	case n.whole && !n.equal:
		per := weight * n.per
		for k, v := range raw {
			total[k] += per * (n.from - v)
		}
	default:
		for k, v := range raw {
			total[k] += weight * n.of(v)
		}
	}
}
