//go:build race

package filter

// raceEnabled is true where sync.Pool drops values at random.
const raceEnabled = true
