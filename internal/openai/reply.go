package openai

import (
	"net/http"
	"strconv"
	"unicode/utf8"
)

// Code is the machine-readable reason of a request error, part of the API.
type Code string

// The codes of errors found in requests.
const (
	CodeInvalidJSON            Code = "invalid_json"
	CodeMissingParameter       Code = "missing_required_parameter"
	CodeInvalidValue           Code = "invalid_value"
	CodeDuplicateParameter     Code = "duplicate_parameter"
	CodeModelNotFound          Code = "model_not_found"
	CodeInvalidRoutingStrategy Code = "invalid_routing_strategy"
	CodeRequestTooLarge        Code = "request_too_large"
	CodeUnsupportedEncoding    Code = "unsupported_encoding"
)

// Error is what is wrong with a request body. Its status is 400.
type Error struct {
	Code    Code
	Message string // for the client; never holds the request's text
	Param   string // the field at fault; empty if none
	Offset  int64  // where in the body, -1 if nowhere in particular
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Style is the shape of an error body.
type Style uint8

// The styles.
const (
	StyleOpenAI    Style = iota // {"error":{"message","type","code","param"}}
	StyleAnthropic              // {"type":"error","error":{"type","message"}}
)

// AppendError appends the JSON body of an error reply to dst. code is a drop reason or a [Code]; an empty code or
// param becomes null. Anthropic's shape carries neither.
func AppendError(dst []byte, style Style, status int, code, message, param string) []byte {
	if style == StyleAnthropic {
		dst = append(dst, `{"type":"error","error":{"type":"`...)
		dst = append(dst, anthropicType(status, code)...)
		dst = append(dst, `","message":`...)
		dst = AppendString(dst, message)
		return append(dst, "}}"...)
	}
	dst = append(dst, `{"error":{"message":`...)
	dst = AppendString(dst, message)
	dst = append(dst, `,"type":"`...)
	dst = append(dst, openAIType(status)...)
	dst = append(dst, `","code":`...)
	dst = appendNullable(dst, code)
	dst = append(dst, `,"param":`...)
	dst = appendNullable(dst, param)
	return append(dst, "}}"...)
}

func appendNullable(dst []byte, s string) []byte {
	if s == "" {
		return append(dst, "null"...)
	}
	return AppendString(dst, s)
}

func openAIType(status int) string {
	switch {
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status == http.StatusServiceUnavailable:
		return "overloaded_error"
	case status >= 500:
		return "api_error"
	}
	return "invalid_request_error"
}

// anthropicType follows Anthropic's list of error types; code tells an unknown model from another bad request
// when both are 400.
func anthropicType(status int, code string) string {
	switch {
	case status == http.StatusNotFound || code == string(CodeModelNotFound):
		return "not_found_error"
	case status == http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case status == http.StatusUnauthorized:
		return "authentication_error"
	case status == http.StatusForbidden:
		return "permission_error"
	}
	return openAIType(status)
}

// AppendString appends s as a JSON string, quotes included: what takes a model value's place when only its bytes
// may change. Invalid UTF-8 becomes U+FFFD.
func AppendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c >= utf8.RuneSelf:
			r, n := utf8.DecodeRuneInString(s[i:])
			dst = utf8.AppendRune(dst, r)
			i += n
			continue
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			dst = append(dst, c)
		}
		i++
	}
	return append(dst, '"')
}

// AppendModelField appends what gives a body without model one, at [Result.InsertOffset].
func AppendModelField(dst []byte, name string, emptyObject bool) []byte {
	dst = append(dst, `"model":`...)
	dst = AppendString(dst, name)
	if !emptyObject {
		dst = append(dst, ',')
	}
	return dst
}

// Edit is a replacement of Length bytes at Offset of a body by With; the rest of the body stays as sent.
type Edit struct {
	Offset, Length int64
	With           []byte
}

// ModelEdit returns the edit that makes r's body ask for name. Its bytes are newly allocated.
func (r *Result) ModelEdit(name string) Edit {
	if r.form != nil {
		return r.form.edit(r, name)
	}
	if r.ModelOffset < 0 {
		return Edit{Offset: r.InsertOffset, With: AppendModelField(nil, name, r.EmptyObject)}
	}
	return Edit{Offset: r.ModelOffset, Length: int64(r.ModelLength), With: AppendString(nil, name)}
}

// LengthOf returns the content-length, after the edit, of a body that had size bytes.
func (e Edit) LengthOf(size int64) string {
	return strconv.FormatInt(size-e.Length+int64(len(e.With)), 10)
}
