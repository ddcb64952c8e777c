package filter

// DropReason says why shunt itself ended a request with 429, 503 or 500. The
// set is closed: these are the rows of the llm-d header reference, whose
// spelling they keep.
type DropReason uint8

// The drop reasons. Rejected means that no engine saw the request, evicted that
// one did.
const (
	DropSaturated        DropReason = iota + 1 // 429: the pool or priority band is at capacity
	DropEvicted                                // 429: ended after dispatch for a higher priority
	DropTTLExpired                             // 429: waited longer than its TTL
	DropNoEndpoints                            // 503: no endpoint serves the model
	DropContextCancelled                       // 503: the client left while the request waited
	DropShuttingDown                           // 503: the drain has begun
	DropInternal                               // 500: a fault of shunt's own
	numDropReasons
)

// String returns the value of x-llm-d-request-dropped-reason.
func (d DropReason) String() string {
	switch d {
	case DropSaturated:
		return "rejected-saturated"
	case DropEvicted:
		return "evicted"
	case DropTTLExpired:
		return "rejected-ttl-expired"
	case DropNoEndpoints:
		return "rejected-no-endpoints"
	case DropContextCancelled:
		return "rejected-context-cancelled"
	case DropShuttingDown:
		return "rejected-shutting-down"
	default:
		return "rejected-internal"
	}
}

// Status returns the HTTP status of the reply.
func (d DropReason) Status() int {
	switch d {
	case DropSaturated, DropEvicted, DropTTLExpired:
		return 429
	case DropNoEndpoints, DropContextCancelled, DropShuttingDown:
		return 503
	default:
		return 500
	}
}

// grpcStatus is the code a gRPC client gets: RESOURCE_EXHAUSTED, UNAVAILABLE or
// INTERNAL.
func (d DropReason) grpcStatus() int {
	switch d.Status() {
	case 429:
		return 8
	case 503:
		return 14
	default:
		return 13
	}
}

// retryAfter is the range of whole seconds to tell the client, both ends
// included; 0, 0 is none. Each reply draws its own, so that clients do not
// return together.
func (d DropReason) retryAfter() (least, most int) {
	switch d {
	case DropEvicted:
		return 5, 10 // work was done for it: come back later than the others
	case DropInternal:
		return 0, 0 // the client's own back-off knows more than we do
	default:
		return 1, 3
	}
}
