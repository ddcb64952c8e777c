package metricsync

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestFirstSnapshots(t *testing.T) {
	bubble(t, 2, Config{}, func(w *world) {
		w.engines[addrOf(2)].down = true
		w.targets(labelled("m"))
		w.syncer.Start()
		s := w.holder.Load() // as Start returns
		if !s.Complete || !s.Fresh || s.Judged || len(s.Endpoints) != 2 {
			t.Errorf("%+v", s)
		}
		w.settle() // no tick has passed
		if s := w.holder.Load(); !s.Judged {
			t.Error("not judged although each was heard of")
		}
		w.want("up 1 m; down - m")
		w.said("2 endpoints: 2 added", "ready", "ready")
	})
}

func TestIncompleteWhileASourceIsMissing(t *testing.T) {
	bubble(t, 1, Config{Sources: []string{"static", "file"}}, func(w *world) {
		w.begin(labelled("m"))
		w.want("up 1 m")
		if w.holder.Load().Complete {
			t.Error("complete without the file")
		}
		w.syncer.SetTargets("stranger", []pool.Target{target(t, "10.0.0.9")}, Complete)
		w.syncer.SetTargets("file", nil, LastGood)
		w.settle()
		if s := w.holder.Load(); s.Complete || s.Fresh {
			t.Error("a last-good set is none to start from")
		}
		w.syncer.SetTargets("file", nil, Complete)
		w.syncer.SetTargets("file", nil, LastGood) // before the writer looked
		w.settle()
		if s := w.holder.Load(); !s.Complete || s.Fresh {
			t.Errorf("complete %v, fresh %v", s.Complete, s.Fresh)
		}
		w.want("up 1 m")
	})
}

func TestReadinessFollowsTheServingPort(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		e := w.engines[addrOf(1)]
		w.begin(labelled("m"))
		w.said("1 added", "is ready")
		e.crash()
		w.pass(time.Second) // the scrape fails, and one probe
		if !w.holder.Load().Endpoints[0].Ready {
			t.Error("not ready after one failure")
		}
		w.pass(time.Second + publishGap)
		if got := w.holder.Load().Endpoints[0]; got.Ready || !strings.Contains(got.Why, "refused") {
			t.Errorf("ready after two failures: %q", got.Why)
		}
		w.said("is not ready: dial tcp: connection refused")
		w.pass(5 * time.Minute)
		e.set(func() { e.down = false })
		w.pass(time.Second + 3*publishGap) // not after the 30 s of back-off
		w.want("up 1 m")
		w.said("is ready")
	})
}

func TestABadPageLeavesTheEndpointReady(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		e := w.engines[addrOf(1)]
		w.begin(labelled("m"))
		w.said("1 added", "is ready")
		e.set(func() { e.page = "" })
		w.pass(3 * time.Second)
		w.want("up 1 m") // the last reading, with its age
		w.said("metrics fail")
		w.pass(5 * time.Second)
		w.want("up - m") // stale, and not zero
		e.set(func() { e.page = "vllm:num_requests_running 0\n" })
		w.pass(40 * time.Second)
		w.want("up 0 m")
		w.said("metrics are back")
		for s := range w.syncer.Endpoints {
			if s.Failures != 0 || s.LastReason != ScrapeEmpty || s.LastGood.Before(s.LastErrorAt) || s.Addr.String() != addrOf(1) {
				t.Errorf("%+v", s)
			}
		}
		st := w.syncer.Stats()
		if st.Scrapes[ScrapeOK] == 0 || st.Scrapes[ScrapeEmpty] == 0 || st.Bytes == 0 || st.Published == 0 || st.Panics != 0 {
			t.Errorf("%+v", st)
		}
	})
}

func TestBackOff(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		e := w.engines[addrOf(1)]
		e.status = http.StatusNotFound
		w.begin(labelled("m"))
		w.want("up - m") // it answers
		w.pass(10 * time.Minute)
		if n := e.hit("/metrics"); n < 20 || n > 30 {
			t.Errorf("%d scrapes in 10 minutes", n)
		}
		if st := w.syncer.Stats(); st.Probes.OK < 590 || st.Probes.OK > 610 {
			t.Errorf("%d probes in 10 minutes", st.Probes.OK)
		}
		w.said("1 added", "is ready", "metrics fail")
	})
}

func TestIntervalAndPaths(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		e := w.engines[addrOf(1)]
		w.begin(labelled("m"))
		w.pass(time.Minute)
		if n := e.hit("/metrics"); n < 60 || n > 62 {
			t.Errorf("%d scrapes in a minute", n)
		}
		if st := w.syncer.Stats(); st.Probes != (Outcomes{OK: 1}) {
			t.Errorf("probes of an endpoint that answers: %+v", st.Probes)
		}
		w.syncer.Apply(Config{Interval: 10 * time.Second, Sources: []string{"static"}})
		w.pass(time.Minute)
		if n := e.hit("/metrics"); n < 65 || n > 70 {
			t.Errorf("%d scrapes after a minute more, now each 10 s", n)
		}
		e.set(func() { e.page = "trtllm_num_requests_running 7\n" })
		w.targets(labelled("m"), func(t *pool.Target) { t.Engine = pool.EngineTRTLLM })
		w.settle()
		w.want("up 7 m") // at once
		if n := e.hit("/prometheus/metrics"); n != 1 {
			t.Errorf("%d scrapes of TensorRT-LLM's path", n)
		}
	})
}

func TestUnknownEngineIsRoutedTo(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		e := w.engines[addrOf(1)]
		w.begin(labelled("m"), func(t *pool.Target) { t.Engine, t.EngineLabel = pool.EngineUnknown, "other" })
		w.want("up - m")
		w.said(`engine "other" is unknown`, "1 added", "is ready")
		e.set(func() { e.down = true })
		w.pass(3 * time.Second)
		w.want("down - m")
		if n := e.hit("/metrics"); n != 0 {
			t.Errorf("%d scrapes", n)
		}
	})
}

func TestMetricPortOfItsOwn(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		// The page is on a port where nothing answers: that says nothing of
		// the serving port.
		w.begin(labelled("m"), func(t *pool.Target) { t.MetricPort = 9 })
		w.want("up - m")
		w.engines[addrOf(1)].set(func() { w.engines[addrOf(1)].down = true })
		w.pass(3 * time.Second)
		w.want("down - m")
	})
}

func TestHealthPath(t *testing.T) {
	cfg := Config{Health: Health{Path: "/health", Interval: 2 * time.Second}}
	bubble(t, 1, cfg, func(w *world) {
		e := w.engines[addrOf(1)]
		e.health = http.StatusServiceUnavailable
		w.begin(labelled("m"))
		w.want("down 1 m") // the page does not count
		e.set(func() { e.health = http.StatusOK })
		w.pass(2*time.Second + publishGap)
		w.want("up 1 m")
		e.set(func() { e.health = http.StatusInternalServerError })
		w.pass(2*time.Second + publishGap)
		w.want("up 1 m")
		w.pass(2 * time.Second)
		w.want("down 1 m")
		w.said("1 added", "/health answers 503", "is ready", "/health answers 500")
	})
}

func TestSourceSaysNotReadyAndAsleep(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		e := w.engines[addrOf(1)]
		terminating := func(t *pool.Target) { t.NotReady = "terminating" }
		w.begin(labelled("m"), terminating)
		w.want("down 1 m")
		if got := w.holder.Load().Endpoints[0]; got.Why != "terminating" || !got.Judged {
			t.Errorf("%+v", got)
		}
		w.targets(labelled("m"))
		w.settle()
		w.want("up 1 m")
		e.set(func() { e.page += "vllm:engine_sleep_state{sleep_state=\"awake\"} 0\n" })
		w.pass(time.Second + publishGap)
		w.want("down 1 m")
		w.said("1 added", "is not ready: terminating", "is ready", "1 changed", "the engine is asleep")
		e.set(func() { e.page = goodPage })
		w.pass(time.Second + publishGap)
		w.want("up 1 m")
	})
}

func TestFaults(t *testing.T) {
	bubble(t, 2, Config{}, func(w *world) {
		w.begin(labelled("m"))
		w.said("2 added", "ready", "ready")
		reset := func(n int) {
			for range n {
				w.holder.Report(pool.Fault{Live: w.live(1), Kind: pool.FaultReset, At: time.Now()})
			}
			w.settle()
		}
		w.holder.Report(pool.Fault{})
		w.holder.Report(pool.Fault{Live: &pool.Live{Addr: addrOf(1)}, Kind: pool.FaultReset})
		reset(2)
		w.want("up 1 m; up 1 m")
		reset(1)
		w.want("up aside 1 m; up 1 m")
		w.said("10.0.0.1:8000 is set aside for 10s")
		w.pass(10 * time.Second)
		w.want("up 1 m; up 1 m")
		w.said("no longer set aside")
		if !w.holder.Load().Endpoints[0].SetAsideUntil.IsZero() {
			t.Error("still shown as set aside")
		}
		reset(3)
		w.said("is set aside for 20s")
		w.targets(labelled("m"), func(t *pool.Target) { t.NotReady = "restarting" })
		w.settle()
		w.targets(labelled("m"))
		w.settle()
		w.want("up 1 m; up 1 m") // reported ready anew
	})
}

func TestConnectFaultProbesAtOnce(t *testing.T) {
	bubble(t, 1, Config{Interval: time.Minute, StaleAfter: time.Hour}, func(w *world) {
		e := w.engines[addrOf(1)]
		w.begin(labelled("m"))
		e.set(func() { e.down = true })
		for range 2 {
			w.holder.Report(pool.Fault{Live: w.live(1), Kind: pool.FaultConnect})
			w.pass(2 * probeGap)
		}
		w.want("down 1 m")
	})
}

// TestDoubt: a fault is followed by a probe, of whatever kind it was, and by a
// second one if need be; an answer is published for those that wait.
func TestDoubt(t *testing.T) {
	bubble(t, 1, Config{Interval: time.Minute, StaleAfter: time.Hour}, func(w *world) {
		e := w.engines[addrOf(1)]
		w.begin(labelled("m"))
		for _, kind := range []pool.FaultKind{pool.FaultReset, pool.FaultConnect, pool.FaultCut} {
			seq := w.holder.Load().Seq
			w.holder.Report(pool.Fault{Live: w.live(1), Kind: kind, At: time.Now()})
			if !w.live(1).Doubted(time.Now()) {
				t.Fatal("not doubted")
			}
			w.pass(probeGap + publishGap)
			if w.live(1).Doubted(time.Now()) || w.holder.Load().Seq == seq {
				t.Errorf("kind %d: it answered, and nobody was told", kind)
			}
			w.want("up 1 m")
		}
		e.set(func() { e.down = true })
		w.holder.Report(pool.Fault{Live: w.live(1), Kind: pool.FaultCut, At: time.Now()})
		w.pass(2*probeGap + publishGap)
		w.want("down 1 m")
		if !w.live(1).Doubted(time.Now()) {
			t.Error("trusted without an answer")
		}
		e.set(func() { e.down = false })
		w.pass(time.Minute + publishGap)
		w.want("up 1 m")
		if w.live(1).Doubted(time.Now()) {
			t.Error("ready and doubted")
		}
	})
}

// TestDoubtOfALostFault: of an endpoint whose fault found the queue full, and came
// after the last probe began, another probe tells.
func TestDoubtOfALostFault(t *testing.T) {
	bubble(t, 1, Config{Interval: time.Minute, StaleAfter: time.Hour}, func(w *world) {
		w.first = func(s *pool.Snapshot) { // the writer does not run yet
			at := time.Now().Add(probeGap + probeGap/2)
			for w.holder.DroppedFaults() == 0 {
				w.holder.Report(pool.Fault{Live: &pool.Live{Addr: addrOf(1)}, At: at})
			}
			w.holder.Report(pool.Fault{Live: s.Endpoints[0].Live, Kind: pool.FaultConnect, At: at})
		}
		w.begin(labelled("m"))
		if w.holder.DroppedFaults() != 2 {
			t.Fatal("the fault is in the queue")
		}
		w.pass(2*probeGap + publishGap)
		w.want("up 1 m")
		if w.live(1).Doubted(time.Now()) {
			t.Error("nobody asked it")
		}
	})
}

func TestModelLists(t *testing.T) {
	cfg := Config{Discover: true, ModelMemory: 10 * time.Minute, Known: []KnownModel{{Name: "a", Adapters: []string{"a-lora"}}, {Name: "k"}}}
	bubble(t, 1, cfg, func(w *world) {
		e := w.engines[addrOf(1)]
		e.models = "not JSON"
		w.begin()
		w.want("up 1 ") // serves nothing until it said
		if s := w.holder.Load(); !s.Uncertain || !s.Judged {
			t.Errorf("uncertain %v, judged %v", s.Uncertain, s.Judged)
		}
		e.set(func() { e.models = `{"data":[{"id":"a"}]}` })
		w.pass(listRetry + publishGap)
		w.want("up 1 ,a,a-lora")

		e.set(func() { e.models = `{"data":[{"id":"b"}]}` })
		for range 10 { // one of these asks
			w.syncer.ModelMissing()
		}
		w.settle()
		w.want("up 1 ,b")
		asked := e.hit("/v1/models")
		w.syncer.ModelMissing()
		w.settle()
		if e.hit("/v1/models") != asked {
			t.Error("asked again within 5 s")
		}
		w.pass(missingGap)
		asked = e.hit("/v1/models") // once more by now, perhaps
		w.syncer.ModelMissing()
		w.settle()
		if e.hit("/v1/models") != asked+1 {
			t.Error("not asked again after 5 s")
		}

		known := func(want string) {
			t.Helper()
			var got []string
			for _, m := range []string{"a", "a-lora", "b", "c", "k"} {
				if w.holder.Load().Known(m) {
					got = append(got, m)
				}
			}
			if strings.Join(got, " ") != want {
				t.Errorf("known %v, want %s", got, want)
			}
		}
		known("a a-lora b k")
		e.set(func() { e.models = `{"data":[{"id":"c"}]}` })
		w.pass(listEvery)
		w.want("up 1 ,c")
		known("a a-lora b c k")
		w.pass(10 * time.Minute)
		known("a a-lora c k") // b is forgotten; config names the others
		e.set(func() { e.models = "" })
		w.pass(listEvery)
		w.want("up 1 ,c") // a 404 of later makes it no wildcard
		w.syncer.SetTargets("static", nil, Complete)
		w.pass(time.Minute)
		known("a a-lora c k")
		w.pass(9 * time.Minute)
		known("a a-lora k") // with no endpoint left to cause a snapshot
	})
}

func TestAnyModel(t *testing.T) {
	for _, c := range []struct {
		name, models, label string
		discover            bool
		want                string
	}{
		{"no list", "", "", true, "up 1 *"},
		{"empty list", `{"data":[]}`, "", true, "up 1 *"},
		{"not asked", "", "", false, "up 1 *"},
		{"label", "", "m", true, "up 1 m"},
		{"label and list", `{"data":[{"id":"m"},{"id":"n"}]}`, "m", true, "up 1 m,n"},
		{"label, not asked", `{"data":[{"id":"n"}]}`, "m", false, "up 1 m"},
	} {
		bubble(t, 1, Config{Discover: c.discover}, func(w *world) {
			e := w.engines[addrOf(1)]
			e.models = c.models
			w.begin(labelled(c.label))
			if w.want(c.want); t.Failed() {
				t.Fatal(c.name)
			}
			if c.models == "" && c.discover {
				w.pass(5 * time.Minute)
				w.said("1 added", "ready", "/v1/models answers 404") // once
			}
			w.syncer.Apply(Config{Discover: !c.discover, Sources: []string{"static"}})
			w.settle()
			if again := e.hit("/v1/models") > 0; !c.discover && !again {
				t.Errorf("%s: not asked once discovery is on", c.name)
			}
		})
	}
}

func TestAdaptersFollowTheNewestInfo(t *testing.T) {
	bubble(t, 1, Config{ModelMemory: time.Minute}, func(w *world) {
		e := w.engines[addrOf(1)]
		info := func(running, value string) string {
			return `vllm:lora_requests_info{running_lora_adapters="` + running + `",waiting_lora_adapters=""} ` + value + "\n"
		}
		e.page += info("x,y", "1.0")
		w.begin(labelled("m"))
		w.want("up 1 m,x,y")
		e.set(func() { e.page += info("y", "2.0") })
		w.pass(time.Second + publishGap)
		w.want("up 1 m,y")
		if !w.holder.Load().Known("x") {
			t.Error("x is forgotten at once")
		}
		w.pass(time.Minute)
		if w.holder.Load().Known("x") {
			t.Error("x is remembered for too long")
		}
	})
}

// TestModelsThatGoAreRememberedInBounds: an engine that has other adapters in
// each page costs no more than maxGone names.
func TestModelsThatGoAreRememberedInBounds(t *testing.T) {
	bubble(t, 1, Config{ModelMemory: 10 * time.Minute, Interval: 5 * time.Second}, func(w *world) {
		w.begin(labelled("m"))
		w.said("1 endpoints", "is ready")
		e := w.engines[addrOf(1)]
		for round := range 3 * maxGone / maxAdapters {
			names := make([]string, maxAdapters)
			for i := range names {
				names[i] = fmt.Sprintf("%d-%d", round, i)
			}
			e.set(func() {
				e.page = goodPage + "vllm:lora_requests_info{running_lora_adapters=\"" + strings.Join(names, ",") + "\"} 1\n"
			})
			w.pass(5*time.Second + 2*publishGap)
		}
		w.said("10000 models were served within the last 10m0s and are no more")
		s := w.holder.Load()
		if !s.Known("0-0") || s.ForModel("m") == nil {
			t.Error("what went first is not remembered")
		}
		if n := len(w.syncer.gone); n != maxGone {
			t.Errorf("%d are remembered", n)
		}
		e.set(func() { e.page = goodPage })
		w.pass(10*time.Minute + 10*time.Second)
		if n := len(w.syncer.gone); n != 0 || w.syncer.goneFull {
			t.Errorf("%d are remembered for too long", n)
		}
	})
}

func TestLiveIsTheIncarnations(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		incarnation := func(s string) func(*pool.Target) { return func(t *pool.Target) { t.Incarnation = s } }
		readd := func(away time.Duration, edit ...func(*pool.Target)) *pool.Live {
			w.syncer.SetTargets("static", nil, Complete)
			w.pass(away)
			if n := len(w.holder.Load().Endpoints); n != 0 {
				t.Fatalf("%d endpoints", n)
			}
			w.targets(edit...)
			w.settle()
			return w.live(1)
		}
		w.begin(labelled("m"), incarnation("1"))
		first := w.live(1)

		w.targets(labelled("other"), incarnation("1"))
		w.settle()
		w.want("up 1 other")
		w.syncer.Apply(Config{Sources: []string{"static"}, Interval: time.Minute})
		w.settle()
		if w.live(1) != first {
			t.Error("relabelled, and another Live")
		}
		if readd(30*time.Second, incarnation("1")) != first {
			t.Error("gone for 30 s, and another Live")
		}
		held := first.Reserve(pool.Load{}, time.Now())
		if readd(time.Hour, incarnation("1")) != first {
			t.Error("another Live although a request is in flight")
		}
		held.Release(time.Now(), true)
		second := readd(2*time.Minute, incarnation("1"))
		if second == first {
			t.Error("gone for 2 minutes, and the same Live")
		}
		w.targets(incarnation("2"))
		w.settle()
		third := w.live(1)
		if third == second {
			t.Error("another incarnation, and the same Live")
		}

		// The next Syncer of a holder goes on where this one ended.
		seq := w.holder.Load().Seq
		w.syncer.Stop()
		w.syncer = w.newSyncer(Config{Sources: []string{"static"}})
		w.begin(incarnation("2"))
		if w.live(1) != third || w.holder.Load().Seq <= seq {
			t.Error("a new Syncer begins from nothing")
		}
	})
}

func TestLateEventsOfALoopThatEndedAreIgnored(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		w.begin(labelled("m"))
		e := (*w.syncer.endpoints.Load())[0]
		late := func() *scrape {
			out := &scrape{taken: time.Now()}
			out.metrics = &pool.Metrics{Taken: out.taken}
			out.metrics.Set(pool.NumRequestsRunning, 99)
			return out
		}
		w.syncer.events <- event{e: e, gen: 0, scrape: late()} // the first loop is 1
		w.settle()
		w.want("up 1 m")
		w.syncer.events <- event{e: e, gen: 1, scrape: late()}
		w.settle()
		w.want("up 99 m")
		w.syncer.SetTargets("static", nil, Complete)
		w.settle()
		before := w.snapshots()
		w.syncer.events <- event{e: e, gen: 1, scrape: late()}
		w.settle()
		if w.snapshots() != before {
			t.Error("a removed endpoint's event is published")
		}
	})
}

func TestSnapshotsAreFew(t *testing.T) {
	bubble(t, 250, Config{}, func(w *world) {
		w.begin(labelled("m"))
		before := w.snapshots()
		w.pass(10 * time.Second)
		if n := w.snapshots() - before; n > 1010 {
			t.Errorf("%d snapshots in 10 s for 2,500 scrapes", n)
		}
		if len(w.holder.Load().All().Index) != 250 {
			t.Errorf("%d of 250 are ready", len(w.holder.Load().All().Index))
		}
	})
}

func TestPanicsAreContained(t *testing.T) {
	bubble(t, 1, Config{}, func(w *world) {
		w.syncer.onPublish = func(*pool.Snapshot) { panic("on purpose") }
		var told atomic.Uint64
		w.syncer.onFault = func(cause any, _ []byte) {
			if cause == "on purpose" {
				told.Add(1)
			}
		}
		w.begin(labelled("m"))
		w.pass(3 * time.Second)
		w.want("up 1 m")
		if n := w.syncer.Stats().Panics; n < 3 || told.Load() != n {
			t.Errorf("%d panics, told of %d", n, told.Load())
		}
	})
}

func TestStopWithoutStart(t *testing.T) {
	s := New(Options{Holder: pool.NewHolder()}, Config{})
	s.SetTargets("static", nil, Complete)
	s.Stop()
	s.Start()
	s.Stop()
	if s.holder.Load().Seq != 0 {
		t.Error("started after Stop")
	}
}
