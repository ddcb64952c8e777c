package openai

import (
	"errors"
	"io"
	"strings"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// Encoding is how a body is compressed.
type Encoding uint8

// The encodings.
const (
	Identity Encoding = iota
	Gzip
	Zstd
)

// String is the name in a content-encoding header.
func (e Encoding) String() string {
	switch e {
	case Gzip:
		return "gzip"
	case Zstd:
		return "zstd"
	default:
		return "identity"
	}
}

// ParseEncoding reads a content-encoding header. ok is false for an encoding that can't be read, and for more than
// one.
func ParseEncoding(header string) (e Encoding, ok bool) {
	for name := range strings.SplitSeq(header, ",") {
		next := Identity
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "", "identity":
		case "gzip", "x-gzip":
			next = Gzip
		case "zstd":
			next = Zstd
		default:
			return Identity, false
		}
		if next != Identity && e != Identity {
			return Identity, false
		}
		if next != Identity {
			e = next
		}
	}
	return e, true
}

// ErrTooLarge says that a body is larger than allowed once it is decoded.
var ErrTooLarge = errors.New("the decoded body is too large")

// maxWindow bounds the memory of a zstd decoder: what RFC 8878 asks decoders to support.
const maxWindow = 8 << 20

var (
	gzips = sync.Pool{New: func() any { return new(gzip.Reader) }}
	zstds = sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			panic(err) // the options are constants
		}
		return d
	}}
)

// Decode hands the decoded bytes of a body to into, piece by piece; they are only lent. It stops with [ErrTooLarge]
// after limit bytes, and with another error where the body is broken or cut short.
func Decode(e Encoding, chunks [][]byte, limit int64, into func([]byte)) error {
	in := &chunkReader{rest: chunks}
	switch e {
	case Gzip:
		r := gzips.Get().(*gzip.Reader)
		defer gzips.Put(r)
		if err := r.Reset(in); err != nil {
			return cutShort(err)
		}
		return pump(r, limit, into)
	case Zstd:
		r := zstds.Get().(*zstd.Decoder)
		defer zstds.Put(r)
		if in.empty() { // no frame is no error to the decoder
			return io.ErrUnexpectedEOF
		}
		if err := r.Reset(in); err != nil {
			return cutShort(err)
		}
		defer func() { _ = r.Reset(nil) }() // lets go of the body
		return pump(r, limit, into)
	default:
		return errors.New("no encoding to decode")
	}
}

func pump(r io.Reader, limit int64, into func([]byte)) error {
	var buf [16 << 10]byte
	for size := int64(0); ; {
		n, err := r.Read(buf[:])
		if size += int64(n); size > limit {
			return ErrTooLarge
		}
		if n > 0 {
			into(buf[:n])
		}
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// cutShort makes the end of a body that had not begun an error.
func cutShort(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// chunkReader reads a body as it lies in memory.
type chunkReader struct{ rest [][]byte }

func (r *chunkReader) empty() bool {
	for len(r.rest) > 0 && len(r.rest[0]) == 0 {
		r.rest = r.rest[1:]
	}
	return len(r.rest) == 0
}

// Read implements io.Reader.
func (r *chunkReader) Read(p []byte) (int, error) {
	if r.empty() {
		return 0, io.EOF
	}
	n := copy(p, r.rest[0])
	r.rest[0] = r.rest[0][n:]
	return n, nil
}

// ReadByte implements io.ByteReader, without which gzip reads ahead through a buffer of its own.
func (r *chunkReader) ReadByte() (byte, error) {
	if r.empty() {
		return 0, io.EOF
	}
	b := r.rest[0][0]
	r.rest[0] = r.rest[0][1:]
	return b, nil
}
