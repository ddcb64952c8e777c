package openai

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// rename puts a response together from chunks as a door does.
func rename(sse bool, name string, chunks ...[]byte) string {
	var r Reader
	r.Reset(sse, true)
	var out []byte
	for _, c := range chunks {
		own := bytes.Clone(c)
		r.Write(own)
		out = Rename(out, own, r.Spans(), name)
		for i := range own {
			own[i] = '#'
		}
	}
	return string(out)
}

const newName = `"the \"new\" one"`

// @new stands for a name that becomes newName, @old for what only looks like one.
var renameTests = []struct {
	name, body string
	sse        bool
}{
	{"chat", `{"id":"x","model":@new,"choices":[{"message":{"content":"\"model\":\"old\"","model":@old}}],"model2":@old,"usage":{"model":@old}}`, false},
	{"last, white space", "{\"choices\":[] , \"model\" :\n\t @new\n}\n", false},
	{"escaped key", `{"m\u006fdel":@new,"\"model":@old}`, false},
	{"no string", `{"model":null,"choices":[{"model":@old}]}`, false},
	{"an object", `{"model":{"model":@old}}`, false},
	{"twice", `{"model":@new,"model":@new}`, false},
	{"none", `{"choices":[]}`, false},
	{"nested in arrays", `{"data":[{"model":@old},{"response":{"model":@old}}]}`, false},
	{"responses", `{"response":{"model":@new,"output":[{"model":@old}],"response":{"model":@old}}}`, false},
	{"byte order mark", "\xef\xbb\xbf{\"model\":@new}", false},
	{"not JSON", `model: "old"`, false},
	{"an array", `[{"model":@old}]`, false},
	{"broken before", `{"x":tru,"model":@old}`, false},
	{"broken after", `{"model":@new,"x":tru,"model":@old}`, false},
	{"deep", strings.Repeat(`{"model":@new,"x":`, 1) + strings.Repeat(`[`, 100) + `{"model":@old}` + strings.Repeat(`]`, 100) + `}`, false},
	{"stream", "data: {\"model\":@new,\"choices\":[{\"delta\":{\"content\":\"data: {\\\"model\\\":\\\"old\\\"}\"}}]}\n\n: \"model\":@old\n\nevent: {\"model\":@old}\ndata:{\"model\":@new}\n\ndata: [DONE]\n\n", true},
	{"stream, CRLF", "data: {\"model\":@new}\r\n\r\ndata: {\"model\":@new}\r\n\r\n", true},
	{"stream, CR", "data: {\"model\":@new}\r\rdata: {\"model\":@new}\r\r", true},
	{"stream in several lines", "data: {\"model\":\ndata: @new}\n\ndata: {\ndata:\"model\":@new\ndata:}\n\n", true},
	{"messages stream", "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":@new,\"content\":[{\"model\":@old}]}}\n\n", true},
	{"responses stream", "event: response.created\ndata: {\"response\":{\"model\":@new},\"sequence_number\":0}\n\n", true},
	{"an error of the stream's", "data: {\"error\":{\"model\":@old}}\n\n", true},
	{"broken event", "data: {x\"model\":@old}\n\ndata: {\"model\":@new}\n\n", true},
}

func TestRename(t *testing.T) {
	for _, tt := range renameTests {
		for _, old := range []string{`"old"`, `""`, `"a/b \u00e9\\\"}{"`, `"` + strings.Repeat("x", 150) + `"`} {
			t.Run(tt.name, func(t *testing.T) {
				body := []byte(strings.NewReplacer("@new", old, "@old", old).Replace(tt.body))
				want := strings.NewReplacer("@new", newName, "@old", old).Replace(tt.body)
				if got := rename(tt.sse, newName, body); got != want {
					t.Fatalf("got  %q\nwant %q", got, want)
				}
				var single [][]byte
				for i := range body {
					single = append(single, body[i:i+1])
					if got := rename(tt.sse, newName, body[:i], body[i:]); got != want {
						t.Fatalf("cut at %d: got %q", i, got)
					}
				}
				if got := rename(tt.sse, newName, single...); got != want {
					t.Errorf("single bytes: got %q", got)
				}
			})
		}
	}
}

// TestRenameCutShort: what an engine does not finish is passed on as far as it came.
func TestRenameCutShort(t *testing.T) {
	for body, want := range map[string]string{
		`{"model":"ol`:                          `{"model":` + newName,
		`{"model":`:                             `{"model":`,
		"{\"model\":\"o\nld\",\"model\":\"x\"}": "{\"model\":" + newName + "\nld\",\"model\":\"x\"}",
		"data: {\"model\":\"o\n\ndata: {\"model\":\"x\"}\n\n": "data: {\"model\":" + newName + "\n\ndata: {\"model\":" + newName + "}\n\n",
	} {
		sse := strings.HasPrefix(body, "data")
		if got := rename(sse, newName, []byte(body)); got != want {
			t.Errorf("%q: got %q, want %q", body, got, want)
		}
		for i := range body {
			if got := rename(sse, newName, []byte(body[:i]), []byte(body[i:])); got != want {
				t.Errorf("%q cut at %d: got %q, want %q", body, i, got, want)
			}
		}
	}
}

// TestRenameRandom compares with encoding/json: nothing but the name differs.
func TestRenameRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	for range 2000 {
		doc := randomObject(r, 0)
		if r.IntN(4) > 0 {
			doc["model"] = "old \u2028\"" + strings.Repeat("y", r.IntN(50))
		}
		body, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		var want, got map[string]any
		if err := json.Unmarshal(body, &want); err != nil {
			t.Fatal(err)
		}
		const name = "new"
		setName(want, name)
		for _, key := range []string{"response", "message"} {
			if nested, ok := want[key].(map[string]any); ok {
				setName(nested, name)
			}
		}
		out := rename(false, `"new"`, cut(r, body, 1+r.IntN(8))...)
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			t.Fatalf("%v in %s", err, out)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("from %s\ngot %s", body, out)
		}
	}
}

func setName(doc map[string]any, name string) {
	if _, ok := doc["model"].(string); ok {
		doc["model"] = name
	}
}

func randomObject(r *rand.Rand, depth int) map[string]any {
	keys := []string{"model", "response", "message", "choices", "usage", "a \"b\"", "content"}
	doc := map[string]any{}
	for range r.IntN(5) {
		doc[keys[r.IntN(len(keys))]] = randomValue(r, depth+1)
	}
	return doc
}

func randomValue(r *rand.Rand, depth int) any {
	switch n := r.IntN(8); {
	case n < 2 && depth < 5:
		return randomObject(r, depth)
	case n == 2 && depth < 5:
		return []any{randomValue(r, depth+1), randomValue(r, depth+1)}
	case n == 3:
		return r.Float64()
	case n == 4:
		return nil
	case n == 5:
		return `{"model":"x\"`
	default:
		return "model"
	}
}

func TestMore(t *testing.T) {
	for _, tt := range []struct {
		sse  bool
		body string
		more bool
	}{
		{false, "", true}, {false, `{"a":1`, true}, {false, `{"a":1}`, false}, {false, "oops", false},
		{true, "data: {}\n\n", true}, {true, "data: [DONE]\n\n", false}, {true, "oops\n", true},
	} {
		var r Reader
		r.Reset(tt.sse, false)
		r.Write([]byte(tt.body))
		if r.More() != tt.more {
			t.Errorf("%q: more is %v", tt.body, r.More())
		}
	}
}

func TestRenameAllocations(t *testing.T) {
	body := []byte("data: {\"model\":\"old\",\"choices\":[]}\n\ndata: {\"model\":\"old\"}\n\n")
	r := new(Reader)
	out := make([]byte, 0, 1024)
	if n := testing.AllocsPerRun(100, func() {
		r.Reset(true, true)
		r.Write(body)
		if out = Rename(out[:0], body, r.Spans(), `"new"`); len(r.Spans()) != 2 {
			t.Error(r.Spans())
		}
	}); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
}

func FuzzRename(f *testing.F) {
	for i, tt := range renameTests {
		f.Add([]byte(strings.NewReplacer("@new", `"old"`, "@old", `"old"`).Replace(tt.body)), uint64(i), tt.sse)
	}
	f.Fuzz(func(t *testing.T, body []byte, seed uint64, sse bool) {
		whole := rename(sse, newName, body)
		r := rand.New(rand.NewPCG(seed, 1))
		if split := rename(sse, newName, cut(r, body, 1+r.IntN(10))...); split != whole {
			t.Fatalf("split %q\nwhole %q", split, whole)
		}
		if !bytes.Contains(body, []byte("model")) && !bytes.Contains(body, []byte(`\u`)) && whole != string(body) {
			t.Fatalf("changed %q to %q", body, whole)
		}
		if !sse && json.Valid(body) && !json.Valid([]byte(whole)) {
			t.Fatalf("%q became %q", body, whole)
		}
	})
}
