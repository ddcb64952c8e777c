package metricsync

import (
	"compress/gzip"
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/loopback"
	"github.com/shuntproxy/shunt/internal/pool"
)

const goodPage = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"

// serve starts an HTTP server on loopback.
func serve(t testing.TB, h http.HandlerFunc) netip.AddrPort {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return netip.MustParseAddrPort(srv.Listener.Addr().String())
}

// refused returns an address where nothing listens.
func refused(t testing.TB) netip.AddrPort {
	t.Helper()
	return netip.MustParseAddrPort(loopback.Reserve(t))
}

// asking returns a Syncer that was not started, for its clients.
func asking(t testing.TB, cfg Config) *Syncer {
	s := New(Options{Name: "p", Holder: pool.NewHolder()}, cfg)
	t.Cleanup(s.Stop)
	return s
}

// fetchOne scrapes an address once, as a loop would.
func fetchOne(t testing.TB, s *Syncer, engine pool.Engine, addr netip.AddrPort, ctx context.Context) *scrape {
	t.Helper()
	one := pool.Target{Addr: addr, MetricPort: addr.Port(), Engine: engine}
	l := newScraper(s, &endpoint{}, one)
	defer l.fetch.client.close()
	return l.scrape(ctx)
}

func TestFetchPage(t *testing.T) {
	for _, c := range []struct {
		name     string
		engine   pool.Engine
		handler  http.HandlerFunc
		reason   Reason
		says     string
		answered bool
	}{
		{"good", pool.EngineVLLM, func(w http.ResponseWriter, r *http.Request) {
			if a := r.Header.Get("Accept"); a != "text/plain;version=0.0.4" || r.Header.Get("Accept-Encoding") != "" {
				w.WriteHeader(http.StatusNotAcceptable)
			}
			_, _ = w.Write([]byte(goodPage))
		}, ScrapeOK, "", true},
		{"gzip all the same", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = z.Write([]byte(goodPage))
			_ = z.Close()
		}, ScrapeOK, "", true},
		{"gzip of much", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = z.Write([]byte(goodPage + strings.Repeat("x", 1<<20)))
			_ = z.Close()
		}, ScrapeTooLarge, "the page is larger than scrape.maxBytes (1000 bytes), the rest was not read", true},
		{"bad gzip", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write([]byte(goodPage))
		}, ScrapeFormat, "/metrics says that it is gzip, and is not", true},
		{"redirect", pool.EngineVLLM, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/metrics" {
				http.Redirect(w, r, "/metrics/", http.StatusTemporaryRedirect)
				return
			}
			_, _ = w.Write([]byte(goodPage))
		}, ScrapeOK, "", true},
		{"two redirects", pool.EngineVLLM, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.Path+"/", http.StatusTemporaryRedirect)
		}, ScrapeRedirect, "/metrics redirects to a path that redirects to \"/metrics/\"; one redirect", true},
		{"redirect elsewhere", pool.EngineVLLM, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.2:1/metrics", http.StatusTemporaryRedirect)
		}, ScrapeRedirect, "/metrics redirects to \"http://127.0.0.2:1/metrics\", which is another server", true},
		{"not found", pool.EngineSGLang, http.NotFound, ScrapeStatus, "/metrics answers 404; start SGLang with --enable-metrics", true},
		{"unavailable", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, ScrapeStatus, "/metrics answers 503", true},
		{"empty", pool.EngineVLLM, func(http.ResponseWriter, *http.Request) {}, ScrapeEmpty, "/metrics is an empty page", true},
		{"other metrics", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("a 1\n")) }, ScrapeEmpty, "/metrics has none of vllm's metrics (4 bytes); is it that engine? model.aibrix.ai/engine", true},
		{"JSON", pool.EngineTRTLLM, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(" []")) }, ScrapeFormat, "return_perf_metrics", true},
		{"JSON of another engine", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("[]")) }, ScrapeFormat, "TensorRT-LLM answers so: is it that engine?", true},
		{"plain HTTP where TLS is", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadRequest) }, ScrapeStatus, "/metrics answers 400; does it want HTTPS? scrape.tls", true},
		{"another coding", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "br")
			_, _ = w.Write([]byte(goodPage))
		}, ScrapeFormat, `/metrics is packed with "br"`, true},
		{"no coding, said", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "identity")
			_, _ = w.Write([]byte(goodPage))
		}, ScrapeOK, "", true},
		{"too large", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(goodPage + strings.Repeat("x", 2000)))
		}, ScrapeTooLarge, "larger than scrape.maxBytes", true},
		{"cut off", pool.EngineVLLM, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte(goodPage))
		}, ScrapeRead, "/metrics broke off after 85 bytes: unexpected EOF", true},
		{"hangs", pool.EngineVLLM, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, ScrapeTimeout, "no answer for /metrics within 100ms (scrape.timeout)", false},
		{"hangs within", pool.EngineVLLM, func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write([]byte(goodPage))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}, ScrapeTimeout, "no whole page of /metrics within 100ms, only 85 bytes", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			addr := serve(t, c.handler)
			timeout := 20 * time.Second
			if c.reason == ScrapeTimeout {
				timeout = 100 * time.Millisecond
			}
			got := fetchOne(t, asking(t, Config{Timeout: timeout, MaxBytes: 1000}), c.engine, addr, t.Context())
			for c.reason == ScrapeTimeout && got.answered != c.answered && timeout < 20*time.Second {
				timeout *= 2 // the half of a page that comes has not come yet on a busy machine
				got = fetchOne(t, asking(t, Config{Timeout: timeout, MaxBytes: 1000}), c.engine, addr, t.Context())
			}
			c.says = strings.ReplaceAll(c.says, "100ms", timeout.String())
			if got.reason != c.reason || got.answered != c.answered {
				t.Fatalf("got %v, %v, answered %v", got.reason, got.err, got.answered)
			}
			if c.reason == ScrapeOK {
				if show(got.metrics) != "1 2 0.5" || got.err != nil || got.metrics.Taken.IsZero() || got.bytes != int64(len(goodPage)) {
					t.Errorf("got %+v", got)
				}
				return
			}
			if got.metrics != nil || got.err == nil || !strings.Contains(got.err.Error(), c.says) {
				t.Errorf("got %v, want %q in it; metrics %s", got.err, c.says, show(got.metrics))
			}
		})
	}
	if got := fetchOne(t, asking(t, Config{}), pool.EngineVLLM, refused(t), t.Context()); got.reason != ScrapeConnect || got.answered || strings.Contains(got.err.Error(), "port") {
		t.Errorf("refused: %v, %v", got.reason, got.err)
	}
	// The port of the metrics does not follow the other, which is what is wrong most often.
	dead := refused(t)
	l := newScraper(asking(t, Config{}), &endpoint{}, pool.Target{Addr: netip.AddrPortFrom(dead.Addr(), 1), MetricPort: dead.Port(), Engine: pool.EngineVLLM})
	if got := l.scrape(t.Context()); got.reason != ScrapeConnect || !strings.Contains(got.err.Error(), "refused; model.aibrix.ai/metric-port says") {
		t.Errorf("refused at another port: %v, %v", got.reason, got.err)
	}
}

// TestPackedPagesOneAfterAnother: what unpacks them is used again.
func TestPackedPagesOneAfterAnother(t *testing.T) {
	pages := []string{goodPage, strings.ReplaceAll(goodPage, " 1\n", " 7\n"), goodPage}
	p := newParser(testTables.of(pool.EngineVLLM))
	for i, page := range pages {
		body, err := p.unpacked(strings.NewReader(packed(page)), true)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := p.parse(body, 1<<20); err != nil || n != int64(len(page)) {
			t.Errorf("page %d: %d bytes, %v", i, n, err)
		}
		if got, want := show(p.look(nil).metrics), show(parsePage(t, pool.EngineVLLM, page).metrics); got != want {
			t.Errorf("page %d: %s, want %s", i, got, want)
		}
	}
}

func TestProbe(t *testing.T) {
	addr := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	for _, c := range []struct {
		addr netip.AddrPort
		path string
		ok   bool
	}{{addr, "", true}, {addr, "/health", true}, {addr, "/dead", false}, {refused(t), "", false}, {refused(t), "/health", false}} {
		s := asking(t, Config{Health: Health{Path: c.path}})
		if err := s.knock(t.Context(), s.cfg.Load(), c.addr); (err == nil) != c.ok {
			t.Errorf("%s %q: %v", c.addr, c.path, err)
		}
	}
}

func TestFetchModels(t *testing.T) {
	for _, c := range []struct {
		status int
		body   string
		want   []string
		none   bool
		says   string
	}{
		{200, `{"object":"list","data":[{"id":"a","object":"model"},{"id":"b","parent":"a"},{"id":""}]}`, []string{"a", "b"}, false, ""},
		{200, `{"data":[]}`, nil, false, ""},
		{401, `{"error":"Unauthorized"}`, nil, true, ""},
		{403, ``, nil, true, ""},
		{404, ``, nil, true, ""},
		{503, ``, nil, false, "/v1/models answers 503"},
		{200, `{"models":[]}`, nil, false, "no data"},
		{200, `{"data":null}`, nil, false, "no data"},
		{200, `<html>`, nil, false, "not a model list"},
		{200, `{"data":"` + strings.Repeat("x", listLimit) + `"}`, nil, false, "larger than"},
	} {
		addr := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v1/models" {
				t.Errorf("asked for %s", r.URL.Path)
			}
			w.WriteHeader(c.status)
			_, _ = w.Write([]byte(c.body))
		})
		s := asking(t, Config{})
		got, err := s.fetchModels(t.Context(), s.cfg.Load(), addr)
		if !slices.Equal(got.ids, c.want) || got.none != c.none || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%d %.40s: %+v, %v", c.status, c.body, got, err)
		}
	}
}

func TestReasonsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Reasons() {
		if r.String() == "" || r.String() == "unknown" || seen[r.String()] {
			t.Errorf("reason %d is %q", r, r)
		}
		seen[r.String()] = true
	}
	if numReasons.String() != "unknown" {
		t.Error("no reason has a name")
	}
}
