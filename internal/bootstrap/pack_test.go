package bootstrap

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPackConfig is what Envoy's YAML loader makes of scalars.
func TestPackConfig(t *testing.T) {
	packed, err := PackConfig(`{"@type": type.googleapis.com/xds.type.v3.TypedStruct, value: {
		bools: [yes, No, ON, off, true, y], texts: ["yes", 'no', yES, "true", word], fraction: 0.5, whole: 7, large: 5000000000, quoted: "7", none: null}}`)
	if err != nil {
		t.Fatal(err)
	}
	text, err := unpackConfig(packed)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"bools": []any{true, false, true, false, true, true}, "texts": []any{"yes", "no", "yES", "true", "word"},
		"fraction": "0.5", "whole": 7.0, "large": "5000000000", "quoted": "7", "none": nil,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	for _, wrong := range []string{"{", `{"@type": type.googleapis.com/google.protobuf.Struct, value: {}}`} {
		if _, err := PackConfig(wrong); err == nil {
			t.Errorf("%s is taken", wrong)
		}
	}
}
