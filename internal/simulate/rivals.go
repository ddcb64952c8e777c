package simulate

import (
	"math"
	"slices"
	"time"
)

// rival is the rule of another router, restated from what is known of its source.
// Each restatement is checked against cases computed by hand.
type rival struct {
	name string
	// index is how it remembers which prompts it sent where, nil for not at all.
	index func(engineBlocks, endpoints int) *believed
	// pick chooses from r.ready.
	pick func(r *rivalPicker, j *job) int
}

// rivals are, with their defaults:
//
//   - round-robin.
//   - llm-d: the llm-d router's default profile (v0.10), queue-scorer 2,
//     kv-cache-utilization-scorer 2, prefix-cache-scorer 3, max-score-picker, an LRU
//     of each pod's blocks as large as its cache.
//   - aibrix: the AIBrix gateway's prefix-cache as its newest source blends it, with
//     load-balance 5 to 4, behind the load-imbalance gate.
//   - aibrix-prefix-cache: the same policy as of v0.7, alone.
//   - dynamo-kv: NVIDIA Dynamo's KV router, which hears of every block that an engine
//     caches or evicts, here without delay; dynamo-kv-256 is the same with
//     prefill_load_scale 256.
//   - sglang-cache-aware: sglang-router's cache_aware.
var rivals = []*rival{
	{name: "round-robin", pick: (*rivalPicker).roundRobin},
	{name: "llm-d", pick: (*rivalPicker).llmd, index: func(blocks, n int) *believed { return newBelieved(n, n, blocks) }},
	{name: "aibrix", pick: (*rivalPicker).aibrixBlend, index: aibrixIndex},
	{name: "aibrix-prefix-cache", pick: (*rivalPicker).aibrixPrefix, index: aibrixIndex},
	{name: "dynamo-kv", pick: func(r *rivalPicker, j *job) int { return r.dynamo(j, 1) }},
	{name: "dynamo-kv-256", pick: func(r *rivalPicker, j *job) int { return r.dynamo(j, 256) }},
	// 2^26 characters of text for each worker.
	{name: "sglang-cache-aware", pick: (*rivalPicker).sglang, index: func(_, n int) *believed { return newBelieved(n, n, 1<<26/256) }},
}

// aibrixIndex is one LRU for all pods, of 200,000 blocks of 128 characters.
func aibrixIndex(_, endpoints int) *believed { return newBelieved(endpoints, 1, 200_000*128/256) }

// Rivals are the names of other routers' rules.
func Rivals() []string {
	names := make([]string, len(rivals))
	for i, r := range rivals {
		names[i] = r.name
	}
	return names
}

func rivalOf(name string) (*rival, bool) {
	at := slices.IndexFunc(rivals, func(r *rival) bool { return r.name == name })
	if at < 0 {
		return nil, false
	}
	return rivals[at], true
}

// rivalPicker is one instance of another router.
type rivalPicker struct {
	rival *rival
	world *world

	ready   []int // endpoint numbers
	turn    int
	pages   []page
	running []int // requests in flight, by endpoint
	prefill []int // believed uncached tokens of prompts without a first token
	rates   []drainRate
	index   *believed
	active  *activeBlocks // of requests in flight

	score, other []float64 // scratch, by position in ready
	match        []int     // blocks, by endpoint
	shared       []int
}

func newRival(r *rival, s *world) *rivalPicker {
	n := len(s.w.Changes) + s.cfg.Endpoints
	p := &rivalPicker{
		rival: r, world: s, turn: s.rng.IntN(s.cfg.Endpoints), pages: make([]page, n), running: make([]int, n),
		prefill: make([]int, n), rates: make([]drainRate, n), match: make([]int, n), shared: make([]int, n),
	}
	if r.index != nil {
		p.index = r.index(s.cfg.Engine.Blocks, n)
	} else {
		p.active = newActiveBlocks(n)
	}
	return p
}

func (r *rivalPicker) pick(_ time.Time, j *job) int {
	i := r.rival.pick(r, j)
	r.running[i]++
	j.held.prefilling = true
	blocks := j.req.prompt()
	switch {
	case r.index != nil:
		r.index.add(i, blocks)
	case r.rival.name != "round-robin":
		j.held.uncached = j.req.Prompt - r.match[i]*BlockTokens
		r.prefill[i] += j.held.uncached
		r.active.add(i, j.req, 1)
	}
	return i
}

func (r *rivalPicker) first(_ time.Time, j *job) {
	if j.held.prefilling {
		j.held.prefilling = false
		r.prefill[j.endpoint] -= j.held.uncached
	}
}

func (r *rivalPicker) progress(time.Time, *job, int) {}

func (r *rivalPicker) done(now time.Time, j *job, completed bool) {
	i := int(j.endpoint)
	r.first(now, j)
	r.running[i]--
	if r.active != nil && r.rival.name != "round-robin" {
		r.active.add(i, j.req, -1)
	}
	if completed {
		r.rates[i].completed += j.req.Output
	}
	j.held = held{}
}

func (r *rivalPicker) scraped(now time.Time, endpoint int, p page) {
	r.pages[endpoint] = p
	r.rates[endpoint].sample(now)
}

func (r *rivalPicker) fleet(_ time.Time, ready []bool) {
	r.ready = r.ready[:0]
	for i, is := range ready {
		if is {
			r.ready = append(r.ready, i)
		}
	}
}

// lot draws from n.
func (r *rivalPicker) lot(j *job, n int) int {
	j.seed = mix(j.seed)
	return int(j.seed % uint64(n))
}

// best returns the endpoint with the largest score, a random one of those that
// share it.
func (r *rivalPicker) best(j *job, score []float64) int {
	best, ties := -1, 0
	for k, v := range score {
		switch {
		case best < 0 || v > score[best]:
			best, ties = k, 1
		case v == score[best]:
			if ties++; r.lot(j, ties) == 0 {
				best = k
			}
		}
	}
	return r.ready[best]
}

func (r *rivalPicker) scratch() {
	r.score = slices.Grow(r.score[:0], len(r.ready))[:len(r.ready)]
	r.other = slices.Grow(r.other[:0], len(r.ready))[:len(r.ready)]
}

func (r *rivalPicker) roundRobin(*job) int {
	r.turn++
	return r.ready[r.turn%len(r.ready)]
}

// llmd is 2·queue + 2·kv + 3·prefix. queue is (max−waiting)/(max−min), 1 where all
// are equal; kv is 1−usage; prefix is the share of the prompt's blocks, the last
// perhaps partial, that were sent there: counted up to the first block that no pod
// has, whoever misses one in between.
func (r *rivalPicker) llmd(j *job) int {
	r.scratch()
	r.index.count(j.req.prompt(), r.match)
	total := float64((j.req.Prompt + BlockTokens - 1) / BlockTokens)
	low, high := math.MaxInt, 0
	for _, i := range r.ready {
		low, high = min(low, r.pages[i].waiting), max(high, r.pages[i].waiting)
	}
	for k, i := range r.ready {
		queue := 1.0
		if high > low {
			queue = float64(high-r.pages[i].waiting) / float64(high-low)
		}
		r.score[k] = 2*queue + 2*(1-r.pages[i].kv) + 3*float64(r.match[i])/total
	}
	return r.best(j, r.score)
}

// The load-imbalance gate of AIBrix.
const (
	gateGap    = 8
	gateFactor = 2.0
)

// gate narrows r.ready to the pods with the fewest requests in flight where the
// busiest has far more than the others, and returns what undoes it.
func (r *rivalPicker) gate(old bool) (undo func()) {
	all := r.ready
	low, high, sum := math.MaxInt, 0, 0
	for _, i := range all {
		low, high = min(low, r.running[i]), max(high, r.running[i])
		sum += r.running[i]
	}
	n := len(all)
	fires := high-low >= gateGap && (n <= 2 || float64(high) > gateFactor*(float64(sum-high)/float64(n-1)+1))
	if old {
		fires = high-low > gateGap
	}
	if fires {
		r.ready = slices.DeleteFunc(slices.Clone(all), func(i int) bool { return r.running[i] > low })
	}
	return func() { r.ready = all }
}

// aibrixBlend is prefix-cache:5,load-balance:4 behind the gate. Each part's values
// are winsorised at three median absolute deviations and scaled from their least
// to their most; equals go to the first name.
func (r *rivalPicker) aibrixBlend(j *job) int {
	defer r.gate(false)()
	r.scratch()
	r.index.longest(j.req.prompt(), r.match)
	n := len(j.req.prompt())
	for k, i := range r.ready {
		r.score[k] = 0
		if n > 0 {
			r.score[k] = float64(r.match[i] * 100 / n)
		}
		r.other[k] = -r.loadBalance(i)
	}
	scaleAIBrix(r.score)
	scaleAIBrix(r.other)
	best := 0
	for k := range r.score {
		r.score[k] = r.score[k]*5/9 + r.other[k]*4/9
		if r.score[k] > r.score[best]+1e-9 {
			best = k
		}
	}
	return r.ready[best]
}

// loadBalance is running/capacity × (1 + 2·(1−free)²), infinite below a tenth free.
func (r *rivalPicker) loadBalance(i int) float64 {
	capacity, sum, known := r.rates[i].ewma, 0.0, 0
	if capacity <= 0 {
		for _, o := range r.ready {
			if v := r.rates[o].ewma; v > 0 {
				sum += v
				known++
			}
		}
		capacity = 1
		if known > 0 {
			capacity = sum / float64(known)
		}
	}
	used := r.pages[i].kv
	if 1-used < 0.1 {
		return math.Inf(1)
	}
	return float64(r.running[i]) / capacity * (1 + 2*used*used)
}

// scaleAIBrix maps values, of which the largest is the best, to 0 to 1.
func scaleAIBrix(v []float64) {
	var finite []float64
	for _, x := range v {
		if !math.IsInf(x, 0) {
			finite = append(finite, x)
		}
	}
	if len(finite) == 0 {
		clear(v)
		return
	}
	low, high := math.Inf(-1), math.Inf(1)
	if len(finite) >= 3 {
		mid := median(finite)
		off := make([]float64, len(finite))
		for i, x := range finite {
			off[i] = math.Abs(x - mid)
		}
		if mad := median(off); mad > 0 {
			low, high = mid-3*mad, mid+3*mad
		}
	}
	least, most := math.Inf(1), math.Inf(-1)
	for i, x := range v {
		if math.IsInf(x, 0) {
			continue
		}
		v[i] = min(high, max(low, x))
		least, most = min(least, v[i]), max(most, v[i])
	}
	for i, x := range v {
		switch {
		case math.IsInf(x, 0):
			v[i] = 0
		case most == least:
			v[i] = 1
		default:
			v[i] = (v[i] - least) / (most - least)
		}
	}
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// aibrixPrefix is the policy alone: of the pods that hold some of the prompt, the
// one with the most, then the fewest requests, that has no more than a standard
// deviation over the mean; else the one with the fewest requests.
func (r *rivalPicker) aibrixPrefix(j *job) int {
	undo := r.gate(true)
	candidates := r.ready
	undo()
	r.scratch()
	r.index.longest(j.req.prompt(), r.match)
	mean, spread := 0.0, 0.0
	for _, i := range r.ready {
		mean += float64(r.running[i]) / float64(len(r.ready))
	}
	for _, i := range r.ready {
		d := float64(r.running[i]) - mean
		spread += d * d
	}
	if len(r.ready) > 1 {
		spread = math.Sqrt(spread / float64(len(r.ready)-1))
	}
	found := -1
	for _, i := range candidates {
		if r.match[i] == 0 || float64(r.running[i]) > mean+spread {
			continue
		}
		if found < 0 || r.match[i] > r.match[found] || r.match[i] == r.match[found] && r.running[i] < r.running[found] {
			found = i
		}
	}
	if found >= 0 {
		return found
	}
	for k, i := range r.ready {
		r.score[k] = -float64(r.running[i])
	}
	return r.best(j, r.score)
}

// dynamo is scale·(uncached tokens to read there, this prompt's included)/block +
// the different blocks of all requests there, this one's included; the least wins.
func (r *rivalPicker) dynamo(j *job, scale float64) int {
	r.scratch()
	blocks := j.req.prompt()
	r.active.shared(blocks, r.shared)
	for k, i := range r.ready {
		r.match[i] = 0
		if i < len(r.world.engines) && r.world.engines[i].up {
			r.match[i] = r.world.engines[i].model.Cached(blocks)
		}
		tokens := r.prefill[i] + j.req.Prompt - r.match[i]*BlockTokens
		whole := (j.req.Prompt + BlockTokens - 1) / BlockTokens
		r.score[k] = -(scale*float64(tokens)/BlockTokens + float64(r.active.total[i]+whole-r.shared[i]))
	}
	return r.best(j, r.score)
}

// sglang takes the worker with the fewest requests if the busiest has over 64 more
// and half as many again as it; else the one with the longest match, if that is
// over 0.3 of the prompt, and else again the one with the fewest requests.
func (r *rivalPicker) sglang(j *job) int {
	r.scratch()
	low, high := math.MaxInt, 0
	for k, i := range r.ready {
		low, high = min(low, r.running[i]), max(high, r.running[i])
		r.score[k] = -float64(r.running[i])
	}
	if high-low > 64 && float64(high) > 1.5*float64(low) {
		return r.best(j, r.score)
	}
	r.index.longest(j.req.prompt(), r.match)
	most := 0
	for k, i := range r.ready {
		most = max(most, r.match[i])
		r.other[k] = float64(r.match[i])
	}
	if float64(most*BlockTokens) > 0.3*float64(j.req.Prompt) {
		return r.best(j, r.other)
	}
	return r.best(j, r.score)
}

// drainRate is AIBrix's estimate of what a pod puts out: completed tokens over
// about the last minute, then an average with a time constant of ten seconds.
type drainRate struct {
	completed int
	ewma      float64
	samples   []drained
}

type drained struct {
	at        time.Time
	completed int
}

func (d *drainRate) sample(now time.Time) {
	n := len(d.samples)
	if n > 0 && now.Sub(d.samples[n-1].at) < 5*time.Second {
		return
	}
	var base *drained
	for i := range d.samples {
		if s := &d.samples[i]; base == nil || (now.Sub(s.at)-time.Minute).Abs() < (now.Sub(base.at)-time.Minute).Abs() {
			base = s
		}
	}
	if base != nil && now.Sub(base.at) >= 10*time.Second && d.completed > base.completed {
		rate := float64(d.completed-base.completed) / now.Sub(base.at).Seconds()
		if d.ewma == 0 {
			d.ewma = rate
		} else {
			passed := now.Sub(d.samples[n-1].at).Seconds()
			d.ewma += (1 - math.Exp(-passed/10)) * (rate - d.ewma)
		}
	}
	if n == 36 {
		d.samples = slices.Delete(d.samples, 0, 1)
	}
	d.samples = append(d.samples, drained{now, d.completed})
}
