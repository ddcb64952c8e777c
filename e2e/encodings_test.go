package e2e

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

func compress(t *testing.T, encoding, body string) string {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser = gzip.NewWriter(&b)
	if encoding == "zstd" {
		var err error
		if w, err = zstd.NewWriter(&b); err != nil {
			t.Fatal(err)
		}
	}
	_, _ = io.WriteString(w, body) // in memory
	_ = w.Close()
	return b.String()
}

// TestCompressedBodies are read, and sent as they came, or decoded where their
// model is rewritten.
func TestCompressedBodies(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		w.answerAll(t)
		asked := aroundModel{`{"model":`, `,"messages":[{"role":"user","content":"` + strings.Repeat("compress me ", 20_000) + `"}]}`}
		forms := map[string]func(sent string) (call, bool){
			"announced": func(sent string) (call, bool) { return call{body: strings.NewReader(sent)}, true },
			"chunked":   func(sent string) (call, bool) { return call{body: &pieces{sent, 100}}, false },
			"with trailers": func(sent string) (call, bool) {
				return call{body: &pieces{sent, 100}, length: -1, trailer: http.Header{"X-Sum": {"kept"}}}, false
			},
		}
		for _, encoding := range []string{"gzip", "zstd"} {
			for form, make := range forms {
				for proto, client := range w.protocols() {
					t.Run(encoding+" "+form+" "+proto, func(t *testing.T) {
						sent := compress(t, encoding, asked.with(`"m"`))
						q, announced := make(sent)
						q.header = header("content-encoding", encoding)
						length := func(body string) int64 {
							if announced {
								return int64(len(body))
							}
							return -1
						}
						got := w.arrived(t, w.must(t, client, q), sent, length(sent))
						if got.Headers.Get("Content-Encoding") != encoding {
							t.Errorf("content-encoding %q", got.Headers.Get("Content-Encoding"))
						}
						q, _ = make(compress(t, encoding, asked.with(`"other"`)))
						q.header = header("content-encoding", encoding, rewriteHeader, "m")
						want := asked.with(`"m"`)
						got = w.arrived(t, w.must(t, client, q), want, length(want))
						if v, ok := got.Headers["Content-Encoding"]; ok {
							t.Errorf("content-encoding %q of a decoded body", v)
						}
					})
				}
			}
			for _, c := range []struct {
				name, header, body string
				status             int
				code               string
			}{
				{"broken", encoding, chat, 400, "invalid_value"},
				{"cut short", encoding, compress(t, encoding, chat)[:30], 400, "invalid_value"},
				{"too large once decoded", encoding, compress(t, encoding, chatOf(limit+1)), 413, "request_too_large"},
				{"another encoding", "br", chat, 415, "unsupported_encoding"},
				{"another character set", "", chat, 415, "unsupported_encoding"},
			} {
				for proto, client := range w.protocols() {
					h := header("content-encoding", c.header)
					if c.header == "" {
						h = header("content-type", "application/json; charset=utf-16")
					}
					r := w.must(t, client, call{header: h, body: strings.NewReader(c.body)})
					if e := errorOf(t, r).Error; r.status != c.status || e.Code != c.code || e.Type != "invalid_request_error" {
						t.Errorf("%s %s %s: %v", encoding, c.name, proto, r)
					}
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestForms: audio goes to an engine of the model in its form.
func TestForms(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{config: "models: {known: [{name: m, aliases: [whisper-1]}]}\n"})
		w.answerAll(t)
		audio := strings.Repeat("RIFF\r\n--\x00\xff", 100_000)
		form := func(model string) (contentType, body string) {
			var b bytes.Buffer
			f := multipart.NewWriter(&b)
			_ = f.SetBoundary("b0undary") // in memory, as all that follows
			part, _ := f.CreateFormFile("file", "a.wav")
			_, _ = io.WriteString(part, audio)
			if model != "" {
				_ = f.WriteField("model", model)
			}
			_ = f.WriteField("language", "de")
			_ = f.Close()
			return f.FormDataContentType(), b.String()
		}
		contentType, plain := form("m")
		_, alias := form("whisper-1")
		_, none := form("")
		supplied := "--b0undary\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n" + none
		for _, path := range []string{"/v1/audio/transcriptions", "/openai/v1/audio/translations/?x=1"} {
			for proto, client := range w.protocols() {
				for _, chunk := range []int{0, 1000} {
					for _, c := range []struct{ name, sent, rewrite, want string }{
						{"as sent", plain, "", plain},
						{"an alias", alias, "", plain},
						{"rewritten", alias, "m", plain},
						{"supplied", none, "m", supplied},
					} {
						t.Run(fmt.Sprint(path, " ", proto, " ", chunk, " ", c.name), func(t *testing.T) {
							q := call{path: path, header: header("content-type", contentType, rewriteHeader, c.rewrite), body: strings.NewReader(c.sent)}
							length := int64(len(c.want))
							if chunk > 0 {
								q.body, length = &pieces{c.sent, chunk}, -1
							}
							w.arrived(t, w.must(t, client, q), c.want, length)
						})
					}
				}
				for name, q := range map[string]call{
					"missing_required_parameter": {header: header("content-type", contentType), body: strings.NewReader(none)},
					"invalid_value":              {header: header("content-type", "application/json"), body: strings.NewReader(chat)},
				} {
					q.path = path
					if r := w.must(t, client, q); r.status != 400 || errorOf(t, r).Error.Code != name {
						t.Errorf("%s %s: %v", proto, name, r)
					}
				}
			}
		}
		w.waitLoad(t, 0, 0)
	})
}

// TestHeldBodies: bodies that have not come to their end share a limit.
func TestHeldBodies(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{config: "limits: {requestBody: 1MiB, heldBodies: 2MiB}\n"})
		w.answerAll(t)
		body := chatOf(1 << 20)
		head := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nhost: e2e\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n", len(body))
		held := func(want float64) {
			t.Helper()
			eventually(t, fmt.Sprint(want, " bytes are held"), func() string {
				if n := w.metric(t, "shunt_held_body_bytes"); n != want {
					return fmt.Sprint(n)
				}
				return ""
			})
		}
		first, second := w.dial(t), w.dial(t)
		first.send(t, head+body[:10])
		second.send(t, head+body[:10])
		held(2 << 20)
		for _, chunked := range []bool{true, false} {
			q := call{body: &pieces{chatOf(200_000), 1000}}
			if !chunked {
				q.length = 200_000
			}
			r := w.must(t, w.h2, q)
			if e := errorOf(t, r).Error; r.status != 429 || e.Code != "rejected-saturated" || r.header.Get("Retry-After") == "" ||
				r.header.Get("X-Llm-D-Request-Dropped-Reason") != "rejected-saturated" {
				t.Errorf("chunked %v: %v", chunked, r)
			}
		}
		first.send(t, body[10:])
		if r := first.read(t); r.status != 200 {
			t.Errorf("%v", r)
		}
		held(1 << 20)
		r := w.must(t, w.h2, call{body: &pieces{chatOf(1_000_000), 100_000}})
		if r.status != 200 {
			t.Errorf("with room again: %v", r)
		}
		_ = second.Close() // it never sends the rest
		held(0)
		w.waitLoad(t, 0, 0)
	})
}

// TestLongHeaders: more than Envoy takes is 431, in OpenAI's error object.
func TestLongHeaders(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		r := w.must(t, w.h2, call{header: header("x-llm-d-inference-fairness-id", strings.Repeat("x", 20_000)), body: strings.NewReader(chat)})
		if r.status != 200 || w.access(t, r.id).at("shunt", "fairness_id") != "default-flow" {
			t.Errorf("%v", r)
		}
		c := w.dial(t)
		c.send(t, rawRequest("POST", "/v1/chat/completions", "x-long: "+strings.Repeat("x", 70_000)+"\r\n", chat))
		if r := c.read(t); r.status != 431 {
			t.Errorf("%v", r)
		}
	})
}
