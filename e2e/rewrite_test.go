package e2e

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/shuntproxy/shunt/internal/sim"
)

const rewriteHeader = "x-llm-d-model-name-rewrite"

// answerAll lets engines answer whatever model they are asked for.
func (w *world) answerAll(t *testing.T) {
	t.Helper()
	for _, e := range w.engines {
		if err := e.SetFaults(sim.Fault{Kind: sim.FaultStatus, Status: 200, Body: "ok"}); err != nil {
			t.Fatal(err)
		}
	}
}

// arrived checks that a request reached an engine with this body, and with this
// length announced: -1 for none.
func (w *world) arrived(t *testing.T, r reply, body string, length int64) sim.Received {
	t.Helper()
	if r.status != 200 {
		t.Fatalf("%v", r)
	}
	_, got := w.received(t, r.id)
	if got.BodySHA256 != sum(body) || got.BodyLen != int64(len(body)) {
		t.Errorf("%d bytes arrived, want the %d of %.300s", got.BodyLen, len(body), body)
	}
	if got.ContentLength != length {
		t.Errorf("content-length %d, want %d", got.ContentLength, length)
	}
	return got
}

// aroundModel is a JSON body without its model's value: what comes before, and
// what after.
type aroundModel struct{ before, after string }

func (a aroundModel) with(value string) string { return a.before + value + a.after }

// randomBody is a chat body with fields of all kinds in any order and spacing.
func randomBody(rng *rand.Rand) aroundModel {
	pick := func(of ...string) string { return of[rng.IntN(len(of))] }
	space := func() string { return pick("", "", " ", "\n\t", "\r\n  ") }
	str := func() string {
		text := `"`
		for range rng.IntN(12) {
			text += pick("a", "model", "é", "模型", "😀", `\n`, `\"`, `\\`, `\/`, `\u00e9`, `\ud83d\ude00`, `\u006d`, " ", `{`, `]`, `,`, `:`)
		}
		return text + `"`
	}
	var value func(depth int) string
	value = func(depth int) string {
		switch n := rng.IntN(8); {
		case n < 3 || depth > 3:
			return str()
		case n == 3:
			return pick("0", "-1.50", "1e+9", "0.1E-2", "123456789012345678901234567890", "1.0")
		case n == 4:
			return pick("true", "false", "null")
		case n < 7:
			text := "[" + space()
			for i := range rng.IntN(4) {
				if i > 0 {
					text += space() + "," + space()
				}
				text += value(depth + 1)
			}
			return text + space() + "]"
		default:
			text := "{" + space()
			for i := range rng.IntN(4) {
				if i > 0 {
					text += "," + space()
				}
				text += pick(str(), `"model"`) + space() + ":" + space() + value(depth+1)
			}
			return text + space() + "}"
		}
	}
	fields := []string{`"messages"` + space() + ":" + space() + `[{"role":"user","content":` + value(1) + "}]"}
	for i := range rng.IntN(6) {
		fields = append(fields, `"x`+strconv.Itoa(i)+`"`+space()+":"+space()+value(0))
	}
	rng.Shuffle(len(fields), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
	at := rng.IntN(len(fields) + 1)
	a := aroundModel{before: pick("", "\ufeff") + space() + "{" + space()}
	for _, f := range fields[:at] {
		a.before += f + space() + "," + space()
	}
	a.before += pick(`"model"`, `"mod\u0065l"`, `"\u006D\u006f\u0064\u0065\u006c"`) + space() + ":" + space()
	for _, f := range fields[at:] {
		a.after += space() + "," + space() + f
	}
	a.after += space() + "}" + space()
	return a
}

// TestOnlyTheModelValueChanges sends 1,000 random bodies, which arrive with
// another model and no other byte changed.
func TestOnlyTheModelValueChanges(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		w.answerAll(t)
		rng := rand.New(rand.NewPCG(7, 11))
		type job struct {
			body  aroundModel
			asked string
			chunk int // 0 announces the length
			h2    bool
		}
		jobs := make(chan job)
		var workers sync.WaitGroup
		for range 8 {
			workers.Go(func() {
				for j := range jobs {
					sent, want := j.body.with(j.asked), j.body.with(`"m"`)
					q := call{header: header(rewriteHeader, "m"), body: strings.NewReader(sent)}
					length := int64(len(want))
					if j.chunk > 0 {
						q.body, length = &pieces{sent, j.chunk}, -1
					}
					c := w.h1
					if j.h2 {
						c = w.h2
					}
					w.arrived(t, w.must(t, c, q), want, length)
				}
			})
		}
		for i := range 1000 {
			j := job{body: randomBody(rng), h2: i%3 == 0}
			j.asked = []string{`"other"`, `"\u00e9\ud83d\ude00\""`, `"org/模型-😀"`, `null`, `"` + strings.Repeat("long", 200) + `"`}[rng.IntN(5)]
			if i%2 == 0 {
				j.chunk = 1 + rng.IntN(300)
			}
			jobs <- j
		}
		close(jobs)
		workers.Wait()
		w.waitLoad(t, 0, 0)
	})
}

// TestRewriteByHeader: which header counts, and what it does to bodies of all
// forms.
func TestRewriteByHeader(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{pools: "", config: "startupHold: 5s\n"})
		w.answerAll(t)
		body := aroundModel{`{"model": `, `,"messages":[{"role":"user","content":"\u00e9 é"}]}`}
		const alias = "x-gateway-model-name-rewrite"
		for _, c := range []struct {
			name  string
			pairs []string
			want  string // the model at the engine, raw
			asked string
		}{
			{"canonical", []string{rewriteHeader, "m"}, `"m"`, "other"},
			{"deprecated alias", []string{alias, "m"}, `"m"`, "other"},
			{"canonical beats alias", []string{alias, "nobody", rewriteHeader, "m"}, `"m"`, "other"},
			{"canonical beats alias in the other order", []string{rewriteHeader, "m", alias, "nobody"}, `"m"`, "other"},
			{"the last of duplicates", []string{rewriteHeader, "nobody", rewriteHeader, "m"}, `"m"`, "other"},
			{"an empty canonical header is absent", []string{rewriteHeader, "", alias, "m"}, `"m"`, "other"},
			{"an empty header", []string{rewriteHeader, ""}, `"m"`, "m"},
			{"the same model", []string{rewriteHeader, "m"}, `"m"`, "m"},
		} {
			for proto, client := range w.protocols() {
				t.Run(c.name+" "+proto, func(t *testing.T) {
					sent := body.with(`"` + c.asked + `"`)
					r := w.must(t, client, call{header: header(c.pairs...), body: strings.NewReader(sent)})
					got := w.arrived(t, r, body.with(c.want), int64(len(body.with(c.want))))
					for _, name := range []string{rewriteHeader, alias} {
						if v, ok := got.Headers[http.CanonicalHeaderKey(name)]; ok {
							t.Errorf("%s: %v arrived", name, v)
						}
					}
					if a := w.access(t, r.id); a.at("shunt", "model") != c.asked || a.at("shunt", "target_model") != "m" {
						t.Errorf("the log says %v", a.at("shunt"))
					}
				})
			}
		}
		for asked, want := range map[string]float64{"other": 12, "m": 4} { // no name that nothing of ours knows is a label, but "other"
			if n := w.metric(t, "shunt_requests_total", "model", asked, "target_model", "m"); n != want {
				t.Errorf("%v requests for %s are counted as such for m, want %v", n, asked, want)
			}
		}
		t.Run("any case", func(t *testing.T) {
			id := newID()
			c := w.dial(t)
			c.send(t, rawRequest("POST", "/v1/chat/completions", "X-LLM-D-Model-Name-REWRITE: m\r\nx-test-id: "+id+"\r\n", body.with(`"x"`)))
			r := c.read(t)
			r.id = id
			w.arrived(t, r, body.with(`"m"`), int64(len(body.with(`"m"`))))
		})
		long := aroundModel{`{"messages":[{"role":"user","content":"` + strings.Repeat("word ", 1<<18) + `"}],"model":`, `,"max_tokens":1}`}
		most := aroundModel{`{"model":`, `,"messages":[{"role":"user","content":"` + strings.Repeat("x", limit-73) + `"}]}`}
		asked := `"` + strings.Repeat("n", 10) + `"`
		forms := map[string]func(sent string) (call, bool){
			"announced": func(sent string) (call, bool) { return call{body: strings.NewReader(sent)}, true },
			"chunked":   func(sent string) (call, bool) { return call{body: &pieces{sent, 10000}}, false },
			"with trailers": func(sent string) (call, bool) {
				return call{body: &pieces{sent, 10000}, length: -1, trailer: http.Header{"X-Sum": {"kept"}}}, false
			},
		}
		for name, b := range map[string]aroundModel{"short": body, "after a 1 MB prompt": long, "at the limit": most} {
			for form, make := range forms {
				for proto, client := range w.protocols() {
					for _, wait := range []string{"", "wait-10m"} {
						t.Run(fmt.Sprint(name, " ", form, " ", proto, " ", wait), func(t *testing.T) {
							sent := b.with(asked)
							q, announced := make(sent)
							q.header = header(rewriteHeader, "m", "x-shunt-test", wait)
							want := b.with(`"m"`)
							length := int64(len(want))
							if !announced {
								length = -1
							}
							b := w.begin(t, client, q)
							if wait != "" {
								w.waitLoad(t, 0, 1)
								w.adminDo("POST", "/test/grant?n=1")
							}
							r, err := b.wait()
							if err != nil {
								t.Fatal(err)
							}
							got := w.arrived(t, r, want, length)
							if q.trailer != nil && got.Trailers.Get("X-Sum") != "kept" {
								t.Errorf("trailers %v", got.Trailers)
							}
						})
					}
				}
			}
		}
		t.Run("longer than it was, at the limit", func(t *testing.T) {
			b := aroundModel{`{"model":`, `,"messages":[{"role":"user","content":"` + strings.Repeat("x", limit-55) + `"}]}`}
			sent := b.with(`"q"`)
			if len(sent) != limit {
				t.Fatalf("%d bytes", len(sent))
			}
			long := strings.Repeat("m", 4096)
			// No endpoint serves it: what counts is that Envoy's limits have room.
			r := w.must(t, w.h2, call{header: header(rewriteHeader, long), body: strings.NewReader(sent)})
			if e := errorOf(t, r).Error; r.status != 400 || e.Code != "model_not_found" {
				t.Errorf("%v", r)
			}
			r = w.must(t, w.h2, call{header: header(rewriteHeader, long+"m"), body: strings.NewReader(sent)})
			if e := errorOf(t, r).Error; r.status != 400 || e.Code != "invalid_value" || e.Param == nil || *e.Param != rewriteHeader {
				t.Errorf("%v", r)
			}
		})
		w.waitLoad(t, 0, 0)
	})
}

// TestRewriteLongerAtTheLimit: a body of the largest size may grow by its model.
func TestRewriteLongerAtTheLimit(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		target := strings.Repeat("m", 4096)
		s := setup{engine: sim.Config{Models: []string{target}}, edit: func(b doc) { // no help from Envoy's settings
			if d.raisesLimit {
				delete(b.virtualHost(), "request_body_buffer_limit")
			}
		}}
		s.pools = "pools: {default: {static: []}}\n"
		w := prepareWorld(t, d, s)
		w.setup.pools = "pools: {default: {static: " + endpoints(target, w.engines...) + "}}\n"
		w.options.Document = []byte(w.document(""))
		w.run(t)
		w.answerAll(t)
		b := aroundModel{`{"model":`, `,"messages":[{"role":"user","content":"` + strings.Repeat("x", limit-55) + `"}]}`}
		for proto, c := range w.protocols() {
			for _, chunked := range []bool{true, false} {
				q := call{header: header(rewriteHeader, target), body: io.Reader(strings.NewReader(b.with(`"q"`)))}
				want := b.with(`"` + target + `"`)
				length := int64(len(want))
				if chunked {
					q.body, length = &pieces{b.with(`"q"`), block}, -1
				}
				t.Run(fmt.Sprint(proto, " chunked ", chunked), func(t *testing.T) { w.arrived(t, w.must(t, c, q), want, length) })
			}
		}
	})
}

// TestRewriteRules: rules of the configuration, and models that requests lack.
func TestRewriteRules(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		const rules = `
models: {known: [{name: m, aliases: [m-latest]}]}
rewrites:
- {targets: [{model: m, weight: 3}, {model: n, weight: 1}]}
- {matches: [{model: old}], targets: [{model: n}]}
`
		w := prepareWorld(t, d, setup{engines: 1})
		w.engines = append(w.engines, startEngine(t, sim.Config{Models: []string{"n"}}))
		w.setup.pools = "pools: {default: {static: " + strings.TrimSuffix(endpoints("m", w.engines[0]), "]") + "," +
			strings.TrimPrefix(endpoints("n", w.engines[1]), "[") + "}}\n"
		w.options.Document = []byte(w.document(rules))
		w.run(t)
		send := func(t *testing.T, body string, pairs ...string) (sim.Received, int) {
			t.Helper()
			r := w.must(t, w.h2, call{body: strings.NewReader(body), header: header(pairs...)})
			if r.status != 200 {
				t.Fatalf("%s: %v", body, r)
			}
			e, got := w.received(t, r.id)
			for i := range w.engines {
				if w.engines[i] == e {
					if want := []string{"m", "n"}[i]; got.Model != want {
						t.Errorf("engine of %s got model %q", want, got.Model)
					}
					return got, i
				}
			}
			panic("no such engine")
		}
		const rest = `"messages":[{"role":"user","content":"hi"}]}`
		for _, c := range []struct {
			name, body string
			pairs      []string
			want       string // the body that arrives
		}{
			{"an exact rule", `{"model":"old",` + rest, nil, `{"model":"n",` + rest},
			{"the header beats an exact rule", `{"model":"old",` + rest, []string{rewriteHeader, "m"}, `{"model":"m",` + rest},
			{"the header supplies a missing model", `{` + rest, []string{rewriteHeader, "n"}, `{"model":"n",` + rest},
			{"the header supplies a null model", `{"model": null ,` + rest, []string{rewriteHeader, "n"}, `{"model": "n" ,` + rest},
			{"the header may name an alias", `{"model":"x",` + rest, []string{rewriteHeader, "m-latest"}, `{"model":"m",` + rest},
			{"the last header, by its old name", `{"model":"x",` + rest, []string{"x-gateway-model-name-rewrite", "n"}, `{"model":"n",` + rest},
		} {
			if got, _ := send(t, c.body, c.pairs...); got.BodySHA256 != sum(c.want) {
				t.Errorf("%s: another body than %s arrived (%d bytes, model %q)", c.name, c.want, got.BodyLen, got.Model)
			}
		}
		shares := [2]int{}
		for i := range 400 {
			body := []string{`{` + rest, `{"model":"anything",` + rest}[i%2]
			got, engine := send(t, body)
			shares[engine]++
			want := fmt.Sprintf(`{"model":"%s",%s`, []string{"m", "n"}[engine], rest)
			if got.BodySHA256 != sum(want) {
				t.Errorf("%s: another body than %s arrived", body, want)
			}
		}
		if shares[0] < 230 || shares[1] < 40 { // 300 and 100, by far
			t.Errorf("shares %v, want about 300 and 100", shares)
		}
		if n := w.metric(t, "shunt_requests_total", "model", "old", "target_model", "n"); n != 1 {
			t.Errorf("%v requests counted from old to n", n)
		}
		if n := w.metric(t, "shunt_requests_total", "model", "other", "target_model", "m") +
			w.metric(t, "shunt_requests_total", "model", "other", "target_model", "n"); n < 200 {
			t.Errorf("%v requests counted from anything", n)
		}
		w.waitLoad(t, 0, 0)
	})
}
