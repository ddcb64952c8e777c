package simulate

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
)

// page is what an engine's metrics page says.
type page struct {
	ok               bool
	taken            time.Time
	waiting, running int
	kv               float64
	// means of the last minute, NaN where nothing was measured
	queue, prefill, decode, ttft, between, promptTokens, hits float64
	rate                                                      float64 // requests finished per second of the last minute
	prompt, output                                            float64 // tokens per request since the start, NaN before the first
	blocks                                                    int
}

func (e *engine) page(now time.Time) page {
	m := e.model
	p := page{ok: true, taken: now, waiting: m.Waiting(), running: m.Running(), kv: m.KVUsage(), blocks: m.Params().Blocks}
	e.meter.fill(&p, m.Stats(), now)
	return p
}

// meter turns an engine's counters into means of the last minute, as the scraper
// does: points are ten seconds apart.
type meter struct {
	points [8]counters
	n      int
}

type counters struct {
	taken    time.Time
	sums     [7]float64
	ns       [7]uint64
	finished uint64
}

const (
	meterStep = 10 * time.Second
	meterSpan = time.Minute
)

func (m *meter) fill(p *page, st *sim.Stats, now time.Time) {
	next := counters{taken: now}
	for i, h := range [6]*sim.Histogram{&st.Queue, &st.Prefill, &st.Decode, &st.TTFT, &st.InterToken, &st.RequestPrompt} {
		next.sums[i], next.ns[i] = h.Sum, h.N
	}
	next.sums[6], next.ns[6] = float64(st.PrefixHits), st.PrefixQueries
	for _, n := range st.Finished {
		next.finished += n
	}
	base := counters{taken: epoch}
	for i := range m.n {
		if now.Sub(m.points[i].taken) >= meterSpan {
			base = m.points[i]
		}
	}
	for i, out := range [7]*float64{&p.queue, &p.prefill, &p.decode, &p.ttft, &p.between, &p.promptTokens, &p.hits} {
		switch n := next.ns[i] - base.ns[i]; {
		case n > 0:
			*out = (next.sums[i] - base.sums[i]) / float64(n)
		case next.ns[i] > 0:
			*out = next.sums[i] / float64(next.ns[i])
		default:
			*out = math.NaN()
		}
	}
	p.rate = 0
	if span := now.Sub(base.taken); span > 0 {
		p.rate = float64(next.finished-base.finished) / span.Seconds()
	}
	p.prompt, p.output = math.NaN(), math.NaN()
	if n := float64(st.RequestPrompt.N); n > 0 {
		p.prompt, p.output = st.RequestPrompt.Sum/n, st.RequestGeneration.Sum/n
	}
	if m.n == 0 || now.Sub(m.points[m.n-1].taken) >= meterStep {
		if m.n == len(m.points) {
			copy(m.points[:], m.points[1:])
			m.n--
		}
		m.points[m.n] = next
		m.n++
	}
}

// scrapes is when which Envoy reads which endpoint, and learns of it: each at its
// own phase of the interval.
type scrapes struct {
	interval, delay time.Duration
	who             []scraper // by phase
	read, told      int       // position of the next in who
	readAt, toldAt  time.Duration
}

type scraper struct {
	envoy, endpoint int
	phase           time.Duration
}

func newScrapes(rng *rand.Rand, envoys, endpoints int, interval, delay time.Duration) scrapes {
	s := scrapes{interval: interval, delay: delay}
	for e := range envoys {
		for i := range endpoints {
			s.who = append(s.who, scraper{e, i, time.Duration(rng.Int64N(int64(interval)))})
		}
	}
	slices.SortStableFunc(s.who, func(a, b scraper) int { return int(a.phase - b.phase) })
	return s
}

func (s *scrapes) next() time.Duration {
	return min(s.readAt+s.who[s.read].phase, s.toldAt+s.who[s.told].phase+s.delay)
}

// skip leaves out whole rounds up to then, and returns what next does: over a long
// silence nothing is to be read.
func (s *scrapes) skip(now, to time.Duration) time.Duration {
	if rounds := (to - now) / s.interval; rounds > 0 {
		s.readAt += rounds * s.interval
		s.toldAt += rounds * s.interval
	}
	return s.next()
}

// take returns the next event: a page is read, or what was read becomes known.
func (s *scrapes) take() (envoy, endpoint int, read bool) {
	at, cycle := &s.told, &s.toldAt
	if s.readAt+s.who[s.read].phase <= s.toldAt+s.who[s.told].phase+s.delay {
		at, cycle, read = &s.read, &s.readAt, true
	}
	w := s.who[*at]
	if *at++; *at == len(s.who) {
		*at = 0
		*cycle += s.interval
	}
	return w.envoy, w.endpoint, read
}

// loadMeter measures how uneven the load is: at each second of the run, the most
// requests at one endpoint over the mean.
type loadMeter struct {
	next         time.Duration
	sum, weights float64
}

func (l *loadMeter) upTo(now time.Duration, engines []*engine) {
	for l.next <= now {
		most, sum, n := 0, 0, 0
		for _, e := range engines {
			if e.up {
				most = max(most, len(e.jobs))
				sum += len(e.jobs)
				n++
			}
		}
		if sum >= n && n > 0 {
			l.sum += float64(most) * float64(n) / float64(sum)
			l.weights++
		}
		l.next += time.Second
		if sum == 0 { // idle until now
			l.next = max(l.next, now.Truncate(time.Second)+time.Second)
		}
	}
}

func (l *loadMeter) mean() float64 {
	if l.weights == 0 {
		return 1
	}
	return l.sum / l.weights
}
