package metricsync

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// raw is a server that reads each request and then does with the connection as
// it likes; done ends with the test.
func raw(t testing.TB, answer func(c net.Conn, done <-chan struct{})) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { close(done); _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for {
					line, err := in.ReadString('\n')
					if err != nil {
						return
					}
					if strings.TrimSpace(line) == "" {
						break
					}
				}
				answer(c, done)
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}

// says answers with head, then with part again and again until the reader leaves.
func says(head, part string) func(net.Conn, <-chan struct{}) {
	return func(c net.Conn, _ <-chan struct{}) {
		many := []byte(strings.Repeat(part, 1+(16<<10)/max(len(part), 1)))
		if _, err := io.WriteString(c, head); err != nil || part == "" {
			return
		}
		for {
			if _, err := c.Write(many); err != nil {
				return
			}
		}
	}
}

func packed(text string) string {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, text)
	_ = z.Close()
	return b.String()
}

// TestHostileServers: whatever a server does, a scrape ends with a reason, at its
// deadline or before, and has read no more than its limit allows.
func TestHostileServers(t *testing.T) {
	const (
		ok      = "HTTP/1.1 200 OK\r\n"
		toClose = ok + "Connection: close\r\n\r\n"
		chunked = ok + "Transfer-Encoding: chunked\r\n\r\n"
		zipped  = ok + "Content-Encoding: gzip\r\n"
	)
	slowly := func(head, part string) func(net.Conn, <-chan struct{}) {
		return func(c net.Conn, done <-chan struct{}) {
			_, _ = io.WriteString(c, head)
			for {
				select {
				case <-done:
					return
				case <-time.After(5 * time.Millisecond):
				}
				if _, err := io.WriteString(c, part); err != nil {
					return
				}
			}
		}
	}
	for _, c := range []struct {
		name   string
		answer func(net.Conn, <-chan struct{})
		reason Reason
	}{
		{"no answer and no end", func(c net.Conn, done <-chan struct{}) { <-done }, ScrapeTimeout},
		{"closes", says("", ""), ScrapeRead},
		{"closes for writing alone", func(c net.Conn, done <-chan struct{}) { _ = c.(*net.TCPConn).CloseWrite(); <-done }, ScrapeRead},
		{"resets", func(c net.Conn, _ <-chan struct{}) { _ = c.(*net.TCPConn).SetLinger(0) }, ScrapeRead},
		{"half a head", says(ok+"Content-Len", ""), ScrapeRead},
		{"a head byte by byte", slowly(ok, "a"), ScrapeTimeout},
		{"headers without end", says(ok, "a: b\r\n"), ScrapeRead},
		{"a header without end", says(ok+"a: ", "b"), ScrapeRead},
		{"interim answers without end", says("", "HTTP/1.1 100 Continue\r\n\r\n"), ScrapeTooLarge},
		{"another protocol", says("HTTP/1.1 101 Switching Protocols\r\n\r\n", "x"), ScrapeRead},
		{"SSH", says("SSH-2.0-OpenSSH_9.2\r\n", ""), ScrapeRead},
		{"HTTP/2", says("\x00\x00\x12\x04\x00\x00\x00\x00\x00", "\x00"), ScrapeRead},
		{"a page without end", says(toClose, "vllm:num_requests_running 1\n"), ScrapeTooLarge},
		{"a line without end", says(toClose, "v"), ScrapeTooLarge},
		{"a page byte by byte", slowly(toClose, "v"), ScrapeTimeout},
		{"a page that stalls", slowly(toClose+goodPage, ""), ScrapeTimeout},
		{"half a page", says(ok+"Content-Length: 1000\r\n\r\n"+goodPage, ""), ScrapeRead},
		{"closes for writing within", func(c net.Conn, done <-chan struct{}) {
			_, _ = io.WriteString(c, ok+"Content-Length: 1000\r\n\r\n"+goodPage)
			_ = c.(*net.TCPConn).CloseWrite()
			<-done
		}, ScrapeRead},
		{"a length that is too large", says(ok+"Content-Length: 99999999999999999999\r\n\r\n"+goodPage, ""), ScrapeRead},
		{"a length below 0", says(ok+"Content-Length: -1\r\n\r\n"+goodPage, ""), ScrapeRead},
		{"two lengths", says(ok+"Content-Length: 1\r\nContent-Length: 2\r\n\r\n"+goodPage, ""), ScrapeRead},
		{"two codings", says(ok+"Transfer-Encoding: gzip, chunked\r\n\r\n"+goodPage, ""), ScrapeRead},
		{"chunks without end", says(chunked, "4\r\nvvvv\r\n"), ScrapeTooLarge},
		{"chunks of one byte with long names", says(chunked, "1;"+strings.Repeat("x", 9000)+"\r\nv\r\n"), ScrapeTooLarge},
		{"a chunk's size without end", says(chunked, "0"), ScrapeRead},
		{"a chunk of a negative size", says(chunked, "-1\r\n"), ScrapeRead},
		{"trailers without end", says(chunked+"5\r\nvvvv\n\r\n0\r\n", "a: b\r\n"), ScrapeRead},
		{"a packed page that unpacks to much", says(zipped+"Connection: close\r\n\r\n"+packed(strings.Repeat("v", 1<<20)), ""), ScrapeTooLarge},
		{"a packed page of nothing without end", says(zipped+"Connection: close\r\n\r\n", packed("")), ScrapeTooLarge},
		{"a packed page cut off", says(zipped+"Connection: close\r\n\r\n"+packed(goodPage)[:20], ""), ScrapeRead},
		{"a packed page that is none", says(zipped+"Connection: close\r\n\r\n"+goodPage, ""), ScrapeFormat},
		{"a redirect to itself", says("HTTP/1.1 302 Found\r\nLocation: /metrics\r\nContent-Length: 0\r\n\r\n", ""), ScrapeRedirect},
		{"a redirect to another scheme", says("HTTP/1.1 302 Found\r\nLocation: https://127.0.0.1/metrics\r\nContent-Length: 0\r\n\r\n", ""), ScrapeRedirect},
		{"a redirect to another host", says("HTTP/1.1 302 Found\r\nLocation: //10.0.0.9/metrics\r\nContent-Length: 0\r\n\r\n", ""), ScrapeRedirect},
		{"a redirect to a user of it", says("HTTP/1.1 302 Found\r\nLocation: ::%zz\r\nContent-Length: 0\r\n\r\n", ""), ScrapeRedirect},
		{"a redirect with much to say", says("HTTP/1.1 302 Found\r\nLocation: /m\r\n\r\n", "x"), ScrapeRedirect},
		{"an error with much to say", says("HTTP/1.1 500 No\r\n\r\n", "x"), ScrapeStatus},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			timeout := 20 * time.Second
			if c.reason == ScrapeTimeout {
				timeout = 100 * time.Millisecond
			}
			s := asking(t, Config{Timeout: timeout, MaxBytes: 64 << 10})
			got := fetchOne(t, s, pool.EngineVLLM, raw(t, c.answer), t.Context())
			if got.reason != c.reason || got.err == nil || got.metrics != nil {
				t.Errorf("%v: %v", got.reason, got.err)
			}
			if got.bytes > 128<<10+bufferSize {
				t.Errorf("read %d bytes", got.bytes)
			}
		})
	}
}

// TestHostilePages: pages that try to cost memory or to say what is not so.
func TestHostilePages(t *testing.T) {
	const running, kv = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
	repeat := func(n int, line func(i int) string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(line(i))
		}
		return b.String()
	}
	for _, c := range []struct{ name, text, want string }{
		{"many series", repeat(20_000, func(i int) string { return fmt.Sprintf("%s{a=\"%d\"} 1\n", running, i) }), "20000 - -"},
		{"many models", repeat(5_000, func(i int) string { return fmt.Sprintf("%s{model_name=\"%d\"} 1\n", running, i) }), "5000 - -"},
		{"many names", repeat(5_000, func(i int) string { return fmt.Sprintf("vllm:n%d 1\n", i) }) + goodPage, "1 2 0.5"},
		{"many labels", running + "{" + repeat(5_000, func(i int) string { return fmt.Sprintf("a%d=\"\",", i) }) + "} 3", "3 - -"},
		{"many bounds", repeat(5_000, func(i int) string { return fmt.Sprintf("vllm:time_to_first_token_seconds_bucket{le=\"%d\"} 1\n", i) }) + goodPage, "1 2 0.5"},
		{"a long value of a label", running + "{a=\"" + strings.Repeat("x", 900_000) + "\"} 3\n", "3 - -"},
		{"a line that is too long", running + "{a=\"" + strings.Repeat("x", 2*maxLine) + "\"} 3\n" + kv + " 0.5\n", "- - 0.5"},
		{"a long name", "vllm:" + strings.Repeat("x", 900_000) + " 1\n" + kv + " 0.5\n", "- - 0.5"},
		{"a long number", running + " " + strings.Repeat("1", 900_000) + "\n" + kv + " 0." + strings.Repeat("0", 900_000) + "1\n", "- - 0"},
		{"nothing but newlines", strings.Repeat("\n", 1<<20) + goodPage, "1 2 0.5"},
		{"NUL bytes", strings.Repeat("\x00", 1<<20) + "\n" + goodPage, "1 2 0.5"},
		{"a bucket below none", "vllm:time_to_first_token_seconds_bucket{le=\"-Inf\"} -5\nvllm:time_to_first_token_seconds_bucket{le=\"NaN\"} 5\n" + goodPage, "1 2 0.5"},
		{"counts that are not", "vllm:time_to_first_token_seconds_sum -5\nvllm:time_to_first_token_seconds_count -1\n" + goodPage, "1 2 0.5"},
	} {
		got := parsePage(t, pool.EngineVLLM, c.text)
		if show(got.metrics) != c.want {
			t.Errorf("%s: %s, want %s", c.name, show(got.metrics), c.want)
		}
		if len(got.metrics.Models) > maxModels {
			t.Errorf("%s: %d models", c.name, len(got.metrics.Models))
		}
		if v, ok := got.metrics.Get(pool.TimeToFirstToken); ok && v < 0 {
			t.Errorf("%s: a mean of %v", c.name, v)
		}
	}
	priorities := repeat(2*maxSeries, func(i int) string { return fmt.Sprintf("sglang:num_queue_reqs{priority=\"%d\"} 1\n", i) })
	for _, text := range []string{priorities + "sglang:num_queue_reqs{priority=\"\"} 7\n", "sglang:num_queue_reqs{priority=\"\"} 7\n" + priorities} {
		if got := parsePage(t, pool.EngineSGLang, text); show(got.metrics) != "- 7 -" {
			t.Errorf("many priorities: %s", show(got.metrics))
		}
	}
	names := repeat(10*maxAdapters, func(i int) string { return fmt.Sprintf("%x,", i) })
	if n := len(splitAdapters(names)); n != maxAdapters {
		t.Errorf("%d adapters", n)
	}
	if ids, err := decodeModels([]byte(`{"data":[` + repeat(maxListed+1, func(i int) string { return fmt.Sprintf(`{"id":"%d"},`, i) }) + `{}]}`)); err == nil {
		t.Errorf("%d models of one endpoint", len(ids))
	}
	if _, err := decodeModels([]byte(`{"data":[{"id":"` + strings.Repeat("x", maxName+1) + `"}]}`)); err == nil {
		t.Error("a name of a thousand bytes")
	}
	if _, err := decodeModels([]byte(strings.Repeat("[", 1<<17))); err == nil {
		t.Error("a list in a list in a list")
	}
}

// TestStalledTLS: a handshake that does not go on ends with the connection's
// deadline, not the page's.
func TestStalledTLS(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // and accepts nothing: the kernel takes the connection
	s := asking(t, Config{Timeout: 20 * time.Second, ConnectTimeout: 50 * time.Millisecond, Access: Access{TLS: true, SkipVerify: true}})
	got := fetchOne(t, s, pool.EngineVLLM, netip.MustParseAddrPort(l.Addr().String()), t.Context())
	if got.reason != ScrapeTimeout || got.answered || !strings.Contains(got.err.Error(), "within 50ms (scrape.connectTimeout)") {
		t.Errorf("%v: %v", got.reason, got.err)
	}
}

// TestHostilePrometheus: what a server answers that is none ends in a reason, and
// takes nothing of what was known.
func TestHostilePrometheus(t *testing.T) {
	answers := map[string]http.HandlerFunc{}
	for name, text := range map[string]string{
		"nothing": "", "HTML": "<html>", "a number": "1", "null": "null", "a list": "[]", "an empty object": "{}",
		"no data":                 `{"status":"success"}`,
		"data that is null":       `{"status":"success","data":null}`,
		"a matrix":                `{"status":"success","data":{"resultType":"matrix","result":[]}}`,
		"an unknown type":         `{"status":"success","data":{"resultType":"x","result":[]}}`,
		"a vector that is none":   `{"status":"success","data":{"resultType":"vector","result":{}}}`,
		"samples that are none":   `{"status":"success","data":{"resultType":"vector","result":[1,2]}}`,
		"values that are none":    `{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":["x",1]}]}}`,
		"lists in lists":          `{"status":"success","data":` + strings.Repeat("[", 1<<17),
		"objects in objects":      strings.Repeat(`{"data":`, 1<<15),
		"lists in a result":       `{"status":"success","data":{"resultType":"vector","result":` + strings.Repeat("[", 1<<17) + `}}`,
		"an error that is a book": `{"status":"error","errorType":"bad_data","error":"` + strings.Repeat("x", 1<<14) + `"}`,
	} {
		answers[name] = func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
	}
	much := packed(strings.Repeat(" ", maxAnswer+1))
	answers["much, packed"] = func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = io.WriteString(w, much)
	}
	answers["a redirect to itself"] = func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/api/v1/query", http.StatusFound)
	}
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPrometheus(t)
			for _, q := range []string{"num_requests", "time_to_first", "prompt_tokens"} {
				p.vectors[q] = fmt.Sprintf(seriesOfM, "7")
			}
			i := newInquiry(t, QueryConfig{URL: p.URL, Timeout: 20 * time.Second})
			start := time.Now()
			i.round(start)
			if !i.Stats().Up || i.read(pool.P95TTFT5m, "m", start) != 7 {
				t.Fatalf("%+v", i.Stats())
			}
			p.set(func() { p.handler = answer })
			i.said()
			i.round(start)
			if st := i.Stats(); st.Up || st.Error == "" || len(st.Error) > 1000 {
				t.Errorf("%+v", st)
			}
			if got := i.read(pool.P95TTFT5m, "m", start); got != 7 {
				t.Errorf("read %v", got)
			}
			if said := i.said(); strings.Count(said, "\n") != 0 || len(said) > 1500 || strings.Contains(said, "panic") {
				t.Errorf("said %.500s", said)
			}
		})
	}
}

// TestEndWhileStalled: the end of a loop does not wait for a server.
func TestEndWhileStalled(t *testing.T) {
	addr := raw(t, func(c net.Conn, done <-chan struct{}) { _, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\nx"); <-done })
	s := asking(t, Config{Timeout: time.Hour})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if got := fetchOne(t, s, pool.EngineVLLM, addr, ctx); got.reason == ScrapeOK {
		t.Errorf("%v", got.reason)
	}
}
