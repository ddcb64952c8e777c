package sim

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shuntproxy/shunt/internal/loopback"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func startServer(t testing.TB, cfg Config) *Server {
	t.Helper()
	if cfg.Speedup == 0 {
		cfg.Speedup = 1000
	}
	if cfg.Listen == "" {
		cfg.Listen = loopback.Reserve(t) // also while it refuses
	}
	s, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// client has connections of its own, HTTP/2 with prior knowledge if asked.
func client(t testing.TB, h2 bool) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	tr := &http.Transport{Protocols: p, MaxIdleConnsPerHost: 100}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func post(c *http.Client, s *Server, path, body string) (int, string, error) {
	r, err := c.Post("http://"+s.Addr()+path, "application/json", strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	return r.StatusCode, string(b), err
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// events are the data of an SSE body.
func events(t testing.TB, body string) []string {
	t.Helper()
	var out []string
	sc := bufio.NewScanner(strings.NewReader(body))
	for sc.Scan() {
		if line := sc.Text(); line != "" {
			data, ok := strings.CutPrefix(line, "data: ")
			if !ok {
				t.Errorf("line %q is no event", line)
			}
			out = append(out, data)
		}
	}
	return out
}

func TestGenerate(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}, Adapters: []string{"lora"}})
	for _, h2 := range []bool{false, true} {
		c := client(t, h2)
		for _, tc := range []struct {
			name, path, body string
			tokens           int
			usage, stream    bool
		}{
			{"chat", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5}`, 5, true, false},
			{"chat stream", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_completion_tokens":7,"stream":true}`, 7, false, true},
			{"chat stream with usage", "/v1/chat/completions", `{"model":"lora","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}`, 3, true, true},
			{"completions", "/v1/completions", `{"model":"m","prompt":"hi"}`, 64, true, false},
			{"completions stream", "/v1/completions", `{"model":"m","prompt":["a","b"],"max_tokens":2,"stream":true}`, 2, false, true},
		} {
			t.Run(fmt.Sprintf("%s h2=%v", tc.name, h2), func(t *testing.T) {
				status, body, err := post(c, s, tc.path, tc.body)
				if err != nil || status != 200 {
					t.Fatalf("status %d, error %v, body %s", status, err, body)
				}
				type answer struct {
					Choices []struct {
						Text         string                   `json:"text"`
						Message      struct{ Content string } `json:"message"`
						Delta        struct{ Content string } `json:"delta"`
						FinishReason *string                  `json:"finish_reason"`
					} `json:"choices"`
					Usage *struct {
						PromptTokens     int `json:"prompt_tokens"`
						CompletionTokens int `json:"completion_tokens"`
						TotalTokens      int `json:"total_tokens"`
					} `json:"usage"`
				}
				parts := []string{body}
				if tc.stream {
					parts = events(t, body)
					if parts[len(parts)-1] != "[DONE]" {
						t.Fatalf("the last event is %s", parts[len(parts)-1])
					}
					parts = parts[:len(parts)-1]
				}
				text, finished, usage := "", 0, false
				withText := 0
				for _, p := range parts {
					var a answer
					if err := json.Unmarshal([]byte(p), &a); err != nil {
						t.Fatalf("%v in %s", err, p)
					}
					for _, ch := range a.Choices {
						text += ch.Text + ch.Message.Content + ch.Delta.Content
						withText++
						if ch.FinishReason != nil {
							finished++
						}
					}
					if a.Usage != nil {
						usage = true
						if a.Usage.CompletionTokens != tc.tokens || a.Usage.TotalTokens != tc.tokens+a.Usage.PromptTokens {
							t.Errorf("usage %+v", *a.Usage)
						}
					}
				}
				if len(text) != tc.tokens*bytesPerToken || finished != 1 || usage != tc.usage {
					t.Errorf("%d bytes of text, %d finish reasons, usage %v; want %d, 1, %v", len(text), finished, usage, tc.tokens*bytesPerToken, tc.usage)
				}
				if tc.stream && withText != tc.tokens {
					t.Errorf("%d events with a token, want %d", withText, tc.tokens)
				}
			})
		}
	}
}

func TestRefusedRequests(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}, MaxModelLen: 100})
	c := client(t, false)
	for _, tc := range []struct {
		name, path, body string
		status           int
		has              string
	}{
		{"no JSON", "/v1/chat/completions", `{`, 400, "BadRequestError"},
		{"unknown model", "/v1/chat/completions", `{"model":"x","messages":[{"role":"user","content":"hi"}]}`, 404, "The model `x` does not exist."},
		{"no messages", "/v1/chat/completions", `{"model":"m"}`, 400, "messages"},
		{"no prompt", "/v1/completions", `{"model":"m"}`, 400, "prompt"},
		{"zero tokens", "/v1/completions", `{"model":"m","prompt":"a","max_tokens":0}`, 400, "max_tokens"},
		{"too long", "/v1/completions", `{"model":"m","prompt":"a","max_tokens":100}`, 400, "maximum context length is 100"},
		{"unknown path", "/what/ever", `x`, 200, `"path":"/what/ever"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, body, err := post(c, s, tc.path, tc.body)
			if err != nil || status != tc.status || !strings.Contains(body, tc.has) || !json.Valid([]byte(body)) {
				t.Errorf("status %d, error %v, body %s", status, err, body)
			}
		})
	}
}

// A second turn finds the first one, answer included, in the cache.
func TestSecondTurnHitsTheCache(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}})
	c := client(t, false)
	long := strings.Repeat("word ", 100)
	_, body, err := post(c, s, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"`+long+`"}],"max_tokens":200}`)
	if err != nil {
		t.Fatal(err)
	}
	var a struct {
		Choices []struct{ Message struct{ Content string } }
	}
	if err := json.Unmarshal([]byte(body), &a); err != nil {
		t.Fatal(err)
	}
	_, body, err = post(c, s, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"`+long+`"},{"role":"assistant","content":"`+
		a.Choices[0].Message.Content+`"},{"role":"user","content":"more"}],"max_tokens":1}`)
	if err != nil {
		t.Fatal(err)
	}
	var u struct {
		Usage struct {
			PromptTokens int `json:"prompt_tokens"`
			Details      struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal([]byte(body), &u); err != nil {
		t.Fatal(err)
	}
	if u.Usage.Details.Cached < 300 || u.Usage.Details.Cached >= u.Usage.PromptTokens {
		t.Errorf("%d of %d tokens cached, want all but the newest", u.Usage.Details.Cached, u.Usage.PromptTokens)
	}
}

func TestRecordsRequests(t *testing.T) {
	s := startServer(t, Config{Requests: 3})
	body := bytes.Repeat([]byte("x"), 100_000)
	for _, h2 := range []bool{false, true} {
		req, err := http.NewRequest(http.MethodPut, "http://"+s.Addr()+"/any?q=1", io.MultiReader(bytes.NewReader(body))) // length unknown
		if err != nil {
			t.Fatal(err)
		}
		req.Header["X-Twice"] = []string{"1", "2"}
		req.Trailer = http.Header{"X-End": {"a", "b"}}
		r, err := client(t, h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, r.Body)
		_ = r.Body.Close()
		if err := s.Wait(within(t), func(c Counters) bool { return c.InFlight == 0 }); err != nil {
			t.Fatal(err)
		}
		all := s.Requests("/any")
		got := all[len(all)-1]
		sum := sha256.Sum256(body)
		if got.Method != "PUT" || got.Query != "q=1" || strings.Join(got.Headers["X-Twice"], ",") != "1,2" || strings.Join(got.Trailers["X-End"], ",") != "a,b" ||
			got.BodyLen != int64(len(body)) || got.BodySHA256 != hex.EncodeToString(sum[:]) || got.Status != 200 || !got.Done || got.ContentLength != -1 {
			t.Errorf("h2=%v: %+v", h2, got)
		}
	}
	c := client(t, false)
	for i := range 4 {
		if _, _, err := post(c, s, fmt.Sprintf("/%d", i), ""); err != nil {
			t.Fatal(err)
		}
	}
	var seqs []int
	for _, r := range s.Requests("") {
		seqs = append(seqs, r.Seq)
	}
	if fmt.Sprint(seqs) != "[4 5 6]" {
		t.Errorf("remembered %v, want the newest three in order", seqs)
	}
	s.ResetRequests()
	if len(s.Requests("")) != 0 || s.Counters().Received != 0 {
		t.Error("reset left something")
	}
}

func TestHoldReleaseAndAbort(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}, Hold: true})
	c := client(t, false)
	ctx, cancel := context.WithCancel(within(t))
	var wg sync.WaitGroup
	const n = 20
	for i := range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rctx := ctx
			if i >= n/2 {
				rctx = context.Background()
			}
			req, _ := http.NewRequestWithContext(rctx, http.MethodPost, "http://"+s.Addr()+"/v1/completions", strings.NewReader(`{"model":"m","prompt":"a","max_tokens":1}`))
			r, err := c.Do(req)
			if err == nil {
				_, _ = io.Copy(io.Discard, r.Body)
				_ = r.Body.Close()
			}
			if (err == nil) != (i >= n/2) {
				t.Errorf("request %d: error %v", i, err)
			}
		}()
	}
	wait := func(what string, cond func(Counters) bool) {
		t.Helper()
		if err := s.Wait(within(t), cond); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	wait("all held", func(c Counters) bool { return c.Held == n && c.InFlight == n })
	cancel()
	wait("half aborted", func(c Counters) bool { return c.Held == n/2 && c.InFlight == n/2 && c.Aborted == n/2 })
	if got := s.Release(3); got != 3 {
		t.Errorf("released %d", got)
	}
	wait("three answered", func(c Counters) bool { return c.Answered == 3 && c.Held == n/2-3 })
	s.SetHold(false)
	wg.Wait()
	wait("all answered", func(c Counters) bool { return c.Answered == n/2 && c.InFlight == 0 && c.ByStatus[200] == n/2 })
}

// A client that leaves in the middle of a stream ends its sequence in the engine.
func TestAbortedStreamLeavesTheEngine(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		s := startServer(t, Config{Models: []string{"m"}, Speedup: 1})
		ctx, cancel := context.WithCancel(within(t))
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.Addr()+"/v1/completions",
			strings.NewReader(`{"model":"m","prompt":"a","max_tokens":100000,"stream":true}`))
		r, err := client(t, h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := bufio.NewReader(r.Body).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		if snap := s.Snapshot(); snap.Running != 1 {
			t.Errorf("running %d, want 1", snap.Running)
		}
		cancel()
		_ = r.Body.Close()
		if err := s.Wait(within(t), func(c Counters) bool { return c.Aborted == 1 && c.InFlight == 0 }); err != nil {
			t.Fatal(err)
		}
		if snap := s.Snapshot(); snap.Running != 0 || snap.Stats.Finished[Aborted] != 1 {
			t.Errorf("h2=%v: running %d, finished %v", h2, snap.Running, snap.Stats.Finished)
		}
	}
}

func TestFaults(t *testing.T) {
	const stream = `{"model":"m","prompt":"a","max_tokens":10,"stream":true}`
	for _, h2 := range []bool{false, true} {
		s := startServer(t, Config{Models: []string{"m"}})
		c := client(t, h2)
		set := func(f ...Fault) {
			t.Helper()
			if err := s.SetFaults(f...); err != nil {
				t.Fatal(err)
			}
		}
		set(Fault{Kind: FaultStatus, Status: 503, Count: 2, Headers: map[string]string{"Retry-After": "7"}}, Fault{Kind: FaultEarlyStatus, Status: 429, Body: "full", Count: 1})
		for i, want := range []int{503, 503, 429, 200} {
			if status, body, err := post(c, s, "/v1/completions", stream); err != nil || status != want {
				t.Errorf("h2=%v, request %d: status %d, error %v, body %q; want %d", h2, i, status, err, body, want)
			}
		}
		set(Fault{Kind: FaultReset, Count: 1})
		_, _, err := post(c, s, "/v1/completions", stream)
		if err == nil || !h2 && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("h2=%v, reset: error %v", h2, err)
		}
		set(Fault{Kind: FaultResetMid, AfterTokens: 4, Count: 1})
		status, body, err := post(c, s, "/v1/completions", stream)
		if status != 200 || err == nil || len(events(t, body)) != 4 {
			t.Errorf("h2=%v, reset in a stream: status %d, error %v, %d events", h2, status, err, len(events(t, body)))
		}
		set(Fault{Kind: FaultResetMid, Count: 1})
		status, body, err = post(c, s, "/echo", "")
		if status != 200 || err == nil || json.Valid([]byte(body)) {
			t.Errorf("h2=%v, reset in a body: status %d, error %v, body %q", h2, status, err, body)
		}
		set(Fault{Kind: FaultHang})
		answered := make(chan int)
		go func() {
			status, _, _ := post(c, s, "/v1/completions", stream)
			answered <- status
		}()
		if err := s.Wait(within(t), func(c Counters) bool { return c.InFlight == 1 }); err != nil {
			t.Fatal(err)
		}
		set()
		if status := <-answered; status != 200 {
			t.Errorf("h2=%v: after a hang ended: status %d", h2, status)
		}
		set(Fault{Kind: FaultHangMid, AfterTokens: 4, Count: 1})
		r, err := c.Post("http://"+s.Addr()+"/v1/completions", "application/json", strings.NewReader(stream))
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(r.Body)
		for n := 0; n < 4 && lines.Scan(); {
			if lines.Text() != "" {
				n++
			}
		}
		if c := s.Counters(); c.InFlight != 1 {
			t.Errorf("h2=%v, hang in a stream: %+v", h2, c)
		}
		set()
		last := ""
		for lines.Scan() {
			if lines.Text() != "" {
				last = lines.Text()
			}
		}
		_ = r.Body.Close()
		if last != "data: [DONE]" {
			t.Errorf("h2=%v: after a hang in a stream it ends in %q (%v)", h2, last, lines.Err())
		}
		set(Fault{Kind: FaultHangMid, Count: 1})
		go func() {
			status, body, _ := post(c, s, "/echo", "")
			if !json.Valid([]byte(body)) {
				status = 0
			}
			answered <- status
		}()
		if err := s.Wait(within(t), func(c Counters) bool { return c.InFlight == 1 }); err != nil {
			t.Fatal(err)
		}
		set()
		if status := <-answered; status != 200 {
			t.Errorf("h2=%v: after a hang in a body: status %d", h2, status)
		}
		set(Fault{Kind: FaultStatus, Path: "/health"})
		if status, _, _ := post(c, s, "/v1/completions", stream); status != 200 {
			t.Errorf("a fault of /health hit /v1/completions: %d", status)
		}
		if status, _, _ := post(c, s, "/health", ""); status != 500 {
			t.Errorf("/health: %d, want 500", status)
		}
		if err := s.SetFaults(Fault{Kind: "boom"}); err == nil || !strings.Contains(err.Error(), "faults[0]: kind: unknown fault \"boom\", valid:") {
			t.Errorf("error %v", err)
		}
		if c := s.Counters(); c.Reset != 3 {
			t.Errorf("h2=%v: %+v, want 3 reset", h2, c)
		}
	}
}

func TestRefuseAndAccept(t *testing.T) {
	s := startServer(t, Config{})
	get := func() error { _, _, err := post(client(t, false), s, "/health", ""); return err }
	idle, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	if err := get(); err != nil {
		t.Fatal(err)
	}
	s.Refuse(false, 0)
	if err := get(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("while refusing: %v", err)
	}
	_ = idle.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := idle.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) || err == nil {
		t.Errorf("an idle connection while refusing: %v, want it closed", err)
	}
	if !s.State().Refusing {
		t.Error("the state says it accepts")
	}
	if err := s.Accept(); err != nil {
		t.Fatal(err)
	}
	if err := get(); err != nil {
		t.Errorf("after Accept: %v", err)
	}
	s.Refuse(true, time.Millisecond)
	for deadline := time.Now().Add(20 * time.Second); get() != nil; {
		if time.Now().After(deadline) {
			t.Fatal("it never accepted again")
		}
	}
	s.Refuse(true, time.Hour) // Close ends it
}

func TestIdleConnectionsAreClosed(t *testing.T) {
	s := startServer(t, Config{IdleTimeout: Duration(time.Millisecond)})
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, _ = io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	b, err := io.ReadAll(conn)
	if err != nil || !bytes.HasPrefix(b, []byte("HTTP/1.1 200")) {
		t.Errorf("%q, error %v; want one answer and the end", b, err)
	}
}

func TestFast(t *testing.T) {
	s := startServer(t, Config{Fast: true, FastDelay: Duration(time.Millisecond)})
	status, body, err := post(client(t, false), s, "/v1/chat/completions", `{"model":"whatever"}`)
	if err != nil || status != 200 || !json.Valid([]byte(body)) {
		t.Errorf("status %d, error %v, body %s", status, err, body)
	}
	if s.Counters().Received != 0 {
		t.Error("a fast request was recorded")
	}
}

func TestControlAPI(t *testing.T) {
	s := startServer(t, Config{Name: "e"})
	c := client(t, false)
	for _, tc := range []struct {
		path, body string
		status     int
		has        string
	}{
		{"load", `{"running":3,"waiting":2,"kv_usage":0.5}`, 200, `"running":3,"waiting":2,"kv_usage":0.5`},
		{"load", `{"runing":3}`, 400, `unknown field`},
		{"delays", `{"before_headers":"1ms","before_body":"1ms","between_tokens":"1ms"}`, 200, `"before_headers":"1ms"`},
		{"delays", `{"before_headers":1}`, 400, `Duration`},
		{"faults", `[{"kind":"status","status":503,"count":2}]`, 200, `"count":2`},
		{"faults", `[{"kind":"status","status":99}]`, 400, `faults[0]: status: 99`},
		{"metrics", `{"kind":"what"}`, 400, `unknown metrics fault`},
		{"metrics", `{"kind":"status"}`, 200, `"status":503`},
		{"hold", `{"hold":true}`, 200, `"hold":true`},
		{"release?n=2", ``, 200, `"released":0`},
		{"release?n=x", ``, 400, `invalid`},
		{"health", `{"status":503}`, 200, `"health":503`},
		{"asleep", `{"asleep":true}`, 200, `"asleep":true`},
		{"nonsense", ``, 404, `valid:`},
		{"reset", ``, 200, `"hold":false`},
	} {
		t.Run(tc.path, func(t *testing.T) {
			status, body, err := post(c, s, "/_sim/"+tc.path, tc.body)
			if err != nil || status != tc.status || !strings.Contains(body, tc.has) {
				t.Errorf("status %d, error %v, body %s; want %d and %s", status, err, body, tc.status, tc.has)
			}
		})
	}
	for path, has := range map[string]string{
		"state": `"load":{"running":0,"waiting":0,"kv_usage":0}`, "state?received=0": `"name":"e"`, "requests": `"requests":[]`,
		"state?in_flight=1&wait=1ms": `deadline exceeded`,
	} {
		r, err := c.Get("http://" + s.Addr() + "/_sim/" + path)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if !strings.Contains(string(b), has) {
			t.Errorf("%s: %s, want %s", path, b, has)
		}
	}
}

func TestManyStreams(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}, Params: Params{MaxRunning: 4096}})
	c := client(t, true)
	var wg sync.WaitGroup
	const n = 500
	for range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			status, body, err := post(c, s, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":20,"stream":true}`)
			if err != nil || status != 200 || len(events(t, body)) != 21 {
				t.Errorf("status %d, error %v, %d events", status, err, len(events(t, body)))
			}
		}()
	}
	wg.Wait()
	if got := s.Snapshot().Stats; got.GenerationTokens != n*20 {
		t.Errorf("%d tokens, want %d", got.GenerationTokens, n*20)
	}
}

// Close ends what hangs, waits or streams.
func TestCloseEndsEverything(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}, Speedup: 1, Hold: true})
	c := client(t, false)
	if err := s.SetFaults(Fault{Kind: FaultHang, Path: "/hang"}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, path := range []string{"/hang", "/v1/completions"} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if _, _, err := post(c, s, path, `{"model":"m","prompt":"a"}`); err == nil {
				t.Errorf("%s was answered", path)
			}
		}()
	}
	if err := s.Wait(within(t), func(c Counters) bool { return c.InFlight == 2 && c.Held == 1 }); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if c := s.Counters(); c.InFlight != 0 {
		t.Errorf("%+v", c)
	}
}

func TestReadSpec(t *testing.T) {
	got, err := ReadSpec(strings.NewReader("engines:\n- {name: a, models: [m], load: {running: 3}, params: {blocks: 10}, delays: {before_body: 5ms}}\n- {name: b}\n"))
	if err != nil || len(got) != 2 || got[0].Load.Running != 3 || got[0].Params.Blocks != 10 || got[0].Delays.BeforeBody != Duration(5*time.Millisecond) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"engines: [{nam: a}]", "engines: []", "x"} {
		if _, err := ReadSpec(strings.NewReader(bad)); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
	if _, err := NewServer(Config{Engine: "what"}); err == nil || !strings.Contains(err.Error(), `unknown engine "what", valid: vllm`) {
		t.Errorf("error %v", err)
	}
}
