package scorer

import (
	"cmp"
	"math"
	"sync"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Request is what is known of one request.
type Request struct {
	// Model is the one that the engine gets, "" for none.
	Model string
	// Prompt is the estimated number of tokens of the prompt, and Output the most
	// that may be generated, -1 if the request does not say.
	Prompt, Output int64
	// Talks is true where tokens of the answer are reported as they come.
	Talks bool
	// Blocks are the hashes of the prompt's blocks (see Hasher), and BlockTokens
	// the estimated tokens of one.
	Blocks      []uint64
	BlockTokens float64
	// Session is a hash of who is asking, 0 if the request does not say.
	Session uint64
	// Goals are what the request wants of its answer's latency.
	Goals Goals
}

// Input is everything that a pick depends on, beside the live load.
type Input struct {
	Snapshot *pool.Snapshot
	// Candidates are positions in Snapshot.Endpoints, at least one.
	Candidates []int32
	Now        time.Time
	// Seed is a random word: it breaks ties and draws lots.
	Seed    uint64
	Request Request
	// Index holds what prefixes the endpoints are believed to have; nil for none.
	Index *Index
	// Pins holds where sessions were sent; nil for none.
	Pins *Pins
	// Costs prices requests in normalised load; nil prices all by tokens.
	Costs *Costs
	// Guards are those that are on.
	Guards Guards
	// Admission is what the request's goals do beside what a policy makes of them.
	Admission Admission
	// Admit, if it is not nil, may find the winner full: then it is not reserved.
	Admit Admitter
	// Explain is filled in if it is not nil.
	Explain *Explanation
}

// Admitter says which endpoints may take no request now.
type Admitter interface {
	// Full reports whether the endpoint at a position is full. own is what the
	// caller itself has reserved there.
	Full(i int32, own int64) bool
}

// Fallback is what a policy did in place of its rule.
type Fallback uint8

// The fallbacks.
const (
	FallbackNone   Fallback = iota
	FallbackRandom          // no candidate could be scored
	FallbackFull            // the request fits on no candidate: the emptiest was taken
)

// String returns the word for metadata and headers, "" for none.
func (f Fallback) String() string {
	switch f {
	case FallbackRandom:
		return "random"
	case FallbackFull:
		return "full"
	default:
		return ""
	}
}

// Choice is what a policy picked, and why.
type Choice struct {
	// Index is a position in Snapshot.Endpoints.
	Index    int32
	Fallback Fallback
	// Guarded are the guards that took a candidate out.
	Guarded GuardSet
	// Cached is the number of the prompt's tokens that the winner's prefix cache is
	// believed to hold.
	Cached int64
	// Reservation is what PickAndReserve took of the winner's live load.
	Reservation pool.Reservation
	// Full is true where Input.Admit found the winner full: nothing is reserved.
	Full bool
	// SLO is what Input.Admission did. With SLORefused nothing is picked: Index is
	// -1, and nothing is reserved.
	SLO SLOOutcome

	k    int   // position among the candidates that the guards left
	seen int64 // the winner's in-flight count that the ranking saw
}

// maxTries bounds how often a pick is redone because another worker took the
// winner's slot in between. Each retry means that some other pick succeeded.
const maxTries = 8

// pick is the state of one, reused by later ones: nothing is allocated once its
// slices have grown to the pool's size.
type pick struct {
	in     Input
	policy *Policy

	cand   []int32 // the candidates that the guards left
	held   []int32 // memory for cand where it is not in.Candidates
	hits   []uint8 // guards by position in in.Candidates, where there are any
	guards GuardSet

	flight []int64   // requests in flight by position in cand, read before all else that is live
	raw    []float64 // of the part at hand, by position in cand
	tie    []float64 // breaks ties of the only part: least wins
	// byRequests breaks them by the requests in flight
	byRequests bool
	total      []float64
	a, b, c    []float64 // of whoever needs them
	todo       []float64 // uncached tokens of the prompt by position in cand, see prompts
	slow       []float64 // see slowness
	match      []uint32  // matched blocks by position in cand; nil without prefixes
	walk       walk
	matchM     []uint32 // memory for match
	full       bool
	notes      []note // of the latest choice, if it is to be explained
	slo        SLOOutcome
	missing    []string  // why candidates miss a goal, by position in in.Candidates, if it is to be explained
	first      []float64 // predicted seconds until the first token, by position in cand; NaN is unknown
	between    []float64 // and from token to token
	tier       []uint8   // where a candidate stands with the goals, of slo-headroom
}

var picks = sync.Pool{New: func() any { return new(pick) }}

// Pick chooses among the candidates. The same input and live load give the same
// choice. It reserves nothing.
func (p *Policy) Pick(in *Input) Choice {
	w := p.begin(in)
	defer w.end()
	if w.slo == SLORefused {
		return w.refusal()
	}
	return w.choose(in.Seed)
}

// PickAndReserve picks an endpoint and takes a slot of its live load in the same
// step: a winner whose load another worker has changed meanwhile is picked anew,
// so that a burst over many workers spreads as evenly as over one. It notes the
// winner in the index. The caller releases the reservation.
func (p *Policy) PickAndReserve(in *Input) Choice {
	w := p.begin(in)
	defer w.end()
	if w.slo == SLORefused {
		return w.refusal()
	}
	seed := in.Seed
	for try := 0; ; try++ {
		c := w.choose(seed)
		i := w.cand[c.k]
		live := in.Snapshot.Live(i)
		load := pool.Load{Prompt: in.Request.Prompt, Uncached: in.Request.Prompt - c.Cached, Talks: in.Request.Talks}
		load.Cost = in.Costs.of(&in.Request, in.Snapshot, i)
		if in.Admit != nil && in.Admit.Full(i, 0) {
			c.Full = true
			return c
		}
		ok := true
		if p.needs&needLive != 0 && try < maxTries {
			c.Reservation, ok = live.TryReserve(c.seen, load, in.Now)
		} else {
			c.Reservation = live.Reserve(load, in.Now)
		}
		if !ok {
			seed = mix(seed)
			continue
		}
		if in.Admit != nil && in.Admit.Full(i, 1) { // others took the last slots in between
			c.Reservation.Release(in.Now, false)
			c.Full = true
			return c
		}
		if in.Index != nil && p.needs&needPrefix != 0 {
			in.Index.Add(live, in.Request.Blocks)
		}
		if in.Pins != nil && p.needs&needSession != 0 && in.Request.Session != 0 {
			if ttl := p.pinTTL(); ttl > 0 {
				in.Pins.set(in.Request.Session, live.Slot, in.Now, ttl)
			}
		}
		if in.Explain != nil {
			w.explain(c, in.Explain)
		}
		return c
	}
}

func (p *Policy) begin(in *Input) *pick {
	w := picks.Get().(*pick)
	w.in, w.policy, w.match, w.full, w.slo = *in, p, nil, false, SLONone
	w.guard()
	if p.needs&needPrefix != 0 && in.Index != nil && len(in.Request.Blocks) > 0 {
		w.lookUp()
	}
	w.join()
	w.admit()
	return w
}

// end gives the pick's memory back, without what it points to.
func (w *pick) end() {
	w.in, w.policy, w.cand, w.notes, w.missing = Input{}, nil, nil, nil, nil
	picks.Put(w)
}

// choose ranks the candidates and takes the best.
func (w *pick) choose(seed uint64) Choice {
	var k int // -1 where none could be scored
	fallback := FallbackNone
	w.notes = nil
	if w.policy.needs&needLive != 0 {
		w.flight = resize(w.flight, len(w.cand))
		flight, lives := w.flight, w.in.Snapshot.Lives()
		for k, i := range w.cand {
			flight[k] = lives[i].InFlight()
		}
	}
	if len(w.policy.parts) == 1 {
		k = w.bestOf(&w.policy.parts[0], seed)
	} else {
		k = w.bestSum(seed)
	}
	switch {
	case k < 0:
		k, fallback = below(mix(seed), len(w.cand)), FallbackRandom
	case w.full:
		fallback = FallbackFull
	}
	c := Choice{Index: w.cand[k], Fallback: fallback, Guarded: w.guards, Cached: w.cached(k), SLO: w.slo, k: k}
	if w.policy.needs&needLive != 0 {
		c.seen = w.flight[k]
	}
	return c
}

// bestOf returns the position of the endpoint that the only part ranks first,
// -1 if it can rank none.
func (w *pick) bestOf(pt *part, seed uint64) int {
	if pt.kind == kindRandom {
		if w.in.Explain != nil {
			w.raw = resize(w.raw, len(w.cand))
			for k := range w.raw {
				w.raw[k] = 1
			}
			w.noteScores(pt)
		}
		return below(mix(seed), len(w.cand))
	}
	w.score(pt, seed)
	w.noteScores(pt)
	sign := 1.0
	if kinds[pt.kind].mode == unit {
		sign = -1
	}
	best, ties, lowest := -1, 0, math.Inf(1)
	for k, v := range w.raw {
		v *= sign
		if !(v <= lowest) { // or it is NaN
			continue
		}
		if best < 0 || v < lowest {
			best, lowest, ties = k, v, 1
			continue
		}
		if order := w.breakTie(k, best); order != 0 {
			if order < 0 {
				best, ties = k, 1
			}
			continue
		}
		ties++
		if seed = mix(seed); below(seed, ties) == 0 {
			best = k
		}
	}
	return best
}

// breakTie compares two endpoints that the only part holds for equal.
func (w *pick) breakTie(a, b int) int {
	switch {
	case len(w.tie) > 0:
		return cmp.Compare(w.tie[a], w.tie[b])
	case w.byRequests:
		return cmp.Compare(w.flight[a], w.flight[b])
	default:
		return 0
	}
}

// bestSum returns the position of the endpoint with the largest weighted sum of
// scores, -1 if no part could score any.
func (w *pick) bestSum(seed uint64) int {
	w.total = resize(w.total, len(w.cand))
	clear(w.total)
	scored := false
	for i := range w.policy.parts {
		pt := &w.policy.parts[i]
		w.score(pt, seed)
		w.noteScores(pt)
		if n, ok := w.scale(pt); ok {
			scored = true
			n.add(w.total, w.raw, pt.weight)
		}
	}
	if !scored {
		return -1
	}
	best, ties, highest := -1, 0, math.Inf(-1)
	for k, v := range w.total {
		if !(v >= highest) {
			continue
		}
		if best < 0 || v > highest {
			best, highest, ties = k, v, 1
			continue
		}
		ties++
		if seed = mix(seed); below(seed, ties) == 0 {
			best = k
		}
	}
	return best
}

// score fills w.raw with the part's values, none where an endpoint can't be
// scored, and w.tie if it breaks ties.
func (w *pick) score(pt *part, seed uint64) {
	w.raw = resize(w.raw, len(w.cand))
	w.tie, w.byRequests = w.tie[:0], false
	switch pt.kind {
	case kindRandom:
		for k := range w.raw {
			seed = mix(seed)
			w.raw[k] = float64(seed>>11) / (1 << 53)
		}
	case kindLeastRequest:
		w.leastRequest()
	case kindPowerOfTwo:
		w.powerOfTwo(seed)
	case kindSLOLeastLoad:
		w.leastLoad()
	case kindSLOPackLoad:
		w.packLoad()
	case kindLoadBalance:
		w.loadBalance(pt)
	case kindLeastKVCache:
		w.reading(pool.KVCacheUsagePerc)
	case kindKVCache:
		w.reading(pool.KVCacheUsagePerc)
		for k, v := range w.raw {
			if v > 1 { // and never below 0
				v = 1
			}
			w.raw[k] = 1 - v
		}
	case kindQueue:
		w.reading(pool.NumRequestsWaiting)
	case kindRunning:
		w.reading(pool.NumRequestsRunning)
	case kindLeastUtilization:
		w.reading(pool.EngineUtilization)
	case kindLeastLatency:
		w.leastLatency()
	case kindThroughput:
		w.throughput()
	case kindLoRAAffinity:
		w.loraAffinity()
	case kindSessionAffinity:
		w.sessionAffinity(pt)
	case kindPrefixCache:
		w.prefixCache(pt)
	case kindTokenLoad:
		w.tokenLoad(pt)
	case kindPrefillCost:
		w.prefillCost(pt)
	case kindExpectedTTFT:
		w.expectedTTFT(pt)
	case kindLMetric:
		w.lmetric()
	case kindPreble:
		w.preble(pt)
	case kindPrefixHRW:
		w.prefixHRW(pt)
	case kindSLOHeadroom:
		w.sloHeadroom(pt)
	default: // least-busy-time: no engine has gpu_busy_time_ratio
		for k := range w.raw {
			w.raw[k] = none
		}
	}
}

// live returns the live load of the endpoint at a position in w.cand.
func (w *pick) live(k int) *pool.Live { return w.in.Snapshot.Live(w.cand[k]) }

// reading takes an engine metric as it is.
func (w *pick) reading(m pool.Metric) {
	w.in.Snapshot.ReadingsFor(w.in.Request.Model, m, w.in.Now).Fill(w.raw, w.cand)
}

// cached is the number of the prompt's tokens that the endpoint at a position is
// believed to hold. The last token is always computed.
func (w *pick) cached(k int) int64 {
	if w.match == nil || w.match[k] == 0 {
		return 0
	}
	return max(0, min(int64(float64(w.match[k])*w.in.Request.BlockTokens), w.in.Request.Prompt-1))
}

func resize[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n, n+n/4+16)
	}
	return s[:n]
}

// mix is the output function of SplitMix64 (Steele, Lea, Flood 2014): one
// random word makes as many as a pick needs.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// below maps a random word to [0, n) by multiplication (Lemire 2019). Its bias
// is n/2^32.
func below(x uint64, n int) int { return int(uint64(uint32(x)) * uint64(n) >> 32) }
