package e2e

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"

	ratelimit "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"

	"github.com/shuntproxy/shunt/internal/bootstrap"
)

// tokenBudget is a rate limit service: a number of tokens for each user, by
// fairness id.
type tokenBudget struct {
	ratelimit.UnimplementedRateLimitServiceServer
	limit uint64
	addr  string

	mu      sync.Mutex
	charged map[string][]uint64 // protected by mu
	asked   map[string]int      // protected by mu
}

func startBudget(t *testing.T, limit uint64) *tokenBudget {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &tokenBudget{limit: limit, addr: l.Addr().String(), charged: map[string][]uint64{}, asked: map[string]int{}}
	s := grpc.NewServer()
	ratelimit.RegisterRateLimitServiceServer(s, b)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends with Stop
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return b
}

// ShouldRateLimit charges what comes with hits and answers what comes without.
func (b *tokenBudget) ShouldRateLimit(_ context.Context, r *ratelimit.RateLimitRequest) (*ratelimit.RateLimitResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	answer := &ratelimit.RateLimitResponse{OverallCode: ratelimit.RateLimitResponse_OK}
	for _, d := range r.GetDescriptors() {
		user := d.GetEntries()[0].GetValue()
		if hits := d.GetHitsAddend().GetValue(); hits > 0 {
			b.charged[user] = append(b.charged[user], hits)
			continue
		}
		b.asked[user]++
		used := uint64(0)
		for _, hits := range b.charged[user] {
			used += hits
		}
		if used >= b.limit {
			answer.OverallCode = ratelimit.RateLimitResponse_OVER_LIMIT
		}
	}
	return answer, nil
}

func (b *tokenBudget) of(user string) (charged []uint64, asked int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]uint64(nil), b.charged[user]...), b.asked[user]
}

// rateLimitFilter is the commented block of the reference bootstrap.
func rateLimitFilter(t *testing.T, o bootstrap.Options) doc {
	t.Helper()
	text, err := bootstrap.Generate(o)
	if err != nil {
		t.Fatal(err)
	}
	var block strings.Builder
	for line := range strings.SplitSeq(string(text), "\n") {
		bare, ok := strings.CutPrefix(strings.TrimSpace(line), "# ")
		switch {
		case ok && strings.HasPrefix(bare, "- name: envoy.filters.http.ratelimit"), ok && block.Len() > 0:
			block.WriteString(bare + "\n")
		case block.Len() > 0:
			var filters []doc
			if err := yaml.Unmarshal([]byte(block.String()), &filters); err != nil || len(filters) != 1 {
				t.Fatalf("%v in\n%s", err, block.String())
			}
			return filters[0]
		}
	}
	t.Fatal("the bootstrap has no such block")
	return nil
}

// TestRateLimitByTokens uncomments the block of the reference bootstrap: Envoy's
// rate limit filter charges total_tokens once an answer has ended, and refuses
// who has used up the budget.
func TestRateLimitByTokens(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		const limit = 20
		budget := startBudget(t, limit)
		_, port, _ := net.SplitHostPort(budget.addr)
		w := prepareWorld(t, d, setup{clusters: `- name: ratelimit
  type: STATIC
  typed_extension_protocol_options:
    envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
      "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
      explicit_http_config: {http2_protocol_options: {}}
  load_assignment: {cluster_name: ratelimit, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: ` + port + `}}}}]}]}
`})
		block := rateLimitFilter(t, w.options)
		// The filter lets a request pass when the service takes longer than that,
		// 20 ms by default.
		block.at("typed_config").(doc)["timeout"] = "60s"
		w.setup.edit = func(b doc) {
			filters := b.hcm()["http_filters"].([]any)
			router := filters[len(filters)-1]
			b.hcm()["http_filters"] = append(filters[:len(filters)-1:len(filters)-1], block, router)
		}
		w.run(t)
		for user, q := range map[string]struct{ path, body string }{
			"chat":     {"/v1/chat/completions", strings.Replace(chat, `{`, `{"max_tokens":6,`, 1)},
			"stream":   {"/v1/chat/completions", strings.Replace(streamed, `{`, `{"max_tokens":6,"stream_options":{"include_usage":true},`, 1)},
			"no-usage": {"/v1/chat/completions", strings.Replace(streamed, `{`, `{"max_tokens":6,`, 1)},
			"messages": {"/v1/messages", `{"model":"m","max_tokens":6,"messages":[{"role":"user","content":"hi"}]}`},
			"systems":  {"/v1/systemone", `{"model":"m","state":"12345678","questions":{"a":{"type":"noul"}}}`},
		} {
			t.Run(user, func(t *testing.T) {
				used, want := uint64(0), []uint64{}
				for n := 1; ; n++ {
					r := w.must(t, w.h1, call{path: q.path, body: strings.NewReader(q.body), header: header("x-llm-d-inference-fairness-id", user)})
					if used >= limit {
						if r.status != 429 || r.header.Get("X-Llm-D-Request-Dropped-Reason") != "" || w.access(t, r.id)["details"] != "request_rate_limited" {
							t.Errorf("with %d of %d tokens used: %v", used, limit, r)
						}
						break
					}
					total, _ := w.access(t, r.id).at("shunt", "total_tokens").(float64)
					if r.status != 200 || total < 1 {
						t.Fatalf("with %d of %d tokens used: %v tokens, %v", used, limit, total, r)
					}
					used, want = used+uint64(total), append(want, uint64(total))
					eventually(t, "the tokens are charged", func() string {
						if charged, asked := budget.of(user); len(charged) == len(want) && charged[n-1] == uint64(total) && asked == n {
							return ""
						}
						return "no"
					})
				}
			})
		}
		w.waitLoad(t, 0, 0)
	})
}
