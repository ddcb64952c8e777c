package filter

import (
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/shuntproxy/shunt/internal/openai"
)

// defaultFlow is the fairness id of requests that bring none.
const defaultFlow = "default-flow"

// The strings of Config.TrustMetadata's namespace that stand for headers.
const (
	trustedObjective  = "objective"
	trustedFairnessID = "fairness_id"
)

// identity is what the headers of a request say about who sent it and what it
// needs. Most have no more than a short fairness id: that has room in here.
type identity struct {
	n    uint8 // bytes in buf
	buf  [39]byte
	more *wishes // nil for none
}

// wishes are what few requests bring. Nothing of it is borrowed.
type wishes struct {
	objective string // "" for none
	fairness  string // the fairness id, where it is too long for identity
	rewrite   string // the model to be given instead of the one named, "" for none
	id        string // in the path, of what the request asks about
	endpoint  string // that has the stored response which the request is about
	kept      bool   // endpoint is a candidate, and so the only one
	boundary  string // of the form that its body is
	encoding  openai.Encoding
	// ttft and tpot are the goals for the first token and for each further one, 0
	// for none.
	ttft, tpot time.Duration
	// ttl is how long the request may wait, 0 where it does not say.
	ttl time.Duration
}

// noWishes are those of most requests; nothing writes to it.
var noWishes wishes

// wishes are what the request brings, to read.
func (i *identity) wishes() *wishes {
	if i.more == nil {
		return &noWishes
	}
	return i.more
}

// wish is where to note what the request brings.
func (i *identity) wish() *wishes {
	if i.more == nil {
		i.more = new(wishes)
	}
	return i.more
}

// fairnessID is the flow that the request shares with others of the same id.
// It is valid as long as the request.
func (i *identity) fairnessID() string {
	switch {
	case i.n > 0:
		return unsafe.String(&i.buf[0], int(i.n)) // written once, in Headers
	case i.more != nil && i.more.fairness != "":
		return i.more.fairness
	default:
		return defaultFlow
	}
}

func (i *identity) setFairnessID(id string) {
	if len(id) > len(i.buf) {
		i.wish().fairness = strings.Clone(id)
		return
	}
	i.n = uint8(copy(i.buf[:], id))
}

// identify reads who sent a request and what it needs: of its headers or, where
// the configuration trusts a filter before us with it, of that filter's
// metadata.
func (r *Request) identify(h *Head) {
	if ns := r.set.cfg.TrustMetadata; ns != "" {
		if v := r.host.Metadata(ns, trustedObjective); v != "" {
			r.identity.wish().objective = strings.Clone(v)
		}
		r.identity.setFairnessID(r.host.Metadata(ns, trustedFairnessID))
	} else {
		if v := r.name(h, hdrObjective); v != "" {
			r.identity.wish().objective = strings.Clone(v)
		}
		r.identity.setFairnessID(r.name(h, hdrFairnessID))
	}
	if h.seen&goals == 0 {
		return
	}
	wish := r.identity.wish()
	wish.ttft = r.milliseconds(h, hdrSLOTTFT)
	wish.tpot = r.milliseconds(h, hdrSLOTPOT)
	if v := h.value(hdrInferenceTTL); v != "" {
		ttl, err := time.ParseDuration(v)
		if err != nil || ttl < 0 {
			r.gen.runtime.metrics.malformed[hdrInferenceTTL].Inc()
		} else {
			wish.ttl = ttl
		}
	}
}

// tellIdentity writes metadata.
func (r *Request) tellIdentity(v *Verdict) {
	v.text("objective", r.identity.wishes().objective)
	v.text("fairness_id", r.identity.fairnessID())
}

// maxName bounds names that clients give, so that what waits stays small.
const maxName = 256

// name reads a header that is a name; one that is too long is ignored.
func (r *Request) name(h *Head, known header) string {
	v := h.value(known)
	if len(v) > maxName {
		r.gen.runtime.metrics.malformed[known].Inc()
		return ""
	}
	return v
}

// goals are the headers about time, as bits of Head.seen.
const goals = 1<<hdrSLOTTFT | 1<<hdrSLOTPOT | 1<<hdrAliasSLOTTFT | 1<<hdrAliasSLOTPOT | 1<<hdrInferenceTTL

// milliseconds reads a header that is a decimal number of milliseconds; 0 and
// what can't be read are no goal.
func (r *Request) milliseconds(h *Head, known header) time.Duration {
	text := h.value(known)
	if text == "" {
		return 0
	}
	if d, ok := parseMilliseconds(text); ok {
		return d
	}
	r.gen.runtime.metrics.malformed[known].Inc()
	return 0
}

// parseMilliseconds reads digits with at most one point among them, and nothing
// else that strconv would take: no sign, exponent, hex or underscore.
func parseMilliseconds(text string) (time.Duration, bool) {
	if strings.Trim(text, "0123456789.") != "" {
		return 0, false
	}
	ms, err := strconv.ParseFloat(text, 64)
	if err != nil || ms > float64(maxGoal/time.Millisecond) {
		return 0, false
	}
	return time.Duration(ms * float64(time.Millisecond)), true
}

// maxGoal is the longest time that a header can ask for.
const maxGoal = 24 * time.Hour

// control headers whose meaning an identity has.
const identityBits = 1<<hdrObjective | 1<<hdrAliasObjective | 1<<hdrFairnessID | 1<<hdrAliasFairnessID

// countHeaders counts what is worth an operator's attention in the headers that
// speak to us: older names, and names that came twice.
func (r *Request) countHeaders(h *Head) {
	m := r.gen.runtime.metrics
	for used := h.resolve(); used != 0; used &= used - 1 {
		m.aliases[lowestBit(used)].Inc()
	}
	for again := h.again & control; again != 0; again &= again - 1 {
		m.duplicates[lowestBit(again)].Inc()
	}
}
