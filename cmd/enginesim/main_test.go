package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/internal/loopback"
)

// Four engines in one process say where they listen, serve, and are controlled while one refuses; all ends with ctx.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	spec, readyFile := filepath.Join(dir, "engines.yaml"), filepath.Join(dir, "ready.json")
	if err := os.WriteFile(spec, []byte("engines:\n- {name: a, models: [m1], listen: \""+loopback.Reserve(t)+"\"}\n- {name: b, models: [m2], load: {running: 9}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		cmd := command(in)
		cmd.SetArgs([]string{"--engines", spec, "--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--models", "m3", "--control", "127.0.0.1:0", "--ready-file", readyFile})
		err := cmd.ExecuteContext(ctx)
		_ = in.CloseWithError(err)
		ended <- err
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(readyFile)
	if err != nil || string(file) != line {
		t.Errorf("ready file %q, %v; line %q", file, err, line)
	}
	var info ready
	if err := json.Unmarshal([]byte(line), &info); err != nil {
		t.Fatal(err)
	}
	if len(info.Engines) != 4 || info.Engines[0].Name != "a" || info.Engines[3].Models[0] != "m3" {
		t.Fatalf("%+v", info)
	}
	get := func(method, url, body string) string {
		t.Helper()
		req, err := http.NewRequest(method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
		b, _ := io.ReadAll(r.Body)
		return string(b)
	}
	if b := get("GET", "http://"+info.Engines[1].Address+"/metrics", ""); !strings.Contains(b, `vllm:num_requests_running{engine="0",model_name="m2"} 9.0`) {
		t.Error("the load of b is not in its metrics")
	}
	if b := get("POST", "http://"+info.Control+"/a/_sim/refuse", "{}"); !strings.Contains(b, `"refusing":true`) {
		t.Error(b)
	}
	if b := get("POST", "http://"+info.Control+"/a/_sim/accept", ""); !strings.Contains(b, `"refusing":false`) {
		t.Error(b)
	}
	if b := get("GET", "http://"+info.Control+"/x/_sim/state", ""); !strings.Contains(b, `no engine "x"`) {
		t.Error(b)
	}
	http.DefaultClient.CloseIdleConnections()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestFlagsRefused: a value that would stand for the default, or that no engine has.
func TestFlagsRefused(t *testing.T) {
	for flags, want := range map[string]string{
		"--decode-rate 0":     "--decode-rate 0: more than 0 is wanted",
		"--block-size 0":      "--block-size 0: more than 0 is wanted",
		"--speedup NaN":       "--speedup NaN: more than 0 is wanted",
		"--idle-timeout 0s":   "--idle-timeout 0s: more than 0 is wanted",
		"--load-running -1":   "--load-running -1: 0 or more is wanted",
		"--delay-headers=-1s": "--delay-headers -1s: 0 or more is wanted",
		"--load-kv 5":         "--load-kv 5: 0 to 1 is wanted",
	} {
		cmd := command(io.Discard)
		cmd.SetArgs(strings.Fields(flags))
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // what is not refused ends at once
		if err := cmd.ExecuteContext(ctx); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", flags, err, want)
		}
	}
}
