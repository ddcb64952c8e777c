package filter

import (
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// fallbackQuiet is how long no pick may have fallen back for a policy to count
// as working again: where one model's readings are missing and another's are
// not, picks of both kinds alternate.
const fallbackQuiet = 10 * time.Second

// fallbackLog says once when a pool's picks begin to be random because their
// policy can score nobody, and once when that has ended.
type fallbackLog struct {
	on   atomic.Bool
	last atomic.Int64 // pool.Stamp of the last such pick
}

// note takes in a pick.
func (f *fallbackLog) note(p *Pool, policy *scorer.Policy, model string, fallback scorer.Fallback, now time.Time, log func(slog.Level, string)) {
	if policy.NeedsSession() {
		return // some requests have none
	}
	if fallback == scorer.FallbackRandom {
		f.last.Store(pool.Stamp(now))
		if f.on.CompareAndSwap(false, true) {
			log(slog.LevelWarn, fmt.Sprintf("pool %s: policy %s can score no endpoint of model %s and picks at random: its metrics are missing or stale (shunt metrics shows what is read)",
				p.name, policy, quote(model)))
		}
		return
	}
	if f.on.Load() && pool.Stamp(now)-f.last.Load() > int64(fallbackQuiet) && f.on.CompareAndSwap(true, false) {
		log(slog.LevelInfo, fmt.Sprintf("pool %s: policy %s scores endpoints again", p.name, policy))
	}
}
