//go:build nokubernetes

package filter

import (
	"strings"
	"testing"
)

// TestWithoutKubernetes: a build that has no such source says so.
func TestWithoutKubernetes(t *testing.T) {
	rt, _ := newRuntime(t)
	if _, err := rt.Load([]byte(`pools: {default: {kubernetes: {}}}`)); err == nil || !strings.Contains(err.Error(), "pools.default.kubernetes: this build has no Kubernetes source") {
		t.Errorf("got %v", err)
	}
}
