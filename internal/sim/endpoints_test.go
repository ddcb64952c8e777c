package sim

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"
)

// field follows keys and indexes into a JSON text.
func field(t *testing.T, text string, path ...any) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, step := range path {
		switch x := v.(type) {
		case map[string]any:
			v = x[step.(string)]
		case []any:
			v = x[step.(int)]
		default:
			return nil
		}
	}
	return v
}

// TestEndpoints asks each engine on each path, and looks at one field.
func TestEndpoints(t *testing.T) {
	everywhere := "vllm sglang trtllm xllm"
	for _, tt := range []struct {
		path, body, engines string
		field               []any
		want                any
	}{
		{"/v1/responses", `{"model":"m","input":"hello there"}`, "vllm sglang trtllm", []any{"usage", "output_tokens"}, 3.0},
		{"/v1/responses", `{"model":"m","input":[{"role":"user","content":"hello"}]}`, "vllm", []any{"output", 0, "content", 0, "type"}, "output_text"},
		{"/v1/messages", `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5}`, "vllm sglang xllm", []any{"usage", "output_tokens"}, 5.0},
		{"/v1/messages/count_tokens", `{"model":"m","messages":[{"role":"user","content":"hi"}]}`, "vllm sglang", []any{"input_tokens"}, 6.0},
		{"/v1/embeddings", `{"model":"m","input":["12345678","1234"]}`, everywhere, []any{"usage", "prompt_tokens"}, 3.0},
		{"/v1/embeddings", `{"model":"m","input":[[1,2],[3]]}`, "vllm", []any{"data", 1, "index"}, 1.0},
		{"/v1/embeddings", `{"model":"m","input":[1,2,3],"encoding_format":"base64"}`, "vllm", []any{"usage", "total_tokens"}, 3.0},
		{"/v1/rerank", `{"model":"m","query":"q","documents":["a","b"]}`, "vllm xllm", []any{"usage", "total_tokens"}, 4.0},
		{"/v1/rerank", `{"model":"m","query":"q","documents":["a","b"]}`, "sglang", []any{1, "index"}, 1.0},
		{"/v2/rerank", `{"model":"m","query":"q","documents":["a"]}`, "vllm", []any{"results", 0, "document", "text"}, "a"},
		{"/rerank", `{"model":"m","query":"q","documents":["a"]}`, "vllm", []any{"model"}, "m"},
		{"/v1/score", `{"model":"m","query":"q","items":["a","b"],"label_token_ids":[1,2]}`, "sglang", []any{"object"}, "scoring"},
		{"/v1/score", `{"model":"m","query":"q","items":"a"}`, "vllm", []any{"data", 0, "object"}, "score"},
		{"/classify", `{"model":"m","input":"a"}`, "vllm", []any{"data", 0, "num_classes"}, 2.0},
		{"/v1/classify", `{"model":"m","input":"a"}`, "sglang", []any{"data", 0, "label"}, "LABEL_1"},
		{"/pooling", `{"model":"m","input":"a"}`, "vllm", []any{"data", 0, "object"}, "pooling"},
		{"/v1/decisions", `{"model":"m","input":{"a":1},"questions":[{"id":"x","type":"yes_no"},{"id":"y","type":"score"}]}`, "sglang vllm", []any{"usage", "completion_tokens"}, 0.0},
		{"/v1/systemone", `{"model":"m","state":"12345678","questions":{"a":{"t":1},"b":{"t":2}}}`, "sglang vllm", []any{"usage", "input_tokens"}, 8.0},
		{"/tokenize", `{"model":"m","prompt":"12345678"}`, "vllm sglang", []any{"count"}, 2.0},
		{"/v1/detokenize", `{"model":"m","tokens":[1,2]}`, "sglang", []any{"prompt"}, " sim sim"},
		{"/v1/images/generations", `{"model":"m","prompt":"x","n":2}`, "vllm", []any{"data", 1, "b64_json"}, "aW1hZ2U="},
	} {
		for engine := range strings.SplitSeq(everywhere, " ") {
			if engine != "vllm" && !strings.Contains(tt.engines, engine) && len(endpoints[tt.path].engines) > 0 && strings.Contains(fmt.Sprint(endpoints[tt.path].engines), engine) {
				continue // the row is about other engines' way
			}
			t.Run(engine+" "+tt.path, func(t *testing.T) {
				s := startServer(t, Config{Models: []string{"m"}, Engine: engine, Output: 3})
				status, body, err := post(client(t, false), s, tt.path, tt.body)
				if err != nil {
					t.Fatal(err)
				}
				if !strings.Contains(tt.engines, engine) {
					if engine != "vllm" && status != http.StatusNotFound {
						t.Errorf("%d %s, want 404", status, body)
					}
					return
				}
				if status != 200 || field(t, body, tt.field...) != tt.want {
					t.Errorf("%d %s: %v is %v, want %v", status, body, tt.field, field(t, body, tt.field...), tt.want)
				}
				if status, body, _ := post(client(t, false), s, tt.path, strings.Replace(tt.body, `"m"`, `"nobody"`, 1)); status != 404 {
					t.Errorf("an unknown model: %d %s", status, body)
				}
			})
		}
	}
}

// TestStreamForms are the events of the streams that end without [DONE].
func TestStreamForms(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}, Output: 2})
	for _, tt := range []struct{ path, body, kinds, usage string }{
		{"/v1/responses", `{"model":"m","input":"x","stream":true}`,
			"response.created response.output_item.added response.content_part.added response.output_text.delta response.output_text.delta " +
				"response.output_text.done response.content_part.done response.output_item.done response.completed", `"output_tokens":2`},
		{"/v1/messages", `{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}`,
			"message_start content_block_start content_block_delta content_block_delta content_block_stop message_delta message_stop", `"output_tokens":2`},
	} {
		_, body, err := post(client(t, false), s, tt.path, tt.body)
		if err != nil {
			t.Fatal(err)
		}
		var kinds []string
		for block := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
			name, data, _ := strings.Cut(block, "\n")
			kinds = append(kinds, strings.TrimPrefix(name, "event: "))
			if kind := field(t, strings.TrimPrefix(data, "data: "), "type"); kind != kinds[len(kinds)-1] {
				t.Errorf("event %s has type %v", name, kind)
			}
		}
		if strings.Join(kinds, " ") != tt.kinds || !strings.Contains(body, tt.usage) {
			t.Errorf("%s: %v in %s", tt.path, kinds, body)
		}
	}
}

// TestUsageInStreams: once, on every event, or where the engine's default says.
func TestUsageInStreams(t *testing.T) {
	for _, tt := range []struct {
		engine, options string
		usages          int
	}{
		{"vllm", `{}`, 0}, {"vllm", `{"include_usage":true}`, 1}, {"vllm", `{"include_usage":true,"continuous_usage_stats":true}`, 4},
		{"trtllm", `{}`, 1}, {"trtllm", `{"include_usage":false}`, 0}, {"xllm", `{"include_usage":true,"continuous_usage_stats":true}`, 1},
	} {
		s := startServer(t, Config{Models: []string{"m"}, Engine: tt.engine, Output: 3})
		_, body, err := post(client(t, false), s, "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true,"stream_options":`+tt.options+`}`)
		if n := strings.Count(body, `"usage":`); err != nil || n != tt.usages {
			t.Errorf("%s %s: %d usages (%v) in %s", tt.engine, tt.options, n, err, body)
		}
	}
}

func TestAudio(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}})
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	part, _ := w.CreateFormFile("file", "a.wav")
	_, _ = part.Write(make([]byte, 1000))
	_ = w.WriteField("model", "m")
	_ = w.Close()
	r, err := client(t, false).Post("http://"+s.Addr()+"/v1/audio/transcriptions", w.FormDataContentType(), &b)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	body, _ := io.ReadAll(r.Body)
	if r.StatusCode != 200 || field(t, string(body), "text") != "a file of 1000 bytes" {
		t.Errorf("%d %s", r.StatusCode, body)
	}
}

func TestCompressedAnswers(t *testing.T) {
	s := startServer(t, Config{Models: []string{"m"}, Compress: true})
	req, _ := http.NewRequest(http.MethodPost, "http://"+s.Addr()+"/v1/embeddings", strings.NewReader(`{"model":"m","input":"x"}`))
	req.Header.Set("Accept-Encoding", "gzip")
	r, err := client(t, false).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	z, err := gzip.NewReader(r.Body)
	if err != nil || r.Header.Get("Content-Encoding") != "gzip" {
		t.Fatal(err, r.Header)
	}
	if body, err := io.ReadAll(z); err != nil || field(t, string(body), "model") != "m" {
		t.Errorf("%v %s", err, body)
	}
}
