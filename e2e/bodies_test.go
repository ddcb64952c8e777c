package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
)

const (
	limit        = 4 << 20 // limits.requestBody's default
	bufferMargin = 1 << 20 // by which the reference bootstrap's request_body_buffer_limit is larger
	block        = 64 << 10
	oneByte      = 1
)

// calls are the callbacks of the door so far, by name.
func (w *world) calls(t *testing.T) map[string]int {
	t.Helper()
	_, body := w.adminGet("/test/calls")
	n := map[string]int{}
	if err := json.Unmarshal([]byte(body), &n); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return n
}

// bodyRow is one body: n bytes in pieces, chunked or with its length announced.
type bodyRow struct {
	n, piece int
	chunked  bool
}

func bodyRows() []bodyRow {
	var rows []bodyRow
	for _, chunked := range []bool{true, false} {
		for _, r := range []struct{ n, piece int }{
			{60, 60}, {61, 7}, {1000, oneByte}, {block, oneByte}, {block - 1, block}, {block, block}, {block + 1, block},
			{1 << 20, block}, {1<<20 + 1, 1000}, {limit, block}, {limit, limit},
		} {
			rows = append(rows, bodyRow{r.n, r.piece, chunked})
		}
	}
	return rows
}

func (r bodyRow) String() string {
	form := "content-length"
	if r.chunked {
		form = "chunked"
	}
	return fmt.Sprintf("%d in %d %s", r.n, r.piece, form)
}

// send sends a body as the row says, in one protocol.
func (w *world) send(t *testing.T, proto, path string, row bodyRow, body string) reply {
	t.Helper()
	if proto == "h1" { // net/http would gather small pieces
		id := newID()
		c := w.dial(t)
		head := "POST " + path + " HTTP/1.1\r\nhost: e2e\r\ncontent-type: application/json\r\nx-test-id: " + id + "\r\n"
		if row.chunked {
			head += "transfer-encoding: chunked\r\n\r\n"
		} else {
			head += fmt.Sprintf("content-length: %d\r\n\r\n", len(body))
		}
		written := make(chan struct{})
		go func() { // a 413 comes before the end, and then nobody reads the rest
			defer close(written)
			_, err := io.WriteString(c, head)
			if row.chunked && err == nil {
				_, _ = io.WriteString(c, chunked(body, row.piece, ""))
				return
			}
			for p := body; p != "" && err == nil; p = p[min(row.piece, len(p)):] {
				_, err = io.WriteString(c, p[:min(row.piece, len(p))])
			}
		}()
		r := c.read(t)
		_ = c.Close()
		<-written
		r.id = id
		return r
	}
	q := call{path: path, body: &pieces{body, row.piece}}
	if !row.chunked {
		q.length = int64(len(body))
	}
	return w.must(t, w.h2, q)
}

// TestBodies sends bodies of all sizes in all forms, which must arrive byte for
// byte; over the limit shunt answers 413, whatever the form.
//
// That the cost is linear in chunks is shown by counts: however a body is cut,
// the door calls into Go twice before the pick, once at the headers and once
// with the whole body, and the scan reads each byte once (a test of
// internal/openai). What the door does for one chunk is one addition.
func TestBodies(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		for name, edit := range map[string]func(doc){
			"reference": nil,
			"Envoy's default limits": func(b doc) {
				delete(b.virtualHost(), "request_body_buffer_limit")
				delete(b.listener(), "per_connection_buffer_limit_bytes")
			},
			"32 KiB for the listener and no more": func(b doc) { delete(b.virtualHost(), "request_body_buffer_limit") },
		} {
			if edit != nil && !d.raisesLimit {
				continue
			}
			t.Run(name, func(t *testing.T) {
				w := start(t, d, setup{edit: edit})
				for _, e := range w.engines { // the sum is taken; no need to think about 4 MiB of prompt
					if err := e.SetFaults(sim.Fault{Kind: sim.FaultStatus, Status: 200, Body: "ok"}); err != nil {
						t.Fatal(err)
					}
				}
				for _, proto := range []string{"h1", "h2"} {
					for _, row := range bodyRows() {
						if edit != nil && (row.n < block || row.piece == oneByte) {
							continue // no limit is near, or it is the sum that counts
						}
						t.Run(fmt.Sprint(proto, " ", row), func(t *testing.T) {
							before := w.calls(t)
							body := chatOf(row.n)
							r := w.send(t, proto, "/v1/chat/completions", row, body)
							if r.status != 200 {
								t.Fatalf("%v", r)
							}
							_, got := w.received(t, r.id)
							if got.BodySHA256 != sum(body) || got.BodyLen != int64(row.n) {
								t.Errorf("%d bytes arrived, another sum", got.BodyLen)
							}
							if want := int64(row.n); !row.chunked && got.ContentLength != want {
								t.Errorf("content-length %d at the engine", got.ContentLength)
							}
							after := w.calls(t)
							for _, call := range []string{"headers", "body"} {
								if n := after[call] - before[call]; n != 1 {
									t.Errorf("%d calls of %s, want 1", n, call)
								}
							}
						})
					}
					for _, row := range []bodyRow{
						{limit + 1, limit + 1, true}, {limit + 1, limit + 1, false}, {limit + 1, block, true}, {limit + 1, block, false},
						{2 * limit, 1000, true}, {2 * limit, block, true}, {2 * limit, block, false},
					} {
						t.Run(fmt.Sprint(proto, " too large ", row), func(t *testing.T) {
							code, details := "request_too_large", "shunt_request_too_large"
							if d.envoys413 != "" && row.chunked && row.n > limit+bufferMargin {
								code, details = d.envoys413, d.envoys413
							}
							r := w.send(t, proto, "/v1/chat/completions", row, chatOf(row.n))
							if e := errorOf(t, r).Error; r.status != 413 || e.Code != code || e.Type != "invalid_request_error" {
								t.Errorf("%v", r)
							}
							if proto == "h2" && w.access(t, r.id)["details"] != details {
								t.Errorf("details %v", w.access(t, r.id)["details"])
							}
						})
					}
				}
				w.waitLoad(t, 0, 0)
			})
		}
	})
}

// TestSmallBodies are those that no model can be found in, and those of paths
// where none is looked for.
func TestSmallBodies(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		for _, proto := range []string{"h1", "h2"} {
			for _, n := range []int{1, 2, 59, block, 3 << 20} {
				for _, chunked := range []bool{true, false} {
					row := bodyRow{n, max(1, n/3), chunked}
					body := strings.Repeat("z", n)
					r := w.send(t, proto, "/v1/chat/completions", row, body)
					if r.status != 400 || errorOf(t, r).Error.Code != "invalid_json" {
						t.Errorf("%s %v: %v", proto, row, r)
					}
					r = w.send(t, proto, "/custom", row, body)
					if r.status != 200 {
						t.Errorf("%s %v on a path of no interest: %v", proto, row, r)
						continue
					}
					if _, got := w.received(t, r.id); got.BodySHA256 != sum(body) {
						t.Errorf("%s %v on a path of no interest: %d bytes arrived", proto, row, got.BodyLen)
					}
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestBodiesOfNoInterest are not held, so no limit of shunt's is on them.
func TestBodiesOfNoInterest(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		for _, proto := range []string{"h1", "h2"} {
			for _, row := range []bodyRow{{2*limit + 1, block, true}, {2*limit + 1, block, false}} {
				body := strings.Repeat("0123456789abcde\n", row.n/16+1)[:row.n]
				r := w.send(t, proto, "/v1/files", row, body)
				if r.status != 200 {
					t.Fatalf("%s %v: %v", proto, row, r)
				}
				if _, got := w.received(t, r.id); got.BodySHA256 != sum(body) {
					t.Errorf("%s %v: %d bytes arrived", proto, row, got.BodyLen)
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestExpectContinue: a client that asks first gets its answer before it sends.
func TestExpectContinue(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		c := w.dial(t)
		c.send(t, strings.TrimSuffix(rawRequest("POST", "/v1/chat/completions", "expect: 100-continue\r\n", chat), chat))
		if head := readHead(t, c); !strings.HasPrefix(head, "HTTP/1.1 100 ") {
			t.Fatalf("%q", head)
		}
		c.send(t, chat)
		if r := c.read(t); r.status != 200 {
			t.Errorf("%v", r)
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestBodiesThatEndInTrailers decide at the trailers.
func TestBodiesThatEndInTrailers(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		for _, row := range []struct {
			name, body string
			piece      int
			status     int
			code       string
		}{
			{"in one piece", chat, 1000, 200, ""},
			{"in bytes", chat, 1, 200, ""},
			{"64 KiB", chatOf(block), 1000, 200, ""},
			{"256 KiB", chatOf(1 << 18), block, 200, ""},
			{"empty", "", 1, 400, "invalid_json"},
			{"broken", `{"model":"m"`, 5, 400, "invalid_json"},
			{"of no model", strings.Replace(chat, "model", "nodel", 1), 5, 400, "missing_required_parameter"},
			{"too large", chatOf(limit + 1), block, 413, "request_too_large"},
		} {
			for proto, c := range w.protocols() {
				t.Run(proto+" "+row.name, func(t *testing.T) {
					r := w.must(t, c, call{body: &pieces{row.body, row.piece}, length: -1, trailer: http.Header{"X-Checksum": {"kept"}}})
					if r.status != row.status {
						t.Fatalf("%v", r)
					}
					if row.code != "" {
						if e := errorOf(t, r).Error; e.Code != row.code {
							t.Errorf("code %s, want %s", e.Code, row.code)
						}
						return
					}
					if _, got := w.received(t, r.id); got.BodySHA256 != sum(row.body) || got.Trailers.Get("X-Checksum") != "kept" {
						t.Errorf("%d bytes arrived, trailers %v", got.BodyLen, got.Trailers)
					}
				})
			}
		}
		w.waitLoad(t, 0, 0)
	})
}
