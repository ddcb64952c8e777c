package hosttest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// plainly is a run of plainhost: a module, or golanghost with a plugin, without Envoy.
type plainly struct {
	host, module  string
	config, route string
	vary          string
	streams       int
	env           []string
	args          []string
}

// Waits end, replies run through Encode*, clients go away and configs change under both tools.
const rightsInPlain = "x-do=,buffer,headers,reply,reply-empty,reply-in-data,reply-async,reply-encode-async,async,async-buffer," +
	"async-data,async-chunks,encode-async,encode-body,panic,panic-async,buffer-nothing,set-in-data"

func (p plainly) run(t *testing.T) (output string, err error) {
	t.Helper()
	dir := t.TempDir()
	args := []string{"--module", p.module, "--streams", strconv.Itoa(p.streams)}
	if p.vary != "" {
		args = append(args, "--vary", p.vary)
	}
	for flag, text := range map[string]string{"config": p.config, "route": p.route} {
		if text == "" {
			continue
		}
		file := filepath.Join(dir, flag)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--"+flag, file)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.host, append(args, p.args...)...)
	cmd.Env = append(os.Environ(), p.env...)
	b, err := cmd.CombinedOutput()
	return string(b), err
}

// wantEnd runs and wants all streams to end, with each of the ways to end among them.
func (p plainly) wantEnd(t *testing.T) {
	t.Helper()
	out, err := p.run(t)
	m := regexp.MustCompile(`streams (\d+) passed (\d+) replied (\d+) aborted (\d+) resumed (\d+) configs (\d+)\n`).FindStringSubmatch(out)
	if err != nil || m == nil || strings.Contains(out, "Sanitizer") || strings.Contains(out, "DATA RACE") {
		t.Fatalf("%v\n%s", err, tail(out))
	}
	for i, what := range []string{"stream", "stream that passed", "reply", "abort", "resumed stream", "config"} {
		if m[i+1] == "0" {
			t.Errorf("no %s: %s", what, m[0])
		}
	}
	t.Log(m[0])
}

func tail(s string) string { return s[max(0, len(s)-10_000):] }

func hostSettings(t *testing.T, library, name, config string, more map[string]any) string {
	t.Helper()
	all := map[string]any{"library_id": name, "library_path": library, "plugin_name": name, "plugin_config": config}
	for k, v := range more {
		all[k] = v
	}
	b, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func buildPlain(t *testing.T, out string, flags ...string) {
	t.Helper()
	sources, err := filepath.Glob(filepath.Join(root, "e2e", "plainhost", "*.c"))
	if err != nil || len(sources) == 0 {
		t.Fatal("no sources of plainhost", err)
	}
	if err := compile(out, sources, append([]string{"-rdynamic"}, flags...)...); err != nil {
		t.Fatal(err)
	}
}

// wantClean runs all streams and wants no fault, whatever became of each.
func (p plainly) wantClean(t *testing.T) {
	t.Helper()
	if out, err := p.run(t); err != nil || !strings.Contains(out, fmt.Sprintf("streams %d ", p.streams)) || strings.Contains(out, "Sanitizer") || strings.Contains(out, "DATA RACE") {
		t.Errorf("%v\n%s", err, tail(out))
	}
}

// golanghost, the plugin and plainhost under AddressSanitizer.
func TestAddressSanitizer(t *testing.T) {
	dir := t.TempDir()
	host, module, library := filepath.Join(dir, "plainhost"), filepath.Join(dir, "libgolanghost.so"), filepath.Join(dir, "libmisuse.so")
	flags := []string{"-fsanitize=address", "-fno-omit-frame-pointer"}
	buildPlain(t, host, flags...)
	if err := buildHost(module, flags...); err != nil {
		t.Fatal(err)
	}
	if err := buildPlugin(library, "./build/misuse", "-asan"); err != nil {
		t.Fatal(err)
	}
	name := serialized(t, map[string]any{"name": "c"})
	p := plainly{
		host: host, module: module, vary: rightsInPlain, streams: 3000,
		config: hostSettings(t, library, "misuse", name, map[string]any{"gc_interval_ms": 5}),
		route:  hostSettings(t, library, "misuse", name, nil),
		args:   []string{"--reload", "20"},
		env:    []string{"ASAN_OPTIONS=detect_leaks=0"}, // a Go runtime never frees all
	}
	p.wantEnd(t)
	p.vary = "x-do=raw-after-continue"
	if out, err := p.run(t); err == nil || !strings.Contains(out, "heap-use-after-free") {
		t.Errorf("a use of freed memory is not reported: %v\n%s", err, tail(out))
	}
}

// announced makes the plain host's requests tell the length of their body, or
// lie about it: the stock door then decides headers and body in one call.
const announced = "content-length=100,5000,0,7"

// The stock door under AddressSanitizer, with a pool that is empty and refuses,
// and with requests that announce their bodies.
func TestAddressSanitizerStock(t *testing.T) {
	dir := t.TempDir()
	host, module := filepath.Join(dir, "plainhost"), filepath.Join(dir, "libshunt.so")
	buildPlain(t, host, "-fsanitize=address", "-fno-omit-frame-pointer")
	if err := buildPlugin(module, "./build/libshunt", "-asan"); err != nil {
		t.Fatal(err)
	}
	for name, pool := range map[string]string{"empty": "", "one": fmt.Sprintf("{address: %q, labels: {model.aibrix.ai/name: m}}", engine(t))} {
		for _, vary := range []string{announced, "content-type=application/json,application/grpc"} {
			t.Run(name+" "+vary, func(t *testing.T) {
				plainly{
					host: host, module: module, vary: vary, streams: 3000,
					config: "pools: {default: {static: [" + pool + "]}}\nlimits: {requestBody: 1KiB}\nadmin: {address: \"\"}\n",
					args:   []string{"--leave", "--reload", "20"},
					env:    []string{"ASAN_OPTIONS=detect_leaks=0"}, // a Go runtime never frees all
				}.wantClean(t)
			})
		}
	}
}

// engine answers what shunt scrapes, and nothing else.
func engine(t *testing.T) string {
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics":
			_, _ = w.Write([]byte("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"m\"} 1\n"))
		case "/v1/models":
			_, _ = w.Write([]byte(`{"object":"list","data":[{"id":"m","object":"model"}]}`))
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(up.Close)
	return up.Listener.Addr().String()
}

// granter lets shunt's waiting requests go on while a run lasts: the test builds have a switch for that.
func granter(t *testing.T, socket string) {
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://admin/test/grant?n=20", nil)
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("x-shunt-admin", "1")
			if resp, err := client.Do(req); err == nil { // until the host listens, and when it has ended
				_ = resp.Body.Close()
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		client.CloseIdleConnections()
	})
}

// raceAddress maps a module below Go's heap. Where the kernel puts libraries, the race detector has no room for its
// shadow of one ("ThreadSanitizer failed to allocate"), or can't say where a race is ("failed to restore address").
const raceAddress = "-ldflags=-extldflags=-Wl,-Ttext-segment=0x4000000000"

// The race-built modules: both doors of shunt, and the plugin of these tests.
func TestRaceDetector(t *testing.T) {
	dir := t.TempDir()
	host := filepath.Join(dir, "plainhost")
	buildPlain(t, host)
	build := func(t *testing.T, main string, flags ...string) string {
		t.Helper()
		out := filepath.Join(dir, filepath.Base(main)+".so")
		if err := buildPlugin(out, "./"+main, append([]string{"-race", raceAddress}, flags...)...); err != nil {
			t.Fatal(err)
		}
		return out
	}
	run := func(t *testing.T, module, config, route, vary string) plainly {
		return plainly{
			host: host, module: module, config: config, route: route, vary: vary, streams: 3000,
			args: []string{"--leave", "--reload", "20", "--settle", "500"},
			// The host's way to force a collection is a race in the SDK, so it is not used here.
			env: []string{"GORACE=halt_on_error=1", "GOGC=5"},
		}
	}
	quiet := map[string]any{"gc_interval_ms": 0}

	t.Run("misuse", func(t *testing.T) {
		library := build(t, "build/misuse")
		name := serialized(t, map[string]any{"name": "c"})
		p := run(t, hostModule, hostSettings(t, library, "misuse", name, quiet), hostSettings(t, library, "misuse", name, quiet), rightsInPlain)
		p.wantEnd(t)
		p.vary = "x-do=race"
		if out, err := p.run(t); err == nil || !strings.Contains(out, "DATA RACE") || !strings.Contains(out, "wrong.go") {
			t.Errorf("a race is not reported: %v\n%s", err, tail(out))
		}
	})

	t.Run("in Envoy", func(t *testing.T) { // thanks to raceAddress that works too
		library := build(t, "build/misuse")
		r := setup{name: "c", workers: 2, settings: map[string]any{"library_path": library, "gc_interval_ms": 0}}.start(t)
		for range 20 {
			seen(200, "ab", "2 in 1")(t, r.do(t, call{do: "async-data", body: pieces("a", "b")}))
			replied(503, "later", "503 reply-async", nil)(t, r.do(t, call{do: "reply-async"}))
		}
		if strings.Contains(strings.Join(r.Log(), "\n"), "DATA RACE") {
			t.Error("a race")
		}
		_ = r.do(t, call{do: "race"})
		r.waitLog(t, "DATA RACE")
	})

	const waits = "x-shunt-test=none,evict,panic-evicted,wait-1ms,wait-5ms,wait-10m"
	shunt := func(t *testing.T) (config, route string) {
		socket := filepath.Join(dir, filepath.Base(t.Name())+".sock")
		granter(t, socket)
		return fmt.Sprintf("pools: {default: {static: [{address: %q, labels: {model.aibrix.ai/name: m, model.aibrix.ai/engine: vllm}}]}}\n"+
			"scrape: {interval: 50ms, timeout: 1s, staleAfter: 5s}\nadmin: {address: %q}\n", engine(t), "unix:"+socket), "policy: random\n"
	}
	t.Run("stock", func(t *testing.T) {
		module := build(t, "build/libshunt", "-tags", "shunttest")
		config, route := shunt(t)
		run(t, module, config, route, waits).wantEnd(t)
		run(t, module, config, route, announced).wantClean(t)
	})
	t.Run("contrib", func(t *testing.T) {
		library := build(t, "build/libshunt_contrib", "-tags", "shunttest")
		config, route := shunt(t)
		run(t, hostModule, hostSettings(t, library, "shunt", text(t, config), quiet), hostSettings(t, library, "shunt", text(t, route), quiet), waits).wantEnd(t)
	})
}

// text is a StringValue in an Any, serialized.
func text(t *testing.T, s string) string {
	t.Helper()
	in, err := anypb.New(wrapperspb.String(s))
	if err != nil {
		t.Fatal(err)
	}
	b, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString(b)
}
