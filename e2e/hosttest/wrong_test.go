package hosttest

import (
	"context"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Each use of the API that makes the real filter hang or crash, or that only works there by luck, ends Envoy with a
// message that names it.
func TestWrong(t *testing.T) {
	body := func() io.Reader { return pieces("a", "b") }
	trailers := map[string]string{"x-trailer": "t"}
	faults := `unexpected fault address|SIGSEGV|Segmentation fault`
	tests := []struct {
		call call
		want string
	}{
		{call{do: "status-in-headers"}, `MISUSE: decoding returned StopNoBuffer \(5\) in ProcessingHeader: contrib logs "unexpected status"`},
		{call{do: "status-legacy"}, `MISUSE: decoding returned an unknown status \(100\) in ProcessingHeader`},
		{call{do: "status-reply"}, `MISUSE: decoding returned LocalReply in ProcessingHeader without SendLocalReply`},
		{call{do: "status-in-trailers", body: body(), trailers: trailers}, `MISUSE: decoding returned StopNoBuffer \(5\) in ProcessingTrailer`},
		{call{do: "more-after-end", body: body()}, `MISUSE: decoding returned StopAndBuffer in ProcessingData with endStream`},
		{call{do: "more-after-end-async"}, `MISUSE: decoding Continue\(\) StopAndBuffer in ProcessingHeader with endStream`},
		{call{do: "held-till-trailers", body: body(), trailers: trailers}, `MISUSE: decoding held chunks with StopAndBufferWatermark until the trailers`},
		{call{do: "continue-running"}, `MISUSE: decoding Continue\(Running\) in ProcessingHeader`},
		{call{do: "continue-empty", body: pieces(), trailers: trailers}, `MISUSE: decoding Continue\(\) from headers when trailers came without a body`},
		{call{do: "continue-twice"}, `MISUSE: Continue\(\) after Continue\(\) in ProcessingHeader`},
		{call{do: "continue-then-status"}, `MISUSE: decoding returned Continue in ProcessingHeader after Continue\(\)`},
		{call{do: "continue-then-reply"}, `MISUSE: SendLocalReply after Continue\(\) in ProcessingHeader`},
		{call{do: "reply-twice"}, `MISUSE: SendLocalReply after SendLocalReply in ProcessingHeader`},
		{call{do: "reply-then-continue"}, `MISUSE: Continue\(\) after SendLocalReply in ProcessingHeader`},
		{call{do: "reply-then-status"}, `MISUSE: decoding returned Continue in ProcessingHeader after SendLocalReply`},
		{call{do: "reply-then-panic"}, `MISUSE: the reply to a panic after SendLocalReply in ProcessingHeader`},
		{call{do: "headers-after-continue"}, `MISUSE: change of headers from a goroutine after Continue`},
		{call{do: "metadata-after-reply"}, `MISUSE: DynamicMetadata\(\)\.Set from a goroutine after SendLocalReply`},
		{call{do: "property-in-goroutine"}, `MISUSE: GetProperty from a goroutine`},
		{call{do: "strict-in-goroutine"}, `MISUSE: SetUpstreamOverrideHost\(strict\) from a goroutine`},
		{call{do: "block"}, `MISUSE: DecodeHeaders has blocked its thread for more than 500 ms`},
		{call{do: "getters-at-once"}, `MISUSE: DecodeHeaders has blocked its thread for more than 500 ms`},
		{call{do: "no-recover"}, `panic: (request has been finished|golang filter has been destroyed)`},
		{call{do: "raw-after-continue"}, faults},
		{call{do: "raw-after-destroy", headers: map[string]string{"x-hang": "1"}}, faults},
		{call{do: "use-after-finalize"}, faults},
	}
	for _, tt := range tests {
		t.Run(tt.call.do, func(t *testing.T) {
			t.Parallel()
			settings := map[string]any{"gc_interval_ms": 5}
			if strings.Contains(tt.want, "blocked") {
				settings["blocked_ms"] = 500
			}
			r := setup{name: "c", settings: settings}.start(t)
			r.dies = true
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			sent := make(chan struct{})
			go func() {
				defer close(sent)
				// Some misuses are a race with what the client sends: whoever
				// is answered has won it, and tries again.
				for {
					resp, err := r.send(ctx, tt.call)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			}()
			switch tt.call.do {
			case "no-recover":
				r.waitLog(t, "misuse: waiting")
				cancel()
			case "raw-after-destroy":
				r.waitLog(t, "misuse: answering")
				cancel()
			}
			r.wantEnd(t, tt.want)
			cancel()
			<-sent
		})
	}
}

// wantEnd waits until Envoy has ended, saying something.
func (r *running) wantEnd(t *testing.T, pattern string) {
	t.Helper()
	end := time.NewTimer(patience)
	defer end.Stop()
	select {
	case <-r.Done():
	case <-end.C:
		t.Errorf("Envoy goes on, want its end with %q", pattern)
		return
	}
	if re := regexp.MustCompile(pattern); !re.MatchString(strings.Join(r.Log(), "\n")) {
		t.Errorf("Envoy ended, but did not say %q", pattern)
	}
}

// A plugin that uses a metric in Destroy: the config is gone by then, which is a panic nobody recovers.
func TestMetricInDestroy(t *testing.T) {
	r := setup{name: "metric-in-destroy"}.start(t)
	r.dies = true
	_ = r.do(t, call{})
	_ = r.Stop()
	r.wantEnd(t, `panic: request has been finished`)
}

// With abort_on_panic a panic is no longer just a 500.
func TestAbortOnPanic(t *testing.T) {
	r := setup{name: "c", settings: map[string]any{"abort_on_panic": true}}.start(t)
	r.dies = true
	if resp, err := r.send(t.Context(), call{do: "panic"}); err == nil {
		_ = resp.Body.Close()
		t.Errorf("answered %d", resp.StatusCode)
	}
	r.wantEnd(t, `MISUSE: panic in ProcessingHeader: on purpose`)
}

// A client that goes away while the request waits ends it with reason Terminate; the goroutine's panic is recovered.
func TestCancel(t *testing.T) {
	r := setup{name: "c"}.start(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		if resp, err := r.send(ctx, call{do: "wait"}); err == nil {
			_ = resp.Body.Close()
		}
	}()
	r.waitLog(t, "misuse: waiting")
	cancel()
	<-sent
	r.waitLog(t, `misuse: log "wait" / `)
	r.waitLog(t, `misuse: destroy "wait" 1`)
	seen(200, "", "")(t, r.do(t, call{}))
	waitStat(t, r, "misuse.busy", 0)
}

// A body over Envoy's limit is 413 while the plugin waits for all of it, and a reply that its Encode* sees; chunks that
// the plugin lets pass are not measured.
func TestTooLarge(t *testing.T) {
	r := setup{name: "c", limit: 100_000}.start(t)
	whole, over := strings.Repeat("x", 100_000), strings.Repeat("x", 140_000)
	a := r.do(t, call{do: "buffer", body: pieces(over, "y")})
	replied(413, "Payload Too Large", "413 buffer", nil)(t, a)
	r.waitLog(t, `misuse: complete "buffer" 413 request_payload_too_large`)
	r.waitLog(t, `misuse: destroy "buffer" 0`)
	seen(200, whole, "100000 in 1")(t, r.do(t, call{do: "buffer", body: pieces(whole)}))
	seen(200, over, "")(t, r.do(t, call{body: pieces(over)}))
	a = r.do(t, call{do: "encode-body", body: strings.NewReader(over)}) // its echo is over the limit
	if a.StatusCode != 500 || a.text != "Internal Server Error" {
		t.Errorf("a response over the limit: %d %.100q", a.StatusCode, a.text)
	}
	waitStat(t, r, "misuse.busy", 0)
}
