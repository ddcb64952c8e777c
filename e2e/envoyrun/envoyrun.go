// Package envoyrun starts a real Envoy as a child process, waits until it serves, and ends it.
//
// It reports by plain errors, so that tests, the demo and the benchmark can all use it. An Envoy never outlives the
// process that started it, however that one ends. Linux only.
package envoyrun

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options say which Envoy to run and with what. Binary and one of Bootstrap and BootstrapPath are required.
type Options struct {
	// Binary is Envoy's path; Binary() of this package finds one.
	Binary string
	// Bootstrap is the YAML or JSON bootstrap. It needs an admin address; port_value 0, there and in listeners, takes a
	// free port without a race.
	Bootstrap []byte
	// BootstrapPath names a bootstrap file instead. Its suffix tells Envoy the format (.yaml, .json).
	BootstrapPath string
	// Concurrency is the number of Envoy's worker threads; 0 is 1.
	Concurrency int
	// Dir is the working directory; "" is a temporary one that Stop removes.
	Dir string
	// Env is added to this process's environment: "NAME=value", the last of a name wins. For example
	// ENVOY_DYNAMIC_MODULES_SEARCH_PATH.
	Env []string
	// Args are added to the command line.
	Args []string
	// LogLevel is Envoy's --log-level; "" is info.
	LogLevel string
	// ReadyTimeout bounds the wait for a listening, ready Envoy; 0 is a minute.
	ReadyTimeout time.Duration
	// StopTimeout is how long Stop waits after SIGTERM before it kills; 0 is a minute.
	StopTimeout time.Duration
	// Expect are patterns of [error] and [critical] log lines that don't count as unexpected; Envoy.Expect adds more.
	Expect []*regexp.Regexp
	// OnLine, if set, is called with each line that Envoy writes, one after another, those of each output in order; it
	// must not block.
	OnLine func(string)
}

// Envoy is a running (or ended) Envoy. Its methods may be called from any goroutine.
type Envoy struct {
	// Set by Start, constant afterwards.
	pid         int
	admin       string
	listeners   map[string]string
	log         *logBuffer
	client      *http.Client
	stopTimeout time.Duration
	done        chan struct{} // closed when the process is gone and its log read to the end

	// Written before done is closed, read after it.
	waitErr error

	// The scratch folders, removed once.
	cleanup sync.Once
	scratch []string
}

// StartError says why no Envoy serves: it ended by itself (a rejected bootstrap) or wasn't ready in time.
type StartError struct {
	Reason string
	// Log is every line it wrote.
	Log []string
}

// Error names the reason and the [error] and [critical] lines, or else the last lines of the log.
func (e *StartError) Error() string {
	shown := badLines(e.Log)
	if len(shown) == 0 {
		shown = e.Log[max(0, len(e.Log)-15):]
	}
	return "envoy: " + e.Reason + "\n  " + strings.Join(shown, "\n  ")
}

// Binary runs build/envoy.sh of the repository at root, which finds or downloads Envoy, and returns the path it prints.
// version "" is any accepted one.
func Binary(ctx context.Context, root, version string) (string, error) {
	var args []string
	if version != "" {
		args = append(args, version)
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, "build", "envoy.sh"), args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("build/envoy.sh found no Envoy: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// Start runs Envoy and returns once it is ready and its listeners have ports. When ctx ends before that, Envoy is
// killed; later ctx has no effect. An Envoy that doesn't get ready is a *StartError and leaves no process behind.
func Start(ctx context.Context, o Options) (*Envoy, error) {
	e := &Envoy{
		log:         newLogBuffer(o.Expect, o.OnLine),
		client:      &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2}, Timeout: 30 * time.Second},
		stopTimeout: orDefault(o.StopTimeout, time.Minute),
		done:        make(chan struct{}),
	}
	args, err := e.prepare(o)
	if err != nil {
		e.removeScratch()
		return nil, err
	}
	adminFile := filepath.Join(e.scratch[0], "admin")
	args = append(args, "--admin-address-path", adminFile)
	cmd := e.command(o, args)
	if err := e.launch(cmd); err != nil {
		e.removeScratch()
		return nil, fmt.Errorf("envoy: can't start %s: %w", o.Binary, err)
	}
	ctx, cancel := context.WithTimeout(ctx, orDefault(o.ReadyTimeout, time.Minute))
	defer cancel()
	if err := e.waitReady(ctx, adminFile); err != nil {
		reason := err.Error()
		select {
		case <-e.done:
			reason = fmt.Sprintf("ended before it was ready: %v", e.waitErr)
		default:
		}
		e.kill()
		return nil, &StartError{Reason: reason, Log: e.log.all()}
	}
	return e, nil
}

// Validate runs Envoy with --mode validate and returns its log; the error is a *StartError if Envoy refuses the bootstrap.
func Validate(ctx context.Context, o Options) ([]string, error) {
	e := &Envoy{log: newLogBuffer(o.Expect, o.OnLine), client: &http.Client{}, done: make(chan struct{})}
	defer e.removeScratch()
	args, err := e.prepare(o)
	if err != nil {
		return nil, err
	}
	if err := e.launch(e.command(o, append(args, "--mode", "validate"))); err != nil {
		return nil, fmt.Errorf("envoy: can't start %s: %w", o.Binary, err)
	}
	select {
	case <-e.done:
	case <-ctx.Done():
		e.kill()
		return e.log.all(), &StartError{Reason: "validation: " + ctx.Err().Error(), Log: e.log.all()}
	}
	if e.waitErr != nil {
		return e.log.all(), &StartError{Reason: "bootstrap refused: " + e.waitErr.Error(), Log: e.log.all()}
	}
	return e.log.all(), nil
}

// prepare checks the options, makes the scratch folder and returns the command line.
func (e *Envoy) prepare(o Options) ([]string, error) {
	if o.Binary == "" {
		return nil, errors.New("envoy: no Binary: set it to what build/envoy.sh prints")
	}
	if (o.Bootstrap == nil) == (o.BootstrapPath == "") {
		return nil, errors.New("envoy: exactly one of Bootstrap and BootstrapPath must be set")
	}
	scratch, err := os.MkdirTemp("", "envoyrun-")
	if err != nil {
		return nil, fmt.Errorf("envoy: scratch folder: %w", err)
	}
	e.scratch = append(e.scratch, scratch)
	path := o.BootstrapPath
	if o.Bootstrap != nil {
		path = filepath.Join(scratch, "bootstrap.yaml")
		if json.Valid(o.Bootstrap) {
			path = filepath.Join(scratch, "bootstrap.json") // keeps 0.8 a number, which the YAML loader doesn't
		}
		if err := os.WriteFile(path, o.Bootstrap, 0o600); err != nil {
			return nil, fmt.Errorf("envoy: bootstrap: %w", err)
		}
	}
	if path, err = filepath.Abs(path); err != nil {
		return nil, fmt.Errorf("envoy: bootstrap: %w", err)
	}
	level := o.LogLevel
	if level == "" {
		level = "info"
	}
	// Without --disable-hot-restart two Envoys on one machine fight for a domain socket.
	args := []string{"--disable-hot-restart", "--config-path", path, "--concurrency", strconv.Itoa(max(1, o.Concurrency)),
		"--log-level", level}
	return append(args, o.Args...), nil
}

func (e *Envoy) command(o Options, args []string) *exec.Cmd {
	cmd := exec.Command(o.Binary, args...)
	cmd.Dir = o.Dir
	if cmd.Dir == "" {
		cmd.Dir = e.scratch[0]
	}
	cmd.Env = append(os.Environ(), o.Env...)
	cmd.Stdout, cmd.Stderr = e.log.output(), e.log.output()
	cmd.WaitDelay = 2 * time.Second // a grandchild that holds the pipe can't hold us
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		Setpgid:   true, // Ctrl-C reaches the process that owns this Envoy, which then stops it in order
	}
	return cmd
}

// launch starts cmd and a goroutine that waits for its end. The kernel sends the parent-death signal when the *thread*
// that forked ends, so that goroutine holds its thread from before the fork until the child is gone.
func (e *Envoy) launch(cmd *exec.Cmd) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			e.pid = cmd.Process.Pid
		}
		started <- err
		if err != nil {
			return
		}
		e.waitErr = cmd.Wait()
		e.log.close()
		close(e.done)
	}()
	return <-started
}

// waitReady polls: Envoy offers no event for "the admin port is known" or "ready".
func (e *Envoy) waitReady(ctx context.Context, adminFile string) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	missing := "no admin address: has the bootstrap an admin section?"
	for {
		if e.admin == "" {
			if b, err := os.ReadFile(adminFile); err == nil && len(b) > 0 && !strings.HasSuffix(string(b), ":") {
				e.admin = strings.TrimSpace(string(b))
			}
		}
		if e.admin != "" {
			status, body, err := e.Admin(ctx, http.MethodGet, "/ready")
			switch {
			case err == nil && status == http.StatusOK:
				e.listeners, err = e.Listeners(ctx)
				return err
			case ctx.Err() != nil: // the deadline cut this attempt, an earlier one knows more
			case err != nil:
				missing = err.Error()
			default:
				missing = "/ready says " + strings.TrimSpace(string(body))
			}
		}
		select {
		case <-e.done:
			return errors.New("ended")
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w; %s", ctx.Err(), missing)
		case <-tick.C:
		}
	}
}

// Stop ends Envoy with SIGTERM, after StopTimeout with SIGKILL, waits until it is gone and removes the scratch folder.
// The error says that it had to be killed, had ended by itself before, or ended in another way than asked. Later calls
// change nothing and return nil.
func (e *Envoy) Stop() error {
	var err error
	e.cleanup.Do(func() {
		defer e.drop()
		select {
		case <-e.done:
			err = fmt.Errorf("envoy: had ended by itself: %s", exitText(e.waitErr))
			return
		default:
		}
		_ = e.Signal(syscall.SIGTERM)
		timer := time.NewTimer(e.stopTimeout)
		defer timer.Stop()
		select {
		case <-e.done:
			if e.waitErr != nil {
				err = fmt.Errorf("envoy: ended badly on SIGTERM: %w", e.waitErr)
			}
		case <-timer.C:
			_ = e.Signal(syscall.SIGKILL)
			<-e.done
			err = fmt.Errorf("envoy: still there %v after SIGTERM, killed", e.stopTimeout)
		}
	})
	return err
}

// kill ends Envoy at once and waits for its end.
func (e *Envoy) kill() {
	e.cleanup.Do(func() {
		defer e.drop()
		_ = e.Signal(syscall.SIGKILL)
		<-e.done
	})
}

func (e *Envoy) drop() {
	e.client.CloseIdleConnections()
	e.removeScratch()
}

func (e *Envoy) removeScratch() {
	for _, d := range e.scratch {
		_ = os.RemoveAll(d)
	}
}

// Signal sends s to Envoy. It is an error when Envoy has ended; a reused pid is never hit.
func (e *Envoy) Signal(s syscall.Signal) error {
	select {
	case <-e.done:
		return errors.New("envoy: has ended")
	default:
	}
	return unix.Kill(e.pid, s)
}

// Pid is Envoy's process id.
func (e *Envoy) Pid() int { return e.pid }

// Done is closed when the process is gone.
func (e *Envoy) Done() <-chan struct{} { return e.done }

// Addr is host:port of the named listener as it was when Envoy got ready, "" if there was none; see Listeners.
func (e *Envoy) Addr(listener string) string { return e.listeners[listener] }

// Addrs are the addresses of all listeners by name, as they were when Envoy got ready.
func (e *Envoy) Addrs() map[string]string { return maps.Clone(e.listeners) }

// AdminAddr is host:port of Envoy's admin interface.
func (e *Envoy) AdminAddr() string { return e.admin }

func exitText(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

func orDefault(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}
