package compose

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	"github.com/shuntproxy/shunt/internal/bootstrap"
)

// patience bounds every wait for an event. It only ends a test that fails.
const patience = 60 * time.Second

func project(t *testing.T) *types.Project {
	t.Helper()
	o, err := cli.NewProjectOptions([]string{root + "/build/docker-compose.yaml"}, cli.WithResolvedPaths(true), cli.WithoutEnvironmentResolution)
	if err != nil {
		t.Fatal(err)
	}
	p, err := o.LoadProject(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestFile checks what can be seen without running anything.
func TestFile(t *testing.T) {
	p := project(t)
	_, stages := dockerfile(t)
	engines := 0
	for _, name := range p.ServiceNames() {
		s := p.Services[name]
		switch {
		case s.Build != nil:
			if stages[s.Build.Target] == nil {
				t.Errorf("%s: the Dockerfile has no target %s", name, s.Build.Target)
			}
			if got, want := filepath.Join(s.Build.Context, s.Build.Dockerfile), absolute(t, root+"/build/Dockerfile"); got != want {
				t.Errorf("%s: is built from %s, not %s", name, got, want)
			}
			if s.Build.Target == "enginesim" {
				engines++
			}
		case !regexp.MustCompile(`:v[0-9]+\.[0-9]+\.[0-9]+(@sha256:[0-9a-f]{64})?$`).MatchString(s.Image):
			t.Errorf("%s: image %s is no release", name, s.Image)
		}
		if s.Privileged || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
			t.Errorf("%s may do more than it needs", name)
		}
		if name != "envoy" && s.NetworkMode != "service:envoy" {
			t.Errorf("%s has the network %q, not Envoy's", name, s.NetworkMode)
		}
		for _, v := range s.Volumes {
			if _, err := os.Stat(v.Source); v.Type == types.VolumeTypeBind && err != nil {
				t.Errorf("%s: mounts what isn't there: %v", name, err)
			}
		}
		for _, port := range s.Ports {
			if port.HostIP != "127.0.0.1" {
				t.Errorf("%s: port %s is published to the world", name, port.Published)
			}
		}
	}
	if engines != 4 {
		t.Errorf("%d engines, want 4", engines)
	}
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// order is one in which no service comes before those it depends on.
func order(p *types.Project) []string {
	var names []string
	var add func(name string)
	add = func(name string) {
		if slices.Contains(names, name) {
			return
		}
		s := p.Services[name]
		for _, before := range s.GetDependencies() {
			add(before)
		}
		names = append(names, name)
	}
	for _, name := range p.ServiceNames() {
		add(name)
	}
	return names
}

// TestServices runs the demo, and sends it a chat.
func TestServices(t *testing.T) {
	if *outFlag == "" {
		t.Skip("needs -out, the folder of what make build leaves: make e2e-host gives it")
	}
	out := absolute(t, *outFlag)
	p := project(t)
	_, stages := dockerfile(t)
	ctx, cancel := context.WithTimeout(context.Background(), 5*patience) // for all its waits
	defer cancel()
	envoy, envoyFile := envoyFor(ctx, t, out)
	foreign := map[string]map[string]string{"envoy": {"envoy": envoy}, "prometheus": {"wget": find("wget")}}
	prometheus := find("prometheus")

	processes, containers := map[string]*process{}, map[string]*container{}
	for _, name := range order(p) {
		s := p.Services[name]
		if name == "prometheus" && prometheus == "" {
			fmt.Fprintln(os.Stderr, "compose: LEFT OUT: no prometheus on PATH (Debian's package prometheus has one); its targets are asked directly")
			continue
		}
		var image *stage
		args := slices.Clone([]string(s.Command))
		if s.Build != nil {
			if image = stages[s.Build.Target]; image == nil {
				t.Fatalf("%s: the Dockerfile has no target %s", name, s.Build.Target)
			}
			args = append(slices.Clone(image.entrypoint), args...)
		} else {
			args = append([]string{"prometheus"}, args...)
			foreign[name]["prometheus"] = prometheus
		}
		c := containerOf(t, s, image, out, foreign[name])
		if name == "envoy" {
			const mounted = "/etc/envoy/envoy.yaml"
			if c.files[mounted] != absolute(t, root+"/envoy.yaml") {
				t.Fatalf("%s is mounted from %q, not from the reference bootstrap", mounted, c.files[mounted])
			}
			if c.files[bootstrap.ContribLibrary] == "" {
				t.Fatalf("the image has no %s", bootstrap.ContribLibrary)
			}
			c.files[mounted] = envoyFile
		}
		translated, err := c.command(args)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		processes[name], containers[name] = launch(t, name, t.TempDir(), translated), c
	}
	for name, running := range processes {
		if err := running.healthy(ctx, containers[name], p.Services[name].HealthCheck); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	t.Log("all services are healthy")

	checkPorts(t, p, prometheus == "")
	awaitReadings(ctx, t, 4)
	// The two loaded pods are avoided, and each model has its own.
	for name, endpoint := range map[string]string{"qwen-2.5-7b": "127.0.0.1:8004", "llama-3-8b": "127.0.0.1:8001"} {
		chat(ctx, t, name, endpoint)
	}
	checkTargets(ctx, t, p)
	if prometheus != "" {
		awaitScrapes(ctx, t)
	}
	if bad := processes["envoy"].lines(regexp.MustCompile(`\]\[(error|critical)\]`)); len(bad) > 0 {
		t.Errorf("Envoy logs errors:\n%s", strings.Join(bad, "\n"))
	}
}

// envoyFor is the Envoy to run and its bootstrap: a contrib one with envoy.yaml itself but for the library's path, or
// a stock one with the same configuration under golanghost.
func envoyFor(ctx context.Context, t *testing.T, out string) (binary, file string) {
	t.Helper()
	reference, err := os.ReadFile(root + "/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "envoy.yaml")
	library := filepath.Join(out, filepath.Base(bootstrap.ContribLibrary))
	var text []byte
	if binary = os.Getenv("ENVOY_CONTRIB"); binary != "" {
		text = bytes.Replace(reference, []byte(bootstrap.ContribLibrary), []byte(library), 1)
	} else {
		fmt.Fprintln(os.Stderr, "compose: a stock Envoy with golanghost stands in for contrib; ENVOY_CONTRIB=path names a contrib one")
		document, err := os.ReadFile(root + "/build/compose/shunt.yaml")
		if err != nil {
			t.Fatal(err)
		}
		o := bootstrap.Options{
			Door: bootstrap.DoorContrib, Listen: "0.0.0.0:8080", Admin: "127.0.0.1:9901", Document: document,
		}
		// The two differ in the filter alone: envoy.yaml is what these options print.
		if same, err := bootstrap.Generate(o); err != nil || !bytes.Equal(same, reference) {
			t.Fatalf("envoy.yaml is not printed from build/compose/shunt.yaml: %v", err)
		}
		o.Host, o.Module, o.HostModule = bootstrap.HostGolanghost, library, golanghost(t, out)
		if text, err = bootstrap.Generate(o); err != nil {
			t.Fatal(err)
		}
		if binary, err = envoyrun.Binary(ctx, absolute(t, root), *envoyFlag); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return binary, file
}

func golanghost(t *testing.T, out string) string {
	t.Helper()
	for _, dir := range []string{out, filepath.Join(out, "e2e")} {
		if path := filepath.Join(dir, "libgolanghost.so"); exists(path) {
			return path
		}
	}
	t.Fatalf("libgolanghost.so is not in %s: make e2e builds it", out)
	return ""
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func find(program string) string { path, _ := exec.LookPath(program); return path }

// checkPorts: Docker reaches a published port from outside the container's loopback, so something must listen on all
// addresses.
func checkPorts(t *testing.T, p *types.Project, withoutPrometheus bool) {
	t.Helper()
	const listening = "0A"
	open := map[uint32]bool{}
	for _, file := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // no IPv6 here
		}
		for line := range strings.Lines(string(text)) {
			fields := strings.Fields(line)
			address, port, _ := strings.Cut(fields[1], ":")
			if fields[3] != listening || strings.Trim(address, "0") != "" {
				continue
			}
			n, err := strconv.ParseUint(port, 16, 16)
			if err != nil {
				t.Fatal(err)
			}
			open[uint32(n)] = true
		}
	}
	for _, s := range p.Services {
		for _, port := range s.Ports {
			if !open[port.Target] && (port.Target != 9090 || !withoutPrometheus) {
				t.Errorf("%s: port %d is published, but nothing listens there on all addresses", s.Name, port.Target)
			}
		}
	}
}

func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s: %s", url, resp.Status, body)
	}
	return body, err
}

// await polls what has no event to wait for.
func await(ctx context.Context, t *testing.T, what string, ok func() error) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ok()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("waited too long until %s: %v", what, err)
		}
	}
}

func awaitReadings(ctx context.Context, t *testing.T, endpoints int) {
	t.Helper()
	await(ctx, t, "all engines are ready and scraped", func() error {
		body, err := get(ctx, "http://127.0.0.1:9902/statusz.json")
		if err != nil {
			return err
		}
		var status struct {
			Pools []struct {
				Endpoints []struct {
					State string
					KV    *float64 `json:"kv_cache_usage_perc"`
				}
			}
		}
		if err := json.Unmarshal(body, &status); err != nil {
			return err
		}
		ready := 0
		for _, e := range status.Pools[0].Endpoints {
			if e.State == "ready" && e.KV != nil {
				ready++
			}
		}
		if ready != endpoints {
			return fmt.Errorf("%d are, of\n%s", ready, body)
		}
		return nil
	})
}

func chat(ctx context.Context, t *testing.T, model, endpoint string) {
	t.Helper()
	body := fmt.Sprintf(`{"model": %q, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}`, model)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:8080/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Shunt-Explain", "1")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct {
		Model string
		Usage struct {
			CompletionTokens int `json:"completion_tokens"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v", model, resp.Status, err)
	}
	if answer.Model != model || answer.Usage.CompletionTokens != 4 {
		t.Errorf("%s: the answer is %+v", model, answer)
	}
	if got := resp.Header.Get("X-Shunt-Endpoint"); got != endpoint {
		t.Errorf("%s went to %q, not %s", model, got, endpoint)
	}
}

// checkTargets asks what prometheus.yml names, as Prometheus would.
func checkTargets(ctx context.Context, t *testing.T, p *types.Project) {
	t.Helper()
	var file string
	for _, v := range p.Services["prometheus"].Volumes {
		if v.Target == "/etc/prometheus/prometheus.yml" {
			file = v.Source
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Scrape []struct {
			Name   string `yaml:"job_name"`
			Path   string `yaml:"metrics_path"`
			Static []struct{ Targets []string }
		} `yaml:"scrape_configs"`
	}
	if err := yaml.Unmarshal(bytes.ReplaceAll(text, []byte("static_configs"), []byte("static")), &config); err != nil {
		t.Fatal(err)
	}
	asked := 0
	for _, job := range config.Scrape {
		for _, target := range job.Static[0].Targets {
			path := job.Path
			if path == "" {
				path = "/metrics"
			}
			page, err := get(ctx, "http://"+target+path)
			if err != nil {
				t.Errorf("job %s: %v", job.Name, err)
				continue
			}
			parser := expfmt.NewTextParser(model.UTF8Validation)
			families, err := parser.TextToMetricFamilies(bufio.NewReader(bytes.NewReader(page)))
			if err != nil || len(families) == 0 {
				t.Errorf("job %s: %s has %d metrics, %v", job.Name, target, len(families), err)
			}
			if job.Name == "shunt" && families["shunt_endpoint_picks_total"] == nil {
				t.Errorf("job shunt: no shunt_endpoint_picks_total")
			}
			asked++
		}
	}
	if asked != 6 {
		t.Errorf("%d targets, want shunt, Envoy and four engines", asked)
	}
}

// awaitScrapes waits until Prometheus has everything, and knows of our two chats.
func awaitScrapes(ctx context.Context, t *testing.T) {
	t.Helper()
	for query, want := range map[string]string{"sum(up)": "6", "sum(shunt_endpoint_picks_total)": "2"} {
		await(ctx, t, query+" is "+want, func() error {
			body, err := get(ctx, "http://127.0.0.1:9090/api/v1/query?query="+url.QueryEscape(query))
			if err != nil {
				return err
			}
			var answer struct {
				Data struct {
					Result []struct{ Value [2]any }
				}
			}
			if err := json.Unmarshal(body, &answer); err != nil {
				return err
			}
			if r := answer.Data.Result; len(r) != 1 || r[0].Value[1] != want {
				return fmt.Errorf("it is %s", body)
			}
			return nil
		})
	}
}
