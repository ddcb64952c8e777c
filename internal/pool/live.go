package pool

import (
	"math"
	"sync/atomic"
	"time"
)

// Live is what this process itself knows of the load on one incarnation of an
// endpoint. It outlives snapshots, config generations and metric gaps. Any
// worker may read it and, through Reservations, change it: each change is a few
// atomic operations, and each Reservation takes back exactly what it added, so
// that no counter goes below zero. A Live is as long as five cache lines, to which
// Go then aligns it: what a pick reads is in one line, what a prediction reads
// beside it in another, and two hot endpoints do not slow each other.
type Live struct {
	// immutable once the endpoint is published

	// Addr is the endpoint's ip:port, for whoever holds only the Live.
	Addr string
	// Slot numbers the endpoints of one pool from 1 on, densely: no two that
	// exist at the same time have the same. 0 is none.
	Slot int
	_    [40]byte

	// read by picks
	inFlight    atomic.Int64
	tokens      atomic.Int64  // prompt and output, of the requests in flight
	prefill     atomic.Int64  // uncached prompt tokens whose first token is not back yet
	cost        atomic.Int64  // normalised load, in units of costUnit
	sign        atomic.Int64  // Stamp of the last sign of life
	trouble     atomic.Int64  // Stamp from which on it neither has pushed back nor is doubted, or later
	outputRate  atomic.Uint64 // float64, tokens per second
	prefillRate atomic.Uint64 // float64, tokens per second

	picks       atomic.Uint64
	talking     atomic.Int64 // requests in flight whose tokens are seen as they come
	windowTok   atomic.Int64 // output tokens not yet in outputRate
	windowStart atomic.Int64 // Stamp
	pushedBack  atomic.Int64 // Stamp until which it has pushed back
	doubted     atomic.Int64 // Stamp of the last fault since which it has not answered, 0 for none
	_           [16]byte

	learned learned
}

const (
	// costUnit is the resolution of normalised load.
	costUnit = 1e-6
	// rateWindow is the least time over which output tokens are counted before
	// they change the rate.
	rateWindow = time.Second
	// rateConstant is the time constant of the output rate's average (AIBrix's).
	rateConstant = 10 * time.Second
	// prefillWeight is that of prefillFull tokens or more in the prefill rate's
	// average; fewer weigh less in proportion: the less there was to read, the more
	// of the time was the running batch's.
	prefillWeight = 0.1
	prefillFull   = 8192
	// prefillLeast is the least work that says something of the prefill rate:
	// below it, a first token waits for the running batch and not for itself.
	prefillLeast = 512
	// signStep is how often a sign of life is written down at most: streams of
	// one endpoint on many workers would fight for its cache line.
	signStep = 20 * time.Millisecond
)

// Load is what one request puts on an endpoint.
type Load struct {
	// Prompt is the number of tokens of the prompt, and Uncached of those that
	// the endpoint's prefix cache is not believed to hold.
	Prompt, Uncached int64
	// Cost is the request's share of the endpoint's capacity, 0 to 1 (and over).
	Cost float64
	// Talks is true where the tokens of the answer are reported as they come.
	Talks bool
}

// InFlight is the number of requests reserved and not yet released.
func (l *Live) InFlight() int64 { return l.inFlight.Load() }

// Picks is the number of reservations ever made.
func (l *Live) Picks() uint64 { return l.picks.Load() }

// Tokens is the number of prompt and output tokens of the requests in flight:
// about what they hold of the KV cache.
func (l *Live) Tokens() int64 { return l.tokens.Load() }

// Prefill is the number of uncached prompt tokens that were sent and whose
// first token is not back yet.
func (l *Live) Prefill() int64 { return l.prefill.Load() }

// Cost is the normalised load of the requests in flight: 1 is the endpoint's
// capacity.
func (l *Live) Cost() float64 { return float64(l.cost.Load()) * costUnit }

// OutputRate is the moving average of output tokens per second, over the time
// in which the endpoint had requests; 0 before the first tokens.
func (l *Live) OutputRate() float64 { return math.Float64frombits(l.outputRate.Load()) }

// PrefillRate is the moving average of prompt tokens per second until the first
// token; 0 before the first measurement.
func (l *Live) PrefillRate() float64 { return math.Float64frombits(l.prefillRate.Load()) }

// wedgedAfter is the silence that makes an endpoint with streams in flight
// wedged, beside wedgedPerToken for each prompt token that it has to read first.
// wedgedSilent is added where no request in flight shows its tokens.
const (
	wedgedAfter    = 3 * time.Second
	wedgedPerToken = 2 * time.Millisecond
	wedgedSilent   = 5 * time.Minute
)

// Wedged reports whether the endpoint has work and has shown no sign of life,
// token or completion, for a bound that grows with the prompts it has to read. now
// is a Stamp.
func (l *Live) Wedged(now int64) bool {
	sign := l.sign.Load()
	silence := now - sign
	if silence < int64(wedgedAfter) || sign == 0 || l.inFlight.Load() == 0 {
		return false
	}
	bound := wedgedAfter + time.Duration(l.prefill.Load())*wedgedPerToken
	if l.talking.Load() == 0 {
		bound += wedgedSilent
	}
	return silence > int64(bound)
}

// TryReserve takes one slot if the in-flight count still is what the pick saw,
// and reports whether it did. Of two workers that saw the same least loaded
// endpoint, one has to look again, so a burst does not pile up on it.
func (l *Live) TryReserve(seen int64, load Load, now time.Time) (Reservation, bool) {
	if !l.inFlight.CompareAndSwap(seen, seen+1) {
		return Reservation{}, false
	}
	return l.reserved(seen, load, now), true
}

// Reserve takes one slot whatever the count is.
func (l *Live) Reserve(load Load, now time.Time) Reservation {
	return l.reserved(l.inFlight.Add(1)-1, load, now)
}

func (l *Live) reserved(before int64, load Load, now time.Time) Reservation {
	r := Reservation{
		live: l, at: Stamp(now), prompt: tokens32(load.Prompt), uncached: tokens32(load.Uncached),
		cost: int32(min(maxCost, max(0, load.Cost)) / costUnit), talks: load.Talks, prefilling: true,
	}
	if before == 0 { // it was idle: silence and the rate's window begin now
		l.sign.Store(r.at)
		l.windowStart.Store(r.at)
	}
	l.picks.Add(1)
	l.tokens.Add(int64(r.prompt))
	r.ahead = tokens32(l.prefill.Add(int64(r.uncached)))
	if r.cost != 0 {
		l.cost.Add(int64(r.cost))
	}
	if r.talks {
		l.talking.Add(1)
	}
	return r
}

// Reservation is what one request holds of a Live. It belongs to the request's
// worker; the zero value holds nothing, and all methods of one that holds
// nothing do nothing.
type Reservation struct {
	live       *Live
	at         int64 // Stamp; from the first token on, of sampled
	prompt     int32
	uncached   int32
	ahead      int32 // uncached tokens at the endpoint, its own included; -1 if it did not wait there
	output     int32 // tokens seen so far
	sampled    int32 // tokens that the time between tokens was learned of, 0 for none yet
	cost       int32 // in units of costUnit
	talks      bool
	prefilling bool
}

// maxCost is the most that one request counts.
const maxCost = 1000

// tokens32 keeps a Reservation small: no request has more.
func tokens32(n int64) int32 { return int32(min(math.MaxInt32, max(0, n))) }

// Live is the endpoint's, nil where nothing is held.
func (r *Reservation) Live() *Live { return r.live }

// FirstToken says that the first output token came: the prompt was read.
func (r *Reservation) FirstToken(now time.Time) {
	if r.live == nil || !r.prefilling {
		return
	}
	r.live.alive(Stamp(now))
	took := Stamp(now) - r.at
	r.live.readIn(int64(r.ahead), took)
	r.live.learned.learnFirst(int64(r.ahead), took, Stamp(now))
	r.at = Stamp(now)
	r.endPrefill()
}

// Mute says that no tokens of the answer will be reported as they come.
func (r *Reservation) Mute() {
	if r.live != nil && r.talks {
		r.talks = false
		r.live.talking.Add(-1)
	}
}

func (r *Reservation) endPrefill() {
	if r.prefilling {
		r.prefilling = false
		r.live.prefill.Add(-int64(r.uncached))
	}
}

// Progress says how many output tokens have come in all, as far as is known: an
// estimate while they stream, what usage says in the end. It may say less than
// before.
func (r *Reservation) Progress(total int64, now time.Time) {
	if r.live == nil {
		return
	}
	at := Stamp(now)
	r.live.alive(at)
	if more := int64(tokens32(total) - r.output); more != 0 {
		r.output += int32(more)
		r.live.tokens.Add(more)
		r.live.wrote(more, at)
		r.sample(at, sampleTokens)
	}
}

// sample learns from the tokens since the last sample, if they are at least so
// many. What came together with the first token came at no pace.
func (r *Reservation) sample(at int64, least int32) {
	if r.prefilling {
		return
	}
	if r.sampled > 0 {
		if r.output-r.sampled < least {
			return
		}
		r.live.learned.learnBetween(int64(r.output-r.sampled), at-r.at, at)
	}
	r.sampled, r.at = r.output, at
}

// Move hands the reservation to another endpoint, which answered in place of
// the picked one.
func (r *Reservation) Move(to *Live, now time.Time) {
	if r.live == nil || r.live == to {
		return
	}
	load := Load{Prompt: int64(r.prompt), Uncached: int64(r.prompt), Cost: float64(r.cost) * costUnit, Talks: r.talks}
	r.Release(now, false)
	*r = to.Reserve(load, now)
	r.ahead = -1
}

// Release gives everything back, once: a second call does nothing. completed is
// whether the endpoint answered to the end.
func (r *Reservation) Release(now time.Time, completed bool) {
	l := r.live
	if l == nil {
		return
	}
	at := Stamp(now)
	if completed {
		l.alive(at)
		r.sample(at, 1)
	}
	r.endPrefill()
	l.tokens.Add(-int64(r.prompt) - int64(r.output))
	if r.cost != 0 {
		l.cost.Add(-int64(r.cost))
	}
	if r.talks {
		l.talking.Add(-1)
	}
	if l.inFlight.Add(-1) == 0 {
		l.fold(at, 0)
	}
	r.live = nil
}

func (l *Live) alive(at int64) {
	if at-l.sign.Load() > int64(signStep) {
		l.sign.Store(at)
	}
}

// wrote counts output tokens into the rate. A correction may be negative.
func (l *Live) wrote(tokens, at int64) {
	l.windowTok.Add(tokens)
	l.fold(at, rateWindow)
}

// fold closes the window of the output rate if it is older than least. A window
// without tokens stays open: a request that shows its tokens only at its end
// has worked on them all the while.
func (l *Live) fold(at int64, least time.Duration) {
	start := l.windowStart.Load()
	span := at - start
	if span <= 0 || span < int64(least) || l.windowTok.Load() <= 0 || !l.windowStart.CompareAndSwap(start, at) {
		return
	}
	tokens := l.windowTok.Swap(0)
	average(&l.outputRate, float64(tokens)/(float64(span)/1e9), 1-math.Exp(-float64(span)/float64(rateConstant)))
}

// readIn learns the prefill rate from a request before which, itself included,
// that many tokens had to be read, and whose first token took that long. It
// averages times per token by their tokens, so that the rate is that of all tokens
// over all time: a mean of rates would be that of whoever happened to read little.
func (l *Live) readIn(tokens, nanos int64) {
	if tokens < prefillLeast || nanos <= 0 {
		return
	}
	took := float64(nanos) / 1e9 / float64(tokens) // seconds per token
	weight := prefillWeight * min(1, float64(tokens)/prefillFull)
	for {
		old := l.prefillRate.Load()
		next := took
		if old != 0 {
			next = 1 / math.Float64frombits(old)
			next += weight * (took - next)
		}
		if l.prefillRate.CompareAndSwap(old, math.Float64bits(1/next)) {
			return
		}
	}
}

// average moves a rate towards a measurement. The first one is taken as it is.
func average(rate *atomic.Uint64, x, weight float64) {
	for {
		old := rate.Load()
		next := x
		if old != 0 {
			v := math.Float64frombits(old)
			next = v + weight*(x-v)
		}
		if next > 0 && !rate.CompareAndSwap(old, math.Float64bits(next)) {
			continue
		}
		return
	}
}

// FaultKind is a way in which an endpoint failed a request.
type FaultKind uint8

// The faults. All make an endpoint doubted and its serving port asked soon.
const (
	// FaultReset is a reset before response headers that neither the client
	// nor a timeout caused. It counts towards setting the endpoint aside.
	FaultReset FaultKind = iota
	// FaultConnect is a request that could not connect.
	FaultConnect
	// FaultCut is a response that the endpoint broke off.
	FaultCut
)

// Fault is one failure of an endpoint, seen by the request path.
type Fault struct {
	Live *Live
	Kind FaultKind
	At   time.Time
}
