package openai

import (
	"encoding/json"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"unsafe"
)

func TestAppendError(t *testing.T) {
	tests := []struct {
		style                Style
		status               int
		code, message, param string
		want                 string
	}{
		{StyleOpenAI, 400, "invalid_value", `"model" is`, "model", `{"error":{"message":"\"model\" is","type":"invalid_request_error","code":"invalid_value","param":"model"}}`},
		{StyleOpenAI, 404, "model_not_found", "x", "", `{"error":{"message":"x","type":"invalid_request_error","code":"model_not_found","param":null}}`},
		{StyleOpenAI, 413, "request_too_large", "x", "", `{"error":{"message":"x","type":"invalid_request_error","code":"request_too_large","param":null}}`},
		{StyleOpenAI, 415, "unsupported_encoding", "x", "", `{"error":{"message":"x","type":"invalid_request_error","code":"unsupported_encoding","param":null}}`},
		{StyleOpenAI, 429, "rejected-saturated", "x", "", `{"error":{"message":"x","type":"rate_limit_error","code":"rejected-saturated","param":null}}`},
		{StyleOpenAI, 503, "rejected-no-endpoints", "x", "", `{"error":{"message":"x","type":"overloaded_error","code":"rejected-no-endpoints","param":null}}`},
		{StyleOpenAI, 500, "", "x", "", `{"error":{"message":"x","type":"api_error","code":null,"param":null}}`},
		{StyleAnthropic, 400, "invalid_json", "x\n", "", `{"type":"error","error":{"type":"invalid_request_error","message":"x\u000a"}}`},
		{StyleAnthropic, 400, "model_not_found", "x", "model", `{"type":"error","error":{"type":"not_found_error","message":"x"}}`},
		{StyleAnthropic, 404, "", "x", "", `{"type":"error","error":{"type":"not_found_error","message":"x"}}`},
		{StyleAnthropic, 413, "", "x", "", `{"type":"error","error":{"type":"request_too_large","message":"x"}}`},
		{StyleAnthropic, 429, "", "x", "", `{"type":"error","error":{"type":"rate_limit_error","message":"x"}}`},
		{StyleAnthropic, 503, "", "x", "", `{"type":"error","error":{"type":"overloaded_error","message":"x"}}`},
		{StyleAnthropic, 500, "", "x", "", `{"type":"error","error":{"type":"api_error","message":"x"}}`},
	}
	for _, tt := range tests {
		got := string(AppendError(nil, tt.style, tt.status, tt.code, tt.message, tt.param))
		if got != tt.want || !json.Valid([]byte(got)) {
			t.Errorf("%d %s: got %s, want %s", tt.status, tt.code, got, tt.want)
		}
	}
}

func TestAppendString(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for range 2000 {
		b := make([]byte, r.IntN(12))
		for i := range b {
			b[i] = byte(r.UintN(256))
		}
		var got string
		if err := json.Unmarshal(AppendString(nil, string(b)), &got); err != nil {
			t.Fatalf("%q: %v", b, err)
		}
		var want strings.Builder
		for _, r := range string(b) {
			want.WriteRune(r)
		}
		if got != want.String() {
			t.Errorf("%q: got %q", b, got)
		}
	}
}

func TestLookup(t *testing.T) {
	tests := []struct{ method, path, want string }{
		{"POST", "/v1/chat/completions", "chat/completions"},
		{"POST", "/v1/chat/completions/", "chat/completions"},
		{"POST", "/v1/chat/completions?api-version=1&x=/v1/rerank", "chat/completions"},
		{"POST", "/v1/chat/completions/?x", "chat/completions"},
		{"POST", "/v1/chat%2Fcompletions", "chat/completions"}, // engines decode before they route
		{"POST", "/v1%2fchat/%63ompletions?q=%2F", "chat/completions"},
		{"POST", "/v1/chat/completions%2F", "chat/completions"},
		{"POST", "/v1/chat%252Fcompletions", ""}, // decoded once
		{"POST", "/v1/chat/completions%", ""},
		{"POST", "/openai/v1/completions", "completions"},
		{"POST", "/team/a/v1/embeddings", "embeddings"},
		{"POST", "/rerank", "rerank"},
		{"POST", "/v2/rerank", "rerank"},
		{"POST", "/v1/messages/count_tokens", "messages/count_tokens"},
		{"GET", "/v1/chat/completions", ""},
		{"OPTIONS", "/v1/chat/completions", ""},
		{"post", "/v1/chat/completions", ""},
		{"POST", "/v1/chat/completions/x", ""},
		{"POST", "/openaiv1/completions", ""},
		{"POST", "/other/v1/completions", ""},
		{"POST", "/v1/audio/transcriptions", "audio/transcriptions"},
		{"POST", "/openai/v1/audio/translations/?x=1", "audio/translations"},
		{"GET", "/v1/models", "models"},
		{"GET", "/v1/models/", "models"},
		{"GET", "/openai/v1/models?x", "models"},
		{"GET", "/v1/models/m", "models/id m"},
		{"GET", "/v1/models/org/m", "models/id org/m"},
		{"GET", "/v1/models/org%2Fm/", "models/id org/m"},
		{"POST", "/v1/models", ""},
		{"DELETE", "/v1/models/m", ""},
		{"HEAD", "/v1/models", ""},
		{"GET", "/v1/realtime?model=m", "realtime"},
		{"POST", "/v1/realtime/", "realtime"},
		{"DELETE", "/v1/realtime", ""},
		{"GET", "/v1/realtime/x", ""},
		{"GET", "/v1/responses/resp_1", "responses/id resp_1"},
		{"DELETE", "/v1/responses/resp_1", "responses/id resp_1"},
		{"POST", "/v1/responses/resp_1/cancel", "responses/id resp_1/cancel"},
		{"GET", "/openai/v1/responses/resp_1/input_items?limit=1", "responses/id resp_1/input_items"},
		{"OPTIONS", "/v1/responses/resp_1", ""},
		{"GET", "/v1/responses", ""},
		{"POST", "/", ""},
		{"POST", "", ""},
		{"POST", "?x", ""},
	}
	for _, tt := range tests {
		got := ""
		if e, id := Lookup(tt.method, tt.path, []string{"", "/openai", "/team/a/"}); e != nil {
			got = e.Name
			if id != "" {
				got += " " + id
			}
		}
		if got != tt.want {
			t.Errorf("%s %s: got %q, want %q", tt.method, tt.path, got, tt.want)
		}
	}
}

func TestKnown(t *testing.T) {
	for path, want := range map[string]bool{
		"/v1/chat/completions": true, "/openai/v1/chat/completions/?a": true, "/v1/models/m": true, "/v1/realtime": true,
		"/v1/audio/translations": true, "/v1/files": false, "/metrics": false, "/": false, "": false,
	} {
		if Known(path, []string{"/openai"}) != want {
			t.Errorf("%s: known is %v", path, !want)
		}
	}
}

func TestQuery(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/realtime":                    "",
		"/v1/realtime?":                   "",
		"/v1/realtime?model":              "",
		"/v1/realtime?model=":             "",
		"/v1/realtime?model=m":            "m",
		"/v1/realtime?a=b&model=m&c=d":    "m",
		"/v1/realtime?model=a&model=b":    "b",
		"/v1/realtime?model=a&model=":     "a",
		"/v1/realtime?mod%65l=org%2Fm+1":  "org/m 1",
		"/v1/realtime?model=%zz":          "",
		"/v1/realtime?models=x&xmodel=y":  "",
		"/v1/realtime?&&model=m&":         "m",
		"/v1/realtime?model=a=b":          "a=b",
		"/v1/realtime?model=m?model=more": "m?model=more",
	} {
		got, from, to := Query(path, "model")
		raw, err := url.QueryUnescape(path[from:to])
		if got != want || err != nil || raw != want {
			t.Errorf("%s: %q at %q", path, got, path[from:to])
		}
	}
}

func TestAppendModels(t *testing.T) {
	const one = `{"id":"a\"b","object":"model","created":7,"owned_by":"shunt"}`
	for want, names := range map[string][]string{
		`{"object":"list","data":[]}`:                        nil,
		`{"object":"list","data":[` + one + `]}`:             {`a"b`},
		`{"object":"list","data":[` + one + `,` + one + `]}`: {`a"b`, `a"b`},
	} {
		if got := string(AppendModels(nil, names, 7)); got != want || !json.Valid([]byte(got)) {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// TestPrograms checks what the machine takes for granted about the compiled table.
func TestPrograms(t *testing.T) {
	progs := map[string][]node{"response": responseProg}
	for _, e := range endpoints {
		if e.From != FromBody {
			continue
		}
		progs[e.Name] = e.Rules.prog
		if len(e.Rules.reqs) > maxReqs {
			t.Errorf("%s: %d requirements", e.Name, len(e.Rules.reqs))
		}
		if e.Streams != has(e.Rules.prog, "stream") {
			t.Errorf("%s: Streams and the rules disagree", e.Name)
		}
	}
	for name, p := range progs {
		if len(p) > 255 {
			t.Errorf("%s: %d nodes", name, len(p))
		}
		for _, n := range p {
			for _, f := range n.fields {
				if len(f.key) > maxKey {
					t.Errorf("%s: key %q is too long to match", name, f.key)
				}
			}
			if n.act == actNumber && n.arg >= maxSlots || int(n.req) > maxReqs {
				t.Errorf("%s: node %+v is out of range", name, n)
			}
		}
	}
}

func has(p []node, key string) bool {
	for _, f := range p[rootNode].fields {
		if f.key == key {
			return true
		}
	}
	return false
}

// TestSizes keeps the state that each request carries small; the design allows 4 KB for all of it.
func TestSizes(t *testing.T) {
	if n := unsafe.Sizeof(Scan{}); n > 640 { // 128 of them are the stack
		t.Errorf("a Scan is %d bytes", n)
	}
	if n := unsafe.Sizeof(Reader{}); n > 720 { // of a pool, and only where a response is read
		t.Errorf("a Reader is %d bytes", n)
	}
	t.Logf("Scan %d bytes, Reader %d bytes", unsafe.Sizeof(Scan{}), unsafe.Sizeof(Reader{}))
}
