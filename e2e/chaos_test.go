package e2e

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
)

// leaver is a body whose client leaves once so many bytes were sent.
type leaver struct {
	io.Reader
	left  int
	leave func()
}

func (l *leaver) Read(b []byte) (int, error) {
	if l.left <= 0 {
		l.leave()
		return 0, context.Canceled
	}
	n, err := l.Reader.Read(b[:min(len(b), l.left)])
	l.left -= n
	return n, err
}

// chaoticCall is a request of any kind: a body in odd pieces, with trailers or
// without, of a client that stays or leaves while it sends, waits or reads, and
// for which shunt panics, lets it wait or does neither.
func chaoticCall(rng *rand.Rand, leave func()) (q call, readAtMost int) {
	readAtMost = -1
	body := chat
	switch rng.IntN(10) {
	case 0:
		body = ""
	case 1:
		body = `{"model":"m"`
	case 2:
		body = chatOf(limit + rng.IntN(2))
	case 3, 4, 5:
		body = chatOf(60 + rng.IntN(1<<18))
	}
	q.path = []string{"/v1/chat/completions", "/v1/chat/completions", "/openai/v1/chat/completions?x=1", "/unknown"}[rng.IntN(4)]
	if rng.IntN(3) == 0 {
		body = strings.Replace(body, "{", `{"stream":true,"max_tokens":50,`, 1)
	}
	var sent io.Reader = &pieces{body, []int{1 << 20, 65537, 4099, 997, 61}[rng.IntN(5)]}
	q.header = header("x-llm-d-model-name-rewrite", []string{"", "", "m"}[rng.IntN(3)])
	if rng.IntN(2) == 0 {
		test := []string{"panic-headers", "panic-body", "panic-trailers", "panic-response", "panic-response body", "panic-finish", "wait-30ms", "wait-10m", "wait-10m"}
		q.header.Set("X-Shunt-Test", test[rng.IntN(len(test))])
	}
	switch rng.IntN(8) {
	case 0:
		sent = &leaver{Reader: sent, left: rng.IntN(len(body) + 1), leave: leave}
	case 1:
		readAtMost = rng.IntN(2000)
	case 2:
		time.AfterFunc(time.Duration(rng.IntN(20))*time.Millisecond, leave)
	}
	if rng.IntN(3) == 0 {
		q.length, q.trailer = -1, http.Header{"X-Checksum": {"kept"}, "X-Gateway-Destination-Endpoint": {"127.0.0.1:1"}}
	} else if rng.IntN(2) == 0 {
		q.length = -1
	}
	q.body = sent
	return q, readAtMost
}

// TestEverythingAtOnce: requests of all kinds over engines that fail and a
// listener that is replaced again and again. Nothing of them is left, and
// nothing went wrong that was not asked for.
func TestEverythingAtOnce(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{lds: true, engines: 3, expect: panicLines})
		for i, kind := range []sim.FaultKind{sim.FaultReset, sim.FaultResetMid} {
			if err := w.engines[i].SetFaults(sim.Fault{Kind: kind, Count: 30}); err != nil {
				t.Fatal(err)
			}
		}
		const workers, each, reloads = 12, 30, 6
		ended := make(chan string)
		for client := range workers {
			go func() {
				rng := rand.New(rand.NewPCG(7, uint64(client)))
				c := client1(t)
				if client%2 == 0 {
					c = client2(t)
				}
				for range each {
					ctx, leave := context.WithTimeout(t.Context(), patience)
					q, most := chaoticCall(rng, leave)
					ended <- w.chaotic(ctx, c, q, most)
					leave()
				}
			}()
		}
		seen := map[string]int{}
		tick := time.NewTicker(10 * time.Millisecond) // in which those that wait are granted
		defer tick.Stop()
		for n := 0; n < workers*each; {
			select {
			case what := <-ended:
				seen[what]++
				if n++; n%(workers*each/reloads) == 0 {
					w.options.Document = []byte(w.document("policy: " + []string{"random", "least-request"}[n%2] + "\nscrape: {interval: " + fmt.Sprint(100+n) + "ms}\n"))
					w.writeListener(t)
				}
			case <-tick.C:
				w.adminDo("POST", "/test/grant?n=5")
			}
		}
		w.waitStat(t, "listener_manager.lds.update_success", func(n int64) bool { return n >= 3 }) // files that follow closely are read as one
		w.waitLoad(t, 0, 0)
		for _, name := range []string{"shunt_in_flight_requests", "shunt_waiting_requests", "shunt_held_body_bytes"} {
			eventually(t, name+" is 0", func() string {
				if n := w.metric(t, name); n != 0 {
					return fmt.Sprint(n)
				}
				return ""
			})
		}
		for _, l := range w.envoy.Log() {
			if strings.Contains(l, "internal error of the door") || strings.Contains(l, "internal error in") && !strings.Contains(l, ": injected in") {
				t.Error(l)
			}
		}
		for _, what := range []string{"200", "400", "413", "500", "left"} { // whether a wait ends by time or by a grant is a race
			if seen[what] == 0 {
				t.Errorf("no request ended with %s: %v", what, seen)
			}
		}
		for _, e := range w.engines { // some faults may be left: a doubted engine gets fewer requests
			if err := e.SetFaults(); err != nil {
				t.Fatal(err)
			}
		}
		if r := w.must(t, client1(t), call{body: strings.NewReader(chat)}); r.status != 200 {
			t.Errorf("afterwards: %v", r)
		}
		if r := w.must(t, client1(t), call{body: strings.NewReader(chat), header: header("x-shunt-test", "wait-1ms")}); r.status != 429 {
			t.Errorf("that nobody grants: %v", r)
		}
		t.Log(seen)
	})
}

// chaotic sends a request, reads at most so many bytes of the answer, -1 for
// all, and says what became of it.
func (w *world) chaotic(ctx context.Context, c *http.Client, q call, most int) string {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+w.addr+q.path, q.body)
	if err != nil {
		return err.Error()
	}
	req.ContentLength, req.Trailer = q.length, q.trailer
	req.Header = q.header.Clone()
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return "left"
		}
		return "no answer" // as where a connection ends that the old listener had, or the client still sends what is too large
	}
	defer func() { _ = resp.Body.Close() }()
	if most >= 0 {
		_, _ = io.CopyN(io.Discard, resp.Body, int64(most)) // then the client leaves
		return "left"
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return "cut"
	}
	return fmt.Sprint(resp.StatusCode)
}
