package config

import (
	"fmt"
	"reflect"
	"sort"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// maxNodes bounds the values in one document, so that nested aliases can't make
// a small text cost gigabytes. Depth is bounded by the structs.
const maxNodes = 300_000

// decoder walks one document into a struct by the struct's json tags. What it
// finds wrong it notes and goes on, leaving the value as if it were absent.
type decoder struct {
	problems Problems
	// lines holds the path of every value of the document, and its line (0 for
	// JSON); top is the fields of the root in document order.
	lines map[string]int
	top   []string
	// bad is the set of paths that have a problem: later steps say nothing more
	// about them.
	bad     map[string]bool
	ordered bool
	nodes   int
}

// decodeDocument fills into, a pointer to a struct, from text.
func decodeDocument(text []byte, into any) *decoder {
	d := &decoder{lines: map[string]int{}, bad: map[string]bool{}}
	root, ordered, err := parseTree(text)
	d.ordered = ordered
	switch {
	case err != nil:
		d.bad[""] = true
		d.problems = append(d.problems, Problem{Message: err.Error()})
	case root != nil:
		d.value(root, reflect.ValueOf(into).Elem(), "")
	}
	return d
}

// has reports whether the document holds a value at path, null excepted.
func (d *decoder) has(path string) bool { _, ok := d.lines[path]; return ok }

// failed reports whether the value at path, or one above or below it, has a
// problem already.
func (d *decoder) failed(path string) bool {
	for bad := range d.bad {
		if within(path, bad) || within(bad, path) {
			return true
		}
	}
	return false
}

// tooLarge reports whether decoding stopped before the document's end.
func (d *decoder) tooLarge() bool { return d.nodes >= maxNodes }

func (d *decoder) topFields() []string { return d.top }

func (d *decoder) problem(path, format string, args ...any) Problem {
	return Problem{Path: path, Line: d.lines[path], Message: fmt.Sprintf(format, args...)}
}

func (d *decoder) fail(path string, format string, args ...any) {
	d.bad[path] = true
	d.problems = append(d.problems, d.problem(path, format, args...))
}

func (d *decoder) value(n *yaml.Node, into reflect.Value, path string) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if d.nodes++; d.nodes >= maxNodes {
		if d.nodes == maxNodes {
			d.fail(path, "the document is too large: %d values are the limit, aliases counted each time", maxNodes)
		}
		return
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return
	}
	d.lines[path] = n.Line
	switch into.Kind() {
	case reflect.Pointer:
		fresh := reflect.New(into.Type().Elem())
		d.value(n, fresh.Elem(), path)
		into.Set(fresh)
	case reflect.Struct:
		if into.Type() == reflect.TypeFor[Policy]() {
			d.policy(n, into.Addr().Interface().(*Policy), path)
			return
		}
		d.object(n, into, path)
	case reflect.Slice:
		if into.Type() == reflect.TypeFor[Pools]() {
			d.pools(n, into, path)
			return
		}
		d.list(n, into, path)
	case reflect.Map:
		d.stringMap(n, into, path)
	default:
		d.scalar(n, into, path)
	}
}

// entries yields the keys and values of a mapping, and notes keys that are given
// twice or are no strings.
func (d *decoder) entries(n *yaml.Node, path, want string, each func(key string, value *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode {
		d.fail(path, "is %s: %s is wanted", describe(n), want)
		return false
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			d.fail(path, "has %s as a key: a name is wanted", describe(key))
			continue
		}
		at := fieldPath(path, key.Value)
		d.lines[at] = key.Line
		if seen[key.Value] {
			d.fail(at, "is given twice")
			continue
		}
		seen[key.Value] = true
		each(key.Value, value)
		if value.Kind == yaml.ScalarNode && value.Tag == "!!null" {
			delete(d.lines, at)
		}
	}
	return true
}

func (d *decoder) object(n *yaml.Node, into reflect.Value, path string) {
	fields := fieldIndex(into.Type())
	if n.Kind == yaml.SequenceNode && into.Type() == reflect.TypeFor[Config]() {
		d.fail(path, "is a list: an object with pools is wanted; a list of endpoints stands in a file of its own, which pools.NAME.file.path names")
		return
	}
	d.entries(n, path, "an object with "+strings.Join(fieldNames(into.Type()), ", "), func(key string, value *yaml.Node) {
		if path == "" {
			d.top = append(d.top, key)
		}
		at := fieldPath(path, key)
		index, ok := fields[key]
		if !ok {
			d.fail(at, "unknown field%s", suggest(key, fieldNames(into.Type())))
			return
		}
		d.value(value, into.Field(index), at)
	})
}

func (d *decoder) list(n *yaml.Node, into reflect.Value, path string) {
	if n.Kind != yaml.SequenceNode {
		d.fail(path, "is %s: a list is wanted", describe(n))
		return
	}
	list := reflect.MakeSlice(into.Type(), len(n.Content), len(n.Content))
	for i, item := range n.Content {
		at := indexPath(path, i)
		if item.Kind == yaml.ScalarNode && item.Tag == "!!null" {
			d.lines[at] = item.Line
			d.fail(at, "is empty")
			continue
		}
		d.value(item, list.Index(i), at)
	}
	into.Set(list)
}

func (d *decoder) stringMap(n *yaml.Node, into reflect.Value, path string) {
	m := reflect.MakeMap(into.Type())
	d.entries(n, path, "an object", func(key string, value *yaml.Node) {
		item := reflect.New(into.Type().Elem()).Elem()
		d.value(value, item, fieldPath(path, key))
		m.SetMapIndex(reflect.ValueOf(key), item)
	})
	into.Set(m)
}

// pools keeps the document's order where there is one.
func (d *decoder) pools(n *yaml.Node, into reflect.Value, path string) {
	list := Pools{}
	ok := d.entries(n, path, "an object of pools by name", func(key string, value *yaml.Node) {
		pool := Pool{Name: key}
		d.value(value, reflect.ValueOf(&pool).Elem(), fieldPath(path, key))
		list = append(list, pool)
	})
	if !ok {
		return
	}
	if !d.ordered {
		sort.SliceStable(list, func(i, j int) bool {
			a, b := list[i].Name, list[j].Name
			if (a == "default") != (b == "default") {
				return a == "default"
			}
			return a < b
		})
	}
	into.Set(reflect.ValueOf(list))
}

// policy is text or a list of parts.
func (d *decoder) policy(n *yaml.Node, into *Policy, path string) {
	switch n.Kind {
	case yaml.SequenceNode:
		into.Parts = []PolicyPart{}
		d.list(n, reflect.ValueOf(&into.Parts).Elem(), path)
	case yaml.ScalarNode:
		d.scalar(n, reflect.ValueOf(&into.Text).Elem(), path)
	default:
		d.fail(path, "is %s: a name or a list of {policy, weight, params} is wanted", describe(n))
	}
}

func (d *decoder) scalar(n *yaml.Node, into reflect.Value, path string) {
	if n.Kind != yaml.ScalarNode {
		d.fail(path, "is %s: %s is wanted", describe(n), wanted(into.Type()))
		return
	}
	if into.Type() == reflect.TypeFor[Value]() {
		into.SetString(n.Value)
		return
	}
	quoted := n.Tag == "!!str" || n.Tag == "!!timestamp" || n.Tag == "!!binary"
	switch {
	case into.Kind() == reflect.String && !quoted:
		d.fail(path, "is %s: a string is wanted, write %q with its quotes", describe(n), n.Value)
		return
	case into.Kind() == reflect.Bool && n.Tag != "!!bool":
		d.fail(path, "is %s: true or false is wanted", describe(n))
		return
	case into.Kind() != reflect.Bool && n.Tag == "!!bool":
		d.fail(path, "is %s: %s is wanted", describe(n), wanted(into.Type()))
		return
	}
	if err := setScalar(into, n.Value); err != nil {
		d.fail(path, "%v", err)
	}
}

// setScalar parses text into a scalar. It serves documents and default tags
// alike. Numbers come as text too: Envoy's YAML loader makes strings of 0.8 and
// of integers from 2^32.
func setScalar(into reflect.Value, text string) error {
	switch into.Type() {
	case reflect.TypeFor[Policy]():
		into.Set(reflect.ValueOf(Policy{Text: text}))
		return nil
	case reflect.TypeFor[time.Duration]():
		d, err := parseDuration(text)
		into.SetInt(int64(d))
		return err
	case reflect.TypeFor[Size]():
		s, err := parseSize(text)
		into.SetInt(int64(s))
		return err
	}
	switch into.Kind() {
	case reflect.Slice: // of a default tag
		into.Set(reflect.ValueOf(strings.Split(text, ",")))
	case reflect.String:
		into.SetString(text)
	case reflect.Bool:
		into.SetBool(strings.EqualFold(text, "true"))
	case reflect.Int:
		i, err := parseInt(text)
		into.SetInt(i)
		return err
	case reflect.Float64:
		f, err := parseDecimal(text)
		if err != nil {
			return fmt.Errorf("%q is not a number", text)
		}
		into.SetFloat(f)
	default:
		return fmt.Errorf("fields of type %s are not supported", into.Type())
	}
	return nil
}

func wanted(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[time.Duration]():
		return "a duration, such as 1s,"
	case t == reflect.TypeFor[Size]():
		return "a size, such as 4MiB,"
	case t.Kind() == reflect.String:
		return "a string"
	case t.Kind() == reflect.Bool:
		return "true or false"
	default:
		return "a number"
	}
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "an object"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	default:
		switch n.Tag {
		case "!!null":
			return "empty"
		case "!!bool":
			return "the boolean " + n.Value
		case "!!int", "!!float":
			return "the number " + n.Value
		default:
			return fmt.Sprintf("the string %q", n.Value)
		}
	}
}

// fieldName is the document's name of a struct field; empty if it has none.
func fieldName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	if name == "-" {
		return ""
	}
	return name
}

func fieldIndex(t reflect.Type) map[string]int {
	index := map[string]int{}
	for i := range t.NumField() {
		if name := fieldName(t.Field(i)); name != "" {
			index[name] = i
		}
	}
	return index
}

func fieldNames(t reflect.Type) []string {
	var names []string
	for i := range t.NumField() {
		if name := fieldName(t.Field(i)); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// suggest ends the message about an unknown name: with the nearest valid one, or
// with all of them.
func suggest(name string, valid []string) string {
	best, distance := "", 1+len(name)/3
	for _, v := range valid {
		if d := editDistance(strings.ToLower(name), strings.ToLower(v)); d <= distance {
			best, distance = v, d-1
		}
	}
	if best != "" {
		return fmt.Sprintf(" (did you mean %s?)", best)
	}
	return "; valid: " + strings.Join(valid, ", ")
}

// editDistance is the Levenshtein distance in bytes.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
