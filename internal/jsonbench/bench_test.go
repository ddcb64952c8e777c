package jsonbench

import (
	"bytes"
	stdjson "encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"

	"github.com/buger/jsonparser"
	"github.com/bytedance/sonic"
	"github.com/bytedance/sonic/ast"
	"github.com/go-json-experiment/json/jsontext"
	goccy "github.com/goccy/go-json"
	"github.com/tidwall/gjson"

	"github.com/shuntproxy/shunt/internal/openai"
)

// found is what each reader must deliver: the model, whether to stream, and the unescaped text of all messages
// (its length stands for handing it to a hash).
type found struct {
	model  string
	stream bool
	text   int
}

type request struct {
	Model    string `json:"model"`
	Stream   bool   `json:"stream"`
	Messages []struct {
		Content string `json:"content"`
	} `json:"messages"`
}

func (r *request) found() found {
	f := found{model: r.Model, stream: r.Stream}
	for _, m := range r.Messages {
		f.text += len(m.Content)
	}
	return f
}

type counter struct{ n int }

func (c *counter) Text(_ openai.Lane, p []byte) { c.n += len(p) }

type reader struct {
	name string
	read func(body []byte) (found, error)
}

func readers() []reader {
	scan := new(openai.Scan)
	endpoint, _ := openai.Lookup("POST", "/v1/chat/completions", nil)
	rules := endpoint.Rules
	scanned := func(chunk int, sink openai.Sink) func([]byte) (found, error) {
		return func(body []byte) (found, error) {
			scan.Reset(rules, openai.Options{Sink: sink, MaxDepth: 512})
			for len(body) > 0 {
				n := min(chunk, len(body))
				scan.Write(body[:n])
				body = body[n:]
			}
			r, err := scan.Finish()
			if err != nil {
				return found{}, err
			}
			return found{r.Model, r.Stream, int(r.PromptBytes) - max(0, r.TextValues-1)}, nil // less the separators
		}
	}
	return []reader{
		{"scan", scanned(1<<30, new(counter))},
		{"scan-16KiB-chunks", scanned(16<<10, new(counter))},
		{"scan-no-sink", scanned(1<<30, nil)},               // under policies that need sizes only
		{"scan-no-sink-16KiB-chunks", scanned(16<<10, nil)}, // as the proxy's buffers hold it
		{"encoding/json", func(b []byte) (found, error) {
			var r request
			err := stdjson.Unmarshal(b, &r)
			return r.found(), err
		}},
		{"goccy/go-json", func(b []byte) (found, error) {
			var r request
			err := goccy.Unmarshal(b, &r)
			return r.found(), err
		}},
		{"sonic", func(b []byte) (found, error) {
			var r request
			err := sonic.Unmarshal(b, &r)
			return r.found(), err
		}},
		{"sonic/ast", readAST},
		{"gjson", func(b []byte) (f found, err error) {
			if !gjson.ValidBytes(b) {
				return f, fmt.Errorf("not valid")
			}
			return readGJSON(b), nil
		}},
		{"gjson-unvalidated", func(b []byte) (found, error) { return readGJSON(b), nil }},
		{"jsonparser-unvalidated", readJSONParser},
		{"jsontext", readJSONText},
	}
}

func readAST(b []byte) (f found, err error) {
	root, err := sonic.Get(b)
	if err != nil {
		return f, err
	}
	if f.model, err = root.Get("model").String(); err != nil {
		return f, err
	}
	if f.stream, err = root.Get("stream").Bool(); err != nil {
		return f, err
	}
	err = root.Get("messages").ForEach(func(_ ast.Sequence, m *ast.Node) bool {
		s, _ := m.Get("content").String()
		f.text += len(s)
		return true
	})
	return f, err
}

func readGJSON(b []byte) (f found) {
	f.model = gjson.GetBytes(b, "model").String()
	f.stream = gjson.GetBytes(b, "stream").Bool()
	gjson.GetBytes(b, "messages").ForEach(func(_, m gjson.Result) bool {
		f.text += len(m.Get("content").String())
		return true
	})
	return f
}

func readJSONParser(b []byte) (f found, err error) {
	if f.model, err = jsonparser.GetString(b, "model"); err != nil {
		return f, err
	}
	if f.stream, err = jsonparser.GetBoolean(b, "stream"); err != nil {
		return f, err
	}
	_, err = jsonparser.ArrayEach(b, func(m []byte, _ jsonparser.ValueType, _ int, _ error) {
		s, _ := jsonparser.GetString(m, "content")
		f.text += len(s)
	}, "messages")
	return f, err
}

func readJSONText(b []byte) (f found, err error) {
	d := jsontext.NewDecoder(bytes.NewBuffer(b))
	path := [4]string{}
	key := false
	for {
		t, err := d.ReadToken()
		if err == io.EOF {
			return f, nil
		}
		if err != nil {
			return f, err
		}
		depth := d.StackDepth()
		kind, n := d.StackIndex(depth)
		key = kind == '{' && n%2 == 1 && t.Kind() == '"'
		switch {
		case depth >= len(path):
		case key:
			path[depth] = t.String()
		case depth == 1 && path[1] == "model":
			f.model = t.String()
		case depth == 1 && path[1] == "stream":
			f.stream = t.Kind() == 't'
		case t.Kind() == '"' && depth == 3 && path[1] == "messages" && path[3] == "content":
			f.text += len(t.String())
		}
	}
}

// body is a chat of about size bytes in n messages that repeat a line.
func body(size, n int, line string) []byte {
	var text strings.Builder
	for text.Len() < size/n {
		text.WriteString(line)
	}
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	messages := make([]message, n)
	for i := range messages {
		messages[i] = message{[]string{"user", "assistant"}[i%2], text.String()}
	}
	b, err := stdjson.Marshal(map[string]any{
		"messages": messages, "model": "qwen/qwen3-8b", "stream": true, "max_tokens": 256, "temperature": 0.7})
	if err != nil {
		panic(err)
	}
	return b
}

const (
	dense = "The quick brown fox jumps over the lazy dog, and then it \"rests\" for a while.\n"
	prose = "The quick brown fox jumps over the lazy dog; then it rests for a good while.\nAnd it \"sleeps\", as foxes do after " +
		"a long day of jumping over dogs that cannot be bothered, until it is dark and then some more. The dog does not mind.\n"
	chinese = "敏捷的棕色狐狸跳过懒狗，然后休息一会儿。\n"
)

// ascii escapes all but ASCII, as Python's json does unless told otherwise.
func ascii(b []byte) []byte {
	var out bytes.Buffer
	for _, r := range string(b) {
		if r < 0x80 {
			out.WriteRune(r)
		} else {
			fmt.Fprintf(&out, "\\u%04x", r)
		}
	}
	return out.Bytes()
}

var bodies = []struct {
	name string
	body []byte
}{
	{"1KB-chat", body(900, 3, dense)},
	{"256KB-chat", body(256<<10, 12, dense)},
	{"256KB-prose", body(256<<10, 12, prose)}, // an escape in every 60 bytes
	{"256KB-no-escapes", []byte(`{"model":"qwen/qwen3-8b","stream":true,"messages":[{"role":"user","content":"` + strings.Repeat("base64AAAA+/0123", 16<<10) + `"}]}`)},
	{"256KB-chinese", ascii(body(128<<10, 12, chinese))},
	{"4MiB-prompt", body(4<<20-1024, 1, dense)},
}

// TestReadersAgree keeps the comparison honest.
func TestReadersAgree(t *testing.T) {
	for _, b := range bodies {
		var r request
		if err := stdjson.Unmarshal(b.body, &r); err != nil {
			t.Fatal(err)
		}
		for _, reader := range readers() {
			if got, err := reader.read(b.body); err != nil || got != r.found() {
				t.Errorf("%s on %s: got %+v, %v, want %+v", reader.name, b.name, got, err, r.found())
			}
		}
	}
}

// cpu returns the processor time this process has used, in nanoseconds: what counts in a proxy, garbage collection
// included, and less disturbed by other work on the machine than the clock.
func cpu(b *testing.B) int64 {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		b.Fatal(err)
	}
	return ru.Utime.Nano() + ru.Stime.Nano()
}

func BenchmarkRead(b *testing.B) {
	for _, in := range bodies {
		for _, r := range readers() {
			b.Run(in.name+"/"+r.name, func(b *testing.B) {
				b.SetBytes(int64(len(in.body)))
				b.ReportAllocs()
				before := cpu(b)
				for b.Loop() {
					if _, err := r.read(in.body); err != nil {
						b.Fatal(err)
					}
				}
				used := float64(cpu(b)-before) / float64(b.N)
				b.ReportMetric(used, "cpu-ns/op")
				b.ReportMetric(float64(len(in.body))/used*1e3, "cpu-MB/s")
			})
		}
	}
}

// BenchmarkCold reads bodies as they come from a network: chunks of 16 KiB all over the memory, 96 MiB of them in turn,
// so that they are in no cache near the processor. Sizes only.
func BenchmarkCold(b *testing.B) {
	const chunk = 16 << 10
	endpoint, _ := openai.Lookup("POST", "/v1/chat/completions", nil)
	rules := endpoint.Rules
	for _, in := range bodies[1:4] {
		b.Run(in.name, func(b *testing.B) {
			copies := 96 << 20 / len(in.body)
			per := (len(in.body) + chunk - 1) / chunk
			memory := make([]byte, copies*per*chunk)
			chunks := make([][]byte, copies*per)
			for i, at := range rand.New(rand.NewPCG(1, 2)).Perm(len(chunks)) {
				n := copy(memory[at*chunk:(at+1)*chunk], in.body[i%per*chunk:])
				chunks[i] = memory[at*chunk:][:n]
			}
			scan := new(openai.Scan)
			b.SetBytes(int64(len(in.body)))
			before, i := cpu(b), 0
			for b.Loop() {
				scan.Reset(rules, openai.Options{MaxDepth: 512})
				for _, c := range chunks[i*per : (i+1)*per] {
					scan.Write(c)
				}
				if r, err := scan.Finish(); err != nil || r.Bytes != int64(len(in.body)) {
					b.Fatal(r, err)
				}
				i = (i + 1) % copies
			}
			b.ReportMetric(float64(cpu(b)-before)/float64(b.N), "cpu-ns/op")
		})
	}
}
