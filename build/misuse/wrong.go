package main

import (
	"time"
	"unsafe"

	"github.com/envoyproxy/envoy/contrib/golang/common/go/api"
)

func always(status api.StatusType) func(*stream, api.RequestHeaderMap, bool) api.StatusType {
	return func(*stream, api.RequestHeaderMap, bool) api.StatusType { return status }
}

// both does two things to a waiting request, from a goroutine. Envoy's thread waits for it, so that the first can't take
// effect before the second.
func both(first, second func(s *stream)) behaviour {
	return behaviour{headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		done := make(chan struct{})
		defer func() { <-done }()
		return inGoroutine(s.decoder(), func() {
			defer close(done)
			first(s)
			second(s)
		})
	}}
}

func alone(f func(s *stream)) behaviour {
	return behaviour{headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		return inGoroutine(s.decoder(), func() { f(s) })
	}}
}

func goOn(s *stream)   { s.decoder().Continue(api.Continue) }
func answer(s *stream) { s.decoder().SendLocalReply(503, "x", nil, 14, "misuse_x") }

// atOnce does things inside DecodeHeaders and returns a status.
func atOnce(status api.StatusType, things ...func(s *stream)) behaviour {
	return behaviour{headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		for _, f := range things {
			f(s)
		}
		return status
	}}
}

// address is where Envoy's object behind a callback handler is: its first field.
func address(cb api.FilterCallbackHandler) uintptr {
	object := (*[2]unsafe.Pointer)(unsafe.Pointer(&cb))[1]
	return *(*uintptr)(object)
}

// wrongs are uses that make the real filter hang or crash, or that only work by luck. Each ends Envoy here.
var wrongs = map[string]behaviour{
	"status-in-headers":      {headers: always(api.StopNoBuffer)},
	"status-legacy":          {headers: always(100)},
	"status-reply":           {headers: always(api.LocalReply)},
	"status-in-trailers":     {trailers: func(*stream, api.RequestTrailerMap) api.StatusType { return api.StopNoBuffer }},
	"more-after-end":         {data: func(*stream, api.BufferInstance, bool) api.StatusType { return api.StopAndBuffer }},
	"more-after-end-async":   alone(func(s *stream) { s.decoder().Continue(api.StopAndBuffer) }),
	"held-till-trailers":     {data: func(*stream, api.BufferInstance, bool) api.StatusType { return api.StopAndBufferWatermark }},
	"continue-running":       alone(func(s *stream) { s.decoder().Continue(api.Running) }),
	"continue-empty":         alone(goOn), // with trailers and no body
	"continue-twice":         both(goOn, goOn),
	"continue-then-status":   atOnce(api.Continue, goOn),
	"continue-then-reply":    both(goOn, answer),
	"reply-twice":            atOnce(api.LocalReply, answer, answer),
	"reply-then-continue":    both(answer, goOn),
	"reply-then-status":      atOnce(api.Continue, answer),
	"reply-then-panic":       atOnce(api.LocalReply, answer, func(*stream) { panic("after the reply") }),
	"headers-after-continue": both(goOn, func(s *stream) { s.request.Set("x-late", "1") }),
	"metadata-after-reply":   both(answer, func(s *stream) { s.cb.StreamInfo().DynamicMetadata().Set("misuse", "a", "b") }),
	"property-in-goroutine":  both(func(s *stream) { _, _ = s.cb.GetProperty("request.path") }, goOn),
	"strict-in-goroutine":    both(func(s *stream) { _ = s.decoder().SetUpstreamOverrideHost("127.0.0.1:1", true) }, goOn),
	"block":                  atOnce(api.Continue, func(s *stream) { <-s.destroyed }),
	// A getter that waits for Envoy's thread holds a lock that the other getters take too.
	"getters-at-once": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		started := make(chan struct{})
		inGoroutine(s.decoder(), func() {
			close(started)
			s.cb.StreamInfo().DynamicMetadata().Get("misuse")
		})
		<-started
		time.Sleep(100 * time.Millisecond) // nothing says when it holds the lock
		s.cb.StreamInfo().GetRouteName()
		return api.Continue
	}},
	"no-recover": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		api.LogWarnf("misuse: waiting")
		go func() {
			<-s.destroyed
			s.decoder().Continue(api.Continue)
		}()
		return api.Running
	}},
	"raw-after-continue": {
		headers: func(s *stream, h api.RequestHeaderMap, _ bool) api.StatusType {
			s.raw = h.GetRaw("x-do")
			return api.Continue
		},
		encode: func(s *stream, h api.ResponseHeaderMap, _ bool) api.StatusType {
			h.Set("x-raw", s.raw)
			return api.Continue
		},
	},
	"raw-after-destroy": {
		encode: func(s *stream, h api.ResponseHeaderMap, _ bool) api.StatusType {
			s.raw = h.GetRaw(":status")
			return api.StopAndBufferWatermark
		},
		encodeOut: func(*stream, api.BufferInstance, bool) api.StatusType {
			api.LogWarnf("misuse: answering")
			return api.Running // till the client goes
		},
		destroy: func(s *stream) {
			raw := s.raw
			time.AfterFunc(time.Second, func() { api.LogWarnf("misuse: %s", raw) })
		},
	},
	// For the race detector, to show that it works: two goroutines write one word.
	"race": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		written := make(chan struct{})
		go func() {
			s.size++
			close(written)
		}()
		s.size++
		<-written
		return api.Continue
	}},
	"use-after-finalize": {destroy: func(s *stream) {
		at := address(s.cb)
		s.cb = nil
		time.AfterFunc(2*time.Second, func() { api.LogWarnf("misuse: %d", **(**uint64)(unsafe.Pointer(&at))) })
	}},
}
