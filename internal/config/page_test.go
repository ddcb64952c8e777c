package config

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"strings"
	"testing"
)

const pageFile = "../../docs/configuration.md"

const pageHead = `# Configuration

<!-- Generated from internal/config/config.go: go test ./internal/config -update -->

One YAML or JSON document, in the filter's configuration in Envoy, or in a file that it names with ` + "`configFile`" + `. Unknown
fields are refused, and every mistake is reported at once with its path: ` + "`shunt check FILE`" + ` does the same without
Envoy. Durations are Go's (` + "`1s`, `250ms`" + `), sizes are bytes or ` + "`4MiB`, `1GB`" + `. Numbers may be decimal strings, because
Envoy's YAML loader makes strings of some. The JSON Schema is [config.schema.json](config.schema.json).

A change of Envoy's own configuration makes a new filter configuration, and Envoy keeps the old one for its drain time. A
change of the file behind ` + "`configFile`" + ` applies at once and cuts no stream; a broken one is logged, counted in
` + "`shunt_config_reloads_total{result=\"refused\"}`" + ` and leaves the last good one in use. Endpoints keep their live load and
readings through both.

`

const pageRoute = `## Per route

The configuration of a route, a virtual host or a weighted cluster. Write it as a ` + "`google.protobuf.StringValue`" + ` that holds
YAML: Envoy 1.38 hands a Struct over in a form that can't be read. A pool's name is checked as soon as a filter
configuration is live; Envoy builds static routes earlier, so there a wrong name is logged at error level and the route
answers 503 ` + "`rejected-no-endpoints`. `shunt check`" + ` on the whole bootstrap refuses it.

Envoy finds it by the filter's ` + "`name`" + ` in the filter chain, which is the key here: under another key it does nothing, and
nobody says so but ` + "`shunt check`" + `. ` + "`shunt envoy-config`" + ` names the filter ` + "`shunt`" + `.

` + "```yaml" + `
typed_per_filter_config:
  shunt:
    "@type": type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilterPerRoute
    dynamic_module_config: {name: shunt, do_not_close: true}
    filter_name: shunt
    filter_config: {"@type": type.googleapis.com/google.protobuf.StringValue, value: "policy: random"}
` + "```" + `

` + "`name: shunt`" + ` makes Envoy look for the file ` + "`libshunt.so`" + ` in the folder that its environment variable
` + "`ENVOY_DYNAMIC_MODULES_SEARCH_PATH`" + ` names, else in its working directory: start it with
` + "`ENVOY_DYNAMIC_MODULES_SEARCH_PATH=/opt/shunt envoy -c …`" + `. From 1.39 on the path can be here instead, as in the filter:
` + "`dynamic_module_config: {module: {local: {filename: /opt/shunt/libshunt.so}}, do_not_close: true}`" + `. 1.38 refuses that in routes.
The contrib door's form is in [doors.md](doors.md#per-route).

`

// page renders the structs' fields and comments.
func page(t *testing.T) []byte {
	t.Helper()
	structs := make(map[string]*ast.StructType)
	for _, name := range []string{"config.go", "policy.go", "flow.go", "sources.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.TypeSpec); ok {
				if s, ok := spec.Type.(*ast.StructType); ok {
					structs[spec.Name.Name] = s
				}
			}
			return true
		})
	}
	var out bytes.Buffer
	var fields func(name, path string)
	fields = func(name, path string) {
		s, ok := structs[name]
		if !ok {
			t.Fatalf("no struct %s", name)
		}
		for _, f := range s.Fields.List {
			key, _, _ := strings.Cut(reflect.StructTag(strings.Trim(f.Tag.Value, "`")).Get("json"), ",")
			if key == "-" {
				continue
			}
			comment := strings.Join(strings.Fields(f.Doc.Text()), " ")
			if comment == "" {
				t.Errorf("%s.%s has no comment", name, f.Names[0].Name)
			}
			out.WriteString("- **`" + path + key + "`** " + comment + "\n")
			switch typ := f.Type.(type) {
			case *ast.Ident:
				switch {
				case typ.Name == "Policy":
					fields("PolicyPart", path+key+"[].")
				case typ.Name == "Pools":
					fields("Pool", path+key+".NAME.")
				case structs[typ.Name] != nil:
					fields(typ.Name, path+key+".")
				}
			case *ast.StarExpr:
				fields(typ.X.(*ast.Ident).Name, path+key+".")
			case *ast.ArrayType:
				if elem := typ.Elt.(*ast.Ident).Name; structs[elem] != nil {
					fields(elem, path+key+"[].")
				}
			}
		}
	}
	out.WriteString(pageHead + "## The document\n\n")
	fields("Config", "")
	out.WriteString("\n" + pageRoute)
	fields("Route", "")
	return out.Bytes()
}

func TestConfigurationPageIsCurrent(t *testing.T) {
	got := page(t)
	if *update {
		if err := os.WriteFile(pageFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is out of date: run go test ./internal/config -update", pageFile)
	}
}
