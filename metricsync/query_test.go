package metricsync

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestQueryText(t *testing.T) {
	plain := queryText{instance: "instance", model: "model_name"}
	odd := queryText{selector: `job="pods",zone!="b"`, instance: "pod", model: "m"}
	seen := map[string]pool.Query{}
	for _, c := range []struct {
		query pool.Query
		text  queryText
		want  string
	}{
		{pool.DrainRate1m, plain, `clamp_min(sum by (instance, model_name) (rate(sglang:num_requests_total[1m])), 0.01)`},
		{pool.P95TTFT5m, plain, `histogram_quantile(0.95, sum by (instance, model_name, le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))`},
		{pool.P95TTFT5mPod, plain, `histogram_quantile(0.95, sum by (instance, le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))`},
		{pool.AvgTTFT5mPod, plain, `sum by (instance) (increase(vllm:time_to_first_token_seconds_sum[5m])) / sum by (instance) (increase(vllm:time_to_first_token_seconds_count[5m]))`},
		{pool.P95TPOT5mPod, plain, `histogram_quantile(0.95, sum by (instance, le) (rate(vllm:time_per_output_token_seconds_bucket[5m]))) or histogram_quantile(0.95, sum by (instance, le) (rate(vllm:inter_token_latency_seconds_bucket[5m])))`},
		{pool.AvgTPOT5mPod, plain, `sum by (instance) (increase(vllm:time_per_output_token_seconds_sum[5m])) / sum by (instance) (increase(vllm:time_per_output_token_seconds_count[5m])) or sum by (instance) (increase(vllm:inter_token_latency_seconds_sum[5m])) / sum by (instance) (increase(vllm:inter_token_latency_seconds_count[5m]))`},
		{pool.AvgPromptToksPerReq, plain, `sum by (instance, model_name) (increase(vllm:request_prompt_tokens_sum[1d])) / sum by (instance, model_name) (increase(vllm:request_prompt_tokens_count[1d]))`},
		{pool.AvgGenerationToksPerReq, plain, `sum by (instance, model_name) (increase(vllm:request_generation_tokens_sum[1d])) / sum by (instance, model_name) (increase(vllm:request_generation_tokens_count[1d]))`},
		{pool.AvgE2ELatencyPod, plain, `sum by (instance) (increase(vllm:e2e_request_latency_seconds_sum[5m])) / sum by (instance) (increase(vllm:e2e_request_latency_seconds_count[5m]))`},
		{pool.AvgRequestsPerMinPod, plain, `sum by (instance) (increase(vllm:request_success_total[5m])) / 5`},
		{pool.AvgPromptThroughputToksPerMinPod, plain, `sum by (instance) (increase(vllm:prompt_tokens_total[5m])) / 5`},
		{pool.AvgGenerationThroughputToksPerMinPod, plain, `sum by (instance) (increase(vllm:generation_tokens_total[5m])) / 5`},
		{pool.DrainRate1m, odd, `clamp_min(sum by (pod, m) (rate(sglang:num_requests_total{job="pods",zone!="b"}[1m])), 0.01)`},
		{pool.P95TTFT5m, odd, `histogram_quantile(0.95, sum by (pod, m, le) (rate(vllm:time_to_first_token_seconds_bucket{job="pods",zone!="b"}[5m])))`},
		{pool.AvgE2ELatencyPod, odd, `sum by (pod) (increase(vllm:e2e_request_latency_seconds_sum{job="pods",zone!="b"}[5m])) / sum by (pod) (increase(vllm:e2e_request_latency_seconds_count{job="pods",zone!="b"}[5m]))`},
		{pool.AvgRequestsPerMinPod, odd, `sum by (pod) (increase(vllm:request_success_total{job="pods",zone!="b"}[5m])) / 5`},
	} {
		if got := c.text.of(c.query); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.query, got, c.want)
		}
		seen[c.want] = c.query
	}
	for q := range pool.NumQueries {
		if s := plain.of(q); seen[s] != q || s == "" {
			t.Errorf("%s has no row here: %s", q, s)
		}
	}
}

// prometheus is a server that answers as the test says.
type prometheus struct {
	*httptest.Server
	mu      sync.Mutex
	vectors map[string]string // JSON of a vector's results, by a part of the query
	broken  map[string]string // JSON of a whole answer, by a part of the query
	handler http.HandlerFunc  // instead of all, if set
	auth    []string          // headers that came
	queries []string
}

func newPrometheus(t *testing.T) *prometheus {
	p := &prometheus{vectors: map[string]string{}, broken: map[string]string{}}
	p.Server = reserved(t, p)
	return p
}

func (p *prometheus) set(f func()) { p.mu.Lock(); defer p.mu.Unlock(); f() }

func (p *prometheus) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	p.auth = append(p.auth, r.Header.Get("Authorization"))
	handler := p.handler
	p.mu.Unlock()
	if handler != nil {
		handler(w, r)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	query := r.FormValue("query")
	p.queries = append(p.queries, query)
	if r.URL.Path != "/api/v1/query" || r.FormValue("time") != "" {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	for part, answer := range p.broken {
		if strings.Contains(query, part) {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = w.Write([]byte(answer))
			return
		}
	}
	result := ""
	for part, vector := range p.vectors {
		if strings.Contains(query, part) {
			result = vector
		}
	}
	_, _ = fmt.Fprintf(w, `{"status":"success","data":{"resultType":"vector","result":[%s]}}`, result)
}

// inquiry is a Querier whose turns the test takes.
type inquiry struct {
	*testing.T
	*Querier
	mu        sync.Mutex
	lines     []string
	published []*pool.Queried
}

func newInquiry(t *testing.T, cfg QueryConfig) *inquiry {
	i := &inquiry{T: t}
	i.Querier = NewQuerier(QuerierOptions{
		Name: "p",
		Log: func(level slog.Level, msg string) {
			i.mu.Lock()
			defer i.mu.Unlock()
			i.lines = append(i.lines, level.String()+" "+msg)
		},
		Publish: func(q *pool.Queried) {
			i.mu.Lock()
			defer i.mu.Unlock()
			i.published = append(i.published, q)
		},
	}, cfg)
	t.Cleanup(func() { i.Stop(); i.client.close() })
	return i
}

func (i *inquiry) round(start time.Time) {
	i.Helper()
	i.turn(i.cfg.Load(), start)
}

// said returns the log lines since the last call.
func (i *inquiry) said() string {
	i.mu.Lock()
	defer i.mu.Unlock()
	lines := i.lines
	i.lines = nil
	return strings.Join(lines, "\n")
}

// read returns the newest reading for a model of 10.0.0.1, -1 for none.
func (i *inquiry) read(q pool.Query, model string, now time.Time) float64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	h := pool.NewHolder()
	h.SetQueried(i.published[len(i.published)-1])
	h.Publish(pool.NewSnapshot(pool.Input{Now: now, Endpoints: []pool.Endpoint{{
		Target: pool.Target{Addr: netip.MustParseAddrPort("10.0.0.1:8000"), MetricPort: 9000, Model: "m"}, Live: &pool.Live{Addr: "10.0.0.1:8000"},
	}}}))
	if v, ok := h.Load().Queried(q, model, now).At(0); ok {
		return v
	}
	return -1
}

const seriesOfM = `{"metric":{"instance":"10.0.0.1:9000","model_name":"m"},"value":[1,"%s"]}`

func TestQueryDefaults(t *testing.T) {
	got := QueryConfig{}.withDefaults()
	if want := (QueryConfig{Interval: 15 * time.Second, Timeout: 2 * time.Second, InstanceLabel: "instance", ModelLabel: "model_name"}); *got != want {
		t.Errorf("%+v, want %+v", *got, want)
	}
}

func TestQuerierReads(t *testing.T) {
	p := newPrometheus(t)
	p.vectors["request_prompt_tokens_sum"] = fmt.Sprintf(seriesOfM, "120.5") + `,` +
		`{"metric":{"instance":"10.0.0.1:9000","model_name":"adapter"},"value":[1,"7"]},{"metric":{"instance":"10.0.0.9:9000","model_name":"m"},"value":[1,"8"]}`
	p.vectors["request_generation_tokens_sum"] = fmt.Sprintf(seriesOfM, "NaN")
	p.vectors["e2e_request_latency_seconds_sum"] = `{"metric":{"instance":"10.0.0.1:9000"},"value":[1,"0.25"]}`
	i := newInquiry(t, QueryConfig{URL: p.URL + "/", Timeout: patience})
	now := time.Unix(1000, 0)
	i.round(now)
	for _, c := range []struct {
		query pool.Query
		model string
		want  float64
	}{
		{pool.AvgPromptToksPerReq, "m", 120.5}, {pool.AvgPromptToksPerReq, "adapter", 7}, {pool.AvgPromptToksPerReq, "new-adapter", 120.5},
		{pool.AvgGenerationToksPerReq, "m", -1}, {pool.AvgE2ELatencyPod, "m", 0.25}, {pool.P95TTFT5m, "m", -1},
	} {
		if got := i.read(c.query, c.model, now.Add(30*time.Second+patience)); got != c.want {
			t.Errorf("%s of %s: %v, want %v", c.query, c.model, got, c.want)
		}
	}
	if got := i.read(pool.AvgE2ELatencyPod, "m", now.Add(30*time.Second+patience+1)); got != -1 {
		t.Error("readings never end")
	}
	s := i.Stats()
	if !s.Up || s.Error != "" || s.Series[pool.AvgPromptToksPerReq] != 3 || s.Series[pool.P95TTFT5m] != 0 || s.Rounds != 1 || s.Failed != 0 || !s.LastGood.Equal(now) {
		t.Errorf("%+v", s)
	}
	if len(p.queries) != int(pool.NumQueries) {
		t.Errorf("%d queries in a round, want one per metric: %q", len(p.queries), p.queries)
	}
	if got := i.said(); got != "INFO pool p: prometheus: "+p.URL+"/ answers, 5 readings" {
		t.Error(got)
	}
	i.round(now)
	if got := i.said(); got != "" {
		t.Errorf("said again: %s", got)
	}
}

// One log line per change, readings that end by themselves, and no more than
// one timeout's worth of trying.
func TestQuerierUnreachable(t *testing.T) {
	p := newPrometheus(t)
	p.vectors["e2e_request"] = fmt.Sprintf(seriesOfM, "1")
	i := newInquiry(t, QueryConfig{URL: p.URL, Interval: 10 * time.Second, Timeout: patience})
	now := time.Unix(1000, 0)
	i.round(now)
	i.said()
	p.Close()
	for n := range 3 {
		i.round(now.Add(time.Duration(n+1) * 10 * time.Second))
	}
	if got := i.said(); strings.Count(got, "\n") != 0 || !strings.HasPrefix(got, "WARN pool p: prometheus: "+p.URL+": dial tcp: connect: connection refused; query-based metrics are absent once") {
		t.Errorf("%q", got)
	}
	if s := i.Stats(); s.Up || s.Error != "dial tcp: connect: connection refused" || s.Rounds != 4 || s.Failed != 3 || s.Series[pool.AvgE2ELatencyPod] != 0 {
		t.Errorf("%+v", s)
	}
	if got := i.read(pool.AvgE2ELatencyPod, "m", now.Add(20*time.Second+patience)); got != 1 {
		t.Errorf("one lost answer took the reading away: %v", got)
	}
	if got := i.read(pool.AvgE2ELatencyPod, "m", now.Add(20*time.Second+patience+1)); got != -1 {
		t.Errorf("a reading outlives its end: %v", got)
	}
	q := newPrometheus(t)
	q.vectors["e2e_request"] = fmt.Sprintf(seriesOfM, "2")
	i.Apply(QueryConfig{URL: q.URL})
	i.round(now)
	if got := i.said(); got != "INFO pool p: prometheus: "+q.URL+" answers, 1 readings" {
		t.Error(got)
	}
	if got := i.read(pool.AvgE2ELatencyPod, "m", now); got != 2 {
		t.Error(got)
	}
}

func TestQuerierHangingServer(t *testing.T) {
	p := newPrometheus(t)
	var asked sync.Map
	p.handler = func(_ http.ResponseWriter, r *http.Request) {
		asked.Store(r.FormValue("query"), true)
		<-r.Context().Done()
	}
	i := newInquiry(t, QueryConfig{URL: p.URL, Timeout: 50 * time.Millisecond})
	i.round(time.Unix(1000, 0))
	if s := i.Stats(); s.Up || s.Error != "it does not answer in time" {
		t.Errorf("%+v", s)
	}
	n := 0
	asked.Range(func(any, any) bool { n++; return true })
	if n > queriesAtOnce {
		t.Errorf("%d queries to a server that hangs, want %d at most", n, queriesAtOnce)
	}
}

func TestQuerierAnswersThatFail(t *testing.T) {
	const good = `{"status":"success","data":{"resultType":"vector","result":[]}}`
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		want    string
	}{
		"unauthorized":   {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) }, "client_error: client error: 401"},
		"unavailable":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, "server_error: server error: 503"},
		"not Prometheus": {func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }, "bad_response: "},
		"a scalar": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(`{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}`))
		}, "the answer is a scalar, not a vector"},
		"nothing it asks": {func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(good)) }, `it has no series with job="x" that the queries ask for`},
		"too large": {func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.FormValue("query"), "request_success") {
				_, _ = w.Write([]byte(strings.Repeat(" ", maxAnswer+1)))
			}
			_, _ = w.Write([]byte(good))
		}, "avg_requests_per_min_pod: the answer is larger than 8388608 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPrometheus(t)
			p.handler = c.handler
			i := newInquiry(t, QueryConfig{URL: p.URL, Selector: `job="x"`, Timeout: patience})
			i.round(time.Unix(1000, 0))
			i.round(time.Unix(1015, 0))
			if s := i.Stats(); s.Up || !strings.Contains(s.Error, c.want) || s.Failed != 2 {
				t.Errorf("%+v, want %q", s, c.want)
			}
			if got := i.said(); strings.Count(got, "\n") != 0 || !strings.Contains(got, c.want) {
				t.Errorf("%q", got)
			}
			for q := range pool.NumQueries {
				if v := i.read(q, "m", time.Unix(1000, 0)); v != -1 {
					t.Errorf("%s is %v", q, v)
				}
			}
		})
	}
}

// A query that fails alone takes no other along, and keeps its last answer
// until that ends; an empty answer takes its readings away at once.
func TestQuerierOneQueryFails(t *testing.T) {
	p := newPrometheus(t)
	p.vectors["e2e_request"] = fmt.Sprintf(seriesOfM, "1")
	p.vectors["request_prompt_tokens_sum"] = fmt.Sprintf(seriesOfM, "2")
	p.vectors["request_success"] = fmt.Sprintf(seriesOfM, "3")
	i := newInquiry(t, QueryConfig{URL: p.URL, Interval: 10 * time.Second, Timeout: patience})
	now := time.Unix(1000, 0)
	i.round(now)
	i.said()
	p.set(func() {
		p.broken["e2e_request"] = `{"status":"error","errorType":"bad_data","error":"no such thing"}`
		p.broken["rate(vllm:time_to_first"] = `{"status":"error","errorType":"execution","error":"too many samples"}`
		p.vectors["request_prompt_tokens_sum"] = fmt.Sprintf(seriesOfM, "20")
		delete(p.vectors, "request_success")
	})
	for range 5 {
		i.round(now.Add(10 * time.Second))
	}
	if got := i.said(); strings.Count(got, "\n") != 0 || !strings.Contains(got, "p95_ttft_5m: execution: too many samples") {
		t.Errorf("%q", got)
	}
	for q, want := range map[pool.Query]float64{pool.AvgE2ELatencyPod: 1, pool.AvgPromptToksPerReq: 20, pool.AvgRequestsPerMinPod: -1} {
		if got := i.read(q, "m", now.Add(20*time.Second+patience)); got != want {
			t.Errorf("%s: %v, want %v", q, got, want)
		}
	}
	if got := i.read(pool.AvgE2ELatencyPod, "m", now.Add(20*time.Second+patience+1)); got != -1 {
		t.Errorf("a kept reading was made newer: %v", got)
	}
}

// Secrets are sent, to that server alone, and read anew when their file changes.
func TestQuerierAuth(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	write := func(text string) {
		if err := os.WriteFile(secret, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all := func(p *prometheus) string {
		p.mu.Lock()
		defer p.mu.Unlock()
		slices.Sort(p.auth)
		got := strings.Join(slices.Compact(p.auth), ",")
		p.auth = nil
		return got
	}
	p, other := newPrometheus(t), newPrometheus(t)
	now := time.Unix(1000, 0)
	write("tok\n")
	i := newInquiry(t, QueryConfig{URL: p.URL, BearerTokenFile: secret, Timeout: patience})
	i.round(now)
	if got := all(p); got != "Bearer tok" {
		t.Errorf("%q", got)
	}
	write("tok2")
	i.round(now)
	if got := all(p); got != "Bearer tok2" {
		t.Errorf("after the file changed: %q", got)
	}
	p.set(func() {
		p.handler = func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL+r.URL.Path, http.StatusTemporaryRedirect)
		}
	})
	i.round(now)
	if got := all(other); got != "" || len(other.queries) > 0 {
		t.Errorf("another host was asked, with %q", got)
	}
	if i.Stats().Up {
		t.Error("a redirect elsewhere is no answer")
	}
	p.set(func() { p.handler = nil })

	write("p\"w\r\n")
	i = newInquiry(t, QueryConfig{URL: p.URL, Username: "u", PasswordFile: secret, Timeout: patience})
	all(p)
	i.round(now)
	if got := all(p); got != "Basic dTpwInc=" {
		t.Errorf("%q", got)
	}
	if err := os.Remove(secret); err != nil {
		t.Fatal(err)
	}
	i.round(now)
	if s := i.Stats(); s.Up || !strings.Contains(s.Error, secret) {
		t.Errorf("%+v", s)
	}
}

func TestQuerierTLS(t *testing.T) {
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "client"}, NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, DNSNames: []string{"client"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name, kind string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	p := &prometheus{vectors: map[string]string{"e2e_request": fmt.Sprintf(seriesOfM, "1")}}
	p.Server = httptest.NewUnstartedServer(p)
	client, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	clients := x509.NewCertPool()
	clients.AddCert(client)
	p.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}
	p.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	p.StartTLS()
	t.Cleanup(p.Close)

	ca := file("ca.pem", "CERTIFICATE", p.Certificate().Raw)
	cert, keyFile := file("cert.pem", "CERTIFICATE", der), file("key.pem", "PRIVATE KEY", private)
	broken := filepath.Join(dir, "broken.pem")
	if err := os.WriteFile(broken, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		tls  QueryTLS
		want string // part of the error
	}{
		"all":           {QueryTLS{CAFile: ca, CertFile: cert, KeyFile: keyFile}, ""},
		"another name":  {QueryTLS{CAFile: ca, CertFile: cert, KeyFile: keyFile, ServerName: "example.com"}, ""},
		"unchecked":     {QueryTLS{InsecureSkipVerify: true, CertFile: cert, KeyFile: keyFile}, ""},
		"unknown CA":    {QueryTLS{CertFile: cert, KeyFile: keyFile}, "certificate signed by unknown authority"},
		"wrong name":    {QueryTLS{CAFile: ca, CertFile: cert, KeyFile: keyFile, ServerName: "prometheus"}, "not prometheus"},
		"no client":     {QueryTLS{CAFile: ca}, "certificate"},
		"broken CA":     {QueryTLS{CAFile: broken}, broken + " holds no PEM certificate"},
		"broken client": {QueryTLS{CAFile: ca, CertFile: broken, KeyFile: keyFile}, broken},
	} {
		t.Run(name, func(t *testing.T) {
			i := newInquiry(t, QueryConfig{URL: p.URL, TLS: c.tls, Timeout: patience})
			i.round(time.Unix(1000, 0))
			if s := i.Stats(); s.Up != (c.want == "") || !strings.Contains(s.Error, c.want) {
				t.Errorf("%+v, want %q", s, c.want)
			}
		})
	}
}

// The loop runs by itself, follows its config, and a Syncer's snapshots show
// what it found.
func TestQuerierAndSyncer(t *testing.T) {
	p := newPrometheus(t)
	p.vectors["e2e_request"] = fmt.Sprintf(seriesOfM, "1.5")
	h := pool.NewHolder()
	s, published := watched(t, h, Config{Interval: time.Hour})
	s.SetTargets("static", []pool.Target{{Addr: netip.MustParseAddrPort("10.0.0.1:8000"), MetricPort: 9000, Model: "m", Source: "static"}}, Complete)
	s.Start()
	q := NewQuerier(QuerierOptions{Name: "p", Publish: s.SetQueried}, QueryConfig{})
	q.Start()
	q.Start()
	defer q.Stop()
	value := func(s *pool.Snapshot) (float64, bool) {
		if len(s.Endpoints) == 0 {
			return 0, false
		}
		return s.Queried(pool.AvgE2ELatencyPod, "m", time.Now()).At(0)
	}
	if q.Stats().Configured {
		t.Error("configured without a URL")
	}
	q.Apply(QueryConfig{URL: p.URL, Interval: time.Nanosecond})
	await(t, published, "a queried reading", func(s *pool.Snapshot) bool { v, ok := value(s); return ok && v == 1.5 })
	p.set(func() { p.vectors["e2e_request"] = fmt.Sprintf(seriesOfM, "2.5") })
	await(t, published, "the next reading", func(s *pool.Snapshot) bool { v, ok := value(s); return ok && v == 2.5 })
	q.Apply(QueryConfig{})
	await(t, published, "no reading", func(s *pool.Snapshot) bool { _, ok := value(s); return !ok })
	if s := q.Stats(); s.Configured || s.Up || s.Rounds < 2 {
		t.Errorf("%+v", s)
	}
}

// Stop cuts a query that hangs, and ends a Querier that never started.
func TestQuerierStops(t *testing.T) {
	p := newPrometheus(t)
	arrived := make(chan struct{}, queriesAtOnce)
	p.handler = func(_ http.ResponseWriter, r *http.Request) {
		r.FormValue("query") // a server notices that its client left once it has the body
		arrived <- struct{}{}
		<-r.Context().Done()
	}
	i := newInquiry(t, QueryConfig{URL: p.URL, Timeout: time.Hour})
	i.Start()
	<-arrived
	i.Stop()
	i.Stop()
	i.Start()
	if len(i.published) > 0 {
		t.Error("a cut round was published")
	}
}

// A panic in a round ends neither the process nor the loop.
func TestQuerierSurvivesAPanic(t *testing.T) {
	p := newPrometheus(t)
	p.vectors["e2e_request"] = fmt.Sprintf(seriesOfM, "1")
	var mu sync.Mutex
	n, lines := 0, ""
	again := make(chan struct{})
	q := NewQuerier(QuerierOptions{
		Name: "p",
		Log:  func(_ slog.Level, msg string) { mu.Lock(); defer mu.Unlock(); lines += msg },
		Publish: func(*pool.Queried) {
			n++
			if n == 1 {
				panic("oops")
			}
			if n == 2 {
				close(again)
			}
		},
	}, QueryConfig{URL: p.URL, Interval: time.Nanosecond})
	q.Start()
	<-again
	q.Stop()
	mu.Lock()
	defer mu.Unlock()
	if !strings.Contains(lines, "panic: oops") {
		t.Error(lines)
	}
}
