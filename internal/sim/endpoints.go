package sim

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// endpoint is what one path answers to POST, and which engines have it.
type endpoint struct {
	engines []string
	serve   func(*exchange)
}

// endpoints is the table of inference endpoints; nothing writes to it.
var endpoints = func() map[string]endpoint {
	all := []string{"vllm", "sglang", "trtllm", "xllm"}
	generate := func(f form) func(*exchange) { return func(x *exchange) { x.generate(f) } }
	t := map[string]endpoint{
		"/v1/chat/completions":      {all, generate(formChat)},
		"/v1/completions":           {all, generate(formCompletion)},
		"/v1/responses":             {[]string{"vllm", "sglang", "trtllm"}, generate(formResponses)},
		"/v1/messages":              {[]string{"vllm", "sglang", "xllm"}, generate(formMessages)},
		"/v1/messages/count_tokens": {[]string{"vllm", "sglang"}, (*exchange).countTokens},
		"/v1/embeddings":            {all, (*exchange).embeddings},
		"/v1/score":                 {[]string{"vllm", "sglang"}, (*exchange).score},
		"/score":                    {[]string{"vllm"}, (*exchange).score},
		"/v1/classify":              {[]string{"sglang"}, (*exchange).classify},
		"/classify":                 {[]string{"vllm"}, (*exchange).classify},
		"/pooling":                  {[]string{"vllm"}, (*exchange).pooling},
		"/v1/decisions":             {[]string{"vllm", "sglang"}, (*exchange).decisions},
		"/v1/systemone":             {[]string{"vllm", "sglang"}, (*exchange).systemOne},
		"/v1/images/generations":    {[]string{"vllm", "sglang", "xllm"}, (*exchange).images},
	}
	for _, path := range []string{"/v1/rerank", "/v2/rerank", "/rerank"} {
		engines := []string{"vllm"}
		if path == "/v1/rerank" {
			engines = []string{"vllm", "sglang", "xllm"}
		}
		t[path] = endpoint{engines, (*exchange).rerank}
	}
	for _, prefix := range []string{"", "/v1"} {
		engines := []string{"sglang"}
		if prefix == "" {
			engines = []string{"vllm", "sglang"}
		}
		t[prefix+"/tokenize"] = endpoint{engines, (*exchange).tokenize}
		t[prefix+"/detokenize"] = endpoint{engines, (*exchange).detokenize}
	}
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		t[path] = endpoint{[]string{"vllm", "sglang"}, (*exchange).audio}
	}
	return t
}()

// object decodes the body and finds its model; false if that was answered.
func (x *exchange) object(body any) bool {
	var head struct {
		Model string `json:"model"`
	}
	err := json.Unmarshal(x.body, &head)
	if err == nil {
		err = json.Unmarshal(x.body, body)
	}
	if err != nil {
		x.openAIError(http.StatusBadRequest, "body: "+err.Error(), "")
		return false
	}
	return x.named(head.Model)
}

// named notes the request's model; false if it isn't served, which was answered.
func (x *exchange) named(model string) bool {
	x.s.mu.Lock()
	x.rec.Model = model
	x.s.mu.Unlock()
	if _, ok := x.s.serves(model); !ok {
		x.openAIError(http.StatusNotFound, "The model `"+model+"` does not exist.", "model")
		return false
	}
	return true
}

// tokensOf counts the tokens of a text, or of the texts and ids in a list.
func tokensOf(raw json.RawMessage) int {
	n := len(appendText(nil, raw))
	return max((n+bytesPerToken-1)/bytesPerToken, 1)
}

// elements are the inputs of a batch: one, or those of a list that is not one
// of token ids.
func elements(raw json.RawMessage) []json.RawMessage {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 {
		return []json.RawMessage{raw}
	}
	if c := list[0][0]; c == '-' || c >= '0' && c <= '9' {
		return []json.RawMessage{raw}
	}
	return list
}

// promptUsage is the usage of what generates nothing.
func (x *exchange) promptUsage(tokens int) map[string]any {
	u := map[string]any{"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
	if x.s.cfg.Engine == "vllm" {
		u["prompt_tokens_details"] = nil
	}
	return u
}

// numbers makes up n numbers in -1 to 1 from a text.
func numbers(raw json.RawMessage, n int) []float32 {
	out := make([]float32, n)
	state := xxhash.Sum64(raw) | 1
	for i := range out {
		state ^= state << 13
		state ^= state >> 7
		state ^= state << 17
		out[i] = float32(state%2000)/1000 - 1
	}
	return out
}

const dimensions = 8

// list answers with one object for each input.
func (x *exchange) list(id, kind string, raw json.RawMessage, one func(i int, input json.RawMessage) map[string]any) {
	data, tokens := []any{}, 0
	for i, input := range elements(raw) {
		o := one(i, input)
		o["index"], o["object"] = i, kind
		data = append(data, o)
		tokens += tokensOf(input)
	}
	x.json(http.StatusOK, map[string]any{
		"id": id + "-sim", "object": "list", "created": x.begun.Unix(), "model": x.rec.Model, "data": data, "usage": x.promptUsage(tokens),
	})
}

func (x *exchange) embeddings() {
	var body struct {
		Input    json.RawMessage `json:"input"`
		Messages json.RawMessage `json:"messages"`
		Encoding string          `json:"encoding_format"`
	}
	if !x.object(&body) {
		return
	}
	if body.Input == nil {
		body.Input = body.Messages
	}
	x.list("embd", "embedding", body.Input, func(_ int, input json.RawMessage) map[string]any {
		v := numbers(input, dimensions)
		if body.Encoding != "base64" {
			return map[string]any{"embedding": v}
		}
		var packed []byte
		for _, f := range v {
			packed = binary.LittleEndian.AppendUint32(packed, math.Float32bits(f))
		}
		return map[string]any{"embedding": base64.StdEncoding.EncodeToString(packed)}
	})
}

func (x *exchange) pooling() {
	var body struct {
		Input json.RawMessage `json:"input"`
	}
	if x.object(&body) {
		x.list("pool", "pooling", body.Input, func(_ int, input json.RawMessage) map[string]any {
			return map[string]any{"data": numbers(input, dimensions)}
		})
	}
}

func (x *exchange) classify() {
	var body struct {
		Input json.RawMessage `json:"input"`
	}
	if x.object(&body) {
		x.list("classify", "classification", body.Input, func(_ int, input json.RawMessage) map[string]any {
			p := (numbers(input, 1)[0] + 1) / 2
			return map[string]any{"label": "LABEL_1", "probs": []float32{1 - p, p}, "num_classes": 2}
		})
	}
}

func (x *exchange) rerank() {
	var body struct {
		Query     json.RawMessage   `json:"query"`
		Documents []json.RawMessage `json:"documents"`
	}
	if !x.object(&body) {
		return
	}
	results, tokens := []any{}, 0
	for i, d := range body.Documents {
		tokens += tokensOf(body.Query) + tokensOf(d)
		score := (numbers(d, 1)[0] + 1) / 2
		if x.s.cfg.Engine == "sglang" {
			results = append(results, map[string]any{"score": score, "document": d, "index": i})
		} else {
			results = append(results, map[string]any{"index": i, "document": map[string]any{"text": d}, "relevance_score": score})
		}
	}
	if x.s.cfg.Engine == "sglang" {
		x.json(http.StatusOK, results)
		return
	}
	x.json(http.StatusOK, map[string]any{"id": "rerank-sim", "model": x.rec.Model, "usage": x.promptUsage(tokens), "results": results})
}

func (x *exchange) score() {
	var body struct {
		Query  json.RawMessage `json:"query"`
		Items  json.RawMessage `json:"items"`
		Labels []int           `json:"label_token_ids"`
	}
	if !x.object(&body) {
		return
	}
	if x.s.cfg.Engine != "sglang" {
		x.list("score", "score", body.Items, func(_ int, input json.RawMessage) map[string]any {
			return map[string]any{"score": (numbers(input, 1)[0] + 1) / 2}
		})
		return
	}
	scores, tokens := [][]float32{}, 0
	for _, item := range elements(body.Items) {
		tokens += tokensOf(body.Query) + tokensOf(item)
		scores = append(scores, numbers(item, max(len(body.Labels), 1)))
	}
	x.json(http.StatusOK, map[string]any{"scores": scores, "model": x.rec.Model, "usage": x.promptUsage(tokens), "object": "scoring"})
}

func (x *exchange) decisions() {
	var body struct {
		Input     json.RawMessage `json:"input"`
		Questions []struct {
			ID   string `json:"id"`
			Type string `json:"type"`
		} `json:"questions"`
	}
	if !x.object(&body) {
		return
	}
	decisions, tokens := []any{}, 0
	for _, q := range body.Questions {
		tokens += tokensOf(body.Input)
		decisions = append(decisions, map[string]any{"id": q.ID, "type": q.Type, "value": "yes"})
	}
	x.json(http.StatusOK, map[string]any{
		"id": "decision-sim", "object": "decisions", "model": x.rec.Model, "decisions": decisions, "usage": x.promptUsage(tokens),
	})
}

func (x *exchange) systemOne() {
	var body struct {
		State     json.RawMessage            `json:"state"`
		Questions map[string]json.RawMessage `json:"questions"`
	}
	if !x.object(&body) {
		return
	}
	answers, tokens := map[string]any{}, 0
	for id, q := range body.Questions { // the state is read again for each
		tokens += tokensOf(body.State) + tokensOf(q)
		answers[id] = map[string]any{"value": true}
	}
	x.json(http.StatusOK, map[string]any{
		"model": x.rec.Model, "answers": answers, "usage": map[string]int{"input_tokens": tokens, "output_tokens": 0},
	})
}

func (x *exchange) countTokens() {
	var body completionBody
	if !x.object(&body) {
		return
	}
	text, err := body.text(formMessages)
	if err != nil {
		x.openAIError(http.StatusBadRequest, err.Error(), "")
		return
	}
	x.json(http.StatusOK, map[string]int{"input_tokens": (len(text) + bytesPerToken - 1) / bytesPerToken})
}

func (x *exchange) tokenize() {
	var body struct {
		Prompt   json.RawMessage `json:"prompt"`
		Messages json.RawMessage `json:"messages"`
	}
	if !x.object(&body) {
		return
	}
	if body.Prompt == nil {
		body.Prompt = body.Messages
	}
	ids := make([]int, tokensOf(body.Prompt))
	for i := range ids {
		ids[i] = i
	}
	x.json(http.StatusOK, map[string]any{"count": len(ids), "max_model_len": x.s.cfg.MaxModelLen, "tokens": ids})
}

func (x *exchange) detokenize() {
	var body struct {
		Tokens []int `json:"tokens"`
	}
	if x.object(&body) {
		x.json(http.StatusOK, map[string]string{"prompt": strings.Repeat(" sim", len(body.Tokens))})
	}
}

func (x *exchange) images() {
	var body struct {
		N int `json:"n"`
	}
	if !x.object(&body) {
		return
	}
	data := []any{}
	for range max(body.N, 1) {
		data = append(data, map[string]string{"b64_json": "aW1hZ2U="})
	}
	x.json(http.StatusOK, map[string]any{"created": x.begun.Unix(), "data": data})
}

// audio answers with how much of a file came.
func (x *exchange) audio() {
	_, params, err := mime.ParseMediaType(x.r.Header.Get("Content-Type"))
	if err != nil || params["boundary"] == "" {
		x.openAIError(http.StatusBadRequest, "the body is not multipart/form-data", "")
		return
	}
	fields, size := map[string]string{}, -1
	for r := multipart.NewReader(bytes.NewReader(x.body), params["boundary"]); ; {
		part, err := r.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			x.openAIError(http.StatusBadRequest, "body: "+err.Error(), "")
			return
		}
		value, err := io.ReadAll(part)
		if err != nil {
			x.openAIError(http.StatusBadRequest, "body: "+err.Error(), "")
			return
		}
		if part.FormName() == "file" {
			size = len(value)
		} else {
			fields[part.FormName()] = string(value)
		}
	}
	if !x.named(fields["model"]) {
		return
	}
	if size < 0 {
		x.openAIError(http.StatusBadRequest, "file: field required", "file")
		return
	}
	text := fmt.Sprintf("a file of %d bytes", size)
	if fields["response_format"] == "text" {
		x.bytes(http.StatusOK, "text/plain; charset=utf-8", []byte(text))
		return
	}
	x.json(http.StatusOK, map[string]any{"text": text, "usage": map[string]any{"type": "duration", "seconds": 1}})
}
