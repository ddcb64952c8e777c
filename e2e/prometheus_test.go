package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/loopback"
	"github.com/shuntproxy/shunt/internal/sim"
)

// promServer is a real Prometheus that scrapes engines, behind TLS and a
// password.
type promServer struct {
	dir, binary, addr, ca string
	client                *http.Client
	cmd                   *exec.Cmd // nil while it is down

	mu  sync.Mutex
	out strings.Builder // protected by mu
}

// promPassword and its bcrypt hash, of the cheapest kind.
const (
	promPassword = "pass word"
	promHash     = "$2b$04$5TYLK64TG5NwYTYT4amALeJEPHenwJadEzyg4FeFq82UgM82GkOdC"
)

// Write takes Prometheus's output.
func (p *promServer) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *promServer) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// newPrometheus writes all that a server needs; start runs it.
func newPrometheus(t *testing.T, engines ...*sim.Server) *promServer {
	t.Helper()
	find := exec.Command("../build/prometheus.sh")
	var problem strings.Builder
	find.Stderr = &problem
	path, err := find.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, problem.String())
	}
	p := &promServer{dir: t.TempDir(), binary: strings.TrimSpace(string(path))}
	p.certificate(t)
	groups := map[string][]string{}
	for _, e := range engines {
		path := map[string]string{"vllm": "/metrics", "sglang": "/metrics", "trtllm": "/prometheus/metrics", "xllm": "/brpc_metrics"}[e.Config().Engine]
		groups[path] = append(groups[path], e.Addr())
	}
	config := "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n"
	for path, addrs := range groups {
		list, _ := json.Marshal(addrs) // of strings
		// Twice, as it is where a cluster has more than one way to find its pods.
		for _, job := range []string{"pods", "again"} {
			config += fmt.Sprintf("- {job_name: %q, metrics_path: %q, static_configs: [{targets: %s, labels: {group: %s}}]}\n", job+path, path, list, job)
		}
	}
	p.write(t, "prometheus.yml", config)
	p.write(t, "web.yml", "tls_server_config: {cert_file: cert.pem, key_file: key.pem}\nbasic_auth_users: {shunt: \""+promHash+"\"}\n")
	p.write(t, "password", promPassword+"\n")
	p.addr = loopback.Reserve(t) // Prometheus doesn't say which port it took, and has to get the same again
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			t.Logf("Prometheus:\n%s", p.output())
		}
	})
	return p
}

func (p *promServer) file(name string) string { return filepath.Join(p.dir, name) }

func (p *promServer) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(p.file(name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// certificate makes one that signs itself, and a client that believes it.
func (p *promServer) certificate(t *testing.T) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"prometheus.test"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	p.write(t, "cert.pem", cert)
	p.write(t, "key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
	p.ca = p.file("cert.pem")
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(cert))
	p.client = &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "prometheus.test", MinVersion: tls.VersionTLS12}, DisableKeepAlives: true,
	}}
}

// start runs the server and waits until it answers.
func (p *promServer) start(t *testing.T) {
	t.Helper()
	p.cmd = exec.Command(p.binary, "--config.file="+p.file("prometheus.yml"), "--web.config.file="+p.file("web.yml"),
		"--storage.tsdb.path="+p.file("data"), "--web.listen-address="+p.addr, "--log.level=warn")
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "Prometheus is ready", func() string {
		if _, err := p.query("vector(1)"); err != nil {
			return err.Error() + "\n" + p.output()
		}
		return ""
	})
}

func (p *promServer) stop() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait() // it was killed
		p.cmd = nil
	}
}

// signal stops and continues the process.
func (p *promServer) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// query is the number of series of an answer.
func (p *promServer) query(promql string) (int, error) {
	req, err := http.NewRequest(http.MethodGet, "https://"+p.addr+"/api/v1/query?query="+url.QueryEscape(promql), nil)
	if err != nil {
		return 0, err
	}
	req.SetBasicAuth("shunt", promPassword)
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	var answer struct {
		Status string
		Data   struct{ Result []any }
	}
	if err := json.Unmarshal(b, &answer); err != nil || answer.Status != "success" {
		return 0, fmt.Errorf("%s: %s", resp.Status, b)
	}
	return len(answer.Data.Result), nil
}

// config is shunt's way to the server.
func (p *promServer) config(selector string) string {
	return fmt.Sprintf(`prometheus:
  {url: "https://%s", interval: 200ms, timeout: 2s, selector: '%s', tls: {caFile: "%s", serverName: prometheus.test}, basicAuth: {username: shunt, passwordFile: "%s"}}
`, p.addr, selector, p.ca, p.file("password"))
}

// TestPrometheus: the query-based metrics of a real server that scrapes all
// four engines; what happens to them, and not to requests, when it hangs, dies
// and comes back.
func TestPrometheus(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		four := startFour(t)
		p := newPrometheus(t, four.servers...)
		p.start(t)
		w := start(t, d, setup{engines: 1, pools: four.pools(), config: "policy: random\n" + p.config(`group="pods"`)})

		const body = `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}`
		send := func(n int) {
			t.Helper()
			for range n {
				if r := w.must(t, w.h1, call{body: strings.NewReader(body)}); r.status != 200 {
					t.Fatalf("%v", r)
				}
			}
		}
		// Counters grow from the first sample that a server has of them.
		eventually(t, "Prometheus has scraped all it can", func() string {
			n, err := p.query(`vllm:request_success_total{group="pods"} or sglang:num_requests_total{group="pods"}`)
			if err != nil || n != 12 { // 5 reasons by 2 ranks, and 2 kinds of stream
				return fmt.Sprint(n, err)
			}
			return ""
		})
		send(100) // two of four engines have to get some
		var vllm, sglang map[string]float64
		eventually(t, "all query-based metrics are there", func() string {
			s := w.status(t)
			vllm, sglang = endpoint(s, four.servers[0]).Queried, endpoint(s, four.servers[1]).Queried
			if len(vllm) != 11 || len(sglang) != 1 || s.Pools[0].Prometheus == nil || !s.Pools[0].Prometheus.Up {
				return fmt.Sprint(vllm, sglang, s.Pools[0].Prometheus)
			}
			return ""
		})
		// Five tokens each, of prompts that are all the same. Queries are asked one
		// after another, while the window they extrapolate over grows.
		eventually(t, "the figures agree", func() string {
			vllm = endpoint(w.status(t), four.servers[0]).Queried
			for name, want := range map[string]float64{
				"avg_generation_toks_per_req":                5,
				"avg_generation_throughput_toks_per_min_pod": 5 * vllm["avg_requests_per_min_pod"],
				"avg_prompt_throughput_toks_per_min_pod":     vllm["avg_prompt_toks_per_req"] * vllm["avg_requests_per_min_pod"],
				"p95_ttft_5m":                                vllm["p95_ttft_5m_pod"],
			} {
				if v := vllm[name]; v < want*0.95 || v > want*1.05 {
					return fmt.Sprintf("%s is %v, %v expected of %v", name, v, want, vllm)
				}
			}
			return ""
		})
		for name, v := range vllm {
			if !(v > 0) || name == "avg_tpot_pod_5m" && v == 1 {
				t.Errorf("%s is %v", name, v)
			}
		}
		if v := sglang["drain_rate_1m"]; !(v >= 0.01) {
			t.Errorf("drain_rate_1m is %v", v)
		}
		for _, e := range four.servers[2:] {
			if q := endpoint(w.status(t), e).Queried; q != nil {
				t.Errorf("%s has %v: no query asks for its names", e.Config().Engine, q)
			}
		}
		up := func(want float64) {
			t.Helper()
			eventually(t, fmt.Sprintf("shunt_prometheus_up is %v", want), func() string {
				if v := w.metric(t, "shunt_prometheus_up", "pool", "default"); v != want {
					return fmt.Sprint(v)
				}
				return ""
			})
		}
		absent := func() {
			t.Helper()
			eventually(t, "no query-based metric", func() string {
				for _, e := range four.servers {
					if q := endpoint(w.status(t), e).Queried; q != nil {
						return fmt.Sprint(q)
					}
				}
				return ""
			})
		}
		up(1)
		if n := w.metric(t, "shunt_prometheus_endpoints"); n != 2 {
			t.Errorf("%v endpoints have readings, want 2", n)
		}

		// It hangs: nothing waits for it.
		p.signal(t, syscall.SIGSTOP)
		up(0)
		absent()
		send(20)
		p.signal(t, syscall.SIGCONT)
		up(1)
		// It dies and comes back empty-handed, then not.
		p.stop()
		w.waitLog(t, "prometheus: .*connection refused")
		rounds := w.metric(t, "shunt_prometheus_rounds_total", "result", "failed")
		eventually(t, "some more rounds fail", func() string {
			if n := w.metric(t, "shunt_prometheus_rounds_total", "result", "failed"); n < rounds+4 {
				return fmt.Sprint(n)
			}
			return ""
		})
		up(0)
		absent()
		send(20)
		if lines := strings.Count(strings.Join(w.envoy.Log(), "\n"), "connection refused; query-based"); lines != 1 {
			t.Errorf("%d log lines about one change", lines)
		}
		p.start(t)
		up(1)
	})
}

// TestPrometheusWithoutSeries: a server that answers and knows nothing is not
// up.
func TestPrometheusWithoutSeries(t *testing.T) {
	eachDoor(t, func(t *testing.T, d door) {
		four := startFour(t)
		p := newPrometheus(t, four.servers...)
		p.start(t)
		w := start(t, d, setup{engines: 1, pools: four.pools(), config: p.config(`group="nope"`)})
		w.waitLog(t, `prometheus: .* it has no series with group="nope" that the queries ask for`)
		if r := w.must(t, w.h1, call{body: strings.NewReader(chat)}); r.status != 200 {
			t.Error(r)
		}
		if v := w.metric(t, "shunt_prometheus_up"); v != 0 {
			t.Errorf("shunt_prometheus_up is %v", v)
		}
	})
}
