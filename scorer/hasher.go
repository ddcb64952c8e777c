package scorer

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

const (
	// MinBlockBytes is the least text of one block: shorter ones cost more to look
	// up than they tell.
	MinBlockBytes = 256
	// MaxBlocks is how many blocks of a prompt are hashed; the rest of it tells the
	// endpoints apart no more.
	MaxBlocks = 2048
)

// Hasher makes a prompt's blocks while the body is read: it is told the routing
// text and keeps hashes alone. Block i is the hash of its text, seeded with
// that of block i-1: two prompts have equal blocks up to where they first differ,
// whichever way their text was cut on its way here. What is left over at the end
// is no block. It belongs to one request at a time.
type Hasher struct {
	blockBytes int
	preamble   lane
	prompt     lane
	blocks     []uint64
}

// lane is the chain of one lane's text.
type lane struct {
	digest xxhash.Digest
	chain  uint64 // the last whole block's
	fill   int    // bytes of the block at hand
	blocks []uint64
}

// Reset begins a prompt. Blocks are of blockBytes, at least MinBlockBytes.
func (h *Hasher) Reset(blockBytes int) {
	h.blockBytes = max(MinBlockBytes, blockBytes)
	h.preamble.reset()
	h.prompt.reset()
}

func (l *lane) reset() {
	l.chain, l.fill, l.blocks = 0, 0, l.blocks[:0]
	l.digest.ResetWithSeed(0)
}

// Preamble takes the next piece of what engines render before the conversation.
func (h *Hasher) Preamble(p []byte) { h.preamble.write(p, h.blockBytes) }

// Prompt takes the next piece of the conversation.
func (h *Hasher) Prompt(p []byte) { h.prompt.write(p, h.blockBytes) }

func (l *lane) write(p []byte, blockBytes int) {
	for len(p) > 0 && len(l.blocks) < MaxBlocks {
		n := min(len(p), blockBytes-l.fill)
		_, _ = l.digest.Write(p[:n]) // never fails
		p = p[n:]
		if l.fill += n; l.fill < blockBytes {
			return
		}
		l.chain, l.fill = l.digest.Sum64(), 0
		l.blocks = append(l.blocks, l.chain)
		l.digest.ResetWithSeed(l.chain)
	}
}

// Blocks ends the prompt and returns its blocks for a model and a salt: those of
// the preamble, which engines render first, and then those of the prompt, which
// depend on the whole preamble. The slice is valid until the next Reset.
func (h *Hasher) Blocks(model string, salt uint64) []uint64 {
	var word [8]byte
	binary.LittleEndian.PutUint64(word[:], salt)
	var d xxhash.Digest
	d.ResetWithSeed(salt)
	_, _ = d.WriteString(model)
	_, _ = d.Write(word[:])
	seed := d.Sum64()
	h.blocks = h.blocks[:0]
	preamble := &h.preamble
	for _, b := range preamble.blocks {
		h.blocks = append(h.blocks, mix(b^seed))
	}
	if len(preamble.blocks) > 0 || preamble.fill > 0 {
		seed = mix(seed ^ preamble.digest.Sum64() ^ mix(preamble.chain))
	}
	for _, b := range h.prompt.blocks {
		if len(h.blocks) == MaxBlocks {
			break
		}
		h.blocks = append(h.blocks, mix(b^seed))
	}
	return h.blocks
}

// BlockBytes is the size of one block.
func (h *Hasher) BlockBytes() int { return h.blockBytes }
