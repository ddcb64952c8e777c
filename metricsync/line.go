package metricsync

import (
	"bytes"
	"strconv"
)

// label is one label of a sample. The bytes are those of the page, with
// escapes, and valid until the next line.
type label struct {
	name, value []byte
}

// sampleName returns the length of the metric name that a line begins with, 0
// if it begins with none.
func sampleName(b []byte) int {
	i := 0
	for i < len(b) && nameByte[b[i]] {
		i++
	}
	return i
}

// nameByte marks what a metric name may consist of. A digit in front is let
// through: no wanted name has one.
var nameByte = func() (t [256]bool) {
	for c := range t {
		t[c] = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == ':'
	}
	return t
}()

// parseRest reads what follows the name and the labels: a value, and a
// timestamp that is checked and ignored. It is false for a line that is not a
// sample.
func parseRest(b []byte) (float64, bool) {
	b = skipBlank(b)
	if v, n := parsePlain(b); n > 0 && n == len(b) {
		return v, true
	}
	token, b := nextToken(b)
	v, ok := parseValue(token)
	if !ok {
		return 0, false
	}
	if token, b = nextToken(b); len(token) > 0 {
		if _, err := strconv.ParseInt(string(token), 10, 64); err != nil {
			return 0, false
		}
	}
	return v, len(b) == 0
}

// parsePlain reads a number of up to 15 digits without sign and exponent, which
// nearly all are, and returns its length, 0 for any other. Such a number is the
// quotient of two integers that a float64 holds exactly, so it is rounded once,
// as strconv does.
func parsePlain(b []byte) (v float64, n int) {
	var mantissa uint64
	digits, fraction := 0, -1
	for ; n < len(b); n++ {
		switch c := b[n]; {
		case c >= '0' && c <= '9':
			mantissa = mantissa*10 + uint64(c-'0')
			digits++
		case c == '.' && fraction < 0:
			fraction = digits
		default:
			return 0, 0
		}
		if digits > 15 {
			return 0, 0
		}
	}
	if digits == 0 {
		return 0, 0
	}
	if fraction >= 0 {
		return float64(mantissa) / powersOfTen[digits-fraction], n
	}
	return float64(mantissa), n
}

var powersOfTen = [16]float64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15}

// parseLabels reads up to and with the closing brace.
func parseLabels(b []byte, into []label) (labels []label, rest []byte, ok bool) {
	for {
		b = skipBlank(b)
		if len(b) > 0 && b[0] == '}' {
			return into, b[1:], true
		}
		n := sampleName(b)
		if n == 0 {
			return into, nil, false
		}
		name := b[:n]
		b = skipBlank(b[n:])
		if len(b) == 0 || b[0] != '=' {
			return into, nil, false
		}
		b = skipBlank(b[1:])
		if len(b) == 0 || b[0] != '"' {
			return into, nil, false
		}
		b = b[1:]
		end := quoteEnd(b)
		if end < 0 {
			return into, nil, false
		}
		into = append(into, label{name, b[:end]})
		b = skipBlank(b[end+1:])
		switch {
		case len(b) == 0:
			return into, nil, false
		case b[0] == ',':
			b = b[1:]
		case b[0] != '}':
			return into, nil, false
		}
	}
}

// quoteEnd finds the quote that no backslash escapes, or -1.
func quoteEnd(b []byte) int {
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}

// unescape appends a label value in plain text.
func unescape(into, raw []byte) []byte {
	for {
		i := bytes.IndexByte(raw, '\\')
		if i < 0 || i+1 == len(raw) {
			return append(into, raw...)
		}
		into = append(into, raw[:i]...)
		c := raw[i+1]
		if c == 'n' {
			c = '\n'
		}
		into = append(into, c)
		raw = raw[i+2:]
	}
}

// parseValue is strconv's, without the forms that the exposition format does
// not have.
func parseValue(token []byte) (float64, bool) {
	if len(token) == 0 || bytes.ContainsAny(token, "pP_") {
		return 0, false
	}
	v, err := strconv.ParseFloat(string(token), 64)
	return v, err == nil
}

func skipBlank(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	return b
}

// nextToken splits off what stands before the next blank, and the blanks.
func nextToken(b []byte) (token, rest []byte) {
	i := 0
	for i < len(b) && b[i] != ' ' && b[i] != '\t' {
		i++
	}
	return b[:i], skipBlank(b[i:])
}
