package bootstrap

import (
	"fmt"

	"github.com/shuntproxy/shunt/internal/config"
)

// RouteConfig returns an entry of typed_per_filter_config, without indentation:
// the name of the filter and shunt's config for the route, as YAML. Of the
// options Door, Host, Module and HostModule count. The error is a config.Problems
// where the document is at fault.
func RouteConfig(o Options, document string) (filter, text string, err error) {
	if _, err := config.ParseRoute([]byte(document)); err != nil {
		return "", "", err
	}
	v := view{Options: o}
	if err := v.chooseDoor(); err != nil {
		return "", "", err
	}
	value, err := quote(document)
	if err != nil {
		return "", "", err
	}
	asText := typeLine("google.protobuf.StringValue") + "value: " + value
	switch {
	case v.Host == HostContrib:
		return filterName, typeLine(typeContribRoute) +
			"plugins_config:\n  shunt:\n    config:\n      " + indent(6, asText) + "\n", nil
	case v.Host == HostGolanghost:
		packed, err := packConfig(asText)
		if err != nil {
			return "", "", err
		}
		text, err := moduleRoute(v.HostModule, HostGolanghost, fmt.Sprintf(`{"plugin_name": "shunt", "plugin_config": %q}`, packed))
		return filterName, text, err
	default:
		text, err := moduleRoute(v.Module, "shunt", document)
		return filterName, text, err
	}
}

// filterName is the filter's in the chain, and with that the key of
// typed_per_filter_config: Envoy finds a route's config by it.
const filterName = "shunt"

func moduleRoute(file, name, document string) (string, error) {
	load := "name: " + name
	if file != "" {
		path, err := quote(file)
		if err != nil {
			return "", err
		}
		load = "module: {local: {filename: " + path + "}}"
	}
	value, err := quote(document)
	return typeLine(typeModuleRoute) + "dynamic_module_config: {" + load + ", do_not_close: true}\n" +
		"filter_name: " + name + "\nfilter_config:\n  " +
		indent(2, typeLine("google.protobuf.StringValue")+"value: "+value) + "\n", err
}
