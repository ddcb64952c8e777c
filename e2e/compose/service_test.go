package compose

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/compose-spec/compose-go/v2/types"
)

// container says what a service's container has, and where it is on this machine.
type container struct {
	programs map[string]string // by the name or path that a command gives
	files    map[string]string // by path in the container: mounts, and the image's own
}

// command translates a command of the container to this machine. A path that the container doesn't have is an error.
func (c *container) command(args []string) ([]string, error) {
	program := c.programs[args[0]]
	if program == "" {
		return nil, fmt.Errorf("the container has no program %s", args[0])
	}
	out := []string{program}
	for _, arg := range args[1:] {
		name, path, split := strings.Cut(arg, "=")
		if !split {
			name, path = "", arg
		}
		if strings.HasPrefix(path, "/") && path != "/dev/null" {
			here := c.files[path]
			if here == "" {
				return nil, fmt.Errorf("%s: the container has no %s", strings.Join(args, " "), path)
			}
			arg = here
			if split {
				arg = name + "=" + here
			}
		}
		out = append(out, arg)
	}
	return out, nil
}

// process is a running service.
type process struct {
	name string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended

	err error // written before done is closed

	mu  sync.Mutex
	log bytes.Buffer // protected by mu
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

// tail is the last lines that it wrote.
func (p *process) tail(lines int) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := strings.Split(p.log.String(), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// lines are those it wrote that match.
func (p *process) lines(pattern *regexp.Regexp) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(strings.Split(p.log.String(), "\n"), func(line string) bool { return !pattern.MatchString(line) })
}

// launch starts a service. Its process ends with the test.
func launch(t *testing.T, name, dir string, args []string) *process {
	t.Helper()
	p := &process{name: name, cmd: exec.Command(args[0], args[1:]...), done: make(chan struct{})}
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.WaitDelay = 2 * time.Second
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error)
	go func() {
		// The parent-death signal comes when the thread that forked ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if t.Failed() {
			t.Logf("%s wrote at last:\n%s", name, p.tail(30))
		}
	})
	return p
}

// stop does what Docker does: SIGTERM, and SIGKILL when the time is up.
func (p *process) stop() error {
	select {
	case <-p.done:
		return fmt.Errorf("had ended by itself: %s", p.cmd.ProcessState)
	default:
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.NewTimer(20 * time.Second)
	defer timer.Stop()
	select {
	case <-p.done:
		return p.err
	case <-timer.C:
		_ = p.cmd.Process.Kill()
		<-p.done
		return errors.New("did not end on SIGTERM")
	}
}

// healthy runs a service's health check until it passes.
func (p *process) healthy(ctx context.Context, c *container, check *types.HealthCheckConfig) error {
	if check == nil || len(check.Test) < 2 || check.Test[0] != "CMD" {
		return errors.New("has no health check of the form [CMD, program, …], which needs no shell")
	}
	args, err := c.command(check.Test[1:])
	if err != nil {
		return err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		attempt, cancel := context.WithTimeout(ctx, time.Duration(*check.Timeout))
		out, err := exec.CommandContext(attempt, args[0], args[1:]...).CombinedOutput()
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("has ended: %s", p.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("is not healthy: %w: %s", err, out)
		}
	}
}

// containerOf collects what a service's container has. Programs of images that are not ours are those of this machine.
func containerOf(t *testing.T, s types.ServiceConfig, images *stage, out string, foreign map[string]string) *container {
	t.Helper()
	c := &container{programs: map[string]string{}, files: map[string]string{}}
	for name, path := range foreign {
		c.programs[name] = path
	}
	if images != nil {
		for path, file := range images.files {
			here := filepath.Join(out, file)
			c.files[path] = here
			if dir, name := filepath.Split(path); dir == "/usr/local/bin/" {
				c.programs[path] = here
				c.programs[name] = here // it is in the default PATH
			}
		}
	}
	for _, v := range s.Volumes {
		switch v.Type {
		case types.VolumeTypeBind:
			if !v.ReadOnly {
				t.Errorf("%s: %s is mounted writable", s.Name, v.Target)
			}
			c.files[v.Target] = v.Source
		case types.VolumeTypeVolume:
			c.files[v.Target] = t.TempDir()
		default:
			t.Errorf("%s: volume of type %s", s.Name, v.Type)
		}
	}
	return c
}
