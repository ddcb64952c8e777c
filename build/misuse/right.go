package main

import (
	"fmt"
	"strconv"

	"github.com/envoyproxy/envoy/contrib/golang/common/go/api"
)

// inGoroutine runs f beside Envoy's thread, as the API wants it.
func inGoroutine(cb api.FilterProcessCallbacks, f func()) api.StatusType {
	go func() {
		defer cb.RecoverPanic()
		f()
	}()
	return api.Running
}

// buffer asks for the whole body, if there is one.
func buffer(_ *stream, _ api.RequestHeaderMap, end bool) api.StatusType {
	if end {
		return api.Continue
	}
	return api.StopAndBuffer
}

func sizes(s *stream) { s.request.Set("x-seen", fmt.Sprintf("%d in %d", s.size, s.chunks)) }

// rights are uses of the API that the real filter allows.
var rights = map[string]behaviour{
	"": {},
	"buffer": {
		headers: buffer,
		data: func(s *stream, b api.BufferInstance, end bool) api.StatusType {
			sizes(s)
			s.request.Set("x-end", strconv.FormatBool(end))
			return api.Continue
		},
		trailers: func(_ *stream, t api.RequestTrailerMap) api.StatusType {
			v, _ := t.Get("x-trailer")
			t.Set("x-trailer", v+" seen")
			t.Del("x-secret")
			return api.Continue
		},
	},
	"replace": {
		headers: buffer,
		data: func(s *stream, b api.BufferInstance, _ bool) api.StatusType {
			old := b.String()
			_ = b.SetString("<" + old + ">")
			_ = b.PrependString("[")
			_ = b.AppendString("]x")
			s.request.Set("content-length", strconv.Itoa(b.Len()))
			return api.Continue
		},
	},
	"chunks": {
		headers: func(_ *stream, _ api.RequestHeaderMap, end bool) api.StatusType {
			if end {
				return api.Continue
			}
			return api.StopAndBufferWatermark
		},
		data: func(s *stream, _ api.BufferInstance, end bool) api.StatusType {
			if !end {
				return api.StopAndBufferWatermark
			}
			sizes(s)
			return api.Continue
		},
	},
	"drop": { // the chunks but for the last
		data: func(_ *stream, _ api.BufferInstance, end bool) api.StatusType {
			if !end {
				return api.StopNoBuffer
			}
			return api.Continue
		},
	},
	"headers": {headers: func(_ *stream, h api.RequestHeaderMap, _ bool) api.StatusType {
		h.Set("x-set", "1")
		h.Add("x-add", "a")
		h.Add("x-add", "b")
		h.Del("x-del")
		return api.Continue
	}},
	"reply": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		s.decoder().SendLocalReply(429, "busy", map[string][]string{"x-reply": {"1"}, "content-type": {"application/json"}}, 8, "misuse_reply")
		return api.LocalReply
	}},
	"reply-empty": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		s.decoder().SendLocalReply(503, "", nil, 14, "misuse_empty")
		return api.LocalReply
	}},
	"reply-in-data": {headers: buffer, data: func(s *stream, _ api.BufferInstance, _ bool) api.StatusType {
		s.decoder().SendLocalReply(400, "no", nil, 3, "misuse_in_data")
		return api.LocalReply
	}},
	"reply-async": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		return inGoroutine(s.decoder(), func() { s.decoder().SendLocalReply(503, "later", nil, 14, "misuse_later") })
	}},
	"reply-encode-async": { // the reply waits in its own EncodeHeaders and EncodeData
		headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
			s.decoder().SendLocalReply(418, "tea", nil, 3, "misuse_tea")
			return api.LocalReply
		},
		encode: func(s *stream, h api.ResponseHeaderMap, _ bool) api.StatusType {
			return inGoroutine(s.encoder(), func() {
				h.Set("x-late", "1")
				s.encoder().Continue(api.Continue)
			})
		},
		encodeOut: func(s *stream, b api.BufferInstance, _ bool) api.StatusType {
			return inGoroutine(s.encoder(), func() {
				_ = b.AppendString(" pot")
				s.encoder().Continue(api.Continue)
			})
		},
	},
	"async": {headers: func(s *stream, h api.RequestHeaderMap, _ bool) api.StatusType {
		return inGoroutine(s.decoder(), func() {
			v, _ := h.Get("x-in")
			h.Set("x-async", v+"!")
			h.Del("x-in")
			s.decoder().Continue(api.Continue)
		})
	}},
	"async-buffer": {
		headers: func(s *stream, _ api.RequestHeaderMap, end bool) api.StatusType {
			return inGoroutine(s.decoder(), func() {
				if end {
					s.decoder().Continue(api.Continue)
				} else {
					s.decoder().Continue(api.StopAndBuffer)
				}
			})
		},
		data: func(s *stream, _ api.BufferInstance, _ bool) api.StatusType {
			sizes(s)
			return api.Continue
		},
	},
	"async-data": {
		headers: buffer,
		data: func(s *stream, b api.BufferInstance, _ bool) api.StatusType {
			return inGoroutine(s.decoder(), func() {
				s.request.Set("x-seen", fmt.Sprintf("%d in %d", len(b.Bytes()), s.chunks))
				s.decoder().Continue(api.Continue)
			})
		},
		trailers: func(s *stream, t api.RequestTrailerMap) api.StatusType {
			return inGoroutine(s.decoder(), func() {
				t.Set("x-trailer", "async")
				s.decoder().Continue(api.Continue)
			})
		},
	},
	"async-chunks": { // each chunk waits for a goroutine
		data: func(s *stream, _ api.BufferInstance, _ bool) api.StatusType {
			return inGoroutine(s.decoder(), func() { s.decoder().Continue(api.Continue) })
		},
		encodeOut: func(s *stream, _ api.BufferInstance, _ bool) api.StatusType {
			return inGoroutine(s.encoder(), func() { s.encoder().Continue(api.Continue) })
		},
	},
	"wait": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		api.LogWarnf("misuse: waiting")
		return inGoroutine(s.decoder(), func() { // for the client to go away
			<-s.destroyed
			s.decoder().Continue(api.Continue) // panics, is recovered
		})
	}},
	"metadata": {headers: func(s *stream, h api.RequestHeaderMap, _ bool) api.StatusType {
		m := s.cb.StreamInfo().DynamicMetadata()
		m.Set("misuse", "text", "a")
		m.Set("misuse", "number", 1.5)
		m.Set("misuse", "truth", true)
		m.Set("misuse", "list", []any{"x", 2.0, false})
		s.cb.StreamInfo().FilterState().SetString("misuse.key", "kept", api.StateTypeMutable, api.LifeSpanRequest, api.None)
		return inGoroutine(s.decoder(), func() {
			m.Set("misuse", "late", "b")
			got := m.Get("misuse")
			h.Set("x-metadata", fmt.Sprintf("%v|%v|%v|%v|%v", got["text"], got["number"], got["truth"], got["list"], got["late"]))
			h.Set("x-state", s.cb.StreamInfo().FilterState().GetString("misuse.key"))
			protocol, _ := s.cb.StreamInfo().Protocol()
			h.Set("x-info", fmt.Sprint(s.cb.StreamInfo().GetRouteName(), " ", protocol, " ", s.config.requests.Get() > 0))
			s.decoder().Continue(api.Continue)
		})
	}},
	"encode-body": {
		encode: func(_ *stream, _ api.ResponseHeaderMap, end bool) api.StatusType {
			if end {
				return api.Continue
			}
			return api.StopAndBuffer
		},
		encodeOut: func(s *stream, b api.BufferInstance, _ bool) api.StatusType {
			_ = b.AppendString("!")
			s.response.Del("content-length")
			return api.Continue
		},
	},
	"encode-async": {encode: func(s *stream, h api.ResponseHeaderMap, _ bool) api.StatusType {
		return inGoroutine(s.encoder(), func() {
			h.Set("x-late", "1")
			s.encoder().Continue(api.Continue)
		})
	}},
	"encode-reply": {encode: func(s *stream, _ api.ResponseHeaderMap, _ bool) api.StatusType {
		s.encoder().SendLocalReply(502, "bad answer", nil, 14, "misuse_encode")
		return api.LocalReply
	}},
	"add": {headers: func(s *stream, h api.RequestHeaderMap, end bool) api.StatusType {
		if end {
			h.Set("content-length", "5")
			s.decoder().AddData([]byte("added"), false)
		}
		return api.Continue
	}},

	// Wrong, but the SDK or Envoy turns it into a 500.
	"panic":          {headers: func(*stream, api.RequestHeaderMap, bool) api.StatusType { panic("on purpose") }},
	"panic-in-reply": {headers: replyBehind, encode: func(*stream, api.ResponseHeaderMap, bool) api.StatusType { panic("in encode") }},
	"panic-async": {headers: func(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
		return inGoroutine(s.decoder(), func() { panic("in a goroutine") })
	}},
	"buffer-nothing":  {headers: func(*stream, api.RequestHeaderMap, bool) api.StatusType { return api.StopAndBuffer }},
	"buffer-trailers": {trailers: func(*stream, api.RequestTrailerMap) api.StatusType { return api.StopAndBuffer }},
	"set-in-data": {data: func(s *stream, _ api.BufferInstance, _ bool) api.StatusType {
		s.request.Set("x-too-late", "1")
		return api.Continue
	}},
	"bytes-in-trailers": {
		headers:  buffer,
		data:     func(s *stream, b api.BufferInstance, _ bool) api.StatusType { s.kept = b; return api.Continue },
		trailers: func(s *stream, _ api.RequestTrailerMap) api.StatusType { s.kept.Bytes(); return api.Continue },
	},
}

func replyBehind(s *stream, _ api.RequestHeaderMap, _ bool) api.StatusType {
	s.decoder().SendLocalReply(429, "busy", nil, 8, "misuse_reply")
	return api.LocalReply
}
