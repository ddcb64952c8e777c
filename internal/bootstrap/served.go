package bootstrap

import (
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/internal/config"
)

// destinationHeader is where shunt writes the picked endpoint.
const destinationHeader = "x-gateway-destination-endpoint"

const (
	typeExtension   = "envoy.config.core.v3.TypedExtensionConfig"
	typeFilterState = "envoy.config.route.v3.FilterConfig"
	typeManager     = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
	typeUpstream    = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
)

// served checks what shunt's configs hang on in Envoy's: that the key of a
// route's config is a filter's name, and that the cluster behind shunt reads what
// it writes. What comes from a control plane is unknown, and passes.
type served struct {
	*check
	// names are those that a shunt filter has, or may have, in a chain.
	names    []string
	clusters map[string]placed
	// told are the clusters whose problem is reported, judged those that engines
	// has looked at, by path.
	told, judged map[string]bool
}

// placed is a node with its path.
type placed struct {
	*yaml.Node
	path string
}

func (c *check) served(root *yaml.Node) {
	s := &served{check: c, clusters: map[string]placed{}, told: map[string]bool{}, judged: map[string]bool{}}
	for _, cluster := range items(placed{root, ""}.below("static_resources", "staticResources").below("clusters")) {
		s.clusters[field(cluster.Node, "name").Value] = cluster
	}
	visit(placed{root, ""}, 0, func(n placed) bool {
		if n.kind() == typeExtension && holds(n.Node, isFilter) {
			s.names = append(s.names, field(n.Node, "name").Value)
		}
		for _, item := range items(n.below("http_filters", "httpFilters")) {
			// What arrives by extension discovery may be shunt.
			if field(item.Node, "config_discovery", "configDiscovery").Kind != 0 || holds(item.Node, isFilter) {
				s.names = append(s.names, field(item.Node, "name").Value)
			}
		}
		return true
	})
	slices.Sort(s.names)
	s.names = slices.Compact(s.names)
	visit(placed{root, ""}, 0, func(n placed) bool {
		s.keys(n.below("typed_per_filter_config", "typedPerFilterConfig"))
		s.chain(n)
		if n.kind() == typeModule && isFilter(n.Node) || n.kind() == typeModuleRoute && isRoute(n.Node) {
			s.loaded(n)
		}
		for _, item := range items(n.below("http_filters", "httpFilters")) {
			if isFilter(field(item.Node, "typed_config", "typedConfig")) && field(item.Node, "disabled").Value != "true" {
				if n.kind() == typeManager {
					s.manager(n)
				}
				s.routes(n.below("route_config", "routeConfig"), field(item.Node, "name").Value)
			}
		}
		return true
	})
}

// chain checks where shunt stands in the filter chains of n.
func (s *served) chain(n placed) {
	upstream := items(n.below("upstream_http_filters", "upstreamHttpFilters"))
	chain := items(n.below("http_filters", "httpFilters"))
	if n.kind() == typeUpstream {
		upstream, chain = chain, nil
	}
	active := func(item placed) bool {
		return isFilter(field(item.Node, "typed_config", "typedConfig")) && field(item.Node, "disabled").Value != "true"
	}
	for _, item := range upstream {
		if active(item) {
			s.warn(item.path, item.Line, "shunt is in an upstream filter chain: Envoy has chosen the host by then, and what shunt picks is not used; it belongs before the router")
		}
	}
	first := ""
	for _, item := range chain {
		switch {
		case !active(item):
		case first == "":
			first = item.path
		default:
			s.warn(item.path, item.Line, "shunt is in this chain twice (see "+first+"): unless routes disable one of them, each request is picked for and takes a slot twice")
		}
	}
}

// keys checks the keys of one typed_per_filter_config.
func (s *served) keys(n placed) {
	if n.Kind != yaml.MappingNode || len(s.names) == 0 {
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if key := n.Content[i]; !slices.Contains(s.names, key.Value) && holds(n.Content[i+1], isRoute) {
			s.problem(n.path+"."+key.Value, key.Line, "no filter of shunt's has the name %q, so Envoy ignores this: the key is the filter's name, here %s",
				key.Value, strings.Join(s.names, ", "))
		}
	}
}

// routes checks the clusters of the static routes behind the filter of that name.
func (s *served) routes(config placed, filter string) {
	off := disabled(config.Node, filter, false)
	for _, host := range items(config.below("virtual_hosts", "virtualHosts")) {
		off := disabled(host.Node, filter, off)
		for _, route := range items(host.below("routes")) {
			off := disabled(route.Node, filter, off)
			action := route.below("route")
			s.cluster(action, action.below("cluster"), off)
			for _, weighted := range items(action.below("weighted_clusters", "weightedClusters").below("clusters")) {
				s.cluster(action, weighted.below("name"), disabled(weighted.Node, filter, off))
			}
		}
	}
}

// cluster checks the cluster that a route names; off says that shunt is disabled
// on that route.
func (s *served) cluster(action, name placed, off bool) {
	cluster, ok := s.clusters[name.Value]
	if name.Kind == 0 || !ok {
		return
	}
	kind := field(cluster.Node, "type").Value
	original := kind == "ORIGINAL_DST" || kind == "4"
	lb := cluster.below("original_dst_lb_config", "originalDstLbConfig")
	header := field(lb.Node, "http_header_name", "httpHeaderName").Value
	reads := original && field(lb.Node, "use_http_header", "useHttpHeader").Value == "true" && strings.EqualFold(header, destinationHeader)
	lists := (kind == "EDS" || kind == "3") && holds(cluster.Node, isOverrideHost)
	if !off && (reads || lists) {
		s.engines(action, cluster)
	}
	only := func(destination string) bool { return len(s.destinations) == 1 && s.destinations[destination] }
	switch {
	case !off && reads && only(config.DestinationEDS):
		s.warn(name.path, name.Line, "cluster "+name.Value+" is an ORIGINAL_DST cluster, but destination is eds: it can't read a list, and a retry goes to the same endpoint")
	case !off && lists && only(config.DestinationOriginalDst):
		s.warn(name.path, name.Line, "cluster "+name.Value+" is an EDS cluster, but destination is original_dst: shunt keeps no file of endpoints for it")
	case lists:
	case off && reads:
		s.warn(name.path, name.Line, "shunt is disabled here, and cluster "+name.Value+" answers 503 without its header: name another cluster")
	case off || reads:
	case !original:
		s.warn(name.path, name.Line, "cluster "+name.Value+" is no ORIGINAL_DST cluster: it chooses by itself, and what shunt picks is not used")
	case !s.told[name.Value]:
		s.told[name.Value] = true
		line := lb.Line
		if lb.Kind == 0 {
			lb.path, line = cluster.path+".original_dst_lb_config", cluster.Line
		}
		s.problem(lb.path, line, "the cluster does not go where shunt says (see %s): write {use_http_header: true, http_header_name: %s}", name.path, destinationHeader)
	}
}

func isOverrideHost(n *yaml.Node) bool {
	return strings.TrimPrefix(field(n, "@type").Value, typePrefix) == "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
}

// disabled reports whether the filter is disabled at a level of the routes, given
// what holds above it: the most specific config counts alone.
func disabled(n *yaml.Node, filter string, above bool) bool {
	own := field(field(n, "typed_per_filter_config", "typedPerFilterConfig"), filter)
	if own.Kind == 0 {
		return above
	}
	if (placed{Node: own}).kind() == typeFilterState {
		if field(own, "disabled").Value == "true" {
			return true
		}
		own = field(own, "config")
	}
	if !isRoute(own) {
		return false
	}
	text, _, err := routeText(own)
	if err != nil {
		return false // reported where it stands
	}
	route, err := config.ParseRoute(text)
	return err == nil && route.Disabled
}

// isFilter reports whether n is a filter's config of shunt's.
func isFilter(n *yaml.Node) bool {
	switch (placed{Node: n}).kind() {
	case typeModule:
		name := field(n, "filter_name", "filterName").Value
		return name == "shunt" || name == HostGolanghost
	case typeContrib:
		return field(n, "plugin_name", "pluginName").Value == "shunt" || oursByPath(n)
	}
	return false
}

// isRoute reports whether n is a route's config of shunt's.
func isRoute(n *yaml.Node) bool {
	switch (placed{Node: n}).kind() {
	case typeModuleRoute:
		name := routeName(n)
		return name == "shunt" || name == HostGolanghost
	case typeContribRoute:
		return field(field(n, "plugins_config", "pluginsConfig"), "shunt").Kind != 0
	}
	return false
}

// routeText is the document in a route's config of shunt's.
func routeText(n *yaml.Node) (text []byte, asStruct bool, err error) {
	if (placed{Node: n}).kind() == typeContribRoute {
		return packed(field(field(field(n, "plugins_config", "pluginsConfig"), "shunt"), "config"), "xds.type.v3.TypedStruct")
	}
	document := field(n, "filter_config", "filterConfig")
	if routeName(n) == HostGolanghost {
		text, err = hosted(document)
		return text, false, err
	}
	return packed(document, "google.protobuf.Struct")
}

// holds reports whether a node of that kind is in n.
func holds(n *yaml.Node, is func(*yaml.Node) bool) bool {
	found := false
	visit(placed{n, ""}, 0, func(n placed) bool {
		found = found || is(n.Node)
		return !found
	})
	return found
}

// visit calls f for each mapping, and goes below those for which it is true.
func visit(n placed, depth int, f func(placed) bool) {
	if n.Kind == yaml.AliasNode {
		n.Node = n.Alias
	}
	if depth > maxDepth || n.Kind == yaml.MappingNode && !f(n) {
		return
	}
	for _, item := range items(n) {
		visit(item, depth+1, f)
	}
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			visit(placed{n.Content[i+1], joined(n.path, n.Content[i].Value)}, depth+1, f)
		}
	}
}

func (n placed) kind() string { return strings.TrimPrefix(field(n.Node, "@type").Value, typePrefix) }

// below is the field under the first of the names that n has, or an empty node.
func (n placed) below(names ...string) placed {
	for _, name := range names {
		if v := field(n.Node, name); v.Kind != 0 {
			return placed{v, joined(n.path, name)}
		}
	}
	return placed{&yaml.Node{}, n.path}
}

func joined(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// items are those of a list.
func items(n placed) []placed {
	if n.Kind != yaml.SequenceNode {
		return nil
	}
	list := make([]placed, len(n.Content))
	for i, item := range n.Content {
		if item.Kind == yaml.AliasNode {
			item = item.Alias
		}
		list[i] = placed{item, n.path + "[" + strconv.Itoa(i) + "]"}
	}
	return list
}
