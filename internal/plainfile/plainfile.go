// Package plainfile reads the files that a configuration names. They may be
// replaced while Envoy runs, by anything.
package plainfile

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// Read returns what is in the regular file at path, or behind links there, if it
// has no more than limit bytes. Pipes, sockets and devices are errors: who reads
// one may wait for ever, or never come to an end. Safe for concurrent use.
func Read(path string, limit int64) ([]byte, error) {
	// Opening a pipe waits for its writer otherwise.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1)) // a size says little of a file that is being written
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return data, nil
}
