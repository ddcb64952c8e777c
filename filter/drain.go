package filter

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// flights counts the requests that engines work on, all pools together. It is
// split, so that workers do not fight for one cache line.
type flights [16]struct {
	n atomic.Int64
	_ [56]byte
}

func (f *flights) add(n int64) { f[rand.Uint32()%uint32(len(f))].n.Add(n) }

// sum is not of one moment: an end may be seen before its beginning.
func (f *flights) sum() (n int64) {
	for i := range f {
		n += f[i].n.Load()
	}
	return max(0, n)
}

// drainState is where a process stands that takes leave.
type drainState struct {
	// protected by Runtime.mu
	since time.Time // of the drain's beginning, zero for none
	until time.Time // when its grace ends
	timer *time.Timer
}

// The values of DrainStatus.State.
const (
	StateServing  = "serving"
	StateGrace    = "grace"
	StateDraining = "draining"
)

// DrainStatus is what /drain answers.
type DrainStatus struct {
	// State is serving, grace (not ready, but serving) or draining (new and waiting
	// requests are refused).
	State string `json:"state"` // StateServing, StateGrace or StateDraining
	// GraceSeconds is what is left of the grace.
	GraceSeconds float64 `json:"grace_seconds"`
	// InFlight is the number of requests that engines work on, and Waiting that of
	// those that wait here.
	InFlight int64 `json:"in_flight_requests"`
	Waiting  int   `json:"waiting_requests"`
}

// Drain makes the process unready at once, and lets it refuse what is new or
// waits once grace is over. A second call changes the grace.
func (rt *Runtime) Drain(grace time.Duration) {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	now := rt.now()
	d := &rt.drain
	if d.since.IsZero() {
		d.since = now
		rt.log(slog.LevelInfo, fmt.Sprintf("drain: not ready from now on; requests are served for %v more", grace))
	}
	if d.timer != nil {
		d.timer.Stop()
	}
	d.until = now.Add(grace)
	if rt.room.Draining() {
		return
	}
	mine := d.until
	d.timer = time.AfterFunc(grace, func() {
		defer rt.contain("drain")
		rt.mu.Lock()
		current := rt.drain.until.Equal(mine) && !rt.drain.since.IsZero()
		if current {
			rt.room.Drain() // with the lock held: an undrain comes before or after
		}
		rt.mu.Unlock()
		if current {
			rt.log(slog.LevelInfo, "drain: requests that wait, and new ones, get "+DropShuttingDown.String())
		}
	})
}

// Undrain takes a Drain back.
func (rt *Runtime) Undrain() {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	if rt.drain.since.IsZero() {
		return
	}
	if rt.drain.timer != nil {
		rt.drain.timer.Stop()
	}
	rt.drain = drainState{}
	rt.room.Undrain()
	rt.log(slog.LevelInfo, "drain: taken back")
}

// draining reports whether Drain was called, and Undrain not since.
func (rt *Runtime) draining() bool {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return !rt.drain.since.IsZero()
}

// DrainStatus says how far a drain is.
func (rt *Runtime) DrainStatus() DrainStatus {
	waiting, _, _ := rt.room.Waiting()
	st := DrainStatus{State: StateServing, InFlight: rt.flights.sum(), Waiting: waiting}
	rt.mu.Lock()
	defer rt.mu.Unlock()
	switch {
	case rt.drain.since.IsZero():
	case rt.room.Draining():
		st.State = StateDraining
	default:
		st.State = StateGrace
		st.GraceSeconds = max(0, rt.drain.until.Sub(rt.now()).Seconds())
	}
	return st
}

// configuredGrace is drain.grace of the newest configuration.
func (rt *Runtime) configuredGrace() time.Duration {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	var newest *Generation
	for g := range rt.live {
		if newest == nil || g.order > newest.order {
			newest = g
		}
	}
	if newest == nil {
		return 0
	}
	return newest.settings.Load().cfg.Drain.Grace
}

// HeaderAdmin has to be 1 on each POST to the admin listener: no page in a
// browser can send it.
const HeaderAdmin = "x-shunt-admin"

// changing guards what changes the process.
func changing(handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(HeaderAdmin) != "1" {
			http.Error(w, "send the header "+HeaderAdmin+": 1", http.StatusForbidden)
			return
		}
		handler(w, r)
	}
}

// parameters are those of a query; with another than the valid ones the request is
// answered.
func parameters(w http.ResponseWriter, r *http.Request, valid ...string) (query url.Values, ok bool) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		http.Error(w, "the query: "+err.Error(), http.StatusBadRequest)
		return nil, false
	}
	for name := range query {
		if !slices.Contains(valid, name) {
			http.Error(w, fmt.Sprintf("unknown parameter %s, valid: %s", quote(name), strings.Join(valid, ", ")), http.StatusBadRequest)
			return nil, false
		}
	}
	return query, true
}

// drainHandlers are GET and POST /drain, and POST /undrain.
func (rt *Runtime) drainHandlers(mux *http.ServeMux) {
	status := func(w http.ResponseWriter) {
		w.Header().Set("content-type", "application/json")
		_ = json.NewEncoder(w).Encode(rt.DrainStatus()) // a client that has gone needs no answer
	}
	mux.HandleFunc("GET /drain", func(w http.ResponseWriter, _ *http.Request) { status(w) })
	mux.HandleFunc("POST /drain", changing(func(w http.ResponseWriter, r *http.Request) {
		grace := rt.configuredGrace()
		query, ok := parameters(w, r, "grace")
		if !ok {
			return
		}
		if text := query.Get("grace"); text != "" {
			var err error
			if grace, err = time.ParseDuration(text); err != nil || grace < 0 || grace > time.Hour {
				http.Error(w, fmt.Sprintf("grace=%s is not a duration from 0s to 1h, such as 15s", text), http.StatusBadRequest)
				return
			}
		}
		rt.Drain(grace)
		status(w)
	}))
	mux.HandleFunc("POST /undrain", changing(func(w http.ResponseWriter, _ *http.Request) {
		rt.Undrain()
		status(w)
	}))
}
