package bootstrap

import (
	"fmt"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/config"
)

// CheckFlow warns of what is legal in a valid config's flow control, has no
// effect, and so is likely not meant.
func CheckFlow(cfg *config.Config) (warnings config.Problems) {
	warn := func(path, format string, args ...any) {
		warnings = append(warnings, config.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
	}
	f := &cfg.FlowControl
	if f.Saturation != "concurrency" && f.MaxTokens > 0 {
		warn("flowControl.maxTokens", "has no effect without saturation: concurrency")
	}
	if def, err := config.Default(); err == nil && f.Saturation == "concurrency" {
		if f.QueueThreshold != def.FlowControl.QueueThreshold {
			warn("flowControl.queueThreshold", "has no effect without saturation: utilization")
		}
		if f.KVThreshold != def.FlowControl.KVThreshold {
			warn("flowControl.kvThreshold", "has no effect without saturation: utilization")
		}
	}
	switch {
	case !f.Eviction:
	case !f.Enabled: // no error, so that enabled alone turns it off and on
		warn("flowControl.eviction", "has no effect without enabled: true")
	case !mayBeSheddable(cfg):
		warn("flowControl.eviction", "has no effect without an objective whose priority is below 0: only its requests are ended for others")
	}
	if !f.Enabled {
		return warnings
	}
	over := func(path string, ttl time.Duration) {
		if ttl > f.TTL {
			warn(path, "is %s and has no effect: flowControl.ttl, %s, is shorter", ttl, f.TTL)
		}
	}
	for i, b := range f.Bands {
		over(fmt.Sprintf("flowControl.bands[%d].ttl", i), b.TTL)
	}
	for i, o := range cfg.Objectives {
		over(fmt.Sprintf("objectives[%d].ttl", i), o.TTL)
	}
	return warnings
}

// mayBeSheddable reports whether some request can have a priority below 0.
// Kubernetes brings the objectives of a pool that is found by its InferencePool.
func mayBeSheddable(cfg *config.Config) bool {
	return slices.ContainsFunc(cfg.Objectives, func(o config.Objective) bool { return o.Priority < 0 }) ||
		slices.ContainsFunc(cfg.Pools, func(p config.Pool) bool { return p.Kubernetes != nil && p.Kubernetes.InferencePool != "" })
}
