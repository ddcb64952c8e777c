package filter

import (
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cespare/xxhash/v2"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/scorer"
)

// bodyReader reads one request's body after another: what it says, and where
// the policy asks for them the hashes of its prompt. It keeps no text.
type bodyReader struct {
	scan    openai.Scan
	hasher  scorer.Hasher
	salt    xxhash.Digest
	session xxhash.Digest
	hashing bool // and not only asked for the session
	salted  bool
	keyed   bool
}

// readers are reused: one is only in use during one call.
var readers = sync.Pool{New: func() any { return new(bodyReader) }}

// reset begins a request's body.
func (b *bodyReader) reset(r *Request, options openai.Options) {
	if b.hashing = r.policy.NeedsPrefix(); b.hashing || r.policy.NeedsSession() {
		b.hasher.Reset(int(r.pool.blockBytes.Load()))
		b.salt.Reset()
		b.session.Reset()
		b.salted, b.keyed = false, false
		options.Sink = b
	}
	b.scan.Reset(r.rules.Rules, options)
}

// Text implements openai.Sink.
func (b *bodyReader) Text(lane openai.Lane, p []byte) {
	switch lane {
	case openai.LanePrompt:
		if b.hashing {
			b.hasher.Prompt(p)
		}
	case openai.LanePreamble:
		if b.hashing {
			b.hasher.Preamble(p)
		}
	case openai.LaneSalt:
		_, _ = b.salt.Write(p)
		b.salted = true
	case openai.LaneSession:
		_, _ = b.session.Write(p)
		b.keyed = b.keyed || len(p) > 0
	}
}

// prefixState is what a request keeps for policies on prefixes and sessions.
type prefixState struct {
	blocks      []uint64 // of the prompt, the reader's or the request's own
	blockTokens float64
	session     uint64 // who is asking, 0 if it does not say
}

// prefix takes what the reader knows of the prompt. The blocks are the
// reader's: keepPrefix makes them the request's own.
func (r *Request) prefix(b *bodyReader) {
	if r.policy.NeedsPrefix() {
		salt := uint64(0)
		if b.salted {
			salt = b.salt.Sum64()
		}
		r.blocks = b.hasher.Blocks(r.model, salt)
		r.blockTokens = float64(b.hasher.BlockBytes()) / r.pool.tokens.For(r.model).BytesPerToken()
	}
	if r.session == 0 && r.policy.NeedsSession() && b.keyed {
		r.session = sessionHash(b.session.Sum64())
	}
}

// keepPrefix lets go of the reader: a request that waits takes its blocks along.
func (r *Request) keepPrefix(waits bool) {
	if !waits {
		r.blocks = nil
		return
	}
	r.blocks = append([]uint64(nil), r.blocks...)
}

// sessionOf reads who is asking from the headers, 0 if they do not say.
func sessionOf(h *Head, cookie string) uint64 {
	for _, value := range []string{h.SessionID, h.SessionAffinity} {
		if value != "" {
			return sessionHash(xxhash.Sum64String(value))
		}
	}
	if cookie != "" {
		for pair := range strings.SplitSeq(h.Cookie, ";") {
			if name, value, ok := strings.Cut(strings.TrimSpace(pair), "="); ok && name == cookie && value != "" {
				return sessionHash(xxhash.Sum64String(value))
			}
		}
	}
	return 0
}

// sessionHash keeps 0 for requests without a session.
func sessionHash(h uint64) uint64 {
	if h == 0 {
		return 1
	}
	return h
}

// prefixes is what a pool knows of its endpoints' prefix caches.
type prefixes struct {
	index      *scorer.Index
	pins       *scorer.Pins
	blockBytes atomic.Int64
	limits     atomic.Pointer[prefixLimits]
}

type prefixLimits struct {
	blockBytes int // 0: as the engines say
	perStore   int // 0: as the engines say
	total      int
}

// indexBytes bounds the index where no memory limit is known.
const indexBytes = 256 << 20

// limitsOf are the newest configuration's.
func limitsOf(cfg *config.Config, cgroup int64) *prefixLimits {
	room := int64(indexBytes)
	if limit := cfg.Runtime.MemoryLimitIn(cgroup); limit > 0 {
		room = limit / 4
	}
	return &prefixLimits{
		blockBytes: int(cfg.PrefixCache.BlockSize), perStore: cfg.PrefixCache.BlocksPerEndpoint,
		total: int(room / scorer.BytesPerBlock),
	}
}

// follow makes the index that of a new snapshot.
func (p *prefixes) follow(s *pool.Snapshot) {
	l := p.limits.Load()
	if l == nil {
		return
	}
	block := l.blockBytes
	if block == 0 {
		block = max(scorer.MinBlockBytes, 4*s.BlockSize())
	}
	p.blockBytes.Store(int64(block))
	p.index.Sync(s, scorer.Limits{PerEndpoint: l.perStore, Total: l.total, BlockTokens: float64(block) / 4})
}
