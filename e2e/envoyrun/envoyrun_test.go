package envoyrun

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary plays Envoy (or a process that starts one) when this variable says so.
const role = "ENVOYRUN_TEST_ROLE"

func TestMain(m *testing.M) {
	switch r := os.Getenv(role); r {
	case "":
		os.Exit(m.Run())
	case "parent":
		playParent()
	default:
		playEnvoy(r)
	}
}

func argAfter(name string) string {
	if i := slices.Index(os.Args, name); i >= 0 && i+1 < len(os.Args) {
		return os.Args[i+1]
	}
	return ""
}

func playEnvoy(r string) {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	say := func(level, msg string) {
		fmt.Fprintf(os.Stderr, "[2026-01-02 03:04:05.678][%d][%s][main] [source/x.cc:1] %s\n", os.Getpid(), level, msg)
	}
	say("info", "args "+strings.Join(os.Args[1:], " "))
	if r == "reject" || slices.Contains(os.Args, "validate") {
		say("error", "no such field: x")
		os.Exit(1)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	asked := 0
	mux := http.NewServeMux()
	mux.HandleFunc("/ready", func(w http.ResponseWriter, _ *http.Request) {
		if asked++; asked < 3 || r == "never" {
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprintln(w, "INITIALIZING")
		}
	})
	mux.HandleFunc("/listeners", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"listener_statuses":[{"name":"http","local_address":{"socket_address":{"address":"127.0.0.1","port_value":4711}}},
			{"name":"six","local_address":{"socket_address":{"address":"::1","port_value":2}}},{"name":"uds","local_address":{"pipe":{"path":"/s"}}}]}`)
	})
	mux.HandleFunc("/stats", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"stats":[{"name":"a.b","value":18},{"name":"text","value":"x"},{"histograms":{}}]}`)
	})
	mux.HandleFunc("/say", func(_ http.ResponseWriter, q *http.Request) { say("error", q.URL.RawQuery) })
	mux.HandleFunc("/exit", func(http.ResponseWriter, *http.Request) { os.Exit(7) })
	if err := os.WriteFile(argAfter("--admin-address-path"), []byte(l.Addr().String()), 0o600); err != nil {
		panic(err)
	}
	go func() { _ = http.Serve(l, mux) }()
	<-term
	if r == "deaf" {
		select {}
	}
	say("critical", "shutting down")
	os.Exit(0)
}

func playParent() {
	os.Setenv(role, "envoy")
	e, err := Start(context.Background(), options("envoy"))
	if err != nil {
		panic(err)
	}
	fmt.Println(e.Pid())
	select {}
}

func options(r string) Options {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return Options{Binary: exe, Bootstrap: []byte("admin: {}"), Env: []string{role + "=" + r}}
}

func start(t *testing.T, o Options) *Envoy {
	t.Helper()
	e, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Stop() })
	return e
}

func TestStartServeStop(t *testing.T) {
	o := options("envoy")
	o.Concurrency = 3
	e := start(t, o)
	for name, want := range map[string]string{"http": "127.0.0.1:4711", "six": "[::1]:2", "uds": "/s", "none": ""} {
		if got := e.Addr(name); got != want {
			t.Errorf("Addr(%q) = %q, want %q", name, got, want)
		}
	}
	stats, err := e.Stats(t.Context(), "")
	if err != nil || len(stats) != 1 || stats["a.b"] != 18 {
		t.Errorf("Stats = %v, %v", stats, err)
	}
	line, err := e.WaitLog(t.Context(), regexp.MustCompile("args"))
	if err != nil || !strings.Contains(line, "--disable-hot-restart") || !strings.Contains(line, "--concurrency 3") {
		t.Errorf("command line: %q, %v", line, err)
	}
	if cpu, err := e.CPU(); err != nil || cpu <= 0 {
		t.Errorf("CPU = %v, %v", cpu, err)
	}
	if rss, err := e.RSS(); err != nil || rss <= 0 {
		t.Errorf("RSS = %v, %v", rss, err)
	}
	if threads, err := e.Threads(); err != nil || threads[e.Pid()] == "" {
		t.Errorf("Threads = %v, %v", threads, err)
	}
	scratch := e.scratch[0]
	if err := e.Stop(); err != nil {
		t.Error(err)
	}
	if err := e.Stop(); err != nil {
		t.Errorf("second Stop: %v", err)
	}
	if _, err := os.Stat(scratch); !os.IsNotExist(err) {
		t.Errorf("scratch folder is still there: %v", err)
	}
	if err := unix.Kill(e.Pid(), 0); err == nil {
		t.Error("the process is still there")
	}
	if err := e.Signal(syscall.SIGTERM); err == nil {
		t.Error("Signal to an ended Envoy gave no error")
	}
	if got := e.Unexpected(); len(got) != 1 || !strings.Contains(got[0], "shutting down") {
		t.Errorf("Unexpected = %q", got)
	}
	e.Expect(regexp.MustCompile("shutting down"))
	if err := e.CheckLog(); err != nil {
		t.Error(err)
	}
}

func TestWaitLogFromMarkSeesOnlyNewLines(t *testing.T) {
	e := start(t, options("envoy"))
	say := func(what string) {
		if _, _, err := e.Admin(t.Context(), http.MethodGet, "/say?"+what); err != nil {
			t.Fatal(err)
		}
	}
	say("one")
	if _, err := e.WaitLog(t.Context(), regexp.MustCompile("one")); err != nil {
		t.Fatal(err)
	}
	m := e.MarkLog()
	say("two")
	line, err := e.WaitLogFrom(t.Context(), m, regexp.MustCompile("one|two"))
	if err != nil || !strings.HasSuffix(line, "two") {
		t.Errorf("got %q, %v", line, err)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.WaitLog(done, regexp.MustCompile("never")); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled wait: %v", err)
	}
	if err := e.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := e.WaitLog(t.Context(), regexp.MustCompile("never")); err == nil {
		t.Error("wait on an ended Envoy found a line that isn't there")
	}
}

func TestStartFailures(t *testing.T) {
	missing := options("envoy")
	missing.Binary = "/nonexistent/envoy"
	both := options("envoy")
	both.BootstrapPath = "x.yaml"
	for name, c := range map[string]struct {
		o    Options
		want string
	}{
		"rejected":  {options("reject"), "ended before it was ready: exit status 1\n  [2026-01-02 03:04:05.678]"},
		"missing":   {missing, "can't start /nonexistent/envoy"},
		"no binary": {Options{Bootstrap: []byte("x")}, "build/envoy.sh"},
		"both":      {both, "exactly one"},
	} {
		t.Run(name, func(t *testing.T) {
			e, err := Start(t.Context(), c.o)
			if err == nil {
				_ = e.Stop()
				t.Fatal("no error")
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %q does not have %q", err, c.want)
			}
		})
	}
	never := options("never")
	said := ""
	for never.ReadyTimeout = 300 * time.Millisecond; !strings.Contains(said, "/ready says INITIALIZING"); never.ReadyTimeout *= 2 { // a busy machine has not started it by then
		e, err := Start(t.Context(), never)
		if err == nil {
			_ = e.Stop()
			t.Fatal("it is never ready, and was")
		}
		if said = err.Error(); never.ReadyTimeout > time.Minute {
			t.Fatalf("not ready: %s", said)
		}
	}
	if log, err := Validate(t.Context(), options("envoy")); err == nil || len(log) != 2 {
		t.Errorf("Validate: %v, log %q", err, log)
	}
}

func TestStopKillsTheDeaf(t *testing.T) {
	o := options("deaf")
	o.StopTimeout = 50 * time.Millisecond
	e := start(t, o)
	if err := e.Stop(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("Stop: %v", err)
	}
}

func TestStopReportsAnEarlierEnd(t *testing.T) {
	e := start(t, options("envoy"))
	_, _, _ = e.Admin(t.Context(), http.MethodGet, "/exit")
	<-e.Done()
	if err := e.Stop(); err == nil || !strings.Contains(err.Error(), "exit status 7") {
		t.Errorf("Stop: %v", err)
	}
}

// A killed parent can't clean up, so the kernel must.
func TestEnvoyDiesWithItsParent(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.Command(exe)
	parent.Env = append(os.Environ(), role+"=parent", "TMPDIR="+t.TempDir()) // it can't remove its scratch folder
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	var pid int
	if _, scanErr := fmt.Sscan(line, &pid); err != nil || scanErr != nil {
		_ = parent.Process.Kill()
		t.Fatalf("parent printed %q: %v", line, err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	_ = parent.Process.Kill()
	_ = parent.Wait()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 20_000)
	if n != 1 {
		_ = unix.Kill(pid, syscall.SIGKILL)
		t.Errorf("the child is alive 20 s after its parent's death (%v)", err)
	}
}
