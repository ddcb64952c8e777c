package bootstrap

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/internal/config"
)

// filterConfig is shunt's document as the value of filter_config or plugin_config.
func filterConfig(o Options, cfg *config.Config) (string, error) {
	text, err := inline(o, cfg)
	if err != nil || o.Host != HostGolanghost {
		return text, err
	}
	return packConfig(text)
}

// inline is the document as a Struct, which reads like the rest of the bootstrap,
// or as text where a Struct would change what it means.
func inline(o Options, cfg *config.Config) (string, error) {
	structHead := typeLine("google.protobuf.Struct") + "value:"
	if o.Door == DoorContrib {
		structHead = typeLine("xds.type.v3.TypedStruct") + "value:"
	}
	if o.ConfigFile != "" {
		path, err := quote(o.ConfigFile)
		return structHead + "\n  # Watched: a change in that file applies without touching this listener.\n  configFile: " + path, err
	}
	doc, err := config.Tree(o.Document)
	if err != nil {
		return "", fmt.Errorf("config can't be printed inline: %w", err)
	}
	prepare(doc)
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(doc); err != nil {
		return "", fmt.Errorf("config can't be printed inline: %w", err)
	}
	text := b.String()
	if keepsFirstPool(cfg.Pools.Names()) {
		return structHead + "\n  " + indent(2, text), nil
	}
	return "# As text, because a Struct would lose the order of the pools, and the first is the default.\n" +
		typeLine("google.protobuf.StringValue") + "value: |\n  " + indent(2, text), nil
}

func typeLine(name string) string { return "\"@type\": " + typePrefix + name + "\n" }

// keepsFirstPool reports whether the default pool is the same without the order
// of the document.
func keepsFirstPool(names []string) bool {
	if slices.Contains(names, "default") {
		return names[0] == "default"
	}
	return names[0] == slices.Min(names)
}

// plainWord is a text that YAML 1.1 and 1.2 both read as a string without
// quotes, unless it is one of the words of YAML 1.1.
var plainWord = regexp.MustCompile(`^[A-Za-z/][-_./A-Za-z0-9]*$`)

// prepare makes a document read alike in Envoy's YAML loader, which follows YAML
// 1.1 (yes is true there), and in block style.
func prepare(n *yaml.Node) {
	switch n.Kind {
	case yaml.ScalarNode:
		if n.Tag != "!!str" && n.Tag != "!!timestamp" {
			return
		}
		word := strings.ToLower(n.Value)
		ambiguous := slices.Contains([]string{"y", "n", "yes", "no", "on", "off", "true", "false", "null"}, word)
		if n.Tag = "!!str"; !plainWord.MatchString(n.Value) || ambiguous {
			n.Style = yaml.DoubleQuotedStyle
		}
	case yaml.MappingNode, yaml.SequenceNode:
		// A comment inside flow style is lost or breaks the line; outside it reads well.
		if n.Style == yaml.FlowStyle && hasComment(n) {
			n.Style = 0
		}
	}
	for _, child := range n.Content {
		prepare(child)
	}
}

func hasComment(n *yaml.Node) bool {
	for _, child := range n.Content {
		if child.HeadComment != "" || child.LineComment != "" || child.FootComment != "" || hasComment(child) {
			return true
		}
	}
	return false
}
