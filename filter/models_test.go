package filter

import (
	"fmt"
	"sync"
	"testing"
	"unsafe"

	"github.com/shuntproxy/shunt/internal/pool"
)

// TestModelSeries: metrics carry the model asked for and the one the engine
// got, and names that clients make up are one series.
func TestModelSeries(t *testing.T) {
	w := newWorld(t, "models: {known: [{name: m, aliases: [alias]}]}\nrewrites: [{matches: [{model: old}], targets: [{model: n}]}]")
	w.publishInput("default", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{ep(1, "m", "n"), ep(2)}, Known: []string{"known"}})
	for _, c := range []struct{ asked, target, label, targetLabel string }{
		{"m", "m", "m", "m"},
		{"", "", "", ""},
		{"known", "m", "known", "m"},
		{"", "m", "", "m"},
		{"alias", "m", "alias", "m"},
		{"old", "n", "old", "n"},
		{"made up", "m", "other", "m"},
		{"made up too", "m", "other", "m"},
		{"made up", "made up", "other", "other"},
		{"m", "made up", "m", "other"},
	} {
		before := w.counterValue(t, "shunt_requests_total", "pool", "default", "model", c.label, "target_model", c.targetLabel)
		s := w.stream()
		s.set, s.pool, s.policy = w.gen.settings.Load(), w.pool("default"), w.gen.settings.Load().policy
		s.asked, s.model = c.asked, c.target
		s.decide(w.now(), &s.v)
		if s.v.meta("model") != c.asked || s.v.meta("target_model") != c.target {
			t.Errorf("%+v: %s", c, show(&s.v))
		}
		s.finish(End{})
		if n := w.counterValue(t, "shunt_requests_total", "pool", "default", "model", c.label, "target_model", c.targetLabel); n != before+1 {
			t.Errorf("%+v: %v counted, %v before", c, n, before)
		}
	}
}

func TestModelTableIsBounded(t *testing.T) {
	w := newWorld(t, "")
	table := &w.pool("default").counters.models
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range 2 * maxModelPairs {
				p := modelPair{fmt.Sprint(i), "t"}
				if c := table.get(p); c != table.get(p) {
					t.Errorf("%v has two rows", p)
				}
			}
		})
	}
	all.Wait()
	if n := len(*table.rows.Load()); n != maxModelPairs+1 {
		t.Errorf("%d rows, want %d and the one for the others", n, maxModelPairs)
	}
	if table.get(modelPair{"new", "t"}) != table.get(modelPair{otherModel, otherModel}) {
		t.Error("one too many is not counted as other")
	}
}

// TestOwnName: a name outlives the memory it was read from.
func TestOwnName(t *testing.T) {
	w := newWorld(t, "")
	snap := w.publish("default", ep(1, "m"), ep(2))
	for in, want := range map[string]string{"m": "m", "x": "x", "\xff\xfe": "\ufffd", "": ""} {
		memory := []byte(in)
		got := ownName(snap, borrowed(memory))
		for i := range memory {
			memory[i] = '!'
		}
		if got != want {
			t.Errorf("%q: %q", in, got)
		}
	}
	if got := ownName(snap, "m"); unsafe.StringData(got) != unsafe.StringData(snap.ForModel("m").Model) {
		t.Error("a known name is copied")
	}
}
