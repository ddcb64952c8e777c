// Command misuse is a plugin for Envoy's golang HTTP filter that tests golanghost. A request's header x-do names what it
// does with the API of that filter: something right (right.go), or something that the real filter punishes (wrong.go).
package main

import (
	"fmt"
	"strings"

	xds "github.com/cncf/xds/go/xds/type/v3"
	"github.com/envoyproxy/envoy/contrib/golang/common/go/api"
	"github.com/envoyproxy/envoy/contrib/golang/filters/http/source/go/pkg/http"
	"google.golang.org/protobuf/types/known/anypb"
)

// The registration must be done when Envoy asks for the first config, right after the library is loaded.
var _ = register()

func register() bool {
	http.RegisterHttpFilterFactoryAndConfigParser("misuse", newStream, parser{})
	return true
}

func main() {}

// config is what a TypedStruct said under "name"; merged ones are "outer>inner".
type config struct {
	name     string
	requests api.CounterMetric // nil on routes
	busy     api.GaugeMetric
}

type parser struct{}

func (parser) Parse(in *anypb.Any, cb api.ConfigCallbackHandler) (any, error) {
	var s xds.TypedStruct
	if err := in.UnmarshalTo(&s); err != nil {
		return nil, err
	}
	c := &config{name: s.GetValue().GetFields()["name"].GetStringValue()}
	if c.name == "bad" {
		return nil, fmt.Errorf("name: %q is not allowed", c.name)
	}
	if cb != nil {
		c.requests = cb.DefineCounterMetric("misuse.requests")
		c.busy = cb.DefineGaugeMetric("misuse.busy")
	}
	return c, nil
}

func (parser) Merge(outer, inner any) any {
	o, i := outer.(*config), inner.(*config)
	return &config{name: o.name + ">" + i.name, requests: o.requests, busy: o.busy}
}

// Destroy is called when Envoy drops the config.
func (c *config) Destroy() {
	api.LogWarnf("misuse: config %s destroyed", c.name)
	if c.name == "metric-in-destroy" {
		c.requests.Increment(1)
	}
}

// A behaviour replaces callbacks of a stream; those it doesn't have pass on.
type behaviour struct {
	headers   func(s *stream, h api.RequestHeaderMap, end bool) api.StatusType
	data      func(s *stream, b api.BufferInstance, end bool) api.StatusType
	trailers  func(s *stream, t api.RequestTrailerMap) api.StatusType
	encode    func(s *stream, h api.ResponseHeaderMap, end bool) api.StatusType
	encodeOut func(s *stream, b api.BufferInstance, end bool) api.StatusType
	destroy   func(s *stream)
}

type stream struct {
	api.PassThroughStreamFilter
	cb     api.FilterCallbackHandler
	config *config
	do     behaviour
	what   string

	// Of the request, kept for the data phase.
	request  api.RequestHeaderMap
	response api.ResponseHeaderMap
	size     int
	chunks   int

	raw       string
	kept      api.BufferInstance
	destroyed chan struct{}
}

func newStream(c any, cb api.FilterCallbackHandler) api.StreamFilter {
	return &stream{cb: cb, config: c.(*config), destroyed: make(chan struct{})}
}

func (s *stream) decoder() api.DecoderFilterCallbacks { return s.cb.DecoderFilterCallbacks() }
func (s *stream) encoder() api.EncoderFilterCallbacks { return s.cb.EncoderFilterCallbacks() }

func (s *stream) DecodeHeaders(h api.RequestHeaderMap, end bool) api.StatusType {
	s.config.requests.Increment(1)
	s.config.busy.Increment(1)
	s.request = h
	s.what, _ = h.Get("x-do")
	do, ok := rights[s.what]
	if !ok {
		do, ok = wrongs[s.what]
	}
	if !ok {
		s.decoder().SendLocalReply(400, "unknown x-do "+s.what, nil, 0, "misuse_unknown")
		return api.LocalReply
	}
	s.do = do
	if do.headers != nil {
		return do.headers(s, h, end)
	}
	return api.Continue
}

func (s *stream) DecodeData(b api.BufferInstance, end bool) api.StatusType {
	s.chunks++
	s.size += b.Len()
	if s.do.data != nil {
		return s.do.data(s, b, end)
	}
	return api.Continue
}

func (s *stream) DecodeTrailers(t api.RequestTrailerMap) api.StatusType {
	if s.do.trailers != nil {
		return s.do.trailers(s, t)
	}
	return api.Continue
}

func (s *stream) EncodeHeaders(h api.ResponseHeaderMap, end bool) api.StatusType {
	s.response = h
	h.Set("x-config", s.config.name)
	h.Set("x-encoded", strings.TrimSpace(h.GetRaw(":status")+" "+s.what))
	if s.do.encode != nil {
		return s.do.encode(s, h, end)
	}
	return api.Continue
}

func (s *stream) EncodeData(b api.BufferInstance, end bool) api.StatusType {
	if s.do.encodeOut != nil {
		return s.do.encodeOut(s, b, end)
	}
	return api.Continue
}

func (s *stream) OnStreamComplete() {
	details, _ := s.cb.StreamInfo().ResponseCodeDetails()
	code, _ := s.cb.StreamInfo().ResponseCode()
	api.LogWarnf("misuse: complete %q %d %s", s.what, code, details)
}

func (s *stream) OnLog(h api.RequestHeaderMap, _ api.RequestTrailerMap, r api.ResponseHeaderMap, _ api.ResponseTrailerMap) {
	status := "none"
	if r != nil {
		status, _ = r.Get(":status")
	}
	api.LogWarnf("misuse: log %q %s %s", s.what, h.Path(), status)
}

func (s *stream) OnDestroy(reason api.DestroyReason) {
	if s.request != nil {
		s.config.busy.Increment(-1)
	}
	close(s.destroyed)
	api.LogWarnf("misuse: destroy %q %d", s.what, reason)
	if s.do.destroy != nil {
		s.do.destroy(s)
	}
}
