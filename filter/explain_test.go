package filter

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/scorer"
)

// explanations asks the admin listener.
func (w *world) explanations(t *testing.T, query string) []scorer.Explanation {
	t.Helper()
	rec := httptest.NewRecorder()
	w.adminHandler().ServeHTTP(rec, httptest.NewRequest("GET", "/explain"+query, nil))
	var list []scorer.Explanation
	if err := json.Unmarshal(rec.Body.Bytes(), &list); rec.Code != 200 || err != nil {
		t.Fatalf("%d %v: %s", rec.Code, err, rec.Body)
	}
	return list
}

func TestExplain(t *testing.T) {
	w := newWorld(t, "explain: {header: true}\npolicy: least-request")
	w.publish("default", ep(1, "m"), ep(2, "m"))
	busy := w.stream()
	busy.chat(t, chatBody)
	plain := w.stream()
	plain.chat(t, chatBody)
	if plain.finish(End{}); len(w.explanations(t, "")) != 0 {
		t.Error("explained what nobody asked about")
	}
	s := w.stream()
	to := s.chat(t, chatBody, "x-shunt-explain", "1", "x-request-id", "r1").Destination
	list := w.explanations(t, "?id=r1")
	if len(list) != 1 {
		t.Fatalf("%d explanations", len(list))
	}
	e := list[0]
	if e.Winner != to || e.Model != "m" || e.TargetModel != "m" || e.Policy != "least-request" || e.Fallback != "" || !e.Time.Equal(w.now()) {
		t.Errorf("%+v", e)
	}
	for _, c := range e.Candidates {
		if want := map[bool]float64{true: 1, false: 0}[c.Endpoint == to]; c.Scores["least-request"] != want || c.Total == nil || *c.Total != want || c.Skipped != "" {
			t.Errorf("%+v", c)
		}
	}
	rec := httptest.NewRecorder()
	w.adminHandler().ServeHTTP(rec, httptest.NewRequest("GET", "/explain", nil))
	for _, key := range []string{"id", "time", "model", "target_model", "policy", "winner", "fallback", "candidates", "endpoint", "scores", "total", "skipped"} {
		if !strings.Contains(rec.Body.String(), fmt.Sprintf("%q:", key)) {
			t.Errorf("no %q in %s", key, rec.Body)
		}
	}
	s.finish(End{})
	busy.finish(End{})
	rec = httptest.NewRecorder()
	if w.adminHandler().ServeHTTP(rec, httptest.NewRequest("GET", "/explain?n=x", nil)); rec.Code != 400 {
		t.Errorf("n=x: %d", rec.Code)
	}
	if code, body := ask(w.adminHandler(), "GET", "/explain?idd=x"); code != 400 || body != "unknown parameter \"idd\", valid: id, n\n" {
		t.Errorf("idd=x: %d %q", code, body)
	}

	// Who may not ask is not explained.
	w = newWorld(t, "")
	w.publish("default", ep(1, "m"))
	s = w.stream()
	s.chat(t, chatBody, "x-shunt-explain", "1")
	if s.finish(End{}); len(w.explanations(t, "")) != 0 {
		t.Error("explained where the configuration does not allow it")
	}
}

// TestExplainKeepsNoPrompt: what a client says is not in it.
func TestExplainKeepsNoPrompt(t *testing.T) {
	w := newWorld(t, "explain: {sample: 1}\npolicy: prefix-cache:1,session-affinity:1,queue:1")
	w.publish("default", ep(1, "m"), ep(2, "m"))
	const canary = "canary-4711"
	s := w.stream()
	s.chat(t, chatOf(strings.Repeat(canary, 60), `"cache_salt":"`+canary+`"`, `"prompt_cache_key":"`+canary+`"`),
		"authorization", canary, "cookie", "sid="+canary, "x-session-id", canary)
	s.finish(End{})
	rec := httptest.NewRecorder()
	w.adminHandler().ServeHTTP(rec, httptest.NewRequest("GET", "/explain", nil))
	if body := rec.Body.String(); strings.Contains(body, "canary") || !strings.Contains(body, "prefix-cache") {
		t.Errorf("got %s", body)
	}
}

func TestExplanationsAreBounded(t *testing.T) {
	var x explained
	for i := range maxExplained + 10 {
		x.add(&scorer.Explanation{ID: fmt.Sprint(i)})
	}
	if list := x.newest("", 1<<30); len(list) != maxExplained || list[0].ID != fmt.Sprint(maxExplained+9) {
		t.Errorf("%d are kept", len(list))
	}
	for i := range 50 {
		x.add(&scorer.Explanation{ID: fmt.Sprint("large", i), Candidates: make([]scorer.Candidate, 1000)})
	}
	list := x.newest("", 1<<30)
	if len(list) != maxExplainedCandidates/1000 || list[0].ID != "large49" || x.candidates > maxExplainedCandidates {
		t.Errorf("%d are kept, with %d candidates", len(list), x.candidates)
	}
	if got := x.newest("large40", 5); len(got) != 1 {
		t.Errorf("%d of one id", len(got))
	}
}

// TestLongNamesAreCutShort: of an id that a client may have made up no more is
// kept than of other names, and it is found by the whole of it; a policy that no
// allowed one makes so long is refused.
func TestLongNamesAreCutShort(t *testing.T) {
	w := newWorld(t, "explain: {header: true}\nallowedPolicies: [random, queue]")
	w.publish("default", ep(1, "m"))
	id := strings.Repeat("x", 10*maxName)
	s := w.stream()
	s.chat(t, chatBody, "x-shunt-explain", "1", "x-request-id", id)
	s.finish(End{})
	if list := w.explanations(t, "?id="+id); len(list) != 1 || list[0].ID != id[:maxName] {
		t.Errorf("%d explanations", len(list))
	}
	s = w.stream()
	v := s.chat(t, chatBody, "routing-strategy", strings.Repeat("random,", 10*maxName))
	if v.Reply.Status != 400 || len(v.Reply.Body) > 2*maxName+200 {
		t.Errorf("got %s", show(v))
	}
	s.finish(End{})
}
