package openai

import (
	"encoding/binary"
	"math/bits"
)

const (
	lows  = 0x0101010101010101
	highs = 0x8080808080808080
)

// stops marks, in the high bit of each byte of w, quotes, backslashes and control characters. The lowest mark is
// exact; one above it may be false, since a subtraction borrows only out of a byte that is itself marked.
func stops(w uint64) uint64 {
	return (((w ^ lows*'"') - lows) | ((w ^ lows*'\\') - lows) | (w - lows*0x20)) & ^w & highs
}

// indexStopWords is indexStop, eight bytes at a time.
func indexStopWords(p []byte, i int) int {
	for len(p)-i >= 32 {
		q := p[i : i+32 : i+32]
		a := stops(binary.LittleEndian.Uint64(q))
		if a != 0 {
			return i + bits.TrailingZeros64(a)>>3
		}
		b := stops(binary.LittleEndian.Uint64(q[8:]))
		c := stops(binary.LittleEndian.Uint64(q[16:]))
		d := stops(binary.LittleEndian.Uint64(q[24:]))
		if b|c|d != 0 {
			switch {
			case b != 0:
				return i + 8 + bits.TrailingZeros64(b)>>3
			case c != 0:
				return i + 16 + bits.TrailingZeros64(c)>>3
			}
			return i + 24 + bits.TrailingZeros64(d)>>3
		}
		i += 32
	}
	for len(p)-i >= 8 {
		if a := stops(binary.LittleEndian.Uint64(p[i:])); a != 0 {
			return i + bits.TrailingZeros64(a)>>3
		}
		i += 8
	}
	for ; i < len(p); i++ {
		if c := p[i]; c == '"' || c == '\\' || c < 0x20 {
			return i
		}
	}
	return i
}

// skipPlainWords is skipPlain by way of indexStop.
func skipPlainWords(p []byte, i int) (end, escapes int) {
	for {
		i = indexStop(p, i)
		if i+1 >= len(p) || p[i] != '\\' || unescaped[p[i+1]] == 0 {
			return i, escapes
		}
		i, escapes = i+2, escapes+1
	}
}

// unescapeWords is unescape, eight bytes at a time.
func unescapeWords(dst, p []byte) (read, written int) {
	for {
		if len(p)-read >= 8 && len(dst)-written >= 8 {
			w := binary.LittleEndian.Uint64(p[read:])
			binary.LittleEndian.PutUint64(dst[written:], w)
			plain := 8
			if a := stops(w); a != 0 {
				plain = bits.TrailingZeros64(a) >> 3
			}
			read, written = read+plain, written+plain
			if plain == 8 {
				continue
			}
		}
		if read == len(p) || written == len(dst) {
			return read, written
		}
		c := p[read]
		switch {
		case c == '\\':
			if read+1 == len(p) || unescaped[p[read+1]] == 0 {
				return read, written
			}
			c = unescaped[p[read+1]]
			read++
		case c == '"' || c < 0x20:
			return read, written
		}
		dst[written] = c
		read, written = read+1, written+1
	}
}
