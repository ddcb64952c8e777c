// Package golang is the contrib door: it lets Envoy's golang HTTP filter, which
// only the contrib image has, load shunt. It translates between that filter's
// Go API and package filter, and takes no decision.
//
// The package can have no test file: the SDK calls Envoy when it is loaded. It
// is tested in a real Envoy by the e2e suite.
package golang

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"

	xds "github.com/cncf/xds/go/xds/type/v3"
	"github.com/envoyproxy/envoy/contrib/golang/common/go/api"
	"github.com/envoyproxy/envoy/contrib/golang/filters/http/source/go/pkg/http"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shuntproxy/shunt/filter"
)

// PluginName is what Envoy's configuration calls the filter.
const PluginName = "shunt"

// Register makes the filter known to the SDK. The plugin's main calls it from
// init: Envoy never calls main.
func Register() { http.RegisterHttpFilterFactoryAndConfigParser(PluginName, newFilter, parser{}) }

// process is the one runtime: Envoy calls the parser without a context.
var process struct {
	once    sync.Once
	runtime *filter.Runtime
}

func start() *filter.Runtime {
	process.once.Do(func() {
		process.runtime = filter.NewRuntime(filter.Options{
			Log:          writeLog,
			Validate:     validating(os.ReadFile),
			Concurrency:  int(http.EnvoyConcurrency()),
			MemoryCgroup: filter.CgroupMemory(os.ReadFile),
			TuneRuntime:  true,
			Environment:  os.LookupEnv,
		})
	})
	return process.runtime
}

// validating reports whether Envoy runs with --mode validate. The golang
// filter's API does not say, but the process's command line does.
func validating(readFile func(string) ([]byte, error)) bool {
	line, _ := readFile("/proc/self/cmdline") // empty where there is none
	args := bytes.Split(line, []byte{0})
	for i, arg := range args {
		if string(arg) == "--mode=validate" || (string(arg) == "--mode" && i+1 < len(args) && string(args[i+1]) == "validate") {
			return true
		}
	}
	return false
}

func writeLog(l slog.Level, message string) {
	for line := range strings.SplitSeq(message, "\n") {
		if line == "" {
			continue
		}
		line = "shunt: " + line
		switch {
		case l >= slog.LevelError:
			api.LogError(line)
		case l >= slog.LevelWarn:
			api.LogWarn(line)
		case l >= slog.LevelInfo:
			api.LogInfo(line)
		default:
			api.LogDebug(line)
		}
	}
}

// filterConfig is what Parse returns for a filter, routeConfig for a route.
// Envoy destroys each once.
type filterConfig struct{ gen *filter.Generation }

// Destroy implements api.Config.
func (c *filterConfig) Destroy() {
	defer logPanic("configuration")
	c.gen.Release()
}

type routeConfig struct{ route *filter.Route }

// Destroy implements api.Config.
func (c *routeConfig) Destroy() {
	defer logPanic("route configuration")
	start().ReleaseRoute(c.route)
}

// view is a merged configuration. It has no Destroy: what it refers to belongs
// to the configurations it was merged from, and the SDK would destroy it while
// requests still use it.
type view struct {
	gen   *filter.Generation
	route *filter.Route
}

type parser struct{}

// Parse implements api.StreamFilterConfigParser. callbacks is nil for a route.
func (parser) Parse(any *anypb.Any, callbacks api.ConfigCallbackHandler) (config any, err error) {
	// A panic here would end Envoy.
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("internal error: %v\n%s", cause, debug.Stack())
		}
		if err != nil {
			config, err = refuse(callbacks == nil, err)
		}
	}()
	text, err := document(any)
	if err != nil {
		return nil, err
	}
	if callbacks == nil {
		route, err := start().LoadRoute(text)
		if err != nil {
			return nil, err
		}
		return &routeConfig{route}, nil
	}
	if err := filter.OnlyDoor(os.ReadFile); err != nil {
		return nil, err
	}
	gen, err := start().Load(text)
	if err != nil {
		return nil, err
	}
	return &filterConfig{gen}, nil
}

// refuse logs what is wrong with a configuration and refuses it, but for a
// route's that Envoy only parses at the first request, on a worker: there an
// error would end Envoy (RELEASE_ASSERT), so the route answers 503 instead.
// Envoy parses everything else on its main thread, whose id is the process's.
func refuse(route bool, err error) (any, error) {
	what := "configuration"
	if route {
		what = "route configuration"
	}
	writeLog(slog.LevelError, what+" refused: "+err.Error())
	if route && syscall.Gettid() != os.Getpid() {
		return &routeConfig{filter.BrokenRoute()}, nil
	}
	return nil, errors.New(what + " refused, see the lines before")
}

// document unpacks what Envoy hands over: JSON of a Struct, or the YAML or JSON
// in a string.
func document(any *anypb.Any) ([]byte, error) {
	switch {
	case any == nil:
		return nil, errors.New("plugin_config is missing")
	case any.MessageIs((*xds.TypedStruct)(nil)):
		var typed xds.TypedStruct
		if err := any.UnmarshalTo(&typed); err != nil {
			return nil, err
		}
		return protojson.Marshal(typed.GetValue())
	case any.MessageIs((*wrapperspb.StringValue)(nil)):
		var text wrapperspb.StringValue
		if err := any.UnmarshalTo(&text); err != nil {
			return nil, err
		}
		return []byte(text.GetValue()), nil
	default:
		return nil, fmt.Errorf("plugin_config has the type %q; valid: xds.type.v3.TypedStruct, google.protobuf.StringValue", any.GetTypeUrl())
	}
}

// Merge implements api.StreamFilterConfigParser: the most specific route's
// configuration counts, as on the stock door. Envoy calls it on any thread.
func (parser) Merge(parent, child any) any {
	var v view
	switch p := parent.(type) {
	case *filterConfig:
		v.gen = p.gen
	case *routeConfig:
		v.route = p.route
	case *view:
		v = *p
	}
	if c, ok := child.(*routeConfig); ok {
		v.route = c.route
	}
	return &v
}

// newFilter implements api.StreamFilterFactory.
func newFilter(config any, callbacks api.FilterCallbackHandler) api.StreamFilter {
	s := &stream{callbacks: callbacks}
	switch c := config.(type) {
	case *filterConfig:
		s.gen = c.gen
	case *view:
		s.gen, s.route = c.gen, c.route
	}
	return s
}

// logPanic contains a panic where nobody waits for an answer.
func logPanic(where string) {
	if cause := recover(); cause != nil {
		writeLog(slog.LevelError, fmt.Sprintf("internal error of the door in %s: %v\n%s", where, cause, debug.Stack()))
	}
}
