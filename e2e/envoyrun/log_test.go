package envoyrun

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

func line(level, msg string) string {
	return "[2026-11-29 23:30:52.123][4711][" + level + "][main] [source/server/server.cc:1] " + msg
}

func TestLogBufferSplitsLinesAnywhere(t *testing.T) {
	text := line("info", "a") + "\n" + line("error", "b") + "\n  more of b\n" + line("critical", "c [info]") + "\n" +
		line("warning", "d [error][error]") + "\nlast"
	for step := 1; step <= len(text); step++ {
		var told []string
		l := newLogBuffer(nil, func(s string) { told = append(told, s) })
		o := l.output()
		for rest := text; rest != ""; {
			n := min(step, len(rest))
			if got, err := o.Write([]byte(rest[:n])); got != n || err != nil {
				t.Fatalf("Write = %d, %v", got, err)
			}
			rest = rest[n:]
		}
		l.close()
		want := []string{line("info", "a"), line("error", "b"), "  more of b", line("critical", "c [info]"),
			line("warning", "d [error][error]"), "last"}
		if !slices.Equal(l.lines, want) || !slices.Equal(told, want) {
			t.Fatalf("step %d: lines %q, told %q", step, l.lines, told)
		}
		if !slices.Equal(l.bad, []string{want[1], want[3]}) {
			t.Fatalf("step %d: bad %q", step, l.bad)
		}
	}
}

// TestOutputsAreApart: what one writes in pieces is a line, whatever another writes meanwhile.
func TestOutputsAreApart(t *testing.T) {
	var told []string
	l := newLogBuffer(nil, func(s string) { told = append(told, s) })
	access, log := l.output(), l.output()
	for _, w := range []struct {
		to   *output
		text string
	}{{access, "{\"a\":"}, {log, "one\ntw"}, {access, "1}\n{"}, {log, "o\nthree"}} {
		if _, err := w.to.Write([]byte(w.text)); err != nil {
			t.Fatal(err)
		}
	}
	l.close()
	if want := []string{"one", "{\"a\":1}", "two", "{", "three"}; !slices.Equal(l.lines, want) || !slices.Equal(told, want) {
		t.Errorf("lines %q, told %q", l.lines, told)
	}
}

func TestLogBufferIsBoundedAndMarksStayRight(t *testing.T) {
	l := newLogBuffer(nil, nil)
	e, o := &Envoy{log: l}, l.output()
	write := func(from, to int) {
		for i := from; i < to; i++ {
			fmt.Fprintf(o, "line %d\n", i)
		}
	}
	write(0, maxLines)
	m := e.MarkLog()
	write(maxLines, 2*maxLines)
	if len(l.lines) > maxLines+maxLines/10 {
		t.Errorf("%d lines kept", len(l.lines))
	}
	if got := l.lines[m.written-l.dropped]; got != fmt.Sprintf("line %d", maxLines) {
		t.Errorf("the mark points at %q", got)
	}
}

func TestParseStat(t *testing.T) {
	d, err := parseStat([]byte("12 (a b) c) S 1 1 1 0 -1 4194304 1 0 0 0 150 25 0 0 20 0 5 0"))
	if err != nil || d != 1750*time.Millisecond {
		t.Errorf("got %v, %v", d, err)
	}
	for _, bad := range []string{"", "12 (x) S 1", "12 (x) S 1 1 1 0 -1 4194304 1 0 0 0 x 25 0"} {
		if _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}
