package openai

import (
	"bytes"
	stdgzip "compress/gzip"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/klauspost/compress/zstd"
)

func compressed(t testing.TB, e Encoding, body []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	if e == Gzip {
		w := stdgzip.NewWriter(&b)
		_, _ = w.Write(body) // in memory
		_ = w.Close()
		return b.Bytes()
	}
	w, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write(body)
	_ = w.Close()
	return b.Bytes()
}

func decode(e Encoding, limit int64, chunks ...[]byte) ([]byte, error) {
	var out []byte
	err := Decode(e, chunks, limit, func(p []byte) { out = append(out, p...) })
	return out, err
}

func TestDecode(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const limit = 256 << 10
	bodies := [][]byte{{}, []byte("x"), chatBody(100<<10, 3), make([]byte, limit)}
	for _, e := range []Encoding{Gzip, Zstd} {
		for _, body := range bodies {
			packed := compressed(t, e, body)
			for range 20 { // the decoders are used again, after failures too
				got, err := decode(e, limit, cut(rng, packed, 1+rng.IntN(6))...)
				if err != nil || !bytes.Equal(got, body) {
					t.Fatalf("%v: %d bytes of %d: %v", e, len(got), len(body), err)
				}
				if got, err := decode(e, int64(len(body))-1, packed); len(body) > 0 && !errors.Is(err, ErrTooLarge) {
					t.Fatalf("%v: %d of %d bytes over the limit: %v", e, len(got), len(body), err)
				}
				if n := rng.IntN(len(packed)); n > 0 {
					if _, err := decode(e, limit, packed[:n]); err == nil || errors.Is(err, ErrTooLarge) {
						t.Fatalf("%v: cut at %d of %d: %v", e, n, len(packed), err)
					}
				}
			}
		}
		for _, broken := range []string{"", "{}", "\x1f\x8b", "\x28\xb5\x2f\xfd", "hello, this is no compressed body at all"} {
			if got, err := decode(e, 1000, []byte(broken)); err == nil {
				t.Errorf("%v: %q decodes to %q", e, broken, got)
			}
		}
		two := append(compressed(t, e, []byte("ab")), compressed(t, e, []byte("cd"))...)
		if got, err := decode(e, 4, two); err != nil || string(got) != "abcd" {
			t.Errorf("%v: two members are %q, %v", e, got, err)
		}
		if _, err := decode(e, 100, append(compressed(t, e, []byte("ab")), "trailing"...)); err == nil {
			t.Errorf("%v: what follows the end is accepted", e)
		}
	}
}

func TestParseEncoding(t *testing.T) {
	for header, want := range map[string]string{
		"": "identity", "identity": "identity", "gzip": "gzip", " GZIP ": "gzip", "x-gzip": "gzip", "zstd": "zstd", "Zstd,identity": "zstd", ", gzip": "gzip",
		"br": "no", "deflate": "no", "gzip, gzip": "no", "gzip, zstd": "no", "gzip;q=1": "no", "compress": "no",
	} {
		e, ok := ParseEncoding(header)
		got := e.String()
		if !ok {
			got = "no"
		}
		if got != want {
			t.Errorf("%q: %s, want %s", header, got, want)
		}
	}
}
