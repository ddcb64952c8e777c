package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
)

// collect is a sink that keeps everything.
type collect [lanes]bytes.Buffer

func (c *collect) Text(lane Lane, p []byte) { c[lane].Write(p) }

// outcome is all that a scan says, comparable with ==.
type outcome struct {
	Result
	prompt, preamble string
	salt, session    string
	code             Code
	message, param   string
	offset           int64
}

// scan reads chunks with a fresh Scan, and with another that has no sink; they must agree.
func scan(e *Endpoint, chunks ...[]byte) outcome {
	var s, sizes Scan
	var c collect
	s.Reset(e.Rules, Options{Sink: &c, MaxDepth: 512})
	sizes.Reset(e.Rules, Options{MaxDepth: 512})
	for _, chunk := range chunks {
		own := bytes.Clone(chunk)
		s.Write(own)
		sizes.Write(own)
		for i := range own { // nothing may be read after the call
			own[i] = '#'
		}
	}
	r, err := s.Finish()
	o := outcome{Result: r, prompt: c[LanePrompt].String(), preamble: c[LanePreamble].String(), salt: c[LaneSalt].String(), session: c[LaneSession].String()}
	if err != nil {
		o.code, o.message, o.param, o.offset = err.Code, err.Message, err.Param, err.Offset
	}
	if r2, err2 := sizes.Finish(); r2 != r || (err == nil) != (err2 == nil) || err != nil && *err != *err2 {
		o.code = Code(fmt.Sprintf("without a sink %+v, %v", r2, err2))
	}
	return o
}

// cut splits body at random places; n is the number of cuts.
func cut(r *rand.Rand, body []byte, n int) [][]byte {
	var out [][]byte
	for ; n > 0 && len(body) > 0; n-- {
		k := r.IntN(len(body) + 1)
		out, body = append(out, body[:k]), body[k:]
	}
	return append(out, body)
}

func endpoint(name string) *Endpoint {
	for i := range endpoints {
		if endpoints[i].Name == name {
			return &endpoints[i]
		}
	}
	panic("no endpoint " + name)
}

type member struct {
	key    string
	raw    json.RawMessage
	offset int64
}

// members lists an object's members in order, by encoding/json.
func members(body []byte) []member {
	d := json.NewDecoder(bytes.NewReader(body))
	if _, err := d.Token(); err != nil {
		panic(err)
	}
	var out []member
	for d.More() {
		k, err := d.Token()
		if err != nil {
			panic(err)
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			panic(err)
		}
		out = append(out, member{k.(string), raw, d.InputOffset() - int64(len(raw))})
	}
	return out
}

func elements(raw []byte) (out []json.RawMessage) {
	if err := json.Unmarshal(raw, &out); err != nil {
		panic(err)
	}
	return out
}

func kindOf(raw []byte) Kind {
	switch raw[0] {
	case '"':
		return KindString
	case '{':
		return KindObject
	case '[':
		return KindArray
	case 't':
		return KindTrue
	case 'f':
		return KindFalse
	case 'n':
		return KindNull
	}
	return KindNumber
}

func decoded(raw []byte) (s string) {
	if err := json.Unmarshal(raw, &s); err != nil {
		panic(err)
	}
	return s
}

func compacted(raw []byte) string {
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil {
		panic(err)
	}
	return b.String()
}

// lane joins values as the scanner promises to.
type laneText struct {
	b strings.Builder
	n int
}

func (l *laneText) add(s string) {
	if l.b.Len() > 0 {
		l.b.WriteByte(' ')
	}
	l.b.WriteString(s)
	l.n++
}

// text adds the value of a text field.
func (l *laneText) text(raw []byte) {
	switch kindOf(raw) {
	case KindString:
		l.add(decoded(raw))
	case KindObject, KindArray:
		l.add(compacted(raw))
	}
}

// oracleChat is the dumb reader of a valid chat or completions body (an object without a byte order mark).
func oracleChat(body []byte, completions bool) outcome {
	o := outcome{Result: Result{ModelOffset: -1, MaxTokens: -1, Bytes: int64(len(body))}}
	o.InsertOffset = int64(bytes.IndexByte(body, '{')) + 1
	var prompt, preamble, salt, session laneText
	models, dup := 0, int64(0)
	var model, required, embeds json.RawMessage
	maxOld, maxNew := int64(-1), int64(-1)
	all := members(body)
	o.EmptyObject = len(all) == 0
	whole := func(raw []byte) int64 {
		var n int64
		if bytes.ContainsAny(raw, ".eE-") || json.Unmarshal(raw, &n) != nil || kindOf(raw) != KindNumber || n > 1<<53 {
			return -1
		}
		return n
	}
	for _, m := range all {
		switch {
		case m.key == "model":
			if models++; models == 1 {
				model, o.ModelOffset = m.raw, m.offset
			} else if models == 2 {
				dup = m.offset
			}
		case m.key == "stream":
			o.Stream = string(m.raw) == "true"
		case m.key == "max_tokens":
			maxOld = whole(m.raw)
		case m.key == "max_completion_tokens", m.key == "max_output_tokens":
			maxNew = whole(m.raw)
		case m.key == "cache_salt":
			if kindOf(m.raw) == KindString {
				salt.text(m.raw)
			}
		case m.key == "prompt_cache_key":
			if kindOf(m.raw) == KindString {
				session.text(m.raw)
			}
		case !completions && m.key == "tools":
			preamble.text(m.raw)
		case !completions && m.key == "messages":
			required = m.raw
			if kindOf(m.raw) != KindArray {
				continue
			}
			for _, e := range elements(m.raw) {
				if kindOf(e) != KindObject {
					continue
				}
				for _, x := range members(e) {
					if x.key == "content" {
						prompt.text(x.raw)
					}
				}
			}
		case completions && m.key == "prompt_embeds":
			if kindOf(m.raw) != KindNull {
				embeds = m.raw
			}
		case completions && m.key == "prompt":
			required = m.raw
			o.TokenIDs += prompt.prompts(m.raw)
		}
	}
	o.MaxTokens = maxOld
	if maxNew >= 0 {
		o.MaxTokens = maxNew
	}
	o.prompt, o.preamble = prompt.b.String(), preamble.b.String()
	o.salt, o.session = salt.b.String(), session.b.String()
	o.PromptBytes, o.PreambleBytes = int64(len(o.prompt)), int64(len(o.preamble))
	o.TextValues = prompt.n + preamble.n
	if model != nil && (kindOf(model) == KindString || kindOf(model) == KindNull) {
		o.ModelLength = len(model)
	}
	if model != nil && kindOf(model) == KindString {
		o.Model = decoded(model)
	}
	want, name := KindArray, "messages"
	if completions {
		want, name = KindString|KindArray, "prompt"
	}
	switch {
	case models > 1:
		o.code, o.param, o.offset = CodeDuplicateParameter, "model", dup
	case model == nil || kindOf(model) == KindNull:
		o.code, o.param, o.offset = CodeMissingParameter, "model", -1
	case kindOf(model) != KindString || o.Model == "":
		o.code, o.param, o.offset = CodeInvalidValue, "model", o.ModelOffset
	case (required == nil || kindOf(required) == KindNull) && embeds == nil:
		o.code, o.param, o.offset = CodeMissingParameter, name, -1
	case required == nil || kindOf(required) == KindNull:
	case kindOf(required)&want == 0, !completions && len(elements(required)) == 0:
		o.code, o.param, o.offset = CodeInvalidValue, name, -1
	}
	return o
}

// prompts adds a completions prompt and returns the number of token ids.
func (l *laneText) prompts(raw []byte) (ids int64) {
	switch kindOf(raw) {
	case KindString:
		l.add(decoded(raw))
	case KindArray:
		es := elements(raw)
		for i, e := range es {
			switch kindOf(e) {
			case KindString:
				l.add(decoded(e))
			case KindNumber, KindArray: // from here on everything is compact JSON
				rest := make([]string, 0, len(es))
				for _, x := range es[i:] {
					rest = append(rest, compacted(x))
					switch kindOf(x) {
					case KindNumber:
						ids++
					case KindArray:
						for _, y := range elements(x) {
							if kindOf(y) == KindNumber {
								ids++
							}
						}
					}
				}
				l.add(strings.Join(rest, ","))
				return ids
			}
		}
	}
	return ids
}

// generator writes random documents that lean towards what the scanner looks at.
type generator struct {
	*rand.Rand
	b bytes.Buffer
}

func (g *generator) pick(s ...string) string { return s[g.IntN(len(s))] }

func (g *generator) ws() {
	if g.IntN(4) == 0 {
		g.b.WriteString(g.pick(" ", "\n  ", "\t", "\r\n"))
	}
}

func (g *generator) str(s string) {
	g.b.WriteByte('"')
	for _, r := range s {
		switch {
		case (r == '\n' || r == '"' || r == '\\') && g.IntN(8) > 0:
			g.b.WriteString(map[rune]string{'\n': `\n`, '"': `\"`, '\\': `\\`}[r])
		case r < ' ' || r == '"' || r == '\\' || g.IntN(12) == 0:
			if r > 0xFFFF {
				r -= 0x10000
				fmt.Fprintf(&g.b, `\u%04x\u%04X`, 0xD800+r>>10, 0xDC00+r&0x3FF)
				continue
			}
			fmt.Fprintf(&g.b, `\u%04x`, r)
		default:
			g.b.WriteRune(r)
		}
		switch g.IntN(30) {
		case 0:
			g.b.WriteString(g.pick(`\n`, `\"`, `\\`, `\/`, `\t`, `\b`, `\f`, `\r`))
		case 1:
			if g.IntN(4) == 0 {
				g.b.WriteString(g.pick(`\ud800`, `\uDC00`, `\ud83d\ude00`, `\ud83dx`, `\ud83d\n`, `\ud83d\ud83d\ude00`))
			}
		}
	}
	g.b.WriteByte('"')
}

func (g *generator) word() string {
	return g.pick("", "a", "model", "hello there, how are you today my friend of old", "日本語のテキスト", "😀 smile", "x\ny", `q"uote`,
		strings.Repeat("long ", g.IntN(40)), strings.Repeat("\"a\" \\b\n", g.IntN(20)))
}

func (g *generator) list(open, end byte, n int, item func(i int)) {
	g.b.WriteByte(open)
	g.ws()
	for i := range n {
		if i > 0 {
			g.b.WriteByte(',')
			g.ws()
		}
		item(i)
		g.ws()
	}
	g.b.WriteByte(end)
}

func (g *generator) object(keys []string, value func(key string)) {
	g.list('{', '}', len(keys), func(i int) {
		g.str(keys[i])
		g.ws()
		g.b.WriteByte(':')
		g.ws()
		value(keys[i])
	})
}

func (g *generator) any(depth int) {
	n := 8
	if depth <= 0 {
		n = 6
	}
	switch g.IntN(n) {
	case 0, 1:
		g.str(g.word())
	case 2:
		g.b.WriteString(g.pick("0", "-0", "12", "-7.5", "1e9", "2E-3", "0.25", "123456789012345678901234567890", "512"))
	case 3:
		g.b.WriteString("true")
	case 4:
		g.b.WriteString("false")
	case 5:
		g.b.WriteString("null")
	case 6:
		g.list('[', ']', g.IntN(4), func(int) { g.any(depth - 1) })
	default:
		g.object(g.keys(g.IntN(4)), func(string) { g.any(depth - 1) })
	}
}

func (g *generator) keys(n int) (out []string) {
	for range n {
		out = append(out, g.pick("role", "content", "model", "text", "x", "", "messages", "日", "a key that is longer than any we look for"))
	}
	return out
}

// body writes a chat or completions body; most are well-formed requests.
func (g *generator) body(completions bool) []byte {
	g.b.Reset()
	g.ws()
	var keys []string
	for _, k := range []string{"model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "tools", "temperature", "prompt_embeds", "cache_salt", "prompt_cache_key"} {
		switch {
		case g.IntN(8) == 0 || k == "prompt_embeds" && g.IntN(6) > 0:
		case k == "model" && g.IntN(12) == 0:
			keys = append(keys, k, k)
		default:
			keys = append(keys, k)
		}
	}
	g.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	g.object(keys, func(k string) {
		if g.IntN(10) == 0 {
			g.any(3)
			return
		}
		switch k {
		case "model":
			g.str(g.pick("m", "qwen/qwen3-8b", "模型", strings.Repeat("long/", 30)))
		case "messages":
			g.list('[', ']', g.IntN(5), func(int) {
				g.object([]string{"role", "content", g.pick("name", "content")}, func(k string) {
					if k == "role" || g.IntN(3) > 0 {
						g.str(g.word())
						return
					}
					g.any(3)
				})
			})
		case "prompt":
			switch g.IntN(4) {
			case 0:
				g.str(g.word())
			case 1:
				g.list('[', ']', g.IntN(4), func(int) { g.str(g.word()) })
			case 2:
				g.list('[', ']', g.IntN(9), func(i int) { fmt.Fprint(&g.b, g.IntN(200000)) })
			default:
				g.list('[', ']', g.IntN(4), func(int) { g.list('[', ']', g.IntN(4), func(int) { g.any(1) }) })
			}
		case "stream":
			g.b.WriteString(g.pick("true", "false"))
		case "stream_options":
			g.object([]string{"include_usage", "x"}, func(string) { g.b.WriteString(g.pick("true", "false", "null")) })
		case "max_tokens", "max_completion_tokens":
			g.b.WriteString(g.pick("1", "0", "4096", "1.5", "-1", "9007199254740992", "9007199254740993"))
		default:
			g.any(4)
		}
	})
	g.ws()
	return bytes.Clone(g.b.Bytes())
}
