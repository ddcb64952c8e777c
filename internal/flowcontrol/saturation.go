package flowcontrol

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Saturation is how the fullness of an endpoint is judged.
type Saturation uint8

// The detectors.
const (
	// Utilization goes by what the engine reports: an endpoint is full once
	// max(waiting/QueueThreshold, kv/KVThreshold) is 1. One that reports neither,
	// or too long ago, is unknown and judged by Concurrency.
	Utilization Saturation = iota
	// Concurrency goes by what this process sends: an endpoint is full once it
	// serves MaxConcurrency requests, or MaxTokens tokens.
	Concurrency
)

// ParseSaturation reads a configuration name.
func ParseSaturation(name string) (Saturation, error) {
	switch name {
	case "utilization":
		return Utilization, nil
	case "concurrency":
		return Concurrency, nil
	default:
		return 0, fmt.Errorf("unknown saturation detector %q, valid: utilization, concurrency", name)
	}
}

// Detector judges endpoints. It is immutable; the zero value finds all full.
type Detector struct {
	Saturation Saturation
	// QueueThreshold is the number of requests waiting in the engine, and
	// KVThreshold the share of its KV cache, 0 to 1, at which it is full.
	QueueThreshold, KVThreshold float64
	// MaxConcurrency is the number of requests of this process in flight, and
	// MaxTokens of their tokens, at which an endpoint is full. No MaxTokens is 0.
	MaxConcurrency, MaxTokens int64
}

// View is a detector on one snapshot at one time.
type View struct {
	d       *Detector
	s       *pool.Snapshot
	now     time.Time
	waiting pool.Readings
	kv      pool.Readings
}

// View makes the detector ready to judge.
func (d *Detector) View(s *pool.Snapshot, now time.Time) View {
	v := View{d: d, s: s, now: now}
	if d.Saturation == Utilization {
		v.waiting = s.Readings(pool.NumRequestsWaiting, now)
		v.kv = s.Readings(pool.KVCacheUsagePerc, now)
	}
	return v
}

// Live is the live load of the endpoint at a position.
func (v *View) Live(i int32) *pool.Live { return v.s.Live(i) }

// Ratio is how full the endpoint at a position is: 1 and over is full. own is
// what the caller itself has in flight there.
func (v *View) Ratio(i int32, own int64) float64 {
	if v.d.Saturation == Utilization {
		if ratio, known := v.reported(i); known {
			return ratio
		}
	}
	return v.byLoad(i, own)
}

// Full reports whether the endpoint at a position may take no request.
func (v *View) Full(i int32, own int64) bool { return v.Ratio(i, own) >= 1 }

// Unknown reports whether the endpoint at a position says nothing of its
// utilization, or said it too long ago.
func (v *View) Unknown(i int32) bool {
	if v.d.Saturation != Utilization {
		return false
	}
	_, known := v.reported(i)
	return !known
}

// Any reports whether one of candidates is not full.
func (v *View) Any(candidates []int32) bool {
	return slices.ContainsFunc(candidates, func(i int32) bool { return !v.Full(i, 0) })
}

// Open reports whether the endpoint at a position may take a request that could
// wait: it is not full, and not doubted. One that is may have died, and whoever
// was sent there in place of those that it failed would fail too.
func (v *View) Open(i int32, own int64) bool { return !v.Full(i, own) && !v.Doubted(i) }

// Doubted reports whether the endpoint at a position is.
func (v *View) Doubted(i int32) bool { return v.s.Live(i).Doubted(v.now) }

// reported is the ratio by the engine's own readings, of those it has.
func (v *View) reported(i int32) (ratio float64, known bool) {
	waiting, haveWaiting := v.waiting.At(i)
	kv, haveKV := v.kv.At(i)
	if haveWaiting {
		ratio = waiting / v.d.QueueThreshold
	}
	if haveKV {
		ratio = max(ratio, kv/v.d.KVThreshold)
	}
	return ratio, haveWaiting || haveKV
}

func (v *View) byLoad(i int32, own int64) float64 {
	live := v.s.Live(i)
	ratio := float64(live.InFlight()-own) / float64(v.d.MaxConcurrency)
	if v.d.MaxTokens > 0 && v.d.Saturation == Concurrency {
		ratio = max(ratio, float64(live.Tokens())/float64(v.d.MaxTokens))
	}
	return ratio
}

// since is what was in flight on an endpoint when a reading of it was first
// looked at: what has been sent since is not in the reading.
type since struct {
	metrics  *pool.Metrics
	inFlight int64
	position int32     // where the endpoint was last found
	landed   time.Time // when a request ended that had been asked to, zero for never
}

// room is how many waiting requests may be sent to the endpoint at a position.
//
// By utilization a reading says only whether there is room, and the next one
// may be a second away: a crowd sent on one reading would all wait in the
// engine. So the room of one reading is what was left below QueueThreshold and,
// where nothing waits in the engine, as much again as it was running: what is
// sent may double from one reading to the next. And it is no more than what the
// KV cache has place for, if each request takes as much as those that run now,
// but at least one. Each request sent since takes one of it, each that ended
// gives one back. A doubted endpoint has none.
func (v *View) room(i int32, known *since) int64 {
	live := v.s.Live(i)
	if live.Doubted(v.now) {
		return 0
	}
	flying := live.InFlight()
	if v.d.Saturation == Utilization {
		if ratio, reported := v.reported(i); reported {
			if m := v.s.Metrics(i); known.metrics != m {
				known.metrics, known.inFlight = m, flying
			}
			if ratio >= 1 {
				return 0
			}
			return v.allowance(i, known.inFlight) - (flying - known.inFlight)
		}
	}
	room := v.d.MaxConcurrency - flying
	if v.d.MaxTokens > 0 && v.d.Saturation == Concurrency && live.Tokens() >= v.d.MaxTokens {
		room = 0
	}
	return room
}

func (v *View) allowance(i int32, flying int64) int64 {
	running := float64(flying)
	if m := v.s.Metrics(i); m != nil {
		if n, ok := m.Get(pool.NumRequestsRunning); ok {
			running = n
		}
	}
	waiting, ok := v.waiting.At(i)
	if !ok {
		waiting = 0
	}
	allowed := math.Ceil(v.d.QueueThreshold - waiting)
	if waiting == 0 {
		allowed += running
	}
	if kv, ok := v.kv.At(i); ok && kv > 0 && running >= 1 {
		allowed = min(allowed, max(1, math.Floor((v.d.KVThreshold-kv)*running/kv)))
	}
	return int64(min(allowed, math.MaxInt32))
}
