// Package dynmod is the stock door: it lets an unmodified Envoy load shunt as a
// dynamic module. hooks.c exports the hooks of Envoy's abi.h and calls a
// handful of Go functions; this side translates between them and package
// filter. It takes no decision.
//
// Handles that C holds are integers: a configuration, a route, and for a
// request the slot of its worker. Only a worker's own thread uses its slots.
package dynmod

/*
#cgo linux LDFLAGS: -Wl,--unresolved-symbols=ignore-all
#cgo CFLAGS: -O2 -Wall -Wextra
#include <stdlib.h>
#include "hooks.h"
*/
import "C"

import (
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	_ "github.com/envoyproxy/envoy/source/extensions/dynamic_modules/abi" // pins the version of abi.h

	"github.com/shuntproxy/shunt/filter"
)

// filterName is what Envoy's configuration calls us.
const filterName = "shunt"

// door is the process's one instance: Envoy calls hooks without a context.
var door struct {
	once    sync.Once
	runtime *filter.Runtime

	workers atomic.Pointer[[]*worker] // replaced under mu, read by any thread
	configs table[filter.Generation]
	routes  table[filter.Route]
	mu      sync.Mutex
}

// table hands out integers for what C refers to. Slot 0 is none. Readers take
// no lock.
type table[T any] struct {
	mu   sync.Mutex
	rows atomic.Pointer[[]*T] // replaced under mu
}

func (t *table[T]) add(v *T) C.uint32_t {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := []*T{nil}
	if old := t.rows.Load(); old != nil {
		rows = append([]*T(nil), *old...)
	}
	for i := 1; i < len(rows); i++ {
		if rows[i] == nil {
			rows[i] = v
			t.rows.Store(&rows)
			return C.uint32_t(i)
		}
	}
	rows = append(rows, v)
	t.rows.Store(&rows)
	return C.uint32_t(len(rows) - 1)
}

func (t *table[T]) get(i C.uint32_t) *T {
	rows := t.rows.Load()
	if rows == nil || int(i) >= len(*rows) {
		return nil
	}
	return (*rows)[i]
}

func (t *table[T]) take(i C.uint32_t) *T {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.rows.Load()
	if old == nil || int(i) >= len(*old) {
		return nil
	}
	rows := append([]*T(nil), *old...)
	v := rows[i]
	rows[i] = nil
	t.rows.Store(&rows)
	return v
}

// start makes the runtime at the first configuration, when Envoy's callbacks
// may be used.
func start() *filter.Runtime {
	door.once.Do(func() {
		door.runtime = filter.NewRuntime(filter.Options{
			Log:          writeLog,
			Validate:     bool(C.shunt_validation_mode()),
			Concurrency:  int(C.shunt_concurrency()),
			MemoryCgroup: filter.CgroupMemory(os.ReadFile),
			TuneRuntime:  true,
			Environment:  os.LookupEnv,
		})
	})
	return door.runtime
}

func writeLog(l slog.Level, message string) {
	level := C.int(C.envoy_dynamic_module_type_log_level_Debug)
	switch l {
	case slog.LevelInfo:
		level = C.envoy_dynamic_module_type_log_level_Info
	case slog.LevelWarn:
		level = C.envoy_dynamic_module_type_log_level_Warn
	case slog.LevelError:
		level = C.envoy_dynamic_module_type_log_level_Error
	}
	for line := range strings.SplitSeq(message, "\n") {
		if line = "shunt: " + line; line != "shunt: " {
			C.shunt_log(level, (*C.char)(unsafe.Pointer(unsafe.StringData(line))), C.size_t(len(line)))
		}
	}
}

// worker is what belongs to one thread of Envoy's. Only that thread uses it.
type worker struct {
	streams []*stream // by slot - 1
	free    []uint32
	yield   yielder

	// reused by each call
	head    filter.Head
	verdict filter.Verdict
	chunks  [][]byte
}

// stream is one request and what its door needs of it.
type stream struct {
	filter.Request
	envoy  unsafe.Pointer // only passed back to Envoy
	hinted bool           // the metadata has a subset hint

	mu sync.Mutex // held for one callback that does not block
	// protected by mu
	scheduler unsafe.Pointer // nil unless the request has waited or may be evicted
	finished  bool
}

// Metadata implements filter.Host.
func (s *stream) Metadata(namespace, key string) string {
	var value C.shunt_buffer
	if !C.shunt_metadata(s.envoy, (*C.char)(unsafe.Pointer(unsafe.StringData(namespace))), C.size_t(len(namespace)),
		(*C.char)(unsafe.Pointer(unsafe.StringData(key))), C.size_t(len(key)), &value) {
		return ""
	}
	return borrow(value.ptr, value.length)
}

// SubsetHint implements filter.Host. Entries that are no text are left out.
func (s *stream) SubsetHint() ([]string, bool) {
	if !s.hinted {
		return nil, false
	}
	const namespace, key = filter.MetadataSubset, filter.HeaderSubset
	ns, nsLength := (*C.char)(unsafe.Pointer(unsafe.StringData(namespace))), C.size_t(len(namespace))
	name, nameLength := (*C.char)(unsafe.Pointer(unsafe.StringData(key))), C.size_t(len(key))
	size := C.shunt_metadata_list_size(s.envoy, ns, nsLength, name, nameLength)
	if size < 0 {
		return nil, false
	}
	list := make([]string, 0, size)
	for i := range size {
		var value C.shunt_buffer
		if C.shunt_metadata_list_string(s.envoy, ns, nsLength, name, nameLength, C.size_t(i), &value) {
			list = append(list, borrow(value.ptr, value.length))
		}
	}
	return list, true
}

// PrepareWait implements filter.Host.
func (s *stream) PrepareWait() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.scheduler == nil {
		s.scheduler = C.shunt_scheduler_new(s.envoy)
	}
}

// Post implements filter.Host.
func (s *stream) Post() { s.post(C.SHUNT_EVENT_RESUME) }

// Evictable implements filter.Host: any stream can be ended at any time.
func (s *stream) Evictable(bool) bool {
	s.PrepareWait()
	return true
}

// PostEvict implements filter.Host.
func (s *stream) PostEvict() { s.post(C.SHUNT_EVENT_EVICT) }

// post hands an event to the stream's worker. The lock keeps the scheduler alive
// until it is handed over.
func (s *stream) post(event C.uint64_t) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.finished && s.scheduler != nil {
		C.shunt_scheduler_commit(s.scheduler, event)
	}
}

func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.finished = true
	if s.scheduler != nil {
		C.shunt_scheduler_delete(s.scheduler)
		s.scheduler = nil
	}
}

//export shuntWorker
func shuntWorker() C.uint32_t {
	door.mu.Lock()
	defer door.mu.Unlock()
	workers := []*worker{nil}
	if old := door.workers.Load(); old != nil {
		workers = append([]*worker(nil), *old...)
	}
	workers = append(workers, &worker{yield: yielder{since: time.Now()}})
	door.workers.Store(&workers)
	return C.uint32_t(len(workers) - 1)
}

func workerOf(ref C.shunt_ref) *worker { return (*door.workers.Load())[ref.worker] }

func (w *worker) add(s *stream) uint32 {
	if n := len(w.free); n > 0 {
		slot := w.free[n-1]
		w.free = w.free[:n-1]
		w.streams[slot-1] = s
		return slot
	}
	w.streams = append(w.streams, s)
	return uint32(len(w.streams))
}

func (w *worker) at(ref C.shunt_ref) *stream { return w.streams[ref.slot-1] }

func (w *worker) remove(ref C.shunt_ref) *stream {
	s := w.streams[ref.slot-1]
	w.streams[ref.slot-1] = nil
	w.free = append(w.free, uint32(ref.slot))
	return s
}

//export shuntConfigNew
func shuntConfigNew(name *C.char, nameLength C.size_t, text *C.char, length C.size_t) (id C.uint32_t) {
	defer refuseOnPanic(&id)
	runtime := start()
	if got := borrow(name, nameLength); got != filterName {
		writeLog(slog.LevelError, "filter_name is "+got+"; it must be "+filterName)
		return 0
	}
	if err := filter.OnlyDoor(os.ReadFile); err != nil {
		writeLog(slog.LevelError, err.Error())
		return 0
	}
	gen, err := runtime.Load([]byte(borrow(text, length)))
	if err != nil {
		writeLog(slog.LevelError, "configuration refused: "+err.Error())
		return 0
	}
	return door.configs.add(gen)
}

//export shuntConfigFree
func shuntConfigFree(id C.uint32_t) {
	defer refuseOnPanic(nil)
	if gen := door.configs.take(id); gen != nil {
		gen.Release()
	}
}

//export shuntRouteNew
func shuntRouteNew(text *C.char, length C.size_t) (id C.uint32_t) {
	defer refuseOnPanic(&id)
	route, err := start().LoadRoute([]byte(borrow(text, length)))
	if err != nil {
		writeLog(slog.LevelError, "route configuration refused: "+err.Error())
		return 0
	}
	return door.routes.add(route)
}

//export shuntRouteFree
func shuntRouteFree(id C.uint32_t) {
	defer refuseOnPanic(nil)
	if route := door.routes.take(id); route != nil {
		start().ReleaseRoute(route)
	}
}

// refuseOnPanic keeps a panic of ours from ending Envoy: a configuration that
// makes one is refused.
func refuseOnPanic(id *C.uint32_t) {
	if cause := recover(); cause != nil {
		logPanic("configuration", cause)
		if id != nil {
			*id = 0
		}
	}
}

//export shuntHeaders
func shuntHeaders(envoy unsafe.Pointer, config, route C.uint32_t, ref *C.shunt_ref, headers *C.shunt_header, count C.size_t, end C.bool, tape *C.shunt_tape) (action C.int) {
	defer replyOnPanic("headers", &action, tape)
	w, s := begin(envoy, config, ref)
	w.readHead(headers, count)
	s.Headers(&w.head, bool(end), door.routes.get(route), &w.verdict)
	return record(&w.verdict, tape)
}

// begin makes the request of a new stream.
func begin(envoy unsafe.Pointer, config C.uint32_t, ref *C.shunt_ref) (*worker, *stream) {
	w := workerOf(*ref)
	s := &stream{envoy: envoy, hinted: bool(ref.hinted)}
	s.Init(s, door.configs.get(config))
	ref.slot = C.uint32_t(w.add(s))
	return w, s
}

//export shuntRequest
func shuntRequest(envoy unsafe.Pointer, config, route C.uint32_t, ref *C.shunt_ref, headers *C.shunt_header, count C.size_t, chunks *C.shunt_buffer, pieces C.size_t, tape *C.shunt_tape) (action C.int) {
	defer replyOnPanic("request", &action, tape)
	w, s := begin(envoy, config, ref)
	w.readHead(headers, count)
	w.head.Whole = true
	s.Headers(&w.head, false, door.routes.get(route), &w.verdict)
	size := w.readBody(chunks, pieces)
	if w.verdict.Action != filter.NeedBody {
		clear(w.chunks)
		action = record(&w.verdict, tape)
		tape.limit = C.int64_t(size) // what Envoy has to hold if the request waits
		return action
	}
	limit := w.verdict.BodyLimit
	record(&w.verdict, tape) // what to remove stands, whatever the body says
	if size > limit {
		w.verdict.Reset()
		s.TooLarge(&w.verdict)
	} else {
		s.Body(w.chunks, &w.verdict)
	}
	clear(w.chunks)
	action = record(&w.verdict, tape)
	tape.limit = C.int64_t(limit)
	return action
}

// readBody borrows the pieces of a body into w.chunks and returns their size.
func (w *worker) readBody(chunks *C.shunt_buffer, count C.size_t) (size int64) {
	w.chunks = w.chunks[:0]
	for _, c := range unsafe.Slice(chunks, count) {
		w.chunks = append(w.chunks, unsafe.Slice((*byte)(unsafe.Pointer(c.ptr)), c.length))
		size += int64(c.length)
	}
	return size
}

//export shuntBody
func shuntBody(ref C.shunt_ref, chunks *C.shunt_buffer, count C.size_t, tape *C.shunt_tape) (action C.int) {
	defer replyOnPanic("body", &action, tape)
	w := workerOf(ref)
	w.readBody(chunks, count)
	w.at(ref).Body(w.chunks, &w.verdict)
	clear(w.chunks)
	return record(&w.verdict, tape)
}

//export shuntMore
func shuntMore(ref C.shunt_ref, size C.int64_t, tape *C.shunt_tape) (action C.int) {
	defer replyOnPanic("body", &action, tape)
	w := workerOf(ref)
	w.at(ref).More(int64(size), &w.verdict)
	return record(&w.verdict, tape)
}

//export shuntTooLarge
func shuntTooLarge(ref C.shunt_ref, tape *C.shunt_tape) (action C.int) {
	defer replyOnPanic("body", &action, tape)
	w := workerOf(ref)
	w.verdict.Reset()
	w.at(ref).TooLarge(&w.verdict)
	return record(&w.verdict, tape)
}

//export shuntTrailers
func shuntTrailers(ref C.shunt_ref, trailers *C.shunt_header, count C.size_t, tape *C.shunt_tape) {
	action := C.int(0)
	defer replyOnPanic("trailers", &action, tape)
	w := workerOf(ref)
	w.readHead(trailers, count)
	w.at(ref).Trailers(&w.head, &w.verdict)
	record(&w.verdict, tape)
}

//export shuntResume
func shuntResume(ref C.shunt_ref, tape *C.shunt_tape) (action C.int) {
	defer replyOnPanic("resume", &action, tape)
	w := workerOf(ref)
	w.at(ref).Resume(&w.verdict)
	return record(&w.verdict, tape)
}

//export shuntEvicted
func shuntEvicted(ref C.shunt_ref, status C.uint32_t, answered, complete C.bool, firstByte C.int64_t, tape *C.shunt_tape) (action C.int) {
	defer replyOnPanic("evicted", &action, tape)
	w := workerOf(ref)
	w.at(ref).Evicted(filter.End{
		Answered: bool(answered), Complete: bool(complete), Status: int(status), FirstByte: time.Duration(firstByte),
	}, &w.verdict)
	return record(&w.verdict, tape)
}

//export shuntServed
func shuntServed(ref C.shunt_ref, address *C.char, length C.size_t, tape *C.shunt_tape) {
	action := C.int(0)
	defer replyOnPanic("served", &action, tape)
	w := workerOf(ref)
	w.at(ref).Served(borrow(address, length), &w.verdict)
	record(&w.verdict, tape)
}

//export shuntResponse
func shuntResponse(ref C.shunt_ref, status C.uint32_t, contentType, encoding *C.shunt_buffer, end C.bool, tape *C.shunt_tape) {
	defer passOnPanic("response", tape)
	w := workerOf(ref)
	w.yield.calls++
	w.at(ref).Response(&filter.ResponseHead{
		Status: int(status), End: bool(end), ContentType: borrow(contentType.ptr, contentType.length),
		ContentEncoding: borrow(encoding.ptr, encoding.length),
	}, &w.verdict)
	record(&w.verdict, tape)
}

//export shuntResponseBody
func shuntResponseBody(ref C.shunt_ref, chunks *C.shunt_buffer, count C.size_t, tape *C.shunt_tape) (changed C.bool) {
	defer passOnPanic("response body", tape)
	w := workerOf(ref)
	w.yield.calls++
	size := w.readBody(chunks, count)
	w.at(ref).ResponseBody(w.chunks, &w.verdict)
	tape.watch = C.bool(w.verdict.Watch)
	if len(w.verdict.Edits) > 0 {
		recordBody(&w.verdict, w.chunks, size, tape)
		changed = true
	}
	clear(w.chunks)
	return changed
}

// passOnPanic lets a response go on as it is.
func passOnPanic(where string, tape *C.shunt_tape) {
	if cause := recover(); cause != nil {
		logPanic(where, cause)
		tape.len, tape.watch = 0, false
	}
}

//export shuntFinish
func shuntFinish(ref C.shunt_ref, status C.uint32_t, answered, complete C.bool, details *C.char, length C.size_t, firstByte C.int64_t, tape *C.shunt_tape) {
	action := C.int(0)
	defer replyOnPanic("finish", &action, tape)
	w := workerOf(ref)
	s := w.remove(ref)
	s.close()
	s.Finish(filter.End{
		Answered: bool(answered), Complete: bool(complete), Status: int(status), Details: borrow(details, length), FirstByte: time.Duration(firstByte),
	}, &w.verdict)
	record(&w.verdict, tape)
	w.yield.maybe(door.runtime)
}

func (w *worker) readHead(headers *C.shunt_header, count C.size_t) {
	w.yield.calls++
	w.head.Reset()
	if count == 0 {
		return
	}
	for _, h := range unsafe.Slice(headers, count) {
		w.head.Add(borrow(h.key_ptr, h.key_length), borrow(h.value_ptr, h.value_length))
	}
}

// borrow makes a string of Envoy's memory: valid for the callback only.
func borrow(p *C.char, n C.size_t) string {
	if n == 0 {
		return ""
	}
	return unsafe.String((*byte)(unsafe.Pointer(p)), int(n))
}

// replyOnPanic is the last resort: package filter contains its own panics, so
// what comes here is a fault of the door.
func replyOnPanic(where string, action *C.int, tape *C.shunt_tape) {
	cause := recover()
	if cause == nil {
		return
	}
	logPanic(where, cause)
	var v filter.Verdict
	v.Action = filter.Reply
	v.Reply = filter.LocalReply{Status: filter.DropInternal.Status(), Details: "shunt_" + filter.DropInternal.String(),
		Headers: []filter.Header{{Key: filter.HeaderDropReason, Value: filter.DropInternal.String()}}}
	*action = record(&v, tape)
}

func logPanic(where string, cause any) {
	writeLog(slog.LevelError, "internal error of the door in "+where+": "+fmt.Sprint(cause)+"\n"+string(debug.Stack()))
}
