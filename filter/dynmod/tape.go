package dynmod

/*
#include <stdlib.h>
#include "hooks.h"
*/
import "C"

import (
	"encoding/binary"
	"math"
	"unsafe"

	"github.com/shuntproxy/shunt/filter"
)

// record appends a verdict to a tape and returns its action. The order of the
// records is that in which a verdict is applied.
func record(v *filter.Verdict, tape *C.shunt_tape) C.int {
	t := recorder{tape: tape, at: unsafe.Slice((*byte)(unsafe.Pointer(tape.data)), tape.cap)[:tape.len]}
	for _, name := range v.Remove {
		t.text(C.SHUNT_OP_REMOVE, name, "")
	}
	for _, h := range v.Set {
		t.text(C.SHUNT_OP_SET, h.Key, h.Value)
	}
	if e := &v.Body; e.With != nil {
		t.edit(e.Offset, e.Length, e.With)
	}
	if v.Destination != "" {
		t.text(C.SHUNT_OP_DESTINATION, "", v.Destination)
	}
	for i := range v.Metadata {
		if f := &v.Metadata[i]; f.Text != "" {
			t.text(C.SHUNT_OP_TEXT, f.Key, f.Text)
		} else {
			t.words(C.SHUNT_OP_NUMBER, f.Key, math.Float64bits(f.Number))
		}
	}
	for _, h := range v.ResponseHeaders {
		t.text(C.SHUNT_OP_RESPONSE, h.Key, h.Value)
	}
	if v.Action == filter.Reply {
		r := &v.Reply
		t.words(C.SHUNT_OP_STATUS, "", uint64(uint32(r.Status))|uint64(uint32(r.GRPC))<<32)
		for _, h := range r.Headers {
			t.text(C.SHUNT_OP_HEADER, h.Key, h.Value)
		}
		t.text(C.SHUNT_OP_DETAILS, "", r.Details)
		if r.GRPC != 0 {
			t.text(C.SHUNT_OP_BODY, "", r.Message)
		} else {
			t.text(C.SHUNT_OP_BODY, "", unsafe.String(unsafe.SliceData(r.Body), len(r.Body)))
		}
	}
	tape.len = C.size_t(len(t.at))
	tape.limit = C.int64_t(v.BodyLimit)
	tape.room = C.int64_t(v.BodyRoom)
	tape.watch = C.bool(v.Watch)
	return C.int(v.Action)
}

// recordBody writes a body, changed as the verdict says, to an empty tape.
func recordBody(v *filter.Verdict, chunks [][]byte, size int64, tape *C.shunt_tape) {
	t := recorder{tape: tape, at: unsafe.Slice((*byte)(unsafe.Pointer(tape.data)), tape.cap)[:0]}
	t.room(int(size) + len(v.Edits)*len(v.Name))
	t.at = v.AppendEdited(t.at, chunks)
	tape.len = C.size_t(len(t.at))
}

// recorder appends records to C memory.
type recorder struct {
	tape *C.shunt_tape
	at   []byte
}

// recordHead is one byte of op and two lengths.
const recordHead = 9

func (t *recorder) text(op byte, key, value string) {
	t.room(recordHead + len(key) + len(value))
	t.head(op, len(key), len(value))
	t.at = append(t.at, key...)
	t.at = append(t.at, value...)
}

// words writes eight bytes in the machine's order.
func (t *recorder) words(op byte, key string, value uint64) {
	t.room(recordHead + len(key) + 8)
	t.head(op, len(key), 8)
	t.at = append(t.at, key...)
	t.at = binary.NativeEndian.AppendUint64(t.at, value)
}

// edit writes two numbers, as a key, and what takes the place of the bytes.
func (t *recorder) edit(offset, length int64, with []byte) {
	t.room(recordHead + 16 + len(with))
	t.head(C.SHUNT_OP_EDIT, 16, len(with))
	t.at = binary.NativeEndian.AppendUint64(t.at, uint64(offset))
	t.at = binary.NativeEndian.AppendUint64(t.at, uint64(length))
	t.at = append(t.at, with...)
}

func (t *recorder) head(op byte, key, value int) {
	t.at = append(t.at, op)
	t.at = binary.NativeEndian.AppendUint32(t.at, uint32(key))
	t.at = binary.NativeEndian.AppendUint32(t.at, uint32(value))
}

// room makes sure that n bytes fit, in memory of malloc's if they must: append
// would move the tape to Go memory, where C can't follow.
func (t *recorder) room(n int) {
	if len(t.at)+n <= cap(t.at) {
		return
	}
	size := 2*cap(t.at) + n
	grown := unsafe.Slice((*byte)(C.malloc(C.size_t(size))), size)[:len(t.at)]
	copy(grown, t.at)
	if t.tape.grown {
		C.free(unsafe.Pointer(t.tape.data))
	}
	t.tape.data = (*C.uint8_t)(unsafe.Pointer(unsafe.SliceData(grown)))
	t.tape.cap = C.size_t(size)
	t.tape.grown = true
	t.at = grown
}
