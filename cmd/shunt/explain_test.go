package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/scorer"
)

func TestExplain(t *testing.T) {
	total := 1.5
	list := []scorer.Explanation{{
		ID: "r1", Time: time.Unix(0, 0).UTC(), Model: "chat", TargetModel: "llama", Policy: "queue:1,kv-cache:1", Winner: "10.0.0.1:8000",
		Candidates: []scorer.Candidate{
			{Endpoint: "10.0.0.1:8000", Scores: map[string]float64{"queue": 1, "kv-cache": 0.5}, Total: &total},
			{Endpoint: "10.0.0.2:8000", Scores: map[string]float64{}, Skipped: "wedged"},
		},
	}}
	admin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/explain" || r.URL.Query().Get("n") != "3" || r.URL.Query().Get("id") != "r1" {
			http.Error(w, "what", http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(list)
	}))
	defer admin.Close()
	address := strings.TrimPrefix(admin.URL, "http://")
	code, stdout, stderr := shunt(t, "", "explain", "--admin", address, "-n", "3", "--id", "r1")
	want := `1970-01-01T00:00:00Z  r1  model chat → llama  policy queue:1,kv-cache:1  winner 10.0.0.1:8000
     endpoint       kv-cache  queue  total  skipped
  *  10.0.0.1:8000  0.500     1.000  1.500  
     10.0.0.2:8000  -         -      -      wedged

`
	if code != 0 || stdout != want {
		t.Errorf("code %d, %s\n%s", code, stderr, stdout)
	}
	code, stdout, _ = shunt(t, "", "explain", "--admin", address, "-n", "3", "--id", "r1", "-o", "json")
	var back []scorer.Explanation
	if err := json.Unmarshal([]byte(stdout), &back); code != 0 || err != nil || len(back) != 1 || back[0].Winner != list[0].Winner {
		t.Errorf("code %d, %v: %s", code, err, stdout)
	}
	list = []scorer.Explanation{{ID: "r1", Model: "m", TargetModel: "m", Policy: "queue", Winner: "10.0.0.1:8000", Fallback: "random", Candidates: []scorer.Candidate{{Endpoint: "10.0.0.1:8000", Skipped: "not scored"}}}}
	if _, stdout, _ = shunt(t, "", "explain", "--admin", address, "-n", "3", "--id", "r1"); !strings.Contains(stdout, `
     endpoint       total  skipped
  *  10.0.0.1:8000  -      not scored
`) {
		t.Errorf("without any score:\n%s", stdout)
	}
	list = []scorer.Explanation{}
	if code, stdout, stderr = shunt(t, "", "explain", "--admin", address, "-n", "3", "--id", "r1"); code != 0 || stdout != "" || !strings.Contains(stderr, `request "r1": Envoy gives`) {
		t.Errorf("an id that is not kept: code %d, %q, %q", code, stdout, stderr)
	}
	for args, want := range map[string]string{
		"explain --output yaml":              "unknown form",
		"explain --admin 127.0.0.1:1":        "refused",
		"explain --admin " + address:         "404",
		"explain --admin unix:/nowhere/sock": "no such file",
	} {
		if code, _, stderr := shunt(t, "", strings.Fields(args)...); code != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: code %d, %s", args, code, stderr)
		}
	}
}
