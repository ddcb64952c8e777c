//go:build !race

package scorer

// raceEnabled is true where sync.Pool drops values at random.
const raceEnabled = false
