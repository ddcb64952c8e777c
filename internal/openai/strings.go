package openai

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
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

// indexStop returns the index, from i on, of the first byte that ends a run of plain string bytes, or len(p).
func indexStop(p []byte, i int) int {
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

// unescaped maps the byte after a backslash to what it stands for; 0 is not a one-byte escape.
var unescaped = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// hexValue maps a hexadecimal digit to its value plus 1; 0 is none.
var hexValue = [256]uint8{
	'0': 1, '1': 2, '2': 3, '3': 4, '4': 5, '5': 6, '6': 7, '7': 8, '8': 9, '9': 10,
	'a': 11, 'b': 12, 'c': 13, 'd': 14, 'e': 15, 'f': 16, 'A': 11, 'B': 12, 'C': 13, 'D': 14, 'E': 15, 'F': 16,
}

// str goes on inside a string and returns where it ended or the chunk did. Escapes that lie whole in the chunk
// are handled here, split ones by the states of write.
func (m *machine) str(p []byte, i int) int {
	start := i
	for {
		j := indexStop(p, i)
		if j == len(p) {
			m.take(p[start:j])
			return j
		}
		switch c := p[j]; {
		case c == '"':
			if m.isKey {
				m.endKey(p[start:j])
			} else {
				m.take(p[start:j])
				m.endString(m.base + int64(j))
			}
			return j + 1
		case c != '\\':
			m.take(p[start:j])
			m.fail(faultControl, j, c)
			return j
		}
		if j+1 == len(p) {
			m.take(p[start:j])
			m.state = stEscape
			return j + 1
		}
		e := p[j+1]
		if d := unescaped[e]; d != 0 {
			i = j + 2
			if m.mode == modeSkip {
				start = i
				continue
			}
			if m.mode == modeText && m.sink == nil && m.high == 0 {
				m.text[m.lane] += int64(j - start + 1)
				start = i
				continue
			}
			m.take(p[start:j])
			start = j + 1
			if d != e { // else the byte stands for itself and begins the next run
				m.take(unescaped[e : int(e)+1])
				start = i
			}
			continue
		}
		if e == 'u' && len(p)-j >= 6 {
			a, b, c, d := hexValue[p[j+2]], hexValue[p[j+3]], hexValue[p[j+4]], hexValue[p[j+5]]
			if a != 0 && b != 0 && c != 0 && d != 0 {
				if m.mode != modeSkip {
					m.take(p[start:j])
					m.unit(uint16(a-1)<<12 | uint16(b-1)<<8 | uint16(c-1)<<4 | uint16(d-1))
				}
				i = j + 6
				start = i
				continue
			}
		}
		m.take(p[start:j])
		m.state = stEscape // finds the bad digit, or waits for the next chunk
		return j + 1
	}
}

// escape handles the byte after a backslash that str could not finish.
func (m *machine) escape(i int, c byte) {
	switch d := unescaped[c]; {
	case d != 0:
		m.take(unescaped[c : int(c)+1])
		m.state = stString
	case c == 'u':
		m.hexN, m.hexV, m.state = 0, 0, stHex
	default:
		m.fail(faultEscape, i, c)
	}
}

func (m *machine) hexDigit(i int, c byte) {
	v := hexValue[c]
	if v == 0 {
		m.fail(faultEscape, i, c)
		return
	}
	m.hexV = m.hexV<<4 | uint16(v-1)
	if m.hexN++; m.hexN == 4 {
		m.state = stString
		if m.mode != modeSkip {
			m.unit(m.hexV)
		}
	}
}

// unit takes one UTF-16 code unit of a \u escape. A surrogate without its partner becomes U+FFFD, as in
// encoding/json and in most engines' parsers.
func (m *machine) unit(u uint16) {
	r := rune(u)
	if m.high != 0 {
		hi := rune(m.high)
		m.high = 0
		if u >= 0xDC00 && u < 0xE000 {
			m.rune(utf16.DecodeRune(hi, r))
			return
		}
		m.rune(utf8.RuneError)
	}
	if u >= 0xD800 && u < 0xDC00 {
		m.high = u
		return
	}
	m.rune(r) // AppendRune turns a lone low surrogate into U+FFFD
}

func (m *machine) rune(r rune) { m.take(utf8.AppendRune(m.buf[:0], r)) }

// take receives a run of unescaped bytes of the string being read. b is only valid during the call.
func (m *machine) take(b []byte) {
	if m.mode == modeText && len(b) > 0 && m.high == 0 { // nearly all bytes come this way
		m.text[m.lane] += int64(len(b))
		if m.sink != nil {
			m.sink.Text(m.lane, b)
		}
		return
	}
	m.takeSlow(b)
}

func (m *machine) takeSlow(b []byte) {
	if m.mode == modeSkip || len(b) == 0 {
		return
	}
	if m.high != 0 {
		m.high = 0
		m.rune(utf8.RuneError)
	}
	switch m.mode {
	case modeText:
		m.take(b)
	case modeKey:
		if int(m.keyLen)+len(b) > maxKey {
			m.mode = modeSkip
			return
		}
		m.keyLen += uint8(copy(m.keyBuf[m.keyLen:], b))
	case modeModel:
		m.takeModel(b)
	}
}

func (m *machine) takeModel(b []byte) {
	n := int(m.modelN) + len(b)
	switch {
	case n > maxModel:
		m.modelN = maxModel + 1 // too long; stays so
		return
	case n <= len(m.model):
		copy(m.model[m.modelN:], b)
	default:
		if len(m.modelLong) == 0 {
			m.modelLong = append(m.modelLong, m.model[:m.modelN]...)
		}
		m.modelLong = append(m.modelLong, b...)
	}
	m.modelN = int32(n)
}

// flushHigh turns a high surrogate at a string's end into U+FFFD.
func (m *machine) flushHigh() {
	if m.high != 0 {
		m.high = 0
		m.rune(utf8.RuneError)
	}
}

// endKey ends a key; last is its last run, not yet taken.
func (m *machine) endKey(last []byte) {
	m.state = stColon
	if m.mode != modeKey {
		return
	}
	key := last
	if m.keyLen > 0 || m.high != 0 {
		m.take(last)
		m.flushHigh()
		if m.mode != modeKey {
			return
		}
		key = m.keyBuf[:m.keyLen]
	}
	for _, f := range m.prog[m.nodes[m.depth]].fields {
		if string(key) == f.key {
			m.cur = f.to
			return
		}
	}
}

// endString ends a string value; off is the closing quote's offset in the body.
func (m *machine) endString(off int64) {
	m.state = stAfter
	m.flushHigh()
	if m.val == 0 {
		return
	}
	if m.mode == modeModel {
		m.modelLen = int32(off + 1 - m.modelOff)
	}
	if off > m.strOff+1 {
		m.notEmpty(m.val, KindString)
	}
}
