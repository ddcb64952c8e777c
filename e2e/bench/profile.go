package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"
)

// perf samples the Envoy of one case at saturation and prints where its time goes, by thread and symbol. The recordings
// stay in build/out. Modules are built with -s -w: for their symbols, build them without these flags.
func (b *bench) perf(ctx context.Context) (err error) {
	if _, err := exec.LookPath("perf"); err != nil {
		return fmt.Errorf("-profile needs perf: %w", err)
	}
	e, err := b.start(ctx, b.profile)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.end(e)) }()
	for _, body := range b.bodies {
		file := filepath.Join(b.setup.outDir, "perf-"+b.profile+"-"+body+".data")
		record := exec.CommandContext(ctx, "perf", "record", "-q", "-F", "999", "-p", strconv.Itoa(e.Pid()), "-o", file, "--", "sleep", "5")
		record.Stderr = os.Stderr
		record.Cancel = func() error { return record.Process.Signal(os.Interrupt) }
		if err := record.Start(); err != nil {
			return fmt.Errorf("perf record: %w", err)
		}
		s, loadErr := b.one(e, body, load{conns: 32, warm: 500 * time.Millisecond, count: 4 * time.Second})
		if err := errors.Join(loadErr, record.Wait()); err != nil {
			return fmt.Errorf("perf record, body %s: %w", body, err)
		}
		fmt.Printf("case %s, body %s, saturated: %.0f requests/s, %.1f µs CPU a request; %s\n", b.profile, body, s.rps, s.cpuUs, file)
		for _, by := range []string{"comm,dso", "comm,dso,symbol"} {
			report := exec.CommandContext(ctx, "perf", "report", "-q", "--stdio", "--no-children", "--percent-limit", "0.7",
				"--sort", by, "-i", file)
			report.Stdout, report.Stderr = os.Stdout, os.Stderr
			if err := report.Run(); err != nil {
				return fmt.Errorf("perf report: %w", err)
			}
		}
	}
	return nil
}
