package bootstrap

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/stream/v3"
	dynamicmodulesv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/dynamic_modules/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	earlyv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	overridehostv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/random/v3"
	subsetv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/subset/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
	httpv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/openai"
)

const minimal = `pools: {default: {static: [{address: "10.0.0.1:8000"}]}}`

func options(document string) Options {
	return Options{Listen: "0.0.0.0:8080", Admin: "127.0.0.1:9901", Document: []byte(document)}
}

// decode reads YAML into a proto as strictly as Envoy does: unknown fields are
// errors, also inside Any, and every message is validated.
func decode[M proto.Message](t *testing.T, text []byte, into M) M {
	t.Helper()
	var value any
	if err := yaml.Unmarshal(text, &value); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	asJSON, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	if err := protojson.Unmarshal(asJSON, into); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	validated := 0
	err = protorange.Range(into.ProtoReflect(), func(p protopath.Values) error {
		message, ok := p.Index(-1).Value.Interface().(interface{ Interface() proto.Message })
		if !ok {
			return nil
		}
		if v, ok := message.Interface().(interface{ ValidateAll() error }); ok {
			validated++
			return v.ValidateAll()
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	if validated < 10 {
		t.Fatalf("only %d messages were validated", validated)
	}
	return into
}

func generate(t *testing.T, o Options) *bootstrapv3.Bootstrap {
	t.Helper()
	text, err := Generate(o)
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, text, &bootstrapv3.Bootstrap{})
}

func unpack[M proto.Message](t *testing.T, from *anypb.Any, into M) M {
	t.Helper()
	if err := from.UnmarshalTo(into); err != nil {
		t.Fatal(err)
	}
	return into
}

func connectionManager(t *testing.T, listener *listenerv3.Listener) *hcmv3.HttpConnectionManager {
	t.Helper()
	return unpack(t, listener.GetFilterChains()[0].GetFilters()[0].GetTypedConfig(), &hcmv3.HttpConnectionManager{})
}

// TestInlineConfig: what reaches the filter means what the document means.
func TestInlineConfig(t *testing.T) {
	files, err := filepath.Glob("../config/testdata/good/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("no documents: %v", err)
	}
	structs, texts := 0, 0
	for _, file := range files {
		document, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want, err := config.Parse(document)
		if err != nil {
			t.Fatal(err)
		}
		if want.ConfigFile != "" {
			continue // refused: see TestErrors
		}
		for _, v := range variants() {
			o := v
			o.Document = document
			boot := generate(t, o)
			text, asStruct := shuntConfig(t, connectionManager(t, boot.GetStaticResources().GetListeners()[0]))
			if asStruct {
				structs++
			} else {
				texts++
			}
			got, err := config.Parse(text)
			if err != nil {
				t.Errorf("%s, %s: %v", file, variantName(v), err)
				continue
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s (-document +inline):\n%s", file, variantName(v), diff)
			}
		}
	}
	if structs == 0 || texts == 0 {
		t.Errorf("%d structs and %d texts: want some of both", structs, texts)
	}
}

// TestWordsOfYAML11 checks the quotes that Envoy's loader needs and ours does not.
func TestWordsOfYAML11(t *testing.T) {
	text, err := Generate(options(`pools: {default: {static: [{address: 10.0.0.1, pod: on, labels: {team: no, model.aibrix.ai/name: 1e3-a}}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`pod: "on"`, `team: "no"`, `"10.0.0.1"`, `"1e3-a"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s is not in the output", want)
		}
	}
}

func TestConfigFile(t *testing.T) {
	o := options(minimal + "\nlimits: {requestBody: 8MiB}\nsubsetHeader: true")
	o.ConfigFile, o.Module = "/etc/shunt/shunt.yaml", "/opt/libshunt.so"
	hcm := connectionManager(t, generate(t, o).GetStaticResources().GetListeners()[0])
	text, _ := shuntConfig(t, hcm)
	if cfg, err := config.Parse(text); err != nil || cfg.ConfigFile != o.ConfigFile {
		t.Errorf("config is %s, %v", text, err)
	}
	module := unpack(t, hcm.GetHttpFilters()[0].GetTypedConfig(), &dynamicmodulesv3.DynamicModuleFilter{}).GetDynamicModuleConfig()
	if module.GetName() != "" || module.GetModule().GetLocal().GetFilename() != o.Module || !module.GetDoNotClose() {
		t.Errorf("module is %v", module)
	}
	if got := hcm.GetRouteConfig().GetVirtualHosts()[0].GetRequestBodyBufferLimit().GetValue(); got <= 8<<20 {
		t.Errorf("request_body_buffer_limit is %d, not above limits.requestBody", got)
	}
}

func earlyRemovals(t *testing.T, hcm *hcmv3.HttpConnectionManager) []string {
	t.Helper()
	var names []string
	mutation := unpack(t, hcm.GetEarlyHeaderMutationExtensions()[0].GetTypedConfig(), &earlyv3.HeaderMutation{})
	for _, m := range mutation.GetMutations() {
		names = append(names, m.GetRemove())
	}
	return names
}

func TestEarlyRemovals(t *testing.T) {
	want := []string{
		"x-gateway-destination-endpoint", "x-gateway-destination-endpoint-served",
		"x-gateway-destination-endpoint-subset", "x-envoy-original-dst-host", "x-llm-d-request-dropped-reason",
	}
	for document, want := range map[string][]string{
		minimal:                          want,
		minimal + "\nsubsetHeader: true": slices.Concat(want[:2], want[3:]),
	} {
		hcm := connectionManager(t, generate(t, options(document)).GetStaticResources().GetListeners()[0])
		if got := earlyRemovals(t, hcm); !slices.Equal(got, want) {
			t.Errorf("%s: removes %v, want %v", document, got, want)
		}
	}
}

// TestChoices holds what the reference bootstrap promises.
func TestChoices(t *testing.T) {
	for _, o := range variants() {
		t.Run(variantName(o), func(t *testing.T) { checkChoices(t, generate(t, o)) })
	}
}

func checkChoices(t *testing.T, boot *bootstrapv3.Bootstrap) {
	t.Helper()
	listener := boot.GetStaticResources().GetListeners()[0]
	hcm := connectionManager(t, listener)
	cluster := boot.GetStaticResources().GetClusters()[0]
	host := hcm.GetRouteConfig().GetVirtualHosts()[0]
	route := host.GetRoutes()[0].GetRoute()
	upstream := unpack(t, cluster.GetTypedExtensionProtocolOptions()["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"], &httpv3.HttpProtocolOptions{})

	equal := func(name string, got, want any) {
		t.Helper()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	equal("cluster type", cluster.GetType(), clusterv3.Cluster_ORIGINAL_DST)
	equal("cluster lb", cluster.GetLbPolicy(), clusterv3.Cluster_CLUSTER_PROVIDED)
	equal("use_http_header", cluster.GetOriginalDstLbConfig().GetUseHttpHeader(), true)
	equal("http_header_name", cluster.GetOriginalDstLbConfig().GetHttpHeaderName(), "x-gateway-destination-endpoint")
	equal("connect_timeout", cluster.GetConnectTimeout().AsDuration(), 2*time.Second)
	equal("thresholds", len(cluster.GetCircuitBreakers().GetThresholds()), 2)
	for _, threshold := range cluster.GetCircuitBreakers().GetThresholds() {
		for _, limit := range []*wrapperspb.UInt32Value{
			threshold.GetMaxConnections(), threshold.GetMaxPendingRequests(), threshold.GetMaxRequests(), threshold.GetMaxRetries(),
		} {
			equal("circuit breaker "+threshold.GetPriority().String(), limit.GetValue(), uint32(40000))
		}
	}
	equal("upstream idle_timeout", upstream.GetCommonHttpProtocolOptions().GetIdleTimeout().AsDuration(), 4*time.Second)
	equal("upstream trailers", upstream.GetExplicitHttpConfig().GetHttpProtocolOptions().GetEnableTrailers(), true)
	equal("route cluster", route.GetCluster(), cluster.GetName())
	equal("route timeout is set", route.GetTimeout() != nil && route.GetTimeout().AsDuration() == 0, true)
	equal("retry_on", route.GetRetryPolicy().GetRetryOn(), "connect-failure,reset-before-request")
	equal("body limit", host.GetRequestBodyBufferLimit().GetValue() > 4<<20, true)
	equal("headers removed on routes", slices.Concat(host.GetRequestHeadersToRemove(), hcm.GetRouteConfig().GetRequestHeadersToRemove()), []string(nil))
	equal("stream_idle_timeout", hcm.GetStreamIdleTimeout().AsDuration(), time.Hour)
	equal("downstream trailers", hcm.GetHttpProtocolOptions().GetEnableTrailers(), true)
	equal("max_concurrent_streams", hcm.GetHttp2ProtocolOptions().GetMaxConcurrentStreams().GetValue(), uint32(4096))
	equal("use_remote_address", hcm.GetUseRemoteAddress().GetValue(), true)
	// Without a range Envoy trusts the private networks.
	equal("internal ranges", len(hcm.GetInternalAddressConfig().GetCidrRanges()), 1)
	equal("normalize_path", hcm.GetNormalizePath().GetValue(), true)
	equal("underscores", hcm.GetCommonHttpProtocolOptions().GetHeadersWithUnderscoresAction().String(), "REJECT_REQUEST")
	equal("stream_error_on_invalid_http_message", hcm.GetStreamErrorOnInvalidHttpMessage().GetValue(), true)
	equal("last filter", hcm.GetHttpFilters()[len(hcm.GetHttpFilters())-1].GetName(), "envoy.filters.http.router")
	equal("overload actions", len(boot.GetOverloadManager().GetActions()), 2)
	equal("listen", listener.GetAddress().GetSocketAddress().GetPortValue(), uint32(8080))
	equal("admin", boot.GetAdmin().GetAddress().GetSocketAddress().GetAddress(), "127.0.0.1")
	checkMappers(t, hcm)
}

// checkMappers: the order decides, ours first, gRPC before the JSON ones.
func checkMappers(t *testing.T, hcm *hcmv3.HttpConnectionManager) {
	t.Helper()
	mappers := hcm.GetLocalReplyConfig().GetMappers()
	ours := mappers[0].GetFilter().GetMetadataFilter()
	if ours.GetMatcher().GetFilter() != "shunt" || ours.GetMatchIfKeyNotFound() == nil || ours.GetMatchIfKeyNotFound().GetValue() {
		t.Errorf("first mapper is %v: want the metadata of shunt, and no match without it", ours)
	}
	if got := mappers[1].GetFilter().GetHeaderFilter().GetHeader().GetName(); got != "content-type" {
		t.Errorf("second mapper is about %q, want gRPC's content-type", got)
	}
	statuses := []int{302, 400, 401, 403, 404, 413, 422, 429, 500, 502, 503, 504}
	for _, path := range []string{"/v1/chat/completions", "/v1/messages", "/openai/v1/messages/?beta=true", "/v1/messages/count_tokens", "/v1/models?of=/v1/messages"} {
		style := openai.StyleOpenAI
		if e, _ := openai.Lookup("POST", path, []string{"/openai"}); e != nil {
			style = e.Style
		}
		for _, status := range statuses {
			var got map[string]any
			for _, mapper := range mappers[2:] {
				if mapperMatches(t, mapper.GetFilter(), path, status) {
					got = mapper.GetBodyFormatOverride().GetJsonFormat().AsMap()
					break
				}
			}
			var want map[string]any // shunt's own, with Envoy's words in it
			if status >= 400 {
				if err := json.Unmarshal(openai.AppendError(nil, style, status, "%RESPONSE_CODE_DETAILS%", "%LOCAL_REPLY_BODY%", ""), &want); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%d on %s (-want +got):\n%s", status, path, diff)
			}
		}
	}
}

// mapperMatches judges as Envoy does, for what the mappers use.
func mapperMatches(t *testing.T, filter *accesslogv3.AccessLogFilter, path string, status int) bool {
	t.Helper()
	for _, part := range filter.GetAndFilter().GetFilters() {
		if !mapperMatches(t, part, path, status) {
			return false
		}
	}
	if header := filter.GetHeaderFilter().GetHeader(); header != nil {
		if header.GetName() != ":path" {
			t.Errorf("a mapper is about the header %q", header.GetName())
		}
		return regexp.MustCompile("^(" + header.GetStringMatch().GetSafeRegex().GetRegex() + ")$").MatchString(path)
	}
	if comparison := filter.GetStatusCodeFilter().GetComparison(); comparison != nil {
		limit := int(comparison.GetValue().GetDefaultValue())
		return status == limit || comparison.GetOp() == accesslogv3.ComparisonFilter_GE && status > limit
	}
	return true
}

// TestEDS: the cluster walks shunt's list and nothing else, and the route tries
// as often as the list is long.
func TestEDS(t *testing.T) {
	for fallbacks, retries := range map[string]uint32{"": 1, "\nfallbacks: 0": 1, "\nfallbacks: 3": 3} {
		boot := generate(t, options(minimal+"\ndestination: eds\neds: {path: /run/eds.json}"+fallbacks))
		cluster := boot.GetStaticResources().GetClusters()[0]
		if cluster.GetType() != clusterv3.Cluster_EDS || cluster.GetLbPolicy() != 0 || cluster.GetOriginalDstLbConfig() != nil {
			t.Errorf("the cluster is %v", cluster)
		}
		if got := cluster.GetEdsClusterConfig().GetEdsConfig().GetPathConfigSource().GetPath(); got != "/run/eds.json" {
			t.Errorf("eds path is %q", got)
		}
		policy := unpack(t, cluster.GetLoadBalancingPolicy().GetPolicies()[0].GetTypedExtensionConfig().GetTypedConfig(), &overridehostv3.OverrideHost{})
		if sources := policy.GetOverrideHostSources(); len(sources) != 1 || sources[0].GetHeader() != "" || sources[0].GetMetadata().GetKey() != "envoy.lb" {
			t.Errorf("sources are %v", sources)
		}
		fallback := unpack(t, policy.GetFallbackPolicy().GetPolicies()[0].GetTypedExtensionConfig().GetTypedConfig(), &subsetv3.Subset{})
		if fallback.GetFallbackPolicy() != subsetv3.Subset_NO_FALLBACK {
			t.Errorf("the fallback policy is %v", fallback)
		}
		routes := connectionManager(t, boot.GetStaticResources().GetListeners()[0]).GetRouteConfig().GetVirtualHosts()[0].GetRoutes()
		if retry := routes[0].GetRoute().GetRetryPolicy(); retry.GetNumRetries().GetValue() != retries || retry.GetRetryOn() != "connect-failure,reset" {
			t.Errorf("%q: retries are %v", fallbacks, retry)
		}
	}
	var first struct{ Resources []any }
	if err := json.Unmarshal(Endpoints(), &first); err != nil || first.Resources == nil || len(first.Resources) > 0 {
		t.Errorf("the first content is %s", Endpoints())
	}
}

func TestLDS(t *testing.T) {
	o := options(minimal)
	o.LDSFile = "/etc/shunt/listener.yaml"
	boot := generate(t, o)
	if got := boot.GetDynamicResources().GetLdsConfig().GetPathConfigSource().GetPath(); got != o.LDSFile {
		t.Errorf("lds path is %q", got)
	}
	if n := len(boot.GetStaticResources().GetListeners()); n != 0 {
		t.Errorf("%d static listeners", n)
	}
	text, err := Listener(o)
	if err != nil {
		t.Fatal(err)
	}
	response := decode(t, text, &discoveryv3.DiscoveryResponse{})
	dynamic := unpack(t, response.GetResources()[0], &listenerv3.Listener{})
	static := generate(t, options(minimal)).GetStaticResources().GetListeners()[0]
	if !proto.Equal(dynamic, static) {
		t.Error("the listener in the file differs from the static one")
	}
}

func TestExtras(t *testing.T) {
	o := options(minimal)
	o.Listen = "[::1]:0"
	o.ExtraRoutes = "- match: {prefix: /off}\n  route: {cluster: canary}\n- match: {path: /b}\n  direct_response: {status: 404}\n"
	o.ExtraClusters = "- name: canary\n  type: STATIC\n  connect_timeout: 1s\n"
	boot := generate(t, o)
	routes := connectionManager(t, boot.GetStaticResources().GetListeners()[0]).GetRouteConfig().GetVirtualHosts()[0].GetRoutes()
	if len(routes) != 3 || routes[0].GetMatch().GetPrefix() != "/off" || routes[2].GetMatch().GetPrefix() != "/" {
		t.Errorf("routes are %v", routes)
	}
	if clusters := boot.GetStaticResources().GetClusters(); len(clusters) != 2 || clusters[1].GetName() != "canary" {
		t.Errorf("clusters are %v", clusters)
	}
}

func TestErrors(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Options)
		want   string
	}{
		{"door", func(o *Options) { o.Door = "front" }, `unknown door "front"; valid: stock, contrib`},
		{"listen", func(o *Options) { o.Listen = "localhost:80" }, `listen address "localhost:80" is not IP:port`},
		{"admin", func(o *Options) { o.Admin = "" }, `admin address "" is not IP:port`},
		{"module", func(o *Options) { o.Module = "libshunt.so" }, "is not absolute"},
		{"host", func(o *Options) { o.Door, o.Host = DoorContrib, "x" }, `unknown host "x"; valid: contrib, golanghost`},
		{"host of stock", func(o *Options) { o.Host = HostContrib }, "only the door contrib has hosts"},
		{"host module", func(o *Options) { o.Door, o.HostModule = DoorContrib, "/a/b.so" }, "only the host golanghost is a module"},
		{"document", func(o *Options) { o.Document = []byte("polcy: x") }, "did you mean policy?"},
		{"config file", func(o *Options) { o.Document = []byte("configFile: a") }, "is a configFile itself: give the file that it names with --config"},
	}
	for _, tt := range tests {
		o := options(minimal)
		tt.change(&o)
		if _, err := Generate(o); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error is %v, want %q", tt.name, err, tt.want)
		}
	}
}

// TestMetadataIsDocumented: docs/operations.md says what each key of the access
// log is.
func TestMetadataIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "## The access log")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, key := range MetadataFields() {
		if !strings.Contains(section, "`"+key+"`") {
			t.Errorf("%s is not in the section on the access log", key)
		}
	}
}
