package openai

import (
	"net/url"
	"slices"
	"strings"
)

// Rules say what is read from a request body: which fields must be there, and where the routing text is.
type Rules struct {
	prog []node
	reqs []requirement
}

// requirement is a top-level field, besides model, that an endpoint cannot do without. A null counts as absent.
type requirement struct {
	name   string
	kinds  Kind
	filled Kind // of these, "", {} and [] are refused
}

// want says what a requirement wants, in words.
func (q *requirement) want() string {
	switch q.filled {
	case 0:
		return q.kinds.String()
	case q.kinds:
		return q.kinds.String() + " (not empty)"
	default: // the kinds are named in this order
		return (q.kinds &^ q.filled).String() + " or " + q.filled.String() + " (not empty)"
	}
}

// Source says where a request of an endpoint says what it is for.
type Source uint8

// The sources.
const (
	FromBody  Source = iota // its model is a field of a JSON body
	FromForm                // its model is a field of a multipart form
	FromQuery               // its model is a parameter of the path's query
	FromStore               // it names a stored response by its id: only the engine that made it has it
	FromPool                // it asks which models there are
)

// Endpoint is one row of the table of inference endpoints.
type Endpoint struct {
	// Name is the path without the version, as used in metrics.
	Name string
	// Path is the path this row stands for. If it ends in a slash, what follows is an id.
	Path string
	// From says where the model is found.
	From Source
	// Rules are never nil in rows FromBody and FromForm.
	Rules *Rules
	// Streams says that the endpoint answers with server-sent events when asked to by "stream".
	Streams bool
	// Usage says that answers may carry a usage object (see [Usage] for the shapes).
	Usage bool
	// Style is the shape of the errors its clients expect.
	Style Style
}

// Bits and slots of request programs.
const boolStream = 0
const (
	slotMaxTokens = iota
	slotMaxTokensNew
)

// Parts of request programs.
var (
	modelField = at("model", do(actModel, 0))
	streamTree = []branch{
		at("stream", do(actBool, boolStream)),
		at("max_tokens", do(actNumber, slotMaxTokens)),
		at("max_completion_tokens", do(actNumber, slotMaxTokensNew)),
		at("max_output_tokens", do(actNumber, slotMaxTokensNew)),
		at("cache_salt", do(actString, uint8(LaneSalt))),
		at("prompt_cache_key", do(actString, uint8(LaneSession))),
	}
	promptText   = do(actText, uint8(LanePrompt))
	preambleText = do(actText, uint8(LanePreamble))
	// prompts is a string, an array of strings, or token ids in one or two levels of arrays.
	prompts = do(actString, uint8(LanePrompt)).with(each(do(actPrompt, uint8(LanePrompt)).with(each(do(actID, 0)))))
	// texts is a string or an array of strings and objects, each a text of its own.
	texts    = do(actString, uint8(LanePrompt)).with(each(promptText))
	messages = each(object(at("content", promptText)))
	plain    tree
)

// need makes t satisfy requirement i of the rules.
func need(i uint8, t tree) tree { t.req = i + 1; return t }

// instead makes t satisfy requirement i in place of the field it names.
func instead(i uint8, t tree) tree { t.req, t.alt = i+1, true; return t }

func rules(reqs []requirement, fields ...branch) *Rules {
	return &Rules{prog: compile(object(append([]branch{modelField}, fields...)...)), reqs: reqs}
}

func streaming(reqs []requirement, fields ...branch) *Rules {
	return rules(reqs, append(fields, streamTree...)...)
}

var (
	chatRules = streaming([]requirement{{"messages", KindArray, KindArray}},
		at("messages", need(0, messages)), at("tools", preambleText))
	completionRules = streaming([]requirement{{"prompt", KindString | KindArray, 0}},
		at("prompt", need(0, prompts)), at("prompt_embeds", instead(0, plain)))
	responseRules = streaming([]requirement{{"input", KindString | KindArray, KindString | KindArray}},
		at("input", need(0, do(actString, uint8(LanePrompt)).with(messages))),
		at("instructions", preambleText), at("tools", preambleText), at("previous_response_id", do(actID64, 0)))
	messageRules = streaming([]requirement{{"messages", KindArray, KindArray}},
		at("messages", need(0, messages)), at("system", preambleText), at("tools", preambleText))
	// Its answer is {"input_tokens": n}: what the request would cost, not what it did.
	countRules = rules([]requirement{{"messages", KindArray, KindArray}},
		at("messages", need(0, messages)), at("system", preambleText), at("tools", preambleText))
	// vLLM also takes a conversation where OpenAI takes input.
	inputRules = rules([]requirement{{"input", KindString | KindArray, KindString | KindArray}},
		at("input", need(0, prompts)), at("messages", instead(0, messages)))
	poolingRules = rules([]requirement{{"input", KindString | KindArray, KindString | KindArray}},
		at("input", need(0, prompts)), at("messages", instead(0, messages)), at("data", instead(0, plain)))
	rerankRules = rules([]requirement{
		{"query", KindString | KindObject | KindArray, 0}, {"documents", KindArray | KindObject, KindArray | KindObject}},
		at("query", need(0, promptText)), at("documents", need(1, texts)))
	tokenizeRules = rules([]requirement{{"prompt", KindString, 0}},
		at("prompt", need(0, do(actString, uint8(LanePrompt)))), at("messages", instead(0, messages)))
	detokenizeRules = rules([]requirement{{"tokens", KindArray, 0}}, at("tokens", need(0, plain)))
	imageRules      = rules(nil)
	decisionRules   = rules([]requirement{
		{"input", KindString | KindObject | KindArray, KindString | KindObject | KindArray}, {"questions", KindArray, KindArray}},
		at("input", need(0, promptText)), at("questions", need(1, plain)))
	systemOneRules = rules([]requirement{
		{"state", KindString | KindObject | KindArray, 0}, {"questions", KindObject, KindObject}},
		at("state", need(0, promptText)), at("questions", need(1, plain)))
)

// scoreRules are those of SGLang's /v1/score. vLLM serves the same path with other names, which its own schema
// judges.
var scoreRules = rules([]requirement{
	{"query", KindString | KindArray, 0}, {"items", KindString | KindArray, KindArray}},
	at("query", need(0, do(actString, uint8(LanePrompt)).with(each(do(actPrompt, uint8(LanePrompt)))))),
	at("queries", instead(0, plain)), at("text_1", instead(0, plain)), at("data_1", instead(0, plain)),
	at("items", need(1, plain)),
	at("documents", instead(1, plain)), at("text_2", instead(1, plain)), at("data_2", instead(1, plain)))

// formRules are those of the audio endpoints, whose body is a form.
var formRules = rules(nil)

// endpoints is the table; nothing writes to it. Rows with a body hold for POST, rows FromPool for GET, FromQuery for
// both, FromStore for all methods but a browser's OPTIONS.
var endpoints = []Endpoint{
	{Name: "chat/completions", Path: "/v1/chat/completions", Rules: chatRules, Streams: true, Usage: true},
	{Name: "completions", Path: "/v1/completions", Rules: completionRules, Streams: true, Usage: true},
	{Name: "responses", Path: "/v1/responses", Rules: responseRules, Streams: true, Usage: true},
	{Name: "responses/id", Path: "/v1/responses/", From: FromStore, Streams: true, Usage: true},
	{Name: "messages", Path: "/v1/messages", Rules: messageRules, Streams: true, Usage: true, Style: StyleAnthropic},
	{Name: "messages/count_tokens", Path: "/v1/messages/count_tokens", Rules: countRules, Style: StyleAnthropic},
	{Name: "embeddings", Path: "/v1/embeddings", Rules: inputRules, Usage: true},
	{Name: "rerank", Path: "/v1/rerank", Rules: rerankRules, Usage: true},
	{Name: "rerank", Path: "/v2/rerank", Rules: rerankRules, Usage: true},
	{Name: "rerank", Path: "/rerank", Rules: rerankRules, Usage: true},
	{Name: "score", Path: "/v1/score", Rules: scoreRules, Usage: true},
	{Name: "score", Path: "/score", Rules: scoreRules, Usage: true},
	{Name: "classify", Path: "/v1/classify", Rules: inputRules, Usage: true},
	{Name: "classify", Path: "/classify", Rules: inputRules, Usage: true},
	{Name: "pooling", Path: "/pooling", Rules: poolingRules, Usage: true},
	{Name: "pooling", Path: "/v1/pooling", Rules: poolingRules, Usage: true},
	{Name: "tokenize", Path: "/tokenize", Rules: tokenizeRules},
	{Name: "tokenize", Path: "/v1/tokenize", Rules: tokenizeRules},
	{Name: "detokenize", Path: "/detokenize", Rules: detokenizeRules},
	{Name: "detokenize", Path: "/v1/detokenize", Rules: detokenizeRules},
	{Name: "images/generations", Path: "/v1/images/generations", Rules: imageRules, Usage: true},
	{Name: "audio/transcriptions", Path: "/v1/audio/transcriptions", From: FromForm, Rules: formRules, Streams: true, Usage: true},
	{Name: "audio/translations", Path: "/v1/audio/translations", From: FromForm, Rules: formRules, Streams: true, Usage: true},
	{Name: "decisions", Path: "/v1/decisions", Rules: decisionRules, Usage: true},
	{Name: "systemone", Path: "/v1/systemone", Rules: systemOneRules, Usage: true},
	{Name: "realtime", Path: "/v1/realtime", From: FromQuery},
	{Name: "models", Path: "/v1/models", From: FromPool},
	{Name: "models/id", Path: "/v1/models/", From: FromPool},
}

// Endpoints returns a copy of the table.
func Endpoints() []Endpoint { return slices.Clone(endpoints) }

var byPath = func() map[string]*Endpoint {
	m := make(map[string]*Endpoint, len(endpoints))
	for i := range endpoints {
		m[endpoints[i].Path] = &endpoints[i]
	}
	return m
}()

// withID are the rows whose paths end in an id.
var withID = func() (rows []*Endpoint) {
	for i := range endpoints {
		if strings.HasSuffix(endpoints[i].Path, "/") {
			rows = append(rows, &endpoints[i])
		}
	}
	return rows
}()

// Lookup returns the endpoint that a request is for, nil if shunt has no rules for it: another method than the
// table's, or a path the table lacks. path is the :path header; its query and a trailing slash do not matter. A
// prefix ("/openai", "/openai/") is one that may stand before the table's paths. id is what follows the path of a row
// with an id: borrowed from path, or decoded. Lookup is safe for concurrent use.
func Lookup(method, path string, prefixes []string) (e *Endpoint, id string) {
	e, id = find(path, prefixes)
	if e != nil && !e.holds(method) {
		return nil, ""
	}
	return e, id
}

// Known reports whether the table has a path, for whatever method.
func Known(path string, prefixes []string) bool {
	e, _ := find(path, prefixes)
	return e != nil
}

func (e *Endpoint) holds(method string) bool {
	switch e.From {
	case FromPool:
		return method == "GET"
	case FromQuery:
		return method == "GET" || method == "POST"
	case FromStore:
		return method != "OPTIONS"
	default:
		return method == "POST"
	}
}

func find(path string, prefixes []string) (*Endpoint, string) {
	if i := strings.IndexByte(path, '?'); i >= 0 {
		path = path[:i]
	}
	if strings.IndexByte(path, '%') >= 0 {
		// Engines decode a path before they route it, so what they would serve
		// must not pass for another path here.
		if decoded, err := url.PathUnescape(path); err == nil {
			path = decoded
		}
	}
	path = strings.TrimSuffix(path, "/")
	if e, id := exactly(path); e != nil {
		return e, id
	}
	for _, prefix := range prefixes {
		prefix = strings.TrimSuffix(prefix, "/")
		if rest, ok := strings.CutPrefix(path, prefix); ok && prefix != "" {
			if e, id := exactly(rest); e != nil {
				return e, id
			}
		}
	}
	return nil, ""
}

func exactly(path string) (*Endpoint, string) {
	if e := byPath[path]; e != nil {
		return e, ""
	}
	for _, e := range withID {
		if id, ok := strings.CutPrefix(path, e.Path); ok {
			return e, id
		}
	}
	return nil, ""
}

// Query returns the last non-empty value of a parameter in the query of a :path header, decoded, and where its
// raw text is: path[from:to].
func Query(path, name string) (value string, from, to int) {
	at := strings.IndexByte(path, '?') + 1
	if at == 0 {
		return "", 0, 0
	}
	for rest := path[at:]; rest != ""; {
		pair, after, _ := strings.Cut(rest, "&")
		key, raw, _ := strings.Cut(pair, "=")
		if k, err := url.QueryUnescape(key); err == nil && k == name {
			if v, err := url.QueryUnescape(raw); err == nil && v != "" {
				from = at + len(pair) - len(raw)
				value, to = v, from+len(raw)
			}
		}
		at += len(rest) - len(after)
		rest = after
	}
	return value, from, to
}
