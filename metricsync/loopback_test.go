package metricsync

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/loopback"
	"github.com/shuntproxy/shunt/internal/pool"
)

// patience is how long a test waits for what must come.
const patience = 30 * time.Second

// await waits for a snapshot that is as wanted.
func await(t testing.TB, published <-chan *pool.Snapshot, what string, ok func(*pool.Snapshot) bool) {
	t.Helper()
	end := time.After(patience)
	for {
		select {
		case s := <-published:
			if ok(s) {
				return
			}
		case <-end:
			t.Fatalf("no snapshot with %s", what)
		}
	}
}

// watched returns a Syncer and its snapshots, the newest ones where the test
// is slow to read.
func watched(t testing.TB, h *pool.Holder, cfg Config) (*Syncer, <-chan *pool.Snapshot) {
	published := make(chan *pool.Snapshot, 1)
	cfg.Sources = []string{"static"}
	s := New(Options{Name: "p", Holder: h, OnPublish: func(s *pool.Snapshot) {
		for {
			select {
			case published <- s:
				return
			default:
			}
			select {
			case <-published:
			default:
			}
		}
	}}, cfg)
	t.Cleanup(s.Stop)
	return s, published
}

// reserved is a server whose port is nobody else's once it is closed.
func reserved(t testing.TB, h http.Handler) *httptest.Server {
	t.Helper()
	l, err := net.Listen("tcp", loopback.Reserve(t))
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(h)
	_ = srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	return srv
}

func TestOverRealSockets(t *testing.T) {
	page := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			_, _ = w.Write([]byte(`{"data":[{"id":"m"}]}`))
			return
		}
		_, _ = w.Write([]byte(goodPage))
	}
	const n = 4
	var targets []pool.Target
	var servers []*httptest.Server
	for range n {
		srv := reserved(t, http.HandlerFunc(page))
		servers = append(servers, srv)
		targets = append(targets, target(t, srv.Listener.Addr().String()))
	}
	h := pool.NewHolder()
	s, published := watched(t, h, Config{Interval: minInterval, Discover: true})
	s.SetTargets("static", targets, Complete)
	s.Start()
	await(t, published, "all ready, listed and read", func(s *pool.Snapshot) bool {
		c := s.ForModel("m")
		if c == nil || len(c.Index) != n || s.Uncertain {
			return false
		}
		for i := range c.Index {
			if v, ok := s.Readings(pool.NumRequestsWaiting, s.Built).At(int32(i)); !ok || v != 2 {
				return false
			}
		}
		return true
	})
	gone := servers[0].Listener.Addr().String()
	servers[0].Close()
	await(t, published, "one not ready", func(s *pool.Snapshot) bool {
		return len(s.ForModel("m").Index) == n-1 && !s.ByKey(gone).Ready
	})
}

// TestChurn changes the set as often as snapshots come, up to a hundred times a second,
// while readers look at it: endpoints come, go and change their labels, engines and
// ports. Each set is waited for, since of two that wait the later one counts alone.
func TestChurn(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(goodPage)) }))
	t.Cleanup(srv.Close)
	stays := target(t, srv.Listener.Addr().String())
	h := pool.NewHolder()
	s, published := watched(t, h, Config{Interval: minInterval})
	s.SetTargets("static", []pool.Target{stays}, Complete)
	s.Start()
	live := h.Load().ByKey(stays.Addr.String()).Live
	live.Reserve(pool.Load{}, time.Now())

	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			var last uint64
			for {
				select {
				case <-stop:
					return
				default:
				}
				snap := h.Load()
				if e := snap.ByKey(stays.Addr.String()); e == nil || e.Live != live || snap.Seq < last {
					t.Errorf("lost the endpoint that stays, or went back from %d to %d", last, snap.Seq)
					return
				}
				for i := range snap.Endpoints {
					_ = snap.Readings(pool.KVCacheUsagePerc, snap.Built).Known(int32(i))
				}
				last = snap.Seq
				s.ModelMissing()
				h.Report(pool.Fault{Live: live, Kind: pool.FaultConnect})
				for range s.Endpoints {
				}
				_ = s.Stats()
			}
		})
	}
	before := runtime.NumGoroutine()
	dead := refused(t).Port()
	engines := []pool.Engine{pool.EngineVLLM, pool.EngineSGLang, pool.EngineUnknown}
	for round := range 200 {
		set := []pool.Target{stays}
		set[0].Model, set[0].Pod = fmt.Sprint("m", round), fmt.Sprint("pod", round%2)
		for i := range 10 {
			other := stays
			other.Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 1, byte(1 + (round+i)%20)}), dead)
			other.MetricPort, other.Model = dead, "m"
			other.Engine, other.Incarnation = engines[round%3], fmt.Sprint(round/7)
			if i%2 == 0 { // answers
				other.Addr = netip.AddrPortFrom(other.Addr.Addr(), stays.Addr.Port())
				other.MetricPort = stays.MetricPort
			}
			set = append(set, other)
		}
		s.SetTargets("static", set, Complete)
		if round%50 == 0 {
			s.Apply(Config{Interval: minInterval + time.Duration(round), Sources: []string{"static"}})
		}
		await(t, published, "this round's set", func(s *pool.Snapshot) bool {
			e := s.ByKey(stays.Addr.String())
			return len(s.Endpoints) == 11 && e != nil && e.Model == set[0].Model
		})
	}
	s.SetTargets("static", []pool.Target{stays}, Complete)
	await(t, published, "only the one that stays, ready", func(s *pool.Snapshot) bool {
		return len(s.Endpoints) == 1 && s.Endpoints[0].Ready && s.Endpoints[0].Live.InFlight() == 1
	})
	close(stop)
	readers.Wait()
	// Loops of endpoints that are gone end by themselves, not only with the Syncer.
	for end := time.Now().Add(patience); runtime.NumGoroutine() > before; {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
		time.Sleep(time.Millisecond)
	}
}
