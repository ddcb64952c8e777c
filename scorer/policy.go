// Package scorer ranks endpoints: pure functions from a request, one snapshot,
// the live load, the time and a seed to a choice and its reason. It is the
// in-process counterpart of the AIBrix routing policies and of the llm-d
// router's scorers, whose names it keeps.
package scorer

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Part is one entry of a policy as it is written.
type Part struct {
	// Name is one of Valid.
	Name string
	// Weight is at least 0; a part that weighs 0 is left out.
	Weight float64
	// Params are the part's parameters as text, by name.
	Params map[string]string
}

// Problem is one thing wrong with a policy: the field, relative to it, and what
// is wrong.
type Problem struct {
	// Field is "" for the policy as a whole, or "[1].params.slack".
	Field   string
	Message string
}

// Policy is how endpoints are ranked, ready to pick with: one rule, or several
// with weights. It is immutable.
type Policy struct {
	text  string
	parts []part
	needs needs
}

// part is a compiled Part.
type part struct {
	kind   kind
	weight float64
	p      [maxParams]float64 // by position in the kind's params
}

const (
	// maxParts bounds a policy: each costs one pass over the candidates.
	maxParts = 8
	// maxWeight is AIBrix's bound.
	maxWeight = 1e6
)

// String is the policy as text: a name, or name:weight parts with commas.
func (p *Policy) String() string { return p.text }

// Labels are what policies are called in counters, a closed set: by name, or
// "weighted".
func Labels() []string { return append(Names(), "weighted") }

// NumLabels is how many they are.
const NumLabels = int(numKinds) + 1

// LabelIndex is the position of the policy's label in Labels.
func (p *Policy) LabelIndex() int {
	if len(p.parts) == 1 {
		return int(p.parts[0].kind)
	}
	return int(numKinds)
}

// NeedsPrefix reports whether a pick reads the hashes of the prompt's blocks.
func (p *Policy) NeedsPrefix() bool { return p.needs&needPrefix != 0 }

// NeedsSession reports whether a pick reads who is asking.
func (p *Policy) NeedsSession() bool { return p.needs&needSession != 0 }

// LeastRequest is the policy for requests that name no model.
func LeastRequest() *Policy { return leastRequest }

var leastRequest = func() *Policy {
	p, _ := Parse("least-request")
	return p
}()

// Parse reads a policy's name or AIBrix's string form, name[:weight] with
// commas between. A part that weighs 0 is left out.
func Parse(text string) (*Policy, error) {
	parts, err := split(text)
	if err != nil {
		return nil, err
	}
	p, problems := Compile(parts)
	if len(problems) > 0 {
		return nil, fmt.Errorf("%s", problems[0].Message)
	}
	return p, nil
}

// split takes the string form apart.
func split(text string) ([]Part, error) {
	var parts []Part
	for entry := range strings.SplitSeq(text, ",") {
		name, weight, weighted := strings.Cut(strings.TrimSpace(entry), ":")
		part := Part{Name: strings.TrimSpace(name), Weight: 1}
		if weighted {
			w, err := strconv.ParseUint(strings.TrimSpace(weight), 10, 32)
			if err != nil || w > maxWeight {
				return nil, fmt.Errorf("%q is not a weight: a whole number from 0 to %d is wanted, as in prefix-cache:2,least-request:1", weight, int(maxWeight))
			}
			part.Weight = float64(w)
		}
		parts = append(parts, part)
	}
	return parts, nil
}

// Mentioned returns the names in a policy's text, as they are written; nil if
// it can't be read.
func Mentioned(text string) []string {
	parts, err := split(text)
	if err != nil {
		return nil
	}
	names := make([]string, len(parts))
	for i := range parts {
		names[i] = parts[i].Name
	}
	return names
}

// Compile makes a policy of its parts. All problems are returned at once.
func Compile(parts []Part) (*Policy, []Problem) {
	p := &Policy{}
	var problems []Problem
	fail := func(i int, field, format string, args ...any) {
		at := fmt.Sprintf("[%d]", i) + field
		problems = append(problems, Problem{at, fmt.Sprintf(format, args...)})
	}
	seen := make(map[kind]bool)
	for i := range parts {
		in := &parts[i]
		k, ok := kindOf(in.Name)
		if !ok {
			fail(i, ".policy", "unknown policy %q, valid: %s", in.Name, strings.Join(Names(), ", "))
			continue
		}
		if seen[k] {
			fail(i, ".policy", "%s is given twice", kinds[k].name)
		}
		seen[k] = true
		if !(in.Weight >= 0 && in.Weight <= maxWeight) {
			fail(i, ".weight", "is %s: 0 to %s is wanted", plain(in.Weight), plain(maxWeight))
		}
		made := part{kind: k, weight: in.Weight}
		for at := range kinds[k].params {
			made.p[at] = kinds[k].params[at].value
		}
		for _, name := range sortedKeys(in.Params) {
			if message := made.set(name, in.Params[name]); message != "" {
				fail(i, ".params."+name, "%s", message)
			}
		}
		if in.Weight == 0 {
			continue
		}
		p.parts = append(p.parts, made)
		p.needs |= kinds[k].needs
	}
	for i := range parts {
		if k, ok := kindOf(parts[i].Name); ok && kinds[k].alone && len(parts) > 1 {
			fail(i, ".policy", "%s stands alone: it is no score that others can be added to", kinds[k].name)
		}
	}
	switch {
	case len(problems) > 0:
	case len(parts) == 0:
		problems = append(problems, Problem{"", "is empty: name a policy, such as least-request"})
	case len(p.parts) == 0:
		problems = append(problems, Problem{"", "no part has a weight above 0"})
	case len(p.parts) > maxParts:
		problems = append(problems, Problem{"", fmt.Sprintf("has %d parts: %d are the limit", len(p.parts), maxParts)})
	}
	if len(problems) > 0 {
		return nil, problems
	}
	p.text = p.describe()
	return p, nil
}

func (p *Policy) describe() string {
	if len(p.parts) == 1 {
		return kinds[p.parts[0].kind].name
	}
	var out strings.Builder
	for i := range p.parts {
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteString(kinds[p.parts[i].kind].name + ":" + plain(p.parts[i].weight))
	}
	return out.String()
}

// plain writes a number as people do: 1000000 and not 1e+06.
func plain(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

// set parses a parameter and returns what is wrong with it, or "".
func (pt *part) set(name, text string) string {
	for at := range kinds[pt.kind].params {
		def := &kinds[pt.kind].params[at]
		if def.name != name {
			continue
		}
		if def.boolean {
			switch strings.ToLower(text) {
			case "true":
				pt.p[at] = 1
			case "false":
				pt.p[at] = 0
			default:
				return fmt.Sprintf("is %q: true or false is wanted", text)
			}
			return ""
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsNaN(v) || v < def.least || v > def.most {
			return fmt.Sprintf("is %q: a number from %s to %s is wanted", text, plain(def.least), plain(def.most))
		}
		pt.p[at] = v
		return ""
	}
	return fmt.Sprintf("is no parameter of %s; %s", kinds[pt.kind].name, pt.kind.paramNames())
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
