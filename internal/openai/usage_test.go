package openai

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
)

type seen struct {
	u               Usage
	events, content int
	failed, done    bool
}

func watch(sse bool, chunks ...[]byte) seen {
	var r Reader
	r.Reset(sse, false)
	for _, c := range chunks {
		own := bytes.Clone(c)
		r.Write(own)
		for i := range own {
			own[i] = '#'
		}
	}
	u := r.Finish()
	return seen{u, r.Events(), r.ContentEvents(), r.Failed(), r.Done()}
}

const chatStream = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}],\"usage\":null}\n\n" +
	"data: {\"choices\":[{\"delta\":{\"content\":\"Hel\"}}]}\n\n: ping\n\ndata: {\"choices\":[{\"delta\":{\"reasoning_content\":\"lo\"}}]}\n\n" +
	"data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n"

var usageTests = []struct {
	name string
	sse  bool
	body string
	want seen
}{
	{"vLLM", false, `{"id":"x","choices":[{"message":{"content":"usage: {\"usage\":{\"prompt_tokens\":99}}"}}],"usage":{"prompt_tokens":3,"total_tokens":10,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":2}}}`,
		seen{u: Usage{3, 7, 2, 10}}},
	{"null details", false, `{"usage":{"prompt_tokens":3,"total_tokens":10,"completion_tokens":7,"prompt_tokens_details":null}}`, seen{u: Usage{3, 7, -1, 10}}},
	{"embeddings", false, `{"usage":{"prompt_tokens":5,"total_tokens":5}}`, seen{u: Usage{5, -1, -1, 5}}},
	{"systemone", false, `{"usage":{"input_tokens":5,"output_tokens":0}}`, seen{u: Usage{5, 0, -1, -1}}},
	{"responses", false, `{"output":[{"usage":{"input_tokens":77}}],"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":4},"output_tokens":6,"output_tokens_details":{"reasoning_tokens":1},"total_tokens":11}}`,
		seen{u: Usage{5, 6, 4, 11}}},
	{"messages", false, `{"type":"message","usage":{"input_tokens":5,"cache_read_input_tokens":3,"output_tokens":6}}`, seen{u: Usage{5, 6, 3, -1}}},
	{"null", false, `{"usage":null}`, seen{u: Usage{-1, -1, -1, -1}}},
	{"no whole numbers", false, `{"usage":{"prompt_tokens":1.5,"completion_tokens":-1,"total_tokens":"3"}}`, seen{u: Usage{-1, -1, -1, -1}}},
	{"cut short", false, `{"usage":{"prompt_tokens":3,"total_tokens":10},"x":`, seen{u: Usage{3, -1, -1, 10}}},
	{"error", false, `{"error":{"message":"no","code":400}}`, seen{u: Usage{-1, -1, -1, -1}, failed: true}},
	{"no error", false, `{"error":null,"usage":{"prompt_tokens":1}}`, seen{u: Usage{1, -1, -1, -1}}},
	{"text", false, `[EREQUEST]no such model`, seen{u: Usage{-1, -1, -1, -1}}},
	{"chat stream", true, chatStream,
		seen{u: Usage{3, 2, -1, 5}, events: 5, content: 3, done: true}},
	{"usage on every chunk, CRLF, the last wins", true, "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":4,\"completion_tokens\":1}}\r\n\r\n" +
		"data:{\"choices\":[{\"text\":\"b\"}],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\r\n\r\ndata: [DONE]\r\n\r\n",
		seen{u: Usage{3, 2, -1, 5}, events: 2, content: 2, done: true}},
	{"CR and byte order mark", true, "\xef\xbb\xbfdata: {\"choices\":[{\"text\":\"a\"}]}\r\rdata: [DONE]\r\r", seen{u: Usage{-1, -1, -1, -1}, events: 1, content: 1, done: true}},
	{"messages stream", true, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":7,\"output_tokens\":1}}}\n\n" +
		"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"Hi\"}}\n\n" +
		"event: message_delta\ndata: {\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":15}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
		seen{u: Usage{25, 15, 7, -1}, events: 4, content: 1}},
	{"responses stream", true, "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n" +
		"event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":2,\"output_tokens\":3,\"total_tokens\":5}}}\n\n",
		seen{u: Usage{2, 3, -1, 5}, events: 2, content: 1}},
	{"data in several lines", true, "data: {\"usage\":\ndata: {\"prompt_tokens\":3}\ndata: }\n\n", seen{u: Usage{3, -1, -1, -1}, events: 1}},
	{"data in several lines with CRLF", true, "data: {\"usage\":\r\ndata: {\"prompt_tokens\":3}\r\ndata: }\r\n\r\n", seen{u: Usage{3, -1, -1, -1}, events: 1}},
	{"a line feed joins data lines", true, "data: {\"usage\":{\"prompt_tokens\":1\ndata: 2}}\n\n", seen{u: Usage{-1, -1, -1, -1}, events: 1}},
	{"one line feed between events", true, "data: {\"usage\":{\"prompt_tokens\":3}}\ndata: {\"usage\":{\"prompt_tokens\":4}}\ndata: [DONE]\n", seen{u: Usage{4, -1, -1, -1}, events: 2, done: true}},
	{"no end of line", true, "data: {\"usage\":{\"prompt_tokens\":3}}", seen{u: Usage{3, -1, -1, -1}, events: 1}},
	{"cut event", true, "data: {\"usage\":{\"prompt_tokens\":3}", seen{u: Usage{-1, -1, -1, -1}, events: 1}},
	{"a malformed event says nothing", true, "data: {\"usage\":{\"prompt_tokens\":3}}x\n\ndata: {\"usage\":{\"prompt_tokens\":5}}\n\n", seen{u: Usage{5, -1, -1, -1}, events: 2}},
	{"error event", true, "data: {\"error\":{\"message\":\"x\"}}\n\ndata: [DONE]\n\n", seen{u: Usage{-1, -1, -1, -1}, events: 1, failed: true, done: true}},
	{"other fields", true, "datax: {\"usage\":{\"prompt_tokens\":3}}\nda\n data: {\"usage\":{\"prompt_tokens\":3}}\ndata\nid: 4\n\n", seen{u: Usage{-1, -1, -1, -1}}},
	{"null keeps what was said", true, "data: {\"usage\":{\"prompt_tokens\":3}}\n\ndata: {\"usage\":null}\n\n", seen{u: Usage{3, -1, -1, -1}, events: 2}},
	{"a long line", true, "data: {\"x\":\"" + strings.Repeat("y", 5000) + "\",\"usage\":{\"prompt_tokens\":3}}\n\n", seen{u: Usage{3, -1, -1, -1}, events: 1}},
}

func TestReader(t *testing.T) {
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			body := []byte(tt.body)
			if got := watch(tt.sse, body); got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			var single [][]byte
			for i := range body {
				single = append(single, body[i:i+1])
				if got := watch(tt.sse, body[:i], body[i:]); got != tt.want {
					t.Fatalf("cut at %d: got %+v, want %+v", i, got, tt.want)
				}
			}
			if got := watch(tt.sse, single...); got != tt.want {
				t.Errorf("single bytes: got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestUsageTotal(t *testing.T) {
	for _, tt := range []struct {
		u     Usage
		total int64
		said  bool
	}{
		{Usage{-1, -1, -1, -1}, -1, false},
		{Usage{3, 4, -1, -1}, 7, true},
		{Usage{3, -1, -1, -1}, 3, true},
		{Usage{-1, 4, -1, -1}, 4, true},
		{Usage{3, 4, -1, 9}, 9, true},
		{Usage{-1, -1, -1, 9}, 9, true},
	} {
		if tt.u.Total() != tt.total || tt.u.Said() != tt.said {
			t.Errorf("%+v: total %d, said %v", tt.u, tt.u.Total(), tt.u.Said())
		}
	}
}

// TestReaderFirstContent checks that content is known as soon as its event is whole.
func TestReaderFirstContent(t *testing.T) {
	var r Reader
	r.Reset(true, false)
	for _, step := range []struct {
		chunk string
		want  int
	}{
		{"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n", 0},
		{"data: {\"choices\":[{\"delta\":{\"content\":\"a", 0},
		{"\"}}]}\n", 1},
		{"\ndata: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n", 2},
	} {
		if r.Write([]byte(step.chunk)); r.ContentEvents() != step.want {
			t.Fatalf("after %q: %d, want %d", step.chunk, r.ContentEvents(), step.want)
		}
	}
}

func TestReaderAllocations(t *testing.T) {
	body := []byte(chatStream)
	r := new(Reader)
	if n := testing.AllocsPerRun(100, func() {
		r.Reset(true, false)
		r.Write(body[:100])
		r.Write(body[100:])
		if !r.Finish().Said() {
			t.Error("no usage")
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func FuzzUsage(f *testing.F) {
	for i, tt := range usageTests {
		f.Add([]byte(tt.body), uint64(i), tt.sse)
	}
	f.Fuzz(func(t *testing.T, body []byte, seed uint64, sse bool) {
		whole := watch(sse, body)
		r := rand.New(rand.NewPCG(seed, 1))
		if split := watch(sse, cut(r, body, 1+r.IntN(10))...); split != whole {
			t.Fatalf("split %+v\nwhole %+v", split, whole)
		}
		if whole.content > whole.events || whole.u.Total() < -1 {
			t.Fatalf("impossible: %+v", whole)
		}
	})
}

func BenchmarkReader(b *testing.B) {
	event := []byte(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"qwen/qwen3-8b","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}` + "\n\n")
	r := new(Reader)
	r.Reset(true, false)
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	for b.Loop() {
		r.Write(event)
	}
}
