package scorer

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cespare/xxhash/v2"
)

// dumbBlocks hashes a prompt that lies in one piece.
func dumbBlocks(preamble, prompt, model string, salt uint64, size int) []uint64 {
	sum := func(seed uint64, p string) uint64 {
		d := xxhash.NewWithSeed(seed)
		_, _ = d.WriteString(p)
		return d.Sum64()
	}
	var word [8]byte
	binary.LittleEndian.PutUint64(word[:], salt)
	seed := sum(salt, model+string(word[:]))
	var out []uint64
	chain := uint64(0)
	rest := preamble
	for n := 0; len(rest) >= size && n < MaxBlocks; n++ {
		chain = sum(chain, rest[:size])
		out = append(out, mix(chain^seed))
		rest = rest[size:]
	}
	if preamble != "" && len(out) < MaxBlocks {
		seed = mix(seed ^ sum(chain, rest) ^ mix(chain))
	}
	chain = 0
	for rest = prompt; len(rest) >= size && len(out) < MaxBlocks; rest = rest[size:] {
		chain = sum(chain, rest[:size])
		out = append(out, mix(chain^seed))
	}
	return out
}

// TestHasher cuts texts anywhere.
func TestHasher(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 4))
	var h Hasher
	for range 300 {
		size := []int{0, 256, 300, 1024}[rng.IntN(4)]
		texts := [2]string{strings.Repeat("preamble ", rng.IntN(200)), strings.Repeat("prompt ", rng.IntN(900))}
		if rng.IntN(3) == 0 {
			texts[0] = ""
		}
		h.Reset(size)
		rest := texts
		for rest[0] != "" || rest[1] != "" {
			at := rng.IntN(2)
			n := min(len(rest[at]), rng.IntN(700))
			if at == 0 {
				h.Preamble([]byte(rest[at][:n]))
			} else {
				h.Prompt([]byte(rest[at][:n]))
			}
			rest[at] = rest[at][n:]
		}
		salt := uint64(rng.IntN(2))
		if got, want := h.Blocks("m", salt), dumbBlocks(texts[0], texts[1], "m", salt, max(256, size)); !slices.Equal(got, want) {
			t.Fatalf("%d and %d bytes in blocks of %d: %d blocks, want %d", len(texts[0]), len(texts[1]), size, len(got), len(want))
		}
	}
}

// TestHasherTellsApart: where prompts part, so do their blocks, and from there on.
func TestHasherTellsApart(t *testing.T) {
	blocks := func(preamble, prompt, model string, salt uint64) []uint64 {
		var h Hasher
		h.Reset(256)
		h.Prompt([]byte(prompt)) // the order in the body does not matter
		h.Preamble([]byte(preamble))
		return slices.Clone(h.Blocks(model, salt))
	}
	common := func(a, b []uint64) (n int) {
		for n < min(len(a), len(b)) && a[n] == b[n] {
			n++
		}
		return n
	}
	tools, long := strings.Repeat("t", 600), strings.Repeat("p", 1100)
	base := blocks(tools, long, "m", 0)
	if len(base) != 2+4 {
		t.Fatalf("%d blocks", len(base))
	}
	other := []byte(long)
	other[600] = 'x'
	for _, c := range []struct {
		name string
		with []uint64
		want int
	}{
		{"the same", blocks(tools, long, "m", 0), 6},
		{"a longer prompt", blocks(tools, long+"more", "m", 0), 6},
		{"another word in the third block", blocks(tools, string(other), "m", 0), 4},
		{"other tools at their end", blocks(tools[:599]+"x", long, "m", 0), 2},
		{"no tools", blocks("", long, "m", 0), 0},
		{"another model", blocks(tools, long, "n", 0), 0},
		{"another salt", blocks(tools, long, "m", 1), 0},
	} {
		if n := common(base, c.with); n != c.want {
			t.Errorf("%s: %d blocks in common, want %d", c.name, n, c.want)
		}
	}
	if n := len(blocks(strings.Repeat("t", 600<<10), strings.Repeat("p", 600<<10), "m", 0)); n != MaxBlocks {
		t.Errorf("%d blocks of a very long prompt", n)
	}
}

func TestHasherAllocatesNothing(t *testing.T) {
	var h Hasher
	text := []byte(strings.Repeat("text", 10<<10))
	run := func() {
		h.Reset(256)
		h.Preamble(text)
		h.Prompt(text)
		h.Blocks("model", 1)
	}
	run()
	if n := testing.AllocsPerRun(20, run); n != 0 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkHasher(b *testing.B) {
	var h Hasher
	text := []byte(strings.Repeat("text", 15<<10))
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		h.Reset(256)
		h.Prompt(text)
		h.Blocks("model", 1)
	}
}
