package filter

import (
	"strconv"
	"strings"
)

// HeaderDestination carries the picked ip:port to Envoy's cluster. The same
// key in the dynamic metadata namespace MetadataLB carries the same value.
const HeaderDestination = "x-gateway-destination-endpoint"

// HeaderDropReason tells a client why a request was dropped.
const HeaderDropReason = "x-llm-d-request-dropped-reason"

// The dynamic metadata namespaces that shunt writes.
const (
	MetadataLB    = "envoy.lb"
	MetadataShunt = "shunt"
)

// header is a request header that shunt knows. Its bit is set in Head.seen.
type header uint8

const (
	hdrDestination header = iota
	hdrDestinationServed
	hdrDestinationSubset
	hdrOriginalDstHost
	hdrDropReason
	hdrObjective
	hdrFairnessID
	hdrModelRewrite
	hdrSLOTTFT
	hdrSLOTPOT
	hdrAliasObjective
	hdrAliasFairnessID
	hdrAliasModelRewrite
	hdrAliasSLOTTFT
	hdrAliasSLOTPOT
	hdrInferenceTTL
	hdrRoutingStrategy
	hdrExplain
	numHeaders
)

// headerNames holds the lower-case names: Envoy folds the case of keys before
// a filter sees them.
var headerNames = [numHeaders]string{
	hdrDestination:       HeaderDestination,
	hdrDestinationServed: "x-gateway-destination-endpoint-served",
	hdrDestinationSubset: HeaderSubset,
	hdrOriginalDstHost:   "x-envoy-original-dst-host",
	hdrDropReason:        HeaderDropReason,
	hdrObjective:         "x-llm-d-inference-objective",
	hdrFairnessID:        "x-llm-d-inference-fairness-id",
	hdrModelRewrite:      "x-llm-d-model-name-rewrite",
	hdrSLOTTFT:           "x-llm-d-slo-ttft-ms",
	hdrSLOTPOT:           "x-llm-d-slo-tpot-ms",
	hdrAliasObjective:    "x-gateway-inference-objective",
	hdrAliasFairnessID:   "x-gateway-inference-fairness-id",
	hdrAliasModelRewrite: "x-gateway-model-name-rewrite",
	hdrAliasSLOTTFT:      "x-slo-ttft-ms",
	hdrAliasSLOTPOT:      "x-slo-tpot-ms",
	hdrInferenceTTL:      "x-llm-d-inference-ttl",
	hdrRoutingStrategy:   "routing-strategy",
	hdrExplain:           "x-shunt-explain",
}

// spoofable are the headers by which a client could choose an endpoint, or
// pretend to be us. They are removed on every path, from headers and trailers.
const spoofable = 1<<hdrDestination | 1<<hdrDestinationServed | 1<<hdrDestinationSubset |
	1<<hdrOriginalDstHost | 1<<hdrDropReason

// control are the headers that speak to shunt and not to the engine.
const control = (1<<numHeaders - 1) &^ spoofable

// headerLengths has a bit for each length of a known name.
var headerLengths = func() (set uint64) {
	for _, name := range headerNames {
		set |= 1 << len(name)
	}
	return set
}()

// lookupHeader finds a known header by its lower-case name.
func lookupHeader(name string) (header, bool) {
	// All known names but one begin with x-, and most headers do not.
	if len(name) > 63 || headerLengths>>len(name)&1 == 0 || (name[0] != 'x' && name[0] != 'r') {
		return 0, false
	}
	for h, known := range headerNames {
		if len(known) == len(name) && known == name {
			return header(h), true
		}
	}
	return 0, false
}

// Head is what the request headers say. A door makes one on its stack and
// calls Add for each header; strings are only borrowed for the callback.
type Head struct {
	Method, Path string
	ContentType  string
	// ContentEncoding is "" where the body is as it is.
	ContentEncoding string
	ContentLength   int64 // -1 where there is none, or it is not a number
	// Tunnel is true for an upgrade and for CONNECT: such a body never ends.
	Tunnel bool
	// SessionID and SessionAffinity are the headers by which agents say which of
	// their requests belong together; Cookie may, too.
	SessionID, SessionAffinity, Cookie string
	// RequestID is Envoy's x-request-id.
	RequestID string
	// Whole is true where the body is here too: no room has to be found for it.
	Whole bool
	// Test is the fault to inject; only builds with the tag shunttest read it.
	Test string

	seen   uint32 // headers that came
	again  uint32 // headers that came more than once
	values [numHeaders]string
}

// Reset makes a Head ready for the next request.
func (h *Head) Reset() { *h = Head{ContentLength: -1} }

// Add takes one header, its key in lower case. The last of duplicates wins: it
// is what the hop in front of us appended.
func (h *Head) Add(key, value string) {
	switch key {
	case ":method":
		h.Method = value
		h.Tunnel = h.Tunnel || value == "CONNECT"
		return
	case ":path":
		h.Path = value
		return
	case "upgrade":
		h.Tunnel = true
		return
	case "content-type":
		h.ContentType = value
		return
	case "x-request-id":
		h.RequestID = value
		return
	case "cookie":
		h.Cookie = value
		return
	case "x-session-id":
		h.SessionID = value
		return
	case "x-session-affinity":
		h.SessionAffinity = value
		return
	case "content-encoding":
		if h.ContentEncoding != "" {
			value = h.ContentEncoding + "," + value
		}
		h.ContentEncoding = value
		return
	case "content-length":
		if n, err := strconv.ParseInt(value, 10, 64); err == nil && n >= 0 {
			h.ContentLength = n
		}
		return
	}
	if known, ok := lookupHeader(key); ok {
		h.again |= h.seen & (1 << known)
		h.seen |= 1 << known
		if value != "" { // an empty value counts as absent
			h.values[known] = value
		}
		return
	}
	if injecting && key == headerTest {
		h.Test = value
	}
}

// value returns a header's last non-empty value.
func (h *Head) value(known header) string { return h.values[known] }

// grpc reports whether the client speaks gRPC and can't read a JSON reply.
func (h *Head) grpc() bool { return strings.HasPrefix(h.ContentType, "application/grpc") }

// removals appends the names of the seen headers in mask.
func (h *Head) removals(mask uint32, names []string) []string {
	for found := h.seen & mask; found != 0; found &= found - 1 {
		names = append(names, headerNames[lowestBit(found)])
	}
	return names
}

// aliases are the headers that have an older name, which still counts: the
// only place that knows.
var aliases = [...]struct{ canonical, alias header }{
	{hdrObjective, hdrAliasObjective},
	{hdrFairnessID, hdrAliasFairnessID},
	{hdrModelRewrite, hdrAliasModelRewrite},
	{hdrSLOTTFT, hdrAliasSLOTTFT},
	{hdrSLOTPOT, hdrAliasSLOTPOT},
}

// aliasBits are the older names, as bits of Head.seen.
const aliasBits = 1<<hdrAliasObjective | 1<<hdrAliasFairnessID | 1<<hdrAliasModelRewrite | 1<<hdrAliasSLOTTFT | 1<<hdrAliasSLOTPOT

// resolve lets each older name speak for a header that did not come, and
// returns the older names that do.
func (h *Head) resolve() (used uint32) {
	if h.seen&aliasBits == 0 {
		return 0
	}
	for _, a := range aliases {
		if h.values[a.canonical] == "" && h.values[a.alias] != "" {
			h.values[a.canonical] = h.values[a.alias]
			used |= 1 << a.alias
		}
	}
	return used
}

// rewrite is the model that the client asks to be given instead of the one its
// request names, "" for none.
func (h *Head) rewrite() string { return h.value(hdrModelRewrite) }
