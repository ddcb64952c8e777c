package discovery

import (
	"context"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// settle is how long the folder must be quiet before the file is read: a
	// file that is being written may look like a shorter valid one.
	settle = 50 * time.Millisecond
	// maxSettle bounds that wait in a folder that is never quiet.
	maxSettle = time.Second
	// pollEvery is how often the file is read without an event: network file
	// systems have none, and a folder that was replaced takes its watch along.
	pollEvery = 15 * time.Second
)

// Watch calls look whenever the file at path may have changed, from the
// caller's goroutine, until ctx ends. It watches the file's folder: a ConfigMap
// swaps a symlink next to the file and editors rename, which are events of the
// folder. It also calls look once the watch is in place, so that no change
// is lost between a first reading and the watch, and every 15 s, whatever
// happened: look compares contents.
func Watch(ctx context.Context, path string, look func()) {
	w := folderWatch{folder: filepath.Dir(path)}
	w.renew()
	defer w.close()
	look()

	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	quiet := time.NewTimer(0)
	quiet.Stop()
	defer quiet.Stop()
	var firstEvent time.Time // of those that wait for quiet
	for {
		events, errs := w.channels()
		select {
		case <-ctx.Done():
			return
		case ev := <-events:
			if ev.Op == fsnotify.Chmod {
				continue
			}
			now := time.Now()
			if firstEvent.IsZero() {
				firstEvent = now
			}
			if wait := min(settle, firstEvent.Add(maxSettle).Sub(now)); wait > 0 {
				quiet.Reset(wait)
			}
		case _, ok := <-errs: // events may be lost
			_ = ok
			quiet.Reset(settle)
		case <-quiet.C:
			firstEvent = time.Time{}
			look()
		case <-poll.C:
			w.renew()
			look()
		}
	}
}

// folderWatch is a watcher of a folder, or of nothing where there can be none:
// the poll still sees changes.
type folderWatch struct {
	folder  string
	watcher *fsnotify.Watcher
}

// renew watches the folder that has the path now.
func (w *folderWatch) renew() {
	if w.watcher != nil && w.watcher.Add(w.folder) == nil {
		return
	}
	w.close()
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return
	}
	if watcher.Add(w.folder) != nil {
		_ = watcher.Close()
		return
	}
	w.watcher = watcher
}

func (w *folderWatch) channels() (<-chan fsnotify.Event, <-chan error) {
	if w.watcher == nil {
		return nil, nil
	}
	return w.watcher.Events, w.watcher.Errors
}

func (w *folderWatch) close() {
	if w.watcher != nil {
		_ = w.watcher.Close() // nothing is written through it
		w.watcher = nil
	}
}
