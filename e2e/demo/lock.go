package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// The pid file carries a lock that the kernel holds for the owner and drops with it. Who owns it is asked of the kernel
// (F_GETLK); the number in the file is for people only. So a stale file names nobody, and no stranger who got an old
// process id is ever signalled.

// errOwned says that another process holds the lock.
var errOwned = errors.New("another process holds the lock")

// takeLock makes this process the owner of the pid file. The lock lasts until the file is closed, or the process ends.
func takeLock(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
		if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &lock); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
				return nil, errOwned
			}
			return nil, fmt.Errorf("%s: lock: %w", path, err)
		}
		// An owner that just ended may have removed the file that was opened here.
		opened, err1 := f.Stat()
		present, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(opened, present) {
			return f, nil
		}
		_ = f.Close()
		if err1 != nil {
			return nil, err1
		}
	}
}

// owner is the process that holds the pid file's lock, 0 if there is none.
func owner(path string) (pid int, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil {
		return 0, fmt.Errorf("%s: lock: %w", path, err)
	}
	if lock.Type == unix.F_UNLCK {
		return 0, nil
	}
	if lock.Pid <= 0 {
		return 0, fmt.Errorf("%s is held by a process of another container or machine: end it there", path)
	}
	return int(lock.Pid), nil
}

// endOwner ends the owner of the pid file with SIGTERM, after patience with SIGKILL, and waits until it is gone. It
// returns its process id, 0 if there was none. When ctx ends it stops waiting.
func endOwner(ctx context.Context, path string, patience time.Duration) (pid int, err error) {
	if pid, err = owner(path); pid == 0 || err != nil {
		return 0, err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return pid, nil
	}
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(fd) }()
	// It holds the lock still, so the descriptor is of the owner and not of a later process with its number.
	if again, err := owner(path); err != nil || again != pid {
		return pid, err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	deadline := time.Now().Add(patience)
	killed := false
	for {
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 50); n > 0 {
			break
		} else if err != nil && !errors.Is(err, unix.EINTR) {
			return 0, fmt.Errorf("process %d: %w", pid, err)
		}
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		if !killed && time.Now().After(deadline) {
			killed = true
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
	}
	if killed {
		return pid, fmt.Errorf("process %d was still there %v after SIGTERM, killed", pid, patience)
	}
	return pid, nil
}
