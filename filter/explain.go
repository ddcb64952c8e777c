package filter

import (
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/shuntproxy/shunt/scorer"
)

const (
	// maxExplained bounds the decisions that are kept for /explain, and
	// maxExplainedCandidates the endpoints in all of them together.
	maxExplained           = 2048
	maxExplainedCandidates = 32768
)

// explained keeps the newest decisions that somebody wanted explained. Its lock
// is held for as long as it takes to add or copy pointers.
type explained struct {
	mu sync.Mutex
	// protected by mu
	list       []*scorer.Explanation // oldest first
	candidates int
}

func (x *explained) add(e *scorer.Explanation) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list = append(x.list, e)
	x.candidates += len(e.Candidates)
	drop := 0
	for len(x.list)-drop > maxExplained || x.candidates > maxExplainedCandidates && len(x.list)-drop > 1 {
		x.candidates -= len(x.list[drop].Candidates)
		x.list[drop] = nil
		drop++
	}
	x.list = x.list[drop:]
}

// newest returns up to n decisions, the newest first; those of one request where
// id is not "".
func (x *explained) newest(id string, n int) []*scorer.Explanation {
	x.mu.Lock()
	list := slices.Clone(x.list)
	x.mu.Unlock()
	out := []*scorer.Explanation{}
	for _, e := range slices.Backward(list) {
		if len(out) == n {
			break
		}
		if id == "" || e.ID == id {
			out = append(out, e)
		}
	}
	return out
}

// wantExplanation begins an explanation where the request asks for one and may,
// or the lot falls on it.
func (r *Request) wantExplanation(h *Head) {
	x := &r.set.cfg.Explain
	if r.explain || x.Sample > 0 && rand.Float64() < x.Sample {
		r.why = &scorer.Explanation{ID: strings.Clone(explainedID(h.RequestID))}
		if r.why.ID == "" {
			r.why.ID = strconv.FormatUint(rand.Uint64(), 16)
		}
	}
}

// explainedID is what is kept of a request's id: who sets it may be a client.
func explainedID(id string) string { return id[:min(len(id), maxName)] }

// explainPick hands over the explanation of a pick.
func (r *Request) explainPick() {
	if r.why == nil {
		return
	}
	r.why.Model, r.why.TargetModel = r.asked, r.model
	r.gen.runtime.explained.add(r.why)
	r.why = nil
}

// defaultExplanations is how many /explain shows where the request does not say.
const defaultExplanations = 100

// serveExplain answers GET /explain?id=ID&n=N: the newest decisions first.
func (rt *Runtime) serveExplain(w http.ResponseWriter, req *http.Request) {
	query, ok := parameters(w, req, "id", "n")
	if !ok {
		return
	}
	n := defaultExplanations
	if text := query.Get("n"); text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil || n < 1 {
			http.Error(w, "n: "+quote(text)+" is not a number from 1 on", http.StatusBadRequest)
			return
		}
	}
	w.Header().Set("content-type", "application/json")
	_ = json.NewEncoder(w).Encode(rt.explained.newest(explainedID(query.Get("id")), n)) // a client that has gone needs no answer
}
