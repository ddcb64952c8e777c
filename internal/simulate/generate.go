package simulate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// builtin is a workload that is made of a seed. Rates are requests per second and
// endpoint at speed 1.
type builtin struct {
	name, about string
	rate        float64
	make        func(g *generator)
	fleet       func(w *Workload, endpoints int, end time.Duration)
}

// builtins are sized for the default engine: at speed 1 it is busy for about a
// third of the time if nothing is cached.
var builtins = []builtin{
	{name: "shared-prefix", about: "system prompts of 1k to 8k tokens, four per endpoint, popular and rare ones; short questions", rate: 3, make: (*generator).sharedPrefix},
	{name: "multi-turn", about: "conversations of about six turns that grow, on a few system prompts", rate: 3, make: func(g *generator) { g.conversations(chat) }},
	{name: "agents", about: "coding agents: 8k tokens of tools, some twenty calls that grow to 50k tokens and more, short answers", rate: 2, make: func(g *generator) { g.conversations(agent) }},
	{name: "bursts", about: "prompts with nothing in common; each fifteen seconds a second of ten times the rate", rate: 3, make: (*generator).bursts},
	{name: "long-context", about: "short prompts, and documents of 16k to 64k tokens, each asked about a few times", rate: 1.5, make: (*generator).longContext},
	{name: "uneven", about: "multi-turn, every other endpoint at half the speed", rate: 2, make: func(g *generator) { g.conversations(chat) },
		fleet: func(w *Workload, endpoints int, _ time.Duration) {
			for i := range endpoints {
				w.Slowdowns = append(w.Slowdowns, 1+float64(i%2))
			}
		}},
	{name: "slow-pod", about: "multi-turn, one endpoint at a third of the speed from a fifth of the time on", rate: 2.5, make: func(g *generator) { g.conversations(chat) },
		fleet: func(w *Workload, _ int, end time.Duration) {
			w.Changes = []Change{{At: end / 5, Kind: Slow, Endpoint: 0, Factor: 3}}
		}},
	{name: "pod-loss", about: "multi-turn, one endpoint lost at a third of the time, another in its place at two thirds", rate: 2.5, make: func(g *generator) { g.conversations(chat) },
		fleet: func(w *Workload, _ int, end time.Duration) {
			w.Changes = []Change{{At: end / 3, Kind: Lose, Endpoint: 0}, {At: 2 * end / 3, Kind: Join}}
		}},
	{name: "scale-up", about: "multi-turn under pressure, a quarter more endpoints at half of the time", rate: 4, make: func(g *generator) { g.conversations(chat) },
		fleet: func(w *Workload, endpoints int, end time.Duration) {
			for range max(1, endpoints/4) {
				w.Changes = append(w.Changes, Change{At: end / 2, Kind: Join})
			}
		}},
	{name: "steady", about: "prompts with nothing in common at a steady rate: for bands, where only the load shall differ", rate: 4, make: (*generator).steady},
}

// Builtins are the names of the workloads that Generate makes.
func Builtins() []string {
	names := make([]string, len(builtins))
	for i := range builtins {
		names[i] = builtins[i].name
	}
	return names
}

// AboutBuiltin says in a line what a built-in workload is.
func AboutBuiltin(name string) string {
	for i := range builtins {
		if builtins[i].name == name {
			return builtins[i].about
		}
	}
	return ""
}

// Generate makes a built-in workload of that many requests for that many
// endpoints. The same arguments give the same workload.
func Generate(name string, endpoints, requests int, seed uint64) (*Workload, error) {
	at := slices.IndexFunc(builtins, func(b builtin) bool { return b.name == name })
	if at < 0 {
		return nil, fmt.Errorf("unknown workload %q, valid: %s", name, strings.Join(Builtins(), ", "))
	}
	if endpoints < 1 || requests < 1 {
		return nil, fmt.Errorf("%d endpoints and %d requests: at least one of each is wanted", endpoints, requests)
	}
	b := &builtins[at]
	g := &generator{
		rng: rand.New(rand.NewPCG(seed, uint64(at)+1)), rate: b.rate * float64(endpoints), endpoints: endpoints, n: requests,
		salt: mix(seed ^ uint64(at)<<32),
	}
	b.make(g)
	sortRequests(g.out)
	g.out = g.out[:min(len(g.out), requests)]
	w := &Workload{Name: name, Requests: g.out}
	if b.fleet != nil {
		b.fleet(w, endpoints, g.out[len(g.out)-1].At)
	}
	return w, nil
}

type generator struct {
	rng       *rand.Rand
	rate      float64 // requests per second
	endpoints int
	n         int
	salt      uint64
	ids       uint64
	out       []Request
}

// id returns a content that no other has.
func (g *generator) id() uint64 {
	g.ids++
	return mix(g.salt ^ g.ids)
}

// lognormal draws tokens with that median; two thirds are within a factor of
// exp(sigma).
func (g *generator) lognormal(median, sigma, least, most float64) int {
	return int(min(most, max(least, median*math.Exp(sigma*g.rng.NormFloat64()))))
}

func (g *generator) gap(rate float64) time.Duration {
	return time.Duration(g.rng.ExpFloat64() / rate * float64(time.Second))
}

// zipf draws from n with the weight 1/(rank+1).
func (g *generator) zipf(cumulative []float64) int {
	x := g.rng.Float64() * cumulative[len(cumulative)-1]
	at, _ := slices.BinarySearch(cumulative, x)
	return min(at, len(cumulative)-1)
}

func harmonic(n int) []float64 {
	out := make([]float64, n)
	sum := 0.0
	for i := range out {
		sum += 1 / float64(i+1)
		out[i] = sum
	}
	return out
}

// blocks are those of a prompt that begins with a shared part.
func (g *generator) blocks(shared uint64, sharedTokens int, own uint64, tokens int) []uint64 {
	n := tokens / BlockTokens
	k := min(n, sharedTokens/BlockTokens)
	b := make([]uint64, 0, n)
	b = chain(b, shared, k)
	return chain(b, own, n-k)
}

func (g *generator) sharedPrefix() {
	groups := 4 * g.endpoints
	popular := harmonic(groups)
	ids, sizes := make([]uint64, groups), make([]int, groups)
	for i := range groups {
		ids[i], sizes[i] = g.id(), g.lognormal(3000, 0.6, 1000, 8000)
	}
	at := time.Duration(0)
	for range g.n {
		at += g.gap(g.rate)
		k := g.zipf(popular)
		prompt := sizes[k] + g.lognormal(300, 0.9, 20, 4000)
		g.out = append(g.out, Request{
			At: at, Prompt: prompt, Output: g.lognormal(150, 0.8, 1, 1500),
			Blocks: g.blocks(ids[k], sizes[k], g.id(), prompt),
		})
	}
}

func (g *generator) bursts() {
	const period, burst, times = 15.0, 1.0, 10.0
	base := g.rate * period / (period - burst + burst*times)
	at := time.Duration(0)
	for range g.n {
		// Thinning (Lewis and Shedler 1979).
		for {
			at += g.gap(base * times)
			rate := base
			if math.Mod(at.Seconds(), period) >= period-burst {
				rate *= times
			}
			if g.rng.Float64()*base*times < rate {
				break
			}
		}
		prompt := g.lognormal(2500, 0.8, 50, 20_000)
		g.out = append(g.out, Request{
			At: at, Prompt: prompt, Output: g.lognormal(150, 0.8, 1, 1500), Blocks: g.blocks(0, 0, g.id(), prompt),
		})
	}
}

func (g *generator) steady() {
	at := time.Duration(0)
	for range g.n {
		at += g.gap(g.rate)
		prompt := g.lognormal(2900, 0.8, 50, 30_000)
		g.out = append(g.out, Request{
			At: at, Prompt: prompt, Output: g.lognormal(110, 0.8, 1, 1500), Blocks: g.blocks(0, 0, g.id(), prompt),
		})
	}
}

func (g *generator) longContext() {
	at := time.Duration(0)
	for len(g.out) < g.n+g.n/8 {
		at += g.gap(g.rate / 1.3)
		if g.rng.Float64() > 0.15 {
			prompt := g.lognormal(800, 0.8, 50, 8000)
			g.out = append(g.out, Request{
				At: at, Prompt: prompt, Output: g.lognormal(200, 0.8, 1, 1500), Blocks: g.blocks(0, 0, g.id(), prompt),
			})
			continue
		}
		doc, size := g.id(), 16_000+g.rng.IntN(48_000)
		when := at
		for range 1 + g.rng.IntN(5) {
			prompt := size + g.lognormal(100, 0.5, 20, 1000)
			g.out = append(g.out, Request{
				At: when, Prompt: prompt, Output: g.lognormal(200, 0.6, 1, 1500), Blocks: g.blocks(doc, size, g.id(), prompt), Session: doc,
			})
			when += 2*time.Second + g.gap(0.1)
		}
	}
}

// talk is a kind of conversation.
type talk struct {
	systems, system int     // how many system prompts, and their tokens
	turns           float64 // mean
	first, more     float64 // median tokens of the first message and of each further one
	output          float64 // median
	pause           time.Duration
	most            int // tokens at which it ends
}

var (
	chat  = talk{systems: 4, system: 1000, turns: 6, first: 1500, more: 400, output: 250, pause: 12 * time.Second, most: 30_000}
	agent = talk{systems: 3, system: 8000, turns: 20, first: 4000, more: 1200, output: 120, pause: 3 * time.Second, most: 100_000}
)

// conversations start at such a rate that the turns come at the generator's.
func (g *generator) conversations(t talk) {
	var systems []uint64
	for range t.systems {
		systems = append(systems, g.id())
	}
	// Conversations that have begun before the start are cut off there, so that the
	// rate is the same all the time.
	span := time.Duration(t.turns * float64(t.pause+5*time.Second))
	starts := g.rate / t.turns
	at := -span
	ends := time.Duration(1.1*float64(g.n)/g.rate*float64(time.Second)) + time.Minute
	for at < ends {
		at += g.gap(starts)
		for _, r := range g.conversation(t, systems, at) {
			if r.At >= 0 && r.At < ends {
				g.out = append(g.out, r)
			}
		}
	}
}

func (g *generator) conversation(t talk, systems []uint64, at time.Duration) []Request {
	own, shared := g.id(), systems[g.rng.IntN(len(systems))]
	prompt := t.system + g.lognormal(t.first, 0.7, 20, 20_000)
	var turns []Request
	for {
		output := g.lognormal(t.output, 0.7, 1, 2000)
		if prompt+output > t.most {
			break
		}
		turns = append(turns, Request{
			At: at, Prompt: prompt, Output: output, Session: own,
			Blocks: g.blocks(shared, t.system, own, prompt+output),
		})
		if g.rng.Float64() < 1/t.turns {
			break
		}
		at += time.Duration(output)*20*time.Millisecond + t.pause/4 + time.Duration(g.rng.ExpFloat64()*0.75*float64(t.pause))
		prompt += output + g.lognormal(t.more, 0.8, 10, 10_000)
	}
	return turns
}
