package main

import (
	"maps"
	"os"
	"path/filepath"
	"testing"
)

func TestTally(t *testing.T) {
	c := tally{
		regions:   []region{{100, 200, inEnvoy}, {300, 400, inModule}, {400, 500, inLibrary}},
		callbacks: map[uint64]string{150: "get", 160: "set"},
		now:       byEnvoy, counts: map[string]int64{}, calls: map[string]int64{},
	}
	for _, at := range []uint64{
		100, 450, 150, // Envoy's own, its libc, and a function that is a callback too, but not called by the module
		300, 399, 400, // the module and its libc
		150, 151, 460, 101, // a callback, what it calls
		301, 160, 302, // back, and another
		102, 199, 99, 200, 250, 500, // Envoy goes on; what lies nowhere is a library's
	} {
		c.step(at)
	}
	if want := map[string]int64{byEnvoy: 3 + 6, byModule: 3 + 2, "get": 4, "set": 1}; !maps.Equal(c.counts, want) {
		t.Errorf("instructions %v, want %v", c.counts, want)
	}
	if want := map[string]int64{"get": 1, "set": 1}; !maps.Equal(c.calls, want) {
		t.Errorf("calls %v, want %v", c.calls, want)
	}
}

// The test's own process stands in for Envoy.
func TestNewTally(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newTally(os.Getpid(), filepath.Join(t.TempDir(), "none"), ""); err == nil {
		t.Error("a file that is not there is no error")
	}
	c, err := newTally(os.Getpid(), self, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for i, r := range c.regions {
		found = found || r.place == inEnvoy
		if i > 0 && r.from < c.regions[i-1].to {
			t.Errorf("regions overlap: %+v, %+v", c.regions[i-1], r)
		}
	}
	if !found {
		t.Errorf("none of %d regions is the binary's own", len(c.regions))
	}
}
