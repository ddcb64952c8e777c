package e2e

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/internal/bootstrap"
)

// door is one way to load shunt into Envoy, and all that differs between them.
type door struct {
	name   string // of the tests
	door   string // bootstrap.Options.Door
	host   string // bootstrap.Options.Host
	envoy  string // Envoy's binary; empty is the one of the suite
	module string // the file with shunt in it
	main   string // the Go package it is built from

	// errorLines are patterns of what Envoy says at error level beside shunt's
	// own line when a configuration is refused.
	errorLines []string
	// raisesLimit: bodies up to limits.requestBody pass whatever Envoy's own
	// buffer limits are.
	raisesLimit bool
	// envoys413 is the code in the 413 for a body without content-length that
	// outgrows request_body_buffer_limit too. Empty: it is shunt's, which comes
	// as soon as limits.requestBody is passed, not once the body is whole.
	envoys413 string
	// unknownPool is the error line about a route of the bootstrap whose pool,
	// nobody, isn't defined, and unknownPoolReply what its requests are told.
	// lateRoutes: Envoy reads such a route at its first request.
	unknownPool, unknownPoolReply string
	lateRoutes                    bool
	// config is where a bootstrap has shunt's config: the object and its field.
	config func(b doc) (doc, string)
	// encode is shunt's config, YAML on one line, as that field's value; nil
	// takes it as it is.
	encode func(config string) (string, error)
	// perRoute wraps shunt's config of one route for typed_per_filter_config.
	perRoute func(config string) string
}

// doors are those that every test runs through. ENVOY_CONTRIB names a contrib
// Envoy for the last of them.
func doors() []door {
	const (
		contrib413       = "request_payload_too_large"
		contribPool      = `route configuration refused: pool: "nobody" is defined by no configuration; defined: default, other`
		contribPoolReply = "the route's configuration was refused; see the log"
	)
	contribLines := []string{`failed to parse (golang )?plugin config: `}
	all := []door{{
		name: "stock", door: bootstrap.DoorStock, module: "libshunt.so", main: "./build/libshunt",
		raisesLimit: true, unknownPool: `a route names pool "nobody", which no configuration defines \(defined: default, other\)`,
		unknownPoolReply: "the route names pool nobody, which no configuration defines",
		config:           func(b doc) (doc, string) { return b.filter().at("filter_config").(doc), "value" },
		perRoute:         func(config string) string { return modulePerRoute("shunt", config) },
	}, {
		name: "contrib", door: bootstrap.DoorContrib, host: bootstrap.HostGolanghost,
		module: "libshunt_contrib.so", main: "./build/libshunt_contrib",
		errorLines: contribLines, envoys413: contrib413,
		unknownPool: contribPool, unknownPoolReply: contribPoolReply, lateRoutes: true,
		config: func(b doc) (doc, string) { return b.filter().at("filter_config", "value").(doc), "plugin_config" },
		encode: func(config string) (string, error) {
			return bootstrap.PackConfig(`{"@type": type.googleapis.com/xds.type.v3.TypedStruct, value: ` + config + "}")
		},
		perRoute: func(config string) string {
			packed, err := bootstrap.PackConfig(`{"@type": type.googleapis.com/google.protobuf.StringValue, value: '` + config + `'}`)
			if err != nil {
				panic(err) // of a test's own text
			}
			return modulePerRoute("golanghost", `{"plugin_name": "shunt", "plugin_config": "`+packed+`"}`)
		},
	}}
	if path := os.Getenv("ENVOY_CONTRIB"); path != "" {
		all = append(all, door{
			name: "contrib-envoy", door: bootstrap.DoorContrib, host: bootstrap.HostContrib, envoy: path,
			module: "libshunt_contrib.so", main: "./build/libshunt_contrib",
			errorLines: contribLines, envoys413: contrib413,
			unknownPool: contribPool, unknownPoolReply: contribPoolReply, lateRoutes: true,
			config: func(b doc) (doc, string) { return b.filter().at("plugin_config").(doc), "value" },
			perRoute: func(config string) string {
				return `
"@type": type.googleapis.com/envoy.extensions.filters.http.golang.v3alpha.ConfigsPerRoute
plugins_config: {shunt: {config: {"@type": type.googleapis.com/google.protobuf.StringValue, value: '` + config + `'}}}`
			},
		})
	}
	return slices.DeleteFunc(all, func(d door) bool { return *doorFlag != "" && d.name != *doorFlag })
}

// filterName is the HTTP filter's in the reference bootstrap.
const filterName = "shunt"

// modulePerRoute loads by name and not by path, which Envoy 1.38 refuses here.
func modulePerRoute(module, config string) string {
	return `
"@type": type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilterPerRoute
dynamic_module_config: {name: ` + module + `, do_not_close: true}
filter_name: ` + module + `
filter_config: {"@type": type.googleapis.com/google.protobuf.StringValue, value: '` + config + `'}`
}

// eachDoor runs a test through one door after the other: for those that load
// the machine, or in which a figure that is late becomes stale.
func eachDoor(t *testing.T, f func(t *testing.T, d door)) {
	for _, d := range doors() {
		t.Run(d.name, func(t *testing.T) { f(t, d) })
	}
}

// allDoorsAtOnce runs a test through all doors at the same time, beside other
// tests that do (-parallel says how many): each has an Envoy and engines of its
// own. It must be the last thing that a test does, and what comes before it may
// be long past when f runs.
func allDoorsAtOnce(t *testing.T, f func(t *testing.T, d door)) {
	t.Parallel()
	for _, d := range doors() {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			f(t, d)
		})
	}
}

// withConfig changes what render makes, a bootstrap or a listener, so that
// shunt's config in it is this YAML as an operator would have written it. It
// must be on one line.
func (w *world) withConfig(t *testing.T, render func() []byte, config string) []byte {
	t.Helper()
	const mark = "shunt's config goes here"
	w.setup.edit = func(b doc) {
		object, field := w.d.config(b)
		object[field] = mark
	}
	defer func() { w.setup.edit = nil }()
	text := string(render())
	if strings.Count(text, mark) != 1 {
		t.Fatal("the place of shunt's config is not found")
	}
	if w.d.encode != nil {
		var err error
		if config, err = w.d.encode(config); err != nil {
			t.Fatal(err)
		}
	}
	return []byte(strings.Replace(text, mark, config, 1))
}

// oneLine is a YAML document on one line.
func oneLine(t *testing.T, document string) string {
	t.Helper()
	var tree doc
	if err := yaml.Unmarshal([]byte(document), &tree); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// route is an item of bootstrap.Options.ExtraRoutes: requests to path go to
// cluster with shunt's config, YAML on one line, for that route.
func (d door) route(path, cluster, config string) string {
	return routeWith(path, cluster, d.perRoute(config))
}

// bypassed is a route on which Envoy doesn't run shunt.
func (d door) bypassed(path, cluster string) string {
	return routeWith(path, cluster, `
"@type": type.googleapis.com/envoy.config.route.v3.FilterConfig
disabled: true`)
}

func routeWith(path, cluster, config string) string {
	return `- match: {prefix: ` + path + `}
  route: {cluster: ` + cluster + `, timeout: 0s}
  typed_per_filter_config:
    ` + filterName + `:` + strings.ReplaceAll(config, "\n", "\n      ") + "\n"
}
