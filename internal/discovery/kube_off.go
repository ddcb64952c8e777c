//go:build nokubernetes

package discovery

import (
	"context"
	"errors"
)

var errNoKubernetes = errors.New("this build has no Kubernetes source (build tag nokubernetes)")

// Kubernetes is left out of this build.
type Kubernetes struct{}

// KeepQuiet has nothing to keep quiet.
func KeepQuiet(Fault) {}

// NewKubernetes returns a source that can't run.
func NewKubernetes(KubernetesOptions) *Kubernetes { return &Kubernetes{} }

// CheckKubernetes says that the source is left out.
func CheckKubernetes(KubernetesOptions) error { return errNoKubernetes }

// CheckSelector can't check a label selector in this build.
func CheckSelector(string) error { return nil }

// Run implements Source.
func (k *Kubernetes) Run(context.Context, func(Set)) error { return errNoKubernetes }

// Status implements Source.
func (k *Kubernetes) Status() Status { return Status{Error: errNoKubernetes.Error()} }
