package config

import (
	"strconv"
	"strings"
)

// Problem is one mistake in a document.
type Problem struct {
	// Path of the value, as pools.default.static[2].address; empty for the
	// document as a whole.
	Path string
	// Line in the document's text, from 1; 0 if unknown (JSON, absent values).
	Line int
	// Message says what is wrong and what to write instead.
	Message string
}

// maxText is how many bytes of a path and of a message are shown: both quote the
// document, in which a value may be of any length.
const maxText = 1000

func shorten(text string) string {
	if len(text) <= maxText {
		return text
	}
	return strings.ToValidUTF8(text[:maxText/2], "") + "…" + strings.ToValidUTF8(text[len(text)-maxText/2:], "")
}

// String is "path (line N): message", with the middle of what is long left out.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(shorten(p.Path))
	if p.Line > 0 {
		if p.Path != "" {
			b.WriteByte(' ')
		}
		b.WriteString("(line " + strconv.Itoa(p.Line) + ")")
	}
	if b.Len() > 0 {
		b.WriteString(": ")
	}
	b.WriteString(shorten(p.Message))
	return b.String()
}

// Problems are all mistakes of one document and the error that Parse, ParseFile
// and ParseRoute return. Callers log one line for each.
type Problems []Problem

// Error joins the problems, one a line.
func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// maxProblems is how many problems one document reports: each becomes a log line.
const maxProblems = 200

func (ps Problems) capped() Problems {
	if len(ps) <= maxProblems {
		return ps
	}
	rest := Problem{Message: "and " + strconv.Itoa(len(ps)-maxProblems) + " more problems"}
	return append(ps[:maxProblems:maxProblems], rest)
}

// fieldPath is the path of a key below path. A key that would read ambiguously is
// quoted in brackets: labels["model.aibrix.ai/port"].
func fieldPath(path, key string) string {
	if key == "" || strings.ContainsAny(key, ".[]\"/ \n") {
		return path + "[" + strconv.Quote(key) + "]"
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

func indexPath(path string, i int) string {
	return path + "[" + strconv.Itoa(i) + "]"
}

// within reports whether path is at or below ancestor.
func within(path, ancestor string) bool {
	rest, ok := strings.CutPrefix(path, ancestor)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[' || ancestor == "")
}
