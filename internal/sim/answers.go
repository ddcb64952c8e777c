package sim

import (
	"bytes"
	"fmt"
	"time"
)

// form is how an endpoint asks for tokens and puts them into words.
type form uint8

const (
	formCompletion form = iota
	formChat
	formResponses
	formMessages
)

// usageJSON is the usage object in the engine's order of fields, with out
// tokens generated.
func (g *generation) usageJSON(out int) string {
	switch {
	case g.form == formResponses:
		return fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d}`,
			g.prompt, g.seq.Cached, out, g.prompt+out)
	case g.form == formMessages:
		return fmt.Sprintf(`{"input_tokens":%d,"output_tokens":%d}`, g.prompt, out)
	case g.engine == "sglang":
		return fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d},"reasoning_tokens":0}`,
			g.prompt, g.prompt+out, out, g.seq.Cached)
	case g.engine == "xllm":
		return fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d,"audio_tokens":0}}`,
			g.prompt, out, g.prompt+out, g.seq.Cached)
	}
	return fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`,
		g.prompt, g.prompt+out, out, g.seq.Cached)
}

// response is the object of /v1/responses.
func (g *generation) response(begun time.Time, status, output, usage string) string {
	return fmt.Sprintf(`{"id":%s,"object":"response","created_at":%d,"status":%q,"model":%s,"output":[%s],"parallel_tool_calls":true,`+
		`"tool_choice":"auto","tools":[],"temperature":1.0,"top_p":1.0,"error":null,"incomplete_details":null,"instructions":null,"metadata":{},"usage":%s}`,
		quote("resp_"+g.id), begun.Unix(), status, quote(g.model), output, usage)
}

func (g *generation) outputItem() string {
	return fmt.Sprintf(`{"id":%s,"type":"message","status":"completed","role":"assistant","content":[{"type":"output_text","text":"%s","annotations":[]}]}`,
		quote("msg_"+g.id), g.text)
}

func (g *generation) stopReason() string {
	if g.reason == Length {
		return "max_tokens"
	}
	return "end_turn"
}

// answer is the whole body of an answer that isn't streamed. The text needs no escapes.
func (g *generation) answer(begun time.Time) []byte {
	var b bytes.Buffer
	switch g.form {
	case formResponses:
		b.WriteString(g.response(begun, "completed", g.outputItem(), g.usageJSON(g.out)))
		return b.Bytes()
	case formMessages:
		fmt.Fprintf(&b, `{"id":%s,"type":"message","role":"assistant","model":%s,"content":[{"type":"text","text":"%s"}],"stop_reason":%q,"stop_sequence":null,"usage":%s}`,
			quote("msg_"+g.id), quote(g.model), g.text, g.stopReason(), g.usageJSON(g.out))
		return b.Bytes()
	}
	object, prefix := "text_completion", "cmpl-"
	if g.form == formChat {
		object, prefix = "chat.completion", "chatcmpl-"
	}
	fmt.Fprintf(&b, `{"id":%s,"object":%q,"created":%d,"model":%s,"choices":[{"index":0,`, quote(prefix+g.id), object, begun.Unix(), quote(g.model))
	if g.form == formChat {
		fmt.Fprintf(&b, `"message":{"role":"assistant","content":"%s"},`, g.text)
	} else {
		fmt.Fprintf(&b, `"text":"%s",`, g.text)
	}
	fmt.Fprintf(&b, `"logprobs":null,"finish_reason":%q,"stop_reason":null}],"usage":%s}`, g.reason, g.usageJSON(g.out))
	return b.Bytes()
}

// frames are the events of a stream: before the first token, one for each, and
// after the last.
type frames struct {
	before string
	token  func(buf []byte, i int) []byte
	after  func() string
}

func (g *generation) frames(begun time.Time) frames {
	switch g.form {
	case formResponses:
		return g.responseFrames(begun)
	case formMessages:
		return g.messageFrames()
	}
	return g.chunkFrames(begun)
}

func (g *generation) word(i int) []byte { return g.text[i*bytesPerToken : (i+1)*bytesPerToken] }

// chunkFrames are those of chat completions and completions.
func (g *generation) chunkFrames(begun time.Time) frames {
	object, prefix := "text_completion", "cmpl-"
	if g.form == formChat {
		object, prefix = "chat.completion.chunk", "chatcmpl-"
	}
	head := fmt.Sprintf(`data: {"id":%s,"object":%q,"created":%d,"model":%s,"choices":[`, quote(prefix+g.id), object, begun.Unix(), quote(g.model))
	open, first, end := `{"index":0,"text":"`, `{"index":0,"text":"`, `","logprobs":null,"finish_reason":null,"stop_reason":null}]`
	last := `","logprobs":null,"finish_reason":"` + g.reason.String() + `","stop_reason":null}]`
	if g.form == formChat {
		first, open = `{"index":0,"delta":{"role":"assistant","content":"`, `{"index":0,"delta":{"content":"`
		end = `"},"logprobs":null,"finish_reason":null}]`
		last = `"},"logprobs":null,"finish_reason":"` + g.reason.String() + `","stop_reason":null}]`
	}
	return frames{
		token: func(buf []byte, i int) []byte {
			buf = append(buf, head...)
			if i == 0 {
				buf = append(buf, first...)
			} else {
				buf = append(buf, open...)
			}
			buf = append(buf, g.word(i)...)
			if i == g.out-1 {
				buf = append(buf, last...)
			} else {
				buf = append(buf, end...)
			}
			if g.continuous {
				buf = append(buf, `,"usage":`+g.usageJSON(i+1)...)
			}
			return append(buf, "}\n\n"...)
		},
		after: func() string {
			usage := ""
			if g.usage {
				usage = head + `],"usage":` + g.usageJSON(g.out) + "}\n\n"
			}
			return usage + "data: [DONE]\n\n"
		},
	}
}

func sseEvent(event, data string) string { return "event: " + event + "\ndata: " + data + "\n\n" }

// responseFrames are those of /v1/responses.
func (g *generation) responseFrames(begun time.Time) frames {
	seq := 0
	event := func(kind, fields string) string {
		seq++
		return sseEvent(kind, fmt.Sprintf(`{"type":%q,"sequence_number":%d,%s}`, kind, seq-1, fields))
	}
	item := quote("msg_" + g.id)
	place := fmt.Sprintf(`"item_id":%s,"output_index":0,"content_index":0`, item)
	return frames{
		before: event("response.created", `"response":`+g.response(begun, "in_progress", "", "null")) +
			event("response.output_item.added", fmt.Sprintf(`"output_index":0,"item":{"id":%s,"type":"message","status":"in_progress","role":"assistant","content":[]}`, item)) +
			event("response.content_part.added", place+`,"part":{"type":"output_text","text":"","annotations":[]}`),
		token: func(buf []byte, i int) []byte {
			return append(buf, event("response.output_text.delta", place+fmt.Sprintf(`,"delta":"%s","logprobs":[]`, g.word(i)))...)
		},
		after: func() string {
			return event("response.output_text.done", place+fmt.Sprintf(`,"text":"%s","logprobs":[]`, g.text)) +
				event("response.content_part.done", place+fmt.Sprintf(`,"part":{"type":"output_text","text":"%s","annotations":[]}`, g.text)) +
				event("response.output_item.done", `"output_index":0,"item":`+g.outputItem()) +
				event("response.completed", `"response":`+g.response(begun, "completed", g.outputItem(), g.usageJSON(g.out)))
		},
	}
}

// messageFrames are those of /v1/messages.
func (g *generation) messageFrames() frames {
	return frames{
		before: sseEvent("message_start", fmt.Sprintf(`{"type":"message_start","message":{"id":%s,"type":"message","role":"assistant","model":%s,"content":[],"stop_reason":null,"stop_sequence":null,"usage":%s}}`,
			quote("msg_"+g.id), quote(g.model), g.usageJSON(0))) +
			sseEvent("content_block_start", `{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`),
		token: func(buf []byte, i int) []byte {
			return append(buf, sseEvent("content_block_delta", fmt.Sprintf(`{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%s"}}`, g.word(i)))...)
		},
		after: func() string {
			return sseEvent("content_block_stop", `{"type":"content_block_stop","index":0}`) +
				sseEvent("message_delta", fmt.Sprintf(`{"type":"message_delta","delta":{"stop_reason":%q,"stop_sequence":null},"usage":%s}`, g.stopReason(), g.usageJSON(g.out))) +
				sseEvent("message_stop", `{"type":"message_stop"}`)
		},
	}
}
