//go:build !nokubernetes

package discovery

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The resources that are read. Where a kind has two groups, the first that the
// server has counts.
const (
	groupPool     = "inference.networking.k8s.io"
	groupPoolOld  = "inference.networking.x-k8s.io"
	groupLLMD     = "llm-d.ai"
	kindPool      = "InferencePool"
	resourcePools = "inferencepools"
)

func poolResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: groupPool, Version: "v1", Resource: resourcePools}
}

func objectiveResources() []schema.GroupVersionResource {
	return []schema.GroupVersionResource{
		{Group: groupLLMD, Version: "v1alpha2", Resource: "inferenceobjectives"},
		{Group: groupPoolOld, Version: "v1alpha2", Resource: "inferenceobjectives"},
	}
}

func rewriteResources() []schema.GroupVersionResource {
	return []schema.GroupVersionResource{
		{Group: groupLLMD, Version: "v1alpha2", Resource: "inferencemodelrewrites"},
		{Group: groupPoolOld, Version: "v1alpha2", Resource: "inferencemodelrewrites"},
	}
}

// poolSpec is what counts of an InferencePool.
type poolSpec struct {
	selector string // in kubectl's notation
	ports    []uint16
}

func (p *poolSpec) equal(o *poolSpec) bool {
	if p == nil || o == nil {
		return p == o
	}
	return p.selector == o.selector && slices.Equal(p.ports, o.ports)
}

// maxPoolPorts is how many targetPorts an InferencePool may have.
const maxPoolPorts = 8

// readPool reads an InferencePool.
func readPool(u *unstructured.Unstructured) (*poolSpec, error) {
	match, _, err := unstructured.NestedStringMap(u.Object, "spec", "selector", "matchLabels")
	if err != nil || len(match) == 0 {
		return nil, fmt.Errorf("InferencePool %s: spec.selector.matchLabels is missing or is no mapping of strings", u.GetName())
	}
	selector, err := labels.ValidatedSelectorFromSet(match)
	if err != nil {
		return nil, fmt.Errorf("InferencePool %s: spec.selector.matchLabels: %w", u.GetName(), err)
	}
	spec := &poolSpec{selector: selector.String()}
	ports, _, err := unstructured.NestedSlice(u.Object, "spec", "targetPorts")
	if err != nil || len(ports) == 0 || len(ports) > maxPoolPorts {
		return nil, fmt.Errorf("InferencePool %s: spec.targetPorts has %d ports, 1 to %d are wanted", u.GetName(), len(ports), maxPoolPorts)
	}
	for i, entry := range ports {
		object, _ := entry.(map[string]any)
		number, found := wholeNumber(object["number"])
		if !found || number < 1 || number > 65535 {
			return nil, fmt.Errorf("InferencePool %s: spec.targetPorts[%d].number is not a port", u.GetName(), i)
		}
		if !slices.Contains(spec.ports, uint16(number)) {
			spec.ports = append(spec.ports, uint16(number))
		}
	}
	return spec, nil
}

// wholeNumber reads a number of a decoded JSON document.
func wholeNumber(value any) (int64, bool) {
	switch n := value.(type) {
	case int64:
		return n, true
	case float64:
		return int64(n), n == float64(int64(n))
	default:
		return 0, false
	}
}

// refersTo reports whether a resource's spec.poolRef names the pool.
func refersTo(u *unstructured.Unstructured, name string) bool {
	ref, _, _ := unstructured.NestedMap(u.Object, "spec", "poolRef")
	field := func(key, missing string) string {
		text, _ := ref[key].(string)
		return cmp.Or(text, missing)
	}
	group := field("group", groupPool)
	return field("name", "") == name && field("kind", kindPool) == kindPool && (group == groupPool || group == groupPoolOld)
}

// readObjectives reads the InferenceObjectives of a pool, in order of name.
func readObjectives(objects []*unstructured.Unstructured, poolName string) []Objective {
	var out []Objective
	for _, u := range objects {
		if !refersTo(u, poolName) {
			continue
		}
		value, _, _ := unstructured.NestedFieldNoCopy(u.Object, "spec", "priority")
		priority, _ := wholeNumber(value) // none is 0
		out = append(out, Objective{Name: u.GetName(), Priority: int(min(max(priority, -1<<31), 1<<31-1))})
	}
	slices.SortFunc(out, func(a, b Objective) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// readRewrites reads the InferenceModelRewrites of a pool. Of two rules for one
// model that of the oldest resource counts, in one resource the first; notes say
// what is passed over.
func readRewrites(objects []*unstructured.Unstructured, poolName string) (rules []Rewrite, notes []string) {
	var mine []*unstructured.Unstructured
	for _, u := range objects {
		if refersTo(u, poolName) {
			mine = append(mine, u)
		}
	}
	slices.SortFunc(mine, func(a, b *unstructured.Unstructured) int {
		return older(a.GetCreationTimestamp().Time, a.GetName(), b.GetCreationTimestamp().Time, b.GetName())
	})
	taken := map[string]bool{}
	generic := false
	for _, u := range mine {
		list, _, _ := unstructured.NestedSlice(u.Object, "spec", "rules")
		for i, entry := range list {
			at := fmt.Sprintf("InferenceModelRewrite %s: spec.rules[%d]", u.GetName(), i)
			rule, _ := entry.(map[string]any)
			targets, note := readTargets(rule)
			if note != "" {
				notes = append(notes, at+note)
			}
			if len(targets) == 0 {
				continue
			}
			models, all, note := readMatches(rule)
			if note != "" {
				notes = append(notes, at+note)
			}
			switch {
			case all && !generic:
				generic = true
				rules = append(rules, Rewrite{Targets: targets})
			case !all:
				models = slices.DeleteFunc(models, func(m string) bool { return taken[m] })
				for _, m := range models {
					taken[m] = true
				}
				if len(models) > 0 {
					rules = append(rules, Rewrite{Models: models, Targets: targets})
				}
			}
		}
	}
	return rules, notes
}

// readMatches returns the models that a rule is for, each once, or all.
func readMatches(rule map[string]any) (models []string, all bool, note string) {
	matches, _, _ := unstructured.NestedSlice(rule, "matches")
	if len(matches) == 0 {
		return nil, true, ""
	}
	for i, entry := range matches {
		match, _ := entry.(map[string]any)
		kind, _, _ := unstructured.NestedString(match, "model", "type")
		value, _, _ := unstructured.NestedString(match, "model", "value")
		switch {
		case kind != "" && kind != "Exact":
			note = fmt.Sprintf(".matches[%d].model.type %q is unknown, valid: Exact; it is passed over", i, kind)
		case value == "":
			note = fmt.Sprintf(".matches[%d].model.value is missing; it is passed over", i)
		case !slices.Contains(models, value):
			models = append(models, value)
		}
	}
	return models, false, note
}

// maxWeight is the largest weight of a target.
const maxWeight = 1_000_000

// readTargets returns a rule's targets. Where some have a weight, those without
// are never chosen.
func readTargets(rule map[string]any) (targets []RewriteTarget, note string) {
	list, _, _ := unstructured.NestedSlice(rule, "targets")
	weighted := false
	for i, entry := range list {
		target, _ := entry.(map[string]any)
		model, _ := target["modelRewrite"].(string)
		weight, _ := wholeNumber(target["weight"])
		if model == "" || weight < 0 || weight > maxWeight {
			note = fmt.Sprintf(".targets[%d] has no modelRewrite, or a weight that is not 1 to %d; it is passed over", i, maxWeight)
			continue
		}
		weighted = weighted || weight > 0
		targets = append(targets, RewriteTarget{Model: model, Weight: int(weight)})
	}
	if weighted {
		before := len(targets)
		targets = slices.DeleteFunc(targets, func(t RewriteTarget) bool { return t.Weight == 0 })
		if len(targets) < before {
			note = ".targets: some have a weight, so those without are never chosen"
		}
	}
	if len(targets) == 0 && note == "" {
		note = ".targets is missing; it is passed over"
	}
	return targets, note
}
