package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// The flags reach the page, and the control API changes it.
func TestQuirkFlags(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		cmd := command(in)
		cmd.SetArgs([]string{
			"--engine", "sglang", "--models", "m", "--load-running", "6", "--ranks", "2", "--nan", "sglang:token_usage", "--missing", "sglang:page_size,sglang:num_pages",
			"--rename", "sglang:num_queue_reqs=sglang:queue", "--extra", `x{a="b=c"}=3`, "--gzip=false", "--metrics-path", "/m", "--two-types", "--pid",
		})
		err := cmd.ExecuteContext(ctx)
		_ = in.CloseWithError(err)
		ended <- err
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var info ready
	if err := json.Unmarshal([]byte(line), &info); err != nil {
		t.Fatal(err)
	}
	do := func(method, path, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, "http://"+info.Engines[0].Address+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
		b, _ := io.ReadAll(r.Body)
		return r.StatusCode, string(b)
	}
	_, page := do("GET", "/m", "")
	for _, want := range []string{
		`dp_rank="1",engine_type="unified",model_name="m",moe_ep_rank="0",pid="12163",pp_rank="0",tp_rank="1"} 3.0`,
		`tp_rank="0"} NaN`, "sglang:queue{", `x{a="b=c"} 3`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(page, "sglang:page_size") || strings.Contains(page, "sglang:num_queue_reqs") {
		t.Error("a missing or renamed family is there")
	}
	if code, body := do("POST", "/_sim/quirks", `{"undefined":true,"nan":["sglang:token_usage"]}`); code != 200 || !strings.Contains(body, `"quirks":{"undefined":true,"nan":["sglang:token_usage"]}`) {
		t.Error(code, body)
	}
	if _, page := do("GET", "/metrics", ""); !strings.Contains(page, `model_name="undefined"`) || strings.Contains(page, `dp_rank="`) {
		t.Error("the control API changed nothing")
	}
	for _, bad := range []string{`{"multiproc":true}`, `{"nonsense":1}`} {
		if code, body := do("POST", "/_sim/quirks", bad); code != 400 {
			t.Error(code, body)
		}
	}
	http.DefaultClient.CloseIdleConnections()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestBadQuirkFlags(t *testing.T) {
	for _, args := range [][]string{
		{"--rename", "x"}, {"--rename", "=x"}, {"--gzip=maybe"}, {"--engine", "xllm", "--ranks", "2"}, {"--metrics-fault", "nonsense"}, {"--engine", "nope"},
	} {
		cmd := command(io.Discard)
		cmd.SetArgs(args)
		cmd.SetErr(io.Discard)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := cmd.ExecuteContext(ctx); err == nil {
			t.Errorf("%q were taken", args)
		}
	}
}
