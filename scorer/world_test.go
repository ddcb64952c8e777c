package scorer

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// endpointSpec describes one endpoint of a test's world, for the fast
// implementation and for the dumb one.
type endpointSpec struct {
	name       string
	inFlight   int
	prefill    int     // tokens sent and not answered
	tokens     int     // of the requests in flight
	cost       float64 // normalised load
	outputRate float64
	readRate   float64
	pace       time.Duration           // from token to token
	metrics    map[pool.Metric]float64 // missing: absent
	age        time.Duration           // of metrics
	avgPrompt  float64                 // query-based; 0: absent
	avgOutput  float64
	loraMax    int
	running    []string // adapters
	waiting    []string
	holds      int // of the request's blocks
	blocks     int // that it holds beside
	kvTokens   int
	hardware   string
	wedged     bool
	pushedBack bool
	doubted    bool
	ready      time.Duration // for how long; 0: for ever
}

type requestSpec struct {
	prompt, output int
	blocks         int // of the prompt; each blockTokens
	session        uint64
	goals          Goals
}

const blockTokens = 64

type worldSpec struct {
	endpoints []endpointSpec
	request   requestSpec
	profiles  []Profile
	guards    Guards
	admission Admission
}

const testModel = "m"

// blocksOf are the blocks of the tests' one prompt.
func blocksOf(n int) []uint64 {
	blocks := make([]uint64, n)
	for i := range blocks {
		blocks[i] = mix(uint64(i) + 77)
	}
	return blocks
}

func addrOf(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 8000)
}

// build makes the world.
func (ws *worldSpec) build(tb testing.TB) *Input {
	tb.Helper()
	in := pool.Input{Now: now, StaleAfter: 5 * time.Second}
	queried := pool.NewQueried()
	queried.Answered(pool.AvgPromptToksPerReq, now.Add(time.Minute))
	queried.Answered(pool.AvgGenerationToksPerReq, now.Add(time.Minute))
	index := NewIndex()
	blocks := blocksOf(ws.request.blocks)
	for i := range ws.endpoints {
		spec := &ws.endpoints[i]
		addr := addrOf(i)
		e := pool.Endpoint{
			Target: pool.Target{Addr: addr, Model: testModel, MetricPort: 8000, Hardware: spec.hardware, Pod: spec.name},
			Live:   &pool.Live{Addr: addr.String(), Slot: i + 1}, Ready: true,
		}
		if spec.ready > 0 {
			e.ReadySince = now.Add(-spec.ready)
		}
		spec.load(tb, e.Live)
		in.Endpoints = append(in.Endpoints, e)
		var m *pool.Metrics
		if spec.metrics != nil || spec.loraMax > 0 || spec.kvTokens > 0 {
			m = &pool.Metrics{Taken: now.Add(-spec.age), BlockSize: 1, NumBlocks: spec.kvTokens}
			m.LoRA = pool.LoRA{Max: spec.loraMax, Running: spec.running, Waiting: spec.waiting}
			for name, v := range spec.metrics {
				m.Set(name, v)
			}
		}
		in.Metrics = append(in.Metrics, m)
		if spec.avgPrompt > 0 {
			queried.Add(pool.AvgPromptToksPerReq, addr.String(), testModel, spec.avgPrompt)
		}
		if spec.avgOutput > 0 {
			queried.Add(pool.AvgGenerationToksPerReq, addr.String(), testModel, spec.avgOutput)
		}
	}
	holder := pool.NewHolder()
	holder.SetQueried(queried)
	s := pool.NewSnapshot(in)
	holder.Publish(s)
	index.Sync(s, Limits{Total: 1 << 30})
	for i := range ws.endpoints {
		spec := &ws.endpoints[i]
		if spec.blocks > 0 {
			other := make([]uint64, spec.blocks)
			for j := range other {
				other[j] = mix(uint64(i+1)<<32 + uint64(j))
			}
			index.Add(s.Live(int32(i)), other)
		}
		index.Add(s.Live(int32(i)), blocks[:min(spec.holds, len(blocks))])
	}
	return &Input{
		Snapshot: s, Candidates: s.ForModel(testModel).Index, Now: now, Index: index, Guards: ws.guards,
		Costs: NewCosts(ws.profiles), Admission: ws.admission,
		Request: Request{
			Model: testModel, Prompt: int64(ws.request.prompt), Output: int64(ws.request.output),
			Blocks: blocks, BlockTokens: blockTokens, Session: ws.request.session, Goals: ws.request.goals,
		},
	}
}

// load puts the spec's load on an endpoint, by the calls that requests make.
func (spec *endpointSpec) load(tb testing.TB, l *pool.Live) {
	tb.Helper()
	const back = 10 * time.Second
	if spec.outputRate > 0 {
		r := l.Reserve(pool.Load{}, now.Add(-2*back))
		r.Progress(int64(spec.outputRate*back.Seconds()), now.Add(-back))
		r.Release(now.Add(-back), true)
	}
	if spec.readRate > 0 {
		tokens := int64(spec.readRate * back.Seconds())
		r := l.Reserve(pool.Load{Prompt: tokens, Uncached: tokens}, now.Add(-2*back))
		r.FirstToken(now.Add(-back))
		r.Release(now.Add(-back), true)
	}
	if spec.pace > 0 {
		const tokens = 16
		var elsewhere pool.Live
		r := elsewhere.Reserve(pool.Load{Talks: true}, now.Add(-back))
		r.Move(l, now.Add(-back)) // it says nothing of first tokens here
		r.FirstToken(now.Add(-back))
		r.Progress(1, now.Add(-back))
		end := now.Add(-back + tokens*spec.pace)
		r.Progress(1+tokens, end)
		r.Progress(0, end) // and nothing of the output rate
		r.Release(end, false)
	}
	at := now
	if spec.wedged {
		at = now.Add(-time.Hour)
	}
	for i := range spec.inFlight {
		load := pool.Load{Talks: true}
		if i == 0 {
			load = pool.Load{Prompt: int64(spec.tokens), Uncached: int64(spec.prefill), Cost: spec.cost, Talks: true}
		}
		l.Reserve(load, at)
	}
	if spec.pushedBack {
		l.Pushback(now)
	}
	if spec.doubted {
		l.Doubt(now)
	}
	if spec.inFlight == 0 && (spec.prefill != 0 || spec.tokens != 0 || spec.cost != 0) {
		tb.Fatalf("%s has load and nothing in flight", spec.name)
	}
	if l.InFlight() != int64(spec.inFlight) || l.Prefill() != int64(spec.prefill) || l.Tokens() != int64(spec.tokens) ||
		math.Abs(l.Cost()-spec.cost) > 1e-6 || math.Abs(l.OutputRate()-spec.outputRate) > 1 || spec.readRate*back.Seconds() >= 512 && math.Abs(l.PrefillRate()-spec.readRate) > 1 {
		tb.Fatalf("%s: the world is not as described: %s", spec.name, fmt.Sprint(l.InFlight(), l.Prefill(), l.Tokens(), l.Cost(), l.OutputRate(), l.PrefillRate()))
	}
}
