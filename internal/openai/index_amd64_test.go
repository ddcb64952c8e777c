package openai

import "fmt"

// checkBlocks compares the routines of the processor with the dumb ones: what they leave undone skipPlain and
// indexStop would make good, slowly.
func checkBlocks(p []byte) error {
	blocks := p[:len(p)&^63]
	if len(blocks) == 0 {
		return nil
	}
	if got, want := indexStopSSE2(&p[0], len(p)), dumbStop(blocks, 0); got != want {
		return fmt.Errorf("indexStopSSE2 in %q: got %d, want %d", p, got, want)
	}
	if !hasAVX2 {
		return nil
	}
	end, escapes := dumbSkip(blocks, 0)
	if e, n := skipPlainAVX2(&p[0], len(p)); e != end || n != escapes {
		return fmt.Errorf("skipPlainAVX2 in %q: got %d with %d escapes, want %d with %d", p, e, n, end, escapes)
	}
	return nil
}
