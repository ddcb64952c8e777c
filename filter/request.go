package filter

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// Host is what a door does for one request beside its callbacks.
type Host interface {
	// Metadata returns a string of Envoy's dynamic metadata, "" where there is
	// none. It is called on the request's worker, in Headers, and may be borrowed
	// for the callback.
	Metadata(namespace, key string) string
	// SubsetHint returns the strings of the list HeaderSubset in Envoy's dynamic
	// metadata MetadataSubset, and whether there is such a list. As for Metadata.
	SubsetHint() ([]string, bool)
	// PrepareWait is called on the request's worker before the request waits.
	PrepareWait()
	// Post leads to one call of Request.Resume on the request's worker. Any
	// goroutine may call it; after Finish it does nothing.
	Post()
	// Evictable reports, on the request's worker, whether the door can end the
	// request once it was sent; streams is whether the client asked for a stream.
	Evictable(streams bool) bool
	// PostEvict leads to a call of Request.Evicted on the request's worker: at once,
	// or when the engine next sends something. Any goroutine may call it; after
	// Finish it does nothing.
	PostEvict()
}

// The states of a request's word. The worker moves it, but for the step from
// waiting to granted, which is Wake's; who loses the race for the word gives
// back what it holds.
const (
	stateNew     uint32 = iota // being read or decided
	stateWaiting               // in a queue
	stateGranted               // woken, Resume is posted
	stateRouted                // holds a reservation
	stateDone                  // ended, or answered by shunt
)

// Request is one HTTP stream. All methods but Wake, Evict and Evicting are
// called on its worker, in the order of their declaration; Resume comes once for
// each Wait, and Evicted at any time between the verdict that routed the request
// and Finish.
type Request struct {
	// immutable after Init
	host Host
	gen  *Generation

	word     atomic.Uint32
	wait     waiting
	eviction eviction

	// of the worker
	set       *settings // read once, at headers
	pool      *Pool
	rules     *openai.Endpoint
	policy    *scorer.Policy
	subset    string
	identity  identity
	asked     string           // the model that the client named, "" for none
	model     string           // the model that the engine gets: asked, or what it was rewritten to; "" for none
	size      int64            // of the body, while it waits
	bodyRoom  int64            // what it takes of Runtime.bodies
	held      pool.Reservation // of the endpoint it was sent to
	prompt    int64            // its tokens, as far as its bytes tell
	text      int64            // its bytes, 0 where it was given as token ids
	maxTokens int64            // the most it may generate, -1 if it does not say
	prefixState
	counted *modelCounters
	answer  *answer // while the response is read
	decided time.Time
	waited  time.Duration
	why     *scorer.Explanation // to be filled in by the pick, nil where nobody wants it
	grpc    bool
	explain bool
	sized   bool // the body's length is announced
	streams bool // it asked for a stream
	test    string
}

// Init starts a request under a generation. The generation outlives it.
func (r *Request) Init(host Host, gen *Generation) { r.host, r.gen = host, gen }

// Headers decides about a request that has no body or needs none read, and
// says what a client may not send. route is the most specific one, or nil.
func (r *Request) Headers(h *Head, endStream bool, route *Route, v *Verdict) {
	v.Reset()
	defer r.guard("headers", v)
	inject(h.Test, "headers")
	now := r.gen.runtime.now()
	set := r.gen.settings.Load()
	r.set, r.grpc = set, h.grpc()
	if injecting {
		r.test = strings.Clone(h.Test)
	}

	if (h.seen&aliasBits)|h.again != 0 {
		r.countHeaders(h)
	}
	strip := uint32(spoofable)
	if set.cfg.SubsetHeader {
		strip &^= 1 << hdrDestinationSubset
	}
	if h.seen&strip != 0 {
		r.gen.runtime.metrics.spoofed.Inc()
	}
	disabled := route != nil && route.Disabled
	if !disabled && !set.cfg.ForwardControlHeaders {
		strip |= control
	}
	if set.cfg.TrustMetadata != "" {
		strip |= identityBits
	}
	v.Remove = h.removals(strip, v.Remove)
	if disabled {
		r.word.Store(stateDone)
		return
	}
	if !r.choosePool(h, route, v) {
		return
	}

	r.identify(h)
	r.prioritize()
	if id := r.lookup(h); !r.readsBody() {
		r.byHeaders(h, id, now, v)
		return
	}
	if !r.readRewrite(h, v) {
		return
	}
	if !r.openBody(h, v) {
		return
	}
	limit := int64(set.cfg.Limits.RequestBody)
	switch {
	case h.ContentLength > limit:
		r.tooLarge(v)
	case endStream:
		r.Body(nil, v)
	default:
		r.takeBody(h, limit, v)
	}
}

// choosePool settles pool, policy and what else the headers ask for, or
// answers.
func (r *Request) choosePool(h *Head, route *Route, v *Verdict) bool {
	set := r.set
	r.pool, r.policy = set.first, set.policy
	if route != nil {
		if route.Pool != "" {
			r.pool = set.pools[route.Pool]
		}
		if route.policy != nil {
			r.policy = route.policy
		}
	}
	if route != nil && route.broken {
		r.drop(DropNoEndpoints, "the route's configuration was refused; see the log", v)
		return false
	}
	if r.pool == nil {
		r.pool = set.first // for the counters
		r.drop(DropNoEndpoints, "the route names pool "+route.Pool+", which no configuration defines", v)
		return false
	}
	r.explain = set.cfg.Explain.Header && h.value(hdrExplain) == "1"
	r.subset = r.readSubset(h)
	if asked := h.value(hdrRoutingStrategy); asked != "" && len(set.allowed) > 0 {
		p, ok := set.policyOf(asked)
		if !ok {
			r.refuse(400, codeInvalidStrategy, "routing-strategy "+quote(asked)+" is not allowed here; allowed: "+
				strings.Join(set.cfg.AllowedPolicies, ", "), "", v)
			return false
		}
		r.policy = p
	}
	r.wantExplanation(h)
	if r.policy.NeedsSession() {
		r.session = sessionOf(h, set.cfg.Sessions.Cookie)
	}
	return true
}

// Body takes the whole body of a request that was answered with NeedBody, in
// as many pieces as it lies in memory. They are only borrowed. A body that
// ended in trailers comes here too.
func (r *Request) Body(chunks [][]byte, v *Verdict) {
	v.Reset()
	defer r.guard("body", v)
	inject(r.test, "body")
	r.body(chunks, v)
	r.releaseRoom(v)
}

func (r *Request) body(chunks [][]byte, v *Verdict) {
	body := readers.Get().(*bodyReader)
	defer readers.Put(body)
	r.size = 0
	rewriter := r.rewriter() // once: what is kept of the body is by what may be rewritten
	result, decoded, ok := r.readBody(body, chunks, rewriter, v)
	if !ok {
		return
	}
	snap := r.pool.holder.Load()
	if r.setModels(snap, rewriter, result.Model, r.identity.wishes().rewrite, rand.Uint64()) {
		r.editModel(&result, decoded, v)
	}
	if result.Previous != 0 {
		r.follow(result.Previous)
	}
	r.streams, r.maxTokens = result.Stream, result.MaxTokens
	r.estimate(&result)
	r.prefix(body)
	r.decideOn(snap, r.gen.runtime.now(), v)
	r.keepPrefix(v.Action == Wait)
}

// TooLarge answers a request whose body, or its announced length, is over
// BodyLimit.
func (r *Request) TooLarge(v *Verdict) {
	v.Reset()
	defer r.guard("too large", v)
	inject(r.test, "too large")
	r.tooLarge(v)
	r.releaseRoom(v)
}

func (r *Request) tooLarge(v *Verdict) {
	r.refuse(413, codeTooLarge, "the request body is over the limit of "+r.set.cfg.Limits.RequestBody.String()+
		" (limits.requestBody)", "", v)
}

// Trailers says what a client may not send as a trailer.
func (r *Request) Trailers(h *Head, v *Verdict) {
	v.Reset()
	defer r.guard("trailers", v)
	inject(r.test, "trailers")
	v.Remove = h.removals(spoofable, v.Remove)
}

func (r *Request) decide(now time.Time, v *Verdict) { r.decideOn(r.pool.holder.Load(), now, v) }

// decideOn picks an endpoint from one snapshot, or waits, or answers.
func (r *Request) decideOn(snap *pool.Snapshot, now time.Time, v *Verdict) {
	if injecting && r.injectWait(now, v) {
		return
	}
	if r.gen.runtime.room.Draining() {
		r.shutDown(v)
		return
	}
	if r.rules != nil && r.rules.From == openai.FromPool && r.answerModels(snap, now, v) {
		return
	}
	r.unkeep()
	candidates := snap.All()
	if r.model != "" {
		candidates = snap.ForModel(r.model)
	}
	if candidates == nil || len(candidates.Index) == 0 {
		r.noCandidates(snap, candidates, now, v)
		return
	}
	index := candidates.Index
	if r.subset != "" {
		if index = inSubset(snap, index, r.subset); len(index) == 0 {
			r.drop(DropNoEndpoints, "no ready endpoint of the model is in the subset the request names", v)
			return
		}
	}
	r.admit(snap, r.keeper(snap, index), now, v)
}

// starting reports whether the pool may yet learn of endpoints that it has from
// its start.
func (r *Request) starting(snap *pool.Snapshot, now time.Time) bool {
	return !(snap.Complete && snap.Judged) && now.Before(r.pool.started.Add(r.set.cfg.StartupHold))
}

// noCandidates waits for a pool that is still starting, and else says whether
// the model is unknown or only not served now.
func (r *Request) noCandidates(snap *pool.Snapshot, candidates *pool.Candidates, now time.Time, v *Verdict) {
	if r.starting(snap, now) {
		if !r.holdFor(snap, r.pool.started.Add(r.set.cfg.StartupHold), v) {
			r.drop(DropNoEndpoints, "the pool is starting and too many requests wait for it", v)
		}
		return
	}
	if r.model == "" {
		if !r.awaits(snap, now, v) {
			r.drop(DropNoEndpoints, "no endpoint is ready", v)
		}
		return
	}
	if candidates == nil && !r.wait.waiter.Again() {
		r.pool.syncer.ModelMissing()
		if snap.Complete && snap.Fresh && !snap.Uncertain && len(snap.Endpoints) > 0 && !snap.Known(r.model) {
			r.refuse(r.set.cfg.Models.NotFoundStatus, codeModelNotFound, r.missing(), "model", v)
			return
		}
	}
	if r.waitsForEndpoint(now, v) || r.awaits(snap, now, v) {
		return
	}
	r.drop(DropNoEndpoints, "no endpoint of model "+quote(r.model)+" is ready", v)
}

// awaits holds a request whose endpoints have just been found and have not been
// heard of yet, where a set takes the place of another, and reports whether it
// did.
func (r *Request) awaits(snap *pool.Snapshot, now time.Time, v *Verdict) bool {
	if snap.Judged || !r.pool.judged.Load() || !r.mayServe(snap) {
		return false
	}
	left := r.set.cfg.StartupHold
	if at := r.pool.arrived.Load(); at != 0 { // else the snapshot is newer than that
		left -= time.Duration(pool.Stamp(now) - at)
	}
	return left > 0 && r.holdFor(snap, now.Add(left), v)
}

// mayServe reports whether an endpoint that has not been heard of may serve the
// request.
func (r *Request) mayServe(snap *pool.Snapshot) bool {
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		if !e.Judged && e.NotReady == "" && !e.PrefillOnly &&
			(r.model == "" || e.Model == "" || e.Model == r.model || slices.Contains(e.Models, r.model)) {
			return true
		}
	}
	return false
}

// holdFor holds the request until the pool knows more than snap, or for as long as
// it may, and reports whether there was room for it.
func (r *Request) holdFor(snap *pool.Snapshot, until time.Time, v *Verdict) bool {
	if !r.hold(r.pool.queue, until, v) {
		return false
	}
	if newer := r.pool.holder.Load(); newer != snap {
		r.pool.begin(newer) // it may have come before the queue had us
	}
	return true
}

// hold puts the request into a queue that is not for room, and reports whether
// it could.
func (r *Request) hold(q *flowcontrol.Queue, until time.Time, v *Verdict) bool {
	r.host.PrepareWait()
	r.decided = r.gen.runtime.now()
	r.word.Store(stateWaiting) // before Add: the grant may come at once
	if !q.Add(&r.wait.waiter, r, until, r.size) {
		r.word.Store(stateNew)
		return false
	}
	v.Action = Wait
	return true
}

// Resume decides anew about a request that has waited.
func (r *Request) Resume(v *Verdict) {
	v.Reset()
	defer r.guard("resume", v)
	if !r.word.CompareAndSwap(stateGranted, stateNew) {
		v.Action = Wait // nothing was granted: the verdict stands
		return
	}
	inject(r.test, "resume")
	now := r.gen.runtime.now()
	r.waited += now.Sub(r.decided)
	v.number("queue_ms", float64(r.waited)/float64(time.Millisecond))
	if injecting && r.injectResume(v) {
		return
	}
	hold := r.wait.granted
	r.wait.granted = nil
	switch {
	case r.woken(v):
	case hold == nil:
		r.decide(now, v)
	default:
		r.resumeWith(hold, now, v)
	}
	r.releaseRoom(v)
}

// send routes the request to the endpoint of a choice, which is reserved, or
// refuses it where its goals allowed none.
func (r *Request) send(snap *pool.Snapshot, choice scorer.Choice, now time.Time, v *Verdict) {
	r.explainPick()
	if choice.SLO != scorer.SLONone {
		r.pool.counters.slo[choice.SLO].Inc()
		if choice.SLO == scorer.SLORefused {
			r.missesGoals(v)
			return
		}
	}
	e := &snap.Endpoints[choice.Index]
	r.held = choice.Reservation
	r.word.Store(stateRouted)
	r.gen.runtime.flights.add(1)
	r.fly()
	fallback := choice.Fallback.String()
	r.pool.counters.picked(r.policy, choice.Fallback)
	v.Action, v.Destination = Continue, r.destinations(snap, choice.Index)
	r.counted = r.models(snap)
	r.counted.requests.Inc()
	v.Watch = r.watched()
	v.text("model", r.asked)
	v.text("target_model", r.model)
	r.tellIdentity(v)
	r.tellPriority(v)
	v.text("endpoint", e.Key)
	v.text("pod", e.Pod)
	v.text("policy", r.policy.String())
	v.text("fallback", fallback)
	if r.explain {
		v.ResponseHeaders = append(v.ResponseHeaders,
			Header{"x-shunt-endpoint", e.Key}, Header{"x-shunt-policy", r.policy.String()})
		if fallback != "" {
			v.ResponseHeaders = append(v.ResponseHeaders, Header{"x-shunt-fallback", fallback})
		}
	}
	r.decided = r.gen.runtime.now()
	took := r.decided.Sub(now)
	r.pool.counters.pickSeconds.Observe(took.Seconds())
	v.number("pick_us", float64(took)/float64(time.Microsecond))
}

// Served tells that another endpoint than the picked one answered: Envoy's
// cluster chose it. The request counts there from now on.
func (r *Request) Served(address string, v *Verdict) {
	v.Reset()
	defer r.guard("served", v)
	if r.word.Load() != stateRouted || address == r.held.Live().Addr {
		return
	}
	r.pool.counters.moved.Inc()
	address = strings.Clone(address)
	pod := address // as an endpoint without a name is shown
	left := r.held.Live()
	// Most often Envoy went on to the next because the picked one failed: a probe
	// tells.
	r.pool.holder.Report(pool.Fault{Live: left, Kind: pool.FaultConnect, At: r.gen.runtime.now()})
	if e := r.pool.holder.Load().ByKey(address); e != nil {
		r.held.Move(e.Live, r.gen.runtime.now())
		if r.eviction.flight != nil {
			r.pool.flow.Moved(r.eviction.flight, e.Live)
		}
		r.freed(left)
		if e.Pod != "" {
			pod = e.Pod
		}
	}
	v.text("endpoint", address)
	v.text("pod", pod)
}

// End is how a stream ended, as far as the door knows.
type End struct {
	// Answered is true once response headers of the upstream have come.
	Answered bool
	// Details is the response_code_details of the reply that Envoy, and no
	// upstream, made to a routed request, "" if it made none.
	Details string
	// Status is the upstream's, 0 if it never answered.
	Status int
	// Complete is true once the upstream's response has come to its end.
	Complete bool
	// FirstByte is the time from the verdict to the response headers, 0 if none
	// came.
	FirstByte time.Duration
}

// Finish releases what the request holds. It is called exactly once, before
// the access log, however the stream ends. It may come on a request that never
// saw Headers.
func (r *Request) Finish(end End, v *Verdict) {
	v.Reset()
	defer r.guard("finish", nil)
	defer r.finish(end, v)
	inject(r.test, "finish")
}

func (r *Request) finish(end End, v *Verdict) {
	r.releaseRoom(nil)
	switch r.word.Swap(stateDone) {
	case stateWaiting:
		r.gen.runtime.room.Remove(&r.wait.waiter)
		r.cancelled(v)
	case stateGranted:
		r.giveUp()
		r.cancelled(v)
	case stateRouted:
		now := r.gen.runtime.now()
		if end.Answered && !end.Complete {
			r.pool.counters.incomplete.Inc()
		}
		if kind, fault := classify(end); fault { // before its slot is free: nobody gets the next one meanwhile
			r.pool.counters.faults[kind].Inc()
			r.pool.holder.Report(pool.Fault{Live: r.held.Live(), Kind: kind, At: now})
		}
		r.leave(end, now, end.Answered && end.Details == "", flowcontrol.Finished, v)
	}
}

// cancelled counts a request whose client left before it was sent.
func (r *Request) cancelled(v *Verdict) {
	r.pool.counters.drops[DropContextCancelled].Inc()
	v.text("reason", DropContextCancelled.String())
	r.nameModels(v)
	r.waited += r.gen.runtime.now().Sub(r.decided)
	v.number("queue_ms", float64(r.waited)/float64(time.Millisecond))
	if r.wait.inBand {
		r.pool.counters.waited(r.priority(), 0, r.waited)
	}
}

// classify tells from Envoy's response_code_details whether an endpoint failed,
// before its response began or in it.
// What the client, a timeout, a circuit breaker or Envoy's own overload caused
// is no fault.
func classify(end End) (pool.FaultKind, bool) {
	const before, after = "upstream_reset_before_response_started{", "upstream_reset_after_response_started{"
	cause, early := strings.CutPrefix(end.Details, before)
	cause, late := strings.CutPrefix(cause, after)
	switch {
	case end.Details == "no_healthy_upstream" && !end.Answered:
		// Envoy had nobody left to send to: an EDS cluster says so of a retry whose
		// list is used up, whatever the tries before it met.
		return pool.FaultConnect, true
	case !early && !late, early == end.Answered:
		return 0, false
	case strings.HasPrefix(cause, "overflow"), strings.HasPrefix(cause, "overload_manager"),
		strings.HasPrefix(cause, "local_reset"), strings.HasPrefix(cause, "local_refused_stream_reset"):
		return 0, false
	case strings.HasPrefix(cause, "remote_connection_failure"), strings.HasPrefix(cause, "local_connection_failure"),
		strings.HasPrefix(cause, "connection_timeout"), strings.HasPrefix(cause, "connection_failure"):
		return pool.FaultConnect, true
	case late:
		return pool.FaultCut, true
	default:
		return pool.FaultReset, true
	}
}
