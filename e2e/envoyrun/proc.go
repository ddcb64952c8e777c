package envoyrun

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// CPU is the processor time, user and system, that all threads of Envoy have used, those that have ended too. It comes
// from the process's CPU clock, which counts nanoseconds where /proc/PID/stat has ticks of 10 ms.
func (e *Envoy) CPU() (time.Duration, error) {
	// The kernel's encoding of "CPU clock of that process": MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
	const cpuclockSched = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^e.pid<<3|cpuclockSched), &ts); err == nil {
		return time.Duration(ts.Nano()), nil
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", e.pid))
	if err != nil {
		return 0, fmt.Errorf("envoy: CPU time: %w", err)
	}
	return parseStat(stat)
}

// parseStat reads utime and stime, fields 14 and 15 of /proc/PID/stat, in ticks of 1/100 s.
func parseStat(stat []byte) (time.Duration, error) {
	// Field 2 is the program's name in parentheses and may hold anything, so count from the last parenthesis.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("envoy: CPU time: /proc/PID/stat has %d fields after the name, 13 needed", len(fields))
	}
	var sum time.Duration
	for _, f := range fields[11:13] {
		ticks, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("envoy: CPU time: %w", err)
		}
		sum += time.Duration(ticks) * 10 * time.Millisecond
	}
	return sum, nil
}

// RSS is the resident memory of Envoy in bytes.
func (e *Envoy) RSS() (int64, error) {
	statm, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", e.pid))
	if err != nil {
		return 0, fmt.Errorf("envoy: memory: %w", err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(statm), &size, &resident); err != nil {
		return 0, fmt.Errorf("envoy: memory: %w", err)
	}
	return resident * int64(os.Getpagesize()), nil
}

// Threads are the names of Envoy's threads by their id: main, wrk:worker_0, …
func (e *Envoy) Threads() (map[int]string, error) {
	dir := fmt.Sprintf("/proc/%d/task", e.pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("envoy: threads: %w", err)
	}
	threads := map[int]string{}
	for _, t := range entries {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		if name, err := os.ReadFile(dir + "/" + t.Name() + "/comm"); err == nil { // else it has just ended
			threads[tid] = strings.TrimSpace(string(name))
		}
	}
	return threads, nil
}
