package metricsync

import (
	"bufio"
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// canned is a connection whose server says the same whatever is asked.
type canned struct {
	net.Conn
	io.Reader
}

func (c *canned) Read(b []byte) (int, error)    { return c.Reader.Read(b) }
func (c *canned) Write(b []byte) (int, error)   { return len(b), nil }
func (c *canned) SetDeadline(_ time.Time) error { return nil }
func (c *canned) Close() error                  { return nil }

// exchange returns what our client reads of an answer.
func exchange(r io.Reader) (status int, body []byte, kept bool, err error) {
	c := &client{address: "a", limit: 1 << 20, dial: func(context.Context, string, string) (net.Conn, error) { return &canned{Reader: r}, nil }}
	head, err := c.get(context.Background(), []byte("GET / HTTP/1.1\r\n\r\n"), time.Second, time.Now().Add(time.Second))
	if err != nil {
		return 0, nil, false, err
	}
	body, err = io.ReadAll(c)
	c.done(0)
	return head.status, body, c.conn != nil, err
}

var answers = []string{
	"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
	"HTTP/1.1 200\r\ncontent-length: 5\r\n\r\nhello",
	"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
	"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
	"HTTP/1.1 200 OK\r\n\r\nto the end",
	"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: x\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 1\r\n\r\nx",
	"HTTP/1.1 204 No Content\r\n\r\n",
	"HTTP/1.1 200 OK\nContent-Length: 2\n\nab",
	"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
	"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
	"HTTP/2 200 OK\r\n\r\n", "", "nonsense\r\n\r\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
}

// agrees compares our client with net/http's on one answer.
func agrees(t *testing.T, text string) {
	t.Helper()
	status, body, _, err := exchange(strings.NewReader(text))
	resp, wantErr := http.ReadResponse(bufio.NewReader(strings.NewReader(text)), nil)
	for wantErr == nil && resp.StatusCode >= 100 && resp.StatusCode < 200 {
		return // where one answer ends ReadResponse does not say
	}
	if wantErr != nil {
		return // it may be stricter
	}
	want, wantErr := io.ReadAll(resp.Body)
	if wantErr != nil {
		if err == nil && errors.Is(wantErr, io.ErrUnexpectedEOF) { // else it is stricter
			t.Errorf("%q: read %q, net/http says %v", text, body, wantErr)
		}
		return
	}
	if err == nil && (status != resp.StatusCode || !bytes.Equal(body, want)) {
		t.Errorf("%q: %d %q, want %d %q", text, status, body, resp.StatusCode, want)
	}
}

func TestClientReads(t *testing.T) {
	for i, text := range answers {
		agrees(t, text)
		status, body, kept, err := exchange(strings.NewReader(text))
		s2, b2, k2, err2 := exchange(iotest.OneByteReader(strings.NewReader(text)))
		if status != s2 || !bytes.Equal(body, b2) || kept != k2 || (err == nil) != (err2 == nil) {
			t.Errorf("%q: in pieces %d %q %v %v", text, s2, b2, k2, err2)
		}
		if good := i < 12; good != (err == nil) {
			t.Errorf("%q: %v", text, err)
		}
		if wantKept := err == nil && !strings.Contains(text, "close") && !strings.Contains(text, "1.0") && !strings.Contains(text, "to the end"); kept != wantKept {
			t.Errorf("%q: kept %v", text, kept)
		}
	}
	if _, _, _, err := exchange(io.MultiReader(strings.NewReader("HTTP/1.1 200 OK\r\nA: "), endless{})); !errors.Is(err, errLarge) {
		t.Errorf("an endless head: %v", err)
	}
}

func FuzzClient(f *testing.F) {
	for _, text := range answers {
		f.Add(text)
	}
	f.Fuzz(agrees)
}

// TestConnectionIsKept: over scrapes, and replaced where the server closed it.
func TestConnectionIsKept(t *testing.T) {
	var opened atomic.Int32
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(goodPage)) }))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			opened.Add(1)
		}
	}
	srv.Start()
	t.Cleanup(srv.Close)
	l := scraperAt(asking(t, Config{}), srv.Listener.Addr())
	defer l.fetch.client.close()
	for i, want := range []int32{1, 1, 1, 2} {
		if i == 3 {
			srv.CloseClientConnections()
		}
		if out := l.scrape(t.Context()); out.err != nil || opened.Load() != want {
			t.Errorf("scrape %d: %v, %d connections, want %d", i, out.err, opened.Load(), want)
		}
	}
}

func scraperAt(s *Syncer, addr net.Addr) *scraper {
	at := netip.MustParseAddrPort(addr.String())
	return newScraper(s, &endpoint{}, pool.Target{Addr: at, MetricPort: at.Port(), Engine: pool.EngineVLLM})
}

// TestEndOfALoopEndsItsScrape, whatever the server does.
func TestEndOfALoopEndsItsScrape(t *testing.T) {
	asked := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(asked)
		<-r.Context().Done()
	}))
	t.Cleanup(srv.Close)
	ctx, cancel := context.WithCancel(t.Context())
	l := scraperAt(asking(t, Config{Timeout: time.Hour}), srv.Listener.Addr())
	done := make(chan *scrape)
	go func() { defer l.fetch.client.close(); done <- l.scrape(ctx) }()
	<-asked
	cancel()
	if out := <-done; out.err == nil {
		t.Error("a page from nowhere")
	}
}

// TestAccess: TLS, a bearer token, and headers, for pages, models and health.
func TestAccess(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get("X-Tenant") != "search" || r.ProtoMajor != 1 {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		switch r.URL.Path {
		case "/v1/models":
			_, _ = w.Write([]byte(`{"data":[{"id":"m"}]}`))
		case "/metrics":
			_, _ = w.Write([]byte(goodPage))
		}
	}))
	t.Cleanup(srv.Close)
	srv.Config.ErrorLog = nil
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ca := write("ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})))
	token, headers := write("token", "secret\n"), map[string]string{"x-tenant": "search"}
	for _, c := range []struct {
		name   string
		access Access
		reason Reason
		says   string
	}{
		{"all", Access{TLS: true, CA: ca, TokenFile: token, Headers: headers}, ScrapeOK, ""},
		{"name", Access{TLS: true, CA: ca, ServerName: "example.com", TokenFile: token, Headers: headers}, ScrapeOK, ""},
		{"unverified", Access{TLS: true, SkipVerify: true, TokenFile: token, Headers: headers}, ScrapeOK, ""},
		{"another authority", Access{TLS: true, TokenFile: token, Headers: headers}, ScrapeConnect, "certificate"},
		{"another name", Access{TLS: true, CA: ca, ServerName: "other", TokenFile: token}, ScrapeConnect, "certificate"},
		{"no token", Access{TLS: true, CA: ca, Headers: headers}, ScrapeStatus, "401; scrape.bearerTokenFile"},
		{"no token file", Access{TLS: true, CA: ca, TokenFile: folder + "/none"}, ScrapeConnect, "scrape.bearerTokenFile: open"},
		{"two tokens", Access{TLS: true, CA: ca, TokenFile: write("two", "a b")}, ScrapeConnect, "more than one token"},
		{"empty token", Access{TLS: true, CA: ca, TokenFile: write("empty", "\n")}, ScrapeConnect, "is empty"},
		{"no CA", Access{TLS: true, CA: folder + "/none", TokenFile: token}, ScrapeConnect, "scrape.tls.caFile: open"},
		{"no PEM", Access{TLS: true, CA: token, TokenFile: token}, ScrapeConnect, "holds no certificate"},
		{"plain", Access{TokenFile: token, Headers: headers}, ScrapeStatus, "400"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := asking(t, Config{Timeout: 20 * time.Second, Access: c.access, Health: Health{Path: "/health"}})
			addr := netip.MustParseAddrPort(srv.Listener.Addr().String())
			out := fetchOne(t, s, pool.EngineVLLM, addr, t.Context())
			if out.reason != c.reason || out.err != nil && !strings.Contains(out.err.Error(), c.says) {
				t.Errorf("%v, %v; want %v, %s", out.reason, out.err, c.reason, c.says)
			}
			if out.err != nil && strings.Contains(out.err.Error(), "secret") {
				t.Error("the error has the token")
			}
			list, err := s.fetchModels(t.Context(), s.cfg.Load(), addr)
			if (err == nil && len(list.ids) == 1) != (c.reason == ScrapeOK) {
				t.Errorf("models: %+v, %v", list, err)
			}
			if err := s.knock(t.Context(), s.cfg.Load(), addr); (err == nil) != (c.reason == ScrapeOK) {
				t.Errorf("health: %v", err)
			}
			s.transport.CloseIdleConnections()
		})
	}
}

// TestTokenIsReadAnew, and the last good one is kept.
func TestTokenIsReadAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	var said []string
	c := credentials{log: func(format string, args ...any) { said = append(said, args[0].(string)) }}
	cfg := Config{Access: Access{TokenFile: path}}.withDefaults()
	now := time.Unix(1000, 0)
	for i, step := range []struct {
		text  string // "" removes the file
		after time.Duration
		want  string
		lines int
	}{
		{"", 0, "", 1},
		{"a", time.Second, "", 1}, // too early
		{"a", rereadAfter, "a", 1},
		{"b", time.Second, "a", 1},
		{"", rereadAfter, "a", 2},
		{"", rereadAfter, "a", 2}, // once
		{"b", rereadAfter, "b", 2},
	} {
		if step.text == "" {
			_ = os.Remove(path)
		} else if err := os.WriteFile(path, []byte(step.text), 0o600); err != nil {
			t.Fatal(err)
		}
		now = now.Add(step.after)
		got, _, err := c.read(cfg, now)
		if got != step.want || (err == nil) != (step.want != "") || len(said) != step.lines {
			t.Errorf("step %d: %q, %v, said %q", i, got, err, said)
		}
	}
}
