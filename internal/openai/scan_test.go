package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestScanFields(t *testing.T) {
	chat, comp := endpoint("chat/completions"), endpoint("completions")
	tests := map[string]struct {
		endpoint *Endpoint
		body     string
		want     outcome
	}{
		"chat": {chat, `{"model":"m","messages":[{"role":"user","content":"hi\nthere"},{"role":"user","content":"x"}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":7,"max_completion_tokens":9}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, Stream: true, MaxTokens: 9, PromptBytes: 10, TextValues: 2}, prompt: "hi\nthere x"}},
		"parts and tools": {chat, `{"tools": [ {"a" : "b c\n"} ],"messages":[{"content":[ {"type":"text", "text":"a b"}, 1 ]},{"content":null}],"model":"\u006d"}`,
			outcome{Result: Result{Model: "m", ModelOffset: 117, ModelLength: 8, InsertOffset: 1, MaxTokens: -1, PromptBytes: 32, PreambleBytes: 15, TextValues: 2}, prompt: `[{"type":"text","text":"a b"},1]`, preamble: `[{"a":"b c\n"}]`}},
		"escaped key": {chat, `{"mod\u0065l":"a\/b","messages":[{}]}`,
			outcome{Result: Result{Model: "a/b", ModelOffset: 14, ModelLength: 6, InsertOffset: 1, MaxTokens: -1}}},
		"byte order mark": {chat, "\xef\xbb\xbf {\"model\":\"m\",\"messages\":[1]}\n",
			outcome{Result: Result{Model: "m", ModelOffset: 13, ModelLength: 3, InsertOffset: 5, MaxTokens: -1}}},
		"invalid UTF-8 passes": {chat, "{\"model\":\"m\xff\",\"messages\":[{\"content\":\"a\xc3\"}]}",
			outcome{Result: Result{Model: "m\xff", ModelOffset: 9, ModelLength: 4, InsertOffset: 1, MaxTokens: -1, PromptBytes: 2, TextValues: 1}, prompt: "a\xc3"}},
		"other duplicates pass, the last counts": {chat, `{"stream":true,"model":"m","messages":[],"messages":[1],"stream":false}`,
			outcome{Result: Result{Model: "m", ModelOffset: 23, ModelLength: 3, InsertOffset: 1, MaxTokens: -1}}},
		"the last max_tokens counts, whatever it is": {chat, `{"model":"m","messages":[1],"max_tokens":5,"max_tokens":"7","max_completion_tokens":5,"max_completion_tokens":1e3}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, MaxTokens: -1}}},
		"stream of another kind is false": {chat, `{"stream":"true","model":"m","messages":[1]}`,
			outcome{Result: Result{Model: "m", ModelOffset: 25, ModelLength: 3, InsertOffset: 1, MaxTokens: -1}}},
		"model inside a message is none": {chat, `{"messages":[{"model":"x"}],"model":"m"}`,
			outcome{Result: Result{Model: "m", ModelOffset: 36, ModelLength: 3, InsertOffset: 1, MaxTokens: -1}}},
		"prompt string": {comp, `{"model":"m","prompt":"a \ud83d\ude00"}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, MaxTokens: -1, PromptBytes: 6, TextValues: 1}, prompt: "a 😀"}},
		"prompt strings": {comp, `{"model":"m","prompt":["a", "b\"c"]}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, MaxTokens: -1, PromptBytes: 5, TextValues: 2}, prompt: `a b"c`}},
		"prompt ids": {comp, `{"model":"m","prompt":[1, 22,333 ]}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, MaxTokens: -1, PromptBytes: 8, TextValues: 1, TokenIDs: 3}, prompt: "1,22,333"}},
		"prompt lists of ids": {comp, `{"model":"m","prompt":[ [1, 2], [3] ]}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, MaxTokens: -1, PromptBytes: 9, TextValues: 1, TokenIDs: 3}, prompt: "[1,2],[3]"}},
		"embeds instead of prompt": {comp, `{"model":"m","prompt_embeds":"QQ==","prompt":null}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, MaxTokens: -1}}},
		"empty prompt is the engine's to judge": {comp, `{"model":"m","prompt":""}`,
			outcome{Result: Result{Model: "m", ModelOffset: 9, ModelLength: 3, InsertOffset: 1, MaxTokens: -1, TextValues: 1}}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			tt.want.Bytes = int64(len(tt.body))
			if got := scan(tt.endpoint, []byte(tt.body)); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			everySplit(t, tt.endpoint, tt.body)
		})
	}
}

// everySplit checks each cut into two, and the cut into single bytes.
func everySplit(t *testing.T, e *Endpoint, body string) {
	t.Helper()
	want := scan(e, []byte(body))
	var single [][]byte
	for i := range len(body) {
		single = append(single, []byte(body[i:i+1]))
		if got := scan(e, []byte(body[:i]), []byte(body[i:])); got != want {
			t.Fatalf("cut at %d:\ngot  %+v\nwant %+v", i, got, want)
		}
	}
	if got := scan(e, single...); got != want {
		t.Fatalf("single bytes:\ngot  %+v\nwant %+v", got, want)
	}
}

func TestScanErrors(t *testing.T) {
	const ok = `{"model":"m","messages":[1]}`
	tests := []struct {
		endpoint, body string
		code           Code
		param          string
		offset         int64
		message        string // a part of it
	}{
		{"chat/completions", "", CodeInvalidJSON, "", 0, "empty"},
		{"chat/completions", " \n", CodeInvalidJSON, "", 2, "empty"},
		{"chat/completions", "\xef\xbb\xbf", CodeInvalidJSON, "", 3, "empty"},
		{"chat/completions", "\xef\xbb", CodeInvalidJSON, "", 2, "ends at byte 2"},
		{"chat/completions", "\xef\xbb{", CodeInvalidJSON, "", 2, "byte 2"},
		{"chat/completions", "[]", CodeInvalidJSON, "", 0, "must be a JSON object"},
		{"chat/completions", `"x"`, CodeInvalidJSON, "", 0, "must be a JSON object"},
		{"chat/completions", "null", CodeInvalidJSON, "", 0, "must be a JSON object"},
		{"chat/completions", "secret", CodeInvalidJSON, "", 0, "but has a letter or digit at byte 0"},
		{"chat/completions", ok + "x", CodeInvalidJSON, "", 28, "after the end of the object"},
		{"chat/completions", ok + ok, CodeInvalidJSON, "", 28, "unexpected '{' at byte 28"},
		{"chat/completions", ok[:20], CodeInvalidJSON, "", 20, "ends at byte 20"},
		{"chat/completions", ok + "\x00", CodeInvalidJSON, "", 28, "byte 0x00"},
		{"chat/completions", `{"model":"m",}`, CodeInvalidJSON, "", 13, "unexpected '}' at byte 13"},
		{"chat/completions", `{"a":[1,]}`, CodeInvalidJSON, "", 8, "']'"},
		{"chat/completions", `{"a":[1}`, CodeInvalidJSON, "", 7, "'}'"},
		{"chat/completions", `{"a":01}`, CodeInvalidJSON, "", 6, "byte 6"},
		{"chat/completions", `{"a":1.}`, CodeInvalidJSON, "", 7, "byte 7"},
		{"chat/completions", `{"a":-}`, CodeInvalidJSON, "", 6, "byte 6"},
		{"chat/completions", `{"a":+1}`, CodeInvalidJSON, "", 5, "'+'"},
		{"chat/completions", `{"a":1e}`, CodeInvalidJSON, "", 7, "byte 7"},
		{"chat/completions", `{"a":NaN}`, CodeInvalidJSON, "", 5, "byte 5"},
		{"chat/completions", `{"a":trux}`, CodeInvalidJSON, "", 8, "byte 8"},
		{"chat/completions", `{a:1}`, CodeInvalidJSON, "", 1, "byte 1"},
		{"chat/completions", `{"a" 1}`, CodeInvalidJSON, "", 5, "byte 5"},
		{"chat/completions", "{\"a\":\"x\ny\"}", CodeInvalidJSON, "", 7, "control character 0x0a"},
		{"chat/completions", `{"a":"\x"}`, CodeInvalidJSON, "", 7, "escape"},
		{"chat/completions", `{"a":"\u12g4"}`, CodeInvalidJSON, "", 10, "escape"},
		{"chat/completions", `{"a":` + strings.Repeat("[", 512), CodeInvalidJSON, "", 516, "deeper than 512 levels"},
		{"chat/completions", `{}`, CodeMissingParameter, "model", -1, `"model" is required`},
		{"chat/completions", `{"model":null,"messages":[1]}`, CodeMissingParameter, "model", -1, `"model" is required`},
		{"chat/completions", `{"model":7,"messages":[1]}`, CodeInvalidValue, "model", 9, `must be a string, got a number at byte 9`},
		{"chat/completions", `{"model":{"model":"m"},"messages":[1]}`, CodeInvalidValue, "model", 9, `got an object`},
		{"chat/completions", `{"model":true,"messages":[1]}`, CodeInvalidValue, "model", 9, `got a boolean`},
		{"chat/completions", `{"model":"","messages":[1]}`, CodeInvalidValue, "model", 9, `empty`},
		{"chat/completions", `{"model":"` + strings.Repeat("x", MaxModel+1) + `","messages":[1]}`, CodeInvalidValue, "model", 9, `longer than`},
		{"chat/completions", `{"model":"a","messages":[1],"m\u006fdel":"a"}`, CodeDuplicateParameter, "model", 41, `second time at byte 41`},
		{"chat/completions", `{"model":"a","messages":[1],"kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk\ud800":0,"m\u006fdel":"b"}`, CodeDuplicateParameter, "model", 92, `second time`},
		{"chat/completions", `{"model":1,"model":"a","model":2}`, CodeDuplicateParameter, "model", 19, `second time at byte 19`},
		{"chat/completions", `{"model":"m"}`, CodeMissingParameter, "messages", -1, `"messages" is required: an array (not empty)`},
		{"chat/completions", `{"model":"m","messages":null}`, CodeMissingParameter, "messages", -1, `required`},
		{"chat/completions", `{"model":"m","messages":"x"}`, CodeInvalidValue, "messages", -1, `must be an array (not empty), got a string`},
		{"chat/completions", `{"model":"m","messages":[ ]}`, CodeInvalidValue, "messages", -1, `must not be empty`},
		{"chat/completions", `{"model":"m","messages":[1],"messages":[]}`, CodeInvalidValue, "messages", -1, `must not be empty`},
		{"completions", `{"model":"m"}`, CodeMissingParameter, "prompt", -1, `a string or an array`},
		{"completions", `{"model":"m","prompt":{}}`, CodeInvalidValue, "prompt", -1, `got an object`},
		{"completions", `{"model":"m","prompt_embeds":null}`, CodeMissingParameter, "prompt", -1, `required`},
		{"responses", `{"model":"m","input":""}`, CodeInvalidValue, "input", -1, `empty`},
		{"embeddings", `{"model":"m"}`, CodeMissingParameter, "input", -1, `required`},
		{"rerank", `{"model":"m","query":"q"}`, CodeMissingParameter, "documents", -1, `required`},
		{"rerank", `{"model":"m","query":"q","documents":[]}`, CodeInvalidValue, "documents", -1, `empty`},
		{"decisions", `{"model":"m","questions":[1]}`, CodeMissingParameter, "input", -1, `required`},
		{"decisions", `{"model":"m","input":null,"questions":[1]}`, CodeMissingParameter, "input", -1, `required`},
		{"decisions", `{"model":"m","input":"","questions":[1]}`, CodeInvalidValue, "input", -1, `empty`},
		{"decisions", `{"model":"m","input":{},"questions":[1]}`, CodeInvalidValue, "input", -1, `empty`},
		{"decisions", `{"model":"m","input":[],"questions":[1]}`, CodeInvalidValue, "input", -1, `empty`},
		{"decisions", `{"model":"m","input":3,"questions":[1]}`, CodeInvalidValue, "input", -1, `a string, an object or an array (not empty), got a number`},
		{"decisions", `{"model":"m","input":"x","questions":{"a":1}}`, CodeInvalidValue, "questions", -1, `an array (not empty), got an object`},
		{"decisions", `{"model":"m","input":"x","questions":[]}`, CodeInvalidValue, "questions", -1, `empty`},
		{"systemone", `{"model":"m","questions":{"a":1}}`, CodeMissingParameter, "state", -1, `required`},
		{"systemone", `{"model":"m","state":null,"questions":{"a":1}}`, CodeMissingParameter, "state", -1, `required`},
		{"systemone", `{"model":"m","state":"","questions":[1]}`, CodeInvalidValue, "questions", -1, `an object (not empty), got an array`},
		{"systemone", `{"model":"m","state":"","questions":{}}`, CodeInvalidValue, "questions", -1, `empty`},
		{"score", `{"model":"m","items":["a"]}`, CodeMissingParameter, "query", -1, `required`},
		{"score", `{"model":"m","query":"q"}`, CodeMissingParameter, "items", -1, `required`},
		{"score", `{"model":"m","query":"q","items":[]}`, CodeInvalidValue, "items", -1, `empty`},
		{"score", `{"model":"m","query":"q","items":{}}`, CodeInvalidValue, "items", -1, `a string or an array (not empty), got an object`},
		{"score", `{"model":"m","query":{},"items":["a"]}`, CodeInvalidValue, "query", -1, `a string or an array, got an object`},
		{"score", `{"query":"q","items":["a"]}`, CodeMissingParameter, "model", -1, `required`},
	}
	for _, tt := range tests {
		body := tt.body
		got := scan(endpoint(tt.endpoint), []byte(body))
		if got.code != tt.code || got.param != tt.param || got.offset != tt.offset || !strings.Contains(got.message, tt.message) {
			t.Errorf("%s %.80q: got %q param %q offset %d: %s", tt.endpoint, body, got.code, got.param, got.offset, got.message)
		}
		if len(body) < 200 {
			everySplit(t, endpoint(tt.endpoint), body)
		}
	}
}

func TestScanAccepts(t *testing.T) {
	tests := []struct{ endpoint, body, prompt, preamble string }{
		{"responses", `{"model":"m","input":"x","instructions":"be\tkind"}`, "x", "be\tkind"},
		{"responses", `{"model":"m","input":[{"role":"user","content":"a"},{"type":"reasoning"},{"content":[{"text":"b"}]}]}`, `a [{"text":"b"}]`, ""},
		{"messages", `{"model":"m","system":[ {"text":"s"} ],"messages":[{"content":"x"}]}`, "x", `[{"text":"s"}]`},
		{"messages/count_tokens", `{"model":"m","system":"s","messages":[{"content":"x"}]}`, "x", "s"},
		{"embeddings", `{"model":"m","input":["a","b"]}`, "a b", ""},
		{"embeddings", `{"model":"m","messages":[{"content":"b"}]}`, "b", ""},
		{"rerank", `{"model":"m","query":"q","documents":["a",{"text": "b"}]}`, `q a {"text":"b"}`, ""},
		{"tokenize", `{"model":"m","prompt":"p"}`, "p", ""},
		{"tokenize", `{"model":"m","messages":[{"content":"b"}]}`, "b", ""},
		{"detokenize", `{"model":"m","tokens":[]}`, "", ""},
		{"images/generations", `{"model":"m"}`, "", ""},
		{"pooling", `{"model":"m","data":{}}`, "", ""},
		{"classify", `{"model":"m","input":"i"}`, "i", ""},
		{"decisions", `{"model":"m","input":{ "b" : 1.50, "a" : "\u00e9 x" },"questions":[1]}`, `{"b":1.50,"a":"\u00e9 x"}`, ""},
		{"decisions", `{"model":"m","input":"\u00e9","questions":[1],"images":["x"],"stream":true}`, "é", ""},
		{"systemone", `{"model":"m","state":"","questions":{"a":null}}`, "", ""},
		{"systemone", `{"model":"m","state":{ },"questions":{"a":null}}`, "{}", ""},
		{"systemone", `{"model":"m","state":[ 1, 2 ],"questions":{"a":null}}`, "[1,2]", ""},
		{"score", `{"model":"m","query":"q","items":["a"]}`, "q", ""},
		{"score", `{"model":"m","query":[1, 2],"items":"a"}`, "1,2", ""},
		{"score", `{"model":"m","query":"q","items":""}`, "q", ""},
		{"score", `{"model":"m","query":"q","items":[[1,2],[3]],"label_token_ids":[9454,2753],"apply_softmax":true,"stream":true}`, "q", ""},
		{"score", `{"model":"m","text_1":"q","text_2":["a"]}`, "", ""},
	}
	for _, tt := range tests {
		got := scan(endpoint(tt.endpoint), []byte(tt.body))
		if got.code != "" || got.Model != "m" || got.prompt != tt.prompt || got.preamble != tt.preamble || got.Stream {
			t.Errorf("%s %s: got %+v", tt.endpoint, tt.body, got)
		}
		everySplit(t, endpoint(tt.endpoint), tt.body)
	}
}

func TestScanModelOptional(t *testing.T) {
	for _, tt := range []struct{ body, want string }{
		{`{}`, `{"model":"x\"y"}`},
		{` { "a":1}`, ` {"model":"x\"y", "a":1}`},
		{`{"model":null,"a":1}`, `{"model":"x\"y","a":1}`},
		{`{"a":1,"model": "\u006d\n" }`, `{"a":1,"model": "x\"y" }`},
		{`{"a":1,"mod\u0065l":"m"}`, `{"a":1,"mod\u0065l":"x\"y"}`},
	} {
		var s Scan
		s.Reset(endpoint("images/generations").Rules, Options{ModelOptional: true})
		s.Write([]byte(tt.body))
		r, err := s.Finish()
		if err != nil {
			t.Fatalf("%s: %v", tt.body, err)
		}
		e := r.ModelEdit(`x"y`)
		got := tt.body[:e.Offset] + string(e.With) + tt.body[e.Offset+e.Length:]
		if got != tt.want || e.LengthOf(r.Bytes) != fmt.Sprint(len(got)) {
			t.Errorf("%s: got %s (length %s), want %s", tt.body, got, e.LengthOf(r.Bytes), tt.want)
		}
	}
}

func TestScanAgainstEncodingJSON(t *testing.T) {
	n := 1500
	if testing.Short() {
		n = 200
	}
	g := &generator{Rand: rand.New(rand.NewPCG(1, 2))}
	codes := map[Code]int{}
	for i := range n {
		completions := i%2 == 1
		e := endpoint("chat/completions")
		if completions {
			e = endpoint("completions")
		}
		body := g.body(completions)
		got := scan(e, body)
		want := oracleChat(body, completions)
		codes[got.code]++
		want.message = got.message
		if got != want {
			t.Fatalf("body %s\ngot  %+v\nwant %+v", body, got, want)
		}
		for cuts := range 4 {
			if split := scan(e, cut(g.Rand, body, cuts+1)...); split != got {
				t.Fatalf("body %s\nsplit %+v\nwhole %+v", body, split, got)
			}
		}
		if i < 60 && len(body) < 600 { // each place is a scan of the whole
			everySplit(t, e, string(body))
		}
		// A rewrite changes the model's bytes and nothing else.
		if got.code == "" {
			edit := got.ModelEdit("other/模型")
			after := string(body[:edit.Offset]) + string(edit.With) + string(body[edit.Offset+edit.Length:])
			again := scan(e, []byte(after))
			if again.Model != "other/模型" || again.prompt != got.prompt || again.code != "" {
				t.Fatalf("rewritten %s\ngot %+v", after, again)
			}
		}
	}
	if len(codes) < 4 || codes[""] < n/4 {
		t.Errorf("the generator covers too little: %v", codes)
	}
}

// TestTextThatBreaksOff: a body that is broken inside its text says the same of
// it however it is cut, and with a sink as without.
func TestTextThatBreaksOff(t *testing.T) {
	for _, before := range []string{"", "x", `\n`, `\ud800`, `x\ud800`, `\ud800\ud800`, `\udc00`, `\ud83d\ude00`, `\u00e9`, `\n\ud800`} {
		for _, broken := range []string{"\x17", "\n", `\q`, `\u12x`, `\ud8`, `\`, "", "y\x17", `\t` + "\x17", `\udc0x`} {
			body := `{"model":"m","messages":[{"role":"user","content":"` + before + broken
			if got := scan(endpoint("chat/completions"), []byte(body)); got.code != CodeInvalidJSON {
				t.Errorf("%q: %+v", body, got)
			}
			everySplit(t, endpoint("chat/completions"), body)
		}
	}
}

func TestScanReuse(t *testing.T) {
	g := &generator{Rand: rand.New(rand.NewPCG(3, 4))}
	var s Scan
	for range 500 {
		body := g.body(false)
		if g.IntN(4) == 0 {
			body = body[:g.IntN(len(body)+1)]
		}
		var c collect
		s.Reset(endpoint("chat/completions").Rules, Options{Sink: &c, MaxDepth: 512})
		s.Write(body)
		r, _ := s.Finish()
		if want := scan(endpoint("chat/completions"), body); r != want.Result || c[LanePrompt].String() != want.prompt {
			t.Fatalf("body %s\nreused %+v\nfresh  %+v", body, r, want.Result)
		}
	}
}

func TestScanAllocations(t *testing.T) {
	bodies := [][]byte{chatBody(1<<10, 4), chatBody(256<<10, 4)}
	sink := new(countSink)
	s := new(Scan)
	for _, body := range bodies {
		if n := testing.AllocsPerRun(100, func() {
			s.Reset(chatRules, Options{Sink: sink, MaxDepth: 512})
			s.Write(body[:len(body)/2])
			s.Write(body[len(body)/2:])
			if _, err := s.Finish(); err != nil {
				t.Error(err)
			}
		}); n != 0 {
			t.Errorf("%d bytes: %v allocations, want 0", len(body), n)
		}
	}
	if n := testing.AllocsPerRun(100, func() { Lookup("POST", "/openai/v1/chat/completions/?x=y", []string{"/openai"}) }); n != 0 {
		t.Errorf("Lookup: %v allocations, want 0", n)
	}
}

type countSink struct{ n, calls int64 }

func (c *countSink) Text(_ Lane, p []byte) { c.n += int64(len(p)); c.calls++ }

// chatBody is a chat of about size bytes in n messages of English text with a line break every 80 bytes.
func chatBody(size, n int) []byte {
	var line strings.Builder
	for line.Len() < size/n {
		line.WriteString("The quick brown fox jumps over the lazy dog, and then it \"rests\" for a while.\n")
	}
	var messages []map[string]string
	for i := range n {
		messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": line.String()})
	}
	b, err := json.Marshal(map[string]any{"messages": messages, "model": "qwen/qwen3-8b", "stream": true, "temperature": 0.7})
	if err != nil {
		panic(err)
	}
	return b
}

func FuzzScan(f *testing.F) {
	g := &generator{Rand: rand.New(rand.NewPCG(7, 8))}
	for i := range 40 {
		f.Add(g.body(i%2 == 1), uint64(i), i%2 == 1)
	}
	f.Add([]byte("\xef\xbb\xbf{\"model\":\"m\"}"), uint64(0), false)
	f.Add([]byte(`{"a":-0.1e+5,"b":[true,false,null]}`), uint64(0), false)
	f.Add([]byte("{\"messages\":[{\"content\":\"x\\ud800\x17"), uint64(0), false)
	f.Fuzz(func(t *testing.T, body []byte, seed uint64, completions bool) {
		e := endpoint("chat/completions")
		if completions {
			e = endpoint("completions")
		}
		got := scan(e, body)
		r := rand.New(rand.NewPCG(seed, 1))
		if split := scan(e, cut(r, body, 1+r.IntN(8))...); split != got {
			t.Fatalf("split %+v\nwhole %+v", split, got)
		}
		// Where encoding/json and the scanner differ: the scanner skips a byte order mark, wants an object, bounds the
		// depth lower and leaves invalid UTF-8 alone.
		plain := bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))
		if bytes.Count(body, []byte("["))+bytes.Count(body, []byte("{")) > 512 {
			return
		}
		valid := json.Valid(plain) && bytes.TrimLeft(plain, " \t\r\n")[0] == '{'
		if valid != (got.code != CodeInvalidJSON) {
			t.Fatalf("encoding/json valid %v, scanner %q %s", valid, got.code, got.message)
		}
		if !valid || len(plain) != len(body) || !utf8.Valid(body) || int64(got.ModelLength) > MaxModel {
			return
		}
		want := oracleChat(body, completions)
		want.message = got.message
		if got != want {
			t.Fatalf("got  %+v\nwant %+v", got, want)
		}
	})
}
