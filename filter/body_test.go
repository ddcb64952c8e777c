package filter

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

func packed(t testing.TB, encoding, body string) []byte {
	t.Helper()
	var b bytes.Buffer
	switch encoding {
	case "gzip":
		w := gzip.NewWriter(&b)
		_, _ = w.Write([]byte(body)) // in memory
		_ = w.Close()
	case "zstd":
		w, err := zstd.NewWriter(&b)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write([]byte(body))
		_ = w.Close()
	default:
		return []byte(body)
	}
	return b.Bytes()
}

// edited applies what a verdict changes in a body.
func edited(body []byte, v *Verdict) string {
	e := v.Body
	if e.With == nil {
		return string(body)
	}
	return string(body[:e.Offset]) + string(e.With) + string(body[e.Offset+e.Length:])
}

func (v *Verdict) setHeader(name string) string {
	for _, h := range v.Set {
		if h.Key == name {
			return h.Value
		}
	}
	return ""
}

// TestContentTypes: what is refused is what can't be read.
func TestContentTypes(t *testing.T) {
	for _, c := range []struct {
		path, contentType, reason string
	}{
		{chatPath, "", ""},
		{chatPath, "application/json", ""},
		{chatPath, "application/json; charset=utf-8", ""},
		{chatPath, "application/json;charset=\"UTF-8\"", ""},
		{chatPath, "application/json; charset=iso-8859-1", ""},
		{chatPath, "application/vnd.api+json", ""},
		{chatPath, "text/plain", ""},
		{chatPath, "application/x-www-form-urlencoded", ""}, // curl -d without -H
		{chatPath, "nonsense; =", ""},
		{chatPath, "application/json; charset=utf-16", "unsupported_encoding"},
		{chatPath, "application/json; charset=UTF-32LE", "unsupported_encoding"},
		{chatPath, "multipart/form-data; boundary=x", "unsupported_encoding"},
		{"/v1/audio/transcriptions", "application/json", "invalid_value"},
		{"/v1/audio/transcriptions", "", "invalid_value"},
		{"/v1/audio/translations", "multipart/form-data", "invalid_value"},
	} {
		w := newWorld(t, "")
		w.publish("default", ep(1, "m"))
		s := w.stream()
		v := s.send(t, head(":method", "POST", ":path", c.path, "content-type", c.contentType), nil, chatBody)
		status := 415
		if c.reason == "invalid_value" {
			status = 400
		}
		if v.meta("reason") != c.reason || (c.reason != "" && v.Reply.Status != status) {
			t.Errorf("%s %q: %s", c.path, c.contentType, show(v))
		}
		s.finish(End{})
	}
}

// TestCompressedBodies are read decoded, and sent as they came unless their
// model is rewritten: then decoded.
func TestCompressedBodies(t *testing.T) {
	for _, c := range []struct {
		name, encoding string
		body           func(encoding string) []byte
		rewrite        string
		want           string // reason
		status         int
	}{
		{"as sent", "", nil, "", "", 0},
		{"rewritten", "", nil, "m", "", 0},
		{"broken", "", func(string) []byte { return []byte(chatBody) }, "", "invalid_value", 400},
		{"cut short", "", func(e string) []byte { p := packed(t, e, chatBody); return p[:len(p)-5] }, "", "invalid_value", 400},
		{"empty", "", func(string) []byte { return nil }, "", "invalid_value", 400},
		{"bad JSON inside", "", func(e string) []byte { return packed(t, e, "{") }, "", "invalid_json", 400},
		{"too large inside", "", func(e string) []byte { return packed(t, e, `{"a":"`+strings.Repeat("x", 5<<14)) }, "", "request_too_large", 413},
		{"too large inside, and rewritten", "", func(e string) []byte { return packed(t, e, `{"a":"`+strings.Repeat("x", 5<<14)) }, "m", "request_too_large", 413},
		{"another encoding", "br", nil, "", "unsupported_encoding", 415},
		{"two encodings", "gzip, zstd", nil, "", "unsupported_encoding", 415},
	} {
		for _, encoding := range []string{"gzip", "zstd"} {
			for _, sized := range []bool{true, false} {
				asked := chatBody
				if c.rewrite != "" {
					asked = strings.Replace(chatBody, `"m"`, `"other"`, 1)
				}
				body := packed(t, encoding, asked)
				if c.body != nil {
					body = c.body(encoding)
				}
				header := encoding
				if c.encoding != "" {
					header = c.encoding
				}
				pairs := []string{"content-encoding", header, "x-llm-d-model-name-rewrite", c.rewrite}
				if sized {
					pairs = append(pairs, "content-length", fmt.Sprint(len(body)))
				}
				w := newWorld(t, "forwardControlHeaders: true\nlimits: {requestBody: 64KiB}")
				w.publish("default", ep(1, "m"))
				s := w.stream()
				s.Headers(post(chatPath, pairs...), false, nil, &s.v)
				if s.v.Action == NeedBody {
					half := len(body) / 2
					s.Body([][]byte{body[:half], body[half:]}, &s.v)
				}
				v := &s.v
				if v.meta("reason") != c.want || v.Reply.Status != c.status {
					t.Fatalf("%s %s: %s", c.name, header, show(v))
				}
				if c.status == 415 && v.replyHeader("accept-encoding") != "gzip, zstd" {
					t.Errorf("%s: %s", c.name, show(v))
				}
				if c.want != "" {
					if v.Body.With != nil || len(v.Set) > 0 {
						t.Errorf("%s: a reply changes the request: %+v", c.name, v)
					}
					continue
				}
				got, want := edited(body, v), string(body)
				removed := strings.Join(v.Remove, ",")
				if c.rewrite != "" {
					want = chatBody
				}
				if got != want || (removed == "content-encoding") != (c.rewrite != "") {
					t.Errorf("%s %s: %q, removed %q", c.name, header, got, removed)
				}
				if length := v.setHeader("content-length"); (length != "") != (sized && c.rewrite != "") || length != "" && length != fmt.Sprint(len(got)) {
					t.Errorf("%s %s: content-length %q of %d", c.name, header, length, len(got))
				}
				s.finish(End{})
			}
		}
	}
}

// TestForms: the model of a form picks the endpoint, and only its bytes change.
func TestForms(t *testing.T) {
	const contentType = `multipart/form-data; boundary="b b"`
	field := func(name, value string) string {
		return "--b b\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	file := "--b b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\n\r\n\r\n--b\x00\r\n"
	const end = "--b b--\r\n"
	for _, c := range []struct {
		name, body, rewrite string
		target, reason      string
		want                string
	}{
		{"model", field("model", "m") + file + end, "", "m", "", ""},
		{"model after the file", file + field("model", "m") + end, "", "m", "", ""},
		{"rewritten", file + field("model", "other") + end, "m", "m", "", file + field("model", "m") + end},
		{"model supplied", file + end, "m", "m", "", field("model", "m") + file + end},
		{"an alias", field("model", "alias") + file + end, "", "m", "", field("model", "m") + file + end},
		{"no model", file + end, "", "", "missing_required_parameter", ""},
		{"unknown model", field("model", "x") + end, "", "", "model_not_found", ""},
		{"two models", field("model", "m") + field("model", "m") + end, "", "", "duplicate_parameter", ""},
		{"no form", "{}", "", "", "invalid_value", ""},
	} {
		for _, encoding := range []string{"", "gzip"} {
			w := newWorld(t, "models: {known: [{name: m, aliases: [alias]}]}\nforwardControlHeaders: true")
			w.publish("default", ep(1, "m"))
			s := w.stream()
			h := head(":method", "POST", ":path", "/v1/audio/transcriptions", "content-type", contentType,
				"x-llm-d-model-name-rewrite", c.rewrite, "content-encoding", encoding)
			body := packed(t, encoding, c.body)
			s.Headers(h, false, nil, &s.v)
			if s.v.Action != NeedBody {
				t.Fatalf("%s: %s", c.name, show(&s.v))
			}
			s.Body([][]byte{body[:len(body)/2], body[len(body)/2:]}, &s.v)
			if s.v.meta("reason") != c.reason || (c.reason == "" && s.v.meta("target_model") != c.target) {
				t.Errorf("%s: %s", c.name, show(&s.v))
			}
			want := string(body)
			if c.want != "" {
				want = c.want
			}
			if got := edited(body, &s.v); got != want {
				t.Errorf("%s %s: got %q, want %q", c.name, encoding, got, want)
			}
			s.finish(End{})
		}
	}
}
