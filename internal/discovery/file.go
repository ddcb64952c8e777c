package discovery

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/shuntproxy/shunt/internal/plainfile"
	"github.com/shuntproxy/shunt/internal/pool"
)

// File is a source of endpoints in a file. A broken or missing file keeps the
// last good set.
type File struct {
	path    string
	log     func(level slog.Level, msg string)
	initial []pool.Target
	read    bool // initial is what the file held once

	// The fields below belong to Run's goroutine.
	data []byte        // of the last good set
	good []pool.Target // the last good set

	// mu protects status.
	mu     sync.Mutex
	status Status
}

// NewFile returns a source that reads path, and watches its folder once it
// runs. initial is what ReadFile gave at config load, the first set if the file
// can't be read any more; nil if it was not read. log gets one line per change, or is nil.
func NewFile(path string, initial []pool.Target, log func(level slog.Level, msg string)) *File {
	if log == nil {
		log = func(slog.Level, string) {}
	}
	return &File{path: path, log: log, initial: withSource(initial, "file"), read: initial != nil, status: Status{Where: path}}
}

// Status returns the present state. Any goroutine may call it.
func (f *File) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.status
}

// Run implements Source.
func (f *File) Run(ctx context.Context, deliver func(Set)) error {
	f.good = f.initial
	if !f.load(deliver) {
		if f.read {
			f.deliver(deliver, Complete) // it was, at config load
		}
		f.deliver(deliver, LastGood)
	}
	Watch(ctx, f.path, func() { f.load(deliver) })
	return nil
}

// load reads the file, delivers its set if that is another, and reports
// whether the file is good.
func (f *File) load(deliver func(Set)) bool {
	before := f.Status()
	data, err := plainfile.Read(f.path, maxFile)
	if err == nil && before.Error == "" && !before.Loaded.IsZero() && bytes.Equal(data, f.data) {
		return true
	}
	var targets []pool.Target
	if err == nil {
		if targets, err = decode(data); err != nil {
			err = fmt.Errorf("%s: %w", f.path, err)
		}
	}
	now := time.Now()
	if err != nil {
		f.failed(err.Error(), before, now, deliver)
		return false
	}
	f.data, f.good = data, targets
	f.mu.Lock()
	f.status.Endpoints, f.status.Loaded = len(targets), now
	f.status.Error, f.status.Since = "", time.Time{}
	if !before.Loaded.IsZero() || before.Error != "" {
		f.status.Changes++
	}
	f.mu.Unlock()
	f.log(slog.LevelInfo, fmt.Sprintf("%s: read %d endpoints", f.path, len(targets)))
	f.deliver(deliver, Complete)
	return true
}

// failed notes that the file can't be used. The same error again is no change.
func (f *File) failed(msg string, before Status, now time.Time, deliver func(Set)) {
	if msg == before.Error {
		return
	}
	f.mu.Lock()
	if before.Error == "" {
		f.status.Since = now
	}
	f.status.Error = msg
	f.status.Endpoints = len(f.good)
	f.status.Failures++
	f.mu.Unlock()
	f.log(slog.LevelError, fmt.Sprintf("%s; keeping the last good set of %d endpoints", strings.ReplaceAll(msg, "\n", "; "), len(f.good)))
	if before.Error == "" && !before.Loaded.IsZero() {
		f.deliver(deliver, LastGood)
	}
}

func (f *File) deliver(deliver func(Set), state State) {
	deliver(Set{Targets: append([]pool.Target(nil), f.good...), State: state})
}
