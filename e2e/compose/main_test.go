package compose

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

var (
	outFlag    = flag.String("out", "", "folder with what make build leaves there; empty leaves out the test that runs the services")
	envoyFlag  = flag.String("envoy", "", "release of Envoy to test in, such as 1.40.0; empty is what build/envoy.sh finds")
	insideFlag = flag.Bool("inside", false, "this process has a network namespace of its own; set by the test itself")
)

// TestMain runs the tests in a network namespace of their own, where all ports of the demo are free, as they are in
// its containers.
func TestMain(m *testing.M) {
	flag.Parse()
	if *insideFlag {
		if err := loopbackUp(); err != nil {
			fmt.Fprintln(os.Stderr, "compose: the namespace's loopback:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	code, err := inside()
	if err != nil {
		fmt.Fprintf(os.Stderr, "compose: no network namespace (%v): the demo's ports must be free on this machine\n", err)
		code = m.Run()
	}
	os.Exit(code)
}

// inside runs this program again in a network namespace, and returns its exit code.
func inside() (int, error) {
	cmd := exec.Command("/proc/self/exe", append([]string{"-inside"}, os.Args[1:]...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if id := os.Getuid(); id != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: id, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	// The parent-death signal comes when the thread that forked ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); errors.As(err, &exit) {
		return max(1, exit.ExitCode()), nil
	} else if err != nil {
		return 1, nil
	}
	return 0, nil
}

// loopbackUp does what ip link set lo up does.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}
