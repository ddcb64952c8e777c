package openai

// Usage is what an answer says about tokens; -1 is "not said".
type Usage struct {
	Prompt     int64 // prompt_tokens or input_tokens
	Completion int64 // completion_tokens or output_tokens
	Cached     int64 // *_tokens_details.cached_tokens or cache_read_input_tokens: prompt tokens not computed anew
	total      int64
}

// Total returns total_tokens or, where the shape has none, the sum of what is said; -1 if nothing is.
func (u Usage) Total() int64 {
	switch {
	case u.total >= 0:
		return u.total
	case u.Prompt < 0 && u.Completion < 0:
		return -1
	}
	return max(u.Prompt, 0) + max(u.Completion, 0)
}

// Said tells whether there was any usage.
func (u Usage) Said() bool { return u.Prompt >= 0 || u.Completion >= 0 || u.total >= 0 }

// Slots and marks of the response program.
const (
	slotPrompt = iota
	slotCompletion
	slotTotal
	slotCached
)
const (
	markContent = iota
	markError
)

// responseProg reads a response; renamingProg also finds the model's name.
var responseProg, renamingProg = responseTree(plain, plain), responseTree(do(actSwap, 0), plain)

// storedProg and storedRenamingProg read the id of a stored response too.
var storedProg, storedRenamingProg = responseTree(plain, do(actID64, 0)), responseTree(do(actSwap, 0), do(actID64, 0))

// responseTree reads usage where OpenAI (top level; "response" in the events of /v1/responses) and Anthropic
// ("message" in message_start) put it, does what model says with the model's name beside it, and notices generated
// content.
func responseTree(model, id tree) []node {
	details := object(at("cached_tokens", do(actNumber, slotCached)))
	usage := object(
		at("prompt_tokens", do(actNumber, slotPrompt)),
		at("completion_tokens", do(actNumber, slotCompletion)),
		at("total_tokens", do(actNumber, slotTotal)),
		at("input_tokens", do(actNumber, slotPrompt)),
		at("output_tokens", do(actNumber, slotCompletion)),
		at("cache_read_input_tokens", do(actNumber, slotCached)),
		at("prompt_tokens_details", details),
		at("input_tokens_details", details),
	)
	content := do(actMark, markContent)
	return compile(object(
		at("usage", usage), at("model", model), at("id", id),
		at("response", object(at("usage", usage), at("model", model), at("id", id))),
		at("message", object(at("usage", usage), at("model", model))),
		at("choices", each(object(
			at("text", content),
			at("delta", object(
				at("content", content), at("reasoning_content", content), at("reasoning", content),
				at("refusal", content), at("tool_calls", content), at("function_call", content))),
		))),
		// A string in /v1/responses, an object in /v1/messages.
		at("delta", do(actMarkString, markContent).with(object(
			at("text", content), at("thinking", content), at("partial_json", content)))),
		at("error", do(actMarkValue, markError)),
	))
}

// Span is a run of a chunk's bytes, from From to before To, in which (a part of) the raw value of the model's name
// stands, quotes included. Begins is true for the first part.
type Span struct {
	From, To int
	Begins   bool
}

// lineState is where an event reader stands in a line.
type lineState uint8

const (
	lineStart lineState = iota // matching the field name; at counts matched bytes
	lineColon                  // after "data:": one space may follow
	lineData
	lineSkip // a line that does not matter
	lineCR   // after a carriage return: a line feed belongs to it
)

// Reader watches a response body: a JSON object, or server-sent events with one in each. It keeps numbers only,
// never text, and lines of any length pass. Chunks may be cut anywhere. The zero value is ready for Reset.
type Reader struct {
	m     machine
	prog  []node
	usage Usage
	spans []Span

	id      uint64 // of the stored response, 0 for none
	events  int
	content int
	err     bool
	done    bool

	sse   bool
	state lineState
	at    uint8 // bytes matched of "data", or of the byte order mark
	begun bool  // the present event has data
	first bool  // nothing but a byte order mark has been read
	term  uint8 // bytes of "[DONE]" matched, or noTerm
}

const (
	dataName = "data"
	doneText = "[DONE]"
	noTerm   = 0xff
	bomText  = "\xef\xbb\xbf"
)

// Reset begins a response. sse says that its content type is text/event-stream, renaming that Spans is wanted.
func (r *Reader) Reset(sse, renaming bool) {
	r.usage = Usage{-1, -1, -1, -1}
	r.events, r.content, r.err, r.done = 0, 0, false, false
	r.sse, r.state, r.at, r.begun, r.first, r.term = sse, lineStart, 0, false, true, 0
	r.prog, r.spans = responseProg, r.spans[:0]
	if renaming {
		r.prog = renamingProg
	}
	r.m.reset(r.prog, 0, nil)
}

// Write reads the next chunk, which is not retained.
func (r *Reader) Write(chunk []byte) {
	r.spans = r.spans[:0]
	if r.sse {
		r.lines(chunk)
		return
	}
	r.feed(chunk, 0)
}

// feed hands a piece of the chunk, which begins at byte from, to the machine.
func (r *Reader) feed(p []byte, from int) {
	r.m.write(p)
	for _, s := range r.m.swaps {
		if s.From < s.To {
			r.spans = append(r.spans, Span{from + s.From, from + s.To, s.Begins})
		}
	}
}

// Spans says where the newest chunk holds the model's name, in ascending order. A name that is cut by a chunk's end
// goes on in the next one. The slice is valid until the next Write.
func (r *Reader) Spans() []Span { return r.spans }

// Rename appends to dst the chunk with name, a raw JSON string, in place of the model's name at spans.
func Rename(dst, chunk []byte, spans []Span, name string) []byte {
	at := 0
	for _, s := range spans {
		dst = append(dst, chunk[at:s.From]...)
		if s.Begins {
			dst = append(dst, name...)
		}
		at = s.To
	}
	return append(dst, chunk[at:]...)
}

// More tells whether a further chunk can say anything.
func (r *Reader) More() bool {
	if r.sse {
		return !r.done
	}
	return r.m.state != stEnd && r.m.state != stFailed
}

// Finish ends the response and returns its usage. A JSON body that is cut short or malformed counts as far as it
// was read, an event only if it is whole.
func (r *Reader) Finish() Usage {
	if r.sse {
		r.endEvent()
		return r.usage
	}
	r.collect()
	return r.usage
}

// Events returns the number of events with data so far, the closing [DONE] left out.
func (r *Reader) Events() int { return r.events }

// ContentEvents returns the number of events so far that carried generated content (text, reasoning, tool
// arguments). The first one is the first token; the count estimates output tokens where no usage is sent.
func (r *Reader) ContentEvents() int { return r.content }

// Failed tells whether the answer carries an error object.
func (r *Reader) Failed() bool { return r.err }

// Done tells whether the stream said [DONE].
func (r *Reader) Done() bool { return r.done }

// WantID makes the reader look for the response's id. It follows Reset.
func (r *Reader) WantID(renaming bool) {
	if r.prog, r.id = storedProg, 0; renaming {
		r.prog = storedRenamingProg
	}
	r.m.reset(r.prog, 0, nil)
}

// ID returns the hash of the response's id, as [IDHash] has it, or 0 if there was none yet.
func (r *Reader) ID() uint64 {
	if r.id == 0 {
		r.id = r.m.id
	}
	return r.id
}

// collect takes over what the machine found. A number said again replaces the earlier one.
func (r *Reader) collect() {
	for slot, to := range [...]*int64{&r.usage.Prompt, &r.usage.Completion, &r.usage.total, &r.usage.Cached} {
		if r.m.set>>slot&1 == 1 {
			*to = r.m.slots[slot]
		}
	}
	if r.m.marks>>markError&1 == 1 {
		r.err = true
	}
	if r.id == 0 {
		r.id = r.m.id
	}
}
