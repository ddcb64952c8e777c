package filter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
)

// edsFile keeps one file of endpoints for Envoy's path_config_source, and hands
// the sets of discovery to their pools once Envoy can know of their addresses.
type edsFile struct {
	// immutable
	path   string
	rt     *Runtime
	wake   chan struct{} // size 1
	cancel context.CancelFunc
	done   sync.WaitGroup

	pools map[*Pool]struct{} // that use it; protected by Runtime.mu

	// mu is held while the book is looked at, and while sets are handed on: those
	// of one source stay in order.
	mu      sync.Mutex
	book    *edsBook
	content []byte // of the newest version, nil before there is one

	saidRestored time.Time
}

// edsLocked gives a pool the EDS file that cfg says, or none.
func (rt *Runtime) edsLocked(p *Pool, cfg *config.Config) {
	path := ""
	if cfg.Destination == config.DestinationEDS {
		path = cfg.EDS.Path
	}
	if old := p.edsFile(); old != nil && old.path == path || old == nil && path == "" {
		return
	}
	var next *edsFile
	if path != "" {
		if next = rt.edsFiles[path]; next == nil {
			next = rt.startEDS(path)
			rt.edsFiles[path] = next
		}
		next.pools[p] = struct{}{}
	}
	rt.useEDSLocked(p, next)
}

// useEDSLocked makes a pool's sets go by way of next, or straight on. Those that
// it has go that way again.
func (rt *Runtime) useEDSLocked(p *Pool, next *edsFile) {
	p.feedMu.Lock()
	old := p.eds
	p.eds = next
	if old != nil {
		old.keep(p, nil)
	}
	if old != next {
		for _, g := range p.fed {
			p.passOn(g)
		}
	}
	p.feedMu.Unlock()
	if old != nil && old != next {
		rt.leaveEDSLocked(old, p)
	}
}

func (p *Pool) edsFile() *edsFile {
	p.feedMu.Lock()
	defer p.feedMu.Unlock()
	return p.eds
}

// leaveEDSLocked ends a file that no pool uses any more. What is in it stays.
func (rt *Runtime) leaveEDSLocked(f *edsFile, p *Pool) {
	delete(f.pools, p)
	if len(f.pools) == 0 {
		delete(rt.edsFiles, f.path)
		f.cancel()
		rt.background.Go(f.done.Wait)
	}
}

func (rt *Runtime) startEDS(path string) *edsFile {
	ctx, cancel := context.WithCancel(context.Background())
	f := &edsFile{path: path, rt: rt, wake: make(chan struct{}, 1), cancel: cancel, pools: map[*Pool]struct{}{}, book: newEDSBook()}
	f.done.Go(func() { rt.outlive(ctx, "keeping "+path, func(bool) { f.run(ctx) }) })
	f.done.Go(func() { rt.outlive(ctx, "watching "+path, func(bool) { discovery.Watch(ctx, path, f.inspect) }) })
	return f
}

// feed takes a set of a source: to the pool's snapshots, by way of the EDS file
// if it has one.
func (p *Pool) feed(source string, targets []pool.Target, state metricsync.State) {
	p.feedMu.Lock()
	defer p.feedMu.Unlock()
	g := gift{offerKey{p, source}, targets, state}
	if p.fed == nil {
		p.fed = map[string]gift{}
	}
	p.fed[source] = g
	p.passOn(g)
}

// passOn needs feedMu.
func (p *Pool) passOn(g gift) {
	if p.eds != nil {
		p.eds.offer(g.offerKey, g.targets, g.state)
		return
	}
	p.syncer.SetTargets(g.source, slices.Clone(g.targets), g.state) // which it owns from here
}

// keepFed forgets the sets of sources that the pool does not have any more.
func (p *Pool) keepFed(sources []string) {
	p.feedMu.Lock()
	defer p.feedMu.Unlock()
	maps.DeleteFunc(p.fed, func(name string, _ gift) bool { return !slices.Contains(sources, name) })
	if p.eds != nil {
		p.eds.keep(p, sources)
	}
}

func (f *edsFile) offer(key offerKey, targets []pool.Target, state metricsync.State) {
	f.mu.Lock()
	f.book.put(key, targets, state)
	f.mu.Unlock()
	f.look()
}

// look makes the file's goroutine look at the book.
func (f *edsFile) look() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// inspect looks whether the file still is what was written last. Envoy reads what
// somebody else puts there: without these endpoints it fails their requests.
func (f *edsFile) inspect() {
	f.mu.Lock()
	lost := f.content != nil && !f.book.lost && !holdsContent(f.path, f.content)
	if lost {
		f.book.lost = true
	}
	f.mu.Unlock()
	if lost {
		f.look()
	}
}

// holdsContent reports whether a file is there and has that content.
func holdsContent(path string, content []byte) bool {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() != int64(len(content)) {
		return false
	}
	got, err := os.ReadFile(path)
	return err == nil && bytes.Equal(got, content)
}

// keep forgets the sources of a pool that it does not have any more.
func (f *edsFile) keep(p *Pool, sources []string) {
	f.mu.Lock()
	f.book.drop(p, sources)
	f.mu.Unlock()
	f.look()
}

func (f *edsFile) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failing := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.wake:
		case <-timer.C:
		}
		next, err := f.turn(f.rt.now())
		failing = f.say(failing, err)
		if !next.IsZero() {
			timer.Reset(max(time.Millisecond, next.Sub(f.rt.now())))
		}
	}
}

// turn writes the file if it is time and hands on what may be.
func (f *edsFile) turn(now time.Time) (next time.Time, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if content, want := f.book.version(now); content != nil {
		result := "written"
		switch err = replaceFile(f.path, content); {
		case err != nil:
			result = "failed"
			f.book.failed = now
		case f.book.lost:
			result = "restored"
			f.sayRestored(f.rt.now())
			fallthrough
		default:
			f.content = content
			f.book.written(want, f.rt.now())
		}
		f.rt.metrics.edsWrites.WithLabelValues(result).Inc()
	} else if !f.book.failed.IsZero() {
		err = errStillFailing
	}
	for _, g := range f.book.gifts(now) {
		g.pool.syncer.SetTargets(g.source, g.targets, g.state)
	}
	return f.book.next(now), err
}

// restoredGap is the least time between two log lines of a file that somebody
// else changes again and again.
const restoredGap = time.Minute

// sayRestored needs mu.
func (f *edsFile) sayRestored(now time.Time) {
	if now.Sub(f.saidRestored) >= restoredGap {
		f.saidRestored = now
		f.rt.log(slog.LevelWarn, "eds.path "+f.path+": somebody else has changed or removed it; it is written again, and has to be this process's alone")
	}
}

var errStillFailing = errors.New("a version waits")

// say logs the begin and the end of a failure, and returns what is failing now.
func (f *edsFile) say(before string, err error) string {
	switch {
	case err == nil:
		if before != "" {
			f.rt.log(slog.LevelInfo, "eds.path "+f.path+": written again")
		}
		return ""
	case before == "":
		f.rt.log(slog.LevelError, fmt.Sprintf("eds.path %s: %v; new endpoints get no requests until it can be written", f.path, err))
		return err.Error()
	default:
		return before
	}
}

// replaceFile puts content in the place of a file by a rename, which is what
// Envoy sees.
func replaceFile(path string, content []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(content)
	if err == nil {
		err = tmp.Chmod(0o644) // others may read it: it is no secret
	}
	if closing := tmp.Close(); err == nil {
		err = closing
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name()) // the error that counts is the first
	}
	return err
}
