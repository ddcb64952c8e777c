//go:build !amd64

package openai

// indexStop returns the index, from i on, of the first byte that ends a run of plain string bytes, or len(p).
func indexStop(p []byte, i int) int { return indexStopWords(p, i) }

// skipPlain returns the index, from i on, of the first byte that is neither plain nor part of a one-byte escape: a
// quote, a control character, the backslash of any other escape or of one that p cuts; or len(p). escapes counts the
// escapes before it.
func skipPlain(p []byte, i int) (end, escapes int) { return skipPlainWords(p, i) }

// unescape copies the plain bytes that p begins with to dst, and what its one-byte escapes stand for, as far as there
// is room. It stops before a quote, a control character, the backslash of any other escape or of one that p cuts.
func unescape(dst, p []byte) (read, written int) { return unescapeWords(dst, p) }
