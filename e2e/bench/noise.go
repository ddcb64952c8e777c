package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
)

// noise tells how busy the machine was with other things: figures taken beside a compiler are worth little.
type noise struct {
	at   time.Time
	busy time.Duration // of all cores, since boot
	self time.Duration // of this process
}

func startNoise() (noise, error) {
	n := noise{at: time.Now()}
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return n, fmt.Errorf("noise: %w", err)
	}
	if n.busy, err = parseBusy(stat); err != nil {
		return n, err
	}
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
		return n, os.NewSyscallError("getrusage", err)
	}
	n.self = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	return n, nil
}

// cores is the mean number of cores that neither this process nor these Envoys, started since n, used.
func (n noise) cores(envoys map[string]*envoyrun.Envoy) (float64, error) {
	now, err := startNoise()
	if err != nil {
		return 0, err
	}
	others := now.busy - n.busy - (now.self - n.self)
	for _, e := range envoys {
		used, err := e.CPU()
		if err != nil {
			return 0, err
		}
		others -= used
	}
	return max(0, others.Seconds()/now.at.Sub(n.at).Seconds()), nil
}

// parseBusy sums the first line of /proc/stat (ticks of 1/100 s: user nice system idle iowait irq softirq steal …)
// without idle and iowait, and without guest times, which user has already.
func parseBusy(stat []byte) (time.Duration, error) {
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("noise: /proc/stat begins with %q", line)
	}
	var sum time.Duration
	for i, f := range fields[1:9] {
		if i == 3 || i == 4 {
			continue
		}
		ticks, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("noise: /proc/stat: %w", err)
		}
		sum += time.Duration(ticks) * 10 * time.Millisecond
	}
	return sum, nil
}
