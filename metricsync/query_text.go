package metricsync

import (
	"strings"

	"github.com/shuntproxy/shunt/internal/pool"
)

// queryText writes the PromQL of query-based metrics. One query answers for all
// endpoints: it sums over every label but those it is asked by.
type queryText struct {
	selector string // matchers without braces, or ""
	instance string // label names
	model    string
}

// of returns the query of a metric. The formulas are AIBrix's (its
// pkg/metrics/metrics.go), which asks one pod at a time, but for what
// docs/query-metrics.md lists.
func (t queryText) of(q pool.Query) string {
	by := t.instance
	if q.PerModel() {
		by += ", " + t.model
	}
	// vLLM after 0.11 has only the second name.
	outputToken := []string{"vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"}
	switch q {
	case pool.DrainRate1m:
		return "clamp_min(sum by (" + by + ") (rate(" + t.series("sglang:num_requests_total") + "[1m])), 0.01)"
	case pool.P95TTFT5m, pool.P95TTFT5mPod:
		return t.p95(by, "vllm:time_to_first_token_seconds")
	case pool.P95TPOT5mPod:
		return t.p95(by, outputToken...)
	case pool.AvgTTFT5mPod:
		return t.mean(by, "5m", "vllm:time_to_first_token_seconds")
	case pool.AvgTPOT5mPod:
		return t.mean(by, "5m", outputToken...)
	case pool.AvgE2ELatencyPod:
		return t.mean(by, "5m", "vllm:e2e_request_latency_seconds")
	case pool.AvgPromptToksPerReq:
		return t.mean(by, "1d", "vllm:request_prompt_tokens")
	case pool.AvgGenerationToksPerReq:
		return t.mean(by, "1d", "vllm:request_generation_tokens")
	case pool.AvgRequestsPerMinPod:
		return t.perMinute(by, "vllm:request_success_total")
	case pool.AvgPromptThroughputToksPerMinPod:
		return t.perMinute(by, "vllm:prompt_tokens_total")
	case pool.AvgGenerationThroughputToksPerMinPod:
		return t.perMinute(by, "vllm:generation_tokens_total")
	default:
		return ""
	}
}

func (t queryText) series(name string) string {
	if t.selector == "" {
		return name
	}
	return name + "{" + t.selector + "}"
}

// p95 is over five minutes, of the first histogram that there is.
func (t queryText) p95(by string, names ...string) string {
	var alternates []string
	for _, name := range names {
		alternates = append(alternates, "histogram_quantile(0.95, sum by ("+by+", le) (rate("+t.series(name+"_bucket")+"[5m])))")
	}
	return strings.Join(alternates, " or ")
}

func (t queryText) mean(by, window string, names ...string) string {
	var alternates []string
	for _, name := range names {
		increase := func(suffix string) string {
			return "sum by (" + by + ") (increase(" + t.series(name+suffix) + "[" + window + "]))"
		}
		alternates = append(alternates, increase("_sum")+" / "+increase("_count"))
	}
	return strings.Join(alternates, " or ")
}

func (t queryText) perMinute(by, name string) string {
	return "sum by (" + by + ") (increase(" + t.series(name) + "[5m])) / 5"
}
