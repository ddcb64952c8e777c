package metricsync

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

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
		srv := httptest.NewServer(http.HandlerFunc(page))
		t.Cleanup(srv.Close)
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

// TestChurn changes the set all the time while readers look at it.
func TestChurn(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(goodPage)) }))
	t.Cleanup(srv.Close)
	stays := target(t, srv.Listener.Addr().String())
	h := pool.NewHolder()
	s, published := watched(t, h, Config{Interval: minInterval})
	s.SetTargets("static", []pool.Target{stays}, Complete)
	s.Start()
	live := h.Load().ByKey(stays.Addr.String()).Live
	live.Reserve()

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
				last = snap.Seq
				s.ModelMissing("x")
				h.Report(pool.Fault{Live: live, Kind: pool.FaultConnect})
				for range s.Endpoints {
				}
				_ = s.Stats()
			}
		})
	}
	dead := refused(t).Port()
	for round := range 300 {
		set := []pool.Target{stays}
		set[0].Model = fmt.Sprint("m", round%3)
		for i := range 10 {
			other := stays
			other.Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 1, byte(1 + (round+i)%20)}), dead)
			other.MetricPort, other.Model = dead, "m"
			set = append(set, other)
		}
		s.SetTargets("static", set, Complete)
		if round%50 == 0 {
			s.Apply(Config{Interval: minInterval + time.Duration(round), Sources: []string{"static"}})
			await(t, published, "another round", func(s *pool.Snapshot) bool { return len(s.Endpoints) == 11 })
		}
	}
	close(stop)
	readers.Wait()
	s.SetTargets("static", []pool.Target{stays}, Complete)
	await(t, published, "only the one that stays, ready", func(s *pool.Snapshot) bool {
		return len(s.Endpoints) == 1 && s.Endpoints[0].Ready && s.Endpoints[0].Live.InFlight() == 1
	})
}

// BenchmarkSync is one round of scrapes of 1,000 endpoints, one a second each.
// cpu-us/scrape is the whole process: our half, and a server that answers the
// sample of vLLM with canned bytes.
func BenchmarkSync(b *testing.B) {
	const n = 1000
	body, err := os.ReadFile("testdata/vllm_v1.prom")
	if err != nil {
		b.Fatal(err)
	}
	answer := append([]byte(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", len(body))), body...)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 4096)
				for {
					if k, err := c.Read(buf); err != nil || !bytes.HasSuffix(buf[:k], []byte("\r\n\r\n")) {
						return
					}
					if _, err := c.Write(answer); err != nil {
						return
					}
				}
			}()
		}
	}()
	s := New(Options{Name: "p", Holder: pool.NewHolder(), Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, l.Addr().String())
	}}, Config{Sources: []string{"static"}, Timeout: 10 * time.Second})
	defer s.Stop()
	var set []pool.Target
	for i := range n {
		set = append(set, target(b, fmt.Sprintf("10.0.%d.%d:8000", i/250, 1+i%250)))
	}
	s.SetTargets("static", set, Complete)
	s.Start()
	round := func() {
		for end := s.Stats().Scrapes[ScrapeOK] + n; s.Stats().Scrapes[ScrapeOK] < end; {
			time.Sleep(time.Millisecond)
		}
	}
	round() // connects
	before, publish := cpu(b), s.Stats()
	rounds := 0
	b.ReportAllocs()
	for b.Loop() {
		round()
		rounds++
	}
	after := s.Stats()
	b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(after.Scrapes[ScrapeOK]-publish.Scrapes[ScrapeOK]), "cpu-us/scrape")
	b.ReportMetric((after.PublishSeconds-publish.PublishSeconds)/b.Elapsed().Seconds(), "publish-cores")
	b.ReportMetric(float64(after.Published-publish.Published)/b.Elapsed().Seconds(), "snapshots/s")
}

// cpu is what the process used so far.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
