// Package sim simulates LLM engines. Model is the engine itself, a state machine without clock, goroutine or lock,
// which a discrete-event simulation can run on virtual time; Server runs one on the real clock behind the OpenAI API,
// an engine's metrics page and a control API that makes it slow, loaded or broken.
package sim

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Params describe the hardware and the scheduler of one engine. Zero fields take the default.
type Params struct {
	MaxRunning    int           `yaml:"max_running" json:"max_running"`       // batch slots (vLLM max_num_seqs); 256
	ChunkTokens   int           `yaml:"chunk_tokens" json:"chunk_tokens"`     // tokens per step (max_num_batched_tokens); 8192
	PrefillRate   float64       `yaml:"prefill_rate" json:"prefill_rate"`     // prompt tokens/s; 10,000
	DecodeRate    float64       `yaml:"decode_rate" json:"decode_rate"`       // tokens/s of a sequence alone; 100
	BatchSlowdown float64       `yaml:"batch_slowdown" json:"batch_slowdown"` // share of a lone step that each further sequence adds; 0.02
	KVSlowdown    float64       `yaml:"kv_slowdown" json:"kv_slowdown"`       // share of a lone step that a full KV cache adds; 0.5
	BlockSize     int           `yaml:"block_size" json:"block_size"`         // tokens per KV block; 16
	Blocks        int           `yaml:"blocks" json:"blocks"`                 // KV blocks; 27,534
	NoPrefixCache bool          `yaml:"no_prefix_cache" json:"no_prefix_cache"`
	MaxLoras      int           `yaml:"max_loras" json:"max_loras"`       // adapters in one batch; 4
	WaitingCost   time.Duration `yaml:"waiting_cost" json:"waiting_cost"` // model time that one pretended waiting request costs each new one; 50 ms
}

func (p *Params) setDefaults() {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	deff := func(v *float64, d float64) {
		if *v == 0 {
			*v = d
		}
	}
	def(&p.MaxRunning, 256)
	def(&p.ChunkTokens, 8192)
	deff(&p.PrefillRate, 10_000)
	deff(&p.DecodeRate, 100)
	deff(&p.BatchSlowdown, 0.02)
	deff(&p.KVSlowdown, 0.5)
	def(&p.BlockSize, 16)
	def(&p.Blocks, 27_534)
	def(&p.MaxLoras, 4)
	if p.WaitingCost == 0 {
		p.WaitingCost = 50 * time.Millisecond
	}
}

func (p *Params) validate() error {
	var errs []error
	for _, f := range []struct {
		name string
		bad  bool
	}{
		{"max_running", p.MaxRunning < 1}, {"chunk_tokens", p.ChunkTokens < 1}, {"block_size", p.BlockSize < 1},
		{"blocks", p.Blocks < 1}, {"max_loras", p.MaxLoras < 1}, {"prefill_rate", !(p.PrefillRate > 0)},
		{"decode_rate", !(p.DecodeRate > 0)}, {"batch_slowdown", !(p.BatchSlowdown >= 0)},
		{"kv_slowdown", !(p.KVSlowdown >= 0)}, {"waiting_cost", p.WaitingCost < 0},
	} {
		if f.bad {
			errs = append(errs, fmt.Errorf("%s: negative or not a number; leave it out for the default", f.name))
		}
	}
	return errors.Join(errs...)
}

// Load is work that an engine pretends to have. It shows in the metrics and it slows real requests: pretended running
// sequences take batch slots and lengthen each step, pretended waiting ones delay each new request by WaitingCost,
// pretended KV use takes blocks away. At least one real sequence always runs.
type Load struct {
	Running         int      `yaml:"running" json:"running"`
	Waiting         int      `yaml:"waiting" json:"waiting"`
	KVUsage         float64  `yaml:"kv_usage" json:"kv_usage"` // 0 to 1, added to the real use
	RunningAdapters []string `yaml:"running_adapters" json:"running_adapters,omitempty"`
	WaitingAdapters []string `yaml:"waiting_adapters" json:"waiting_adapters,omitempty"`
}

// Request is one sequence to generate. PromptTokens and OutputTokens are at least 1.
type Request struct {
	PromptTokens int
	OutputTokens int // how many the model generates
	// Hashes are chained content hashes of the full blocks, prompt first, then output as far as the caller knows it;
	// equal hash means equal tokens up to the end of that block. It is kept, not copied.
	Hashes    []uint64
	Reason    Reason // Stop or Length
	MaxTokens int    // what the client asked for, 0 = nothing; only counted
	N         int    // only counted
	Adapter   string // LoRA adapter or ""
	Data      any    // the caller's own
}

// Seq is a submitted request. Its fields are the model's; read them only from where the model is driven, or after its
// Finished event.
type Seq struct {
	Request
	Arrival    time.Duration
	Started    time.Duration // first admitted to the batch; -1 before
	FirstToken time.Duration // -1 before
	LastToken  time.Duration
	Output     int // tokens generated so far
	Cached     int // prompt tokens that the prefix cache had at the first admission
	Preempted  int

	state      seqState
	notBefore  time.Duration
	computed   int // tokens whose KV is in blocks
	planned    int // tokens of the running step
	published  int // blocks offered to the prefix cache
	blocks     []int32
	prev, next *Seq // waiting list
}

type seqState uint8

const (
	seqWaiting seqState = iota
	seqRunning
	seqDone
)

func (s *Seq) known() int { return s.PromptTokens + s.Output }

// Event is something that happened in the model at model time At.
type Event struct {
	Seq  *Seq
	At   time.Duration
	Kind EventKind
}

// EventKind says what an Event is.
type EventKind uint8

// A sequence gives FirstToken, then one Token for each further one, then Finished together with its last. Tokens come
// only from a model that was asked for them.
const (
	FirstToken EventKind = iota
	Token
	Finished
)

// Model is a believable LLM engine as a state machine: iteration-level batching, a first-come waiting queue, chunked
// prefill, paged KV with a prefix cache, and preemption by recompute, as vLLM V1's scheduler does them. It has no
// clock: time is an argument, and goes forward. The driver calls Advance(now) before it tells what happened at now,
// and again after, and next at Next. Not safe for concurrent use; it starts nothing.
//
// A step that computes p prompt tokens and holds n sequences, pretended ones included, at KV use k takes
// (1 + BatchSlowdown·(n−1) + KVSlowdown·k)/DecodeRate + p/PrefillRate.
type Model struct {
	par    Params
	tokens bool
	kv     *kvCache
	load   Load
	stats  Stats

	first, last *Seq // waiting
	waiting     int
	running     []*Seq        // in order of admission; the last is preempted first
	clock       time.Duration // end of the newest step
	stepEnd     time.Duration
	inStep      bool
	spare       [][]int32 // block slices to reuse
	hits        []int32   // scratch
	slowdown    float64   // 0 is 1

	runningLora, waitingLora map[string]int
	loraChanged              bool
	lora                     []LoraSeries
	loraNow                  int
}

// NewModel returns an idle engine at time 0. tokenEvents asks for an event per token; without it there are only
// first tokens and ends.
func NewModel(p Params, b Bounds, tokenEvents bool) (*Model, error) {
	p.setDefaults()
	if err := p.validate(); err != nil {
		return nil, err
	}
	return &Model{
		par: p, tokens: tokenEvents, kv: newKVCache(p.Blocks), stats: newStats(b), loraNow: -1,
		runningLora: map[string]int{}, waitingLora: map[string]int{},
	}, nil
}

// Params are the parameters in force, defaults filled in.
func (m *Model) Params() Params { return m.par }

// SetLoad replaces the pretended load from the next step on. Values out of range count as the nearest end.
func (m *Model) SetLoad(now time.Duration, l Load) {
	l.Running, l.Waiting, l.KVUsage = max(l.Running, 0), max(l.Waiting, 0), min(max(l.KVUsage, 0), 1)
	m.load = l
	if len(m.lora)+len(l.RunningAdapters)+len(l.WaitingAdapters) > 0 {
		m.loraChanged = true
		m.noteLora(now)
	}
}

// ClearCache empties the prefix cache, as a restart does.
func (m *Model) ClearCache() { m.kv.clear() }

// Running and Waiting are the real sequences in the batch and in the queue.
func (m *Model) Running() int { return len(m.running) }

// Waiting is the length of the queue.
func (m *Model) Waiting() int { return m.waiting }

// Capacity is the longest sequence that fits, in tokens.
func (m *Model) Capacity() int { return m.par.Blocks * m.par.BlockSize }

// KVUsage is the share of blocks in use by sequences, 0 to 1; cached but unused ones are free.
func (m *Model) KVUsage() float64 {
	return 1 - float64(m.kv.free)/float64(m.par.Blocks)
}

// Submit queues a request that arrives at now. It fails for one that could never fit.
func (m *Model) Submit(now time.Duration, r Request) (*Seq, error) {
	if r.PromptTokens < 1 || r.OutputTokens < 1 {
		return nil, fmt.Errorf("prompt of %d and output of %d tokens: both must be at least 1", r.PromptTokens, r.OutputTokens)
	}
	if n := r.PromptTokens + r.OutputTokens; n > m.Capacity() {
		return nil, fmt.Errorf("%d tokens do not fit in %d blocks of %d", n, m.par.Blocks, m.par.BlockSize)
	}
	s := &Seq{
		Request: r, Arrival: now, Started: -1, FirstToken: -1,
		notBefore: now + time.Duration(m.load.Waiting)*m.par.WaitingCost,
	}
	m.enqueue(s, false)
	return s, nil
}

// Abort ends a sequence without an event; one that has ended is left alone.
func (m *Model) Abort(now time.Duration, s *Seq) {
	switch s.state {
	case seqDone:
		return
	case seqWaiting:
		m.dequeue(s)
	case seqRunning:
		m.leaveBatch(slices.Index(m.running, s))
	}
	s.state = seqDone
	m.ended(now, s, Aborted)
	m.noteLora(now)
}

// Next is when Advance has something to do; false while the engine is idle. It may lie in the past.
func (m *Model) Next() (time.Duration, bool) {
	if m.inStep {
		return m.stepEnd, true
	}
	if m.first != nil {
		return max(m.clock, m.first.notBefore), true
	}
	return 0, false
}

// Advance runs the engine to now and appends what happened, in order.
func (m *Model) Advance(now time.Duration, events []Event) []Event {
	for {
		if m.inStep {
			if m.stepEnd > now {
				return events
			}
			events = m.finishStep(events)
		}
		at := m.clock
		if len(m.running) == 0 {
			if m.first == nil {
				return events
			}
			at = max(at, m.first.notBefore)
		}
		if at > now {
			return events
		}
		m.startStep(at)
	}
}

func (m *Model) startStep(at time.Duration) {
	budget, batch, prefill, total := m.par.ChunkTokens, 0, 0, 0
	preempted := false
	for i := 0; i < len(m.running); i++ {
		s := m.running[i]
		n := min(s.known()-s.computed, budget)
		s.planned = 0
		if n == 0 {
			continue
		}
		fits := m.grow(s, s.computed+n)
		for !fits && len(m.running) > i {
			victim := len(m.running) - 1
			m.preempt(victim)
			preempted = true
			if victim == i {
				break
			}
			fits = m.grow(s, s.computed+n)
		}
		if !fits {
			break
		}
		s.planned = n
		budget -= n
		batch++
		total += n
		if s.computed+1 < s.known() || s.Output == 0 {
			prefill += n
		}
	}
	if !preempted {
		for m.first != nil && budget > 0 && m.first.notBefore <= at {
			s := m.first
			n := m.admit(at, s, budget)
			if n == 0 {
				break
			}
			budget -= n
			batch++
			total += n
			prefill += n
		}
	}
	m.noteLora(at)
	usage := min(m.KVUsage()+m.load.KVUsage, 1)
	lone := 1 + m.par.BatchSlowdown*float64(max(batch+m.load.Running-1, 0)) + m.par.KVSlowdown*usage
	sec := lone/m.par.DecodeRate + float64(prefill)/m.par.PrefillRate
	m.stepEnd = at + m.duration(sec)
	m.inStep = true
	m.stats.Steps++
	m.stats.IterationTokens.observe(float64(total))
}

func (m *Model) finishStep(events []Event) []Event {
	at := m.stepEnd
	m.inStep, m.clock = false, at
	keep := m.running[:0]
	for _, s := range m.running {
		if s.planned == 0 {
			keep = append(keep, s)
			continue
		}
		s.computed += s.planned
		s.planned = 0
		if !m.par.NoPrefixCache {
			full := min(s.computed/m.par.BlockSize, len(s.Hashes))
			for ; s.published < full; s.published++ {
				m.kv.publish(s.blocks[s.published], s.Hashes[s.published])
			}
		}
		if s.computed < s.known() {
			keep = append(keep, s)
			continue
		}
		s.Output++
		m.stats.GenerationTokens++
		if s.Output == 1 {
			s.FirstToken = at
			m.stats.TTFT.observe((at - s.Arrival).Seconds())
			events = append(events, Event{Seq: s, At: at, Kind: FirstToken})
		} else {
			m.stats.InterToken.observe((at - s.LastToken).Seconds())
			if m.tokens {
				events = append(events, Event{Seq: s, At: at, Kind: Token})
			}
		}
		s.LastToken = at
		if s.Output < s.OutputTokens {
			keep = append(keep, s)
			continue
		}
		m.free(s)
		s.state = seqDone
		m.countLora(m.runningLora, s, -1)
		m.ended(at, s, s.Reason)
		events = append(events, Event{Seq: s, At: at, Kind: Finished})
	}
	clear(m.running[len(keep):])
	m.running = keep
	m.noteLora(at)
	return events
}

// room is how many blocks may be taken now. Pretended KV use never stops the only sequence.
func (m *Model) room(alone bool) int {
	if alone {
		return m.kv.free
	}
	return m.kv.free - int(m.load.KVUsage*float64(m.par.Blocks))
}

func (m *Model) blocksFor(tokens int) int { return (tokens + m.par.BlockSize - 1) / m.par.BlockSize }

// grow gives a running sequence the blocks for that many tokens, or none.
func (m *Model) grow(s *Seq, tokens int) bool {
	need := m.blocksFor(tokens) - len(s.blocks)
	if need <= 0 {
		return true
	}
	if need > m.room(len(m.running) == 1) {
		return false
	}
	for ; need > 0; need-- {
		s.blocks = append(s.blocks, m.kv.take())
	}
	return true
}

// admit moves the head of the queue into the batch and plans its first chunk; 0 = not now.
func (m *Model) admit(at time.Duration, s *Seq, budget int) int {
	alone := len(m.running) == 0
	if !alone && len(m.running)+m.load.Running >= m.par.MaxRunning {
		return 0
	}
	if s.Adapter != "" && m.runningLora[s.Adapter] == 0 && len(m.runningLora) >= m.par.MaxLoras {
		return 0
	}
	m.hits = m.hits[:0]
	idle := 0
	if !m.par.NoPrefixCache {
		// The last token is always computed: its output is what is sampled.
		m.hits, idle = m.kv.prefix(s.Hashes[:min(len(s.Hashes), (s.known()-1)/m.par.BlockSize)], m.hits)
	}
	cached := len(m.hits) * m.par.BlockSize
	n := min(s.known()-cached, budget)
	need := m.blocksFor(cached+n) - len(m.hits)
	if need+idle > m.room(alone) {
		return 0
	}
	m.dequeue(s)
	if k := len(m.spare); k > 0 {
		s.blocks, m.spare = m.spare[k-1], m.spare[:k-1]
	}
	for _, id := range m.hits {
		m.kv.share(id)
		s.blocks = append(s.blocks, id)
	}
	for ; need > 0; need-- {
		s.blocks = append(s.blocks, m.kv.take())
	}
	s.state, s.computed, s.published, s.planned = seqRunning, cached, len(m.hits), n
	m.running = append(m.running, s)
	m.countLora(m.runningLora, s, 1)
	if s.Started < 0 {
		s.Started = at
		s.Cached = min(cached, s.PromptTokens)
		m.stats.PromptTokens += uint64(s.PromptTokens)
		m.stats.CachedTokens += uint64(s.Cached)
		if !m.par.NoPrefixCache {
			m.stats.PrefixQueries += uint64(s.PromptTokens)
			m.stats.PrefixHits += uint64(s.Cached)
		}
	}
	return n
}

// preempt sends running[i] back to the head of the queue; what it computed is lost, unless the cache still has it.
func (m *Model) preempt(i int) {
	s := m.running[i]
	m.leaveBatch(i)
	s.Preempted++
	m.stats.Preemptions++
	m.enqueue(s, true)
}

func (m *Model) leaveBatch(i int) {
	s := m.running[i]
	m.running = slices.Delete(m.running, i, i+1)
	m.free(s)
	m.countLora(m.runningLora, s, -1)
}

func (m *Model) free(s *Seq) {
	m.kv.release(s.blocks)
	m.spare = append(m.spare, s.blocks[:0])
	s.blocks, s.computed, s.planned, s.published = nil, 0, 0, 0
}

func (m *Model) ended(at time.Duration, s *Seq, why Reason) {
	st := &m.stats
	st.Finished[why]++
	st.RequestPrompt.observe(float64(s.PromptTokens))
	st.RequestGeneration.observe(float64(s.Output))
	st.RequestMaxGen.observe(float64(s.Output))
	st.RequestParamsN.observe(float64(max(s.N, 1)))
	if s.MaxTokens > 0 {
		st.RequestParamsMax.observe(float64(s.MaxTokens))
	}
	st.RequestComputed.observe(float64(s.PromptTokens - s.Cached))
	st.RequestPreempted.observe(float64(s.Preempted))
	st.E2E.observe((at - s.Arrival).Seconds())
	if s.Started >= 0 {
		st.Queue.observe((s.Started - s.Arrival).Seconds())
		st.Inference.observe((at - s.Started).Seconds())
	}
	if s.FirstToken >= 0 {
		st.Prefill.observe((s.FirstToken - s.Started).Seconds())
		st.Decode.observe((s.LastToken - s.FirstToken).Seconds())
		if s.Output > 1 {
			st.PerOutputToken.observe((s.LastToken - s.FirstToken).Seconds() / float64(s.Output-1))
		}
	}
}

func (m *Model) enqueue(s *Seq, front bool) {
	s.state = seqWaiting
	switch {
	case m.first == nil:
		m.first, m.last = s, s
	case front:
		s.next, m.first.prev = m.first, s
		m.first = s
	default:
		s.prev, m.last.next = m.last, s
		m.last = s
	}
	m.waiting++
	m.countLora(m.waitingLora, s, 1)
}

func (m *Model) dequeue(s *Seq) {
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		m.first = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	} else {
		m.last = s.prev
	}
	s.prev, s.next = nil, nil
	m.waiting--
	m.countLora(m.waitingLora, s, -1)
}

// Snapshot is what a metrics page shows, pretended load included. It shares nothing with the model.
type Snapshot struct {
	Running, Waiting int
	KVUsage          float64
	Stats            Stats
	Lora             []LoraSeries // empty until an adapter was used
	Params           Params
}

// Snapshot copies the state.
func (m *Model) Snapshot() Snapshot {
	return Snapshot{
		Running: len(m.running) + m.load.Running,
		Waiting: m.waiting + m.load.Waiting,
		KVUsage: min(m.KVUsage()+m.load.KVUsage, 1),
		Stats:   m.stats.clone(),
		Lora:    slices.Clone(m.lora),
		Params:  m.par,
	}
}
