package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	"github.com/shuntproxy/shunt/filter"
	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/internal/sim"
)

// pod is one simulated engine of the demo.
type pod struct {
	name, model string
	loaded      bool // an old GPU that others keep busy
}

const (
	bigModel   = "llama-3-8b" // on three pods, of which two are slow and loaded
	smallModel = "qwen-2.5-7b"
)

func pods() []pod {
	return []pod{
		{name: "llama-0", model: bigModel},
		{name: "llama-1", model: bigModel, loaded: true},
		{name: "llama-2", model: bigModel, loaded: true},
		{name: "qwen-0", model: smallModel},
	}
}

// engine is how a pod is simulated. A loaded one has 40 % of the speed, and pretends to have the requests of others: 48
// that run, which slow each step, 16 that wait, behind which a new one waits 0.8 s, and a KV cache that is nearly full.
func (p pod) engine() sim.Config {
	c := sim.Config{
		Name: p.name, Models: []string{p.model}, Params: sim.Params{DecodeRate: 100},
		// Envoy closes idle connections a second before an engine does; a busy machine may take longer, and a request fails.
		IdleTimeout: -1,
	}
	if p.loaded {
		c.Params.DecodeRate = 40
		c.Load = sim.Load{Running: 48, Waiting: 16, KVUsage: 0.92}
	}
	return c
}

// world is Envoy with shunt and the engines, which run in this process.
type world struct {
	envoy   *envoyrun.Envoy
	pods    []pod
	engines []*sim.Server // of pods, in order
	admin   *http.Client  // of shunt's admin listener, at any host
}

// place says where a world listens and keeps its files.
type place struct {
	loading                   loading
	envoy                     string
	listen, admin, shuntAdmin string // shuntAdmin is IP:port or unix:PATH
	dir                       string // Envoy's working directory
	policy                    string
	// write, if set, keeps a file in dir; shunt's document is then read from there.
	write  func(name string, text []byte) (path string, err error)
	onLine func(string)
}

// start makes a world and waits until shunt may pick each of its engines.
func start(ctx context.Context, p place) (*world, error) {
	w := &world{pods: pods(), admin: adminClient(p.shuntAdmin)}
	if err := w.start(ctx, p); err != nil {
		return nil, errors.Join(err, w.stop())
	}
	return w, nil
}

func (w *world) start(ctx context.Context, p place) error {
	for _, pod := range w.pods {
		e, err := sim.NewServer(pod.engine())
		if err != nil {
			return err
		}
		if err := e.Start(); err != nil {
			return err
		}
		w.engines = append(w.engines, e)
	}
	l := p.loading
	o := bootstrap.Options{
		Door: l.door, Host: l.host, Module: l.module, HostModule: l.hostModule,
		Listen: p.listen, Admin: p.admin, Document: w.document(p),
	}
	var err error
	if p.write != nil {
		if o.ConfigFile, err = p.write("shunt.yaml", o.Document); err != nil {
			return err
		}
	}
	text, err := bootstrap.Generate(o)
	if err != nil {
		return err
	}
	if p.write != nil {
		if _, err := p.write("envoy.yaml", text); err != nil {
			return err
		}
	}
	w.envoy, err = envoyrun.Start(ctx, envoyrun.Options{
		Binary: p.envoy, Bootstrap: text, Concurrency: 2, Dir: p.dir, OnLine: p.onLine,
		Args: []string{"--file-flush-interval-msec", "200", "--drain-time-s", "1"},
	})
	if err != nil {
		return err
	}
	return w.waitReady(ctx)
}

// document is shunt's configuration.
func (w *world) document(p place) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "policy: %s\npools:\n  default:\n    static:\n", p.policy)
	for i, e := range w.engines {
		_, port, _ := net.SplitHostPort(e.Addr())
		fmt.Fprintf(&b, "    - pod: %s\n      address: %q\n", w.pods[i].name, e.Addr())
		fmt.Fprintf(&b, "      labels: {model.aibrix.ai/name: %s, model.aibrix.ai/engine: vllm, model.aibrix.ai/metric-port: %q}\n", w.pods[i].model, port)
	}
	fmt.Fprintf(&b, "explain: {header: true}\nadmin: {address: %q}\n", p.shuntAdmin)
	return []byte(b.String())
}

// stop ends everything, in the order in which requests flow.
func (w *world) stop() error {
	var errs []error
	if w.envoy != nil {
		errs = append(errs, w.envoy.Stop())
	}
	for _, e := range w.engines {
		errs = append(errs, e.Close())
	}
	w.admin.CloseIdleConnections()
	return errors.Join(errs...)
}

func adminClient(address string) *http.Client {
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", path
	}
	return &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
	}}
}

// status is shunt's view.
func (w *world) status(ctx context.Context) (filter.Status, error) {
	var s filter.Status
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://shunt/statusz.json", nil)
	if err != nil {
		return s, err
	}
	resp, err := w.admin.Do(req)
	if err != nil {
		return s, fmt.Errorf("shunt's admin listener: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d", resp.StatusCode)
	}
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	if err != nil {
		return s, fmt.Errorf("shunt's admin listener: /statusz.json: %w", err)
	}
	return s, nil
}

// endpoints is shunt's view of the engines, by address.
func (w *world) endpoints(ctx context.Context) (map[string]filter.EndpointStatus, error) {
	s, err := w.status(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]filter.EndpointStatus{}
	for _, p := range s.Pools {
		for _, e := range p.Endpoints {
			found[e.Endpoint] = e
		}
	}
	return found, nil
}

// await polls shunt's view, which sends no event, until ok.
func (w *world) await(ctx context.Context, what string, ok func(map[string]filter.EndpointStatus) bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		found, err := w.endpoints(ctx)
		if err == nil && ok(found) {
			return nil
		}
		select {
		case <-tick.C:
		case <-w.envoy.Done():
			return fmt.Errorf("waiting until %s: Envoy has ended\n  %s", what, strings.Join(w.logEnd(), "\n  "))
		case <-ctx.Done():
			if err == nil {
				err = fmt.Errorf("shunt shows %+v", found)
			}
			return fmt.Errorf("waited too long until %s: %w", what, err)
		}
	}
}

func (w *world) waitReady(ctx context.Context) error {
	return w.await(ctx, "all engines are ready and scraped", func(found map[string]filter.EndpointStatus) bool {
		for _, e := range w.engines {
			if f := found[e.Addr()]; f.State != "ready" || f.KV == nil {
				return false
			}
		}
		return true
	})
}

func (w *world) logEnd() []string {
	log := w.envoy.Log()
	return log[max(0, len(log)-15):]
}

// envoyVersion is a number such as 1.39.3, "" where Envoy doesn't say.
func (w *world) envoyVersion(ctx context.Context) string {
	_, body, err := w.envoy.Admin(ctx, http.MethodGet, "/server_info")
	var info struct {
		Version string `json:"version"` // commit/1.39.3/Clean/RELEASE/…
	}
	if err != nil || json.Unmarshal(body, &info) != nil {
		return ""
	}
	if parts := strings.Split(info.Version, "/"); len(parts) > 1 {
		return parts[1]
	}
	return ""
}
