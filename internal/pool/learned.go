package pool

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// learned is what first tokens and streams have told of an endpoint's latency,
// as predictions read it. It is two cache lines of a Live.
type learned struct {
	// read by predictions, written under mu

	base      atomic.Uint64 // float64, seconds until a first token before which nothing has to be read
	perToken  atomic.Uint64 // float64, seconds more for each token that has to be read
	most      atomic.Uint64 // float64, the tokens up to which that says something
	firstAt   atomic.Int64  // Stamp of the newest first token, 0 for none
	between   atomic.Uint64 // float64, seconds from token to token
	betweenAt atomic.Int64  // Stamp of the newest sample, 0 for none
	_         [16]byte

	// Whoever finds mu taken loses a sample: no request waits for another.
	mu sync.Mutex
	// protected by mu: sums over first tokens, x being the tokens to read and y the
	// seconds, and over the tokens of streams, all fading away
	n, x, y, xx, xy float64
	tokens, seconds float64
}

const (
	// fadeConstant is the time constant with which samples fade away.
	fadeConstant = 10 * time.Second
	// learnedFor is how long after the newest sample the learned counts: an endpoint
	// of which nothing was heard for longer is unknown, and so is tried again.
	learnedFor = time.Minute
	// priorWeight is that of the line through the prior, in samples of the usual
	// size: prompts of one size alone say nothing of what a token more costs.
	priorWeight = 0.1
	// sampleTokens is how many tokens of a stream make a sample.
	sampleTokens = 16
)

// fade is what is left of older samples.
func fade(since int64) float64 { return math.Exp(-float64(max(0, since)) / float64(fadeConstant)) }

// learnFirst takes in that a first token took that long, before which, its own
// prompt included, so many uncached tokens had to be read.
//
// Seconds are a line over tokens, fitted by least squares towards one through
// the prior: a step of the running batch, and a price per token. The line is of
// what happened, so it has in it what the batch, the queue and the slots of the
// engine cost at the present load.
func (l *learned) learnFirst(tokens, nanos, at int64) {
	if tokens < 0 || nanos <= 0 || !l.mu.TryLock() {
		return
	}
	defer l.mu.Unlock()
	keep, x, y := fade(at-l.firstAt.Load()), float64(tokens), float64(nanos)/1e9
	l.n, l.x, l.y = l.n*keep+1, l.x*keep+x, l.y*keep+y
	l.xx, l.xy = l.xx*keep+x*x, l.xy*keep+x*y

	meanX, meanY, square := l.x/l.n, l.y/l.n, l.xx/l.n
	base, perToken, most := meanY, 0.0, math.Inf(1)
	if usual := math.Sqrt(square); usual < prefillLeast {
		most = max(prefillLeast, 2*usual) // so little to read says nothing of more
	} else {
		prior := max(0, (l.xy-math.Float64frombits(l.between.Load())*l.x)/l.xx)
		perToken = max(0, (l.xy/l.n-meanX*meanY+priorWeight*square*prior)/(square-meanX*meanX+priorWeight*square))
		if base = meanY - perToken*meanX; base < 0 {
			base, perToken = 0, l.xy/l.xx
		}
	}
	l.base.Store(math.Float64bits(base))
	l.perToken.Store(math.Float64bits(perToken))
	l.most.Store(math.Float64bits(most))
	l.firstAt.Store(max(at, l.firstAt.Load()))
}

// learnBetween takes in that so many tokens of one stream took that long.
func (l *learned) learnBetween(tokens, nanos, at int64) {
	if tokens <= 0 || nanos < 0 || !l.mu.TryLock() {
		return
	}
	defer l.mu.Unlock()
	keep := fade(at - l.betweenAt.Load())
	l.tokens, l.seconds = l.tokens*keep+float64(tokens), l.seconds*keep+float64(nanos)/1e9
	l.between.Store(math.Float64bits(l.seconds / l.tokens))
	l.betweenAt.Store(max(at, l.betweenAt.Load()))
}

// first is the line of first tokens; ok is false where nothing was learned, or
// too long ago.
func (l *learned) first(at int64) (base, perToken, most float64, ok bool) {
	if newest := l.firstAt.Load(); newest == 0 || at-newest > int64(learnedFor) {
		return 0, 0, 0, false
	}
	return math.Float64frombits(l.base.Load()), math.Float64frombits(l.perToken.Load()), math.Float64frombits(l.most.Load()), true
}

// tokenTime is the seconds from token to token; ok as in first.
func (l *learned) tokenTime(at int64) (seconds float64, ok bool) {
	if newest := l.betweenAt.Load(); newest == 0 || at-newest > int64(learnedFor) {
		return 0, false
	}
	return math.Float64frombits(l.between.Load()), true
}
