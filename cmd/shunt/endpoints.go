package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/filter"
	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
	"github.com/shuntproxy/shunt/internal/pool"
)

func endpointsCommand() *cobra.Command {
	var file, only string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "endpoints --config FILE",
		Short: "Print the endpoints that discovery finds",
		Long: "Ask the sources of each pool of a shunt config once, and print what they find: the endpoint, its pod, the\n" +
			"model and engine of its labels, whether its source says that it may take requests (or why not), and the\n" +
			"source. What was found and is no endpoint follows. Nothing is asked of the endpoints themselves: what they\n" +
			"answer is in /statusz.json of a running Envoy.\n" +
			"A source that can't tell within the timeout is a line on stderr, and the exit code is 1.",
		Example: "  shunt endpoints --config shunt.yaml\n" +
			"  shunt endpoints --config shunt.yaml --pool chat",
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return errConfigMissing
			}
			text, err := readDocument(cmd, file)
			if err != nil {
				return err
			}
			cfg, _, err := parseConfig(file, text)
			if err != nil {
				return err
			}
			return printEndpoints(cmd, cfg, only, timeout)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "shunt config, - for stdin (required)")
	cmd.Flags().StringVar(&only, "pool", "", "only this pool")
	cmd.Flags().DurationVar(&timeout, "timeout", 10*time.Second, "how long to wait for the sources")
	return cmd
}

// foundBySource is what one source told.
type foundBySource struct {
	name   string
	set    *discovery.Set
	status discovery.Status
}

func printEndpoints(cmd *cobra.Command, cfg *config.Config, only string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
	defer cancel()
	out := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "POOL\tENDPOINT\tPOD\tMODEL\tENGINE\tREADY\tSOURCE")
	var failed []error
	var passed []string
	matched := false
	for i := range cfg.Pools {
		def := &cfg.Pools[i]
		if only != "" && def.Name != only {
			continue
		}
		matched = true
		seen := map[netip.AddrPort]bool{} // the first source to name an address wins
		for _, f := range askSources(ctx, def) {
			switch {
			case f.set == nil && f.status.Error != "":
				failed = append(failed, sourceError(def.Name, f.name, f.status.Error))
			case f.set == nil:
				failed = append(failed, fmt.Errorf("pool %s: %s: no answer within %s (%s)", def.Name, f.name, timeout, f.status.Where))
			default:
				for _, t := range f.set.Targets {
					if !seen[t.Addr] {
						seen[t.Addr] = true
						fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", def.Name, t.Addr, dash(t.Pod), dash(t.Model), engineOf(&t), readiness(&t), t.Source)
					}
				}
				for _, p := range f.status.Passed {
					passed = append(passed, def.Name+": "+p)
				}
				if f.status.Error != "" {
					failed = append(failed, sourceError(def.Name, f.name, f.status.Error))
				}
			}
		}
	}
	if !matched {
		return fmt.Errorf("--pool %s: the config has %s", only, strings.Join(cfg.Pools.Names(), ", "))
	}
	if err := out.Flush(); err != nil {
		return err
	}
	for _, p := range passed {
		fmt.Fprintln(cmd.OutOrStdout(), "no endpoint: "+p)
	}
	return errors.Join(failed...)
}

// sourceError is one line, however many a file's faults have.
func sourceError(pool, source, text string) error {
	return fmt.Errorf("pool %s: %s: %s", pool, source, strings.ReplaceAll(text, "\n", "; "))
}

// askSources runs the sources of a pool until each has told its first full set,
// or can't.
func askSources(ctx context.Context, def *config.Pool) []foundBySource {
	names := filter.SourceNames(def)
	found := make([]foundBySource, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		found[i].name = name
		source, err := filter.NewSource(def, name, filter.SourceHooks{Log: func(slog.Level, string) {}})
		if err != nil {
			found[i].status.Error = err.Error()
			continue
		}
		wg.Go(func() {
			asked, done := context.WithCancel(ctx)
			defer done()
			var mu sync.Mutex
			err := source.Run(asked, func(set discovery.Set) {
				mu.Lock()
				defer mu.Unlock()
				if found[i].set == nil {
					set.Targets = slices.Clone(set.Targets)
					found[i].set = &set
					done()
				}
			})
			found[i].status = source.Status()
			if err != nil && found[i].set == nil {
				found[i].status.Error = err.Error()
			}
		})
	}
	wg.Wait()
	return found
}

func engineOf(t *pool.Target) string {
	if t.Engine == pool.EngineUnknown {
		return t.EngineLabel + " (unknown)"
	}
	return t.Engine.String()
}

func readiness(t *pool.Target) string {
	switch {
	case t.NotReady != "":
		return "no: " + t.NotReady
	case t.PrefillOnly:
		return "no: prefill-only"
	default:
		return "yes"
	}
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
