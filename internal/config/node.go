package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/internal/discovery"
)

// Tree is the document as nodes, for printing it inside another document. It is
// nil for an empty one.
func Tree(text []byte) (*yaml.Node, error) {
	root, _, err := parseTree(text)
	return root, err
}

// parseTree turns a document into a tree of nodes. Valid JSON goes through the
// JSON decoder, because YAML's refuses some of it (escaped surrogate pairs), and
// ordered is false: the keys' order means nothing there. Nil stands for an empty
// document.
func parseTree(text []byte) (root *yaml.Node, ordered bool, err error) {
	if json.Valid(text) {
		dec := json.NewDecoder(bytes.NewReader(text))
		dec.UseNumber()
		root, err = jsonNode(dec)
		return root, false, err
	}
	root, err = discovery.ParseYAML(text)
	return root, true, err
}

// jsonNode reads one value. Its depth is bounded by json.Valid, which the text
// passed before.
func jsonNode(dec *json.Decoder) (*yaml.Node, error) {
	token, err := dec.Token()
	if err != nil {
		return nil, err
	}
	scalar := func(tag, value string) (*yaml.Node, error) {
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}, nil
	}
	switch v := token.(type) {
	case nil:
		return scalar("!!null", "null")
	case bool:
		return scalar("!!bool", fmt.Sprint(v))
	case string:
		return scalar("!!str", v)
	case json.Number:
		if strings.ContainsAny(v.String(), ".eE") {
			return scalar("!!float", v.String())
		}
		return scalar("!!int", v.String())
	}
	node := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	if token == json.Delim('{') {
		node.Kind, node.Tag = yaml.MappingNode, "!!map"
	}
	for dec.More() {
		// In an object, keys and values take turns, as in a mapping node.
		child, err := jsonNode(dec)
		if err != nil {
			return nil, err
		}
		node.Content = append(node.Content, child)
	}
	_, err = dec.Token() // the closing delimiter
	return node, err
}
