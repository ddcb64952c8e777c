package sim

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/cespare/xxhash/v2"
)

// bytesPerToken is the tokenizer of the simulation.
const bytesPerToken = 4

// completionBody are the fields of the generating endpoints that matter here.
type completionBody struct {
	Model    string `json:"model"`
	Messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	Prompt        json.RawMessage `json:"prompt"`
	Input         json.RawMessage `json:"input"`
	System        json.RawMessage `json:"system"`
	Instructions  json.RawMessage `json:"instructions"`
	Stream        bool            `json:"stream"`
	StreamOptions *struct {
		IncludeUsage *bool `json:"include_usage"`
		Continuous   bool  `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
	MaxOutputTokens     *int `json:"max_output_tokens"`
	N                   int  `json:"n"`
}

// generation is one request for tokens.
type generation struct {
	form       form
	engine     string
	usage      bool // at the end of a stream
	continuous bool // and on each of its events
	model      string
	id         string
	prompt     int // tokens
	out        int // tokens
	reason     Reason
	text       []byte // bytesPerToken a token
	seq        *Seq
}

func (x *exchange) generate(f form) {
	var body completionBody
	if err := json.Unmarshal(x.body, &body); err != nil {
		x.openAIError(http.StatusBadRequest, "body: "+err.Error(), "")
		return
	}
	x.s.mu.Lock()
	x.rec.Model = body.Model
	x.s.mu.Unlock()
	adapter, ok := x.s.serves(body.Model)
	if !ok {
		x.openAIError(http.StatusNotFound, "The model `"+body.Model+"` does not exist.", "model")
		return
	}
	prompt, err := body.text(f)
	if err != nil {
		x.openAIError(http.StatusBadRequest, err.Error(), "")
		return
	}
	g := generation{form: f, engine: x.s.cfg.Engine, model: body.Model, out: x.s.cfg.Output, reason: Stop}
	if o := body.StreamOptions; o != nil {
		g.continuous = o.Continuous && g.engine != "xllm"
		g.usage = o.IncludeUsage == nil && g.engine == "trtllm" || o.IncludeUsage != nil && *o.IncludeUsage
	}
	g.prompt = max((len(prompt)+bytesPerToken-1)/bytesPerToken, 1)
	limit := body.MaxCompletionTokens
	if limit == nil {
		limit = body.MaxTokens
	}
	if f == formResponses {
		limit = body.MaxOutputTokens
	}
	room := x.s.cfg.MaxModelLen - g.prompt
	req := Request{N: body.N, Adapter: adapter}
	if limit != nil {
		if *limit < 1 {
			x.openAIError(http.StatusBadRequest, fmt.Sprintf("max_tokens must be at least 1, got %d.", *limit), "max_tokens")
			return
		}
		g.out, g.reason, req.MaxTokens = *limit, Length, *limit
	} else if g.out > room {
		g.out, g.reason = room, Length
	}
	if g.out < 1 || g.out > room {
		x.openAIError(http.StatusBadRequest, fmt.Sprintf("This model's maximum context length is %d tokens. However, you requested %d tokens "+
			"(%d in the messages, %d in the completion).", x.s.cfg.MaxModelLen, g.prompt+max(g.out, 1), g.prompt, max(g.out, 1)), "")
		return
	}
	if g.id = x.r.Header.Get("X-Request-Id"); g.id == "" {
		g.id = "sim" + strconv.FormatInt(x.begun.UnixNano(), 36)
	}
	req.PromptTokens, req.OutputTokens, req.Reason = g.prompt, g.out, g.reason
	req.Hashes, g.text = chain(adapter, prompt, g.out, x.s.cfg.Params.BlockSize)

	st, err := x.s.drv.submit(req, !body.Stream)
	switch {
	case errors.Is(err, errStopped):
		return
	case err != nil:
		x.openAIError(http.StatusBadRequest, err.Error(), "")
		return
	}
	g.seq = st.seq
	ended := false
	defer func() {
		if !ended {
			x.s.drv.abort(st)
		}
	}()
	if body.Stream {
		ended = x.stream(&g, st)
		return
	}
	for !st.ended.Load() {
		if !x.wake(st) {
			return
		}
	}
	ended = true
	x.bytes(http.StatusOK, "application/json", g.answer(x.begun))
}

// serves says whether a model is served, and by which adapter.
func (s *Server) serves(model string) (adapter string, ok bool) {
	if slices.Contains(s.cfg.Adapters, model) {
		return model, true
	}
	return "", s.cfg.AnyModel && model != "" || slices.Contains(s.cfg.Models, model)
}

// text is what a chat template would make of the body; a further turn extends it byte for byte.
func (b *completionBody) text(f form) ([]byte, error) {
	var out []byte
	switch f {
	case formResponses:
		if len(b.Input) == 0 {
			return nil, errors.New("input: field required")
		}
		return appendText(appendText(nil, b.Instructions), b.Input), nil
	case formMessages:
		out = appendText(out, b.System)
	case formCompletion:
		if len(b.Prompt) == 0 {
			return nil, errors.New("prompt: field required")
		}
		return appendText(nil, b.Prompt), nil
	}
	if len(b.Messages) == 0 {
		return nil, errors.New("messages: field required")
	}
	for _, m := range b.Messages {
		out = append(out, "<|"+m.Role+"|>"...)
		out = appendText(out, m.Content)
	}
	return append(out, "<|assistant|>"...), nil
}

// appendText appends a string, a list of strings or of text parts, or whatever else it is as it is.
func appendText(out []byte, raw json.RawMessage) []byte {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return append(out, text...)
	}
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) == nil {
		for _, p := range parts {
			var part struct {
				Text *string `json:"text"`
			}
			var n int32
			switch {
			case json.Unmarshal(p, &text) == nil:
				out = append(out, text...)
			case json.Unmarshal(p, &part) == nil && part.Text != nil:
				out = append(out, *part.Text...)
			case json.Unmarshal(p, &n) == nil: // a token id
				out = binary.LittleEndian.AppendUint32(out, uint32(n))
			default:
				out = append(out, p...)
			}
		}
		return out
	}
	return append(out, raw...)
}

// chain makes up the output and hashes prompt and output block by block, each with the hash before it.
func chain(adapter string, prompt []byte, out, blockSize int) (hashes []uint64, text []byte) {
	size := blockSize * bytesPerToken
	all := make([]byte, 0, len(prompt)+out*bytesPerToken)
	all = append(all, prompt...)
	state := xxhash.Sum64(prompt) | 1
	for range out { // a blank and three letters a token
		state ^= state << 13
		state ^= state >> 7
		state ^= state << 17
		all = append(all, ' ', 'a'+byte(state%26), 'a'+byte(state>>8%26), 'a'+byte(state>>16%26))
	}
	hashes = make([]uint64, 0, len(all)/size)
	prev := xxhash.Sum64String(adapter)
	var d xxhash.Digest
	var seed [8]byte
	for rest := all; len(rest) >= size; rest = rest[size:] {
		d.Reset()
		binary.LittleEndian.PutUint64(seed[:], prev)
		_, _ = d.Write(seed[:])
		_, _ = d.Write(rest[:size])
		prev = d.Sum64()
		hashes = append(hashes, prev)
	}
	return hashes, all[len(prompt):]
}

// wake waits for news of the sequence; false if the client left or the server closes.
func (x *exchange) wake(st *stream) bool {
	select {
	case <-st.notify:
		return true
	case <-x.r.Context().Done():
	case <-x.s.drv.done:
	case <-x.s.quit:
	}
	return false
}

func quote(s string) string {
	b, _ := json.Marshal(s) // a string can always be encoded
	return string(b)
}

// stream sends one event per token, and says whether the sequence has ended.
func (x *exchange) stream(g *generation, st *stream) bool {
	if !x.pause(time.Duration(x.delays.BeforeHeaders)) {
		return false
	}
	x.header(http.StatusOK, "text/event-stream; charset=utf-8")
	rc := http.NewResponseController(x.w)
	_ = rc.Flush()
	if !x.pause(time.Duration(x.delays.BeforeBody)) {
		return false
	}
	fr := g.frames(x.begun)
	if fr.before != "" {
		if _, err := x.w.Write([]byte(fr.before)); err != nil {
			return false
		}
		_ = rc.Flush()
	}
	gap := time.Duration(x.delays.BetweenTokens)
	cut := -1
	if x.fault != nil && (x.fault.Kind == FaultResetMid || x.fault.Kind == FaultHangMid) {
		cut = min(x.fault.AfterTokens, g.out)
	}
	// goesOn meets the fault, if the answer has come to it.
	goesOn := func(sent int) bool {
		if cut != sent {
			return true
		}
		if x.fault.Kind == FaultResetMid {
			abortConn(x.r)
		}
		cut = -1
		return x.hang()
	}
	var buf []byte
	for sent := 0; sent < g.out; {
		if !goesOn(sent) {
			return false
		}
		ready := int(st.ready.Load())
		if ready == sent {
			if !x.wake(st) {
				return false
			}
			continue
		}
		if gap > 0 {
			if sent > 0 && !x.pause(gap) {
				return false
			}
			ready = sent + 1
		}
		if cut >= 0 {
			ready = min(ready, cut)
		}
		for buf = buf[:0]; sent < ready; sent++ {
			buf = fr.token(buf, sent)
		}
		if _, err := x.w.Write(buf); err != nil {
			return false
		}
		if sent < g.out || cut == sent {
			if rc.Flush() != nil {
				return false
			}
		}
	}
	if !goesOn(g.out) {
		return false
	}
	buf = append(buf[:0], fr.after()...)
	_, err := x.w.Write(buf)
	x.whole = err == nil
	return true
}

func (x *exchange) models() {
	type card struct {
		ID          string  `json:"id"`
		Object      string  `json:"object"`
		Created     int64   `json:"created"`
		OwnedBy     string  `json:"owned_by"`
		Root        string  `json:"root"`
		Parent      *string `json:"parent"`
		MaxModelLen *int    `json:"max_model_len"`
		Permission  []any   `json:"permission"`
	}
	cfg := &x.s.cfg
	cards := make([]card, 0, len(cfg.Models)+len(cfg.Adapters))
	for _, m := range cfg.Models {
		cards = append(cards, card{m, "model", x.s.created.Unix(), x.s.dialect.owner(), cfg.Models[0], nil, &cfg.MaxModelLen, []any{}})
	}
	for _, a := range cfg.Adapters {
		cards = append(cards, card{a, "model", x.s.created.Unix(), x.s.dialect.owner(), "/adapters/" + a, &cfg.Models[0], nil, []any{}})
	}
	x.json(http.StatusOK, map[string]any{"object": "list", "data": cards})
}
