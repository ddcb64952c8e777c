package pool

import (
	"testing"
	"time"
)

func TestReadiness(t *testing.T) {
	for _, c := range []struct {
		heard         string // + answered, - failed
		judged, ready bool
	}{
		{"", false, false},
		{"+", true, true},
		{"-", true, false},
		{"+-", true, true}, // one is a lost packet
		{"+--", true, false},
		{"+-+-", true, true}, // not in a row
		{"+---+", true, true},
		{"-+-", true, true},
		{"--+", true, true},
	} {
		var r Readiness
		for _, h := range c.heard {
			if h == '+' {
				r.Answered()
			} else {
				r.Failed()
			}
		}
		if r.Judged() != c.judged || r.Ready() != c.ready {
			t.Errorf("%q: judged %v, ready %v", c.heard, r.Judged(), r.Ready())
		}
	}
}

// resets sends n resets, gap apart from now on, and returns the time of the
// last and whether it set the endpoint aside.
func resets(s *SetAside, now time.Time, n int, gap time.Duration) (time.Time, bool) {
	aside := false
	for i := range n {
		if i > 0 {
			now = now.Add(gap)
		}
		aside = s.Reset(now)
	}
	return now, aside
}

func TestSetAside(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		n    int
		gap  time.Duration
		want bool
	}{
		{2, 0, false},
		{3, 0, true},
		{3, 5 * time.Second, true}, // 10 s from first to third
		{3, 5*time.Second + time.Nanosecond, false},  // over
		{10, 5*time.Second + time.Nanosecond, false}, // never 3 within 10 s
		{4, 3400 * time.Millisecond, false},          // the third did; the fourth finds it set aside
	} {
		var s SetAside
		now, got := resets(&s, start, c.n, c.gap)
		if got != c.want {
			t.Errorf("%d resets %s apart: %v", c.n, c.gap, got)
		}
		if got && (!s.Active(now) || s.Since() != now || s.Until() != now.Add(10*time.Second) || s.Active(s.Until())) {
			t.Errorf("%d resets %s apart: set aside from %s to %s", c.n, c.gap, s.Since(), s.Until())
		}
	}
}

func TestSetAsideDoubles(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var s SetAside
	for _, want := range []time.Duration{10, 20, 40, 80, 160, 300, 300} {
		var ok bool
		if now, ok = resets(&s, now, 3, time.Second); !ok {
			t.Fatal("not set aside")
		}
		if got := s.Until().Sub(now); got != want*time.Second {
			t.Fatalf("set aside for %s, want %ds", got, want)
		}
		if s.Reset(now.Add(time.Second)) {
			t.Fatal("a reset while set aside starts it again")
		}
		now = s.Until()
	}
	now = now.Add(5*time.Minute + time.Nanosecond) // that long without
	now, _ = resets(&s, now, 3, 0)
	if got := s.Until().Sub(now); got != 10*time.Second {
		t.Errorf("after a good while set aside for %s", got)
	}
	s.End()
	if s.Active(now) || !s.Until().IsZero() {
		t.Error("End did not end it")
	}
	now, _ = resets(&s, now, 3, 0)
	if got := s.Until().Sub(now); got != 10*time.Second {
		t.Errorf("after End set aside for %s", got)
	}
}
