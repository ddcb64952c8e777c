package openai

import (
	"bytes"
	"fmt"
	"mime"
	"strings"
)

// maxPartHead bounds the header lines of one part of a form.
const maxPartHead = 16 << 10

// maxFlag bounds the fields that are read as flags.
const maxFlag = 8

// formState is where a form reader stands.
type formState uint8

const (
	formData  formState = iota // in a part, or in front of the first
	formDelim                  // after a delimiter: CRLF begins a part, -- ends the form
	formHead                   // in a part's header lines
	formEnd                    // after the last delimiter
	formFailed
)

// Form reads the fields of a multipart/form-data body that say what a request is for, where the body of other
// endpoints is JSON: model and stream. Like [Scan] it reads chunks that may be cut anywhere and retains none.
type Form struct {
	delim    []byte // CRLF, --, boundary
	optional bool

	state   formState
	matched int    // bytes of delim that the present data ends with
	skipped int    // how many of them are not in the data, which has only begun
	tail    []byte // of formDelim and formHead: what has come of the line or the head
	base    int64  // offset of the present chunk
	field   formField
	fault   string

	parts     int
	first     int64 // offset of the first delimiter, without its CRLF
	model     []byte
	modelAt   int64 // offset of the first model's value, -1 for none
	modelEnd  int64
	modelSeen int
	modelLong bool
	stream    []byte
}

// formField is the field whose part is being read.
type formField uint8

const (
	fieldOther formField = iota
	fieldModel
	fieldStream
)

// Boundary returns the boundary in a content-type header, "" where the header is not that of a form with one. Nor is
// one that readers of forms differ in: escapes and parameters in an encoding of their own, which not all decode, and a
// character set in which a field's name may be spelled in other bytes than in UTF-8.
func Boundary(contentType string) string {
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "multipart/form-data" || len(params["boundary"]) > 70 || strings.ContainsAny(contentType, `*\`) {
		return ""
	}
	switch strings.ToLower(params["charset"]) {
	case "", "utf-8", "utf8", "us-ascii", "iso-8859-1":
		return params["boundary"]
	}
	return ""
}

// Reset begins a form with a boundary.
func (f *Form) Reset(boundary string, opts Options) {
	*f = Form{delim: append(append(f.delim[:0], "\r\n--"...), boundary...), tail: f.tail[:0], model: f.model[:0], stream: f.stream[:0]}
	f.optional = opts.ModelOptional
	f.matched, f.skipped, f.first, f.modelAt = 2, 2, -1, -1 // a form may begin with a delimiter at once
}

// Write reads the next chunk.
func (f *Form) Write(p []byte) {
	for i := 0; i < len(p); {
		switch f.state {
		case formData:
			i = f.data(p, i)
		case formDelim, formHead:
			f.tail = append(f.tail, p[i])
			i++
			if f.state == formDelim {
				f.endDelim()
			} else {
				f.endHead(f.base + int64(i))
			}
		default:
			i = len(p)
		}
	}
	f.base += int64(len(p))
}

// data reads the data of a part until its delimiter. Since the delimiter's only CR is its first byte, a mismatch can
// only begin another one at once.
func (f *Form) data(p []byte, i int) int {
	for i < len(p) {
		if f.matched == 0 {
			n := bytes.IndexByte(p[i:], '\r')
			if n < 0 {
				n = len(p) - i
			}
			f.take(p[i : i+n])
			if i += n; i == len(p) {
				return i
			}
			f.matched = 1
			i++
			continue
		}
		if p[i] == f.delim[f.matched] {
			i++
			if f.matched++; f.matched < len(f.delim) {
				continue
			}
			if f.skipped > 0 && f.parts > 0 { // a delimiter to some readers, data to others
				f.fail("the data of a part begins with the boundary")
			} else {
				f.endData(f.base + int64(i))
			}
			return i
		}
		if f.parts > 0 { // what looked like a delimiter was data
			f.take(f.delim[f.skipped:f.matched])
		}
		f.matched, f.skipped = 0, 0
	}
	return i
}

// take receives data of the present part.
func (f *Form) take(b []byte) {
	switch f.field {
	case fieldModel:
		if f.modelSeen > 1 || f.modelLong {
			return
		}
		if len(f.model)+len(b) > MaxModel { // what has come of it depends on how the body was cut
			f.modelLong, f.model = true, f.model[:0]
			return
		}
		f.model = append(f.model, b...)
	case fieldStream:
		// One byte more than fits tells a longer value from its beginning.
		f.stream = append(f.stream, b[:min(len(b), maxFlag+1-len(f.stream))]...)
	}
}

// endData ends a part; off is the offset after the delimiter that did.
func (f *Form) endData(off int64) {
	begin := off - int64(len(f.delim))
	if f.field == fieldModel && f.modelSeen == 1 {
		f.modelEnd = begin
	}
	if f.first < 0 {
		f.first = begin + 2
	}
	f.field, f.matched, f.skipped = fieldOther, 0, 0
	f.state, f.tail = formDelim, f.tail[:0]
}

// endDelim ends the line of a delimiter, once it is whole.
func (f *Form) endDelim() {
	switch n := len(f.tail); {
	case n == 2 && string(f.tail) == "--":
		f.state = formEnd
	case n >= 2 && f.tail[n-2] == '\r' && f.tail[n-1] == '\n' && len(bytes.TrimLeft(f.tail[:n-2], " \t")) == 0:
		f.state, f.tail = formHead, f.tail[:0]
		f.parts++
	case n > 1 && (f.tail[0] == '-' || n > 100), n == 1 && !strings.ContainsRune("-\r \t", rune(f.tail[0])):
		f.fail("a boundary is followed by something else than a line's end")
	}
}

// endHead ends the header lines of a part, once they are whole; off is the offset after them.
func (f *Form) endHead(off int64) {
	head := f.tail
	// Parsers differ in what a lone CR or LF means, and so could in where the model stands: none is accepted.
	if n := len(head); head[n-1] == '\n' && (n < 2 || head[n-2] != '\r') || n > 1 && head[n-2] == '\r' && head[n-1] != '\n' {
		f.fail("a line of a part's headers ends in something else than CRLF")
		return
	}
	switch {
	case len(head) > maxPartHead:
		f.fail("the headers of a part are too long")
		return
	case string(head) == "\r\n", bytes.HasSuffix(head, []byte("\r\n\r\n")):
	default:
		return
	}
	// Nor is a line that goes on in the next, which readers of forms join, cut off or refuse.
	if text := string(head); text[0] == ' ' || text[0] == '\t' || strings.Contains(text, "\r\n ") || strings.Contains(text, "\r\n\t") {
		f.fail("a line of a part's headers begins with white space")
		return
	}
	f.state, f.matched, f.skipped = formData, 2, 2
	switch name, file, fault := partName(string(head)); {
	case fault != "":
		f.fail(fault)
	case name == "model" && file:
		f.fail(`"model" is sent as a file; send it as a field, without a filename`)
	case name == "model":
		f.field = fieldModel
		if f.modelSeen++; f.modelSeen == 1 {
			f.modelAt = off
		}
	case name == "stream" && !file:
		f.field, f.stream = fieldStream, f.stream[:0]
	}
}

// partName is the name of a part's field, "" for none; file is true for one that has the name of a file. Readers of
// forms differ in which of two headers or names counts and in what they make of a broken one, so a part that some of
// them could take for the model's has a fault: otherwise the engine could serve another model than shunt has read.
func partName(head string) (name string, file bool, fault string) {
	seen := false
	for line := range strings.SplitSeq(head, "\r\n") {
		key, value, _ := strings.Cut(line, ":")
		if !strings.EqualFold(strings.TrimSpace(key), "content-disposition") {
			continue
		}
		if seen {
			return "", false, "a part has two Content-Disposition headers"
		}
		seen = true
		for param := range strings.SplitSeq(strings.ToLower(value), ";") {
			if strings.HasPrefix(strings.TrimSpace(param), "name*") {
				return "", false, "a part's Content-Disposition has name*; send name"
			}
		}
		_, params, err := mime.ParseMediaType(value)
		if err != nil {
			if strings.Contains(value, "model") {
				return "", false, `a part's Content-Disposition names "model" and can't be read`
			}
			continue
		}
		name = params["name"]
		_, file = params["filename"]
	}
	return name, file, ""
}

func (f *Form) fail(why string) { f.state, f.fault = formFailed, why }

// Finish ends the body. The result holds what was found even if there is an error.
func (f *Form) Finish() (Result, *Error) {
	r := Result{
		ModelOffset: -1, MaxTokens: -1, Bytes: f.base, form: f,
		Stream: string(f.stream) == "true" || string(f.stream) == "True" || string(f.stream) == "1",
	}
	if f.modelAt >= 0 {
		r.ModelOffset, r.ModelLength = f.modelAt, int(f.modelEnd-f.modelAt)
	}
	r.InsertOffset = f.first
	invalid := func(code Code, format string, args ...any) (Result, *Error) {
		return r, &Error{Code: code, Param: "model", Offset: -1, Message: fmt.Sprintf(format, args...)}
	}
	switch {
	case f.state != formEnd && f.fault == "":
		f.fault = fmt.Sprintf("it ends at byte %d, before its last boundary", f.base)
		fallthrough
	case f.state != formEnd:
		return r, &Error{Code: CodeInvalidValue, Offset: -1, Message: "the request body is not a valid form: " + f.fault}
	case f.modelSeen > 1:
		return invalid(CodeDuplicateParameter, `"model" is given twice; send it once`)
	case f.modelSeen == 0:
		if f.optional {
			return r, nil
		}
		return invalid(CodeMissingParameter, `"model" is required: the name of the model to serve this request`)
	case f.modelLong:
		return invalid(CodeInvalidValue, `"model" is longer than %d bytes`, MaxModel)
	case len(f.model) == 0:
		return invalid(CodeInvalidValue, `"model" is empty; it must name a model`)
	}
	r.Model = string(f.model)
	return r, nil
}

// edit makes the form ask for a model.
func (f *Form) edit(r *Result, name string) Edit {
	if f.modelAt >= 0 {
		return Edit{Offset: r.ModelOffset, Length: int64(r.ModelLength), With: []byte(name)}
	}
	with := append([]byte(nil), f.delim[2:]...)
	with = append(with, "\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n"...)
	return Edit{Offset: r.InsertOffset, With: append(append(with, name...), "\r\n"...)}
}
