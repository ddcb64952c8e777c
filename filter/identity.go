package filter

import (
	"strconv"
	"strings"
	"time"
	"unsafe"
)

// defaultFlow is the fairness id of requests that bring none.
const defaultFlow = "default-flow"

// The strings of Config.TrustMetadata's namespace that stand for headers.
const (
	trustedObjective  = "objective"
	trustedFairnessID = "fairness_id"
)

// identity is what a request says about who sent it and what it needs.
type identity struct {
	// objective names an objective, "" for none. It is not borrowed.
	objective string
	// fairness is the fairness id; see fairnessID.
	fairness shortText
	// ttft and tpot are the goals for the first token and for each further one, 0
	// for none.
	ttft, tpot time.Duration
	// ttl is how long the request may wait, 0 where it does not say.
	ttl time.Duration
}

// fairnessID is the flow that the request shares with others of the same id.
// It is valid as long as the request.
func (i *identity) fairnessID() string {
	if i.fairness.n == 0 {
		return defaultFlow
	}
	return i.fairness.text()
}

// identify reads who sent a request and what it needs: of its headers or, where
// the configuration trusts a filter before us with it, of that filter's
// metadata.
func (r *Request) identify(h *Head) {
	if ns := r.set.cfg.TrustMetadata; ns != "" {
		r.identity.objective = strings.Clone(r.host.Metadata(ns, trustedObjective))
		r.identity.fairness.set(r.host.Metadata(ns, trustedFairnessID))
	} else {
		if v := h.value(hdrObjective); v != "" {
			r.identity.objective = strings.Clone(v)
		}
		r.identity.fairness.set(h.value(hdrFairnessID))
	}
	if h.seen&goals == 0 {
		return
	}
	r.identity.ttft = r.milliseconds(h, hdrSLOTTFT)
	r.identity.tpot = r.milliseconds(h, hdrSLOTPOT)
	if v := h.value(hdrInferenceTTL); v != "" {
		ttl, err := time.ParseDuration(v)
		if err != nil || ttl < 0 {
			r.gen.runtime.metrics.malformed[hdrInferenceTTL].Inc()
		} else {
			r.identity.ttl = ttl
		}
	}
}

// tellIdentity writes metadata.
func (r *Request) tellIdentity(v *Verdict) {
	v.text("objective", r.identity.objective)
	v.text("fairness_id", r.identity.fairnessID())
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

// shortText keeps a text that is mostly short without memory of its own.
type shortText struct {
	n    uint8 // bytes in buf; len(buf)+1 where it is long
	buf  [46]byte
	long string
}

func (t *shortText) set(s string) {
	if len(s) > len(t.buf) {
		t.n, t.long = uint8(len(t.buf)+1), strings.Clone(s)
		return
	}
	t.n = uint8(copy(t.buf[:], s))
}

// text is valid as long as t, and until set.
func (t *shortText) text() string {
	if int(t.n) > len(t.buf) {
		return t.long
	}
	return unsafe.String(&t.buf[0], int(t.n))
}
