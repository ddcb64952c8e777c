package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func testBackends(t *testing.T) *backends {
	t.Helper()
	b, err := startBackends(4)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// ticks is a CPU clock that advances by 5 ms at each reading.
func ticks() func() (time.Duration, error) {
	var now time.Duration
	return func() (time.Duration, error) { now += 5 * time.Millisecond; return now, nil }
}

func testRequest(t *testing.T, size int) []byte {
	t.Helper()
	r, err := request(body{size: size})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestBackendsAnswer(t *testing.T) {
	b := testBackends(t)
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	if len(b.addrs) != 4 {
		t.Fatalf("addresses %v", b.addrs)
	}
	for _, addr := range b.addrs {
		for path, want := range map[string]string{"/metrics": metricsAnswer, "/v1/models": modelsAnswer} {
			resp, err := client.Get("http://" + addr.String() + path)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || string(body) != want {
				t.Errorf("%s: %q, %v", path, body, err)
			}
		}
		// Of unknown length, so chunked.
		resp, err := client.Post("http://"+addr.String()+"/v1/chat/completions", "application/json",
			io.MultiReader(strings.NewReader("{}"), strings.NewReader(strings.Repeat(" ", 300_000))))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || string(body) != chatAnswer || !json.Valid(body) {
			t.Errorf("chat: %q, %v", body, err)
		}
	}
}

func TestClosedLoopCountsWhatItSends(t *testing.T) {
	b := testBackends(t)
	for _, size := range []int{1 << 10, 256 << 10} {
		var g *generator
		var s sample
		for count := 200 * time.Millisecond; g == nil || g.answers == 0 && count < time.Minute; count *= 2 { // a busy machine answers late
			g = newGenerator(testRequest(t, size), load{conns: 8, warm: 20 * time.Millisecond, count: count}, ticks())
			var err error
			if s, err = g.run(b.addrs[0]); err != nil {
				t.Fatal(err)
			}
		}
		if g.inFlight != 0 || len(g.free) != 8 {
			t.Errorf("%d in flight, %d free after the run", g.inFlight, len(g.free))
		}
		if want := 5000 / float64(g.answers); s.cpuUs != want {
			t.Errorf("CPU %v µs a request, want %v", s.cpuUs, want)
		}
		if s.p50Ms < thinkTime.Seconds()*1e3 {
			t.Errorf("p50 %v ms is less than the backend takes", s.p50Ms)
		}
	}
}

func TestOpenLoopMeasuresEveryScheduledRequest(t *testing.T) {
	b := testBackends(t)
	g := newGenerator(testRequest(t, 1<<10), load{rate: 400, conns: 16, warm: 50 * time.Millisecond, count: 500 * time.Millisecond}, ticks())
	if _, err := g.run(b.addrs[0]); err != nil {
		t.Fatal(err)
	}
	if len(g.latencies) != 200 { // those intended in [50 ms, 550 ms), every 2.5 ms
		t.Errorf("%d latencies, want 200", len(g.latencies))
	}
}

func TestStreamIsTimedToItsFirstEvent(t *testing.T) {
	g := newGenerator([]byte("request"), load{first: true, count: time.Hour}, ticks())
	g.start, g.ended = time.Now(), true
	c := &client{busy: true, written: len(g.request), in: message{response: true}}
	g.inFlight = 1
	for i, piece := range chatStream() {
		if err := g.received(c, piece); err != nil {
			t.Fatal(err)
		}
		if i == 0 && (c.begun == 0 || len(g.latencies) > 0) {
			t.Fatalf("after the first event: begun %v, latencies %v", c.begun, g.latencies)
		}
	}
	if len(g.latencies) != 1 || g.latencies[0] != c.begun {
		t.Errorf("latencies %v, want only %v", g.latencies, c.begun)
	}
}

func TestBackendsStream(t *testing.T) {
	b := testBackends(t)
	r, err := request(bodyNamed("sse"))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", b.addrs[0].String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(r); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(bytes.Join(chatStream(), nil)))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, bytes.Join(chatStream(), nil)) {
		t.Errorf("%q, %v", got, err)
	}
}

// One connection can't carry the offered rate. The requests that are sent late must count, from when they were due: with
// at least thinkTime for each answer, the last of n answers comes at n·thinkTime at the earliest.
func TestOpenLoopHasNoCoordinatedOmission(t *testing.T) {
	b := testBackends(t)
	const rate, n = 5000, 500
	g := newGenerator(testRequest(t, 1<<10), load{rate: rate, conns: 1, count: n * time.Second / rate}, ticks())
	if _, err := g.run(b.addrs[0]); err != nil {
		t.Fatal(err)
	}
	if len(g.latencies) != n {
		t.Fatalf("%d latencies, want %d", len(g.latencies), n)
	}
	if got, least := g.latencies[n-1], n*thinkTime-n*time.Second/rate; got < least { // sorted by summarize
		t.Errorf("the worst latency is %v, it can't be less than %v", got, least)
	}
}

func TestGeneratorRefusesWrongAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		want    string
	}{
		"status": {func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(http.StatusServiceUnavailable)
		}, "answered 503"},
		"close": {func(w http.ResponseWriter, _ *http.Request) {
			if c, _, err := w.(http.Hijacker).Hijack(); err == nil {
				_ = c.(*net.TCPConn).CloseWrite()
				defer c.Close()
				_, _ = io.Copy(io.Discard, c)
			}
		}, "closed the connection"},
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(c.handler)
			defer srv.Close()
			addr := netip.MustParseAddrPort(srv.Listener.Addr().String())
			_, err := generate(addr, testRequest(t, 1<<10), load{conns: 1, count: time.Minute}, ticks())
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

func TestChatBody(t *testing.T) {
	for _, size := range []int{300, 1 << 10, 2500, 4096, 32 << 10, 256 << 10} {
		b, err := chatBody(size, false)
		if err != nil || len(b) != size {
			t.Fatalf("size %d: %d bytes, %v", size, len(b), err)
		}
		var chat struct {
			Model    string
			Messages []struct{ Role, Content string }
		}
		if err := json.Unmarshal(b, &chat); err != nil || chat.Model != modelName || len(chat.Messages) == 0 {
			t.Errorf("size %d: %v, model %q, %d messages", size, err, chat.Model, len(chat.Messages))
		}
	}
	if _, err := chatBody(10, false); err == nil {
		t.Error("a chat of 10 bytes gave no error")
	}
}

func TestFlagsAndMissingModule(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-cases", "bare,foo"}, `-cases: unknown "foo", valid: bare, floor, hold, stock, stock-full, stock-noyield`},
		{[]string{"-bodies", "2k"}, "valid: 1k, 256k"},
		{[]string{"-loads", "x"}, "valid: sat, rate, half, low"},
		{[]string{"-reps", "0"}, "at least 1"},
		{[]string{"-profile", "x"}, "-profile: unknown"},
		{[]string{"x"}, "unexpected argument"},
	} {
		if _, err := parseFlags(c.args); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.args, err, c.want)
		}
	}
	s := &setup{outDir: t.TempDir()}
	if _, err := s.options("stock"); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("missing module: %v", err)
	}
	if _, err := s.options("bare"); err != nil {
		t.Error(err)
	}
}
