package bootstrap

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"strconv"

	xds "github.com/cncf/xds/go/xds/type/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// PackConfig reads an Any in YAML as Envoy does, and returns it serialized, in
// base64, as golanghost takes plugin_config.
func PackConfig(text string) (string, error) { return packConfig(text) }

func packConfig(text string) (string, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		return "", err
	}
	value := field(doc.Content[0], "value")
	var message proto.Message
	switch kind := field(doc.Content[0], "@type").Value; kind {
	case typePrefix + "google.protobuf.StringValue":
		message = wrapperspb.String(value.Value)
	case typePrefix + "xds.type.v3.TypedStruct":
		tree, err := envoyValue(value)
		if err != nil {
			return "", err
		}
		message = &xds.TypedStruct{Value: tree.GetStructValue()}
	default:
		return "", fmt.Errorf("%q is no type for plugin_config", kind)
	}
	var packed anypb.Any
	deterministic := proto.MarshalOptions{Deterministic: true}
	if err := anypb.MarshalFrom(&packed, message, deterministic); err != nil {
		return "", err
	}
	data, err := deterministic.Marshal(&packed)
	return base64.StdEncoding.EncodeToString(data), err
}

// envoyValue is a value of a Struct as Envoy's YAML loader makes it: of the
// numbers it keeps integers below 2^32, and turns the others into strings; the
// words of YAML 1.1 are booleans.
func envoyValue(n *yaml.Node) (*structpb.Value, error) {
	switch n.Kind {
	case yaml.AliasNode:
		return envoyValue(n.Alias)
	case yaml.MappingNode:
		fields := make(map[string]*structpb.Value, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			value, err := envoyValue(n.Content[i+1])
			if err != nil {
				return nil, err
			}
			fields[n.Content[i].Value] = value
		}
		return structpb.NewStructValue(&structpb.Struct{Fields: fields}), nil
	case yaml.SequenceNode:
		items := make([]*structpb.Value, len(n.Content))
		for i, item := range n.Content {
			value, err := envoyValue(item)
			if err != nil {
				return nil, err
			}
			items[i] = value
		}
		return structpb.NewListValue(&structpb.ListValue{Values: items}), nil
	}
	if n.Style == 0 && n.Tag == "!!str" { // without quotes
		switch n.Value {
		case "y", "Y", "yes", "Yes", "YES", "on", "On", "ON":
			return structpb.NewBoolValue(true), nil
		case "n", "N", "no", "No", "NO", "off", "Off", "OFF":
			return structpb.NewBoolValue(false), nil
		}
	}
	switch n.Tag {
	case "!!null":
		return structpb.NewNullValue(), nil
	case "!!bool":
		value, err := strconv.ParseBool(n.Value)
		return structpb.NewBoolValue(value), err
	case "!!int":
		if value, err := strconv.ParseInt(n.Value, 0, 64); err == nil && value >= math.MinInt32 && value <= math.MaxUint32 {
			return structpb.NewNumberValue(float64(value)), nil
		}
	}
	return structpb.NewStringValue(n.Value), nil
}

// unpackConfig is the reverse: the text that the plugin makes of a serialized Any.
func unpackConfig(encoded string) ([]byte, error) {
	data, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, errors.New("is not base64")
	}
	var packed anypb.Any
	if err := proto.Unmarshal(data, &packed); err != nil {
		return nil, errors.New("is no serialized google.protobuf.Any")
	}
	message, err := packed.UnmarshalNew()
	if err != nil {
		return nil, err
	}
	switch m := message.(type) {
	case *wrapperspb.StringValue:
		return []byte(m.GetValue()), nil
	case *xds.TypedStruct:
		return protojson.Marshal(m.GetValue())
	default:
		return nil, fmt.Errorf("has the type %q; valid: xds.type.v3.TypedStruct, google.protobuf.StringValue", packed.GetTypeUrl())
	}
}
