package main

import (
	"compress/gzip"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const vllmPage = `vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
vllm:kv_cache_usage_perc NaN
vllm:time_to_first_token_seconds_bucket{le="1.0"} 1
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 2
vllm:time_to_first_token_seconds_count 2
vllm:time_to_first_token_seconds_sum 3
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1
`

func packed(text string) string {
	var b strings.Builder
	z := gzip.NewWriter(&b)
	_, _ = z.Write([]byte(text))
	_ = z.Close()
	return b.String()
}

func TestMetrics(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics", "/x":
			_, _ = w.Write([]byte(vllmPage))
		case "/secret":
			if r.Header.Get("X-Key") != "k" {
				w.WriteHeader(http.StatusUnauthorized)
			}
			_, _ = w.Write([]byte(vllmPage))
		case "/br":
			w.Header().Set("Content-Encoding", "br")
		case "/moved":
			http.Redirect(w, r, "http://127.0.0.2:1/", http.StatusFound)
		case "/html":
			_, _ = w.Write([]byte("<html>"))
		case "/prometheus/metrics":
			_, _ = w.Write([]byte("[]"))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(srv.Close)
	bare := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(bare.Close)
	file := filepath.Join(t.TempDir(), "page")
	if err := os.WriteFile(file, []byte(vllmPage), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, stdin    string
		args           []string
		code           int
		stdout, stderr string
	}{
		{"URL", "", []string{srv.URL}, 0, "num_requests_running", ""},
		{"URL with a path", "", []string{srv.URL + "/x"}, 0, "vllm:num_requests_running", ""},
		{"not allowed", "", []string{srv.URL + "/secret"}, 1, "", "/secret answers 401"},
		{"a header", "", []string{"--header", "X-Key=k", "--max-bytes", "9223372036854775807", srv.URL + "/secret"}, 0, "num_requests_running", ""},
		{"file", "", []string{file}, 0, "[a b]", ""},
		{"stdin", vllmPage, []string{"-"}, 0, "kv_cache_usage_perc", ""},
		{"empty", "", []string{"-"}, 2, "", "the page is empty"},
		{"another engine's", vllmPage, []string{"--engine", "sglang", "-"}, 2, "", "none of sglang's metrics; start SGLang with --enable-metrics; it has vllm's: is the engine right?"},
		{"another engine's, at a URL", "", []string{"--engine", "sglang", srv.URL}, 2, "", "it has vllm's"},
		{"404 at both paths", "", []string{"--engine", "xllm", bare.URL}, 1, "", "/metrics and /brpc_metrics answer 404"},
		{"no load", "vllm:prompt_tokens_total 1\n", []string{"-"}, 2, "prompt_tokens_total", "neither num_requests_running"},
		{"JSON", "", []string{"--engine", "trtllm", srv.URL}, 2, "", "return_perf_metrics"},
		{"404", "", []string{srv.URL + "/none"}, 1, "", "/none answers 404"},
		{"nobody", "", []string{"http://127.0.0.1:1"}, 1, "", "refused"},
		{"no scheme", "", []string{"127.0.0.1:1"}, 1, "", "a URL begins with http://"},
		{"no file", "", []string{file + "x"}, 1, "", "no such file"},
		{"too large", vllmPage, []string{"--max-bytes", "10", "-"}, 1, "", "larger than --max-bytes (10 bytes)"},
		{"no time", "", []string{"--timeout", "0", srv.URL}, 1, "", "--timeout: 0s is not above 0"},
		{"no bytes", "", []string{"--max-bytes", "-1", "-"}, 1, "", "--max-bytes: -1 is not above 0"},
		{"a header that is two", "", []string{"--header", "X=a\r\nY: b", srv.URL}, 1, "", "holds a control character"},
		{"a header of ours", "", []string{"--header", "Authorization=x", srv.URL}, 1, "", "--token-file sets authorization"},
		{"an authority for no TLS", "", []string{"--ca", "x", srv.URL}, 1, "", "--ca has no effect"},
		{"a scheme in capitals", "", []string{"HTTP" + strings.TrimPrefix(srv.URL, "http")}, 0, "num_requests_running", ""},
		{"no host", "", []string{"http:///metrics"}, 1, "", "the URL has no host"},
		{"a password", "", []string{"http://a:b@127.0.0.1:1"}, 1, "", "http://a:xxxxx@127.0.0.1:1: the user and password of a URL are not sent: --header says"},
		{"another coding", "", []string{srv.URL + "/br"}, 1, "", `/br is packed with "br"`},
		{"a redirect", "", []string{srv.URL + "/moved"}, 1, "", "the URL's port and an https:// URL say where"},
		{"HTML", "", []string{srv.URL + "/html"}, 2, "", "none of vllm's metrics, nor another engine's: is it a metrics page?"},
		{"HTML of a file", "<html>", []string{"-"}, 2, "", "is it a metrics page?"},
		{"gzip", packed(vllmPage), []string{"-"}, 0, "[a b]", ""},
		{"gzip that is cut off", packed(vllmPage)[:60], []string{"-"}, 1, "", "the page broke off after"},
		{"gzip that is none", "\x1f\x8b, or not", []string{"-"}, 1, "", "begins as gzip does, and is none"},
		{"saved by an editor", "\xef\xbb\xbf" + vllmPage, []string{"-"}, 0, "num_requests_running         7", ""},
		{"names that steer a terminal", strings.ReplaceAll(vllmPage, "a,b", "a,\x1b[2J,c d"), []string{"-"}, 0, `[a "\x1b[2J" "c d"]`, ""},
		{"JSON for vLLM", "[]", []string{"-"}, 2, "", "TensorRT-LLM answers so: is it that engine? --engine says so"},
		{"more than a number holds", "vllm:num_requests_running{a=\"1\"} 1e308\nvllm:num_requests_running{a=\"2\"} 1e308\nvllm:num_requests_waiting 1\n",
			[]string{"--output", "json", "-"}, 0, `"num_requests_running":"vllm:num_requests_running is there without a number`, ""},
		{"unknown engine", "", []string{"--engine", "ollama", "-"}, 1, "", "valid: vllm, sglang, trtllm, xllm"},
		{"unknown format", "", []string{"--output", "xml", "-"}, 1, "", "valid: text, json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := shunt(t, c.stdin, append([]string{"metrics"}, c.args...)...)
			if code != c.code || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) || (code == 0) != (stderr == "") {
				t.Errorf("code %d, want %d\nstdout %s\nstderr %s", code, c.code, stdout, stderr)
			}
		})
	}
}

func TestMetricsJSON(t *testing.T) {
	code, stdout, stderr := shunt(t, vllmPage, "metrics", "--output", "json", "-")
	var got struct {
		Engine  string
		Metrics map[string]struct {
			Value  any
			Source string
		}
		Missing map[string]string
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || got.Engine != "vllm" {
		t.Fatalf("%v, code %d, %s%s", err, code, stdout, stderr)
	}
	for name, want := range map[string]string{
		"num_requests_running":        `{"Value":7,"Source":"vllm:num_requests_running"}`,
		"time_to_first_token_seconds": `{"Value":{"count":2,"p50":1,"p99":1,"sum":3},"Source":"vllm:time_to_first_token_seconds"}`,
		"running_lora_adapters":       `{"Value":["a","b"],"Source":"vllm:lora_requests_info"}`,
		"waiting_lora_adapters":       `{"Value":[],"Source":"vllm:lora_requests_info"}`,
		"max_lora":                    `{"Value":4,"Source":"vllm:lora_requests_info"}`,
	} {
		if have, err := json.Marshal(got.Metrics[name]); err != nil || string(have) != want {
			t.Errorf("%s: %s, want %s", name, have, want)
		}
	}
	for name, want := range map[string]string{
		"kv_cache_usage_perc":  "without a number",
		"num_requests_waiting": "not on the page: vllm:num_requests_waiting",
		"engine_utilization":   "vllm has no such metric",
	} {
		if why := got.Missing[name]; !strings.Contains(why, want) {
			t.Errorf("%s: %q, want %q", name, why, want)
		}
	}
	if len(got.Metrics)+len(got.Missing) != 49 {
		t.Errorf("%d metrics and %d missing", len(got.Metrics), len(got.Missing))
	}
}
