package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shuntproxy/shunt/filter"
)

// requests is how many chat requests show sends.
const requests = 300

// show is make demo.
func show(ctx context.Context, s settings, out io.Writer) (err error) {
	// A make that is killed tells its children nothing: the kernel does.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGTERM), 0, 0, 0); err != nil {
		return fmt.Errorf("prctl: %w", err)
	}
	loading, err := s.loading()
	if err != nil {
		return err
	}
	envoy, err := s.findEnvoy(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "shunt-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	w, err := start(ctx, place{
		loading: loading, envoy: envoy, listen: "127.0.0.1:0", admin: "127.0.0.1:0",
		shuntAdmin: "unix:" + filepath.Join(dir, "admin.sock"), dir: dir, policy: s.policy,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	if err := w.showPods(ctx, out); err != nil {
		return err
	}
	if err := w.showTraffic(ctx, s.policy, out); err != nil {
		return err
	}
	if err := w.showBad(ctx, out); err != nil {
		return err
	}
	fmt.Fprint(out, "\nNext: make up leaves all this running and prints curl lines to play with; README.md says how to put shunt into your own Envoy.\n")
	return w.envoy.CheckLog()
}

// showPods prints what shunt has read from the engines before the first request.
func (w *world) showPods(ctx context.Context, out io.Writer) error {
	found, err := w.endpoints(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\nEnvoy %s with shunt inside, in front of four simulated vLLM engines. What shunt reads from their metrics:\n\n", w.envoyVersion(ctx))
	cells := [][]string{{"pod", "endpoint", "model", "running", "waiting", "KV cache", ""}}
	for i, p := range w.pods {
		e := found[w.engines[i].Addr()]
		note := ""
		if p.loaded {
			note = "← slow, and loaded by others"
		}
		cells = append(cells, []string{p.name, e.Endpoint, e.Model, number(e.Running, 1), number(e.Waiting, 1), number(e.KV, 100) + " %", note})
	}
	table(out, 3, cells)
	return nil
}

// number is a metric times a factor, "?" where shunt doesn't know it.
func number(v *float64, factor float64) string {
	if v == nil {
		return "?"
	}
	return fmt.Sprintf("%.0f", *v*factor)
}

// showTraffic sends the chat requests and prints where they went.
func (w *world) showTraffic(ctx context.Context, policy string, out io.Writer) error {
	list := traffic(requests, 1)
	streamed := 0
	for _, c := range list {
		if c.stream {
			streamed++
		}
	}
	fmt.Fprintf(out, "\n%d chat requests, %d of them streamed, arrive over %.0f seconds …\n", requests, streamed, list[requests-1].at.Seconds())
	outcomes, peak := send(ctx, w.envoy.Addr("shunt"), list)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var failed []error
	for i, o := range outcomes {
		if o.err != nil {
			failed = append(failed, fmt.Errorf("request %d for %s: %w", i, o.chat.model, o.err))
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d chat requests failed: %w", len(failed), len(outcomes), failed[0])
	}
	var addresses []string
	for _, e := range w.engines {
		addresses = append(addresses, e.Addr())
	}
	got := rows(w.pods, addresses, outcomes)
	for i, e := range w.engines {
		if n := len(e.Requests("/v1/chat/completions")); n != got[i].requests {
			return fmt.Errorf("engine %s counted %d chat requests, by the answers it got %d", w.pods[i].name, n, got[i].requests)
		}
	}
	fmt.Fprintf(out, "All answered with 200, at most %d open at once. Milliseconds to the first byte of the body, as the client\nmeasured them (the first token of a stream, the end of an answer that isn't streamed):\n\n", peak)
	cells := [][]string{
		{"pod", "endpoint", "requests", "streamed p50", "p99", "not streamed p50", "p99", ""},
	}
	for _, r := range got {
		note := ""
		if r.pod.loaded {
			note = "← slow, loaded"
		}
		cells = append(cells, []string{r.pod.name, r.endpoint, fmt.Sprint(r.requests), millis(r.streamed, 50), millis(r.streamed, 99),
			millis(r.whole, 50), millis(r.whole, 99), note})
	}
	table(out, 2, cells)
	s := shareOf(bigModel, got)
	fmt.Fprintf(out, "\nOf the %d requests for %s, this share went to its two slow, loaded pods:\n\n", s.requests, bigModel)
	table(out, 1, [][]string{
		{"shunt, " + policy, percent(s.loaded, s.requests), fmt.Sprintf("%d requests", s.loaded)},
		{"round robin over its three pods", percent(s.roundRobin, s.requests), fmt.Sprintf("%d requests", s.roundRobin)},
	})
	fmt.Fprint(out, "\n"+explain(policy))
	return nil
}

// explain says what the numbers above mean, and what to try.
func explain(policy string) string {
	switch policy {
	case "least-request":
		return "least-request, the default, takes the pod with the fewest requests of shunt's own in flight. A slow pod holds each of\n" +
			"them longer, so it gets fewer. To see the engines' metrics decide: make demo POLICY=least-kv-cache\n"
	case "least-kv-cache":
		return "least-kv-cache takes the pod whose engine reports the smallest use of its KV cache.\n"
	default:
		return "random takes any pod that serves the model, so it comes close to round robin.\n"
	}
}

// showBad prints what a client sees of requests that can't be served.
func (w *world) showBad(ctx context.Context, out io.Writer) error {
	const hello = `"messages":[{"role":"user","content":"hello"}]`
	fmt.Fprint(out, "\nWhat a client sees when a request can't be served, verbatim:\n")
	for _, b := range []struct{ title, body string }{
		{"1. No model", `{` + hello + `}`},
		{"2. Unknown model", `{"model":"gpt-17",` + hello + `}`},
		{"3. Not JSON", `{"model":"` + bigModel + `",`},
	} {
		if err := w.showReply(ctx, out, b.title, b.body); err != nil {
			return err
		}
	}
	killed := time.Now()
	for i, p := range w.pods {
		if p.model == bigModel {
			if err := w.engines[i].Close(); err != nil {
				return err
			}
		}
	}
	err := w.await(ctx, "shunt knows that the killed engines are gone", func(found map[string]filter.EndpointStatus) bool {
		for i, p := range w.pods {
			if p.model == bigModel && found[w.engines[i].Addr()].State == "ready" {
				return false
			}
		}
		return true
	})
	if err != nil {
		return err
	}
	title := fmt.Sprintf("4. Every pod of %s killed (shunt knew it after %.1f s; until then Envoy's own 503)", bigModel, time.Since(killed).Seconds())
	return w.showReply(ctx, out, title, `{"model":"`+bigModel+`",`+hello+`}`)
}

// showReply prints a request and the bytes of the answer.
func (w *world) showReply(ctx context.Context, out io.Writer, title, body string) error {
	raw, err := rawPost(ctx, w.envoy.Addr("shunt"), body)
	if err != nil {
		return fmt.Errorf("%s: %w", title, err)
	}
	fmt.Fprintf(out, "\n%s\n\n  → POST /v1/chat/completions  %s\n\n", title, body)
	for line := range strings.Lines(raw) {
		fmt.Fprintln(out, strings.TrimRight("  "+strings.TrimRight(line, "\r\n"), " "))
	}
	return nil
}

// rawPost sends a chat request and returns the bytes of the answer.
func rawPost(ctx context.Context, addr, body string) (string, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		addr, len(body), body); err != nil {
		return "", err
	}
	var raw bytes.Buffer
	resp, err := http.ReadResponse(bufio.NewReader(io.TeeReader(conn, &raw)), nil)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return "", err
	}
	return raw.String(), nil
}
