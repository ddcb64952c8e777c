package openai

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// dumbStop and dumbSkip say what indexStop and skipPlain mean.
func dumbStop(p []byte, i int) int {
	for i < len(p) && p[i] >= 0x20 && p[i] != '"' && p[i] != '\\' {
		i++
	}
	return i
}

func dumbSkip(p []byte, i int) (end, escapes int) {
	for i < len(p) {
		switch c := p[i]; {
		case c == '\\' && i+1 < len(p) && strings.IndexByte(`"\/bfnrt`, p[i+1]) >= 0:
			i, escapes = i+2, escapes+1
		case c == '\\' || c == '"' || c < 0x20:
			return i, escapes
		default:
			i++
		}
	}
	return i, escapes
}

// dumbUnescape says what unescape means.
func dumbUnescape(room int, p []byte) (out []byte, read int) {
	end, _ := dumbSkip(p, 0)
	for read < end && len(out) < room {
		c := p[read]
		if c == '\\' {
			read++
			c = "\"\\/\b\f\n\r\t"[strings.IndexByte(`"\/bfnrt`, p[read])]
		}
		out = append(out, c)
		read++
	}
	return out, read
}

// skippers are all ways to skip, the one in use and those for lesser processors.
var skippers = []struct {
	name string
	stop func([]byte, int) int
	skip func([]byte, int) (int, int)
}{
	{"in use", indexStop, skipPlain},
	{"words", indexStopWords, skipPlainWords},
}

// checkSkip compares all ways to skip with the dumb ones on p from i on.
func checkSkip(p []byte, i int) error {
	stop := dumbStop(p, i)
	end, escapes := dumbSkip(p, i)
	for _, s := range skippers {
		if got := s.stop(p, i); got != stop {
			return fmt.Errorf("%s: stop in %q from %d: got %d, want %d", s.name, p, i, got, stop)
		}
		if e, n := s.skip(p, i); e != end || n != escapes {
			return fmt.Errorf("%s: skip in %q from %d: got %d with %d escapes, want %d with %d", s.name, p, i, e, n, end, escapes)
		}
	}
	n := len(p) - i
	if err := checkUnescape(p[i:], []int{n, n / 2, 33, 7}[(i+n)%4]); err != nil {
		return err
	}
	return checkBlocks(p[i:])
}

// checkUnescape compares all ways to unescape with the dumb one, and looks whether they write past the room.
func checkUnescape(p []byte, room int) error {
	const around = 64
	want, end := dumbUnescape(room, p)
	for _, u := range []struct {
		name string
		of   func(dst, p []byte) (int, int)
	}{{"in use", unescape}, {"words", unescapeWords}} {
		dst := bytes.Repeat([]byte{0xa5}, room+around)
		read, written := u.of(dst[:room], p)
		if read != end || !bytes.Equal(dst[:written], want) {
			return fmt.Errorf("%s: unescape %q with room for %d: read %d and got %q, want %d and %q", u.name, p, room, read, dst[:written], end, want)
		}
		if bytes.Count(dst[room:], []byte{0xa5}) != around {
			return fmt.Errorf("%s: unescape %q writes past the room for %d", u.name, p, room)
		}
	}
	return nil
}

// plainBytes are those next to the ones that stop, and some of high value.
const plainBytes = "!#[]\x20\x7f\x80\xa2\xdc\x9f\xff/bfnrtu0aZ\xae\xef"

// fillText makes b a random text: plain bytes, and simple escapes or (more seldom) bad ones every so often.
func fillText(r *rand.Rand, b []byte, escapes, faults int) {
	for i := 0; i < len(b); i++ {
		b[i] = plainBytes[r.IntN(len(plainBytes))]
		switch {
		case faults > 0 && r.IntN(faults) == 0:
			b[i] = "\"\\\x1f\x00\n"[r.IntN(5)]
		case escapes > 0 && i+1 < len(b) && r.IntN(escapes) == 0:
			b[i], b[i+1] = '\\', `"\/bfnrt`[r.IntN(8)]
			i++
		}
	}
}

func TestSkipLengths(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	buf := make([]byte, 64+300)
	for n := range 301 {
		for at := range 64 {
			p := buf[at : at+n]
			fillText(r, p, []int{0, 2, 40}[r.IntN(3)], []int{0, 0, 200, 1000}[r.IntN(4)])
			if err := checkSkip(p, 0); err != nil {
				t.Fatal(err)
			}
			if err := checkSkip(p, r.IntN(n+1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 3000 { // long enough for either loop to take over from the other
		p := make([]byte, r.IntN(3000))
		fillText(r, p, []int{0, 2, 40, 700, 1500}[r.IntN(5)], []int{0, 3000}[r.IntN(2)])
		if err := checkSkip(p, r.IntN(len(p)+1)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSkipBytes puts every byte, alone and escaped, at every place of three blocks.
func TestSkipBytes(t *testing.T) {
	for c := range 256 {
		for at := range 190 {
			p := bytes.Repeat([]byte{'a'}, 200)
			p[at] = byte(c)
			if err := checkSkip(p, 0); err != nil {
				t.Fatal(err)
			}
			if at > 0 {
				p[at-1] = '\\'
			}
			if err := checkSkip(p, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestSkipRuns puts runs of backslashes of every length across the ends of blocks.
func TestSkipRuns(t *testing.T) {
	for n := range 140 {
		for at := range 70 {
			for _, after := range "n\"ux\x01" {
				p := bytes.Repeat([]byte{'a'}, 320)
				copy(p[at:], strings.Repeat(`\`, n)+string(after))
				if err := checkSkip(p, 0); err != nil {
					t.Fatal(err)
				}
				if err := checkSkip(p[:at+n], 0); err != nil { // the run at the end
					t.Fatal(err)
				}
			}
		}
	}
}

// TestFaultPlaces puts what stops a string at every place of a long text, cut everywhere.
func TestFaultPlaces(t *testing.T) {
	text := bytes.Repeat([]byte(`0123456789abcd\n`), 9)
	for _, tt := range []struct {
		put   string
		code  Code
		place int // of the fault in put
		size  int // unescaped
	}{
		{put: `\x`, code: CodeInvalidJSON, place: 1},
		{put: `\u12G4`, code: CodeInvalidJSON, place: 4},
		{put: "\x1f", code: CodeInvalidJSON},
		{put: "\n", code: CodeInvalidJSON},
		{put: `"`, code: CodeInvalidJSON, place: 1},
		{put: `\u00e9`, size: 2},
		{put: `\uFFFF\u007f\u0080\u0800`, size: 9},
		{put: `\ud83d\ude00\u0041`, size: 5},
		{put: `\ud83d\n\udc00`, size: 7},
		{put: `\ud83d`, size: 3},
		{put: `\ud83d\u0041\ude00`, size: 7},
		{put: `\\\"\/`, size: 3},
	} {
		for at := 0; at <= len(text); at += 1 + at%16/14 { // not inside an escape
			head := `{"model":"m","messages":[{"content":"`
			body := head + string(text[:at]) + tt.put + string(text[at:]) + `"}]}`
			got := scan(endpoint("chat/completions"), []byte(body))
			if got.code != tt.code {
				t.Fatalf("%s: got %q %s", body, got.code, got.message)
			}
			if tt.code == "" && got.PromptBytes != int64(len(text)-9+tt.size) {
				t.Fatalf("%s: %d bytes of text", body, got.PromptBytes)
			}
			if place := int64(len(head) + at + tt.place); tt.code != "" && got.offset != place && tt.put != `"` {
				t.Fatalf("%s: fault at %d, want %d", body, got.offset, place)
			}
			if at%14 == 0 {
				everySplit(t, endpoint("chat/completions"), body)
			}
		}
	}
}

func FuzzSkip(f *testing.F) {
	r := rand.New(rand.NewPCG(9, 10))
	for range 20 {
		p := make([]byte, r.IntN(400))
		fillText(r, p, 10, 300)
		f.Add(p, uint16(r.IntN(64)))
	}
	f.Fuzz(func(t *testing.T, p []byte, i uint16) {
		if err := checkSkip(p, int(i)%(len(p)+1)); err != nil {
			t.Fatal(err)
		}
	})
}
