package bootstrap

import (
	"testing"

	"github.com/shuntproxy/shunt/internal/config"
)

// TestCheckFlow: a setting without effect is a warning, alone and in a bootstrap;
// the same setting where it has one is none.
func TestCheckFlow(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want []string
	}{
		"defaults":             {"", nil},
		"tokens":               {"flowControl: {enabled: true, saturation: concurrency, maxTokens: 9}", nil},
		"tokens unread":        {"flowControl: {enabled: true, maxTokens: 9}", []string{"flowControl.maxTokens: has no effect without saturation: concurrency"}},
		"thresholds":           {"flowControl: {enabled: true, queueThreshold: 2, kvThreshold: 0.5}", nil},
		"thresholds unread":    {"flowControl: {enabled: true, saturation: concurrency, queueThreshold: 2, kvThreshold: 0.5}", []string{"flowControl.queueThreshold: has no effect", "flowControl.kvThreshold: has no effect"}},
		"thresholds by name":   {"flowControl: {enabled: true, saturation: concurrency, queueThreshold: 5, kvThreshold: 0.8}", nil},
		"eviction":             {"flowControl: {enabled: true, eviction: true}\nobjectives: [{name: batch, priority: -1}]", nil},
		"eviction turned off":  {"flowControl: {enabled: false, eviction: true}", []string{"flowControl.eviction: has no effect without enabled: true"}},
		"eviction of nobody":   {"flowControl: {enabled: true, eviction: true}\nobjectives: [{name: chat, priority: 1}]", []string{"flowControl.eviction: has no effect without an objective whose priority is below 0"}},
		"shorter":              {"flowControl: {enabled: true, ttl: 9s, bands: [{priority: 1, ttl: 8s}]}\nobjectives: [{name: a, ttl: 9s}]", nil},
		"longer":               {"flowControl: {enabled: true, ttl: 9s, bands: [{priority: 1, ttl: 10s}]}\nobjectives: [{name: a, ttl: 1m}]", []string{"flowControl.bands[0].ttl: is 10s and has no effect: flowControl.ttl, 9s, is shorter", "objectives[0].ttl: is 1m0s"}},
		"longer, and not used": {"flowControl: {ttl: 9s}\nobjectives: [{name: a, ttl: 1m}]", nil},
	} {
		t.Run(name, func(t *testing.T) {
			text := "pools: {default: {static: [{address: 10.0.0.1}]}}\n" + tt.text
			cfg, err := config.Parse([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			compare(t, "warnings", CheckFlow(cfg), tt.want)

			envoy, err := Generate(options(text))
			if err != nil {
				t.Fatal(err)
			}
			report, err := Check(envoy, nil)
			if err != nil || len(report.Problems) != 0 || len(report.Warnings) != len(tt.want) {
				t.Errorf("of the bootstrap: %+v, %v", report, err)
			}
		})
	}
}

// TestCheckFlowKubernetes: an InferencePool's objectives may have any priority.
func TestCheckFlowKubernetes(t *testing.T) {
	cfg, err := config.Parse([]byte("pools: {default: {kubernetes: {inferencePool: llama}}}\nflowControl: {enabled: true, eviction: true}"))
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "warnings", CheckFlow(cfg), nil)
}
