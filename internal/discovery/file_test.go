package discovery

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must come.
const patience = 20 * time.Second

// running is a File that runs until the test ends.
type running struct {
	t    *testing.T
	sets chan Set

	mu    sync.Mutex
	lines []string
}

func run(t *testing.T, path string, initial []pool.Target) (*File, *running) {
	r := &running{t: t, sets: make(chan Set, 100)}
	f := NewFile(path, initial, func(_ slog.Level, msg string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.lines = append(r.lines, msg)
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- f.Run(ctx, func(s Set) { r.sets <- s }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	return f, r
}

// next waits for the next set and checks it.
func (r *running) next(state State, addrs ...string) {
	r.t.Helper()
	select {
	case s := <-r.sets:
		var got []string
		for _, target := range s.Targets {
			got = append(got, target.Addr.String())
			if target.Source != "file" {
				r.t.Errorf("source is %q", target.Source)
			}
		}
		if s.State != state || strings.Join(got, " ") != strings.Join(addrs, " ") {
			r.t.Fatalf("got state %d with %v, want %d with %v", s.State, got, state, addrs)
		}
	case <-time.After(patience):
		r.t.Fatal("no set")
	}
}

func (r *running) logged(parts ...string) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.lines) != len(parts) {
		r.t.Fatalf("logged %d lines, want %d: %q", len(r.lines), len(parts), r.lines)
	}
	for i, p := range parts {
		if !strings.Contains(r.lines[i], p) {
			r.t.Errorf("line %d is %q, want %q in it", i, r.lines[i], p)
		}
	}
}

// write makes doc the file's content in one step: in place where the length
// stays, else by rename. A reader never sees half of it.
func write(t *testing.T, path, doc string) {
	t.Helper()
	if old, err := os.Stat(path); err == nil && old.Size() == int64(len(doc)) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt([]byte(doc), 0); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err := os.WriteFile(path+".tmp", []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	rename(t, path+".tmp", path)
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

func TestFileFollowsChanges(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "endpoints.yaml")
	write(t, path, "- address: 10.0.0.1")
	f, r := run(t, path, nil)
	r.next(Complete, "10.0.0.1:8000")

	write(t, path, "- address: 10.0.0.2") // in place
	r.next(Complete, "10.0.0.2:8000")

	write(t, path+".new", "[{address: 10.0.0.3}, {address: 10.0.0.4}]")
	rename(t, path+".new", path)
	r.next(Complete, "10.0.0.3:8000", "10.0.0.4:8000")

	write(t, path, "[]")
	r.next(Complete)
	r.logged("read 1 endpoints", "read 1 endpoints", "read 2 endpoints", "read 0 endpoints")
	if s := f.Status(); s.Changes != 3 || s.Failures != 0 || s.Error != "" || s.Endpoints != 0 || s.Loaded.IsZero() || s.Where != path {
		t.Errorf("status %+v", s)
	}
}

func TestFileOfConfigMap(t *testing.T) {
	dir := t.TempDir()
	link := func(target, name string) {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for version, address := range map[string]string{"..1": "10.0.0.1", "..2": "10.0.0.2"} {
		if err := os.Mkdir(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, version, "endpoints.yaml"), "- address: "+address)
	}
	link("..1", "..data")
	link("..data/endpoints.yaml", "endpoints.yaml")
	_, r := run(t, filepath.Join(dir, "endpoints.yaml"), nil)
	r.next(Complete, "10.0.0.1:8000")

	link("..2", "..data_tmp")
	rename(t, filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data"))
	r.next(Complete, "10.0.0.2:8000")
}

func TestFileKeepsTheLastGoodSet(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, path, "- address: 10.0.0.1")
	f, r := run(t, path, nil)
	r.next(Complete, "10.0.0.1:8000")

	write(t, path, "- adress: 10.0.0.2\n- foo: bar")
	r.next(LastGood, "10.0.0.1:8000")
	broken := f.Status()
	if !strings.Contains(broken.Error, "[0].adress: is unknown") || broken.Since.IsZero() || broken.Failures != 1 || broken.Endpoints != 1 {
		t.Errorf("status %+v", broken)
	}

	write(t, path, "- address: 10.0.0.1") // as it was
	r.next(Complete, "10.0.0.1:8000")
	if s := f.Status(); s.Error != "" || !s.Since.IsZero() || s.Changes != 1 {
		t.Errorf("status %+v", s)
	}

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	r.next(LastGood, "10.0.0.1:8000")
	write(t, path, "- address: 10.0.0.3")
	r.next(Complete, "10.0.0.3:8000")
	r.logged("read 1", "keeping the last good set of 1 endpoints", "read 1", "no such file", "read 1")
}

func TestFileGoneSinceConfigLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	initial, problems := pool.ParseTarget("10.0.0.1", nil, "")
	if problems != nil {
		t.Fatal(problems)
	}
	_, r := run(t, path, []pool.Target{initial})
	r.next(Complete, "10.0.0.1:8000") // it was, when the config was loaded
	r.next(LastGood, "10.0.0.1:8000")
	write(t, path, "- address: 10.0.0.2")
	r.next(Complete, "10.0.0.2:8000")

	_, never := run(t, path+".other", nil)
	never.next(LastGood)
}

func TestNoWatchOfAFolderToCome(t *testing.T) {
	w := folderWatch{folder: filepath.Join(t.TempDir(), "later")}
	defer w.close()
	w.renew()
	if events, _ := w.channels(); events != nil {
		t.Fatal("watches a folder that is not there")
	}
	if err := os.Mkdir(w.folder, 0o700); err != nil {
		t.Fatal(err)
	}
	w.renew()
	events, _ := w.channels()
	if events == nil {
		t.Fatal("does not watch the folder that came")
	}
	write(t, filepath.Join(w.folder, "a"), "b")
	select {
	case <-events:
	case <-time.After(patience):
		t.Fatal("no event")
	}
}

func TestStatic(t *testing.T) {
	target, _ := pool.ParseTarget("10.0.0.1", nil, "")
	given := []pool.Target{target}
	s := NewStatic(given)
	given[0].Pod = "changed"
	ctx, cancel := context.WithCancel(context.Background())
	var sets []Set
	if err := s.Run(ctx, func(s Set) { sets = append(sets, s); cancel() }); err != nil {
		t.Fatal(err)
	}
	if len(sets) != 1 || sets[0].State != Complete || len(sets[0].Targets) != 1 || sets[0].Targets[0].Source != "static" || sets[0].Targets[0].Pod != "" {
		t.Errorf("got %+v", sets)
	}
}
