package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// State is what GET /_sim/state answers.
type State struct {
	Name     string       `json:"name"`
	Address  string       `json:"address"`
	Counters              // flat
	Hold     bool         `json:"hold"`
	Running  int          `json:"running"` // as the metrics show it
	Waiting  int          `json:"waiting"`
	KVUsage  float64      `json:"kv_usage"`
	Load     Load         `json:"load"`
	Delays   Delays       `json:"delays"`
	Faults   []Fault      `json:"faults"`
	Metrics  MetricsFault `json:"metrics"`
	Quirks   Quirks       `json:"quirks"`
	Asleep   bool         `json:"asleep"`
	Health   int          `json:"health"`
	Refusing bool         `json:"refusing"`
}

// State is the whole present state.
func (s *Server) State() State {
	snap := s.Snapshot()
	st := State{Name: s.Name(), Address: s.Addr(), Running: snap.Running, Waiting: snap.Waiting, KVUsage: snap.KVUsage, Faults: []Fault{}}
	s.connMu.Lock()
	st.Refusing = s.listener == nil
	s.connMu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	st.Counters = s.countersLocked()
	st.Hold, st.Load, st.Delays, st.Metrics, st.Quirks, st.Asleep, st.Health = s.hold, s.load, s.delays, s.metrics, s.quirks, s.asleep, s.health
	for _, f := range s.faults {
		left := f.Fault
		left.Count = max(f.left, 0)
		st.Faults = append(st.Faults, left)
	}
	return st
}

// Control is the control API, which the engine also serves under /_sim/ on its own port:
//
//	GET  /_sim/state[?in_flight=N&held=N&received=N&answered=N&aborted=N&wait=5s]   waits until all are equal; 408 if not in time
//	POST /_sim/load      Load           POST /_sim/delays  Delays
//	POST /_sim/faults    [Fault…]       POST /_sim/metrics MetricsFault
//	POST /_sim/quirks    Quirks
//	POST /_sim/hold      {"hold":true}  POST /_sim/release[?n=3]
//	POST /_sim/refuse    {"cut":false,"for":"2s"}   POST /_sim/accept   (by way of the control listener)
//	POST /_sim/asleep    {"asleep":true}            POST /_sim/health   {"status":503}
//	GET  /_sim/requests[?path=/v1/models]           DELETE /_sim/requests
//	GET  /_sim/scrape    the newest request for the metrics page
//	POST /_sim/reset     everything
//
// POSTs answer with the state. Bodies are strict JSON; durations are strings such as "10ms".
func (s *Server) Control() http.Handler { return http.HandlerFunc(s.serveControl) }

func (s *Server) serveControl(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		abortConn(r)
	}
	s.handlers.Add(1)
	s.mu.Unlock()
	defer s.handlers.Done()

	name := strings.TrimPrefix(r.URL.Path, "/_sim/")
	var err error
	switch r.Method + " " + name {
	case "GET state":
		err = s.waitFor(r)
	case "POST load":
		err = control(r, func(l Load) error { s.SetLoad(l); return nil })
	case "POST delays":
		err = control(r, func(d Delays) error { s.SetDelays(d); return nil })
	case "POST faults":
		err = control(r, func(f []Fault) error { return s.SetFaults(f...) })
	case "POST metrics":
		err = control(r, s.SetMetricsFault)
	case "POST quirks":
		err = control(r, s.SetQuirks)
	case "POST hold":
		err = control(r, func(v struct {
			Hold bool `json:"hold"`
		}) error {
			s.SetHold(v.Hold)
			return nil
		})
	case "POST release":
		n := 0
		if q := r.URL.Query().Get("n"); q != "" && q != "all" {
			n, err = strconv.Atoi(q)
		}
		if err == nil {
			writeJSON(w, http.StatusOK, map[string]int{"released": s.Release(n)})
			return
		}
	case "POST refuse":
		err = control(r, func(v struct {
			Cut bool     `json:"cut"`
			For Duration `json:"for"`
		}) error {
			s.Refuse(v.Cut, time.Duration(v.For))
			return nil
		})
	case "POST accept":
		err = s.Accept()
	case "POST asleep":
		err = control(r, func(v struct {
			Asleep bool `json:"asleep"`
		}) error {
			s.SetAsleep(v.Asleep)
			return nil
		})
	case "POST health":
		err = control(r, func(v struct {
			Status int `json:"status"`
		}) error {
			return s.SetHealth(v.Status)
		})
	case "GET requests":
		counters := s.Counters()
		writeJSON(w, http.StatusOK, struct {
			Counters
			Requests []Received `json:"requests"`
		}{counters, s.Requests(r.URL.Query().Get("path"))})
		return
	case "DELETE requests":
		s.ResetRequests()
	case "GET scrape":
		rec, ok := s.LastScrape()
		if !ok {
			writeJSON(w, http.StatusNotFound, map[string]string{"error": "the metrics page was not read yet"})
			return
		}
		writeJSON(w, http.StatusOK, rec)
		return
	case "POST reset":
		err = s.Reset()
	default:
		writeJSON(w, http.StatusNotFound, map[string]string{"error": r.Method + " " + r.URL.Path + " is not in the control API, valid: GET state|requests|scrape, " +
			"DELETE requests, POST load|delays|faults|metrics|quirks|hold|release|refuse|accept|asleep|health|reset, all under /_sim/"})
		return
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		writeJSON(w, http.StatusRequestTimeout, map[string]string{"error": err.Error()})
	case err != nil:
		writeJSON(w, http.StatusBadRequest, map[string]string{"error": err.Error()})
	default:
		writeJSON(w, http.StatusOK, s.State())
	}
}

// control decodes a strict JSON body and hands it on.
func control[T any](r *http.Request, set func(T) error) error {
	dec := json.NewDecoder(io.LimitReader(r.Body, 1<<20))
	dec.DisallowUnknownFields()
	var v T
	if err := dec.Decode(&v); err != nil {
		return fmt.Errorf("body of %s: %w", r.URL.Path, err)
	}
	return set(v)
}

// waitFor waits until the counters that the query names have its values.
func (s *Server) waitFor(r *http.Request) error {
	q := r.URL.Query()
	limit := 5 * time.Second
	if v := q.Get("wait"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil {
			return fmt.Errorf("wait: %w", err)
		}
		limit = d
	}
	want := map[string]int{}
	for _, name := range []string{"in_flight", "held", "received", "answered", "aborted"} {
		if v := q.Get(name); v != "" {
			n, err := strconv.Atoi(v)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			want[name] = n
		}
	}
	if len(want) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), limit)
	defer cancel()
	return s.Wait(ctx, func(c Counters) bool {
		have := map[string]int{"in_flight": c.InFlight, "held": c.Held, "received": c.Received, "answered": c.Answered, "aborted": c.Aborted}
		for name, n := range want {
			if have[name] != n {
				return false
			}
		}
		return true
	})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client may be gone
}
