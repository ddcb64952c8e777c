package pool

import (
	"math"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	// bytesPerToken is what a token of text is taken for before usage has said
	// more.
	bytesPerToken = 4
	// ratioWeight is that of one request in a model's average.
	ratioWeight = 0.05
	// ratioLeast is the least text that says something: a chat template adds
	// tokens of its own to each prompt.
	ratioLeast = 256
	// maxRatios bounds the models that are told apart.
	maxRatios = 1024
	// A measured ratio outside these is no ratio of this text: images count as
	// tokens, and an engine may report what it cut off.
	ratioMin, ratioMax = 0.5, 16
)

// Tokenizers estimates how many tokens a text has: a quarter of its bytes,
// corrected per model by what usage reports. The zero value is ready; all
// methods are safe for concurrent use and no reader waits.
type Tokenizers struct {
	byModel atomic.Pointer[map[string]*Tokenizer]
	mu      sync.Mutex // of writers that add a model
}

// Tokenizer is one model's estimate.
type Tokenizer struct{ ratio atomic.Uint64 } // float64, bytes per token; 0 before the first measurement

// For returns a model's tokenizer, nil while nothing is known of it; the nil one
// estimates all the same.
func (t *Tokenizers) For(model string) *Tokenizer {
	if m := t.byModel.Load(); m != nil {
		return (*m)[model]
	}
	return nil
}

// Estimate is the number of tokens of that many bytes of text.
func (t *Tokenizer) Estimate(bytes int64) int64 {
	return int64(math.Ceil(float64(max(0, bytes)) / t.BytesPerToken()))
}

// BytesPerToken is the estimate's ratio.
func (t *Tokenizer) BytesPerToken() float64 {
	if t != nil {
		if bits := t.ratio.Load(); bits != 0 {
			return math.Float64frombits(bits)
		}
	}
	return bytesPerToken
}

// Learn takes in that a prompt of the model with that many bytes of text had
// that many tokens.
func (t *Tokenizers) Learn(model string, bytes, tokens int64) {
	if bytes < ratioLeast || tokens <= 0 {
		return
	}
	ratio := float64(bytes) / float64(tokens)
	if ratio < ratioMin || ratio > ratioMax {
		return
	}
	one := t.For(model)
	if one == nil {
		if one = t.add(model); one == nil {
			return
		}
		one.ratio.CompareAndSwap(0, math.Float64bits(bytesPerToken))
	}
	average(&one.ratio, ratio, ratioWeight)
}

// add makes a model's tokenizer, nil where there are too many.
func (t *Tokenizers) add(model string) *Tokenizer {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := make(map[string]*Tokenizer)
	if old := t.byModel.Load(); old != nil {
		if one := (*old)[model]; one != nil {
			return one
		}
		if len(*old) >= maxRatios {
			return nil
		}
		for m, one := range *old {
			next[m] = one
		}
	}
	one := new(Tokenizer)
	next[strings.Clone(model)] = one
	t.byModel.Store(&next)
	return one
}
