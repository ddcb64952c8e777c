package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
)

const flowObjectives = "objectives: [{name: high, priority: 10}, {name: low, priority: -1}]\n"

// oneSlot is flow control in which each engine serves one request at a time.
func oneSlot(more string) string {
	return "flowControl: {enabled: true, saturation: concurrency, maxConcurrency: 1" + more + "}\n" + flowObjectives
}

// dropped checks all that a client, the access log and the counters see of a
// drop. before is the counter before the request.
func (w *world) dropped(t *testing.T, r reply, status int, reason string, before float64) {
	t.Helper()
	if r.status != status || r.header.Get("X-Llm-D-Request-Dropped-Reason") != reason {
		t.Errorf("%s: got %v", reason, r)
	}
	var body struct {
		Error struct{ Message, Type, Code string }
	}
	if err := json.Unmarshal(r.body, &body); err != nil || body.Error.Code != reason || body.Error.Message == "" {
		t.Errorf("%s: body %s (%v)", reason, r.body, err)
	}
	wantType := map[int]string{429: "rate_limit_error", 503: "overloaded_error", 500: "api_error"}[status]
	if body.Error.Type != wantType {
		t.Errorf("%s: type %q, want %q", reason, body.Error.Type, wantType)
	}
	retry, err := strconv.Atoi(r.header.Get("Retry-After"))
	if reason != "rejected-internal" && (err != nil || retry < 1 || retry > 30) {
		t.Errorf("%s: retry-after %q", reason, r.header.Get("Retry-After"))
	}
	a := w.access(t, r.id)
	if a.at("details") != "shunt_"+reason || a.at("shunt", "reason") != reason {
		t.Errorf("%s: access log %v", reason, a)
	}
	if n := w.metric(t, "shunt_drops_total", "reason", reason); n != before+1 {
		t.Errorf("%s: counted %v times", reason, n-before)
	}
	for _, e := range w.engines {
		for _, got := range e.Requests("") {
			if strings.HasPrefix(reason, "rejected-") && got.Headers.Get("X-Test-Id") == r.id {
				t.Errorf("%s: engine %s got the request", reason, e.Addr())
			}
		}
	}
}

func (w *world) drops(t *testing.T, reason string) float64 {
	t.Helper()
	return w.metric(t, "shunt_drops_total", "reason", reason)
}

func (w *world) waits(t *testing.T, n int) {
	t.Helper()
	eventually(t, fmt.Sprint(n, " wait"), func() string {
		if got := w.status(t).Waiting; got != n {
			return strconv.Itoa(got)
		}
		return ""
	})
}

// TestDropReasons is each row of the table of drop reasons that flow control
// gives, as a client sees it. evicted has a test of its own.
func TestDropReasons(t *testing.T) {
	_, _ = shuntTool() // before anybody waits for it
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, config: oneSlot(", bandRequests: 1, ttl: 10m"), expect: panicLines})
		engine := w.engines[0]
		engine.SetHold(true)
		defer engine.SetHold(false)
		running := w.begin(t, w.h1, call{body: strings.NewReader(chat)})
		wait(t, engine, func(c sim.Counters) bool { return c.Held == 1 })

		t.Run("rejected-ttl-expired", func(t *testing.T) {
			before := w.drops(t, "rejected-ttl-expired")
			r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: header("x-llm-d-inference-ttl", "50ms", "x-llm-d-inference-objective", "high")})
			w.dropped(t, r, 429, "rejected-ttl-expired", before)
			a := w.access(t, r.id)
			if ms, _ := a.at("shunt", "queue_ms").(float64); ms < 50 || a.at("shunt", "objective") != "high" || a.at("shunt", "priority") != 10.0 || a.at("shunt", "fairness_id") != "default-flow" {
				t.Errorf("access log %v", a)
			}
		})
		t.Run("rejected-saturated", func(t *testing.T) {
			waiting := w.begin(t, w.h2, call{body: strings.NewReader(chat)})
			w.waits(t, 1)
			before := w.drops(t, "rejected-saturated")
			w.dropped(t, w.must(t, w.h1, call{body: strings.NewReader(chat)}), 429, "rejected-saturated", before)
			waiting.cancel()
			_, _ = waiting.wait()
			w.waits(t, 0)
		})
		t.Run("rejected-context-cancelled", func(t *testing.T) {
			before := w.drops(t, "rejected-context-cancelled")
			waiting := w.begin(t, w.h1, call{body: strings.NewReader(chat), header: header("x-llm-d-inference-fairness-id", "tenant-7")})
			w.waits(t, 1)
			waiting.cancel()
			_, _ = waiting.wait()
			w.waits(t, 0)
			a := w.accessWhere(t, "tenant-7", "")
			if a.at("shunt", "reason") != "rejected-context-cancelled" || a.at("shunt", "model") != "m" {
				t.Errorf("access log %v", a)
			}
			if n := w.drops(t, "rejected-context-cancelled"); n != before+1 {
				t.Errorf("counted %v times", n-before)
			}
		})
		t.Run("rejected-internal", func(t *testing.T) {
			before := w.drops(t, "rejected-internal")
			r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: header("x-shunt-test", "panic-body")})
			w.dropped(t, r, 500, "rejected-internal", before)
			w.waitLog(t, `internal error in body`)
			if r.header.Get("Retry-After") != "" {
				t.Errorf("retry-after %s", r.header.Get("Retry-After"))
			}
		})
		t.Run("rejected-shutting-down", func(t *testing.T) {
			before := w.drops(t, "rejected-shutting-down")
			waiting := w.begin(t, w.h1, call{body: strings.NewReader(chat)})
			w.waits(t, 1)
			w.drain(t, "--grace", "0s")
			r, err := waiting.wait()
			if err != nil {
				t.Fatal(err)
			}
			w.dropped(t, r, 503, "rejected-shutting-down", before)
			w.dropped(t, w.must(t, w.h2, call{body: strings.NewReader(chat)}), 503, "rejected-shutting-down", before+1)
			if status, _ := w.adminGet("/readyz"); status != 503 {
				t.Errorf("/readyz: %d", status)
			}
			engine.SetHold(false)
			if r, err := running.wait(); err != nil || r.status != 200 {
				t.Errorf("in flight: %v %v", r, err)
			}
			w.drain(t, "--grace", "0s", "--wait")
			w.drain(t, "--undo")
			if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
				t.Errorf("undrained: %v", r)
			}
		})
		t.Run("rejected-no-endpoints", func(t *testing.T) {
			before := w.drops(t, "rejected-no-endpoints")
			engine.Refuse(true, 0)
			w.waitState(t, engine, "not-ready")
			w.dropped(t, w.must(t, w.h1, call{body: strings.NewReader(chat)}), 503, "rejected-no-endpoints", before)
		})
		w.waitLoad(t, 0, 0)
	})
}

// shuntTool is the operator's command: the one beside the modules, else built
// once.
var shuntTool = sync.OnceValues(func() (string, error) {
	if *modulesFlag != "" {
		return modulePath("shunt"), nil
	}
	root, err := filepath.Abs("..")
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, "build", "out", "e2e", "shunt")
	return path, build(root, "go", "build", "-trimpath", "-o", path, "./cmd/shunt")
})

// drain runs the command.
func (w *world) drain(t *testing.T, args ...string) string {
	t.Helper()
	shunt, err := shuntTool()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), shunt, append([]string{"drain", "--admin", "unix:" + w.file("admin.sock")}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("shunt drain %v: %v\n%s", args, err, &out)
	}
	return out.String()
}

// TestPriorities: what waits goes by priority, and in turn between tenants.
func TestPriorities(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, config: oneSlot("")})
		engine := w.engines[0]
		engine.SetHold(true)
		defer engine.SetHold(false)
		first := w.begin(t, w.h1, call{body: strings.NewReader(chat)})
		wait(t, engine, func(c sim.Counters) bool { return c.Held == 1 })
		var mu sync.Mutex
		var order []string
		var all sync.WaitGroup
		send := func(name string, pairs ...string) {
			n := w.status(t).Waiting
			all.Go(func() {
				r, err := w.do(t.Context(), w.h2, call{body: strings.NewReader(chat), header: header(pairs...)})
				if err != nil || r.status != 200 {
					t.Errorf("%s: %v %v", name, r, err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, name)
			})
			w.waits(t, n+1)
		}
		const flow = "x-llm-d-inference-fairness-id"
		send("low", objective, "low")
		send("a1", flow, "a")
		send("a2", flow, "a")
		send("a3", flow, "a")
		send("b1", flow, "b")
		send("high1", "x-gateway-inference-objective", "high") // the older name
		send("high2", objective, "high")
		for served := 1; served <= 8; served++ {
			engine.Release(1)
			if served < 8 {
				wait(t, engine, func(c sim.Counters) bool { return c.Held == 1 })
			}
			eventually(t, "one more answer", func() string {
				mu.Lock()
				defer mu.Unlock()
				if len(order) < served-1 {
					return fmt.Sprint(order)
				}
				return ""
			})
		}
		if r, err := first.wait(); err != nil || r.status != 200 {
			t.Errorf("%v %v", r, err)
		}
		all.Wait()
		if got := strings.Join(order, " "); got != "high1 high2 a1 b1 a2 a3 low" {
			t.Errorf("order %s", got)
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestStorm: 200 clients, three priorities, four slots. What clients, counters
// and the access log say is the same, and nothing is left.
func TestStorm(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 4, config: oneSlot(", maxRequests: 60, displace: true, ttl: 10m")})
		// The slots are taken until requests were refused and times have run out.
		var first []*background
		for _, e := range w.engines {
			e.SetDelays(sim.Delays{BeforeHeaders: sim.Duration(5 * time.Millisecond)})
			e.SetHold(true)
			first = append(first, w.begin(t, w.h1, call{body: strings.NewReader(chat)}))
		}
		for _, e := range w.engines {
			wait(t, e, func(c sim.Counters) bool { return c.Held == 1 })
		}
		before := map[string]float64{}
		reasons := []string{"rejected-saturated", "rejected-ttl-expired", "rejected-no-endpoints", "rejected-context-cancelled", "rejected-shutting-down", "rejected-internal"}
		for _, reason := range reasons {
			before[reason] = w.drops(t, reason)
		}
		var mu sync.Mutex
		seen := map[string]int{}
		var ids []string
		cancelled := 0
		var all sync.WaitGroup
		for i := range 200 {
			all.Go(func() {
				c := w.h1
				if i%2 == 0 {
					c = w.h2
				}
				for round := range 5 {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					if (i+round)%10 == 0 {
						ctx, cancel = context.WithTimeout(t.Context(), time.Duration(i%7+1)*time.Millisecond)
					}
					h := header("x-llm-d-inference-objective", []string{"high", "", "low"}[i%3], "x-llm-d-inference-fairness-id", "tenant-"+strconv.Itoa(i%5))
					if i%4 == 0 {
						h.Set("x-llm-d-inference-ttl", "20ms")
					}
					r, err := w.do(ctx, c, call{body: strings.NewReader(chat), header: h})
					cancel()
					mu.Lock()
					switch {
					case err != nil || r.err != nil:
						cancelled++
					case r.status == 200:
						seen["ok"]++
					default:
						seen[r.header.Get("X-Llm-D-Request-Dropped-Reason")]++
						ids = append(ids, r.id)
					}
					mu.Unlock()
				}
			})
		}
		eventually(t, "some are refused, and the time of some runs out", func() string {
			mu.Lock()
			defer mu.Unlock()
			if seen["rejected-saturated"] == 0 || seen["rejected-ttl-expired"] == 0 {
				return fmt.Sprint(seen)
			}
			return ""
		})
		for _, e := range w.engines {
			e.SetHold(false)
		}
		for _, b := range first {
			if r, err := b.wait(); err != nil || r.status != 200 {
				t.Errorf("%v %v", r, err)
			}
		}
		all.Wait()
		w.waitLoad(t, 0, 0)
		for _, reason := range reasons {
			n := int(w.drops(t, reason) - before[reason])
			if reason == "rejected-context-cancelled" {
				if n > cancelled {
					t.Errorf("%d counted as cancelled, %d clients left", n, cancelled)
				}
			} else if got := seen[reason]; n < got || n > got+cancelled { // who leaves may miss its answer
				t.Errorf("%s: clients saw %d, counted %d", reason, got, n)
			}
		}
		logged := map[string]int{}
		for _, id := range ids {
			a := w.access(t, id)
			logged[fmt.Sprint(a.at("shunt", "reason"))]++
		}
		for reason, n := range seen {
			if reason != "ok" && logged[reason] != n {
				t.Errorf("%s: clients saw %d, the access log %d", reason, n, logged[reason])
			}
		}
		w.countsAgree(t)
		w.nothingLeft(t)
		if seen["ok"] == 0 {
			t.Errorf("none was answered: %v", seen)
		}
		t.Logf("%v, %d clients left", seen, cancelled)
	})
}

// countsAgree checks that each drop reason has as many lines in the access log as
// its counter says.
func (w *world) countsAgree(t *testing.T) {
	t.Helper()
	for _, reason := range []string{"rejected-saturated", "rejected-ttl-expired", "rejected-no-endpoints", "rejected-context-cancelled", "rejected-shutting-down", "rejected-internal", "evicted"} {
		eventually(t, reason+" counted and logged alike", func() string {
			if logged, counted := w.records.with(t, reason), int(w.drops(t, reason)); counted != logged {
				return fmt.Sprintf("%d logged, %d counted", logged, counted)
			}
			return ""
		})
	}
}

// with is the number of requests with a reason.
func (r *records) with(t *testing.T, reason string) (n int) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, line := range r.byID {
		var record doc
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if record.at("shunt", "reason") == reason {
			n++
		}
	}
	return n
}

// nothingLeft checks that no request is in flight or waits, and that none met a
// fault of ours.
func (w *world) nothingLeft(t *testing.T) {
	t.Helper()
	for _, name := range []string{"shunt_in_flight_requests", "shunt_waiting_requests", "shunt_waiting_bytes", "shunt_held_body_bytes", "shunt_queue_requests",
		"shunt_queue_bytes", "shunt_endpoint_in_flight_requests", "shunt_evictable_requests", "shunt_evicting_requests"} {
		eventually(t, name+" is 0", func() string {
			if n := w.metric(t, name); n != 0 {
				return fmt.Sprint(n)
			}
			return ""
		})
	}
	if n := w.metric(t, "shunt_internal_errors_total"); n != 0 {
		t.Errorf("%v internal errors", n)
	}
}

// TestEnginesDieWhileRequestsWait: what waits goes where there is an engine, and
// waits for one while there is none.
func TestEnginesDieWhileRequestsWait(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 2, config: oneSlot(", emptyPoolTTL: 10m")})
		for _, e := range w.engines {
			e.SetHold(true)
			defer e.SetHold(false)
		}
		var running, waiting []*background
		for range 2 {
			running = append(running, w.begin(t, w.h1, call{body: strings.NewReader(chat)}))
		}
		for _, e := range w.engines {
			wait(t, e, func(c sim.Counters) bool { return c.Held == 1 })
		}
		for range 3 {
			waiting = append(waiting, w.begin(t, w.h2, call{body: strings.NewReader(chat)}))
		}
		w.waits(t, 3)
		for _, e := range w.engines { // both die, with what they work on
			e.Refuse(true, 0)
		}
		for _, b := range running {
			if r, err := b.wait(); err != nil || r.status != 503 {
				t.Errorf("in flight: %v %v", r, err)
			}
		}
		for _, e := range w.engines {
			w.waitState(t, e, "not-ready")
		}
		late := w.begin(t, w.h1, call{body: strings.NewReader(chat)})
		eventually(t, "some wait for an engine", func() string {
			if n := w.status(t).Waiting; n == 0 {
				return "none"
			}
			return ""
		})
		e := w.engines[0]
		e.SetHold(false)
		if err := e.Accept(); err != nil {
			t.Fatal(err)
		}
		for _, b := range append(waiting, late) {
			if r, err := b.wait(); err != nil || r.status != 200 {
				t.Errorf("waited: %v %v", r, err)
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestDeadEngineEatsNoQueue: an engine dies with all that it works on, before the
// headers of a response or in it, and nothing of what waits goes there after it.
func TestDeadEngineEatsNoQueue(t *testing.T) { deadEngineEatsNoQueue(t, prepareWorld) }

// TestEDSDeadEngineEatsNoQueue: the same where Envoy's retry finds nobody left to
// try, and says only that.
func TestEDSDeadEngineEatsNoQueue(t *testing.T) { deadEngineEatsNoQueue(t, prepareEDS) }

func deadEngineEatsNoQueue(t *testing.T, prepare func(*testing.T, door, setup) *world) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		const slots, queued = 10, 100
		s := setup{engines: 2, config: fmt.Sprintf("flowControl: {enabled: true, saturation: concurrency, maxConcurrency: %d}\n", slots)}
		w := prepare(t, d, s)
		w.run(t)
		dies, lives := w.engines[0], w.engines[1]
		for _, row := range []struct {
			name, body string
			hold       bool // no response begins
			status     int
		}{
			{"before the headers", chat, true, 503},
			{"in the response", strings.Replace(chat, "{", `{"stream":true,"max_tokens":50,`, 1), false, 200},
		} {
			t.Run(row.name, func(t *testing.T) {
				for _, e := range w.engines {
					e.SetHold(row.hold)
					e.SetDelays(sim.Delays{BetweenTokens: sim.Duration(time.Hour)}) // of streams
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				began, ended := make(chan int, 2*slots), make(chan int, 2*slots)
				for range 2 * slots {
					go func() {
						status := 0
						defer func() { ended <- status }()
						req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+w.addr+"/v1/chat/completions", strings.NewReader(row.body))
						if err != nil {
							return
						}
						resp, err := w.h2.Do(req)
						if err != nil {
							return
						}
						status = resp.StatusCode
						began <- status
						_, _ = io.Copy(io.Discard, resp.Body) // until it is cut
						_ = resp.Body.Close()
					}()
				}
				for range 2 * slots {
					if !row.hold {
						<-began
					}
				}
				for _, e := range w.engines {
					wait(t, e, func(c sim.Counters) bool { return c.InFlight == slots })
				}
				var waiting []*background
				for range queued {
					waiting = append(waiting, w.begin(t, w.h1, call{body: strings.NewReader(chat)}))
				}
				w.waits(t, queued)
				dies.Refuse(true, 0)
				for range slots {
					if status := <-ended; status != row.status {
						t.Errorf("in flight: %d", status)
					}
				}
				w.waitState(t, dies, "not-ready")
				w.waits(t, queued)
				lives.SetHold(false)
				if !row.hold {
					cancel() // they would go on for hours
				}
				for _, b := range waiting {
					if r, err := b.wait(); err != nil || r.status != 200 {
						t.Errorf("waited: %v %v", r, err)
					}
				}
				dies.SetHold(false)
				if err := dies.Accept(); err != nil {
					t.Fatal(err)
				}
				w.waitState(t, dies, "ready")
				w.waitLoad(t, 0, 0)
			})
		}
	})
}

// TestManyWaitHalfLeave: 2,000 streams wait, half of their clients leave.
func TestManyWaitHalfLeave(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 1, config: oneSlot(", ttl: 10m")})
		engine := w.engines[0]
		engine.SetHold(true)
		defer engine.SetHold(false)
		const n = 2000
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		var all sync.WaitGroup
		var mu sync.Mutex
		ok, gone := 0, 0
		for i := range n + 1 {
			stays := i == 0 || i%2 == 1
			// Envoy takes 500 resets on one connection for an attack, and ends it.
			mine, c := t.Context(), w.h2
			if !stays {
				mine, c = ctx, w.h1
			}
			all.Go(func() {
				r, err := w.do(mine, c, call{body: strings.NewReader(chat)})
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err != nil && !stays:
					gone++
				case err == nil && r.status == 200 && stays:
					ok++
				default:
					t.Errorf("stays %v: %v %v", stays, r, err)
				}
			})
			if i == 0 {
				wait(t, engine, func(c sim.Counters) bool { return c.Held == 1 })
			}
		}
		w.waits(t, n)
		leave()
		w.waits(t, n/2)
		engine.SetHold(false)
		all.Wait()
		if ok != n/2+1 || gone != n/2 {
			t.Errorf("%d answered, %d gone", ok, gone)
		}
		w.waitLoad(t, 0, 0)
		if got := w.metric(t, "shunt_queue_total", "outcome", "cancelled"); got != n/2 {
			t.Errorf("%v counted as cancelled", got)
		}
	})
}

// TestRollingRestart: one of two Envoys after the other takes leave, and a
// client that asks /readyz before it chooses loses no request.
func TestRollingRestart(t *testing.T) {
	_, _ = shuntTool() // before anybody waits for it
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		// The grace ends once each client has noticed.
		worlds := []*world{
			start(t, d, setup{engines: 1, config: oneSlot("") + "drain: {grace: 10m}\n"}),
			start(t, d, setup{engines: 1, config: oneSlot("") + "drain: {grace: 10m}\n"}),
		}
		ready := func(w *world) bool {
			status, _ := w.adminGet("/readyz")
			return status == http.StatusOK
		}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var clients sync.WaitGroup
		var mu sync.Mutex
		served := map[*world]int{}
		begun := make(turns, 8)
		for i := range begun {
			clients.Go(func() {
				for turn := i; ctx.Err() == nil; turn++ {
					begun[i].Add(1)
					w := worlds[turn%2]
					if !ready(w) {
						continue
					}
					r, err := w.do(t.Context(), w.h1, call{body: strings.NewReader(chat)})
					if err != nil || r.status != 200 {
						t.Errorf("lost: %v %v", r, err)
						return
					}
					mu.Lock()
					served[w]++
					mu.Unlock()
				}
			})
		}
		more := func(w *world) {
			mu.Lock()
			before := served[w]
			mu.Unlock()
			eventually(t, "more answers", func() string {
				mu.Lock()
				defer mu.Unlock()
				if served[w] < before+20 {
					return strconv.Itoa(served[w] - before)
				}
				return ""
			})
		}
		for i, w := range worlds {
			more(w)
			if out := w.drain(t); !strings.Contains(out, "grace: ") {
				t.Errorf("drain said %s", out)
			}
			begun.pass(t)
			if out := w.drain(t, "--grace", "0s", "--wait"); !strings.Contains(out, "draining: 0 in flight, 0 waiting") {
				t.Errorf("drain said %s", out)
			}
			more(worlds[1-i]) // it serves alone
			w.drain(t, "--undo")
		}
		stop()
		clients.Wait()
	})
}
