package filter

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// TestEDSFile: the file follows the configuration that defines the pool, and so
// does the way its endpoints take.
func TestEDSFile(t *testing.T) {
	dir := t.TempDir()
	one, two := filepath.Join(dir, "one.json"), filepath.Join(dir, "two.json")
	lines := make(chan string, 100)
	rt := NewRuntime(Options{Linger: time.Millisecond, Log: func(_ slog.Level, line string) { lines <- line }})
	defer rt.Stop()
	config := func(address, destination string) string {
		return fmt.Sprintf("pools: {default: {static: [{address: %q}]}}\nadmin: {address: \"\"}\n%s", address, destination)
	}
	eds := func(path string) string { return "destination: eds\neds: {path: " + path + "}\n" }
	load := func(text string) *Generation {
		t.Helper()
		gen, err := rt.Load([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return gen
	}
	holds := func(path, address string) func() bool {
		return func() bool {
			text, err := os.ReadFile(path)
			return err == nil && strings.Contains(string(text), address)
		}
	}
	known := func(gen *Generation, address string) func() bool {
		return func() bool { return gen.settings.Load().pools["default"].holder.Load().ByKey(address) != nil }
	}
	if _, err := rt.Load([]byte(config("127.0.0.1:1", eds(dir+"/no/eds.json")))); err == nil || !strings.Contains(err.Error(), "there is no folder "+dir+"/no") {
		t.Errorf("a folder that is missing: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	first := load(config("127.0.0.1:1", eds(one)))
	eventually(t, "the endpoint is known", known(first, "127.0.0.1:1"))
	if !holds(one, `"127.0.0.1"`)() {
		t.Error("it is known before it is in the file")
	}
	// Somebody else's hands in it, as of one who prints the first content anew.
	for what, change := range map[string]func() error{
		"written over": func() error { return os.WriteFile(one, []byte("resources: []\n"), 0o600) },
		"removed":      func() error { return os.Remove(one) },
		"another's":    func() error { return os.Rename(filepath.Join(dir, "other.json"), one) },
	} {
		if err := os.WriteFile(filepath.Join(dir, "other.json"), []byte("resources: []\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		before := metricValue(t, rt, "shunt_eds_writes_total", "result", "restored")
		if err := change(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a file that was "+what+" is restored", func() bool {
			return holds(one, `"127.0.0.1"`)() && metricValue(t, rt, "shunt_eds_writes_total", "result", "restored") == before+1
		})
	}
	logged := 0
	for len(lines) > 0 {
		if strings.Contains(<-lines, "somebody else has changed or removed it") {
			logged++
		}
	}
	if logged != 1 {
		t.Errorf("that is logged %d times", logged)
	}

	second := load(config("127.0.0.1:1", eds(two))) // nothing else changes
	eventually(t, "the endpoint is in the new file", holds(two, `"127.0.0.1"`))
	first.Release()
	third := load(config("127.0.0.2:1", eds(two)))
	eventually(t, "the new endpoint is known", known(third, "127.0.0.2:1"))
	if !holds(two, `"127.0.0.2"`)() {
		t.Error("it is known before it is in the file")
	}
	second.Release()
	fourth := load(config("127.0.0.3:1", ""))
	eventually(t, "an endpoint is known without a file", known(fourth, "127.0.0.3:1"))
	if holds(two, `"127.0.0.3"`)() {
		t.Error("it is in a file that nobody asked for")
	}
	third.Release()
	fourth.Release()

	// A file that can't be replaced: said once, and the endpoint stays unknown.
	if err := os.Mkdir(filepath.Join(dir, "three.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	fifth := load(config("127.0.0.4:1", eds(dir+"/three.json")))
	eventually(t, "the failure is counted", func() bool { return metricValue(t, rt, "shunt_eds_writes_total", "result", "failed") > 0 })
	if known(fifth, "127.0.0.4:1")() {
		t.Error("an endpoint is known that Envoy can't know")
	}
	eventually(t, "the failure is logged", func() bool {
		select {
		case line := <-lines:
			return strings.Contains(line, "new endpoints get no requests until it can be written")
		default:
			return false
		}
	})
	if err := os.Remove(filepath.Join(dir, "three.json")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is written in the end", known(fifth, "127.0.0.4:1"))
	fifth.Release()

	// A folder that goes, and comes back.
	sixth := load(config("127.0.0.5:1", eds(filepath.Join(dir, "sub", "eds.json"))))
	eventually(t, "the file is in its folder", known(sixth, "127.0.0.5:1"))
	failed := metricValue(t, rt, "shunt_eds_writes_total", "result", "failed")
	if err := os.RemoveAll(filepath.Join(dir, "sub")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the failure is counted", func() bool { return metricValue(t, rt, "shunt_eds_writes_total", "result", "failed") > failed })
	if !known(sixth, "127.0.0.5:1")() {
		t.Error("an endpoint that Envoy knows is forgotten")
	}
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the file is back", holds(filepath.Join(dir, "sub", "eds.json"), `"127.0.0.5"`))
	sixth.Release()
}

// TestEDSGoesOnAfterAPanic: who keeps the file begins anew.
func TestEDSGoesOnAfterAPanic(t *testing.T) {
	path := filepath.Join(t.TempDir(), "eds.json")
	var panics atomic.Bool
	rt := NewRuntime(Options{Linger: time.Millisecond, Log: func(_ slog.Level, line string) {
		if strings.Contains(line, "somebody else has changed or removed it") && panics.CompareAndSwap(false, true) {
			panic("in a line")
		}
	}})
	defer rt.Stop()
	gen, err := rt.Load([]byte("pools: {default: {static: [{address: 127.0.0.1}]}}\nadmin: {address: \"\"}\ndestination: eds\neds: {path: " + path + "}"))
	if err != nil {
		t.Fatal(err)
	}
	defer gen.Release()
	eventually(t, "the endpoint is known", func() bool { return gen.settings.Load().pools["default"].holder.Load().ByKey("127.0.0.1:8000") != nil })
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the file is restored", func() bool { return metricValue(t, rt, "shunt_eds_writes_total", "result", "restored") == 1 })
	if n := metricValue(t, rt, "shunt_internal_errors_total", "where", "keeping "+path); n != 1 {
		t.Errorf("%v panics were counted", n)
	}
}
