package scorer

import "time"

// Explanation says why a request went where it did. Any goroutine may read it
// once it is handed over.
type Explanation struct {
	ID          string    `json:"id"`
	Time        time.Time `json:"time"`
	Model       string    `json:"model"`
	TargetModel string    `json:"target_model"`
	Policy      string    `json:"policy"`
	// Winner is "" where the request was refused.
	Winner string `json:"winner"`
	// Fallback is "" or what the policy did in place of its rule.
	Fallback   string      `json:"fallback"`
	Candidates []Candidate `json:"candidates"`
}

// Candidate is one endpoint that was considered.
type Candidate struct {
	Endpoint string `json:"endpoint"`
	// Scores are by part, from 0 to 1; a part that could not score the endpoint is
	// left out.
	Scores map[string]float64 `json:"scores"`
	// Total is the weighted sum, in which a part that could not score the endpoint
	// counts with its mean. Null where the policy could not score it, or a guard
	// took it out.
	Total *float64 `json:"total"`
	// Skipped says why it could not win: the name of a guard, "not scored", or "slo:"
	// and the goals that it was predicted to miss.
	Skipped string `json:"skipped"`
}

// notScored is the reason of an endpoint that the only part can't score.
const notScored = "not scored"

// note is what one part said.
type note struct {
	kind   kind
	weight float64
	ok     bool
	scores []float64 // by position in cand
	has    []bool    // a value of its own, and not the mean
}

// noteScores keeps what the part's values in w.raw say, for explain.
func (w *pick) noteScores(pt *part) {
	if w.in.Explain == nil {
		return
	}
	one := note{kind: pt.kind, weight: pt.weight}
	var n scale
	n, one.ok = w.scale(pt)
	one.scores, one.has = make([]float64, len(w.raw)), make([]bool, len(w.raw))
	for k, v := range w.raw {
		one.scores[k], one.has[k] = n.of(v), v == v
	}
	w.notes = append(w.notes, one)
}

// explainCandidates fills in what was considered, and returns where in it those
// are that the guards left.
func (w *pick) explainCandidates(out *Explanation) (at []int) {
	s := w.in.Snapshot
	out.Time, out.Policy = w.in.Now, w.policy.text
	out.Candidates = make([]Candidate, len(w.in.Candidates))
	at = make([]int, len(w.cand))
	from := 0
	for k, i := range w.in.Candidates {
		one := &out.Candidates[k]
		one.Endpoint, one.Scores, one.Skipped = s.Endpoints[i].Key, map[string]float64{}, w.skippedBy(k)
		if from < len(w.cand) && w.cand[from] == i {
			at[from] = k
			from++
		}
	}
	return at
}

// explain fills in what the pick that chose c saw.
func (w *pick) explain(c Choice, out *Explanation) {
	at := w.explainCandidates(out)
	out.Winner, out.Fallback = w.in.Snapshot.Endpoints[c.Index].Key, c.Fallback.String()
	totals := make([]float64, len(w.cand))
	scored := make([]bool, len(w.cand))
	for _, n := range w.notes {
		if !n.ok {
			continue
		}
		for k, score := range n.scores {
			if n.has[k] {
				out.Candidates[at[k]].Scores[kinds[n.kind].name] = score
			}
			scored[k] = scored[k] || n.has[k] || len(w.policy.parts) > 1
			totals[k] += n.weight * score
		}
	}
	for k := range totals {
		one := &out.Candidates[at[k]]
		if scored[k] {
			one.Total = &totals[k]
		} else {
			one.Skipped = notScored
		}
	}
}
