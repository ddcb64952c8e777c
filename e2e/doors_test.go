package e2e

import (
	"strings"
	"testing"
)

// door is one way to load shunt into Envoy, and all that differs between them.
type door struct {
	name   string // as in bootstrap.Options.Door
	module string // the file that Envoy loads
	main   string // the Go package it is built from
	filter string // the HTTP filter's name in the reference bootstrap

	// grpcDetails: a gRPC reply carries response_code_details. The stock door
	// makes it of headers alone, which have no place for details.
	grpcDetails bool
	// raisesLimit: bodies up to limits.requestBody pass whatever Envoy's own
	// buffer limits are.
	raisesLimit bool
	// filterConfig finds the Struct of shunt's config in a bootstrap.
	filterConfig func(b doc) doc
	// perRoute wraps shunt's config of one route for typed_per_filter_config.
	perRoute func(config string) string
}

// doors are those that every test runs through.
func doors() []door {
	return []door{{
		name: "stock", module: "libshunt.so", main: "./build/libshunt", filter: "shunt",
		raisesLimit:  true,
		filterConfig: func(b doc) doc { return b.hcm().at("http_filters", 0, "typed_config", "filter_config").(doc) },
		perRoute: func(config string) string {
			// By name and not by path, which Envoy 1.38 refuses here.
			return `
"@type": type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilterPerRoute
dynamic_module_config: {name: shunt, do_not_close: true}
filter_name: shunt
filter_config: {"@type": type.googleapis.com/google.protobuf.StringValue, value: '` + config + `'}`
		},
	}}
}

// eachDoor runs a test once a door.
func eachDoor(t *testing.T, f func(t *testing.T, d door)) {
	for _, d := range doors() {
		t.Run(d.name, func(t *testing.T) { f(t, d) })
	}
}

// route is an item of bootstrap.Options.ExtraRoutes: requests to path go to
// cluster with shunt's config, YAML on one line, for that route.
func (d door) route(path, cluster, config string) string {
	return routeWith(path, cluster, d.filter, d.perRoute(config))
}

// bypassed is a route on which Envoy doesn't run shunt.
func (d door) bypassed(path, cluster string) string {
	return routeWith(path, cluster, d.filter, `
"@type": type.googleapis.com/envoy.config.route.v3.FilterConfig
disabled: true`)
}

func routeWith(path, cluster, filter, config string) string {
	return `- match: {prefix: ` + path + `}
  route: {cluster: ` + cluster + `, timeout: 0s}
  typed_per_filter_config:
    ` + filter + `:` + strings.ReplaceAll(config, "\n", "\n      ") + "\n"
}
