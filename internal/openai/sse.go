package openai

import "bytes"

var newline = []byte("\n")

// lines splits events into lines and feeds the data to the machine.
func (r *Reader) lines(p []byte) {
	for i := 0; i < len(p); {
		c := p[i]
		switch r.state {
		case lineStart:
			if r.first {
				if c == bomText[r.at] {
					i++
					if r.at++; int(r.at) == len(bomText) {
						r.first, r.at = false, 0
					}
					continue
				}
				r.first = false
				if r.at > 0 {
					r.state = lineSkip
					continue
				}
			}
			switch {
			case c == '\n' || c == '\r':
				if r.at == 0 {
					r.endEvent()
				}
				r.endLine(c)
			case int(r.at) < len(dataName) && c == dataName[r.at]:
				r.at++
			case int(r.at) == len(dataName) && c == ':':
				r.state = lineColon
			default:
				r.state = lineSkip
			}
			i++
		case lineColon:
			if c == ' ' {
				i++
			}
			r.state = lineData
			r.beginData()
		case lineData, lineSkip:
			n, data := lineEnd(p[i:]), r.state == lineData
			if data {
				r.data(p[i:i+n], i)
			}
			if i += n; i == len(p) {
				return
			}
			// Some servers end an event with one line feed only: whole data ends it too.
			if data && (r.m.state == stEnd || int(r.term) == len(doneText)) {
				r.endEvent()
			}
			r.endLine(p[i])
			i++
		case lineCR:
			r.state = lineStart
			if c == '\n' {
				i++
			}
		}
	}
}

// lineEnd returns the length of the line that p begins with, or len(p).
func lineEnd(p []byte) int {
	if n := bytes.IndexByte(p, '\n'); n >= 0 {
		p = p[:n]
	}
	if n := bytes.IndexByte(p, '\r'); n >= 0 {
		return n
	}
	return len(p)
}

func (r *Reader) endLine(c byte) {
	r.state, r.at = lineStart, 0
	if c == '\r' {
		r.state = lineCR
	}
}

func (r *Reader) beginData() {
	if r.begun {
		r.data(newline, 0) // further data lines of an event are joined by line feeds
		return
	}
	r.begun, r.term = true, 0
	r.m.reset(r.prog, 0, nil)
}

// data takes a piece of an event's data, which begins at byte from of the chunk.
func (r *Reader) data(b []byte, from int) {
	for _, c := range b {
		if int(r.term) >= len(doneText) || c != doneText[r.term] {
			r.term = noTerm
			break
		}
		r.term++
	}
	r.feed(b, from)
}

func (r *Reader) endEvent() {
	if !r.begun {
		return
	}
	r.begun = false
	if int(r.term) == len(doneText) {
		r.done = true
		return
	}
	r.events++
	r.m.end()
	if r.m.fault != faultNone {
		return // a keep-alive or something of the engine's own
	}
	if r.m.marks>>markContent&1 == 1 {
		r.content++
	}
	r.collect()
}
