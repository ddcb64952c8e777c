// Command mutants takes each rule of the scorer out in turn and runs the test
// that has to notice. The tree is not touched: the go command overlays the
// changed file. It fails if a mutant survives, or is no longer the code's.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
)

func main() {
	only := flag.String("only", "", "run only the mutants whose name this regular expression matches")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, ".", *only); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// run tries the mutants of the module in dir.
func run(ctx context.Context, dir, only string) error {
	root, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	wanted, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	failed, tried := 0, 0
	for _, m := range mutants() {
		if !wanted.MatchString(m.name) {
			continue
		}
		tried++
		if err := m.try(ctx, root, scratch); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			failed++
			fmt.Printf("FAIL  %s: %v\n", m.name, err)
			continue
		}
		fmt.Printf("ok    %-40s %s notices\n", m.name, m.test)
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d mutants", failed, tried)
	}
	fmt.Printf("%d mutants, each noticed by its test\n", tried)
	return nil
}

// try runs the mutant's test on the mutated code and wants it to fail.
func (m *mutant) try(ctx context.Context, root, scratch string) error {
	path := filepath.Join(root, m.file)
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	mutated, err := m.apply(string(text))
	if err != nil {
		return err
	}
	file, overlay := filepath.Join(scratch, "mutant.go"), filepath.Join(scratch, "overlay.json")
	list, err := json.Marshal(map[string]map[string]string{"Replace": {path: file}})
	if err != nil {
		return err
	}
	if err := errors.Join(os.WriteFile(file, []byte(mutated), 0o600), os.WriteFile(overlay, list, 0o600)); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-timeout=2m", "-overlay="+overlay, "-run=^"+strings.ReplaceAll(m.test, "/", "$/^")+"$", "./"+m.pkg)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	switch name, _, _ := strings.Cut(m.test, "/"); {
	case err == nil:
		return fmt.Errorf("survives %s", m.test)
	case !bytes.Contains(out, []byte("--- FAIL: "+name)):
		return fmt.Errorf("%s did not fail, but something else did:\n%s", m.test, out)
	}
	return nil
}

// apply makes the mutant's change, which must be possible in one place only.
func (m *mutant) apply(text string) (string, error) {
	if n := strings.Count(text, m.old); n != 1 {
		return "", fmt.Errorf("%s has the text %d times, not once: %s", m.file, n, m.old)
	}
	return strings.Replace(text, m.old, m.with, 1), nil
}
