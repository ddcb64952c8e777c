package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// news is the one message of serve to up.
type news struct {
	Error   string            `json:"error,omitempty"`
	Envoy   string            `json:"envoy,omitempty"`   // its version
	Engines map[string]string `json:"engines,omitempty"` // addresses by pod
}

const (
	pidFile = "pid"
	logFile = "envoy.log"
	tmpDir  = "tmp"
)

// up starts serve in a session of its own, waits until it is ready and prints what to do with it.
func up(ctx context.Context, s settings, out io.Writer) error {
	if _, err := s.loading(); err != nil {
		return err
	}
	dir := s.stateDir()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if pid, err := owner(filepath.Join(dir, pidFile)); err != nil {
		return err
	} else if pid != 0 {
		return fmt.Errorf("it is up already (process %d): make down ends it", pid)
	}
	envoy, err := s.findEnvoy(ctx)
	if err != nil {
		return err
	}
	told, err := launch(ctx, s, dir, envoy)
	if err != nil {
		return err
	}
	welcome(out, s, told)
	return nil
}

// free is an error unless all addresses can be listened on. Envoy itself would share a taken port with its like.
func (s settings) free() error {
	for _, a := range []struct{ flag, what, address string }{
		{"--listen", "for traffic", s.listen}, {"--admin", "Envoy's admin interface", s.admin}, {"--shunt-admin", "shunt's admin listener", s.shuntAdmin},
	} {
		at, err := netip.ParseAddrPort(a.address)
		if err != nil || at.Port() == 0 {
			return fmt.Errorf("%s %q (%s) is not an IP:port, such as 127.0.0.1:8081", a.flag, a.address, a.what)
		}
		l, err := net.Listen("tcp", a.address)
		if errors.Is(err, unix.EADDRINUSE) {
			return fmt.Errorf("%s (%s) is taken: end the process that listens there, or choose another with make up ARGS=\"%s IP:port\"", at, a.what, a.flag)
		}
		if err != nil {
			return fmt.Errorf("%s %s (%s): %w", a.flag, at, a.what, err)
		}
		if err := l.Close(); err != nil {
			return err
		}
	}
	return nil
}

// launch starts serve and waits for its message. Without a good one, nothing is left running.
func launch(ctx context.Context, s settings, dir, envoy string) (news, error) {
	self, err := os.Executable()
	if err != nil {
		return news{}, err
	}
	log, err := os.OpenFile(filepath.Join(dir, logFile), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return news{}, err
	}
	defer func() { _ = log.Close() }()
	tmp, err := filepath.Abs(filepath.Join(dir, tmpDir))
	if err != nil {
		return news{}, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return news{}, err
	}
	defer func() { _ = r.Close() }()
	cmd := exec.Command(self, "serve", "--door", s.door, "--policy", s.policy, "--listen", s.listen, "--admin", s.admin,
		"--shunt-admin", s.shuntAdmin, "--envoy", envoy)
	cmd.Dir = s.root
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp) // so that down finds even what a killed serve left
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return news{}, err
	}
	defer context.AfterFunc(ctx, func() { _ = r.Close() })() // ends the read below
	var told news
	line, err := bufio.NewReader(r).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &told)
	}
	switch {
	case err == nil && told.Error == "":
		return told, cmd.Process.Release()
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err == nil:
		err = errors.New(told.Error)
	default:
		err = fmt.Errorf("the background process ended without a word; its log is %s", filepath.Join(dir, logFile))
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	_ = cmd.Wait()
	return news{}, err
}

// serve is the process that owns Envoy and the engines until it is told to end. Descriptor 3 is the pipe to up.
func serve(ctx context.Context, s settings) (err error) {
	if s.envoy == "" {
		return errors.New("serve is started by up: run make up")
	}
	unix.CloseOnExec(3)
	pipe := os.NewFile(3, "pipe to up")
	var w *world
	lock, err := takeLock(filepath.Join(s.stateDir(), pidFile))
	if err == nil {
		defer func() { _ = lock.Close() }() // last: the lock says that we are there
		defer func() { err = errors.Join(err, removeState(s.stateDir())) }()
		w, err = s.world(ctx, lock)
	} else if errors.Is(err, errOwned) {
		err = errors.New("it is up already: make down ends it")
	}
	if err != nil {
		_ = json.NewEncoder(pipe).Encode(news{Error: err.Error()})
		return err
	}
	defer func() { err = errors.Join(err, w.stop()) }()
	told := news{Envoy: w.envoyVersion(ctx), Engines: map[string]string{}}
	for i, p := range w.pods {
		told.Engines[p.name] = w.engines[i].Addr()
	}
	if err := errors.Join(json.NewEncoder(pipe).Encode(told), pipe.Close()); err != nil {
		return fmt.Errorf("up has gone, so we go: %w", err)
	}
	select {
	case <-ctx.Done():
		return nil
	case <-w.envoy.Done():
		return errors.New("envoy has ended")
	}
}

// world starts what serve owns, with its files in the state folder. Holding the lock, it is alone in touching that folder
// and in trying the ports.
func (s settings) world(ctx context.Context, lock *os.File) (*world, error) {
	loading, err := s.loading()
	if err != nil {
		return nil, err
	}
	if err := lock.Truncate(0); err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintln(lock, os.Getpid()); err != nil {
		return nil, err
	}
	if err := s.free(); err != nil {
		return nil, err
	}
	dir := s.stateDir()
	tmp := filepath.Join(dir, tmpDir) // our TMPDIR; of an owner that was killed, it may be there
	if err := errors.Join(os.Truncate(filepath.Join(dir, logFile), 0), os.RemoveAll(tmp), os.Mkdir(tmp, 0o755)); err != nil {
		return nil, err
	}
	out := os.Stderr // the log file
	return start(ctx, place{
		loading: loading, envoy: s.envoy, listen: s.listen, admin: s.admin, shuntAdmin: s.shuntAdmin, policy: s.policy, dir: dir,
		write: func(name string, text []byte) (string, error) {
			path := filepath.Join(dir, name)
			return path, os.WriteFile(path, text, 0o644)
		},
		onLine: func(line string) { fmt.Fprintln(out, line) },
	})
}

// removeState removes what serve kept, but for the log. Only the owner of the lock may call it.
func removeState(dir string) error {
	var errs []error
	for _, name := range []string{"shunt.yaml", "envoy.yaml", tmpDir, pidFile} {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, name)))
	}
	return errors.Join(errs...)
}

// down ends what up started.
func down(ctx context.Context, dir string, out io.Writer) error {
	path := filepath.Join(dir, pidFile)
	pid, err := endOwner(ctx, path, 20*time.Second)
	if err != nil {
		return err
	}
	if _, err := os.Stat(path); err == nil { // of an owner that was killed
		lock, err := takeLock(path)
		if errors.Is(err, errOwned) {
			return nil // make up in another shell was faster
		}
		if err != nil {
			return err
		}
		defer func() { _ = lock.Close() }()
		if err := removeState(dir); err != nil {
			return err
		}
		fmt.Fprintln(out, "A process that was killed had left files in build/out/demo: removed.")
	}
	if pid == 0 {
		fmt.Fprintln(out, "Nothing is up.")
	} else {
		fmt.Fprintf(out, "Down: Envoy and the engines have ended (process %d).\n", pid)
	}
	return nil
}

// welcome prints lines to paste.
func welcome(out io.Writer, s settings, told news) {
	loaded := told.Engines[pods()[1].name]
	fmt.Fprintf(out, `
Envoy %s with shunt inside is up at http://%s, in front of four simulated vLLM engines:
%s on three pods, of which two are slow and loaded, and %s on one. Lines to paste:

# a chat; x-shunt-explain makes the answer say which pod was picked, and by which policy
curl -i http://%[2]s/v1/chat/completions -H 'content-type: application/json' -H 'x-shunt-explain: 1' -d '{"model":"%[3]s","messages":[{"role":"user","content":"hello"}]}'

# the same, streamed
curl -N http://%[2]s/v1/chat/completions -H 'content-type: application/json' -d '{"model":"%[3]s","stream":true,"max_tokens":20,"messages":[{"role":"user","content":"hello"}]}'

# the models that requests may ask for, answered by shunt
curl http://%[2]s/v1/models

# how shunt sees each endpoint; its metrics for Prometheus
curl http://%[5]s/statusz.json
curl http://%[5]s/metrics

# Envoy's own figures for the cluster of engines
curl 'http://%[6]s/stats?filter=cluster.shunt_engines'

# one engine refuses connections for 20 seconds: look at statusz.json meanwhile
curl http://%[7]s/_sim/refuse -d '{"cut":false,"for":"20s"}'

shunt's config is build/out/demo/shunt.yaml: a change there applies at once. Envoy's log: build/out/demo/%[8]s
make down ends it.
`, told.Envoy, s.listen, bigModel, smallModel, s.shuntAdmin, s.admin, loaded, logFile)
}
