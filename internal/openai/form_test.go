package openai

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"mime/multipart"
	"strings"
	"testing"
)

// formResult is what a form reader found.
type formResult struct {
	Result
	code    Code
	message string
}

func readForm(boundary string, optional bool, chunks ...[]byte) formResult {
	var f Form
	f.Reset(boundary, Options{ModelOptional: optional})
	for _, c := range chunks {
		f.Write(c)
	}
	r, err := f.Finish()
	r.form = nil
	if err != nil {
		return formResult{r, err.Code, err.Message}
	}
	return formResult{Result: r}
}

func everyFormSplit(t *testing.T, boundary, body string) formResult {
	t.Helper()
	want := readForm(boundary, false, []byte(body))
	var single [][]byte
	for i := range len(body) {
		single = append(single, []byte(body[i:i+1]))
		if got := readForm(boundary, false, []byte(body[:i]), []byte(body[i:])); got != want {
			t.Fatalf("%q cut at %d:\ngot  %+v\nwant %+v", body, i, got, want)
		}
	}
	if got := readForm(boundary, false, single...); got != want {
		t.Fatalf("%q in bytes:\ngot  %+v\nwant %+v", body, got, want)
	}
	return want
}

func part(head, value string) string { return "--b\r\n" + head + "\r\n\r\n" + value + "\r\n" }

func TestForm(t *testing.T) {
	const disposition = "Content-Disposition: form-data; name="
	model, file := part(disposition+`"model"`, "whisper"), part(disposition+`"file"; filename="a.wav"`+"\r\nContent-Type: audio/wav", "RIFF\r\n--x\r\n-\r\r\n--\x00\xff")
	for _, c := range []struct {
		name, body string
		model      string
		stream     bool
		code       Code
		message    string
	}{
		{"the model first", model + file + "--b--\r\n", "whisper", false, "", ""},
		{"the model last", file + model + "--b--", "whisper", false, "", ""},
		{"a preamble and an epilogue", "hello\r\n--bye\r\n" + file + model + "--b--\r\nbye\r\n--b\r\n", "", false, CodeInvalidValue, "something else"},
		{"a preamble", "hello\r\n" + file + model + "--b--\r\nbye\r\n--b\r\n", "whisper", false, "", ""},
		{"streamed", model + part(disposition+`"stream"`, "true") + "--b--", "whisper", true, "", ""},
		{"streamed, by 1", model + part(disposition+`"stream"`, "1") + "--b--", "whisper", true, "", ""},
		{"not streamed, by more than true", model + part(disposition+`"stream"`, "true, or so it begins") + "--b--", "whisper", false, "", ""},
		{"not streamed", model + part(disposition+`"stream"`, "false") + "--b--", "whisper", false, "", ""},
		{"any case, no quotes, more headers", part("x-y: z\r\ncontent-DISPOSITION:form-data;name=model", "a b\r\n") + "--b--", "a b\r\n", false, "", ""},
		{"padding", strings.Replace(model, "--b", "--b \t", 1) + "--b--", "whisper", false, "", ""},
		{"a part without headers", "--b\r\n\r\nx\r\n" + model + "--b--", "whisper", false, "", ""},
		{"no model", file + "--b--", "", false, CodeMissingParameter, "required"},
		{"an empty model", part(disposition+`"model"`, "") + "--b--", "", false, CodeInvalidValue, "is empty"},
		{"two models", model + model + "--b--", "", false, CodeDuplicateParameter, "twice"},
		{"a model that is a file", part(disposition+`"model"; FileName=x`, "m") + "--b--", "", false, CodeInvalidValue, "sent as a file"},
		{"a stream that is a file", model + part(disposition+`"stream"; filename="x"`, "true") + "--b--", "whisper", false, "", ""},
		{"a long model", part(disposition+`"model"`, strings.Repeat("m", MaxModel+1)) + "--b--", "", false, CodeInvalidValue, "longer than"},
		{"cut short", model + "--b-", "", false, CodeInvalidValue, "before its last boundary"},
		{"no form", "{}", "", false, CodeInvalidValue, "before its last boundary"},
		{"empty", "", "", false, CodeInvalidValue, "before its last boundary"},
		{"no parts", "--b--", "", false, CodeMissingParameter, "required"},
		{"a line feed alone in a part's headers", part(disposition+`"model"`+"\n", "\r\nx") + "--b--", "", false, CodeInvalidValue, "something else than CRLF"},
		{"a carriage return alone in a part's headers", part("x: \ry\r\n"+disposition+`"model"`, "x") + "--b--", "", false, CodeInvalidValue, "something else than CRLF"},
		{"data that begins with the boundary", part(disposition+`"model"`, "--b--") + "--b--", "", false, CodeInvalidValue, "begins with the boundary"},
		{"data that begins like it", part(disposition+`"model"`, "--a") + "--b--", "--a", false, "", ""},
		{"data that begins with a dash", part(disposition+`"model"`, "-") + "--b--", "-", false, "", ""},
		{"a folded header", part(disposition+`"model"`+"\r\n x", "m") + "--b--", "", false, CodeInvalidValue, "begins with white space"},
		// Starlette, with which vLLM and SGLang read forms, takes "other" for the model in the first six.
		{"a name twice", model + part(disposition+`"x"; name="model"`, "other") + "--b--", "", false, CodeInvalidValue, "can't be read"},
		{"a name that junk follows", model + part(disposition+`"model"; foo bar`, "other") + "--b--", "", false, CodeInvalidValue, "can't be read"},
		{"junk before a name", model + part(`Content-Disposition: form data; name="model"`, "other") + "--b--", "", false, CodeInvalidValue, "can't be read"},
		{"no kind before a name", model + part(`Content-Disposition: ; name="model"`, "other") + "--b--", "", false, CodeInvalidValue, "can't be read"},
		{"an empty parameter before a name", model + part(`Content-Disposition: form-data;; name="model"`, "other") + "--b--", "", false, CodeInvalidValue, "can't be read"},
		{"two dispositions", model + part(disposition+`"x"`+"\r\n"+disposition+`"model"`, "other") + "--b--", "", false, CodeInvalidValue, "two Content-Disposition"},
		{"a name in another character set", model + part(disposition+`"x"; name*=latin1''model`, "other") + "--b--", "", false, CodeInvalidValue, "name*"},
		{"a name in pieces", model + part(`Content-Disposition: form-data; NAME*0="mod"; name*1="el"`, "other") + "--b--", "", false, CodeInvalidValue, "name*"},
		{"a file's name with quotes in it", part(disposition+`"file"; filename="a"b.wav"`, "RIFF") + model + "--b--", "whisper", false, "", ""},
		{"a file's name in another character set", part(disposition+`"file"; filename*=utf-8''a%20b.wav`, "RIFF") + model + "--b--", "whisper", false, "", ""},
		{"endless headers", "--b\r\n" + strings.Repeat("x", maxPartHead+10), "", false, CodeInvalidValue, "headers of a part are too long"},
	} {
		got := readForm("b", false, []byte(c.body))
		if len(c.body) < 1000 {
			got = everyFormSplit(t, "b", c.body)
		}
		if got.Model != c.model || got.Stream != c.stream || got.code != c.code || !strings.Contains(got.message, c.message) {
			t.Errorf("%s: got %+v", c.name, got)
		}
		if c.code == "" {
			if raw := c.body[got.ModelOffset : got.ModelOffset+int64(got.ModelLength)]; raw != c.model {
				t.Errorf("%s: the model is at %q", c.name, raw)
			}
		}
	}
}

// formBody makes a form with Go's writer; its fields are in order.
func formBody(fields [][2]string, files map[string][]byte) (boundary string, body []byte) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, f := range fields {
		_ = w.WriteField(f[0], f[1]) // in memory
	}
	for name, data := range files {
		p, _ := w.CreateFormFile("file", name)
		_, _ = p.Write(data)
	}
	_ = w.Close()
	return w.Boundary(), b.Bytes()
}

// fieldsOf reads a form with Go's reader.
func fieldsOf(boundary string, body []byte) (fields map[string][]string, err error) {
	fields = map[string][]string{}
	for r := multipart.NewReader(bytes.NewReader(body), boundary); ; {
		p, err := r.NextRawPart()
		if errors.Is(err, io.EOF) {
			return fields, nil
		}
		if err != nil {
			return nil, err
		}
		value, err := io.ReadAll(p)
		if err != nil {
			return nil, err
		}
		fields[p.FormName()+p.FileName()] = append(fields[p.FormName()+p.FileName()], string(value))
	}
}

// TestFormEdits: a form with another model differs in nothing else, by Go's own
// reader.
func TestFormEdits(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for i := range 500 {
		data := make([]byte, rng.IntN(200))
		for j := range data {
			data[j] = "\r\n-ab"[rng.IntN(5)]
		}
		fields := [][2]string{{"prompt", string(data)}, {"language", "de"}}
		if i%3 > 0 {
			fields = append(fields, [2]string{"model", "whisper/größe"})
		}
		rng.Shuffle(len(fields), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
		boundary, body := formBody(fields, map[string][]byte{"a.wav": data})
		var f Form
		f.Reset(boundary, Options{ModelOptional: true})
		cuts := rng.IntN(len(body))
		f.Write(body[:cuts])
		f.Write(body[cuts:])
		r, fault := f.Finish()
		if fault != nil {
			t.Fatalf("%q: %v", body, fault)
		}
		e := r.ModelEdit("other-model")
		edited := append(append(append([]byte(nil), body[:e.Offset]...), e.With...), body[e.Offset+e.Length:]...)
		if e.LengthOf(int64(len(body))) != fmt.Sprint(len(edited)) {
			t.Errorf("length %s of %d", e.LengthOf(int64(len(body))), len(edited))
		}
		want, err := fieldsOf(boundary, body)
		if err != nil {
			t.Fatal(err)
		}
		want["model"] = []string{"other-model"}
		got, err := fieldsOf(boundary, edited)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("%v: got %v, want %v", err, got, want)
		}
	}
}

func TestBoundary(t *testing.T) {
	for contentType, want := range map[string]string{
		"multipart/form-data; boundary=b":                          "b",
		`Multipart/Form-Data; charset=utf-8; boundary="a b"`:       "a b",
		"multipart/form-data; boundary=b; charset=ISO-8859-1":      "b",
		"multipart/form-data; boundary=b; charset=cp037":           "", // "model" is 9496848593 there
		"multipart/form-data; boundary=b; charset=utf-7":           "", // +AG0-odel
		"multipart/form-data; boundary=b; charset*=x''cp037":       "",
		"multipart/form-data; boundary=b; boundary*=utf-8''a":      "",
		`multipart/form-data; boundary="a\(b"`:                     "",
		"multipart/form-data":                                      "",
		"multipart/form-data; boundary=":                           "",
		"multipart/mixed; boundary=b":                              "",
		"application/json":                                         "",
		"":                                                         "",
		"multipart/form-data; boundary=" + strings.Repeat("x", 71): "",
	} {
		if got := Boundary(contentType); got != want {
			t.Errorf("%q: %q, want %q", contentType, got, want)
		}
	}
}

// FuzzForm cuts forms anywhere, and reads them with Go's reader.
func FuzzForm(f *testing.F) {
	for _, fields := range [][][2]string{{{"model", "m"}}, {{"a", "b"}, {"model", "m"}, {"stream", "true"}}, {{"model", "m"}, {"model", "n"}}} {
		_, body := formBody(fields, map[string][]byte{"x": []byte("\r\n--")})
		f.Add(bytes.ReplaceAll(body, body[2:2+60], []byte("b")), uint64(1))
	}
	f.Add([]byte("--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n"), uint64(2))
	f.Fuzz(func(t *testing.T, body []byte, seed uint64) {
		want := readForm("b", false, body)
		r := rand.New(rand.NewPCG(seed, 1))
		if got := readForm("b", false, cut(r, body, 1+r.IntN(8))...); got != want {
			t.Fatalf("split %+v\nwhole %+v", got, want)
		}
		if want.code == CodeInvalidValue || want.code == CodeDuplicateParameter || bytes.Contains(bytes.ToLower(body), []byte("transfer")) {
			return
		}
		fields, err := fieldsOf("b", body)
		if err != nil || strings.Contains(string(body), "\n\n") || bytes.Contains(body, []byte("\n--b")) != bytes.Contains(body, []byte("\r\n--b")) {
			return // Go's reader is stricter about headers, and takes a bare line feed for a line's end
		}
		if got := fields["model"]; want.Model != "" && (len(got) != 1 || got[0] != want.Model) && validDisposition(body) {
			t.Fatalf("model %q, Go's reader has %q", want.Model, got)
		}
	})
}

func validDisposition(body []byte) bool {
	for line := range strings.SplitSeq(string(body), "\r\n") {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.EqualFold(strings.TrimSpace(key), "content-disposition") {
			if kind, _, err := mime.ParseMediaType(value); err != nil || kind != "form-data" || key != strings.TrimSpace(key) {
				return false
			}
		}
	}
	return true
}
