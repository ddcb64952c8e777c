package e2e

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
	"github.com/shuntproxy/shunt/scorer"
)

const subsetHeader = "x-gateway-destination-endpoint-subset"

// TestLatencyGoals: requests say how soon they need an answer. Of an engine whose
// streams were seen it is known that no token comes within a microsecond and each
// within an hour; of one that was not, nothing is, and it is not judged.
func TestLatencyGoals(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 2, config: "slo: {admission: true}\npolicy: least-request\nsubsetHeader: true\nexplain: {header: true}\n" +
			"scrape: {interval: 60s, staleAfter: 120s}\n" + // so that no page says anything either
			"objectives: [{name: low, priority: -1}, {name: hasty, priority: -1, tpotMs: 0.001}]\n"})
		w.readAll(t) // while it still says nothing
		const ttft, tpot, objective = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-llm-d-inference-objective"
		const never, always = "0.001", "3600000"
		ask := func(t *testing.T, body string, pairs ...string) reply {
			t.Helper()
			return w.must(t, w.h1, call{body: strings.NewReader(body), header: header(append(pairs, "x-shunt-explain", "1")...)})
		}
		// ok checks that a request is served, by an engine if one is named.
		ok := func(t *testing.T, by string, r reply) {
			t.Helper()
			if got := r.header.Get("X-Shunt-Endpoint"); r.status != 200 || by != "" && got != by {
				t.Errorf("got %v of %s, want it of %s", r, got, by)
			}
		}
		counted := func(t *testing.T, outcome string) float64 {
			t.Helper()
			return w.metric(t, "shunt_slo_admissions_total", "outcome", outcome)
		}
		for _, e := range w.engines {
			e.SetDelays(sim.Delays{BetweenTokens: sim.Duration(2 * time.Millisecond)})
		}
		a, b := w.engines[0].Addr(), w.engines[1].Addr()
		long := strings.Replace(streamed, "{", `{"max_tokens":40,`, 1)

		t.Run("unknown is not judged", func(t *testing.T) {
			ok(t, "", ask(t, chat, ttft, never, tpot, never, objective, "low"))
			if n := counted(t, "kept"); n != 1 {
				t.Errorf("counted %v times", n)
			}
		})
		ok(t, a, ask(t, long, subsetHeader, a))
		t.Run("others are preferred", func(t *testing.T) {
			for range 5 {
				ok(t, b, ask(t, chat, ttft, never))
				ok(t, b, ask(t, chat, tpot, never, objective, "low"))
				ok(t, b, ask(t, chat, "x-slo-ttft-ms", never, objective, "low")) // the older name
			}
			if n := counted(t, "narrowed"); n != 15 {
				t.Errorf("counted %v times", n)
			}
		})
		ok(t, b, ask(t, long, subsetHeader, b))
		t.Run("sheddable ones are refused", func(t *testing.T) {
			for _, goals := range [][]string{{ttft, never, objective, "low"}, {tpot, never, objective, "low"}, {ttft, always, objective, "hasty"}} {
				before, refused := w.drops(t, "rejected-saturated"), counted(t, "refused")
				r := ask(t, chat, goals...)
				w.dropped(t, r, 429, "rejected-saturated", before)
				if n := counted(t, "refused"); n != refused+1 {
					t.Errorf("%v: counted %v times", goals, n-refused)
				}
				id, _ := w.access(t, r.id).at("request_id").(string)
				_, body := w.adminGet("/explain?id=" + id)
				var list []scorer.Explanation
				if err := json.Unmarshal([]byte(body), &list); err != nil || len(list) != 1 || list[0].Winner != "" || len(list[0].Candidates) != 2 ||
					!strings.HasPrefix(list[0].Candidates[0].Skipped, "slo: ") {
					t.Errorf("%v: explained as %s", goals, body)
				}
			}
		})
		t.Run("the rest is served", func(t *testing.T) {
			ok(t, "", ask(t, chat, ttft, never, tpot, never))                       // not sheddable
			ok(t, "", ask(t, chat, ttft, always, tpot, always, objective, "low"))   // it can be kept
			ok(t, "", ask(t, chat, objective, "low"))                               // no goal
			ok(t, "", ask(t, chat, ttft, "0", tpot, "0", objective, "low"))         // no goal either
			ok(t, "", ask(t, chat, ttft, "soon", objective, "low"))                 // nor one that can be read
			ok(t, "", ask(t, long, tpot, never, ttft, never, subsetHeader, a))      // of those it may go to
			ok(t, "", ask(t, chat, tpot, always, ttft, always, objective, "hasty")) // its own goal counts
			if n := counted(t, "missed"); n != 2 {
				t.Errorf("missed is counted %v times", n)
			}
		})
		w.waitLoad(t, 0, 0)
	})
}

// TestHeadroomPolicy: the policy goes where a goal is kept, without admission.
func TestHeadroomPolicy(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 2, config: "policy: slo-headroom\nsubsetHeader: true\nexplain: {header: true}\n" +
			"scrape: {interval: 60s, staleAfter: 120s}\nobjectives: [{name: low, priority: -1}]\n"})
		w.readAll(t) // while it still says nothing
		fallback := func(pairs ...string) string {
			t.Helper()
			r := w.must(t, w.h1, call{body: strings.NewReader(streamed), header: header(append(pairs, "x-shunt-explain", "1")...)})
			if r.status != 200 || r.header.Get("X-Shunt-Policy") != "slo-headroom" {
				t.Fatalf("got %v", r)
			}
			return r.header.Get("X-Shunt-Fallback")
		}
		if got := fallback("x-llm-d-slo-ttft-ms", "100"); got != "random" {
			t.Errorf("nothing is known yet, and the fallback is %q", got)
		}
		// One engine is known now; the other is taken for the same.
		for range 3 {
			if got := fallback("x-llm-d-slo-ttft-ms", "0.001", "x-llm-d-inference-objective", "low"); got != "" {
				t.Errorf("fallback %q", got)
			}
		}
		w.waitLoad(t, 0, 0)
	})
}
