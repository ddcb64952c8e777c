package openai

import (
	"unicode/utf16"
	"unicode/utf8"
)

// unescaped maps the byte after a backslash to what it stands for; 0 is not a one-byte escape.
var unescaped = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// hexValue maps a hexadecimal digit to its value, anything else to noUnit.
var hexValue = func() (t [256]uint32) {
	for i := range t {
		switch c := byte(i); {
		case '0' <= c && c <= '9':
			t[i] = uint32(c - '0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			t[i] = uint32(c|0x20-'a') + 10
		default:
			t[i] = noUnit
		}
	}
	return t
}()

// str goes on inside a string and returns where it ended or the chunk did. Escapes that lie whole in the chunk
// are handled here, split ones by the states of write.
func (m *machine) str(p []byte, i int) int {
	if m.mode == modeSkip || m.mode == modeText && m.sink == nil {
		return m.size(p, i)
	}
	if m.mode == modeText {
		return m.copyText(p, i)
	}
	if len(p)-i >= 16 { // most keys and names
		if n := nearStop(p[i : i+16]); n < 16 && p[i+n] == '"' {
			return m.closeString(p, i, i+n)
		}
	}
	start := i
	for {
		j := indexStop(p, i)
		if j == len(p) {
			m.take(p[start:j])
			return j
		}
		switch c := p[j]; {
		case c == '"':
			return m.closeString(p, start, j)
		case c != '\\':
			m.take(p[start:j])
			m.fail(faultControl, j, c)
			return j
		}
		m.take(p[start:j])
		if j+1 == len(p) {
			m.state = stEscape
			return j + 1
		}
		e := p[j+1]
		if d := unescaped[e]; d != 0 {
			i, start = j+2, j+1
			if d != e { // else the byte stands for itself and begins the next run
				m.take(unescaped[e : int(e)+1])
				start = i
			}
			continue
		}
		i = j
		for { // these seldom come alone
			u := readUnit(p, i)
			if u >= noUnit {
				break
			}
			m.unit(uint16(u))
			i += 6
		}
		if start = i; i == j {
			m.state = stEscape // finds what is wrong, or waits for the next chunk
			return j + 1
		}
	}
}

// closeString ends the string whose closing quote is p[j]; its last run, not yet taken, begins at start.
func (m *machine) closeString(p []byte, start, j int) int {
	if m.isKey {
		m.endKey(p[start:j])
		return m.colon(p, j+1)
	}
	m.take(p[start:j])
	m.endString(m.base + int64(j))
	return m.comma(p, j+1)
}

// textRoom is how much text the sink gets at a time: prompts have an escape in every few words, and a call for each
// run between them takes longer than the run.
const textRoom = 4 << 10

// copyText is str for text that goes to the sink.
func (m *machine) copyText(p []byte, i int) int {
	if m.out == nil {
		m.out = new([textRoom]byte)
	}
	out, n := m.out, 0 // what is not with the sink yet
	for {
		if m.high != 0 && !startsUnit(p, i) {
			m.flushHigh()
		}
		read, written := unescape(out[n:], p[i:])
		i, n = i+read, n+written
		if n > textRoom-utf8.UTFMax {
			m.take(out[:n])
			n = 0
			continue
		}
		if i == len(p) {
			m.take(out[:n])
			return i
		}
		switch c := p[i]; {
		case c == '"':
			m.take(out[:n])
			m.endString(m.base + int64(i))
			return m.comma(p, i+1)
		case c != '\\':
			m.take(out[:n])
			m.fail(faultControl, i, c)
			return i
		}
		for { // \u escapes seldom come alone
			u := readUnit(p, i)
			if u < noUnit && u&0xF800 != 0xD800 && m.high == 0 && n <= textRoom-utf8.UTFMax {
				n += utf8.EncodeRune(out[n:], rune(u))
				i += 6
				continue
			}
			if u < noUnit { // half a pair, or there is no room
				m.take(out[:n])
				n = 0
				m.unit(uint16(u))
				i += 6
			} else if i < len(p) && p[i] == '\\' && (i+1 == len(p) || unescaped[p[i+1]] == 0) {
				// The machine finds what is wrong, or waits for the next chunk.
				m.take(out[:n])
				m.state = stEscape
				return i + 1
			}
			break
		}
	}
}

// startsUnit reports whether p[i:] may begin with a \u escape.
func startsUnit(p []byte, i int) bool {
	return i == len(p) || p[i] == '\\' && (i+1 == len(p) || unescaped[p[i+1]] == 0)
}

// size is str for strings whose bytes nobody wants, or only their number.
func (m *machine) size(p []byte, i int) int {
	for {
		j, escapes := skipPlain(p, i)
		if j > i && m.mode == modeText {
			m.flushHigh()
			m.text[m.lane] += int64(j - i - escapes)
		}
		if j == len(p) {
			return j
		}
		switch c := p[j]; {
		case c == '"':
			if m.isKey {
				m.state = stColon
				return m.colon(p, j+1)
			}
			m.endString(m.base + int64(j))
			return m.comma(p, j+1)
		case c != '\\':
			if m.mode == modeText {
				m.flushHigh() // as copyText does
			}
			m.fail(faultControl, j, c)
			return j
		}
		if i = m.units(p, j); i == j {
			m.state = stEscape // finds what is wrong, or waits for the next chunk
			return j + 1
		}
	}
}

// units counts the \u escapes that p[i:] begins with (they seldom come alone) and returns where they end.
func (m *machine) units(p []byte, i int) int {
	n := 0
	for {
		u := readUnit(p, i)
		if u >= noUnit {
			break
		}
		i += 6
		switch {
		case m.mode != modeText:
		case m.high != 0 || u&0xFC00 == 0xD800: // a pair, perhaps
			m.unit(uint16(u))
		case u < 0x80:
			n++
		case u < 0x800:
			n += 2
		default:
			n += 3
		}
	}
	m.text[m.lane] += int64(n)
	return i
}

// readUnit reads the \u escape at p[i:]; over 0xFFFF if there is none, or no whole one.
func readUnit(p []byte, i int) uint32 {
	if len(p)-i < 6 || p[i] != '\\' || p[i+1] != 'u' {
		return noUnit
	}
	return hexValue[p[i+2]]<<12 | hexValue[p[i+3]]<<8 | hexValue[p[i+4]]<<4 | hexValue[p[i+5]]
}

const noUnit = 1 << 16

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
	if v == noUnit {
		m.fail(faultEscape, i, c)
		return
	}
	m.hexV = m.hexV<<4 | uint16(v)
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
	case modeID:
		m.num = int64(sumID(uint64(m.num), b))
	}
}

func (m *machine) takeModel(b []byte) {
	n := int(m.modelN) + len(b)
	switch {
	case n > MaxModel:
		m.modelN = MaxModel + 1 // too long; stays so
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
	n := &m.prog[m.nodes[m.depth]]
	if n.lengths>>(len(key)&31)&1 == 0 {
		return
	}
	for _, f := range n.fields {
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
	if m.mode == modeID {
		m.id = uint64(m.num) | 1
	}
	if m.mode == modeModel {
		m.modelLen = int32(off + 1 - m.modelOff)
	}
	if m.swapOn {
		m.swaps[len(m.swaps)-1].To, m.swapOn = int(off+1-m.base), false
	}
	if off > m.strOff+1 {
		m.notEmpty(m.val, KindString)
	}
}
