package hosttest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	xds "github.com/cncf/xds/go/xds/type/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
)

var (
	envoyFlag  = flag.String("envoy", "", "release of Envoy to test in, such as 1.40.0; empty is what build/envoy.sh finds")
	pluginFlag = flag.String("contrib", "", "shunt's plugin, to check its symbols too and to drive under the race detector; empty builds it")
)

// Set once by TestMain.
var (
	envoyBinary string
	hostModule  string // golanghost as a shared object
	plugin      string // build/misuse as a shared object
	root        string
	scratch     string
)

// patience bounds every wait for an event. It only ends a test that fails.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		fmt.Println("hosttest: left out, since -short is set")
		return
	}
	code := 1
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "hosttest:", err)
	} else {
		code = m.Run()
	}
	_ = os.RemoveAll(scratch)
	os.Exit(code)
}

func prepare() (err error) {
	if root, err = filepath.Abs("../.."); err != nil {
		return err
	}
	if scratch, err = os.MkdirTemp("", "hosttest-"); err != nil {
		return err
	}
	if envoyBinary, err = envoyrun.Binary(context.Background(), root, *envoyFlag); err != nil {
		return err
	}
	hostModule = filepath.Join(scratch, "libgolanghost.so")
	if err := buildHost(hostModule); err != nil {
		return err
	}
	plugin = filepath.Join(scratch, "libmisuse.so")
	return buildPlugin(plugin, "./build/misuse")
}

func run(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		var stderr []byte
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			stderr = e.Stderr
		}
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr)
	}
	return strings.TrimSpace(string(out)), nil
}

// folder is where the module cache has a package.
func folder(pkg string) (string, error) {
	dir, err := run("go", "list", "-f", "{{.Dir}}", pkg)
	if err == nil && dir == "" {
		err = fmt.Errorf("%s is not in the module cache", pkg)
	}
	return dir, err
}

const (
	moduleABI = "github.com/envoyproxy/envoy/source/extensions/dynamic_modules/abi"
	golangAPI = "github.com/envoyproxy/envoy/contrib/golang/common/go/api"
)

// compile runs the C compiler on sources, with both headers of Envoy in reach.
func compile(out string, sources []string, flags ...string) error {
	args := []string{"-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-fvisibility=hidden", "-pthread"}
	for _, pkg := range []string{moduleABI, golangAPI} {
		dir, err := folder(pkg)
		if err != nil {
			return err
		}
		args = append(args, "-I"+dir)
	}
	args = append(append(append(args, flags...), "-o", out), sources...)
	_, err := run("cc", append(args, "-ldl")...)
	return err
}

func buildHost(out string, flags ...string) error {
	sources, err := filepath.Glob(filepath.Join(root, "e2e", "golanghost", "*.c"))
	if err != nil || len(sources) == 0 {
		return fmt.Errorf("no sources of golanghost: %w", err)
	}
	return compile(out, sources, append([]string{"-fPIC", "-shared"}, flags...)...)
}

func buildPlugin(out, main string, flags ...string) error {
	_, err := run("go", append(append([]string{"build", "-trimpath", "-buildmode=c-shared"}, flags...), "-o", out, main)...)
	return err
}

// serialized is the plugin's config as contrib hands it over: a TypedStruct in an Any.
func serialized(t testing.TB, fields map[string]any) string {
	t.Helper()
	value, err := structpb.NewStruct(fields)
	if err != nil {
		t.Fatal(err)
	}
	in, err := anypb.New(&xds.TypedStruct{TypeUrl: "type.googleapis.com/misuse.Config", Value: value})
	if err != nil {
		t.Fatal(err)
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString(b)
}

// setup is an Envoy with golanghost and the misuse plugin, and an upstream that tells what it got.
type setup struct {
	module   string // "" is hostModule
	name     string // of the plugin's config
	settings map[string]any
	routes   string // of the virtual host, before the one that takes all; YAML
	limit    int    // per_connection_buffer_limit_bytes; 0 is Envoy's
	expect   []string
	workers  int
}

func (s setup) bootstrap(t testing.TB, upstream string) []byte {
	t.Helper()
	settings := map[string]any{
		"library_id": "misuse", "library_path": plugin, "plugin_name": "misuse",
		"plugin_config": serialized(t, map[string]any{"name": s.name}),
	}
	for k, v := range s.settings {
		settings[k] = v
	}
	filter, err := json.Marshal(settings)
	if err != nil {
		t.Fatal(err)
	}
	module := s.module
	if module == "" {
		module = hostModule
	}
	limit := ""
	if s.limit > 0 {
		limit = fmt.Sprintf("per_connection_buffer_limit_bytes: %d", s.limit)
	}
	host, port, _ := strings.Cut(upstream, ":")
	return fmt.Appendf(nil, `
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: main
    %s
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: main
          http_protocol_options: {enable_trailers: true}
          stream_error_on_invalid_http_message: true
          route_config:
            name: routes
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              %s
              - {name: rest, match: {prefix: "/"}, route: {cluster: up, timeout: 0s}}
          http_filters:
          - name: golanghost
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.dynamic_modules.v3.DynamicModuleFilter
              dynamic_module_config: {module: {local: {filename: %q}}, do_not_close: true, load_globally: true}
              filter_name: golanghost
              filter_config: {"@type": type.googleapis.com/google.protobuf.Struct, value: %s}
          - name: router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: up
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http_protocol_options: {enable_trailers: true}}
    load_assignment: {cluster_name: up, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: %s, port_value: %s}}}}]}]}
`, limit, strings.ReplaceAll(s.routes, "\n", "\n              "), module, filter, host, port)
}

func (s setup) start(t *testing.T) *running {
	t.Helper()
	up := newUpstream(t)
	e, err := s.try(t, up.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	r := &running{Envoy: e, upstream: up, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 10}}}
	t.Cleanup(func() {
		r.client.CloseIdleConnections()
		stopped := e.Stop()
		if !r.dies && stopped != nil {
			t.Error(stopped)
		}
		if err := e.CheckLog(); err != nil && !r.dies {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("Envoy said:\n%s", strings.Join(e.Log(), "\n"))
		}
	})
	return r
}

func (s setup) try(t testing.TB, upstream string) (*envoyrun.Envoy, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var expect []*regexp.Regexp
	for _, p := range s.expect {
		expect = append(expect, regexp.MustCompile(p))
	}
	return envoyrun.Start(ctx, envoyrun.Options{
		Binary: envoyBinary, Bootstrap: s.bootstrap(t, upstream), Concurrency: max(1, s.workers), Expect: expect,
	})
}

type running struct {
	*envoyrun.Envoy
	upstream *httptest.Server
	client   *http.Client
	dies     bool // the test expects Envoy's end
}

// got is what the upstream saw.
type got struct {
	Path    string
	Headers http.Header
	Trailer http.Header
	Body    string
	Length  int64
}

// newUpstream answers each request with what it got, as JSON.
func newUpstream(t testing.TB) *httptest.Server {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("content-type", "application/json")
		if r.Header.Get("x-hang") != "" { // headers only, until the client is gone
			w.WriteHeader(http.StatusOK)
			_, _ = w.Write([]byte("{"))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		}
		_ = json.NewEncoder(w).Encode(got{r.URL.Path, r.Header, r.Trailer, string(body), r.ContentLength})
	}))
	t.Cleanup(up.Close)
	return up
}

// call is a request with what it asks of the plugin.
type call struct {
	do       string
	path     string
	method   string
	body     io.Reader
	headers  map[string]string
	trailers map[string]string
}

func (r *running) send(ctx context.Context, c call) (*http.Response, error) {
	if c.method == "" {
		c.method = http.MethodGet
		if c.body != nil {
			c.method = http.MethodPost
		}
	}
	req, err := http.NewRequestWithContext(ctx, c.method, "http://"+r.Addr("main")+"/"+c.path, c.body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("x-do", c.do)
	for k, v := range c.headers {
		req.Header.Set(k, v)
	}
	if c.trailers != nil {
		req.Trailer = http.Header{}
		for k, v := range c.trailers {
			req.Trailer.Set(k, v)
		}
		req.ContentLength = -1
	}
	return r.client.Do(req)
}

// answer is a response, read whole; got only where the upstream made it.
type answer struct {
	*http.Response
	text string
	got  got
}

func (r *running) do(t *testing.T, c call) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp, err := r.send(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	a := answer{Response: resp, text: string(b)}
	_ = json.Unmarshal(b, &a.got)
	return a
}

func (r *running) waitLog(t *testing.T, pattern string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	line, err := r.WaitLog(ctx, regexp.MustCompile(pattern))
	if err != nil {
		t.Fatalf("no log line %q: %v", pattern, err)
	}
	return line
}

// pieces is a body that comes in pieces, each when the one before was read, so that its length is unknown.
func pieces(list ...string) io.Reader {
	r, w := io.Pipe()
	var once sync.Once
	go once.Do(func() {
		for _, p := range list {
			if _, err := io.WriteString(w, p); err != nil {
				return
			}
		}
		_ = w.Close()
	})
	return r
}
