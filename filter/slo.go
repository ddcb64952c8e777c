package filter

import (
	"time"

	"github.com/shuntproxy/shunt/scorer"
)

// goals are what the request wants of its answer's latency: its own goals, each
// else its objective's. What it has waited is taken off the first token's.
func (r *Request) goals() scorer.Goals {
	g := scorer.Goals{TTFT: r.goal(), TPOT: r.identity.wishes().tpot}
	if g.TTFT > 0 {
		g.TTFT = max(time.Nanosecond, g.TTFT-r.waited)
	}
	if g.TPOT == 0 && r.wait.objective != nil {
		g.TPOT = r.wait.objective.TPOT()
	}
	return g
}

// admission is what the goals do beside what the policy makes of them.
func (r *Request) admission() scorer.Admission {
	switch {
	case !r.set.cfg.SLO.Admission || r.model == "":
		return scorer.AdmitAny
	case r.priority() < 0:
		return scorer.AdmitOnly
	default:
		return scorer.AdmitPrefer
	}
}

// missesGoals answers a sheddable request whose goals no endpoint is predicted to
// keep.
func (r *Request) missesGoals(v *Verdict) {
	g, text := r.goals(), ""
	if ttft := r.goal(); ttft > 0 {
		text = ", first token after " + ttft.String()
	}
	if g.TPOT > 0 {
		text += ", each further one after " + g.TPOT.String()
	}
	r.drop(DropSaturated, "no endpoint of the model is predicted to keep the request's goals"+text+", and its priority is below 0", v)
}
