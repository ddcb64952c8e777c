package bootstrap

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"

	xds "github.com/cncf/xds/go/xds/type/v3"
	golangv3 "github.com/envoyproxy/go-control-plane/contrib/envoy/extensions/filters/http/golang/v3alpha"
	dynamicmodulesv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/dynamic_modules/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shuntproxy/shunt/internal/config"
)

// variants are all that Generate can print.
func variants() []Options {
	stock, contrib, hosted := options(minimal), options(minimal), options(minimal)
	contrib.Door = DoorContrib
	hosted.Door, hosted.Host = DoorContrib, HostGolanghost
	return []Options{stock, contrib, hosted}
}

func variantName(o Options) string { return strings.Trim(o.Door+" "+o.Host, " ") }

// shuntConfig is the document that Envoy's filter, or golanghost, hands over.
func shuntConfig(t *testing.T, hcm *hcmv3.HttpConnectionManager) (text []byte, asStruct bool) {
	t.Helper()
	filter := hcm.GetHttpFilters()[0]
	message, err := filter.GetTypedConfig().UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	switch m := message.(type) {
	case *golangv3.Config:
		if filter.GetName() != "shunt" || m.GetPluginName() != "shunt" || m.GetLibraryId() == "" || m.GetLibraryPath() == "" {
			t.Errorf("filter %s is %v", filter.GetName(), m)
		}
		return document(t, m.GetPluginConfig())
	case *dynamicmodulesv3.DynamicModuleFilter:
		if filter.GetName() != "shunt" || !m.GetDynamicModuleConfig().GetDoNotClose() {
			t.Errorf("filter %s is %v", filter.GetName(), m)
		}
		if m.GetFilterName() == "shunt" {
			return document(t, m.GetFilterConfig())
		}
		if m.GetFilterName() != HostGolanghost || !m.GetDynamicModuleConfig().GetLoadGlobally() {
			t.Errorf("host is %v", m)
		}
		return hostedDocument(t, m.GetFilterConfig())
	default:
		t.Fatalf("filter is a %T", message)
		return nil, false
	}
}

// document is what is in an Any, as a door reads it.
func document(t *testing.T, from *anypb.Any) (text []byte, asStruct bool) {
	t.Helper()
	message, err := from.UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := message.(*wrapperspb.StringValue); ok {
		return []byte(m.GetValue()), false
	}
	if m, ok := message.(*xds.TypedStruct); ok {
		message = m.GetValue()
	}
	if _, ok := message.(*structpb.Struct); !ok {
		t.Fatalf("document is a %T", message)
	}
	if text, err = protojson.Marshal(message); err != nil {
		t.Fatal(err)
	}
	return text, true
}

// hostedDocument is document for the Any within golanghost's own JSON.
func hostedDocument(t *testing.T, from *anypb.Any) (text []byte, asStruct bool) {
	t.Helper()
	outer, _ := document(t, from)
	var settings structpb.Struct
	if err := protojson.Unmarshal(outer, &settings); err != nil {
		t.Fatal(err)
	}
	for name := range settings.GetFields() {
		if !slices.Contains([]string{"library_id", "library_path", "plugin_name", "plugin_config"}, name) {
			t.Errorf("golanghost has no field %s", name)
		}
	}
	if name := settings.GetFields()["plugin_name"].GetStringValue(); name != "shunt" {
		t.Errorf("plugin_name is %q", name)
	}
	data, err := base64.StdEncoding.DecodeString(settings.GetFields()["plugin_config"].GetStringValue())
	if err != nil {
		t.Fatal(err)
	}
	var inner anypb.Any
	if err := proto.Unmarshal(data, &inner); err != nil {
		t.Fatal(err)
	}
	if url := inner.GetTypeUrl(); url != typePrefix+"xds.type.v3.TypedStruct" && url != typePrefix+"google.protobuf.StringValue" {
		t.Errorf("plugin_config is a %s", url)
	}
	return document(t, &inner)
}

// TestContribTypes: the golang door takes a TypedStruct, not a Struct.
func TestContribTypes(t *testing.T) {
	for text, want := range map[string]string{
		minimal: typePrefix + "xds.type.v3.TypedStruct",
		"pools: {b: {static: []}, a: {static: []}}": typePrefix + "google.protobuf.StringValue",
	} {
		o := options(text)
		o.Door, o.Module = DoorContrib, "/opt/x.so"
		hcm := connectionManager(t, generate(t, o).GetStaticResources().GetListeners()[0])
		filter := unpack(t, hcm.GetHttpFilters()[0].GetTypedConfig(), &golangv3.Config{})
		if filter.GetPluginConfig().GetTypeUrl() != want || filter.GetLibraryPath() != "/opt/x.so" {
			t.Errorf("%s: want %s in %v", text, want, filter)
		}
	}
}

// TestEnvoyValue holds what Envoy's YAML loader does with scalars in a Struct.
func TestEnvoyValue(t *testing.T) {
	text := "\"@type\": type.googleapis.com/xds.type.v3.TypedStruct\n" +
		"value: {a: 0.8, b: 4294967296, c: 5000, d: -1, e: true, f: \"7\", g: null, h: [x, {i: 1e3}], j: 4294967295}\n"
	packed, err := packConfig(text)
	if err != nil {
		t.Fatal(err)
	}
	got, err := unpackConfig(packed)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"a":"0.8","b":"4294967296","c":5000,"d":-1,"e":true,"f":"7","g":null,"h":["x",{"i":"1e3"}],"j":4294967295}`
	if compact := strings.ReplaceAll(string(got), " ", ""); compact != want {
		t.Errorf("got  %s\nwant %s", compact, want)
	}
}

// TestRouteConfig: each variant's route config is valid for Envoy and says what
// was asked for.
func TestRouteConfig(t *testing.T) {
	const doc = `{policy: random}`
	for _, o := range variants() {
		t.Run(variantName(o), func(t *testing.T) {
			filter, text, err := RouteConfig(o, doc)
			if err != nil {
				t.Fatal(err)
			}
			o.ExtraRoutes = "- match: {prefix: /x}\n  route: {cluster: shunt_engines, timeout: 0s}\n  typed_per_filter_config:\n    " +
				filter + ":\n      " + indent(6, text)
			hcm := connectionManager(t, generate(t, o).GetStaticResources().GetListeners()[0])
			if hcm.GetHttpFilters()[0].GetName() != filter {
				t.Errorf("no filter has the name %s", filter)
			}
			packed := hcm.GetRouteConfig().GetVirtualHosts()[0].GetRoutes()[0].GetTypedPerFilterConfig()[filter]
			var got []byte
			if o.Host == "" && o.Door == DoorContrib {
				got, _ = document(t, unpack(t, packed, &golangv3.ConfigsPerRoute{}).GetPluginsConfig()["shunt"].GetConfig())
			} else {
				route := unpack(t, packed, &dynamicmodulesv3.DynamicModuleFilterPerRoute{})
				if got, _ = document(t, route.GetFilterConfig()); o.Host == HostGolanghost {
					got, _ = hostedDocument(t, route.GetFilterConfig())
				}
			}
			if string(got) != doc {
				t.Errorf("config is %s", got)
			}
			text2, err := Generate(o)
			if err != nil {
				t.Fatal(err)
			}
			report, err := Check(text2, nil)
			if err != nil || report.Filters != 1 || report.Routes != 1 || len(report.Problems)+len(report.Warnings) > 0 {
				t.Errorf("check says %+v, %v", report, err)
			}
		})
	}
	if _, _, err := RouteConfig(options(minimal), "polcy: x"); err == nil {
		t.Error("a wrong document passes")
	}
	if _, _, err := RouteConfig(Options{Door: "x"}, doc); err == nil {
		t.Error("an unknown door passes")
	}
}

// TestCheckVariants: mistakes are found wherever the document is.
func TestCheckVariants(t *testing.T) {
	noFile := func(string) (*config.Config, error) { t.Error("a file is read"); return nil, nil }
	for _, o := range variants() {
		_, text, err := RouteConfig(o, "pool: chat")
		if err != nil {
			t.Fatal(err)
		}
		o.ExtraRoutes = "- match: {prefix: /x}\n  route: {cluster: shunt_engines, timeout: 0s}\n  typed_per_filter_config:\n    shunt:\n      " + indent(6, text)
		printed, err := Generate(o)
		if err != nil {
			t.Fatal(err)
		}
		report, err := Check(printed, noFile)
		if err != nil || report.Filters != 1 || report.Routes != 1 || !strings.Contains(report.Problems.Error(), `no filter config defines pool "chat"; there are: default`) {
			t.Errorf("%s: %+v, %v", variantName(o), report, err)
		}
	}
}

func TestCheckContrib(t *testing.T) {
	contrib := variants()[1]
	contrib.ExtraRoutes = "- match: {prefix: /x}\n  route: {cluster: shunt_engines, timeout: 0s}\n  typed_per_filter_config:\n" +
		"    shunt:\n      \"@type\": " + typePrefix + typeContribRoute + "\n" +
		"      plugins_config: {shunt: {config: {\"@type\": type.googleapis.com/google.protobuf.StringValue, value: \"policy: random\"}}}\n"
	good, err := Generate(contrib)
	if err != nil {
		t.Fatal(err)
	}
	const filterAt = "filters[0].typed_config.http_filters[0].typed_config"
	const routeAt = "typed_per_filter_config.shunt.plugins_config.shunt"
	tests := []struct{ name, old, new, want string }{
		{"plugin name", "plugin_name: shunt", "plugin_name: shnt", filterAt + ".plugin_name"},
		{"library", "library_id: shunt", "library_id: ''", "library_id and library_path are required"},
		{"struct", "xds.type.v3.TypedStruct", "google.protobuf.Struct", "xds.type.v3.TypedStruct or google.protobuf.StringValue is wanted"},
		{"address", "10.0.0.1:8000", "engine-1", filterAt + ".plugin_config: pools.default.static[0].address"},
		{"route", "policy: random", "polcy: random", routeAt + ".config: polcy"},
		{"disabled", "{shunt: {config:", "{shunt: {disabled: true, config:", routeAt + ".disabled"},
	}
	for _, tt := range tests {
		text := strings.Replace(string(good), tt.old, tt.new, 1)
		if text == string(good) {
			t.Fatalf("%s: nothing to replace", tt.name)
		}
		report, err := Check([]byte(text), nil)
		if err != nil || len(report.Problems) != 1 || !strings.Contains(report.Problems.Error(), tt.want) {
			t.Errorf("%s: problems are %q, %v; want %q", tt.name, report.Problems.Error(), err, tt.want)
		}
	}
	if report, err := Check(good, nil); err != nil || len(report.Problems) != 0 {
		t.Errorf("the good one: %v, %v", report.Problems, err)
	}
}
