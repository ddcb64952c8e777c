package openai

import (
	"encoding/binary"
	"math/bits"

	"golang.org/x/sys/cpu"
)

var hasAVX2 = cpu.X86.HasAVX2 && cpu.X86.HasPOPCNT

// indexStopSSE2 is indexStop for the n/64 whole blocks at p; without a stop it returns their length.
//
//go:noescape
func indexStopSSE2(p *byte, n int) int

// skipPlainAVX2 is skipPlain for the n/64 whole blocks at p. An escape that the last one cuts is left out.
//
//go:noescape
func skipPlainAVX2(p *byte, n int) (pos, escapes int)

// unescapeAVX2 is unescape while 33 bytes are left at src and room for 32 at dst.
//
//go:noescape
func unescapeAVX2(dst *byte, room int, src *byte, n int) (read, written int)

// indexStop returns the index, from i on, of the first byte that ends a run of plain string bytes, or len(p).
func indexStop(p []byte, i int) int {
	if n := len(p) - i; n >= 64 {
		j := indexStopSSE2(&p[i], n)
		if i += j; j < n&^63 {
			return i
		}
	}
	return indexStopWords(p, i)
}

// skipPlain returns the index, from i on, of the first byte that is neither plain nor part of a one-byte escape: a
// quote, a control character, the backslash of any other escape or of one that p cuts; or len(p). escapes counts the
// escapes before it.
func skipPlain(p []byte, i int) (end, escapes int) {
	if hasAVX2 && len(p)-i >= 64 {
		if j := nearStop(p[i : i+16]); j < 16 && p[i+j] == '"' {
			return i + j, 0
		}
		end, escapes = skipPlainAVX2(&p[i], len(p)-i)
		if i += end; len(p)-i > 64 { // it stopped: there is more than it leaves at the end, a cut escape included
			return i, escapes
		}
	}
	end, more := skipPlainWords(p, i)
	return end, escapes + more
}

// unescape copies the plain bytes that p begins with to dst, and what its one-byte escapes stand for, as far as there
// is room. It stops before a quote, a control character, the backslash of any other escape or of one that p cuts.
func unescape(dst, p []byte) (read, written int) {
	if hasAVX2 && len(p) > 32 && len(dst) >= 32 {
		read, written = unescapeAVX2(&dst[0], len(dst), &p[0], len(p))
	}
	r, w := unescapeWords(dst[written:], p[read:])
	return read + r, written + w
}

// nearStop returns the index of the first byte in q that is not plain, or its length, which is 16: most keys and
// many values end so soon that the routines above would take longer to begin.
func nearStop(q []byte) int {
	if a := stops(binary.LittleEndian.Uint64(q)); a != 0 {
		return bits.TrailingZeros64(a) >> 3
	}
	return 8 + bits.TrailingZeros64(stops(binary.LittleEndian.Uint64(q[8:])))>>3
}
