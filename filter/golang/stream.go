package golang

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/envoyproxy/envoy/contrib/golang/common/go/api"

	"github.com/shuntproxy/shunt/filter"
)

// What the SDK does to a filter shapes this file:
//
//   - A callback that ends the stream may not ask for more: StopAndBuffer with
//     endStream panics, so requests without a body are decided at the headers.
//   - Header maps become invalid once their phase is continued; the one of the
//     request stays valid while the body is awaited, so it is kept for that
//     time and no longer.
//   - A body with trailers comes with endStream false; an empty body with
//     trailers does not come at all.
//   - Trailers that come without a body while a request waits at its headers are
//     lost, and the stream hangs. One that has a body to come therefore waits
//     outside of Go, and is decided at what comes next.
//   - A call on a stream that has been destroyed panics: the client left.
//   - The API has no way to run on the worker, so a granted request is decided
//     on a goroutine and Envoy posts what it asks for.
//   - Replies of ours run through the Encode callbacks too.
//   - OnLog and OnDestroy may come on a stream that never saw its headers.

// stream implements api.StreamFilter for one HTTP stream.
type stream struct {
	callbacks api.FilterCallbackHandler
	gen       *filter.Generation
	route     *filter.Route

	// mu is held by each callback that touches the request, and by the one
	// goroutine of a grant, for the time of a decision.
	mu sync.Mutex
	// protected by mu
	request  filter.Request
	verdict  filter.Verdict
	headers  api.RequestHeaderMap // until the request is decided
	limit    int64
	phase    phase
	idle     bool            // it waits for a grant, and for more of the request
	granted  bool            // the grant came first
	adds     []filter.Header // for the response
	watch    bool            // the response, or more of it, is wanted
	body     []byte          // reused by what is put into a response
	told     []filter.Field  // of a reply from a goroutine: the stream may end before Envoy has them
	picked   string
	pickedAt time.Time
	end      filter.End
	complete bool
}

type phase uint8

const (
	phaseNew phase = iota
	phaseBody
	phaseWait
	phasePass
	phaseReplied
	phaseFinished
)

var _ api.StreamFilter = (*stream)(nil)

// DecodeHeaders implements api.StreamDecoderFilter.
func (s *stream) DecodeHeaders(headers api.RequestHeaderMap, endStream bool) (status api.StatusType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.contain("headers", &status)
	var head filter.Head
	readHead(headers, &head)
	s.headers = headers
	s.request.Init(s, s.gen)
	s.request.Headers(&head, endStream, s.route, &s.verdict)
	status = s.apply(api.StopAndBuffer)
	// Clients of tunnels and of gRPC may wait for an answer before they send more,
	// and send no trailers.
	if status == api.Running && !endStream && !head.Tunnel && !strings.HasPrefix(head.ContentType, "application/grpc") {
		s.idle = true
		return api.StopAndBufferWatermark
	}
	return status
}

// arrived is called with what follows the headers that a request waits at.
func (s *stream) arrived() api.StatusType {
	s.idle = false
	if !s.granted {
		return api.Running
	}
	s.granted = false
	s.request.Resume(&s.verdict)
	return s.apply(api.Continue)
}

// DecodeData implements api.StreamDecoderFilter. After StopAndBuffer it is
// called once, with the whole body.
func (s *stream) DecodeData(buffer api.BufferInstance, _ bool) (status api.StatusType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.contain("body", &status)
	if s.idle {
		return s.arrived()
	}
	if s.phase != phaseBody {
		return api.Continue
	}
	if int64(buffer.Len()) > s.limit {
		s.verdict.Reset()
		s.request.TooLarge(&s.verdict)
	} else {
		// Bytes copies into Go memory; the copy is dropped on return, so that a
		// request that waits holds none.
		body := buffer.Bytes()
		s.request.Body([][]byte{body}, &s.verdict)
		if e := &s.verdict.Body; e.With != nil {
			_ = buffer.Set(slices.Concat(body[:e.Offset], e.With, body[e.Offset+e.Length:])) // never fails
		}
	}
	return s.apply(api.Continue)
}

// DecodeTrailers implements api.StreamDecoderFilter.
func (s *stream) DecodeTrailers(trailers api.RequestTrailerMap) (status api.StatusType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.contain("trailers", &status)
	var head filter.Head
	readHead(trailers, &head)
	s.request.Trailers(&head, &s.verdict)
	for _, name := range s.verdict.Remove {
		trailers.Del(name)
	}
	if s.idle {
		return s.arrived()
	}
	if s.phase != phaseBody {
		return api.Continue
	}
	s.request.Body(nil, &s.verdict) // empty: DecodeData was skipped
	return s.apply(api.Continue)
}

// Metadata implements filter.Host.
func (s *stream) Metadata(namespace, key string) string {
	text, _ := s.callbacks.StreamInfo().DynamicMetadata().Get(namespace)[key].(string) // else it is no text
	return text
}

// SubsetHint implements filter.Host. Entries that are no text are left out.
func (s *stream) SubsetHint() ([]string, bool) {
	values, ok := s.callbacks.StreamInfo().DynamicMetadata().Get(filter.MetadataSubset)[filter.HeaderSubset].([]any)
	if !ok {
		return nil, false
	}
	list := make([]string, 0, len(values))
	for _, v := range values {
		if text, ok := v.(string); ok {
			list = append(list, text)
		}
	}
	return list, true
}

// PrepareWait implements filter.Host. Nothing is needed.
func (s *stream) PrepareWait() {}

// Post implements filter.Host: the grant is decided on a goroutine of its own,
// which ends with it.
func (s *stream) Post() {
	go func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		defer s.cancelled() // also of the reply that resumeFailed makes
		defer s.resumeFailed()
		if s.phase != phaseWait {
			return
		}
		if s.idle {
			s.granted = true
			return
		}
		s.request.Resume(&s.verdict)
		if s.verdict.Action == filter.Wait {
			return
		}
		if s.verdict.Action == filter.Reply {
			s.told = slices.Clone(s.verdict.Metadata)
		}
		if s.apply(api.Continue) == api.Continue {
			s.callbacks.DecoderFilterCallbacks().Continue(api.Continue)
		}
	}()
}

// Evictable implements filter.Host: the door can end a request only when its
// engine sends something, so one whose answer comes in one piece would be ended
// when it is done.
func (s *stream) Evictable(streams bool) bool { return streams }

// PostEvict implements filter.Host: the next part of the response finds it.
func (s *stream) PostEvict() {}

// evicted ends a stream that flow control has asked to end, and reports whether
// it did. Once the response has begun, Envoy makes a reset of the reply.
func (s *stream) evicted() bool {
	if s.phase != phasePass || !s.request.Evicting() {
		return false
	}
	end := s.end
	end.Complete = s.complete
	s.request.Evicted(end, &s.verdict)
	s.setMetadata()
	if s.verdict.Action != filter.Reply {
		return false
	}
	s.phase, s.watch = phaseReplied, false
	s.reply(s.callbacks.EncoderFilterCallbacks())
	return true
}

// resumeFailed answers a request whose grant met a fault of the door: nobody
// else would, and it would wait for ever.
func (s *stream) resumeFailed() {
	if cause := recover(); cause != nil && !gone(cause) {
		s.fail("resume", cause)
	}
}

// cancelled contains a panic where nothing can be answered any more.
func (s *stream) cancelled() {
	if cause := recover(); cause != nil && !gone(cause) {
		logFault("the end", cause)
	}
}

// gone reports whether a panic is one by which the SDK says that the stream has
// been destroyed meanwhile: OnDestroy follows or came.
func gone(cause any) bool {
	text := fmt.Sprint(cause)
	return strings.Contains(text, "has been destroyed") || strings.Contains(text, "has been finished") ||
		strings.Contains(text, "not proccessing Go")
}

func logFault(where string, cause any) {
	writeLog(slog.LevelError, fmt.Sprintf("internal error of the door in %s: %v\n%s", where, cause, debug.Stack()))
}

// apply does what the verdict says and returns the status for it; needBody is
// that of a request whose body is wanted.
func (s *stream) apply(needBody api.StatusType) api.StatusType {
	v := &s.verdict
	for _, name := range v.Remove {
		s.headers.Del(name)
	}
	for _, h := range v.Set {
		s.headers.Set(h.Key, h.Value)
	}
	s.setMetadata()
	switch v.Action {
	case filter.NeedBody:
		s.phase, s.limit = phaseBody, v.BodyLimit
		return needBody
	case filter.Wait:
		s.phase = phaseWait
		return api.Running
	case filter.Reply:
		s.phase, s.headers = phaseReplied, nil
		s.reply(s.callbacks.DecoderFilterCallbacks())
		return api.LocalReply
	}
	if v.Destination != "" {
		s.headers.Set(filter.HeaderDestination, v.Destination)
		s.callbacks.StreamInfo().DynamicMetadata().Set(filter.MetadataLB, filter.HeaderDestination, v.Destination)
		s.picked, _, _ = strings.Cut(v.Destination, ",")
		s.pickedAt = time.Now()
		s.adds = append(s.adds, v.ResponseHeaders...)
		s.watch = v.Watch
	}
	s.phase, s.headers = phasePass, nil
	return api.Continue
}

func (s *stream) setMetadata() {
	if len(s.verdict.Metadata) == 0 {
		return
	}
	metadata := s.callbacks.StreamInfo().DynamicMetadata()
	for _, f := range s.verdict.Metadata {
		if f.Text != "" {
			metadata.Set(filter.MetadataShunt, f.Key, f.Text)
		} else {
			metadata.Set(filter.MetadataShunt, f.Key, f.Number)
		}
	}
}

// replier is the side of the stream that a reply is sent from: the one whose
// callback has come.
type replier interface {
	SendLocalReply(status int, body string, headers map[string][]string, grpcStatus int64, details string)
}

func (s *stream) reply(from replier) {
	r := &s.verdict.Reply
	headers := make(map[string][]string, len(r.Headers))
	for _, h := range r.Headers {
		headers[h.Key] = append(headers[h.Key], h.Value)
	}
	body := string(r.Body)
	if r.GRPC != 0 {
		body = r.Message // Envoy makes grpc-message of it
	}
	from.SendLocalReply(r.Status, body, headers, int64(r.GRPC), r.Details)
}

// EncodeHeaders implements api.StreamEncoderFilter.
func (s *stream) EncodeHeaders(headers api.ResponseHeaderMap, endStream bool) (status api.StatusType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.contain("response headers", &status)
	if s.phase == phaseReplied {
		return api.Continue
	}
	headers.Del(filter.HeaderDropReason) // the header is ours
	for _, h := range s.adds {
		headers.Set(h.Key, h.Value)
	}
	const upstream = "via_upstream" // response_code_details of an answer that is not a local reply
	info := s.callbacks.StreamInfo()
	if details, _ := info.ResponseCodeDetails(); s.picked == "" || details != upstream {
		s.watch = false
		return api.Continue
	}
	s.complete = endStream
	if s.evicted() {
		return api.LocalReply
	}
	s.end.Answered = true
	s.end.FirstByte = time.Since(s.pickedAt)
	if address, ok := info.UpstreamRemoteAddress(); ok && address != s.picked {
		s.request.Served(address, &s.verdict)
		s.setMetadata()
	}
	if status, ok := headers.Status(); ok {
		s.end.Status = status
	}
	if s.watch {
		s.watchHeaders(headers, endStream)
	}
	return api.Continue
}

func (s *stream) watchHeaders(headers api.ResponseHeaderMap, endStream bool) {
	head := filter.ResponseHead{Status: s.end.Status, End: endStream}
	head.ContentType, _ = headers.Get("content-type")
	head.ContentEncoding, _ = headers.Get("content-encoding")
	s.request.Response(&head, &s.verdict)
	for _, name := range s.verdict.Remove {
		headers.Del(name)
	}
	s.watch = s.verdict.Watch
}

// EncodeData implements api.StreamEncoderFilter. A response is read only where
// someone wants to know.
func (s *stream) EncodeData(buffer api.BufferInstance, endStream bool) (status api.StatusType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.contain("response body", &status)
	if endStream {
		s.complete = true
	}
	if s.evicted() {
		return api.LocalReply
	}
	if !s.watch || s.phase == phaseReplied || buffer.Len() == 0 {
		return api.Continue
	}
	chunks := [][]byte{buffer.Bytes()}
	s.request.ResponseBody(chunks, &s.verdict)
	s.watch = s.verdict.Watch
	if len(s.verdict.Edits) > 0 {
		s.body = s.verdict.AppendEdited(s.body[:0], chunks)
		buffer.Reset()
		if len(s.body) > 0 {
			_ = buffer.Append(s.body) // it has no error to return
		}
	}
	return api.Continue
}

// EncodeTrailers implements api.StreamEncoderFilter.
func (s *stream) EncodeTrailers(trailers api.ResponseTrailerMap) (status api.StatusType) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.contain("response trailers", &status)
	if s.phase != phaseReplied {
		trailers.Del(filter.HeaderDropReason)
	}
	s.complete = true
	return api.Continue
}

// OnStreamComplete implements api.StreamFilter. It comes before the access log.
func (s *stream) OnStreamComplete() { s.finish(true) }

// OnDestroy implements api.StreamFilter.
func (s *stream) OnDestroy(api.DestroyReason) { s.finish(false) }

func (s *stream) finish(logged bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.cancelled()
	if s.phase == phaseNew || s.phase == phaseFinished {
		return
	}
	s.phase, s.headers = phaseFinished, nil
	s.end.Complete = s.complete
	if logged && s.picked != "" && !(s.end.Answered && s.complete) {
		s.end.Details, _ = s.callbacks.StreamInfo().ResponseCodeDetails()
	}
	s.request.Finish(s.end, &s.verdict)
	if logged {
		s.verdict.Metadata = append(s.verdict.Metadata, s.told...)
		s.setMetadata()
	}
}

// OnLog implements api.StreamFilter.
func (s *stream) OnLog(api.RequestHeaderMap, api.RequestTrailerMap, api.ResponseHeaderMap, api.ResponseTrailerMap) {
}

// OnLogDownstreamStart implements api.StreamFilter.
func (s *stream) OnLogDownstreamStart(api.RequestHeaderMap) {}

// OnLogDownstreamPeriodic implements api.StreamFilter.
func (s *stream) OnLogDownstreamPeriodic(api.RequestHeaderMap, api.RequestTrailerMap, api.ResponseHeaderMap, api.ResponseTrailerMap) {
}

// contain is the last resort: package filter contains its own panics, so what
// comes here is a fault of the door, and is answered like one of ours.
func (s *stream) contain(where string, status *api.StatusType) {
	if cause := recover(); cause != nil {
		*status = s.fail(where, cause)
	}
}

// fail answers for a fault, where that is still possible, and returns the status
// of the callback that met it.
func (s *stream) fail(where string, cause any) api.StatusType {
	logFault(where, cause)
	if s.phase >= phasePass {
		return api.Continue
	}
	s.verdict.Reset()
	s.verdict.Reply = filter.LocalReply{
		Status: filter.DropInternal.Status(), Details: "shunt_" + filter.DropInternal.String(),
		Headers: []filter.Header{{Key: filter.HeaderDropReason, Value: filter.DropInternal.String()}},
	}
	s.phase, s.headers = phaseReplied, nil
	s.reply(s.callbacks.DecoderFilterCallbacks())
	return api.LocalReply
}

// readHead copies a map once: the SDK keeps the copy, later lookups are free.
func readHead(headers api.HeaderMap, head *filter.Head) {
	head.Reset()
	headers.RangeWithCopy(func(key, value string) bool {
		head.Add(key, value)
		return true
	})
}
