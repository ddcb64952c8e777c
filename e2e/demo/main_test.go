package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ownFlag makes the test binary an owner of the pid file that follows, until SIGTERM; ownDeafFlag one that ignores it;
// lifeFlag makes it live.
const (
	ownFlag     = "-demo-own"
	ownDeafFlag = "-demo-own-deaf"
	lifeFlag    = "-demo-life"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && (os.Args[1] == ownFlag || os.Args[1] == ownDeafFlag) {
		own(os.Args[2], os.Args[1] == ownDeafFlag)
	}
	if len(os.Args) == 2 && os.Args[1] == lifeFlag {
		live()
	}
	os.Exit(m.Run())
}

// own never outlives the test: it ends when its standard input does.
func own(path string, deaf bool) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if deaf {
		ctx = context.Background()
	}
	f, err := takeLock(path)
	fmt.Println(err)
	if err != nil {
		os.Exit(1)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	<-ctx.Done()
	_ = f.Close()
	os.Exit(0)
}

// live meets a connection that its peer has closed, writes a line, is told to end, and says on standard error why it does.
func live() {
	ctx, out, stop := life()
	defer stop()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		_ = unix.Close(pair[1])
		_, err = unix.Write(pair[0], []byte("x"))
	}
	if !errors.Is(err, syscall.EPIPE) {
		fmt.Fprintln(os.Stderr, "the peer has not gone:", err)
		os.Exit(1)
	}
	_, _ = fmt.Fprintln(out, "a line")
	_ = unix.Kill(os.Getpid(), syscall.SIGTERM)
	<-ctx.Done()
	fmt.Fprint(os.Stderr, context.Cause(ctx))
	os.Exit(0)
}

// TestLife: what ends the demo is a signal, and that nobody reads its output; not that some connection has ended.
func TestLife(t *testing.T) {
	for _, c := range []struct {
		name  string
		reads bool
		want  string
	}{
		{"a signal", true, "terminated signal received"},
		{"nobody reads", false, "nobody reads the output any more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			if !c.reads {
				_ = r.Close()
			}
			var why strings.Builder
			cmd := exec.Command(os.Args[0], lifeFlag)
			cmd.Stdout, cmd.Stderr = w, &why
			err = cmd.Run()
			_ = w.Close()
			if err != nil || why.String() != c.want {
				t.Errorf("it ends since %q (%v), want %q", why.String(), err, c.want)
			}
		})
	}
}

// startOwner runs own and returns its process id, or what takeLock said.
func startOwner(t *testing.T, flag, path string) (pid int, said string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], flag, path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid, strings.TrimSpace(line)
}

func TestArguments(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"show --door front", `--door "front": unknown door, valid: stock, contrib`},
		{"show --policy best", `--policy "best": unknown policy, valid: random, least-request, slo-least-load, `},
		{"up --policy=", `--policy "": unknown policy`},
		{"show more", "unknown command"},
		{"dance", "unknown command"},
		{"show --listen 127.0.0.1:1", "unknown flag"},
		{"serve", "make up"},
	} {
		if err := run(t.Context(), strings.Fields(c.args), io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("demo %s: %v, want %q", c.args, err, c.want)
		}
	}
}

func TestRootAndModule(t *testing.T) {
	dir := t.TempDir()
	if _, err := findRoot(dir); err == nil || !strings.Contains(err.Error(), "clone") {
		t.Errorf("outside a clone: %v", err)
	}
	inner := filepath.Join(dir, "e2e", "demo")
	for _, d := range []string{inner, filepath.Join(dir, "build")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "build", "envoy.sh"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := findRoot(inner); got != dir || err != nil {
		t.Errorf("root %q, %v; want %q", got, err, dir)
	}
	out := filepath.Join(dir, "build", "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		settings
		files []string
		want  loading
	}{
		{settings{door: "stock"}, []string{"libshunt.so"}, loading{door: "stock"}},
		{settings{door: "contrib"}, []string{"libshunt_contrib.so", "libgolanghost.so"}, loading{door: "contrib", host: "golanghost"}},
		{settings{door: "contrib", contrib: "/envoy"}, []string{"libshunt_contrib.so"}, loading{door: "contrib", host: "contrib"}},
	} {
		c.root = dir
		c.want.module = filepath.Join(out, c.files[0])
		for i, name := range c.files {
			if _, err := c.loading(); err == nil || !strings.Contains(err.Error(), "build/out/"+name+" is missing") {
				t.Errorf("%+v without %s: %v", c.settings, name, err)
			}
			path := filepath.Join(out, name)
			if err := os.WriteFile(path, nil, 0o644); err != nil {
				t.Fatal(err)
			}
			if i == 1 {
				c.want.hostModule = path
			}
		}
		if got, err := c.loading(); got != c.want || err != nil {
			t.Errorf("%+v: %+v, %v; want %+v", c.settings, got, err, c.want)
		}
		for _, name := range c.files {
			if err := os.Remove(filepath.Join(out, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := settings{root: dir, door: "contrib", contrib: filepath.Join(dir, "nothing")}
	if _, err := s.findEnvoy(t.Context()); err == nil || !strings.Contains(err.Error(), "ENVOY_CONTRIB") {
		t.Errorf("an Envoy that isn't there: %v", err)
	}
}

func TestFree(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct{ listen, want string }{
		{l.Addr().String(), "is taken"},
		{"localhost:80", "not an IP:port"},
		{"127.0.0.1:0", "not an IP:port"},
		{"127.0.0.1", "not an IP:port"},
		{"127.0.0.1:70000", "not an IP:port"},
	} {
		s := settings{listen: c.listen, admin: c.listen, shuntAdmin: c.listen}
		if err := s.free(); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "--listen") {
			t.Errorf("%s: %v, want %q", c.listen, err, c.want)
		}
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), pidFile)
	if pid, err := owner(path); pid != 0 || err != nil {
		t.Fatalf("owner of no file: %d, %v", pid, err)
	}
	pid, said := startOwner(t, ownFlag, path)
	if said != "<nil>" {
		t.Fatal(said)
	}
	if got, err := owner(path); got != pid || err != nil {
		t.Errorf("owner %d, %v; want %d", got, err, pid)
	}
	if _, err := takeLock(path); !errors.Is(err, errOwned) {
		t.Errorf("a second owner: %v", err)
	}
	if _, said := startOwner(t, ownFlag, path); said != errOwned.Error() {
		t.Errorf("a second owner: %s", said)
	}
	if got, err := endOwner(t.Context(), path, time.Minute); got != pid || err != nil {
		t.Errorf("ended %d, %v; want %d", got, err, pid)
	}
	if got, err := owner(path); got != 0 || err != nil {
		t.Errorf("owner after the end: %d, %v", got, err)
	}
	f, err := takeLock(path)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
}

func TestEndOwnerKills(t *testing.T) {
	path := filepath.Join(t.TempDir(), pidFile)
	pid, said := startOwner(t, ownDeafFlag, path)
	if said != "<nil>" {
		t.Fatal(said)
	}
	// own still catches SIGTERM, and does nothing about it.
	if got, err := endOwner(t.Context(), path, time.Millisecond); got != pid || err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("ended %d, %v; want %d, killed", got, err, pid)
	}
}

// A stale file may hold the number of a stranger, here of this very process: down must not signal it.
func TestDownStale(t *testing.T) {
	dir := t.TempDir()
	var out strings.Builder
	if err := down(t.Context(), dir, &out); err != nil || out.String() != "Nothing is up.\n" {
		t.Errorf("down of nothing: %v, %q", err, out.String())
	}
	for _, name := range []string{pidFile, "shunt.yaml", logFile} {
		if err := os.WriteFile(filepath.Join(dir, name), fmt.Appendln(nil, os.Getpid()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, tmpDir), 0o755); err != nil {
		t.Fatal(err)
	}
	got := make(chan os.Signal, 1)
	signal.Notify(got, syscall.SIGTERM)
	defer signal.Stop(got)
	out.Reset()
	if err := down(t.Context(), dir, &out); err != nil || !strings.Contains(out.String(), "removed") || !strings.Contains(out.String(), "Nothing is up.") {
		t.Errorf("down of a stale file: %v, %q", err, out.String())
	}
	select {
	case <-got:
		t.Error("down signalled a process that is not its own")
	default:
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != logFile {
		t.Errorf("left behind: %v, %v; only the log stays", entries, err)
	}
}
