package bootstrap

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
)

// Report is what Check found in an Envoy configuration.
type Report struct {
	// Filters and Routes count the configs of shunt's in it.
	Filters, Routes int
	// Problems are reasons why Envoy or shunt would refuse it, or answer 503 on a
	// route; a path starts at the Envoy configuration's root.
	Problems config.Problems
	// Warnings are about what is legal and likely not meant.
	Warnings config.Problems
}

// IsEnvoy reports whether a document is Envoy's, a bootstrap or a listener or
// route file, and not shunt's own.
func IsEnvoy(document []byte) bool {
	var doc yaml.Node
	if yaml.Unmarshal(document, &doc) != nil || len(doc.Content) == 0 {
		return false
	}
	root := doc.Content[0]
	for _, key := range []string{"static_resources", "staticResources", "dynamic_resources", "dynamicResources", "admin", "resources"} {
		// shunt's own document has an admin too, but with an address that is text.
		if node := field(root, key); node.Kind != 0 && (key != "admin" || field(node, "address").Kind == yaml.MappingNode) {
			return true
		}
	}
	return false
}

// Check reads an Envoy configuration, YAML or JSON, and checks each config of
// shunt's in it: of the filters, of the files they name (read by readFile), and of
// routes, with the pools that these name; then that these hang on the filter's
// name, and that the clusters behind shunt read its header. It does not judge the
// rest: Envoy's own --mode validate does.
func Check(document []byte, readFile func(path string) (*config.Config, error)) (Report, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(document, &doc); err != nil {
		return Report{}, discovery.NotYAML(document, err)
	}
	if len(doc.Content) == 0 {
		return Report{}, errors.New("the document is empty")
	}
	c := &check{readFile: readFile, pools: map[string]bool{}, destinations: map[string]bool{}}
	visit(placed{doc.Content[0], ""}, 0, func(n placed) bool { return !c.known(n.Node, n.path) })
	if c.Filters == 0 && c.Routes == 0 {
		return Report{}, errors.New("no shunt filter in it: a DynamicModuleFilter with filter_name shunt, or a golang Config with plugin_name shunt, is wanted")
	}
	c.served(doc.Content[0])
	// Routes come before filters in a document as likely as after them.
	for _, route := range c.named {
		if c.Filters > 0 && !c.unknownPools && !c.pools[route.pool] {
			names := make([]string, 0, len(c.pools))
			for name := range c.pools {
				names = append(names, name)
			}
			slices.Sort(names)
			c.problem(route.path+".pool", route.line, "no filter config defines pool %q; there are: %s", route.pool, strings.Join(names, ", "))
		}
	}
	return c.Report, nil
}

type check struct {
	Report
	readFile func(path string) (*config.Config, error)
	pools    map[string]bool
	// unknownPools says that a filter's config is broken, so that its pools are
	// unknown and routes can't be judged.
	unknownPools bool
	named        []namedPool
	destinations map[string]bool // of the filters
	body         int64           // the most that limits.requestBody is, of filters of the contrib door
}

type namedPool struct {
	path, pool string
	line       int
}

const (
	typePrefix       = "type.googleapis.com/"
	typeModule       = "envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter"
	typeModuleRoute  = "envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilterPerRoute"
	typeContrib      = "envoy.extensions.filters.http.golang.v3alpha.Config"
	typeContribRoute = "envoy.extensions.filters.http.golang.v3alpha.ConfigsPerRoute"
)

// maxDepth is far above what an Envoy configuration nests.
const maxDepth = 200

func (c *check) problem(path string, line int, format string, args ...any) {
	c.Problems = append(c.Problems, config.Problem{Path: path, Line: line, Message: fmt.Sprintf(format, args...)})
}

func (c *check) warn(path string, line int, message string) {
	c.Warnings = append(c.Warnings, config.Problem{Path: path, Line: line, Message: message})
}

// known checks a mapping if it is a config of shunt's, and reports whether n is one.
func (c *check) known(n *yaml.Node, path string) bool {
	switch strings.TrimPrefix(field(n, "@type").Value, typePrefix) {
	case typeModule:
		document := field(n, "filter_config", "filterConfig")
		switch field(n, "filter_name", "filterName").Value {
		case "shunt":
			text, _, err := packed(document, "google.protobuf.Struct")
			c.filter(text, err, document.Line, path+".filter_config")
			return true
		case HostGolanghost:
			text, err := hosted(document)
			c.filter(text, err, document.Line, path+".filter_config")
			return true
		}
	case typeModuleRoute:
		if !isRoute(n) {
			return false
		}
		document := field(n, "filter_config", "filterConfig")
		text, asStruct, err := routeText(n)
		if asStruct {
			c.warn(path+".filter_config", document.Line,
				"Envoy 1.38 hands over a route's Struct as raw bytes: write a google.protobuf.StringValue, which works everywhere")
		}
		c.route(text, err, document.Line, path+".filter_config")
		return true
	case typeContrib:
		return c.contrib(n, path)
	case typeContribRoute:
		if !isRoute(n) {
			return false
		}
		plugin := field(field(n, "plugins_config", "pluginsConfig"), "shunt")
		path += ".plugins_config.shunt"
		if field(plugin, "disabled").Kind != 0 {
			c.problem(path+".disabled", plugin.Line,
				"does nothing in Envoy: write an envoy.config.route.v3.FilterConfig with disabled: true, or disabled: true in shunt's own config")
		}
		text, _, err := routeText(n)
		c.route(text, err, field(plugin, "config").Line, path+".config")
		return true
	}
	return false
}

// contrib checks the config of a golang filter. Of a library of ours it must
// name the plugin, since Envoy would only log what it doesn't find.
func (c *check) contrib(n *yaml.Node, path string) bool {
	name, library := field(n, "plugin_name", "pluginName"), field(n, "library_path", "libraryPath").Value
	if name.Value != "shunt" {
		if !oursByPath(n) {
			return false
		}
		c.Filters++
		c.unknownPools = true
		c.problem(path+".plugin_name", name.Line, "is %q: %s has only the plugin shunt, and Envoy lets requests pass a plugin it doesn't find", name.Value, library)
		return true
	}
	if library == "" || field(n, "library_id", "libraryId").Value == "" {
		c.problem(path, n.Line, "library_id and library_path are required")
	}
	document := field(n, "plugin_config", "pluginConfig")
	text, _, err := packed(document, "xds.type.v3.TypedStruct")
	if cfg := c.filter(text, err, document.Line, path+".plugin_config"); cfg != nil {
		c.body = max(c.body, int64(cfg.Limits.RequestBody))
	}
	return true
}

// oursByPath reports whether a golang filter loads a library of ours.
func oursByPath(n *yaml.Node) bool {
	return strings.Contains(filepath.Base(field(n, "library_path", "libraryPath").Value), "shunt")
}

// routeName is what the module is asked for by a route's config.
func routeName(n *yaml.Node) string {
	return field(n, "filter_name", "filterName", "per_route_config_name", "perRouteConfigName").Value
}

// filter checks the document of a filter, and returns what it says, nil if it is
// broken; err says why there is none.
func (c *check) filter(text []byte, err error, line int, path string) *config.Config {
	c.Filters++
	if err != nil {
		c.unknownPools = true
		c.problem(path, line, "%v", err)
		return nil
	}
	cfg, err := config.Parse(text)
	if err == nil && cfg.ConfigFile != "" {
		path += ".configFile(" + cfg.ConfigFile + ")"
		cfg, err = c.readFile(cfg.ConfigFile)
		line = 0
	}
	if err != nil {
		c.unknownPools = true
		c.add(path, line, err)
		return nil
	}
	for _, name := range cfg.Pools.Names() {
		c.pools[name] = true
	}
	c.destinations[cfg.Destination] = true
	problems, warnings := CheckEndpoints(cfg)
	c.add(path, line, problems)
	for _, w := range slices.Concat(warnings, CheckFlow(cfg)) {
		c.warn(path+": "+w.Path, line, w.Message)
	}
	return cfg
}

// route checks the document of a route; err says why there is none.
func (c *check) route(text []byte, err error, line int, path string) {
	c.Routes++
	if err != nil {
		c.problem(path, line, "%v", err)
		return
	}
	route, err := config.ParseRoute(text)
	if err != nil {
		c.add(path, line, err)
		return
	}
	if route.Pool != "" {
		c.named = append(c.named, namedPool{path, route.Pool, line})
	}
}

// add puts the problems of an embedded document below its own place. Their lines
// count from that document's start, so the place's line stands in, if it has one:
// a place in another file has none.
func (c *check) add(path string, line int, err error) {
	var problems config.Problems
	if !errors.As(err, &problems) {
		c.problem(path, line, "%v", err)
		return
	}
	for _, p := range problems {
		at := path
		if p.Path != "" {
			at += ": " + p.Path
		}
		c.problem(at, cmp.Or(line, p.Line), "%s", p.Message)
	}
}

// packed is the text that Envoy hands over for an Any: of a StringValue, or of the
// type that holds a Struct where it is written.
func packed(n *yaml.Node, structType string) (text []byte, asStruct bool, err error) {
	if n.Kind == 0 {
		return nil, false, nil
	}
	value := field(n, "value")
	switch kind := strings.TrimPrefix(field(n, "@type").Value, typePrefix); kind {
	case "google.protobuf.StringValue":
		return []byte(value.Value), false, nil
	case structType:
		var tree any
		if err := value.Decode(&tree); err != nil {
			return nil, true, err
		}
		text, err = json.Marshal(tree)
		return text, true, err
	default:
		return nil, false, fmt.Errorf("is a %q: %s or google.protobuf.StringValue is wanted", kind, structType)
	}
}

// hosted is the text that the plugin gets under golanghost.
func hosted(n *yaml.Node) ([]byte, error) {
	text, _, err := packed(n, "google.protobuf.Struct")
	if err != nil {
		return nil, err
	}
	var settings struct {
		PluginConfig string `yaml:"plugin_config"`
	}
	if err := yaml.Unmarshal(text, &settings); err != nil {
		return nil, fmt.Errorf("is not what golanghost reads: %w", err)
	}
	if text, err = unpackConfig(settings.PluginConfig); err != nil {
		return nil, fmt.Errorf("plugin_config %w", err)
	}
	return text, nil
}

// field returns the value under the first of the names that a mapping has, or an
// empty node.
func field(n *yaml.Node, names ...string) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind == yaml.MappingNode {
		for _, name := range names {
			for i := 0; i+1 < len(n.Content); i += 2 {
				if n.Content[i].Value == name {
					if v := n.Content[i+1]; v.Kind == yaml.AliasNode {
						return v.Alias
					}
					return n.Content[i+1]
				}
			}
		}
	}
	return &yaml.Node{}
}
