package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	reference "github.com/shuntproxy/shunt/internal/bootstrap"
)

// modelName is the model that requests ask for and backends serve.
const modelName = "bench-model"

// caseNames are the Envoys compared, in the order of the table.
var caseNames = []string{"bare", "floor", "hold", "stock", "stock-full", "stock-noyield", "contrib"}

// bodies are the requests by name, their bodies in bytes.
var bodies = []body{{name: "1k", size: 1 << 10}, {name: "256k", size: 256 << 10}, {name: "sse", size: 1 << 10, stream: true}}

type body struct {
	name string
	size int
	// stream asks for events. It is measured under the load half alone, to the first event.
	stream bool
}

func (b body) under(load string) bool { return !b.stream || load == "half" }

// bodyNamed returns the body of that name, which is one of them.
func bodyNamed(name string) body {
	return bodies[slices.IndexFunc(bodies, func(b body) bool { return b.name == name })]
}

const eventStream = "text/event-stream"

// request renders a whole HTTP/1.1 chat request whose body has exactly size bytes.
func request(b body) ([]byte, error) {
	body, err := chatBody(b.size, b.stream)
	if err != nil {
		return nil, err
	}
	accept := "application/json"
	if b.stream {
		accept = eventStream // by which the backends know it
	}
	return fmt.Appendf(nil, "POST /v1/chat/completions HTTP/1.1\r\nhost: bench.test\r\nuser-agent: OpenAI/Python 2.8.0\r\n"+
		"accept: "+accept+"\r\naccept-encoding: gzip, deflate\r\ncontent-type: application/json\r\n"+
		"authorization: Bearer sk-bench\r\nx-stainless-lang: python\r\ncontent-length: %d\r\n\r\n%s", len(body), body), nil
}

type chatMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chatBody is a conversation of turns of up to 2,000 bytes, as chat clients send it: the model first, quotes and newlines
// escaped. It has exactly size bytes, at least 300.
func chatBody(size int, stream bool) ([]byte, error) {
	const prose = "Please look at the function below, explain why the \"retry\" branch can run twice,\nand suggest the smallest fix. " +
		"Keep the public signature; the callers in cmd/ rely on it.\n\tif err := s.flush(ctx); err != nil { return err }\n"
	text := func(n int) string { return strings.Repeat(prose, n/len(prose)+1)[:n] }
	chat := struct {
		Model       string        `json:"model"`
		Messages    []chatMessage `json:"messages"`
		Temperature float64       `json:"temperature"`
		MaxTokens   int           `json:"max_tokens"`
		Stream      bool          `json:"stream,omitempty"`
	}{modelName, []chatMessage{{"system", "You are a careful assistant."}}, 0.7, 256, stream}
	for {
		b, err := json.Marshal(chat)
		if err != nil {
			return nil, err
		}
		missing := size - len(b)
		last := &chat.Messages[len(chat.Messages)-1]
		switch {
		case missing == 0:
			return b, nil
		case missing < 0:
			return nil, fmt.Errorf("a chat body can't have %d bytes", size)
		case missing < 2300: // letters that JSON doesn't escape: one byte each
			last.Content += strings.Repeat("x", missing)
		default:
			role := [2]string{"user", "assistant"}[len(chat.Messages)%2]
			chat.Messages = append(chat.Messages, chatMessage{role, text(min(2000, missing-300))})
		}
	}
}

// setup is what all Envoys of a benchmark share.
type setup struct {
	envoy    string // binary
	outDir   string // where the modules are
	scratch  string
	backends []netip.AddrPort
}

// options returns how to run the Envoy of a case. All have the same listener, connection manager and route; bare and
// floor balance round robin over a STATIC cluster, while shunt picks the backend and its ORIGINAL_DST cluster takes it
// from the header, since that is how each is used. hold is what that use costs in Envoy: a C module that holds the body,
// names the backends in turn and sets shunt's metadata.
func (s *setup) options(name string) (envoyrun.Options, error) {
	o := envoyrun.Options{Binary: s.envoy, Concurrency: 1, LogLevel: "warning"}
	var filter map[string]any
	cluster := s.staticCluster()
	switch name {
	case "bare":
	case "floor":
		module, err := s.module("libfloor.so")
		if err != nil {
			return o, err
		}
		o.Env = []string{"GODEBUG=cgocheck=0"}
		filter = dynamicModule("floor", module, map[string]any{})
	case "hold":
		module, err := s.module("libhold.so")
		if err != nil {
			return o, err
		}
		var backends []string
		for _, a := range s.backends {
			backends = append(backends, a.String())
		}
		filter = dynamicModule("hold", module, map[string]any{})
		filter["typed_config"].(map[string]any)["filter_config"] = map[string]any{
			"@type": "type.googleapis.com/google.protobuf.StringValue", "value": strings.Join(backends, " ")}
		cluster = originalDstCluster()
	case "stock", "stock-full", "stock-noyield":
		module, err := s.module("libshunt.so")
		if err != nil {
			return o, err
		}
		filter = dynamicModule("shunt", module, s.shuntConfig(name))
		cluster = originalDstCluster()
	case "contrib":
		// Reported only: in a contrib Envoy nothing stands between its filter and the library.
		plugin, err := s.module("libshunt_contrib.so")
		if err != nil {
			return o, err
		}
		host, err := s.module("libgolanghost.so")
		if err != nil {
			return o, err
		}
		if filter, err = s.underGolanghost(host, plugin, s.shuntConfig(name)); err != nil {
			return o, err
		}
		cluster = originalDstCluster()
	default:
		return o, fmt.Errorf("unknown case %q, valid: %s", name, strings.Join(caseNames, ", "))
	}
	var err error
	o.Bootstrap, err = json.Marshal(bootstrap(filter, cluster))
	return o, err
}

func (s *setup) module(file string) (string, error) {
	path := filepath.Join(s.outDir, file)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%w: run make build, or leave the case out with -cases", err)
	}
	return path, nil
}

// shuntConfig is shunt's own config for the benchmark.
func (s *setup) shuntConfig(name string) map[string]any {
	var static []any
	for _, a := range s.backends {
		static = append(static, map[string]any{"address": a.String(), "labels": map[string]any{
			"model.aibrix.ai/name":        modelName,
			"model.aibrix.ai/engine":      "vllm",
			"model.aibrix.ai/metric-port": strconv.Itoa(int(a.Port())),
		}})
	}
	c := map[string]any{
		"pools": map[string]any{"default": map[string]any{"static": static}},
		"admin": map[string]any{"address": "unix:" + filepath.Join(s.scratch, name+".sock")},
	}
	switch name {
	case "stock-full": // with all that a pick can do: llm-d's default weights, and queues
		c["policy"] = []any{
			map[string]any{"policy": "queue", "weight": 2}, map[string]any{"policy": "kv-cache", "weight": 2},
			map[string]any{"policy": "prefix-cache", "weight": 3},
		}
		c["flowControl"] = map[string]any{"enabled": true}
	case "stock-noyield":
		c["runtime"] = map[string]any{"yield": false}
	}
	return c
}

const typeURL = "type.googleapis.com/envoy."

func dynamicModule(filterName, path string, config map[string]any) map[string]any {
	return map[string]any{"name": filterName, "typed_config": map[string]any{
		"@type": typeURL + "extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter",
		"dynamic_module_config": map[string]any{
			"module":       map[string]any{"local": map[string]any{"filename": path}},
			"do_not_close": true,
		},
		"filter_name":   filterName,
		"filter_config": map[string]any{"@type": "type.googleapis.com/google.protobuf.Struct", "value": config},
	}}
}

// underGolanghost loads the contrib door's library in a stock Envoy, without the collections that golanghost forces in tests.
func (s *setup) underGolanghost(host, plugin string, config map[string]any) (map[string]any, error) {
	text, err := json.Marshal(map[string]any{"@type": "type.googleapis.com/xds.type.v3.TypedStruct", "value": config})
	if err != nil {
		return nil, err
	}
	packed, err := reference.PackConfig(string(text))
	if err != nil {
		return nil, err
	}
	filter := dynamicModule("golanghost", host, map[string]any{
		"library_id": "shunt", "library_path": plugin, "plugin_name": "shunt", "plugin_config": packed, "gc_interval_ms": 0,
	})
	filter["typed_config"].(map[string]any)["dynamic_module_config"].(map[string]any)["load_globally"] = true
	return filter, nil
}

func socketAddress(a netip.AddrPort) map[string]any {
	return map[string]any{"socket_address": map[string]any{"address": a.Addr().String(), "port_value": a.Port()}}
}

func (s *setup) staticCluster() map[string]any {
	var hosts []any
	for _, a := range s.backends {
		hosts = append(hosts, map[string]any{"endpoint": map[string]any{"address": socketAddress(a)}})
	}
	return map[string]any{"type": "STATIC", "lb_policy": "ROUND_ROBIN", "load_assignment": map[string]any{
		"cluster_name": "engines", "endpoints": []any{map[string]any{"lb_endpoints": hosts}}}}
}

func originalDstCluster() map[string]any {
	return map[string]any{"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": map[string]any{
		"use_http_header": true, "http_header_name": "x-gateway-destination-endpoint"}}
}

func bootstrap(filter, cluster map[string]any) map[string]any {
	loopback := socketAddress(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0))
	cluster["name"] = "engines"
	cluster["connect_timeout"] = "2s"
	cluster["circuit_breakers"] = map[string]any{"thresholds": []any{map[string]any{
		"max_connections": 40000, "max_pending_requests": 40000, "max_requests": 40000}}}
	var filters []any
	if filter != nil {
		filters = append(filters, filter)
	}
	filters = append(filters, map[string]any{"name": "envoy.filters.http.router",
		"typed_config": map[string]any{"@type": typeURL + "extensions.filters.http.router.v3.Router"}})
	manager := map[string]any{
		"@type":       typeURL + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
		"stat_prefix": "bench", "codec_type": "HTTP1", "use_remote_address": true, "normalize_path": true,
		"http_filters": filters,
		"route_config": map[string]any{"name": "bench", "virtual_hosts": []any{map[string]any{"name": "all", "domains": []any{"*"},
			"routes": []any{map[string]any{"match": map[string]any{"prefix": "/"},
				"route": map[string]any{"cluster": "engines", "timeout": "0s"}}}}}},
	}
	return map[string]any{
		"admin": map[string]any{"address": loopback},
		"static_resources": map[string]any{
			"listeners": []any{map[string]any{"name": "bench", "address": loopback, "filter_chains": []any{map[string]any{
				"filters": []any{map[string]any{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}}}}}},
			"clusters": []any{cluster},
		},
	}
}
