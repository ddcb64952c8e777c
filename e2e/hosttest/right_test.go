package hosttest

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// What the real filter allows works, and what its SDK turns into a 500 is one.
func TestRight(t *testing.T) {
	r := setup{name: "outer", workers: 2, expect: []string{`filter paniced with error details`, `http: panic serving`}}.start(t)
	tests := []struct {
		name string
		call call
		want func(t *testing.T, a answer)
	}{
		{"pass", call{}, seen(200, "", "")},
		{"pass a body", call{body: strings.NewReader("hello")}, seen(200, "hello", "")},
		{"buffer one chunk", call{do: "buffer", body: strings.NewReader("hello")}, seen(200, "hello", "5 in 1")},
		{"buffer no body", call{do: "buffer"}, seen(200, "", "")},
		{"buffer many chunks", call{do: "buffer", body: pieces("a", "bc", "def")}, seen(200, "abcdef", "6 in 1")},
		{"buffer a large body", call{do: "buffer", body: pieces(strings.Repeat("x", 300_000), "y")}, seen(200, strings.Repeat("x", 300_000)+"y", "300001 in 1")},
		{"trailers", call{do: "buffer", body: pieces("a", "b"), trailers: map[string]string{"x-trailer": "t", "x-secret": "s"}}, func(t *testing.T, a answer) {
			seen(200, "ab", "2 in 1")(t, a)
			if a.got.Trailer.Get("x-trailer") != "t seen" || a.got.Trailer.Get("x-secret") != "" || a.got.Headers.Get("x-end") != "false" {
				t.Errorf("trailers %v, x-end %q", a.got.Trailer, a.got.Headers.Get("x-end"))
			}
		}},
		{"trailers without a body", call{do: "buffer", body: pieces(), trailers: map[string]string{"x-trailer": "t"}}, func(t *testing.T, a answer) {
			seen(200, "", "")(t, a)
			if a.got.Trailer.Get("x-trailer") != "t seen" {
				t.Errorf("trailers %v", a.got.Trailer)
			}
		}},
		{"replace the body", call{do: "replace", body: pieces("a", "b")}, seen(200, "[<ab>]x", "")},
		{"hold chunks", call{do: "chunks", body: pieces("a", "bc")}, func(t *testing.T, a answer) {
			seen(200, "abc", "3 in "+strconv.Itoa(chunksOf(a)))(t, a)
		}},
		{"headers", call{do: "headers", headers: map[string]string{"x-set": "0", "x-del": "1"}}, func(t *testing.T, a answer) {
			h := a.got.Headers
			if h.Get("x-set") != "1" || strings.Join(h.Values("x-add"), ",") != "a,b" || h.Get("x-del") != "" {
				t.Errorf("headers %v", h)
			}
		}},
		{"reply", call{do: "reply"}, replied(429, "busy", "429 reply", func(h http.Header) bool {
			return h.Get("x-reply") == "1" && h.Get("content-type") == "application/json"
		})},
		{"reply without a body", call{do: "reply-empty"}, replied(503, "", "503 reply-empty", nil)},
		{"reply to a body", call{do: "reply-in-data", body: pieces("a", "b")}, replied(400, "no", "400 reply-in-data", nil)},
		{"reply from a goroutine", call{do: "reply-async", body: strings.NewReader("x")}, replied(503, "later", "503 reply-async", nil)},
		{"reply that waits in Encode", call{do: "reply-encode-async"}, replied(418, "tea pot", "418 reply-encode-async", func(h http.Header) bool {
			return h.Get("x-late") == "1"
		})},
		{"reply to gRPC", call{do: "reply", method: http.MethodPost, headers: map[string]string{"content-type": "application/grpc"}}, func(t *testing.T, a answer) {
			if a.StatusCode != 200 || a.Header.Get("grpc-status") != "8" || a.Header.Get("grpc-message") != "busy" || a.Header.Get("x-encoded") != "200 reply" {
				t.Errorf("%d %v", a.StatusCode, a.Header)
			}
		}},
		{"goroutine, no body", call{do: "async", headers: map[string]string{"x-in": "v"}}, async},
		{"goroutine, body", call{do: "async", body: strings.NewReader("hello"), headers: map[string]string{"x-in": "v"}}, async},
		{"goroutine asks for the body", call{do: "async-buffer", body: strings.NewReader("hello")}, seen(200, "hello", "5 in 1")},
		{"goroutine in data", call{do: "async-data", body: pieces("a", "b")}, seen(200, "ab", "2 in 1")},
		{"goroutine in data and trailers", call{do: "async-data", body: pieces("a", "b"), trailers: map[string]string{"x-trailer": "t"}}, func(t *testing.T, a answer) {
			seen(200, "ab", "2 in 1")(t, a)
			if a.got.Trailer.Get("x-trailer") != "async" {
				t.Errorf("trailers %v", a.got.Trailer)
			}
		}},
		{"goroutine for each chunk", call{do: "async-chunks", body: pieces(strings.Repeat("a", 200_000), "b", "c")}, seen(200, strings.Repeat("a", 200_000)+"bc", "")},
		{"metadata", call{do: "metadata"}, func(t *testing.T, a answer) {
			h := a.got.Headers
			if h.Get("x-metadata") != "a|1.5|true|[x 2 false]|b" || h.Get("x-state") != "kept" || h.Get("x-info") != "rest HTTP/1.1 true" {
				t.Errorf("%q %q %q", h.Get("x-metadata"), h.Get("x-state"), h.Get("x-info"))
			}
		}},
		{"response body", call{do: "encode-body"}, func(t *testing.T, a answer) {
			if !strings.HasSuffix(a.text, "}\n!") {
				t.Errorf("body %q", a.text)
			}
		}},
		{"response waits", call{do: "encode-async"}, func(t *testing.T, a answer) {
			seen(200, "", "")(t, a)
			if a.Header.Get("x-late") != "1" {
				t.Errorf("headers %v", a.Header)
			}
		}},
		{"reply instead of the response", call{do: "encode-reply"}, func(t *testing.T, a answer) {
			if a.StatusCode != 502 || a.text != "bad answer" || a.Header.Get("x-encoded") != "" {
				t.Errorf("%d %q %v", a.StatusCode, a.text, a.Header)
			}
		}},
		{"add a body", call{do: "add", method: http.MethodPost}, seen(200, "added", "")},
		{"unknown", call{do: "nonsense"}, replied(400, "unknown x-do nonsense", "400 nonsense", nil)},

		{"panic", call{do: "panic"}, replied(500, "error happened in filter\r\n", "500 panic", nil)},
		{"panic in the encoding of a reply", call{do: "panic-in-reply"}, func(t *testing.T, a answer) {
			if a.StatusCode != 500 || a.text != "error happened in filter\r\n" {
				t.Errorf("%d %q", a.StatusCode, a.text)
			}
		}},
		{"panic in a goroutine", call{do: "panic-async"}, replied(500, "error happened in filter\r\n", "500 panic-async", nil)},
		{"StopAndBuffer with endStream", call{do: "buffer-nothing"}, replied(500, "error happened in filter\r\n", "500 buffer-nothing", nil)},
		{"StopAndBuffer in trailers", call{do: "buffer-trailers", body: pieces("a"), trailers: map[string]string{"x-trailer": "t"}},
			replied(500, "error happened in filter\r\n", "500 buffer-trailers", nil)},
		{"Set in the data phase after Continue", call{do: "set-in-data", body: strings.NewReader("x")}, replied(500, "error happened in filter\r\n", "500 set-in-data", nil)},
		{"Bytes after the chunk passed", call{do: "bytes-in-trailers", body: pieces("a"), trailers: map[string]string{"x-trailer": "t"}},
			replied(500, "error happened in filter\r\n", "500 bytes-in-trailers", nil)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := r.do(t, tt.call)
			if t.Failed() {
				return
			}
			tt.want(t, a)
			if got := a.Header.Get("x-config"); got != "outer" && a.Header.Get("x-encoded") != "" {
				t.Errorf("config %q", got)
			}
		})
	}
	r.waitLog(t, `misuse: complete "reply" 429 misuse_reply`)
	r.waitLog(t, `misuse: log "reply" / 429`)
	r.waitLog(t, `misuse: destroy "reply" 0`)
	r.waitLog(t, `received wait data status when there is no data`)
	r.waitLog(t, `filter paniced with error details: invalid phase, maybe headers/buffer already continued`)
	waitStat(t, r, "misuse.busy", 0)
}

// seen wants the upstream to have seen a body, and what the plugin said of it in x-seen.
func seen(status int, body, note string) func(*testing.T, answer) {
	return func(t *testing.T, a answer) {
		t.Helper()
		if a.StatusCode != status || a.got.Body != body || a.got.Headers.Get("x-seen") != note {
			t.Errorf("status %d, upstream saw %d bytes %.40q, x-seen %q; want %d, %d bytes, %q; %.300s", a.StatusCode,
				len(a.got.Body), a.got.Body, a.got.Headers.Get("x-seen"), status, len(body), note, a.text)
		}
	}
}

// replied wants a reply of the plugin's, which passed its own EncodeHeaders.
func replied(status int, body, encoded string, also func(http.Header) bool) func(*testing.T, answer) {
	return func(t *testing.T, a answer) {
		t.Helper()
		if a.StatusCode != status || a.text != body || a.Header.Get("x-encoded") != encoded || (also != nil && !also(a.Header)) {
			t.Errorf("%d %q, headers %v", a.StatusCode, a.text, a.Header)
		}
	}
}

func async(t *testing.T, a answer) {
	t.Helper()
	if a.got.Headers.Get("x-async") != "v!" || a.got.Headers.Get("x-in") != "" {
		t.Errorf("headers %v", a.got.Headers)
	}
}

func chunksOf(a answer) int {
	_, n, _ := strings.Cut(a.got.Headers.Get("x-seen"), " in ")
	i, _ := strconv.Atoi(n)
	return i
}

// waitStat waits until a gauge or counter has a value.
func waitStat(t *testing.T, r *running, suffix string, want int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for ctx.Err() == nil {
		stats, err := r.Stats(ctx, suffix)
		if err != nil {
			t.Fatal(err)
		}
		for name, v := range stats {
			if strings.HasSuffix(name, suffix) && v == want {
				return
			}
		}
	}
	t.Errorf("no stat %s of %d", suffix, want)
}
