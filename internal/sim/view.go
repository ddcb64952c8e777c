package sim

import "time"

// Cached is how many of the hashes, from the first on, the prefix cache holds now.
func (m *Model) Cached(hashes []uint64) int {
	for i, h := range hashes {
		if _, ok := m.kv.byHash[h]; !ok {
			return i
		}
	}
	return len(hashes)
}

// Stats are the model's counters. They change with it: read them only from where the model is driven.
func (m *Model) Stats() *Stats { return &m.stats }

// SetSlowdown makes each step from the next on last that many times as long; at most 0 is 1.
func (m *Model) SetSlowdown(factor float64) {
	if !(factor > 0) {
		factor = 1
	}
	m.slowdown = factor
}

// duration is how long a step of that many seconds lasts.
func (m *Model) duration(seconds float64) time.Duration {
	if m.slowdown > 0 {
		seconds *= m.slowdown
	}
	return max(time.Duration(seconds*float64(time.Second)), 1)
}
