package envoyrun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// maxLines bounds what is kept of a log: the oldest line goes first. Lines at error level are counted apart, so that a
// flood can't hide one.
const maxLines = 200_000

// Envoy's default format: [2026-11-29 23:30:52.123][4711][error][main] [source/…] message
var levelOf = regexp.MustCompile(`^\[\d{4}-[^\]]*\]\[\d+\]\[([a-z]+)\]`)

// logBuffer keeps Envoy's log lines.
type logBuffer struct {
	// telling keeps calls of onLine apart.
	telling sync.Mutex
	onLine  func(string)

	mu sync.Mutex
	// Protected by mu.
	outputs []*output
	lines   []string         // the newest maxLines
	dropped int              // how many older ones went
	bad     []string         // those at error and critical level, all
	expect  []*regexp.Regexp // which of bad are expected
	closed  bool
	changed chan struct{} // closed and replaced at each change
}

// output is what one of the process's descriptors writes. Each has a pipe of its own: where two share one, a long line
// of the access log, which Envoy writes in pieces, has a line of its log in the middle.
type output struct {
	log     *logBuffer
	partial []byte // protected by log.mu: what came after the last newline
}

func newLogBuffer(expect []*regexp.Regexp, onLine func(string)) *logBuffer {
	return &logBuffer{onLine: onLine, expect: slices.Clone(expect), changed: make(chan struct{})}
}

// output returns one more, for one writer.
func (l *logBuffer) output() *output {
	l.mu.Lock()
	defer l.mu.Unlock()
	o := &output{log: l}
	l.outputs = append(l.outputs, o)
	return o
}

// Write never fails.
func (o *output) Write(p []byte) (int, error) {
	l := o.log
	l.mu.Lock()
	o.partial = append(o.partial, p...)
	var added []string
	for {
		i := bytes.IndexByte(o.partial, '\n')
		if i < 0 {
			break
		}
		added = append(added, string(o.partial[:i]))
		o.partial = o.partial[i+1:]
	}
	l.add(added)
	l.mu.Unlock()
	l.tell(added)
	return len(p), nil
}

// close turns unfinished lines into lines and ends every wait.
func (l *logBuffer) close() {
	l.mu.Lock()
	var added []string
	for _, o := range l.outputs {
		if len(o.partial) > 0 {
			added = append(added, string(o.partial))
			o.partial = nil
		}
	}
	l.closed = true
	l.add(added)
	if len(added) == 0 {
		close(l.changed)
		l.changed = make(chan struct{})
	}
	l.mu.Unlock()
	l.tell(added)
}

// add needs mu.
func (l *logBuffer) add(added []string) {
	if len(added) == 0 {
		return
	}
	l.lines = append(l.lines, added...)
	if over := len(l.lines) - maxLines; over > maxLines/10 { // in large steps: each moves the whole slice
		l.lines = slices.Delete(l.lines, 0, over)
		l.dropped += over
	}
	l.bad = append(l.bad, badLines(added)...)
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *logBuffer) tell(added []string) {
	if l.onLine == nil || len(added) == 0 {
		return
	}
	l.telling.Lock()
	defer l.telling.Unlock()
	for _, s := range added {
		l.onLine(s)
	}
}

func (l *logBuffer) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.lines)
}

func badLines(lines []string) []string {
	var bad []string
	for _, s := range lines {
		if m := levelOf.FindStringSubmatch(s); m != nil && (m[1] == "error" || m[1] == "critical") {
			bad = append(bad, s)
		}
	}
	return bad
}

// Log is every line Envoy has written so far, without newlines (the newest 200,000).
func (e *Envoy) Log() []string { return e.log.all() }

// Expect adds patterns of [error] and [critical] lines that don't count as unexpected, whether written already or not.
func (e *Envoy) Expect(patterns ...*regexp.Regexp) {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	e.log.expect = append(e.log.expect, patterns...)
}

// Unexpected are the [error] and [critical] lines so far that no expected pattern matches. Call it after Stop to see
// those of the shutdown too.
func (e *Envoy) Unexpected() []string {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(e.log.bad), func(s string) bool {
		return slices.ContainsFunc(e.log.expect, func(re *regexp.Regexp) bool { return re.MatchString(s) })
	})
}

// CheckLog is an error that lists the Unexpected lines, if there are any.
func (e *Envoy) CheckLog() error {
	if lines := e.Unexpected(); len(lines) > 0 {
		return fmt.Errorf("envoy: %d unexpected log lines:\n  %s", len(lines), strings.Join(lines, "\n  "))
	}
	return nil
}

// Mark is a place in the log to wait from; see WaitLogFrom.
type Mark struct{ written int }

// WaitLog returns the first line, old or new, that matches. It fails when ctx ends or Envoy has ended without one.
func (e *Envoy) WaitLog(ctx context.Context, re *regexp.Regexp) (string, error) {
	return e.WaitLogFrom(ctx, Mark{}, re)
}

// MarkLog is the present end of the log, for a WaitLogFrom that shall not see what is older.
func (e *Envoy) MarkLog() Mark {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	return Mark{e.log.dropped + len(e.log.lines)}
}

// WaitLogFrom is WaitLog for lines written after the mark.
func (e *Envoy) WaitLogFrom(ctx context.Context, from Mark, re *regexp.Regexp) (string, error) {
	next := from.written
	for {
		e.log.mu.Lock()
		for _, s := range e.log.lines[min(len(e.log.lines), max(0, next-e.log.dropped)):] {
			if re.MatchString(s) {
				e.log.mu.Unlock()
				return s, nil
			}
		}
		next = e.log.dropped + len(e.log.lines)
		closed, changed := e.log.closed, e.log.changed
		e.log.mu.Unlock()
		if closed {
			return "", fmt.Errorf("envoy: ended, and no log line matches %q", re)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return "", errors.Join(fmt.Errorf("envoy: no log line matches %q yet", re), ctx.Err())
		}
	}
}
