package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
	"github.com/shuntproxy/shunt/scorer"
)

// TestHeldRequestsSpreadEvenly sends 400 requests at once that no engine answers:
// under least-request each of four equal engines has 100 of them, give or take one.
func TestHeldRequestsSpreadEvenly(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		const engines, all = 4, 400
		w := start(t, d, setup{engines: engines})
		for _, e := range w.engines {
			e.SetHold(true)
		}
		begun := make([]*background, all)
		for i := range begun {
			begun[i] = w.begin(t, w.h2, call{body: strings.NewReader(chat)})
		}
		w.waitLoad(t, all, 0)
		var held []int
		eventually(t, "all are held", func() string {
			held = held[:0]
			sum := 0
			for _, e := range w.engines {
				n := e.Counters().Held
				held = append(held, n)
				sum += n
			}
			if sum != all {
				return fmt.Sprint(held)
			}
			return ""
		})
		if slices.Min(held) < all/engines-1 || slices.Max(held) > all/engines+1 {
			t.Errorf("the engines hold %v", held)
		}
		for _, e := range w.engines {
			e.SetHold(false)
		}
		for _, b := range begun {
			if r, err := b.wait(); err != nil || r.status != 200 {
				t.Fatalf("%v, %v", r, err)
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestExplainedWinnerGotIt compares explain with what arrived, for 10,000
// requests, half of them through each door, under a weighted policy that reads
// metrics, live load and prefixes.
func TestExplainedWinnerGotIt(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		const rounds, batch, workers = 20, 500, 10 // 10,000 requests
		w := start(t, d, setup{engines: 3, config: "policy: queue:2,kv-cache:2,prefix-cache:3,least-request:1\n" +
			"explain: {header: true, sample: 1}\nscrape: {interval: 50ms}\n"})
		for round := range rounds {
			var mu sync.Mutex
			var ids []string
			var wg sync.WaitGroup
			for worker := range workers {
				wg.Go(func() {
					for i := range batch / workers {
						body := fmt.Sprintf(`{"model":"m","max_tokens":1,"messages":[{"role":"user","content":%q}]}`,
							strings.Repeat(fmt.Sprintf("conversation %d of %d. ", (worker*7+i)%12, round), 40))
						r, err := w.do(t.Context(), w.h2, call{body: strings.NewReader(body)})
						if err != nil || r.status != 200 {
							t.Errorf("%v, %v", r, err)
							return
						}
						mu.Lock()
						ids = append(ids, r.id)
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			by := map[string]string{}
			for _, e := range w.engines {
				for _, r := range e.Requests("") {
					by[r.Headers.Get("X-Request-Id")] = e.Addr()
				}
				e.ResetRequests()
			}
			status, body := w.adminGet("/explain?n=1000")
			var list []scorer.Explanation
			if err := json.Unmarshal([]byte(body), &list); status != 200 || err != nil {
				t.Fatalf("%d, %v", status, err)
			}
			explained := 0
			for _, x := range list[:min(len(list), batch)] {
				if by[x.ID] != x.Winner {
					t.Errorf("%s: explain says %s, %q got it", x.ID, x.Winner, by[x.ID])
				}
				best, total := "", -1.0
				for _, c := range x.Candidates {
					if c.Total != nil && *c.Total > total {
						best, total = c.Endpoint, *c.Total
					}
					if c.Endpoint == x.Winner && c.Total != nil && *c.Total == total {
						best = x.Winner // of equals any may win
					}
				}
				if best != x.Winner {
					t.Errorf("%s: %s has the best total, %s won", x.ID, best, x.Winner)
				}
				explained++
			}
			if explained != batch {
				t.Fatalf("round %d: %d of %d explained", round, explained, batch)
			}
		}
	})
}

// TestConversationsStay: under prefix-cache a conversation goes to one engine,
// and different ones use them all.
func TestConversationsStay(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 3, config: "policy: prefix-cache\nexplain: {header: true}\n"})
		used := map[string]bool{}
		// Where nobody holds a prompt any engine may get it: twelve conversations
		// leave one of three out in a run of fifty.
		for conversation := 0; conversation < 12 || len(used) < 3 && conversation < 300; conversation++ {
			text := strings.Repeat(fmt.Sprintf("conversation %d, which is long. ", conversation), 30)
			at := map[string]bool{}
			for turn := range 4 {
				body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"model":"m","max_tokens":1}`, text+fmt.Sprint("turn ", turn))
				r := w.must(t, w.h1, call{body: strings.NewReader(body), header: header("x-shunt-explain", "1")})
				at[r.header.Get("X-Shunt-Endpoint")] = true
				used[r.header.Get("X-Shunt-Endpoint")] = true
			}
			if len(at) != 1 {
				t.Errorf("conversation %d went to %v", conversation, at)
			}
		}
		if len(used) != 3 {
			t.Errorf("only %v were used", used)
		}
	})
}

// TestPoliciesPerRequest: by header, alone and with weights.
func TestPoliciesPerRequest(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 2, config: "allowedPolicies: [random, queue, kv-cache]\nexplain: {header: true}\n"})
		for asked, want := range map[string]string{
			"":                   "least-request",
			"random":             "random",
			"queue:2,kv-cache:1": "queue:2,kv-cache:1",
		} {
			h := header("x-shunt-explain", "1")
			if asked != "" {
				h.Set("routing-strategy", asked)
			}
			r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: h})
			if got := r.header.Get("X-Shunt-Policy"); got != want {
				t.Errorf("%q: policy %q", asked, got)
			}
		}
		for _, asked := range []string{"least-request", "queue:2,least-request:1", "nonsense", "queue:x"} {
			r, err := w.do(t.Context(), w.h1, call{body: strings.NewReader(chat), header: header("routing-strategy", asked)})
			if err != nil || r.status != 400 || errorOf(t, r).Error.Code != "invalid_routing_strategy" {
				t.Errorf("%q: %v, %v", asked, r, err)
			}
		}
	})
}

// TestWedgedEngineGetsNothingNew: an engine that has work and shows no sign of
// life is left alone until it does.
func TestWedgedEngineGetsNothingNew(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 2, config: "policy: random\n"})
		stuck, other := w.engines[0], w.engines[1]
		stuck.SetHold(true)
		var held []*background
		eventually(t, "the engine has work", func() string {
			if stuck.Counters().Held > 0 {
				return ""
			}
			held = append(held, w.begin(t, w.h2, call{body: strings.NewReader(`{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`)}))
			return "no"
		})
		eventually(t, "it counts as wedged", func() string {
			held = append(held, w.begin(t, w.h2, call{body: strings.NewReader(chat)})) // it may go there, too
			if w.metric(t, "shunt_guarded_picks_total", "guard", "wedged") == 0 {
				return "no guarded pick"
			}
			return ""
		})
		before := other.Counters().Received
		for range 30 {
			w.must(t, w.h1, call{body: strings.NewReader(chat)})
		}
		if n := other.Counters().Received - before; n < 30 {
			t.Errorf("the other engine got %d of 30", n)
		}
		stuck.SetHold(false)
		for _, b := range held {
			_, _ = b.wait()
		}
		wait(t, stuck, func(c sim.Counters) bool { return c.Held == 0 })
		w.waitLoad(t, 0, 0)
	})
}
