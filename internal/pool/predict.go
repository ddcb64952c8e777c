package pool

import (
	"math"
	"time"
)

// Latency is what is believed of an endpoint's latency at its present load. NaN
// is unknown.
type Latency struct {
	// Base is the seconds until a first token, and PerToken what each uncached token
	// adds that has to be read before it: those that wait there, and the prompt's
	// own.
	Base, PerToken float64
	// Most is the number of tokens up to which Base and PerToken say something.
	Most float64
	// Between is the seconds from token to token of an answer.
	Between float64
	// Ahead is the uncached tokens that wait there.
	Ahead float64
}

// TTFT is the seconds until the first token of a prompt of which the endpoint
// does not hold so many tokens; NaN where that is unknown.
func (l *Latency) TTFT(uncached float64) float64 {
	x := l.Ahead
	if uncached > 0 {
		x += uncached
	}
	if x > l.Most {
		return math.NaN()
	}
	return l.Base + l.PerToken*x
}

// Predictor predicts latencies for one model, on one snapshot, as of one time.
// It is a value: nothing is allocated, and the same live loads give the same
// predictions. docs/slo.md explains the model.
type Predictor struct {
	s     *Snapshot
	own   []ownValues
	age   time.Duration
	at    int64
	whole bool
}

// Predictor returns the predictor for a model, "" for none. whole is true where
// nobody looks up what endpoints hold of a prompt: then uncached tokens are all
// tokens, those that requests in flight have reserved as well as those asked about.
func (s *Snapshot) Predictor(model string, whole bool, now time.Time) Predictor {
	return Predictor{s: s, own: s.own[model], age: now.Sub(s.base), at: Stamp(now), whole: whole}
}

// Predict fills in what is believed of the endpoint at a position in Endpoints: by
// what this process has seen of its streams in the last minute, else by what the
// engine's page says of its requests in the last minute, else unknown.
func (p *Predictor) Predict(i int32, l *Latency) {
	live := p.s.standing.lives[i]
	l.Ahead = float64(live.prefill.Load())
	var knowsFirst, knowsBetween bool
	l.Base, l.PerToken, l.Most, knowsFirst = live.learned.first(p.at)
	l.Between, knowsBetween = live.learned.tokenTime(p.at)
	if !knowsFirst || !knowsBetween {
		p.scraped(i, l, knowsFirst, knowsBetween)
	}
}

// cell is the endpoint's reading of a metric, which is fresh; NaN for none.
func (p *Predictor) cell(m Metric, i int32) float64 {
	if p.own != nil {
		r := Readings{values: p.s.columns[m], metric: m, own: p.own}
		return r.ownOr(i, r.values[i])
	}
	return p.s.columns[m][i]
}

// scraped fills in what the endpoint's page says. Where it ran nothing for a
// minute its means are of a time long ago, and say nothing.
//
// A first token takes a step of the batch and the rest of the mean prefill, per
// token that was read. Whoever else sends there shows in the engine's queue alone:
// the requests that wait there beyond our own are taken for mean ones.
func (p *Predictor) scraped(i int32, l *Latency, knowsFirst, knowsBetween bool) {
	running, waiting, step := math.NaN(), math.NaN(), math.NaN()
	busy := false
	if p.age <= p.s.until[i] {
		running, waiting = p.cell(NumRequestsRunning, i), p.cell(NumRequestsWaiting, i)
		if busy = running > 0 || waiting > 0 || p.cell(RequestRate, i) > 0; busy {
			step = p.cell(InterTokenLatency, i)
		}
	}
	if !knowsBetween {
		l.Between = step
	}
	if knowsFirst {
		return
	}
	if !busy {
		l.Base, l.PerToken, l.Most = math.NaN(), math.NaN(), math.NaN()
		return
	}
	read := p.cell(PromptTokensPerRequest, i)
	if !p.whole {
		if hit := p.cell(KVCacheHitRate, i); hit > 0 && hit < 1 {
			read *= 1 - hit
		}
	}
	prefill := p.cell(RequestPrefillTime, i)
	if !(read >= prefillLeast && prefill >= 0) {
		l.Base, l.PerToken, l.Most = p.cell(TimeToFirstToken, i), 0, prefillLeast
		if read >= prefillLeast {
			l.Most = 2 * read
		}
		return
	}
	if !(step >= 0) {
		step = 0
	}
	l.PerToken = max(0, prefill-step) / read
	l.Base = prefill - l.PerToken*read
	l.Most = math.Inf(1)
	if !(waiting > 0) {
		return
	}
	if !(running > 0) {
		running = 0
	}
	others := running + waiting - float64(p.s.standing.lives[i].InFlight())
	l.Ahead += max(0, min(others, waiting)) * read
}
