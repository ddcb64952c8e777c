package pool

import (
	"fmt"
	"strings"
)

// Engine is the inference engine behind an endpoint. It selects where metrics
// are scraped and how their names are translated.
type Engine uint8

// The engines that have a metric table. EngineUnknown is routable and never
// scored on an engine metric.
const (
	EngineUnknown Engine = iota
	EngineVLLM
	EngineSGLang
	EngineTRTLLM
	EngineXLLM
)

// String returns the value of the engine label.
func (e Engine) String() string {
	switch e {
	case EngineVLLM:
		return "vllm"
	case EngineSGLang:
		return "sglang"
	case EngineTRTLLM:
		return "trtllm"
	case EngineXLLM:
		return "xllm"
	default:
		return "unknown"
	}
}

// ParseEngine reads an engine label. An empty label means vllm and
// trtllm-serve means trtllm; any other name is an error beside EngineUnknown,
// because a static entry refuses it and a discovered one does not.
func ParseEngine(label string) (Engine, error) {
	switch strings.ToLower(strings.TrimSpace(label)) {
	case "", "vllm":
		return EngineVLLM, nil
	case "sglang":
		return EngineSGLang, nil
	case "trtllm", "trtllm-serve":
		return EngineTRTLLM, nil
	case "xllm":
		return EngineXLLM, nil
	default:
		return EngineUnknown, fmt.Errorf("unknown engine %q, valid: vllm, sglang, trtllm, xllm", label)
	}
}
