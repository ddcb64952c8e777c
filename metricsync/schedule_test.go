package metricsync

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestNextScrape(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		now, interval time.Duration
		phase         uint64
		failures      int
		want          time.Duration
	}{
		{0, 1000 * ms, uint64(300 * ms), 0, 300 * ms},
		{300 * ms, 1000 * ms, uint64(300 * ms), 0, 1300 * ms},
		{500 * ms, 1000 * ms, uint64(300 * ms), 0, 1300 * ms},
		{1299 * ms, 1000 * ms, uint64(300 * ms), 0, 1300 * ms},
		{500 * ms, 1000 * ms, uint64(7300 * ms), 0, 1300 * ms}, // phase is modulo the interval
		{500 * ms, 1000 * ms, uint64(300 * ms), 1, 2300 * ms},  // every 2 s
		{500 * ms, 1000 * ms, uint64(300 * ms), 2, 4300 * ms},
		{500 * ms, 1000 * ms, uint64(300 * ms), 100, 30300 * ms}, // at most 30 s
		{0, time.Minute, 0, 100, time.Minute},                    // unless the interval is longer
		{0, minInterval, 0, 0, minInterval},
	} {
		if got := nextScrape(c.now, Config{Interval: c.interval}.withDefaults(), c.phase, c.failures); got != c.want {
			t.Errorf("%+v: got %s", c, got)
		}
	}
}

func TestNextScrapeIsOnTheGrid(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		interval := minInterval + time.Duration(rng.Int64N(int64(time.Minute)))
		now, phase, failures := time.Duration(rng.Int64N(int64(time.Hour))), rng.Uint64(), rng.IntN(40)
		jitter := []float64{0, -1, 0.25}[rng.IntN(3)]
		cfg := Config{Interval: interval, Jitter: jitter, MaxBackOff: 20 * time.Second}.withDefaults()
		got := nextScrape(now, cfg, phase, failures)
		spread := interval
		if jitter == 0.25 {
			spread = interval / 4
		}
		offset := time.Duration(phase % uint64(spread))
		offset -= offset % (spread / slots)
		if jitter < 0 {
			offset = 0
		}
		if got <= now || got-now > max(interval, cfg.MaxBackOff)+interval || (got-offset)%interval != 0 {
			t.Fatalf("now %s, interval %s, jitter %v, offset %s, %d failures: %s", now, interval, jitter, offset, failures, got)
		}
	}
}

func TestPhaseSpreads(t *testing.T) {
	var buckets [10]int
	for i := range 1000 {
		p := phase(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000))
		buckets[p%uint64(time.Second)/uint64(100*time.Millisecond)]++
	}
	if slices.Min(buckets[:]) < 50 {
		t.Errorf("1,000 endpoints in tenths of a second: %v", buckets)
	}
	if a := netip.MustParseAddrPort("10.0.0.1:1"); phase(a) == phase(netip.MustParseAddrPort("10.0.0.1:2")) {
		t.Error("phase is not the address's")
	}
}

func TestNextProbe(t *testing.T) {
	at := time.Unix(1000, 0)
	plain := Config{}.withDefaults()
	health := Config{Health: Health{Path: "/health", Interval: 3 * time.Second}}.withDefaults()
	for _, c := range []struct {
		name string
		s    probeState
		cfg  *Config
		wait time.Duration // after at, -1 for none
	}{
		{"ready, scraped", probeState{last: at, ready: true}, plain, -1},
		{"not ready", probeState{last: at}, plain, time.Second},
		{"blind", probeState{last: at, ready: true, blind: true}, plain, time.Second},
		{"after a failure", probeState{last: at, ready: true, failed: true}, plain, time.Second},
		{"asked soon after one", probeState{last: at, ready: true, asked: at.Add(1)}, plain, probeGap},
		{"asked long after", probeState{last: at, ready: true, asked: at.Add(time.Second)}, plain, time.Second + probeDelay},
		{"health", probeState{last: at, ready: true}, health, 3 * time.Second},
		{"health, asked", probeState{last: at, ready: true, asked: at.Add(1)}, health, probeGap},
	} {
		got, ok := nextProbe(c.s, c.cfg)
		if ok != (c.wait >= 0) || ok && got.Sub(at) != c.wait {
			t.Errorf("%s: %s, %v", c.name, got.Sub(at), ok)
		}
	}
	if got, ok := nextProbe(probeState{}, plain); !ok || !got.IsZero() {
		t.Error("the first probe is not at once")
	}
}

func TestNextList(t *testing.T) {
	origin := time.Unix(1000, 0)
	at := origin.Add(time.Minute)
	const phase = uint64(7*time.Second + 10*listEvery)
	on, off := Config{Discover: true}.withDefaults(), Config{}.withDefaults()
	for _, c := range []struct {
		name string
		s    listState
		cfg  *Config
		want time.Time
		ok   bool
	}{
		{"off", listState{ready: true, asked: true}, off, time.Time{}, false},
		{"not ready", listState{asked: true}, on, time.Time{}, false},
		{"became ready", listState{ready: true}, on, time.Time{}, true},
		{"asked", listState{ready: true, last: at, asked: true}, on, time.Time{}, true},
		{"listed", listState{ready: true, last: at}, on, at.Add(7 * time.Second), true},
		{"listed on the grid", listState{ready: true, last: at.Add(7 * time.Second)}, on, at.Add(37 * time.Second), true},
		{"listed after it", listState{ready: true, last: at.Add(8 * time.Second)}, on, at.Add(37 * time.Second), true},
		{"listed at the start", listState{ready: true, last: origin}, on, origin.Add(7 * time.Second), true},
		{"failed", listState{ready: true, last: at, failed: true}, on, at.Add(5 * time.Second), true},
	} {
		if got, ok := nextList(c.s, c.cfg, origin, phase); ok != c.ok || !got.Equal(c.want) {
			t.Errorf("%s: %s, %v", c.name, got, ok)
		}
	}
}

func target(t testing.TB, addr string) pool.Target {
	t.Helper()
	out, problems := pool.ParseTarget(addr, nil, "")
	if problems != nil {
		t.Fatal(problems)
	}
	out.MetricPort = out.Addr.Port()
	return out
}

func TestMerge(t *testing.T) {
	a, b, b2, c := target(t, "10.0.0.1"), target(t, "10.0.0.2"), target(t, "10.0.0.2"), target(t, "10.0.0.3")
	b2.Pod = "other"
	sets := map[string]sourceSet{
		"static": {targets: []pool.Target{a, b}, delivered: true},
		"file":   {targets: []pool.Target{b2, c}, state: LastGood, delivered: true},
		"late":   {targets: []pool.Target{c}, state: LastGood},
	}
	for _, x := range []struct {
		sources         []string
		want            []pool.Target
		complete, fresh bool
	}{
		{nil, nil, true, true},
		{[]string{"static"}, []pool.Target{a, b}, true, true},
		{[]string{"static", "file"}, []pool.Target{a, b, c}, true, false},
		{[]string{"file", "static"}, []pool.Target{b2, c, a}, true, false},
		{[]string{"static", "missing"}, []pool.Target{a, b}, false, true},
		{[]string{"late"}, []pool.Target{c}, false, false},
	} {
		got, complete, fresh := merge(x.sources, sets)
		if !slices.Equal(got, x.want) || complete != x.complete || fresh != x.fresh {
			t.Errorf("%v: %v, complete %v, fresh %v", x.sources, got, complete, fresh)
		}
	}
}

func TestServed(t *testing.T) {
	c := Config{Known: []KnownModel{{Name: "m", Adapters: []string{"lora", "lora2"}}, {Name: "other", Adapters: []string{"x"}}}}
	for _, x := range []struct {
		label string
		lists [][]string
		want  []string
	}{
		{"", nil, nil},
		{"m", nil, []string{"lora", "lora2"}},
		{"a", [][]string{{"a", "m"}}, []string{"lora", "lora2", "m"}},
		{"a", [][]string{{"c", "b"}, {"b", ""}}, []string{"b", "c"}},
	} {
		if got := c.served(x.label, x.lists...); !slices.Equal(got, x.want) {
			t.Errorf("%q, %q: %q", x.label, x.lists, got)
		}
	}
	if got := c.knownNames(); !slices.Equal(got, []string{"m", "lora", "lora2", "other", "x"}) {
		t.Errorf("known %q", got)
	}
}
