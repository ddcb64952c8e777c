package filter

import (
	"strings"
	"testing"
)

// TestHeldBodies: bodies of requests that are not decided yet share a limit,
// and whatever becomes of them, they give their room back.
func TestHeldBodies(t *testing.T) {
	const config = "limits: {requestBody: 1MiB, heldBodies: 2MiB}\nmodels: {known: [{name: m}]}"
	const mib = 1 << 20
	begin := func(w *world, pairs ...string) *stream {
		s := w.stream()
		s.Headers(post(chatPath, pairs...), false, nil, &s.v)
		return s
	}
	held := func(w *world) int64 { return w.bodies.bytes.Load() }
	w := newWorld(t, config)
	w.bodies.limit.Store(2 * mib) // as a runtime that runs has it
	w.publish("default", ep(1, "m"))

	a, b := begin(w, "content-length", "1048576"), begin(w, "content-length", "1000000")
	if a.v.Action != NeedBody || a.v.BodyRoom != mib || b.v.Action != NeedBody || held(w) != mib+1000000 {
		t.Fatalf("%s, %s, %d held", show(&a.v), show(&b.v), held(w))
	}
	c := begin(w, "content-length", "100000")
	if c.v.meta("reason") != "rejected-saturated" || c.v.Reply.Status != 429 || !strings.Contains(string(c.v.Reply.Body), "limits.heldBodies") || held(w) != mib+1000000 {
		t.Fatalf("%s, %d held", show(&c.v), held(w))
	}
	c.finish(End{})
	b.Body([][]byte{[]byte(chatBody)}, &b.v)
	if b.v.Action != Continue || held(w) != mib {
		t.Fatalf("%s, %d held", show(&b.v), held(w))
	}
	a.finish(End{}) // its client left
	if held(w) != 0 {
		t.Fatalf("%d held", held(w))
	}
	b.finish(End{})

	// Of unknown length: it asks as it grows.
	d := begin(w)
	if d.v.BodyRoom != unsizedHold || held(w) != unsizedHold {
		t.Fatalf("%s, room %d, %d held", show(&d.v), d.v.BodyRoom, held(w))
	}
	for _, step := range []struct{ size, room int64 }{{unsizedHold + 1, 2 * unsizedHold}, {600_000, 600_000}, {600_001, mib}} {
		if d.More(step.size, &d.v); d.v.Action != NeedBody || d.v.BodyLimit != mib || d.v.BodyRoom != step.room || held(w) != step.room {
			t.Fatalf("%+v: %s, room %d, %d held", step, show(&d.v), d.v.BodyRoom, held(w))
		}
	}
	e := begin(w, "content-length", "1048576")
	f := begin(w)
	if e.v.Action != NeedBody || f.v.meta("reason") != "rejected-saturated" {
		t.Fatalf("%s, %s", show(&e.v), show(&f.v))
	}
	d.TooLarge(&d.v)
	if held(w) != mib {
		t.Fatalf("%d held", held(w))
	}
	g := begin(w)
	h := begin(w, "content-length", "900000")
	if g.More(unsizedHold+60_000, &g.v); g.v.Action != NeedBody {
		t.Fatal(show(&g.v))
	}
	if g.More(500_000, &g.v); g.v.meta("reason") != "rejected-saturated" {
		t.Fatal(show(&g.v))
	}
	for _, s := range []*stream{d, e, f, g, h} {
		s.finish(End{})
	}
	if held(w) != 0 {
		t.Fatalf("%d held", held(w))
	}

	// One that waits holds what it has.
	slow := newWorld(t, config)
	slow.bodies.limit.Store(2 * mib)
	i := begin(slow, "content-length", "1000")
	i.Body([][]byte{[]byte(chatBody)}, &i.v)
	if i.v.Action != Wait || held(slow) != int64(len(chatBody)) {
		t.Fatalf("%s, %d held", show(&i.v), held(slow))
	}
	slow.publish("default", ep(1, "m"))
	if i.Resume(&i.v); i.v.Action != Continue || held(slow) != 0 {
		t.Fatalf("%s, %d held", show(&i.v), held(slow))
	}
	i.finish(End{})

	// One that comes whole needs no room.
	whole := w.stream()
	head := post(chatPath, "content-length", "1048576")
	head.Whole = true
	if whole.Headers(head, false, nil, &whole.v); whole.v.Action != NeedBody || held(w) != 0 {
		t.Errorf("%s, %d held", show(&whole.v), held(w))
	}
	whole.finish(End{})
	if load(w.pool("default")) != 0 {
		t.Error("load is left")
	}
}
