package pool

import (
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
	"unsafe"
)

func TestLiveUnderContention(t *testing.T) {
	const workers, rounds = 8, 2000
	var l Live
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			for range rounds {
				load := Load{Prompt: rng.Int64N(100), Uncached: rng.Int64N(50), Cost: rng.Float64(), Talks: rng.IntN(2) == 0}
				var r Reservation
				if w%2 == 0 {
					for ok := false; !ok; {
						r, ok = l.TryReserve(l.InFlight(), load, start)
					}
				} else {
					r = l.Reserve(load, start)
				}
				if n := l.InFlight(); n < 1 || n > workers {
					t.Errorf("%d in flight", n)
				}
				for range rng.IntN(4) {
					switch rng.IntN(3) {
					case 0:
						r.FirstToken(start)
					case 1:
						r.Progress(rng.Int64N(30)-5, start)
					case 2:
						if l.Prefill() < 0 || l.Tokens() < 0 || l.Cost() < 0 {
							t.Error("negative")
						}
					}
				}
				r.Release(start, true)
				r.Release(start, true)
				r.Progress(7, start)
				r.FirstToken(start)
			}
		})
	}
	wg.Wait()
	if l.InFlight() != 0 || l.Picks() != workers*rounds || l.Tokens() != 0 || l.Prefill() != 0 || l.Cost() != 0 || l.talking.Load() != 0 {
		t.Errorf("%d in flight, %d picks, %d tokens, %d to read, cost %v, %d talking",
			l.InFlight(), l.Picks(), l.Tokens(), l.Prefill(), l.Cost(), l.talking.Load())
	}
}

func TestTryReserveOfAnOldCount(t *testing.T) {
	var l Live
	l.Reserve(Load{}, start)
	if _, ok := l.TryReserve(0, Load{}, start); ok || l.Picks() != 1 {
		t.Error("reserved what another took")
	}
	if _, ok := l.TryReserve(1, Load{}, start); !ok || l.InFlight() != 2 {
		t.Error("not reserved")
	}
}

func TestReservation(t *testing.T) {
	var a, b Live
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	want := func(what string, l *Live, inFlight, tokens, prefill int64, cost float64) {
		t.Helper()
		if l.InFlight() != inFlight || l.Tokens() != tokens || l.Prefill() != prefill || math.Abs(l.Cost()-cost) > 1e-6 {
			t.Errorf("%s: %d in flight, %d tokens, %d to read, cost %v", what, l.InFlight(), l.Tokens(), l.Prefill(), l.Cost())
		}
	}
	r := a.Reserve(Load{Prompt: 1000, Uncached: 600, Cost: 0.25}, at(0))
	other := a.Reserve(Load{Prompt: 10, Uncached: 10}, at(0))
	want("reserved", &a, 2, 1010, 610, 0.25)
	r.FirstToken(at(100))
	r.FirstToken(at(200))
	want("first token", &a, 2, 1010, 10, 0.25)
	if got := a.PrefillRate(); math.Abs(got-6000) > 1e-6 {
		t.Errorf("prefill rate %v", got)
	}
	r.Progress(20, at(300))
	r.Progress(15, at(300))
	want("progress", &a, 2, 1025, 10, 0.25)
	r.Move(&b, at(400))
	want("moved from", &a, 1, 10, 10, 0)
	want("moved to", &b, 1, 1000, 1000, 0.25)
	r.Move(&b, at(400))
	r.Release(at(500), true)
	r.Move(&a, at(500))
	want("released", &b, 0, 0, 0, 0)
	other.Release(at(500), false)
	want("released too", &a, 0, 0, 0, 0)
}

// TestOutputRate follows the rate over windows worked out by hand: time constant
// 10 s, weight 1-e^(-span/10s), idle time not counted.
func TestOutputRate(t *testing.T) {
	var l Live
	near := func(what string, want float64) {
		t.Helper()
		if got := l.OutputRate(); math.Abs(got-want) > 0.01 {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	r := l.Reserve(Load{}, at(0))
	r.Progress(50, at(0.5))
	near("within a window", 0)
	r.Progress(100, at(1))
	near("the first window counts whole", 100)
	r.Progress(300, at(2)) // 200/s for 1 s
	near("the second", 100+(1-math.Exp(-0.1))*100)
	before := l.OutputRate()
	r.Progress(300, at(9)) // nothing came: the estimate stays, the window goes on
	near("no tokens", before)
	r.Progress(1700, at(12)) // 1400 in 10 s
	near("a long window", before+(1-math.Exp(-1))*(140-before))
	before = l.OutputRate()
	r.Release(at(12.5), true)
	near("idle without tokens", before)
	r = l.Reserve(Load{}, at(100)) // idle in between
	r.Progress(40, at(100.4))
	r.Release(at(100.5), true)
	near("a short one", before+(1-math.Exp(-0.05))*(80-before))
}

func TestWedged(t *testing.T) {
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	var l Live
	if l.Wedged(Stamp(at(100))) {
		t.Error("nothing in flight")
	}
	r := l.Reserve(Load{Prompt: 1000, Uncached: 1000, Talks: true}, at(0))
	for _, c := range []struct {
		at   float64
		want bool
	}{{3, false}, {5, false}, {5.001, true}} { // 3 s and 2 ms a token
		if got := l.Wedged(Stamp(at(c.at))); got != c.want {
			t.Errorf("at %v s: %v", c.at, got)
		}
	}
	r.FirstToken(at(6))
	if l.Wedged(Stamp(at(9))) || !l.Wedged(Stamp(at(9.001))) {
		t.Error("bound after the first token")
	}
	r.Progress(1, at(10))
	if l.Wedged(Stamp(at(13))) || !l.Wedged(Stamp(at(13.5))) {
		t.Error("bound after a token")
	}
	silent := l.Reserve(Load{}, at(13.5))
	if !l.Wedged(Stamp(at(13.5))) {
		t.Error("a new request is no sign of life")
	}
	r.Release(at(14), false)
	if l.Wedged(Stamp(at(100))) || !l.Wedged(Stamp(at(400))) {
		t.Error("without streams the bound is minutes")
	}
	silent.Release(at(400), true)
	if l.Wedged(Stamp(at(1000))) {
		t.Error("nothing in flight any more")
	}
}

var escape []*Live // so that they are on the heap

// TestPrefillRateIsOfAllTokens: small prompts, which wait for the running batch, do
// not drown what large ones say.
func TestPrefillRateIsOfAllTokens(t *testing.T) {
	var l Live
	now := start
	for i := range 2000 {
		tokens, took := int64(600), 60*time.Millisecond // 10,000 per second
		if i%10 == 0 {
			tokens, took = 20_000, 500*time.Millisecond // 40,000 per second
		}
		r := l.Reserve(Load{Prompt: tokens, Uncached: tokens}, now)
		now = now.Add(took)
		r.FirstToken(now)
		r.Release(now, true)
	}
	// 9 of 600 tokens weigh 0.66 of one of 8,192 and more: (0.66 + 1)/(0.66/10,000 + 1/40,000).
	if got := l.PrefillRate(); math.Abs(got-18_240) > 600 {
		t.Errorf("prefill rate %v", got)
	}
	var none Live
	r := none.Reserve(Load{Prompt: prefillLeast - 1, Uncached: prefillLeast - 1}, now)
	r.FirstToken(now.Add(time.Second))
	if got := none.PrefillRate(); got != 0 {
		t.Errorf("prefill rate %v of next to nothing", got)
	}
}

func TestLivesShareNoCacheLine(t *testing.T) {
	const line = 64
	var l Live
	if size := unsafe.Sizeof(l); size != 5*line {
		t.Errorf("a Live has %d bytes", size)
	}
	if off := unsafe.Offsetof(l.inFlight); off%line != 0 || unsafe.Offsetof(l.prefillRate) != off+line-8 {
		t.Errorf("what a pick reads starts at %d and ends at %d", off, unsafe.Offsetof(l.prefillRate)+8)
	}
	if off := unsafe.Offsetof(l.learned); off%line != 0 || unsafe.Offsetof(l.learned.mu) != line {
		t.Errorf("what a prediction reads starts at %d and ends at %d", off, off+unsafe.Offsetof(l.learned.mu))
	}
	for range 8 {
		escape = append(escape, new(Live))
	}
	for _, one := range escape {
		if at := uintptr(unsafe.Pointer(one)); at%line != 0 {
			t.Errorf("a Live is at %#x", at)
		}
	}
}

func TestTokenizers(t *testing.T) {
	var ts Tokenizers
	if ts.For("m") != nil || ts.For("m").Estimate(401) != 101 || ts.For("m").Estimate(-1) != 0 {
		t.Error("before anything is known")
	}
	for range 200 {
		ts.Learn("m", 3000, 1000)
	}
	ts.Learn("m", 100, 1)     // too short
	ts.Learn("m", 100000, 1)  // no ratio of text
	ts.Learn("m", 1000, 5000) // images
	ts.Learn("m", 1000, 0)
	if got := ts.For("m").BytesPerToken(); math.Abs(got-3) > 0.01 {
		t.Errorf("learned %v bytes per token", got)
	}
	if ts.For("other") != nil {
		t.Error("another model")
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range maxRatios {
				ts.Learn(string(rune('A'+w))+string(rune(0x4e00+i)), 1000, 250)
			}
		})
	}
	wg.Wait()
	if n := len(*ts.byModel.Load()); n != maxRatios {
		t.Errorf("%d models are told apart", n)
	}
}

func TestHolder(t *testing.T) {
	h := NewHolder()
	if s := h.Load(); s == nil || s.Complete || s.ForModel("m") != nil || len(s.All().Index) != 0 {
		t.Fatalf("a new holder has %+v", s)
	}
	s := NewSnapshot(Input{Seq: 7})
	h.Publish(s)
	if h.Load() != s {
		t.Error("not what was published")
	}
}
