package discovery

import (
	"log/slog"
	"time"
)

// KubernetesOptions say which pods are endpoints.
type KubernetesOptions struct {
	// Kubeconfig is a file; "" means the service account of the pod that this
	// process runs in. Context is one of the file's, "" its current one.
	Kubeconfig, Context string
	// Namespaces to look in: none means the own one, "*" all.
	Namespaces []string
	// Selector of labels that pods must match, in kubectl's notation.
	Selector string
	// InferencePool, if not "", names the resource whose selector and ports count.
	InferencePool string
	// Ports make each pod an endpoint per port; none means the port label's.
	Ports []uint16
	// Resources, if set, gets the objectives and rewrites that refer to
	// InferencePool, and again at each change, from Run's goroutine. It must not
	// block.
	Resources func(Resources)
	// Log gets one line per change, or is nil.
	Log func(level slog.Level, msg string)
	// Fault is told of panics, but for those that client-go catches: KeepQuiet.
	Fault Fault

	// RetryInterval and RetryCap are the first and the longest pause after a failed
	// request. Zero means the defaults.
	RetryInterval, RetryCap time.Duration
}

// Resources are what a namespace says about the requests of an InferencePool.
type Resources struct {
	// Objectives by name, each once.
	Objectives []Objective
	// Rewrites have each model at most once, and at most one has none, which is for
	// all models.
	Rewrites []Rewrite
}

// Objective is an InferenceObjective.
type Objective struct {
	Name     string
	Priority int
}

// Rewrite is a rule of an InferenceModelRewrite that took effect.
type Rewrite struct {
	// Models that it is for, none for all.
	Models []string
	// Targets, of which each request gets one at random.
	Targets []RewriteTarget
}

// RewriteTarget is a model and its share.
type RewriteTarget struct {
	Model string
	// Weight is 0 for all targets of a rule or for none of them.
	Weight int
}

const (
	// defaultRetry and defaultRetryCap keep a fleet from a server that comes back.
	defaultRetry    = 500 * time.Millisecond
	defaultRetryCap = 5 * time.Second
)

func (o *KubernetesOptions) retry() (first, most time.Duration) {
	first, most = o.RetryInterval, o.RetryCap
	if first <= 0 {
		first = defaultRetry
	}
	if most <= 0 {
		most = defaultRetryCap
	}
	return first, max(first, most)
}
