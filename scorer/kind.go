package scorer

import (
	"math"
	"strings"
)

// kind is one rule by which endpoints are ranked.
type kind uint8

// The kinds, in the order of the documentation.
const (
	kindRandom kind = iota
	kindLeastRequest
	kindSLOLeastLoad
	kindSLOPackLoad
	kindLoadBalance
	kindLeastKVCache
	kindLeastLatency
	kindThroughput
	kindLeastUtilization
	kindLeastBusyTime
	kindPrefixCache
	kindPowerOfTwo
	kindSessionAffinity
	kindLoRAAffinity
	kindQueue
	kindKVCache
	kindRunning
	kindTokenLoad
	kindPrefillCost
	kindExpectedTTFT
	kindLMetric
	kindPreble
	kindPrefixHRW
	kindSLOHeadroom
	numKinds
)

// mode says how the raw values of a kind are compared, and how they become
// scores from 0 to 1.
type mode uint8

const (
	least mode = iota // the smallest wins; as a score, min-max over those that have a value, all equal is 1
	unit              // a score already; the largest wins
)

// needs says what a kind reads of a request.
type needs uint8

const (
	needPrompt  needs = 1 << iota // the size of the prompt
	needPrefix                    // the hashes of its blocks
	needSession                   // who is asking
	needLive                      // what a reservation changes: a pick is redone if another came between
)

// param is a parameter of a kind: a number, or a boolean as 0 or 1.
type param struct {
	name        string
	value       float64 // its default
	least, most float64
	boolean     bool
}

// maxParams bounds the numbers of one kind.
const maxParams = 8

type kindInfo struct {
	name   string
	mode   mode
	needs  needs
	alone  bool // is no part of a list
	params []param
}

// aliases are further names of kinds.
var aliases = map[string]string{"prefix-cache-aware": "prefix-cache"}

const big = 1e12

// kinds describes each kind. The numbers that are AIBrix's or llm-d's are their
// defaults.
var kinds = [numKinds]kindInfo{
	kindRandom:       {name: "random", mode: unit},
	kindLeastRequest: {name: "least-request", needs: needLive},
	kindSLOLeastLoad: {name: "slo-least-load", needs: needLive | needPrompt},
	kindSLOPackLoad:  {name: "slo-pack-load", needs: needLive | needPrompt, alone: true},
	kindLoadBalance: {name: "load-balance", needs: needLive, params: []param{
		{name: "queuedWeight", most: 1e3},
		{name: "kvPressureAlpha", value: 2, most: 1e3},
		{name: "kvCriticalFree", value: 0.1, most: 1},
	}},
	kindLeastKVCache:     {name: "least-kv-cache"},
	kindLeastLatency:     {name: "least-latency"},
	kindThroughput:       {name: "throughput"},
	kindLeastUtilization: {name: "least-utilization"},
	kindLeastBusyTime:    {name: "least-busy-time"},
	kindPrefixCache: {name: "prefix-cache", mode: unit, needs: needPrefix | needLive, params: []param{
		{name: "stddevFactor", value: 1, most: 100},
		{name: "slack", value: 8, most: big},
		{name: "matchLengthWeight", most: 1},
		{name: "scaleTokens", value: 8192, least: 1, most: big},
	}},
	kindPowerOfTwo: {name: "power-of-two", needs: needLive, alone: true},
	kindSessionAffinity: {name: "session-affinity", mode: unit, needs: needSession | needLive, params: []param{
		{name: "slack", value: 8, most: big},
		{name: "factor", value: 2, least: 1, most: 1e3},
		{name: "ttlSeconds", value: 300, most: 1e6},
	}},
	kindLoRAAffinity: {name: "lora-affinity", mode: unit},
	kindQueue:        {name: "queue"},
	kindKVCache:      {name: "kv-cache", mode: unit},
	kindRunning:      {name: "running"},
	kindTokenLoad: {name: "token-load", mode: unit, needs: needPrefix | needPrompt | needLive, params: []param{
		{name: "thresholdTokens", value: 4194304, least: 1, most: big},
	}},
	kindPrefillCost: {name: "prefill-cost", needs: needPrefix | needPrompt | needLive, params: pricedParams},
	kindExpectedTTFT: {name: "expected-ttft", needs: needPrefix | needPrompt | needLive, params: []param{
		{name: "batchTokens", value: 8192, least: 1, most: big},
		{name: "prefillRate", value: 15928, least: 1, most: big},
		{name: "decodeSeconds", value: 0.02, most: 10},
	}},
	kindLMetric: {name: "lmetric", needs: needPrefix | needPrompt | needLive},
	kindPreble: {name: "preble", needs: needPrefix | needPrompt | needLive, params: []param{
		{name: "decodeTokens", value: 45, most: big},
		{name: "hotFactor", value: 2, least: 1, most: 1e3},
	}},
	kindPrefixHRW: {name: "prefix-hrw", needs: needPrefix | needPrompt | needLive | needSession, params: append([]param{
		{name: "homeFactor", value: 0.3, most: 1},
		{name: "awayFactor", value: 4, least: 1, most: 1e6},
		{name: "keyTokens", value: 1024, least: 1, most: big},
		{name: "bySession", value: 1, most: 1, boolean: true},
	}, pricedParams...)},
	kindSLOHeadroom: {name: "slo-headroom", mode: unit, needs: needPrefix | needPrompt | needLive, params: []param{
		{name: "ttftWeight", value: 0.8, most: 1e3},
		{name: "tpotWeight", value: 0.2, most: 1e3},
		{name: "pack", most: 1, boolean: true},
	}},
}

// pricedParams are those of priced prefill: see priced.
var pricedParams = []param{
	{name: "backlogWeight", value: 0.5, most: 1e3},
	{name: "batchTokens", value: 8192, least: 1, most: big},
	{name: "kv", value: 1, most: 1, boolean: true},
	{name: "speed", value: 1, most: 1, boolean: true},
}

// Names returns the valid policy names, in the order of the documentation.
func Names() []string {
	names := make([]string, numKinds)
	for k := range kinds {
		names[k] = kinds[k].name
	}
	return names
}

// Valid are all names that may be written: Names and their aliases.
func Valid() []string {
	names := Names()
	for alias := range aliases {
		names = append(names, alias)
	}
	return names
}

func kindOf(name string) (kind, bool) {
	if other, ok := aliases[name]; ok {
		name = other
	}
	for k := range kinds {
		if kinds[k].name == name {
			return kind(k), true
		}
	}
	return 0, false
}

// paramNames lists the parameters of a kind for messages.
func (k kind) paramNames() string {
	if len(kinds[k].params) == 0 {
		return "it has none"
	}
	names := make([]string, len(kinds[k].params))
	for i := range kinds[k].params {
		names[i] = kinds[k].params[i].name
	}
	return "valid: " + strings.Join(names, ", ")
}

// none is a raw value of an endpoint that can't be scored.
var none = math.NaN()
