package filter

import (
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shuntproxy/shunt/internal/openai"
)

// ResponseHead is what a door tells of a response's headers. Strings are only
// borrowed for the call.
type ResponseHead struct {
	Status                       int
	ContentType, ContentEncoding string
	// End is true for a response without a body.
	End bool
}

// Edit cuts the bytes from From to before To out of piece Chunk of a response
// body. Named says that Verdict.Name goes in their place.
type Edit struct {
	Chunk, From, To int
	Named           bool
}

// answer is what a request keeps while its response is read.
type answer struct {
	reader openai.Reader
	name   string // raw JSON: what the model's name in the response becomes; "" leaves it
	sse    bool
	stored bool          // the response's id is known
	tokens int           // output tokens counted so far, one for each event with content
	first  time.Duration // from the pick to the first of them
}

// answers are reused: most of a response's life is waiting for its next chunk,
// but only streams that are read have one.
var answers = sync.Pool{New: func() any { return new(answer) }}

// watched reports whether the response may say something to the request's
// reader, or has to be changed.
func (r *Request) watched() bool {
	return r.rules != nil && (r.rules.Usage || r.renamed())
}

// renamed reports whether the client named another model than the engine did.
func (r *Request) renamed() bool {
	return r.asked != r.model && r.asked != "" && r.set.cfg.RestoreModelName
}

// Response is called with the headers of the upstream's response, where the
// verdict that routed the request had Watch set. Its verdict's Remove lists
// response headers, and Watch asks for ResponseBody.
func (r *Request) Response(h *ResponseHead, v *Verdict) {
	v.Reset()
	defer r.pass("response", v)
	inject(r.test, "response")
	if r.word.Load() != stateRouted || h.Status < 200 || h.Status > 299 || h.End {
		return
	}
	media, _, _ := strings.Cut(h.ContentType, ";")
	media = strings.ToLower(strings.TrimSpace(media))
	sse := media == "text/event-stream"
	switch {
	case h.ContentEncoding != "" && !strings.EqualFold(h.ContentEncoding, "identity"):
		r.pool.counters.unread[unreadEncoded].Inc()
		r.held.Mute()
		return
	case !sse && media != "application/json" && !strings.HasSuffix(media, "+json"):
		r.pool.counters.unread[unreadType].Inc()
		r.held.Mute()
		return
	}
	a := answers.Get().(*answer)
	*a = answer{reader: a.reader, sse: sse}
	if r.renamed() {
		a.name = string(openai.AppendString(nil, r.asked))
		v.Remove = append(v.Remove, "content-length")
	}
	a.reader.Reset(sse, a.name != "")
	if r.stores() {
		a.reader.WantID(a.name != "")
	}
	r.answer = a
	v.Watch = true
}

// ResponseBody takes the next pieces of a response's body, which are only
// borrowed. The verdict's Edits say what to change in them, and Watch asks for
// more.
func (r *Request) ResponseBody(chunks [][]byte, v *Verdict) {
	v.Reset()
	defer r.pass("response body", v)
	inject(r.test, "response body")
	a := r.answer
	if a == nil || r.word.Load() != stateRouted {
		return
	}
	v.Name = a.name
	for i, c := range chunks {
		a.reader.Write(c)
		for _, s := range a.reader.Spans() {
			v.Edits = append(v.Edits, Edit{Chunk: i, From: s.From, To: s.To, Named: s.Begins})
		}
	}
	if n := a.reader.ContentEvents(); n > a.tokens {
		now := r.gen.runtime.now()
		if a.tokens == 0 {
			a.first = now.Sub(r.decided)
			r.held.FirstToken(now)
		}
		r.held.Progress(int64(n), now)
		a.tokens = n
	}
	v.Watch = a.reader.More()
	if !a.stored && r.stores() && a.reader.ID() != 0 {
		a.stored = true
		r.pool.stored.add(a.reader.ID(), r.held.Live().Addr)
	}
}

// pass is deferred where a response is only looked at: a panic ends that, and
// the response goes on as it is.
func (r *Request) pass(where string, v *Verdict) {
	if cause := recover(); cause != nil {
		r.gen.runtime.fault(where, cause, debug.Stack())
		r.answer = nil
		v.Reset()
	}
}

// AppendEdited appends a response body's pieces, changed as Edits say, to dst.
func (v *Verdict) AppendEdited(dst []byte, chunks [][]byte) []byte {
	edits := v.Edits
	for i, c := range chunks {
		at := 0
		for ; len(edits) > 0 && edits[0].Chunk == i; edits = edits[1:] {
			dst = append(dst, c[at:edits[0].From]...)
			if edits[0].Named {
				dst = append(dst, v.Name...)
			}
			at = edits[0].To
		}
		dst = append(dst, c[at:]...)
	}
	return dst
}

// tokenCounts are what is known about a request's tokens; -1 is unknown.
type tokenCounts struct {
	prompt, completion, cached, total int64
	source                            usageSource
}

// usageSource is where token counts come from.
type usageSource uint8

const (
	usageAbsent    usageSource = iota // nothing is known
	usageReported                     // the engine said so
	usageEstimated                    // from the events of a stream, and the bytes of the prompt
	numUsageSources
)

func (s usageSource) String() string {
	return [numUsageSources]string{"absent", "reported", "estimated"}[s]
}

// estimate sets the prompt's tokens from its bytes, by what usage has said of
// the model's tokenizer; where it is given as ids they are counted.
func (r *Request) estimate(s *openai.Result) {
	if r.prompt = s.TokenIDs; r.prompt > 0 {
		return
	}
	r.text = s.PromptBytes + s.PreambleBytes
	r.prompt = r.pool.tokens.For(r.model).Estimate(r.text)
}

// counts tells what is known about tokens at the response's end. Where a
// stream says nothing, or was cut before it said all, its events with content
// are counted: an engine sends at least one token in each.
func (a *answer) counts(prompt int64, complete bool) tokenCounts {
	u := a.reader.Finish()
	c := tokenCounts{prompt: u.Prompt, completion: u.Completion, cached: u.Cached, total: u.Total(), source: usageReported}
	events := int64(a.reader.ContentEvents())
	complete = complete || a.reader.Done()
	switch {
	case !u.Said() && !a.sse, !u.Said() && events == 0:
		c.source = usageAbsent
		return c
	case !u.Said(), a.sse && !complete && events > u.Completion:
		c.source, c.completion = usageEstimated, events
		if c.prompt < 0 {
			c.prompt = prompt
		}
		c.total = c.prompt + c.completion
	}
	return c
}

// settle tells metrics, metadata and live load what the response said.
func (r *Request) settle(end End, now time.Time, v *Verdict) {
	if end.Answered && (end.Status == 429 || end.Status == 503) {
		r.held.Live().Pushback(now)
	}
	if end.Answered && end.Status >= 400 {
		r.pool.counters.upstreamErrors.WithLabelValues(strconv.Itoa(end.Status)).Inc()
	}
	a := r.answer
	if a == nil {
		return
	}
	r.answer = nil
	c := a.counts(r.prompt, end.Complete)
	failed := a.reader.Failed()
	if a.tokens > 0 {
		r.firstToken(a.first, v)
	}
	answers.Put(a)
	if failed {
		r.pool.counters.failedAnswers.Inc()
	}
	r.pool.counters.usage[c.source].Inc()
	if c.source == usageAbsent {
		return
	}
	v.text("usage", c.source.String())
	for _, n := range []struct {
		key   string
		value int64
	}{
		{"prompt_tokens", c.prompt}, {"completion_tokens", c.completion}, {"total_tokens", c.total}, {"cached_tokens", c.cached},
	} {
		if n.value >= 0 {
			v.number(n.key, float64(n.value))
		}
	}
	r.held.Progress(c.completion, now)
	if c.source == usageReported {
		r.pool.tokens.Learn(r.model, r.text, c.prompt)
	}
	r.counted.tokens(c)
}

// firstToken tells how long the first token of a stream took.
func (r *Request) firstToken(took time.Duration, v *Verdict) {
	v.number("ttft_ms", float64(took)/float64(time.Millisecond))
	r.pool.counters.firstToken.Observe(took.Seconds())
}
