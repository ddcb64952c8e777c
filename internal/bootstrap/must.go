package bootstrap

import (
	"fmt"
	"strconv"
	"strings"
)

// What the reference bootstrap has and a configuration of somebody's own may
// lack: README.md lists it. Envoy takes a configuration without it, so it is
// warned of.

// manager warns of what a connection manager with shunt in it lacks.
func (s *served) manager(n placed) {
	removes := false
	visit(n.below("early_header_mutation_extensions", "earlyHeaderMutationExtensions"), 0, func(n placed) bool {
		removes = removes || strings.EqualFold(field(n.Node, "remove").Value, destinationHeader)
		return !removes
	})
	if !removes {
		s.warn(n.path+".early_header_mutation_extensions", n.Line,
			"do not remove "+destinationHeader+": where shunt is disabled on a route, a client's own goes through to the cluster; shunt envoy-config prints them")
	}
	if n.below("stream_idle_timeout", "streamIdleTimeout").Kind == 0 {
		s.warn(n.path+".stream_idle_timeout", n.Line,
			"is missing: Envoy cuts a request that waits, or is in prefill, without a byte for 5 minutes; 3600s is what shunt envoy-config prints")
	}
	if s.body == 0 {
		return
	}
	for _, host := range items(n.below("route_config", "routeConfig").below("virtual_hosts", "virtualHosts")) {
		s.bodyLimit(host)
	}
}

// bodyLimit compares what Envoy buffers with what shunt reads: only the contrib
// door can't raise it.
func (s *served) bodyLimit(host placed) {
	names := []string{"request_body_buffer_limit", "requestBodyBufferLimit"}
	for _, route := range items(host.below("routes")) {
		if route.below(names...).Kind != 0 {
			return // somebody has thought of it
		}
	}
	limit := host.below(names...)
	what := "is missing"
	if limit.Kind != 0 {
		bytes, err := strconv.ParseInt(limit.Value, 10, 64)
		if err != nil || bytes > s.body {
			return
		}
		what = "is " + limit.Value
	} else {
		limit = placed{host.Node, host.path + ".request_body_buffer_limit"}
	}
	s.warn(limit.path, limit.Line, fmt.Sprintf("%s: above limits.requestBody, %d bytes, is wanted, or Envoy answers 413 before shunt has such a body", what, s.body))
}

// engines warns of what a route to the engines lacks, and the cluster it names.
func (s *served) engines(action, cluster placed) {
	if action.below("timeout").Kind == 0 {
		s.warn(action.path+".timeout", action.Line, "is missing: Envoy cuts an answer that takes longer than 15s; write timeout: 0s")
	}
	if s.judged[cluster.path] {
		return
	}
	s.judged[cluster.path] = true
	if cluster.below("circuit_breakers", "circuitBreakers").Kind == 0 {
		s.warn(cluster.path+".circuit_breakers", cluster.Line, "are missing: Envoy lets 1,024 requests through, for all engines together; shunt envoy-config prints 40,000")
	}
	idle := false
	visit(cluster, 0, func(n placed) bool {
		idle = idle || n.below("common_http_protocol_options", "commonHttpProtocolOptions").below("idle_timeout", "idleTimeout").Kind != 0
		return !idle
	})
	if !idle {
		s.warn(cluster.path+".typed_extension_protocol_options", cluster.Line,
			"have no idle_timeout in common_http_protocol_options: a request that is sent as an engine closes its idle connection is lost; uvicorn does after 5s, so 4s is wanted")
	}
}

// loaded warns of a module that Envoy may unload.
func (c *check) loaded(n placed) {
	module := n.below("dynamic_module_config", "dynamicModuleConfig")
	if field(module.Node, "do_not_close", "doNotClose").Value != "true" {
		c.warn(n.path+".dynamic_module_config.do_not_close", n.Line, "is not true: Envoy unloads the module with its last configuration, and a Go runtime can't be unloaded")
	}
}
