package openai

import (
	"fmt"
	"math/bits"
	"strconv"
)

// Lane says which part of the prompt a piece of routing text belongs to. Engines render the preamble before the
// conversation wherever it stands in the body, so a prefix hash takes the two apart.
type Lane uint8

// The lanes.
const (
	LanePrompt   Lane = iota // messages, prompt, input
	LanePreamble             // system, instructions, tools
	LaneSalt                 // cache_salt: prompts with different ones share no cache
	LaneSession              // prompt_cache_key: which requests belong together

	lanes = 4
)

// Sink receives routing text while the body is read.
//
// Text is called with consecutive pieces of a lane, cut anywhere; p is only valid during the call. Strings come
// unescaped, so that a prompt is the same text whichever way its client escapes it; unpaired surrogates come as
// U+FFFD, invalid UTF-8 as sent. Objects and arrays (content parts, tools) come as sent without the white space
// between tokens, token ids as compact JSON from the first id on. One space joins the values of a lane. The text
// of a body that turns out to be invalid may have been delivered in part.
type Sink interface {
	Text(lane Lane, p []byte)
}

// Options are what a scan needs besides the endpoint's rules.
type Options struct {
	// Sink takes the routing text; nil only counts it.
	Sink Sink
	// MaxDepth is the deepest nesting accepted, 1 to [MaxDepth]; 0 is [MaxDepth].
	MaxDepth int
	// ModelOptional accepts a body without model, for requests that are given one by a rewrite.
	ModelOptional bool
}

// Result is what a scan found.
type Result struct {
	// Model is the model's name, unescaped; empty if the body has none (or null).
	Model string
	// ModelOffset and ModelLength are the raw value's place in the body, quotes included (see [AppendString]);
	// ModelOffset is -1 if there is none. A null counts as absent but has a place.
	ModelOffset int64
	ModelLength int
	// InsertOffset is the place just after the body's opening brace and EmptyObject whether nothing follows it: where
	// a missing model is put (see [AppendModelField]).
	InsertOffset int64
	EmptyObject  bool

	// Stream is stream; anything but true is false, and whether the engine accepts it is the engine's to say.
	Stream bool
	// MaxTokens is the bound on output tokens, -1 if none is given or it is not a whole number. The newer name
	// (max_completion_tokens, max_output_tokens) beats max_tokens.
	MaxTokens int64

	// Bytes is the length of the body.
	Bytes int64
	// PromptBytes and PreambleBytes are the sizes of the routing text in its two lanes, as the sink got it.
	PromptBytes, PreambleBytes int64
	// TextValues counts the values that the text came from, TokenIDs the token ids in a prompt given as ids.
	TextValues int
	TokenIDs   int64
	// Previous is the [IDHash] of previous_response_id, 0 for none.
	Previous uint64

	form *Form // that it was read from, or nil
}

// Scan reads one request body after another. The zero value is ready for Reset. A Scan is meant to be embedded in
// a pooled request: it retains no text, and allocates only for a model's name it has not just seen.
type Scan struct {
	m        machine
	rules    *Rules
	optional bool
	name     string // the last model's name, kept to reuse its memory
}

// Reset begins a body that rules apply to.
func (s *Scan) Reset(rules *Rules, opts Options) {
	s.rules, s.optional = rules, opts.ModelOptional
	s.m.reset(rules.prog, opts.MaxDepth, opts.Sink)
}

// Write reads the next chunk, which is not retained. Chunks may be of any size, and cut tokens and escapes.
func (s *Scan) Write(chunk []byte) { s.m.write(chunk) }

// Finish ends the body. The result holds what was found even if there is an error. Of several faults the first in
// this order is reported: not JSON, model twice, model invalid or missing, other fields in the rules' order.
func (s *Scan) Finish() (Result, *Error) {
	m := &s.m
	m.end()
	if m.sink != nil && m.out != nil {
		clear(m.out[:])
	}
	m.sink = nil
	r := Result{
		ModelOffset: m.modelOff, ModelLength: int(m.modelLen),
		InsertOffset: m.objStart, EmptyObject: m.objEmpty,
		Stream:    m.bools>>boolStream&1 == 1,
		MaxTokens: -1,
		Bytes:     m.base, PromptBytes: m.text[LanePrompt], PreambleBytes: m.text[LanePreamble],
		TextValues: int(m.values), TokenIDs: m.tokens, Previous: m.id,
	}
	for slot := range uint8(2) { // the newer name is the second
		if m.set>>slot&1 == 1 {
			r.MaxTokens = m.slots[slot]
		}
	}
	if m.fault != faultNone {
		return r, m.syntaxError()
	}
	if m.modelKind == KindString && m.modelN <= MaxModel {
		name := m.model[:min(int(m.modelN), len(m.model))]
		if len(m.modelLong) > 0 {
			name = m.modelLong
		}
		if s.name != string(name) {
			s.name = string(name)
		}
		r.Model = s.name
	}
	if err := s.checkModel(); err != nil {
		return r, err
	}
	for i := range s.rules.reqs {
		if err := s.check(i); err != nil {
			return r, err
		}
	}
	return r, nil
}

func (s *Scan) checkModel() *Error {
	m := &s.m
	switch {
	case m.modelSeen > 1:
		return &Error{Code: CodeDuplicateParameter, Param: "model", Offset: m.dupOff,
			Message: fmt.Sprintf(`"model" is given twice, the second time at byte %d; send it once`, m.dupOff)}
	case m.modelSeen == 0 || m.modelKind == KindNull:
		if s.optional {
			return nil
		}
		return &Error{Code: CodeMissingParameter, Param: "model", Offset: -1,
			Message: `"model" is required: the name of the model to serve this request`}
	case m.modelKind != KindString:
		return &Error{Code: CodeInvalidValue, Param: "model", Offset: m.modelOff,
			Message: fmt.Sprintf(`"model" must be a string, got %s at byte %d`, m.modelKind, m.modelOff)}
	case m.modelN == 0:
		return &Error{Code: CodeInvalidValue, Param: "model", Offset: m.modelOff,
			Message: fmt.Sprintf(`"model" is empty at byte %d; it must name a model`, m.modelOff)}
	case m.modelN > MaxModel:
		return &Error{Code: CodeInvalidValue, Param: "model", Offset: m.modelOff,
			Message: fmt.Sprintf(`"model" is longer than %d bytes`, MaxModel)}
	}
	return nil
}

// check judges requirement i.
func (s *Scan) check(i int) *Error {
	m, q := &s.m, &s.rules.reqs[i]
	kind, alt := m.reqKind[i], m.reqAlt>>i&1 == 1
	switch {
	case kind == 0 || kind == KindNull:
		if alt {
			return nil
		}
		return &Error{Code: CodeMissingParameter, Param: q.name, Offset: -1,
			Message: fmt.Sprintf("%q is required: %s", q.name, q.want())}
	case kind&q.kinds == 0:
		return &Error{Code: CodeInvalidValue, Param: q.name, Offset: -1,
			Message: fmt.Sprintf("%q must be %s, got %s", q.name, q.want(), kind)}
	case kind&q.filled != 0 && m.reqEmpty>>i&1 == 1:
		return &Error{Code: CodeInvalidValue, Param: q.name, Offset: -1,
			Message: fmt.Sprintf("%q must not be empty", q.name)}
	}
	return nil
}

// syntaxError puts the machine's fault into words.
func (m *machine) syntaxError() *Error {
	e := &Error{Code: CodeInvalidJSON, Offset: m.faultOff}
	switch m.fault {
	case faultEmpty:
		e.Message = "the request body is empty; it must be a JSON object"
	case faultNotObject:
		e.Message = fmt.Sprintf("the request body must be a JSON object, but has %s at byte %d", printable(m.faultB), m.faultOff)
	case faultControl:
		e.Message = fmt.Sprintf("the request body is not valid JSON: control character 0x%02x inside a string at byte %d; escape it", m.faultB, m.faultOff)
	case faultEscape:
		e.Message = fmt.Sprintf("the request body is not valid JSON: bad escape sequence in a string at byte %d", m.faultOff)
	case faultDepth:
		e.Message = fmt.Sprintf("the request body is nested deeper than %d levels at byte %d", m.maxDep, m.faultOff)
	case faultTrailing:
		e.Message = fmt.Sprintf("the request body is not valid JSON: unexpected %s at byte %d, after the end of the object", printable(m.faultB), m.faultOff)
	case faultEnd:
		e.Message = fmt.Sprintf("the request body is not valid JSON: it ends at byte %d, before the end of the object", m.faultOff)
	default:
		e.Message = fmt.Sprintf("the request body is not valid JSON: unexpected %s at byte %d", printable(m.faultB), m.faultOff)
	}
	return e
}

// printable shows one byte of a body. Letters and digits are not shown: they may belong to a prompt.
func printable(b byte) string {
	switch {
	case b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z':
		return "a letter or digit"
	case b > ' ' && b < 0x7f:
		return strconv.QuoteRune(rune(b))
	}
	return fmt.Sprintf("byte 0x%02x", b)
}

// String names a kind, or a set of them, in words: "a string or an array".
func (k Kind) String() string {
	out := ""
	for left := k; left != 0; left &= left - 1 {
		var word string
		switch one := left & -left; one {
		case KindString:
			word = "a string"
		case KindNumber:
			word = "a number"
		case KindTrue, KindFalse:
			word = "a boolean"
		case KindNull:
			word = "null"
		case KindObject:
			word = "an object"
		default:
			word = "an array"
		}
		switch {
		case out == "":
			out = word
		case bits.OnesCount8(uint8(left)) == 1:
			out += " or " + word
		default:
			out += ", " + word
		}
	}
	return out
}
