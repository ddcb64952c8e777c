package discovery

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/internal/plainfile"
	"github.com/shuntproxy/shunt/internal/pool"
)

// maxFile bounds the file of endpoints: 16 MiB are some 100,000 of them.
const maxFile = 16 << 20

// ReadFile reads a file of endpoints: a YAML list with the entries of a
// pool's static list, or a mapping with that list under static. All that is
// wrong is in the error, a line for each, with its place in the file.
func ReadFile(path string) ([]pool.Target, error) {
	data, err := plainfile.Read(path, maxFile)
	if err != nil {
		return nil, err
	}
	targets, err := decode(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return targets, nil
}

// decoder collects what is wrong.
type decoder struct {
	problems []error
	byAddr   map[netip.AddrPort]string // where an address stood first
}

func (d *decoder) report(n *yaml.Node, at, format string, args ...any) {
	msg := fmt.Sprintf(format, args...)
	if at != "" {
		msg = at + ": " + msg
	}
	d.problems = append(d.problems, fmt.Errorf("line %d: %s", n.Line, msg))
}

// decode reads one document. An empty one is an error: it is what a file looks
// like that is being written.
func decode(data []byte) ([]pool.Target, error) {
	root, err := ParseYAML(data)
	switch {
	case err != nil:
		return nil, err
	case root == nil:
		return nil, errors.New("is empty; write [] where there are no endpoints")
	}
	d := decoder{byAddr: make(map[netip.AddrPort]string)}
	targets := d.document(root)
	if len(d.problems) > 0 {
		return nil, errors.Join(d.problems...)
	}
	return targets, nil
}

func (d *decoder) document(root *yaml.Node) []pool.Target {
	root, at := resolve(root), ""
	if root.Kind == yaml.MappingNode {
		var list *yaml.Node
		d.fields(root, "", func(key, value *yaml.Node) {
			if key.Value != "static" {
				d.report(key, key.Value, "is unknown, valid: static")
				return
			}
			list = resolve(value)
		})
		if list == nil {
			if len(d.problems) == 0 {
				d.report(root, "static", "is missing; give the list of endpoints")
			}
			return nil
		}
		root, at = list, "static"
	}
	if root.Kind != yaml.SequenceNode {
		d.report(root, at, "is not a list of endpoints ([{address, labels, pod}])")
		return nil
	}
	targets := make([]pool.Target, 0, len(root.Content))
	for i, n := range root.Content {
		if t, ok := d.entry(resolve(n), at+"["+strconv.Itoa(i)+"]"); ok {
			targets = append(targets, t)
		}
	}
	return targets
}

func (d *decoder) entry(n *yaml.Node, at string) (pool.Target, bool) {
	if n.Kind != yaml.MappingNode {
		d.report(n, at, "is not an endpoint ({address, labels, pod})")
		return pool.Target{}, false
	}
	before := len(d.problems)
	var address, pod string
	labels := make(map[string]string)
	lines := map[string]*yaml.Node{}
	d.fields(n, at, func(key, value *yaml.Node) {
		lines[key.Value] = key
		switch key.Value {
		case "address":
			address = d.text(value, at+".address")
		case "pod":
			pod = d.text(value, at+".pod")
		case "labels":
			if isNull(value) {
				return
			}
			if value.Kind != yaml.MappingNode {
				d.report(value, at+".labels", "is not a mapping of names to strings")
				return
			}
			d.fields(value, at+".labels", func(key, value *yaml.Node) {
				field := "labels[" + strconv.Quote(key.Value) + "]"
				lines[field] = key
				labels[key.Value] = d.text(value, at+"."+field)
			})
		default:
			d.report(key, at+"."+key.Value, "is unknown, valid: address, labels, pod")
		}
	})
	if len(d.problems) > before {
		return pool.Target{}, false
	}
	t, problems := pool.ParseTarget(address, labels, pod)
	for _, p := range problems {
		if p.Field == "labels["+strconv.Quote(pool.LabelEngine)+"]" {
			continue // routable, not scored: only static refuses it
		}
		where := lines[p.Field]
		if where == nil {
			where = n
		}
		d.report(where, at+"."+p.Field, "%s", p.Message)
	}
	if len(d.problems) > before {
		return pool.Target{}, false
	}
	if first, dup := d.byAddr[t.Addr]; dup {
		d.report(n, at+".address", "%s is at %s already", t.Addr, first)
		return pool.Target{}, false
	}
	d.byAddr[t.Addr] = at
	t.Source = "file"
	return t, true
}

// fields calls f for each key of a mapping, once.
func (d *decoder) fields(n *yaml.Node, at string, f func(key, value *yaml.Node)) {
	seen := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := resolve(n.Content[i])
		switch {
		case key.Kind != yaml.ScalarNode:
			d.report(key, at, "has a key that is no string")
			continue
		case seen[key.Value]:
			d.report(key, join(at, key.Value), "is given twice")
			continue
		}
		seen[key.Value] = true
		f(key, resolve(n.Content[i+1]))
	}
}

func (d *decoder) text(n *yaml.Node, at string) string {
	switch {
	case isNull(n):
		return ""
	case n.Kind != yaml.ScalarNode:
		d.report(n, at, "is not a string")
	case n.Tag != "!!str":
		d.report(n, at, "%s is not a string; write it in quotes", n.Value)
	}
	return n.Value
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func join(at, key string) string {
	if at == "" {
		return key
	}
	return at + "." + key
}

// resolve follows an alias. YAML has no alias of an alias.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}
