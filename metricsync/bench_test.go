package metricsync

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// serveSample answers requests with one page, or with a model list, until its
// standard input ends.
// It is a process of its own, so that what a benchmark measures is not the
// server's.
func serveSample(path string) {
	body, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	ok := func(body []byte) []byte {
		return append(fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n", len(body)), body...)
	}
	page, list := ok(body), ok([]byte(`{"object":"list","data":[{"id":"m","object":"model"}]}`))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Addr())
	go func() {
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the benchmark is gone
		os.Exit(0)
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			panic(err)
		}
		go func() {
			defer c.Close()
			in := bufio.NewReaderSize(c, 1024)
			answer := page
			for {
				line, err := in.ReadString('\n')
				if err != nil {
					return
				}
				if strings.HasPrefix(line, "GET "+modelsPath+" ") {
					answer = list
				}
				if line == "\r\n" {
					if _, err := c.Write(answer); err != nil {
						return
					}
					answer = page
				}
			}
		}()
	}
}

// sampleServer starts serveSample and returns its address.
func sampleServer(b *testing.B, path string) string {
	b.Helper()
	cmd := exec.Command(os.Args[0], "-serve-sample", path)
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(addr)
}

// cpu is what the process used so far.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkSync is one second of 1,000 endpoints that are scraped once in it and
// asked for their models every half minute. cores is the CPU of this process, the
// server being another one.
func BenchmarkSync(b *testing.B) {
	const n = 1000
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // as in Envoy
	addr := sampleServer(b, "testdata/vllm_v1.prom")
	port := netip.MustParseAddrPort(addr).Port()
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	s := New(Options{Name: "p", Holder: pool.NewHolder()}, Config{
		Sources: []string{"static"}, Timeout: 10 * time.Second, Discover: true,
	})
	defer s.Stop()
	var set []pool.Target
	for i := range n {
		set = append(set, pool.Target{
			Addr:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, byte(1 + i/250), byte(1 + i%250)}), port),
			Model: "m", Engine: pool.EngineVLLM, MetricPort: port,
		})
	}
	dial := s.dial
	s.dial = func(ctx context.Context, network, _ string) (net.Conn, error) { return dial(ctx, network, addr) }
	s.SetTargets("static", set, Complete)
	s.Start()
	round := func() {
		for end := s.Stats().Scrapes[ScrapeOK] + n; s.Stats().Scrapes[ScrapeOK] < end; {
			time.Sleep(50 * time.Millisecond) // what this costs counts too
		}
	}
	round() // connects
	round()
	used, stats, start := cpu(b), s.Stats(), time.Now()
	b.ReportAllocs()
	for b.Loop() {
		round()
	}
	took, after := time.Since(start).Seconds(), s.Stats()
	scrapes := float64(after.Scrapes[ScrapeOK] - stats.Scrapes[ScrapeOK])
	busy := (cpu(b) - used).Seconds()
	var mem runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&mem)
	b.ReportMetric(busy/took, "cores")
	b.ReportMetric(1e6*busy/scrapes, "cpu-us/scrape")
	b.ReportMetric((after.PublishSeconds-stats.PublishSeconds)/took, "publish-cores")
	b.ReportMetric(float64(after.Published-stats.Published)/took, "snapshots/s")
	b.ReportMetric(float64(runtime.NumGoroutine()), "goroutines")
	b.ReportMetric(float64(mem.HeapInuse+mem.StackInuse-before.HeapInuse-before.StackInuse)/n/1024, "KiB/endpoint")
}

// BenchmarkClient is one page over a kept connection, by our client and by
// net/http's; cpu-us is the CPU of this process, the server being another one.
func BenchmarkClient(b *testing.B) {
	addr := sampleServer(b, "testdata/vllm_v1.prom")
	p := newParser(testTables.of(pool.EngineVLLM))
	b.Run("ours", func(b *testing.B) {
		f := fetch{client: &client{dial: (&net.Dialer{}).DialContext, address: addr}, table: p.table, parser: func() *parser { return p }, path: "/metrics", connect: time.Second, limit: 1 << 20}
		defer f.client.close()
		used := cpu(b)
		b.ReportAllocs()
		for b.Loop() {
			f.until = time.Now().Add(time.Second)
			if out, _ := f.page(b.Context()); out.err != nil {
				b.Fatal(out.err)
			}
		}
		b.ReportMetric(float64((cpu(b)-used).Nanoseconds())/1e3/float64(b.N), "cpu-us/op")
	})
	b.Run("net-http", func(b *testing.B) {
		c, tr := newClient((&net.Dialer{}).DialContext)
		defer tr.CloseIdleConnections()
		used := cpu(b)
		b.ReportAllocs()
		for b.Loop() {
			req, err := http.NewRequestWithContext(b.Context(), http.MethodGet, "http://"+addr+"/metrics", nil)
			if err != nil {
				b.Fatal(err)
			}
			resp, err := c.Do(req)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := p.parse(resp.Body, 1<<20); err != nil {
				b.Fatal(err)
			}
			p.reading.reduce(&p.page, anyModel)
			_ = resp.Body.Close()
		}
		b.ReportMetric(float64((cpu(b)-used).Nanoseconds())/1e3/float64(b.N), "cpu-us/op")
	})
}
