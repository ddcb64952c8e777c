package pool

import "time"

// connectFailuresNotReady connect failures in a row make an endpoint not
// ready: one is a lost packet, two are an engine that is gone.
const connectFailuresNotReady = 2

// Readiness follows whether an endpoint answers on its serving port. The zero
// value has not been judged. It is a value of the snapshot's one writer.
type Readiness struct {
	judged   bool
	ready    bool
	failures int
}

// Answered records that the serving port took a connection, or that the health
// path said 200. One answer is enough.
func (r *Readiness) Answered() { *r = Readiness{judged: true, ready: true} }

// Failed records that the serving port refused or did not answer.
func (r *Readiness) Failed() {
	r.judged = true
	r.failures++
	if r.failures >= connectFailuresNotReady {
		r.ready = false
	}
}

// Judged reports whether anything was heard of the endpoint, good or bad.
func (r *Readiness) Judged() bool { return r.judged }

// Ready reports whether the endpoint may take requests.
func (r *Readiness) Ready() bool { return r.ready }

// An endpoint that resets resetsSetAside requests within resetWindow is set
// aside for setAsideFirst, twice as long each time until setAsideMax; after
// setAsideMax without, it starts from the first span again.
const (
	resetsSetAside = 3
	resetWindow    = 10 * time.Second
	setAsideFirst  = 10 * time.Second
	setAsideMax    = 5 * time.Minute
)

// SetAside follows the resets of one endpoint. The zero value is in use. It is
// a value of the snapshot's one writer.
type SetAside struct {
	resets [resetsSetAside]time.Time // ring, oldest at next
	next   int
	span   time.Duration
	since  time.Time
	until  time.Time
}

// Reset records one reset before response headers and reports whether it set
// the endpoint aside.
func (s *SetAside) Reset(now time.Time) bool {
	if s.Active(now) {
		return false // requests sent before it was set aside still fail
	}
	s.resets[s.next] = now
	s.next = (s.next + 1) % resetsSetAside
	oldest := s.resets[s.next]
	if oldest.IsZero() || now.Sub(oldest) > resetWindow {
		return false
	}
	switch {
	case s.span == 0 || now.Sub(s.until) > setAsideMax:
		s.span = setAsideFirst
	case s.span < setAsideMax:
		s.span = min(2*s.span, setAsideMax)
	}
	s.resets = [resetsSetAside]time.Time{}
	s.since, s.until = now, now.Add(s.span)
	return true
}

// Active reports whether the endpoint is set aside at now.
func (s *SetAside) Active(now time.Time) bool { return now.Before(s.until) }

// Since is when the latest setting-aside began; Until is when it ends.
func (s *SetAside) Since() time.Time { return s.since }

// Until is when the latest setting-aside ends, zero if there was none.
func (s *SetAside) Until() time.Time { return s.until }

// End forgets everything: the source reports the endpoint ready anew.
func (s *SetAside) End() { *s = SetAside{} }
