package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/sim"
)

// fourEngines are one of each kind, that all serve model m.
type fourEngines struct {
	names   []string
	servers []*sim.Server
}

// startFour starts one engine of each kind, with what makes its page hard to
// read: ranks, a sidecar's copies, priorities, gzip, labels that say
// "undefined", processes that ended, and no labels at all.
func startFour(t *testing.T) fourEngines {
	t.Helper()
	four := fourEngines{names: []string{"vllm", "sglang", "trtllm", "xllm"}}
	for i, q := range []sim.Quirks{
		{Ranks: 2, Sidecar: true, TwoTypes: true},
		{Ranks: 2, TPRanks: 2, Priority: true},
		{Undefined: true, DeadPIDs: 1},
		{Cut: true},
	} {
		four.servers = append(four.servers, startEngine(t, sim.Config{Engine: four.names[i], Quirks: q}))
	}
	return four
}

// pools is shunt's pools, with each engine under its label.
func (f fourEngines) pools() string {
	type entry struct {
		Address string            `json:"address"`
		Labels  map[string]string `json:"labels"`
	}
	var list []entry
	for i, e := range f.servers {
		_, port, _ := net.SplitHostPort(e.Addr())
		list = append(list, entry{e.Addr(), map[string]string{
			"model.aibrix.ai/name": "m", "model.aibrix.ai/engine": f.names[i], "model.aibrix.ai/metric-port": port,
		}})
	}
	text, _ := json.Marshal(list) // of strings
	return "pools: {default: {static: " + string(text) + "}}\n"
}

// reads waits until a status shows an engine's load. Real requests use a little
// of the KV cache too.
func (w *world) reads(t *testing.T, e *sim.Server, l sim.Load) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s shows %+v", e.Config().Engine, l), func() string {
		p := endpoint(w.status(t), e)
		if p == nil || p.Running == nil || p.Waiting == nil || p.KV == nil {
			return fmt.Sprintf("%+v", p)
		}
		if *p.Running != float64(l.Running) || *p.Waiting != float64(l.Waiting) || math.Abs(*p.KV-l.KVUsage) > 0.01 {
			return fmt.Sprint(*p.Running, *p.Waiting, *p.KV)
		}
		return ""
	})
}

// pickedBy sends requests and counts them by the engine that served.
func (w *world) pickedBy(t *testing.T, n int) map[string]int {
	t.Helper()
	got := map[string]int{}
	for range n {
		r := w.must(t, w.h1, call{body: strings.NewReader(chat), header: header("x-shunt-explain", "1")})
		if r.status != 200 {
			t.Fatalf("%v", r)
		}
		got[r.header.Get("X-Shunt-Endpoint")]++
	}
	return got
}

// TestFourEnginesSideBySide: one policy over all engines, each read through its
// own names, path and quirks; and a page that says nothing never makes its
// engine the emptiest. A fifth engine, the fullest, is always readable.
func TestFourEnginesSideBySide(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		all := startFour(t)
		four, fifth := all.servers, startEngine(t, sim.Config{})
		all.names, all.servers = append(all.names, "vllm"), append(all.servers, fifth)
		w := start(t, d, setup{
			engines: 1, pools: all.pools(),
			config: "policy: least-kv-cache\nscrape: {interval: 50ms, timeout: 500ms, staleAfter: 600ms, maxBytes: 1MiB}\n",
		})
		// load makes one the emptiest, and waits until all are read.
		load := func(t *testing.T, least int) {
			t.Helper()
			var loads []sim.Load
			for i, e := range all.servers {
				l := sim.Load{Running: 10 + i, Waiting: 4 + i, KVUsage: 0.5 + 0.1*float64(i)}
				if i == least {
					l.KVUsage = 0.1
				}
				e.SetLoad(l)
				loads = append(loads, l)
			}
			for i, l := range loads {
				w.reads(t, all.servers[i], l)
			}
		}
		// On a machine that is busy readings may end for a moment.
		picksAreAt := func(t *testing.T, e *sim.Server, n int) {
			t.Helper()
			eventually(t, "all picks are at "+e.Addr(), func() string {
				if got := w.pickedBy(t, n); got[e.Addr()] != n {
					return fmt.Sprint(got)
				}
				return ""
			})
		}
		for least, e := range four {
			t.Run("emptiest is "+all.names[least], func(t *testing.T) {
				load(t, least)
				picksAreAt(t, e, 20)
			})
		}

		// The pages of the four go wrong, each in another way, until each has in
		// every way there is.
		faults := []sim.MetricsFault{
			{Kind: sim.MetricsStatus, Status: 404}, {Kind: sim.MetricsStatus, Status: 503}, {Kind: sim.MetricsEmpty}, {Kind: sim.MetricsGarbage},
			{Kind: sim.MetricsJSON}, {Kind: sim.MetricsSlow, Delay: sim.Duration(time.Minute)}, {Kind: sim.MetricsHuge, Bytes: 4 << 20}, {Kind: sim.MetricsReset},
		}
		for turn := range faults {
			fault := func(i int) sim.MetricsFault { return faults[(turn+i)%len(faults)] }
			name := ""
			for i := range four {
				name += fmt.Sprint(all.names[i], " ", fault(i).Kind, fault(i).Status, " ")
			}
			t.Run(name, func(t *testing.T) {
				load(t, turn%len(four))
				for i, e := range four {
					if err := e.SetMetricsFault(fault(i)); err != nil {
						t.Fatal(err)
					}
				}
				for _, e := range four {
					w.blind(t, e)
				}
				picksAreAt(t, fifth, 10)
				for _, e := range four {
					if err := e.SetMetricsFault(sim.MetricsFault{}); err != nil {
						t.Fatal(err)
					}
				}
			})
		}

		// A renamed family loses its value and no other.
		t.Run("renamed", func(t *testing.T) {
			load(t, 0)
			for i, family := range []string{"vllm:kv_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization", "kv_cache_utilization_perc"} {
				if err := four[i].SetQuirks(sim.Quirks{Rename: map[string]string{family: "other"}}); err != nil {
					t.Fatal(err)
				}
			}
			for i, e := range four {
				eventually(t, all.names[i]+" has no KV usage, and the rest", func() string {
					p := endpoint(w.status(t), e)
					if p.KV == nil && p.Running != nil && p.Waiting != nil {
						return ""
					}
					return fmt.Sprintf("%+v", p)
				})
			}
			picksAreAt(t, fifth, 10)
		})
	})
}

// blind waits until an engine has no reading left.
func (w *world) blind(t *testing.T, e *sim.Server) {
	t.Helper()
	eventually(t, e.Config().Engine+" has no reading", func() string {
		if p := endpoint(w.status(t), e); p == nil || p.KV != nil || p.Running != nil || p.Waiting != nil {
			return fmt.Sprintf("%+v", p)
		}
		return ""
	})
}

// TestSidecarCopiesChangeNothing: the AIBrix runtime's aibrix: series beside
// the engine's own leave every reading as it is.
func TestSidecarCopiesChangeNothing(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		w := start(t, d, setup{engines: 2, config: "scrape: {interval: 50ms}\n"})
		load := sim.Load{Running: 6, Waiting: 3, KVUsage: 0.5}
		for _, e := range w.engines {
			e.SetLoad(load)
			w.reads(t, e, load)
		}
		if err := w.engines[0].SetQuirks(sim.Quirks{Sidecar: true, Ranks: 2}); err != nil {
			t.Fatal(err)
		}
		scrapes := w.engines[0].Counters().Scrapes
		wait(t, w.engines[0], func(c sim.Counters) bool { return c.Scrapes > scrapes+2 })
		for _, e := range w.engines {
			eventually(t, "there is a reading", func() string { // on a machine that is busy they may end for a moment
				p := endpoint(w.status(t), e)
				if p.State != "ready" || p.Running == nil || p.Waiting == nil || p.KV == nil {
					return fmt.Sprintf("%+v", p)
				}
				if *p.Running != 6 || *p.Waiting != 3 || math.Abs(*p.KV-0.5) > 0.01 {
					t.Errorf("%v running, %v waiting, KV usage %v", *p.Running, *p.Waiting, *p.KV)
				}
				return ""
			})
		}
	})
}
