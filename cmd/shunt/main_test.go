package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/shuntproxy/shunt/filter"
)

const good = "pools: {default: {static: [{address: \"10.0.0.1:8000\"}]}}\n"

func shunt(t *testing.T, stdin string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(args, strings.NewReader(stdin), &out, &err)
	return code, out.String(), err.String()
}

func TestCommands(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		file := filepath.Join(folder, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	goodFile := write("good.yaml", good)
	badFile := write("bad.yaml", "polcy: random\nfallbacks: 1\n")
	pointer := write("pointer.yaml", "configFile: "+goodFile+"\n")
	broken := write("broken.yaml", "configFile: "+filepath.Join(folder, "none.yaml")+"\n")
	badPointer := write("badpointer.yaml", "configFile: "+badFile+"\n")
	brokenList := write("list.yaml", "- {address: engine-1}\n")
	badList := write("badlist.yaml", "pools: {a: {file: {path: "+brokenList+"}}}\n")
	tests := []struct {
		name   string
		stdin  string
		args   []string
		code   int
		stdout string
		stderr []string
	}{
		{name: "check", args: []string{"check", goodFile}, stdout: "ok: 1 pool, the first is default"},
		{name: "check stdin", stdin: good, args: []string{"check", "-"}, stdout: "-: ok"},
		{name: "check pointer", args: []string{"check", pointer}, stdout: "ok"},
		{name: "check broken pointer", args: []string{"check", broken}, code: 1, stderr: []string{"configFile: can't be read"}},
		{name: "check bad file behind a pointer", args: []string{"check", badPointer}, code: 1, stderr: []string{badFile + ": polcy (line 1)", badFile + ": fallbacks (line 2)"}},
		{name: "check a list of endpoints", args: []string{"check", brokenList}, code: 1, stderr: []string{"is a list: an object with pools is wanted; a list of endpoints stands in a file of its own"}},
		{name: "check Envoy with a key twice", stdin: "static_resources: {}\nnode: {}\nnode: {}\n", args: []string{"check", "-"}, code: 1, stderr: []string{"no shunt filter"}},
		{name: "check with a tab", stdin: "pools:\n\tdefault: {static: []}\n", args: []string{"check", "-"}, code: 1, stderr: []string{"-: not YAML or JSON: line 2: has a tab before its text"}},
		{
			name: "check bad", args: []string{"check", badFile}, code: 1,
			stderr: []string{badFile + ": polcy (line 1)", badFile + ": fallbacks (line 2)", badFile + ": pools: is missing"},
		},
		{name: "check two pools", stdin: "pools: {a: {static: []}, b: {static: []}}", args: []string{"check", "-"}, stdout: "ok: 2 pools, the first is a"},
		{name: "check a broken list", args: []string{"check", badList}, code: 1, stderr: []string{badList + ": pools.a.file.path(" + brokenList + "): line 1"}},
		{name: "check nothing", args: []string{"check"}, code: 1, stderr: []string{"check FILE: one argument is wanted, not 0; see shunt check --help"}},
		{name: "check no file", args: []string{"check", filepath.Join(folder, "x")}, code: 1, stderr: []string{"no such file"}},
		{name: "check Envoy without shunt", stdin: "static_resources: {}", args: []string{"check", "-"}, code: 1, stderr: []string{"no shunt filter"}},
		{name: "envoy-config", args: []string{"envoy-config", "--config", goodFile, "--listen", "127.0.0.1:1234"}, stdout: "port_value: 1234"},
		{name: "envoy-config by path", args: []string{"envoy-config", "--config", goodFile, "--config-path", "/a/b.yaml"}, stdout: `configFile: "/a/b.yaml"`},
		{name: "envoy-config module", args: []string{"envoy-config", "--config", goodFile, "--module", "/opt/x.so"}, stdout: `filename: "/opt/x.so"`},
		{name: "envoy-config listener", args: []string{"envoy-config", "--config", goodFile, "--print-listener"}, stdout: "envoy.config.listener.v3.Listener"},
		{
			name: "envoy-config bad", args: []string{"envoy-config", "--config", badFile}, code: 1,
			stderr: []string{badFile + ": polcy (line 1)", badFile + ": fallbacks (line 2)"},
		},
		{name: "envoy-config door", args: []string{"envoy-config", "--config", goodFile, "--door", "x"}, code: 1, stderr: []string{`unknown door "x"; valid: stock, contrib`}},
		{name: "envoy-config without config", args: []string{"envoy-config"}, code: 1, stderr: []string{"--config FILE is required"}},
		{name: "version", args: []string{"version"}, stdout: "shunt "},
		{name: "nothing", stdout: "Available Commands"},
		{name: "unknown", args: []string{"drian"}, code: 1, stderr: []string{`shunt: unknown command "drian" (did you mean drain?); see shunt --help`}},
		{name: "unknown, like none", args: []string{"frobnicate"}, code: 1, stderr: []string{`shunt: unknown command "frobnicate"; see shunt --help`}},
		{name: "unknown flag", args: []string{"check", "--foo", "x"}, code: 1, stderr: []string{"unknown flag: --foo; see shunt check --help"}},
		{name: "bad value of a flag", args: []string{"explain", "-n", "x"}, code: 1, stderr: []string{"; see shunt explain --help"}},
		{name: "argument too many", args: []string{"version", "x"}, code: 1, stderr: []string{`shunt version takes flags alone, and got "x"; see shunt version --help`}},
		{name: "envoy-config listen", args: []string{"envoy-config", "--config", goodFile, "--listen", "x"}, code: 1, stderr: []string{`shunt: listen address "x" is not IP:port`}},
		{name: "endpoints without config", args: []string{"endpoints"}, code: 1, stderr: []string{"--config FILE is required"}},
		{name: "endpoints of a bad file behind a pointer", args: []string{"endpoints", "--config", badPointer}, code: 1, stderr: []string{badFile + ": polcy (line 1)"}},
		{name: "no admin address", args: []string{"explain", "--admin", "http://127.0.0.1:1"}, code: 1, stderr: []string{`--admin "http://127.0.0.1:1" is not IP:port or unix:PATH, such as 127.0.0.1:9902`}},
		{name: "drain with no admin address", args: []string{"drain", "--admin", "9902"}, code: 1, stderr: []string{`--admin "9902" is not IP:port`}},
		{name: "explain of nobody", args: []string{"explain", "--admin", "unix:" + folder + "/none"}, code: 1, stderr: []string{"is an Envoy with shunt up, with admin.address unix:"}},
		{name: "drain of nobody", args: []string{"drain", "--admin", "unix:" + folder + "/none"}, code: 1, stderr: []string{"--admin names another"}},
		{name: "probe of no URL", args: []string{"probe", "127.0.0.1:9902/readyz"}, code: 1, stderr: []string{`"127.0.0.1:9902/readyz" is no URL: http://, https:// or unix: is how one begins`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			code, stdout, stderr := shunt(t, tt.stdin, tt.args...)
			if code != tt.code {
				t.Errorf("exit code is %d, want %d; stderr:\n%s", code, tt.code, stderr)
			}
			if !strings.Contains(stdout, tt.stdout) || (tt.code != 0) != (stdout == "") {
				t.Errorf("stdout is\n%s\nwant %q", stdout, tt.stdout)
			}
			for _, want := range tt.stderr {
				if !strings.Contains(stderr, want) {
					t.Errorf("stderr is\n%s\nwant %q", stderr, want)
				}
			}
			if tt.code == 0 && stderr != "" {
				t.Errorf("stderr is\n%s", stderr)
			}
		})
	}
}

// TestPrintedConfigChecks feeds what envoy-config prints to check.
func TestPrintedConfigChecks(t *testing.T) {
	code, text, stderr := shunt(t, good, "envoy-config", "--config", "-")
	if code != 0 {
		t.Fatal(stderr)
	}
	code, stdout, stderr := shunt(t, text, "check", "-")
	if code != 0 || !strings.Contains(stdout, "ok: 1 filter config, 0 route configs") {
		t.Errorf("check says %d: %s%s", code, stdout, stderr)
	}
	code, _, stderr = shunt(t, strings.Replace(text, "10.0.0.1:8000", "engine-1", 1), "check", "-")
	if code != 1 || !strings.Contains(stderr, "names go under dns") {
		t.Errorf("check of a broken one says %d: %s", code, stderr)
	}
}

// TestWarnings are on stderr and leave the exit code alone.
func TestWarnings(t *testing.T) {
	document := strings.Replace(good, ":8000", ":9000", 1) + "\nflowControl: {maxTokens: 9}\n"
	_, text, _ := shunt(t, document, "envoy-config", "--config", "-")
	for _, text := range []string{document, text} {
		code, stdout, stderr := shunt(t, text, "check", "-")
		if code != 0 || !strings.Contains(stdout, "-: ok") || !strings.HasPrefix(stderr, "-: warning: ") || !strings.Contains(stderr, "pools.default.static[0]") ||
			!strings.Contains(stderr, "flowControl.maxTokens") {
			t.Errorf("check says %d: %s%s", code, stdout, stderr)
		}
	}
}

func TestProblemsInLineOrder(t *testing.T) {
	_, _, stderr := shunt(t, "policy: x\nhealth: {path: 1x, interval: 1ns}\npools:\n  a: {static: [{address: x}]}\nfallbacks: 1\nbogus: 1\n", "check", "-")
	var lines []int
	for _, line := range strings.Split(strings.TrimSpace(stderr), "\n") {
		_, after, found := strings.Cut(line, "(line ")
		if n, err := strconv.Atoi(strings.SplitN(after, ")", 2)[0]); found && err == nil {
			lines = append(lines, n)
		}
	}
	if len(lines) < 4 || !slices.IsSorted(lines) {
		t.Errorf("lines are %v in\n%s", lines, stderr)
	}
}

func TestVersion(t *testing.T) {
	old := filter.Version
	defer func() { filter.Version = old }()
	filter.Version = "v1.2.3-test"
	if _, stdout, _ := shunt(t, "", "version"); !strings.HasPrefix(stdout, "shunt v1.2.3-test ") {
		t.Errorf("version is %q", stdout)
	}
}
