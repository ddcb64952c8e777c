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
	filled bool // "", {} and [] are refused
}

// want says what a requirement wants, in words.
func (q *requirement) want() string {
	if q.filled {
		return q.kinds.String() + " (not empty)"
	}
	return q.kinds.String()
}

// Endpoint is one row of the table of inference endpoints.
type Endpoint struct {
	// Name is the path without the version, as used in metrics.
	Name string
	// Path is the path this row stands for.
	Path string
	// Rules are never nil.
	Rules *Rules
	// Streams says that the endpoint answers with server-sent events when asked to by "stream".
	Streams bool
	// Usage says that answers may carry a usage object (see [Usage] for the shapes).
	Usage bool
	// Style is the shape of the errors its clients expect.
	Style Style
}

// Bits and slots of request programs.
const (
	boolStream = iota
	boolIncludeUsage
)
const (
	slotMaxTokens = iota
	slotMaxTokensNew
)

// Parts of request programs.
var (
	modelField = at("model", do(actModel, 0))
	streamTree = []branch{
		at("stream", do(actBool, boolStream)),
		at("stream_options", object(at("include_usage", do(actBool, boolIncludeUsage)))),
		at("max_tokens", do(actNumber, slotMaxTokens)),
		at("max_completion_tokens", do(actNumber, slotMaxTokensNew)),
		at("max_output_tokens", do(actNumber, slotMaxTokensNew)),
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
	chatRules = streaming([]requirement{{"messages", KindArray, true}},
		at("messages", need(0, messages)), at("tools", preambleText))
	completionRules = streaming([]requirement{{"prompt", KindString | KindArray, false}},
		at("prompt", need(0, prompts)), at("prompt_embeds", instead(0, plain)))
	responseRules = streaming([]requirement{{"input", KindString | KindArray, true}},
		at("input", need(0, do(actString, uint8(LanePrompt)).with(messages))),
		at("instructions", preambleText), at("tools", preambleText))
	messageRules = streaming([]requirement{{"messages", KindArray, true}},
		at("messages", need(0, messages)), at("system", preambleText), at("tools", preambleText))
	countRules = rules([]requirement{{"messages", KindArray, true}},
		at("messages", need(0, messages)), at("system", preambleText), at("tools", preambleText))
	// vLLM also takes a conversation where OpenAI takes input.
	inputRules = rules([]requirement{{"input", KindString | KindArray, true}},
		at("input", need(0, prompts)), at("messages", instead(0, messages)))
	poolingRules = rules([]requirement{{"input", KindString | KindArray, true}},
		at("input", need(0, prompts)), at("messages", instead(0, messages)), at("data", instead(0, plain)))
	rerankRules = rules([]requirement{
		{"query", KindString | KindObject | KindArray, false}, {"documents", KindArray | KindObject, true}},
		at("query", need(0, promptText)), at("documents", need(1, texts)))
	tokenizeRules = rules([]requirement{{"prompt", KindString, false}},
		at("prompt", need(0, do(actString, uint8(LanePrompt)))), at("messages", instead(0, messages)))
	detokenizeRules = rules([]requirement{{"tokens", KindArray, false}}, at("tokens", need(0, plain)))
	imageRules      = rules(nil)
	decisionRules   = rules([]requirement{
		{"input", KindString | KindObject | KindArray, true}, {"questions", KindArray, true}},
		at("input", need(0, promptText)), at("questions", need(1, plain)))
	systemOneRules = rules([]requirement{
		{"state", KindString | KindObject | KindArray, false}, {"questions", KindObject, true}},
		at("state", need(0, promptText)), at("questions", need(1, plain)))
)

// scoreRules are those of SGLang's /v1/score. vLLM serves the same path with other names, which its own schema
// judges.
var scoreRules = rules([]requirement{
	{"query", KindString | KindArray, false}, {"items", KindString | KindArray, true}},
	at("query", need(0, do(actString, uint8(LanePrompt)).with(each(do(actPrompt, uint8(LanePrompt)))))),
	at("queries", instead(0, plain)), at("text_1", instead(0, plain)), at("data_1", instead(0, plain)),
	at("items", need(1, plain)),
	at("documents", instead(1, plain)), at("text_2", instead(1, plain)), at("data_2", instead(1, plain)))

// endpoints is the table; nothing writes to it. Multipart endpoints are not in it: their bodies are not JSON.
var endpoints = []Endpoint{
	{Name: "chat/completions", Path: "/v1/chat/completions", Rules: chatRules, Streams: true, Usage: true},
	{Name: "completions", Path: "/v1/completions", Rules: completionRules, Streams: true, Usage: true},
	{Name: "responses", Path: "/v1/responses", Rules: responseRules, Streams: true, Usage: true},
	{Name: "messages", Path: "/v1/messages", Rules: messageRules, Streams: true, Usage: true, Style: StyleAnthropic},
	{Name: "messages/count_tokens", Path: "/v1/messages/count_tokens", Rules: countRules, Usage: true, Style: StyleAnthropic},
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
	{Name: "decisions", Path: "/v1/decisions", Rules: decisionRules, Usage: true},
	{Name: "systemone", Path: "/v1/systemone", Rules: systemOneRules, Usage: true},
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

// Lookup returns the endpoint that a request is for, nil if its body is none of ours to read: another method than
// POST, or a path the table lacks. path is the :path header; its query and a trailing slash do not matter. A
// prefix ("/openai") is one that may stand before the table's paths. Lookup is safe for concurrent use.
func Lookup(method, path string, prefixes []string) *Endpoint {
	if method != "POST" {
		return nil
	}
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
	if e := byPath[path]; e != nil {
		return e
	}
	for _, prefix := range prefixes {
		prefix = strings.TrimSuffix(prefix, "/")
		if rest, ok := strings.CutPrefix(path, prefix); ok && prefix != "" {
			if e := byPath[rest]; e != nil {
				return e
			}
		}
	}
	return nil
}
