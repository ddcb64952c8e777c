//go:build shunttest

package filter

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shuntproxy/shunt/internal/flowcontrol"
)

// injecting is true in builds that can be told to fail, by the tag shunttest.
// They are for tests in a real Envoy: the header headerTest asks for a panic
// ("panic-body"), for a wait that only the admin listener or the time given
// ends ("wait-5s"), or for an eviction as soon as it is sent ("evict").
const injecting = true

const headerTest = "x-shunt-test"

func inject(test, where string) {
	calls.Lock()
	calls.byName[where]++
	calls.Unlock()
	if test == "panic-"+where {
		panic("injected in " + where)
	}
}

// calls counts the calls of a door by the callback they come from, so that a
// test can show what a request costs without timing it.
var calls = struct {
	sync.Mutex
	byName map[string]int
}{byName: map[string]int{}}

// delays is the test policy's queue, one for the process.
var delays struct {
	sync.Mutex
	queue *flowcontrol.Queue
}

func delayQueue(rt *Runtime) *flowcontrol.Queue {
	delays.Lock()
	defer delays.Unlock()
	if delays.queue == nil {
		delays.queue = rt.room.NewQueue()
	}
	return delays.queue
}

// injectWait lets a request wait once.
func (r *Request) injectWait(now time.Time, v *Verdict) bool {
	span, ok := strings.CutPrefix(r.test, "wait-")
	if !ok || r.waited > 0 {
		return false
	}
	d, err := time.ParseDuration(span)
	if err != nil {
		return false
	}
	if !r.hold(delayQueue(r.gen.runtime), now.Add(d), v) {
		r.drop(DropSaturated, "no room to wait", v)
	}
	return true
}

// injectResume answers a request whose test wait ran out.
func (r *Request) injectResume(v *Verdict) bool {
	if !strings.HasPrefix(r.test, "wait-") || r.wait.outcome != flowcontrol.Expired {
		return false
	}
	r.drop(DropTTLExpired, "the test wait ran out", v)
	return true
}

// injectEvict asks a request to end from another goroutine, as flow control
// does.
func (r *Request) injectEvict() {
	if (r.test == "evict" || r.test == "panic-evicted") && r.host.Evictable(true) {
		go r.Evict() // ends with the call
	}
}

// injectAdmin lets tests grant, POST /test/grant?n=3, and count, GET
// /test/calls.
func injectAdmin(rt *Runtime, mux *http.ServeMux) {
	mux.HandleFunc("GET /test/calls", func(w http.ResponseWriter, _ *http.Request) {
		calls.Lock()
		defer calls.Unlock()
		_ = json.NewEncoder(w).Encode(calls.byName) // a client that has gone needs no answer
	})
	mux.HandleFunc("POST /test/grant", func(w http.ResponseWriter, req *http.Request) {
		n, err := strconv.Atoi(req.URL.Query().Get("n"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_, _ = w.Write([]byte(strconv.Itoa(delayQueue(rt).Grant(n)) + "\n"))
	})
}
