package scorer

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Goals are what a request wants of its answer's latency; 0 is none.
type Goals struct {
	// TTFT is the time until the first token, and TPOT from each token to the next.
	TTFT, TPOT time.Duration
}

// Admission is what a request's goals do.
type Admission uint8

// The admissions. An endpoint of which nothing is known is not judged: it counts
// as one that can keep the goals.
const (
	// AdmitAny leaves goals to policies.
	AdmitAny Admission = iota
	// AdmitPrefer leaves out the candidates that are predicted to miss a goal, unless
	// all are.
	AdmitPrefer
	// AdmitOnly does the same, and picks nothing where all are.
	AdmitOnly
)

// SLOOutcome is what an admission did.
type SLOOutcome uint8

// The outcomes.
const (
	SLONone     SLOOutcome = iota // the request has no goal, or Admission is AdmitAny
	SLOKept                       // no candidate is predicted to miss
	SLONarrowed                   // some are, and are left out
	SLOMissed                     // all are, and one was picked
	SLORefused                    // all are, and none was picked
	// NumSLOOutcomes is how many there are.
	NumSLOOutcomes
)

// String returns the word for metrics.
func (o SLOOutcome) String() string {
	switch o {
	case SLOKept:
		return "kept"
	case SLONarrowed:
		return "narrowed"
	case SLOMissed:
		return "missed"
	case SLORefused:
		return "refused"
	default:
		return "none"
	}
}

// admit leaves those candidates that can keep the request's goals.
func (w *pick) admit() {
	in := &w.in
	goals := &in.Request.Goals
	if in.Admission == AdmitAny || goals.TTFT <= 0 && goals.TPOT <= 0 {
		return
	}
	w.predict(false)
	missing := 0
	for k := range w.cand {
		if w.misses(k) {
			missing++
		}
	}
	if missing > 0 && in.Explain != nil {
		w.explainMissing()
	}
	switch {
	case missing == 0:
		w.slo = SLOKept
	case missing < len(w.cand):
		w.slo = SLONarrowed
		w.narrow(GuardSLO, func(k int, _ int32) bool { return !w.misses(k) })
	case in.Admission == AdmitOnly:
		w.slo = SLORefused
	default:
		w.slo = SLOMissed
	}
}

// misses reports whether the candidate at a position is predicted to miss a goal.
// What is unknown misses nothing.
func (w *pick) misses(k int) bool {
	g := &w.in.Request.Goals
	return g.TTFT > 0 && w.first[k] > g.TTFT.Seconds() || g.TPOT > 0 && w.between[k] > g.TPOT.Seconds()
}

// explainMissing notes which candidates miss a goal, and by how much.
func (w *pick) explainMissing() {
	g := &w.in.Request.Goals
	w.missing = make([]string, len(w.in.Candidates))
	from := 0
	for k, i := range w.cand {
		for w.in.Candidates[from] != i {
			from++
		}
		if !w.misses(k) {
			continue
		}
		var why []string
		if g.TTFT > 0 && w.first[k] > g.TTFT.Seconds() {
			why = append(why, missText("first token", w.first[k], g.TTFT))
		}
		if g.TPOT > 0 && w.between[k] > g.TPOT.Seconds() {
			why = append(why, missText("each token", w.between[k], g.TPOT))
		}
		w.missing[from] = GuardSLO.String() + ": " + strings.Join(why, "; ")
	}
}

func missText(what string, predicted float64, goal time.Duration) string {
	took := time.Duration(predicted * float64(time.Second)).Round(100 * time.Microsecond)
	return fmt.Sprintf("%s after %v, wanted after %v", what, took, goal)
}

// refusal is the choice of none.
func (w *pick) refusal() Choice {
	if w.in.Explain != nil {
		w.explainCandidates(w.in.Explain)
	}
	return Choice{Index: -1, Guarded: w.guards, SLO: SLORefused}
}

// predict fills in w.first and w.between for the candidates. With assume, an
// endpoint of which nothing is known is taken for the mean of the others.
func (w *pick) predict(assume bool) {
	n := len(w.cand)
	w.first, w.between = resize(w.first, n), resize(w.between, n)
	predictor := w.in.Snapshot.Predictor(w.in.Request.Model, w.match == nil, w.in.Now)
	w.prompts()
	base, perToken, knownFirst := 0.0, 0.0, 0
	sum, knownBetween := 0.0, 0
	first, between, todo := w.first, w.between, w.todo
	var l pool.Latency
	for k, i := range w.cand {
		predictor.Predict(i, &l)
		took := l.TTFT(todo[k])
		first[k], between[k] = took, l.Between
		todo[k] += l.Ahead
		if took == took {
			base += l.Base
			perToken += l.PerToken
			knownFirst++
		}
		if l.Between == l.Between {
			sum += l.Between
			knownBetween++
		}
	}
	if !assume || knownFirst == n && knownBetween == n {
		return
	}
	meanBase, meanPerToken, mean := base/float64(knownFirst), perToken/float64(knownFirst), sum/float64(knownBetween)
	for k := range w.cand { // NaN where nothing at all is known
		if first[k] != first[k] {
			first[k] = meanBase + meanPerToken*todo[k]
		}
		if between[k] != between[k] {
			between[k] = mean
		}
	}
}

// The tiers of slo-headroom: all of a higher one come before those of a lower.
const (
	tierBoth  uint8 = iota // both goals would be missed
	tierFirst              // the first token's alone
	tierPace               // that from token to token alone
	tierIdle               // one would be, but nothing is in flight: it can be no better elsewhere
	tierKeeps
	numTiers
)

// sloHeadroom is llm-d's latency-scorer behind its slo-headroom-tier-filter: the
// headroom of an endpoint is goal − prediction, for the first token and from token
// to token, scaled to [0, 1] over the endpoints of its tier and weighed by
// ttftWeight and tpotWeight. Of those that keep all goals the one with the most
// headroom wins, or with pack the one with the least, so that others stay free for
// what needs them; where none does, idle ones, then those that miss least.
//
// Unlike there, pack is not the default: predictions are means, and an endpoint
// that is filled up to the goal misses it half of the time. A goal that the request
// does not have has no part in it, and an endpoint of which nothing is known is
// taken for the mean. Without goals the least latency wins.
func (w *pick) sloHeadroom(pt *part) {
	byFirst, byPace, pack := pt.p[0], pt.p[1], pt.p[2] != 0
	g := &w.in.Request.Goals
	w.predict(true)
	w.byRequests = true
	if w.first[0] != w.first[0] { // it is NaN for all: nothing is known of any
		byFirst = 0
	}
	if w.between[0] != w.between[0] {
		byPace = 0
	}
	if g.TTFT <= 0 && g.TPOT > 0 {
		byFirst = 0
	}
	if g.TPOT <= 0 && g.TTFT > 0 {
		byPace = 0
	}
	if byFirst == 0 && byPace == 0 {
		for k := range w.raw {
			w.raw[k] = none
		}
		return
	}
	w.tiers(wantOf(g.TTFT, byFirst), wantOf(g.TPOT, byPace))
	var spans [numTiers]struct{ first, pace span }
	for t := range spans {
		spans[t].first, spans[t].pace = noSpan, noSpan
	}
	for k, t := range w.tier {
		s := &spans[t]
		s.first.take(w.first[k])
		s.pace.take(w.between[k])
	}
	// A score is floor + part·early, early being the share of the tier's span by which
	// an endpoint is earlier than the latest: a line over both predictions.
	var lines [numTiers]struct{ at, first, pace float64 }
	judged := g.TTFT > 0 || g.TPOT > 0
	for t := range lines {
		floor, part := float64(t)/(2*float64(tierKeeps)), 0.8/(2*float64(tierKeeps))
		switch {
		case !judged:
			floor, part = 0, 1
		case uint8(t) == tierKeeps && pack:
			floor, part = 1, -0.5
		case uint8(t) == tierKeeps:
			floor, part = 0.5, 0.5
		}
		s, l := &spans[t], &lines[t]
		perFirst, perPace := s.first.per(byFirst), s.pace.per(byPace)
		weight := 0.0
		if perFirst > 0 {
			weight += byFirst
		}
		if perPace > 0 {
			weight += byPace
		}
		if weight == 0 { // all of the tier are equal
			l.at = floor + max(0, part)
			continue
		}
		part /= weight
		l.at = floor
		if perFirst > 0 {
			l.at += part * perFirst * s.first.high
			l.first = -part * perFirst
		}
		if perPace > 0 {
			l.at += part * perPace * s.pace.high
			l.pace = -part * perPace
		}
	}
	for k, t := range w.tier {
		l := &lines[t]
		v := l.at
		if l.first != 0 { // else it may be NaN
			v += l.first * w.first[k]
		}
		if l.pace != 0 {
			v += l.pace * w.between[k]
		}
		w.raw[k] = v
	}
}

// wantOf is a goal in seconds, infinite where it has no part.
func wantOf(goal time.Duration, weight float64) float64 {
	if goal <= 0 || weight == 0 {
		return math.Inf(1)
	}
	return goal.Seconds()
}

// tiers fills in w.tier: where a candidate stands with the goals.
func (w *pick) tiers(wantFirst, wantPace float64) {
	w.tier = resize(w.tier, len(w.cand))
	for k := range w.tier {
		late, slow := w.first[k] > wantFirst, w.between[k] > wantPace
		switch {
		case !late && !slow:
			w.tier[k] = tierKeeps
		case w.flight[k] == 0:
			w.tier[k] = tierIdle
		case !late:
			w.tier[k] = tierPace
		case !slow:
			w.tier[k] = tierFirst
		default:
			w.tier[k] = tierBoth
		}
	}
}

// span is the range of some values.
type span struct{ low, high float64 }

var noSpan = span{math.Inf(1), math.Inf(-1)}

func (s *span) take(v float64) {
	if v < s.low {
		s.low = v
	}
	if v > s.high {
		s.high = v
	}
}

// per is the weight of one unit of the span, 0 where it has none.
func (s *span) per(weight float64) float64 {
	if size := s.high - s.low; weight > 0 && size > 0 && !math.IsInf(size, 0) {
		return weight / size
	}
	return 0
}
