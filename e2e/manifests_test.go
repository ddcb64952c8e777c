package e2e

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// manifestsAreAccepted hands what build/kubernetes renders to the API server as
// kubectl apply --dry-run=server --validate=strict does: its schemas, and what it
// checks beyond them.
func manifestsAreAccepted(t *testing.T, api *apiServer) {
	api.create(t, spacesGVR, "", doc{"apiVersion": "v1", "kind": "Namespace", "metadata": doc{"name": "manifests"}})
	for _, folder := range []string{"stock", "contrib", "engines"} {
		rendered, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), filepath.Join("..", "build", "kubernetes", folder))
		if err != nil {
			t.Fatal(err)
		}
		accepted := 0
		for _, r := range rendered.Resources() {
			if r.GetKind() == "PodMonitor" { // whose schema is not the server's; package compose has it
				continue
			}
			object, err := r.Map()
			if err != nil {
				t.Fatal(err)
			}
			if err := api.tryCreate(t, "manifests", object); err != nil {
				t.Errorf("%s: %s %s: %v", folder, r.GetKind(), r.GetName(), err)
			}
			accepted++
		}
		if accepted < 3 {
			t.Errorf("%s has %d objects", folder, accepted)
		}
	}
	broken := doc{"apiVersion": "v1", "kind": "ConfigMap", "metadata": doc{"name": "x"}, "dato": doc{}}
	if err := api.tryCreate(t, "manifests", broken); err == nil || !strings.Contains(err.Error(), "dato") {
		t.Errorf("an unknown field: %v", err)
	}
}

// tryCreate asks whether an object would be accepted, and makes none.
func (s *apiServer) tryCreate(t *testing.T, namespace string, object map[string]any) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	u := &unstructured.Unstructured{Object: plain(t, object)}
	kind := u.GroupVersionKind()
	resource := strings.ToLower(kind.Kind) + "s" // as all kinds are named here
	if strings.HasSuffix(resource, "ys") {
		resource = strings.TrimSuffix(resource, "ys") + "ies"
	}
	_, err := s.client.Resource(schema.GroupVersionResource{Group: kind.Group, Version: kind.Version, Resource: resource}).Namespace(namespace).
		Create(ctx, u, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict})
	return err
}
