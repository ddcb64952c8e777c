package e2e

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestSDKs speaks through Envoy with the official Python clients of OpenAI and
// Anthropic, as their users do. build/sdks.sh installs them.
func TestSDKs(t *testing.T) {
	install := exec.CommandContext(t.Context(), "../build/sdks.sh")
	install.Stderr = os.Stderr
	out, err := install.Output()
	if err != nil {
		t.Fatalf("build/sdks.sh: %v", err)
	}
	python := strings.TrimSpace(string(out))
	script, err := filepath.Abs("testdata/sdks.py")
	if err != nil {
		t.Fatal(err)
	}
	type result struct{ model, usage string } // what the access log says; "" for nothing
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := start(t, d, setup{})
		cases := map[string]result{
			"chat": {"m", "reported"}, "chat_stream": {"m", "reported"}, "chat_renamed": {"gpt-5", "estimated"},
			"completions": {"m", "reported"}, "embeddings": {"m", "reported"},
			"responses": {"m", "reported"}, "responses_stream": {"m", "reported"}, "responses_renamed": {"gpt-5", "reported"},
			"audio": {}, "models": {}, "unknown_model": {"nobody", ""},
			"messages": {"m", "reported"}, "messages_stream": {"m", "reported"}, "messages_renamed": {"claude", "reported"},
			"count_tokens": {"m", ""}, "messages_unknown_model": {"nobody", ""},
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, python, append([]string{script, "http://" + w.addr}, slices.Sorted(maps.Keys(cases))...)...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH")} // no proxy, no key of a user's
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		said := map[string]string{}
		for line := range strings.SplitSeq(string(out), "\n") {
			name, text, _ := strings.Cut(line, ": ")
			said[name] = text
		}
		for name, want := range cases {
			t.Run(name, func(t *testing.T) {
				if text, ok := said[name]; !ok || text != "" {
					t.Fatalf("%s\n%s", strings.ReplaceAll(text, " | ", "\n"), map[bool]string{false: string(out)}[ok])
				}
				if name == "models" || name == "audio" {
					return
				}
				a := w.access(t, name)
				if a.at("shunt", "model") != want.model || want.usage != "" && a.at("shunt", "usage") != want.usage {
					t.Errorf("metadata %v, want %v", a["shunt"], want)
				}
				if strings.HasSuffix(name, "unknown_model") {
					return
				}
				_, got := w.received(t, name)
				if v := got.Headers.Get("Authorization") + got.Headers.Get("X-Api-Key"); !strings.Contains(v, "sk-canary") {
					t.Errorf("the engine got the key %q", v)
				}
			})
		}
	})
}
