package filter

import (
	"math"
	"math/rand/v2"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/scorer"
)

// The error codes of a request that the client has to mend. Those of the body
// are package openai's.
const (
	codeModelNotFound   = string(openai.CodeModelNotFound)
	codeInvalidStrategy = string(openai.CodeInvalidRoutingStrategy)
	codeTooLarge        = string(openai.CodeRequestTooLarge)
)

// detailsPrefix begins every response_code_details of shunt's.
const detailsPrefix = "shunt_"

// drop ends the request with a drop reason: the one constructor of 429, 503
// and 500.
func (r *Request) drop(reason DropReason, message string, v *Verdict) {
	r.pool.counters.drops[reason].Inc()
	status := reason.Status()
	v.Action, v.Destination = Reply, ""
	v.unchange()
	v.text("reason", reason.String())
	r.nameModels(v)
	v.Reply.Status = status
	v.Reply.Headers = append(v.Reply.Headers, Header{HeaderDropReason, reason.String()})
	if least, most := reason.retryAfter(); most > 0 {
		v.Reply.Headers = append(v.Reply.Headers, Header{"retry-after", strconv.Itoa(retryIn(least+rand.IntN(most-least+1), r.wait.drain))})
	}
	r.reply(status, reason.String(), message, "", reason.grpcStatus(), v)
	r.word.Store(stateDone) // last: what panics before has not answered
}

// maxRetryAfter is the longest that a client is told to stay away, in seconds.
const maxRetryAfter = 30

// retryIn adds the time that a queue needs to the seconds drawn for a client.
func retryIn(seconds int, drain time.Duration) int {
	return min(maxRetryAfter, seconds+int(math.Ceil(drain.Seconds())))
}

// refuse ends the request with an error that its client has to mend.
func (r *Request) refuse(status int, code, message, param string, v *Verdict) {
	r.pool.counters.refused(code)
	v.Action, v.Destination = Reply, ""
	v.unchange()
	v.text("reason", code)
	r.nameModels(v)
	v.Reply.Status = status
	const invalidArgument = 3
	r.reply(status, code, message, param, invalidArgument, v)
	r.word.Store(stateDone)
}

// reasonAnswer is the metadata reason of what is answered from the pool: no
// error, but a reply of ours, by which Envoy's local_reply_config knows it.
const reasonAnswer = "models"

// serve ends the request with what it asked for.
func (r *Request) serve(body []byte, v *Verdict) {
	r.pool.counters.answers.Inc()
	v.Action, v.Destination = Reply, ""
	v.unchange()
	v.text("reason", reasonAnswer)
	v.Reply.Status = 200
	v.Reply.Details = detailsPrefix + reasonAnswer
	v.Reply.Headers = append(v.Reply.Headers, Header{"content-type", "application/json"})
	v.Reply.Body = body
	r.word.Store(stateDone)
}

// nameModels tells the model, and where it was rewritten the other one too.
func (r *Request) nameModels(v *Verdict) {
	v.text("model", r.asked)
	if r.model != r.asked {
		v.text("target_model", r.model)
	}
	r.tellIdentity(v)
	r.tellPriority(v)
}

func (r *Request) reply(status int, code, message, param string, grpc int, v *Verdict) {
	v.Reply.Details = detailsPrefix + code
	if r.grpc {
		v.Reply.GRPC, v.Reply.Message = grpc, message
		return
	}
	style := openai.StyleOpenAI
	if r.rules != nil {
		style = r.rules.Style
	}
	v.Reply.Headers = append(v.Reply.Headers, Header{"content-type", "application/json"})
	v.Reply.Body = openai.AppendError(v.Reply.Body, style, status, code, message, param)
}

// guarded are the methods that guard is deferred by.
var guarded = []string{
	"headers", "body", "more", "too large", "trailers", "resume", "served", "response", "response body", "finish", "wake", "evict", "evicted",
}

// guard is deferred by every method that a door calls: a panic becomes a reply
// or, by config, a least-request pick, and a counter. v is nil where nothing
// can be answered any more.
func (r *Request) guard(where string, v *Verdict) {
	cause := recover()
	if cause == nil {
		return
	}
	r.gen.runtime.fault(where, cause, debug.Stack())
	if v == nil {
		return
	}
	v.Reset()
	for h := header(0); spoofable>>h != 0; h++ {
		v.Remove = append(v.Remove, headerNames[h]) // whatever was seen of them
	}
	switch {
	case where == "trailers", where == "served", where == "evicted":
		return // they decide nothing: the request stays as it was
	case r.word.Load() == stateDone:
		return // one caught after a reply sends no second
	}
	r.undo()
	if r.set == nil || r.pool == nil {
		r.set = r.gen.settings.Load()
		r.pool = r.set.first
	}
	if r.set.cfg.OnInternalError == onErrorRoute && where != "too large" && r.routeAnyway(where, v) {
		return
	}
	r.drop(DropInternal, "an internal error occurred", v)
}

// undo gives back what an interrupted decision held.
func (r *Request) undo() {
	switch r.word.Swap(stateNew) {
	case stateWaiting:
		r.gen.runtime.room.Remove(&r.wait.waiter)
	case stateGranted:
		r.giveUp()
	case stateRouted:
		r.giveBack(r.gen.runtime.now(), false, flowcontrol.Finished)
	}
}

// routeAnyway picks by least-request and reports whether it could. Where the
// fault came before the model was known, it only does in a pool of one model:
// no fault of ours sends a request to a pod of another.
func (r *Request) routeAnyway(where string, v *Verdict) (ok bool) {
	defer func() {
		if cause := recover(); cause != nil {
			r.gen.runtime.fault("route anyway", cause, debug.Stack())
			r.undo()
			v.Metadata, v.ResponseHeaders = v.Metadata[:0], v.ResponseHeaders[:0]
			ok = false
		}
	}()
	if r.model != r.asked && (where == "headers" || where == "body") {
		return false // the verdict that would have rewritten it is lost
	}
	snap := r.pool.holder.Load()
	candidates := snap.All()
	if r.model != "" {
		candidates = snap.ForModel(r.model)
	} else if (where == "headers" || r.rules != nil) && len(snap.ModelNames()) > 1 {
		return false
	}
	if candidates == nil {
		return false
	}
	index := candidates.Index
	if r.subset != "" {
		index = inSubset(snap, index, r.subset)
	}
	if len(index) == 0 {
		return false
	}
	r.policy = scorer.LeastRequest()
	now := r.gen.runtime.now()
	r.send(snap, r.pick(snap, index, now, nil), now, v)
	return true
}

// maxQuoted bounds what a message repeats of a request: for gRPC it is a header.
const maxQuoted = 200

func quote(s string) string {
	if len(s) > maxQuoted {
		return strconv.Quote(strings.ToValidUTF8(s[:maxQuoted], "")) + "…"
	}
	return strconv.Quote(s)
}
