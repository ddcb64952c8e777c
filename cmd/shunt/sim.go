package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shuntproxy/shunt/internal/simulate"
)

// simFlags are what the command is asked for.
type simFlags struct {
	policies  []string
	workloads []string
	trace     string
	format    string
	smooth    bool
	requests  int
	speeds    []float64
	envoys    []int
	seed      uint64
	seeds     int
	capacity  bool
	jobs      int
	output    string
	plot      string
	kvTokens  int
	objective []string
	cfg       simulate.Config
}

func simCommand() *cobra.Command {
	f := simFlags{cfg: simulate.Config{Engine: simulate.DefaultEngine()}}
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Replay a trace or a made-up workload over simulated engines, under any policy",
		Long: "Replay a trace or a made-up workload over simulated engines in virtual time, under shunt's policies and those of other\n" +
			"routers, and print what clients would see. The same flags give the same result. docs/sim.md explains what is modelled.\n\n" +
			"Workloads:\n" + aboutWorkloads() + "\nOther routers' policies: " + strings.Join(simulate.Rivals(), ", "),
		Example: "  shunt sim --policy round-robin --policy llm-d --policy prefill-cost\n" +
			"  shunt sim --trace conversation.jsonl --format mooncake --smooth --endpoints 8 --speed 5 --policy prefill-cost\n" +
			"  shunt sim --workload pod-loss --envoys 1,4,16 --seeds 5 --policy prefix-hrw --plot out.svg",
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.output != "text" && f.output != "json" {
				return fmt.Errorf("--output: unknown format %q, valid: text, json", f.output)
			}
			if err := f.check(cmd.Flags()); err != nil {
				return err
			}
			rows, err := f.run(cmd)
			if err != nil {
				return err
			}
			if f.plot != "" {
				if err := writePlot(f.plot, rows); err != nil {
					return fmt.Errorf("--plot: %w", err)
				}
			}
			if f.output == "json" {
				return simulate.WriteJSON(cmd.OutOrStdout(), rows)
			}
			return simulate.WriteTable(cmd.OutOrStdout(), rows)
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&f.policies, "policy", nil, "policy, or several by repeating it: a name, names with weights (queue:2,kv-cache:2), parameters in brackets\n(prefill-cost(backlogWeight=1;kv=false)), all, rivals, own (default rivals and prefill-cost)")
	flags.StringSliceVar(&f.workloads, "workload", []string{"multi-turn"}, "made-up workloads, or all")
	flags.StringVar(&f.trace, "trace", "", "file to replay in place of a workload; - is stdin")
	flags.StringVar(&f.format, "format", "mooncake", "of the trace: "+strings.Join(simulate.Formats(), ", "))
	flags.BoolVar(&f.smooth, "smooth", false, "spread a trace's requests of the same moment until the next")
	flags.IntVar(&f.requests, "requests", 0, "how many; 0 is a whole trace, or 500 for each endpoint")
	flags.Float64SliceVar(&f.speeds, "speed", []float64{1}, "all arrivals that many times as fast")
	flags.IntVar(&f.cfg.Endpoints, "endpoints", 8, "engines")
	flags.IntSliceVar(&f.envoys, "envoys", []int{1}, "Envoys that share nothing; each request goes to one by lot")
	flags.Uint64Var(&f.seed, "seed", 1, "of everything drawn by lot")
	flags.IntVar(&f.seeds, "seeds", 1, "average over that many seeds, from --seed on")
	flags.BoolVar(&f.capacity, "capacity", false, "also find the highest speed at which 98 % of requests have their first token within 2s")
	flags.IntVar(&f.jobs, "jobs", 0, "runs at the same time; 0 is one for each processor")
	flags.StringVar(&f.output, "output", "text", "text or json")
	flags.StringVar(&f.plot, "plot", "", "file for an SVG image of the result")
	flags.DurationVar(&f.cfg.ScrapeInterval, "scrape-interval", time.Second, "between two readings of an engine by shunt")
	flags.DurationVar(&f.cfg.RivalInterval, "rival-scrape-interval", 50*time.Millisecond, "between two readings of an engine by other routers")
	flags.DurationVar(&f.cfg.ScrapeDelay, "scrape-delay", 5*time.Millisecond, "until a reading is known")
	flags.DurationVar(&f.cfg.StaleAfter, "stale-after", 5*time.Second, "until a reading is stale")
	flags.DurationVar(&f.cfg.GoalTTFT, "slo-ttft", 2*time.Second, "goal for the time to the first token")
	flags.DurationVar(&f.cfg.GoalTPOT, "slo-tpot", 0, "goal for the mean time between tokens; 0 is none")
	flags.StringSliceVar(&f.objective, "objectives", nil, "turn shunt's flow control on, each request being of one of these: name=priority:share, as in high=10:0.2,low=-1:0.8.\nThe highest is also run without the others")
	flags.IntVar(&f.cfg.Flow.MaxConcurrency, "max-concurrency", 0, "of an Envoy's requests at an engine, with --objectives; 0 goes by the engine's queue and KV cache")
	flags.DurationVar(&f.cfg.Flow.TTL, "ttl", time.Minute, "how long a request waits at most, with --objectives")
	e := &f.cfg.Engine
	flags.Float64Var(&e.PrefillRate, "prefill-rate", e.PrefillRate, "prompt tokens that an engine reads per second")
	flags.Float64Var(&e.DecodeRate, "decode-rate", e.DecodeRate, "tokens per second of a request alone")
	flags.Float64Var(&e.BatchSlowdown, "batch-slowdown", e.BatchSlowdown, "share of a lone step that each further request adds")
	flags.Float64Var(&e.KVSlowdown, "kv-slowdown", e.KVSlowdown, "share of a lone step that a full KV cache adds")
	flags.IntVar(&f.kvTokens, "kv-tokens", e.Blocks*simulate.BlockTokens, "tokens that an engine's KV cache holds")
	flags.IntVar(&e.MaxRunning, "max-running", e.MaxRunning, "requests in an engine's batch")
	flags.IntVar(&e.ChunkTokens, "batch-tokens", e.ChunkTokens, "tokens in an engine's step")
	return cmd
}

// check refuses what the simulator would take for "not given", or can't be.
func (f *simFlags) check(flags *pflag.FlagSet) error {
	value := func(name string) string { return flags.Lookup(name).Value.String() }
	for _, name := range []string{
		"scrape-interval", "rival-scrape-interval", "stale-after", "slo-ttft", "ttl",
		"prefill-rate", "decode-rate", "kv-tokens", "max-running", "batch-tokens",
	} {
		if v := value(name); v == "0" || v == "0s" || strings.HasPrefix(v, "-") || v == "NaN" {
			return fmt.Errorf("--%s %s: more than 0 is wanted", name, v)
		}
	}
	for _, name := range []string{"scrape-delay", "slo-tpot", "batch-slowdown", "kv-slowdown", "max-concurrency", "jobs", "requests"} {
		if v := value(name); strings.HasPrefix(v, "-") || v == "NaN" {
			return fmt.Errorf("--%s %s: 0 or more is wanted", name, v)
		}
	}
	if f.kvTokens < simulate.BlockTokens {
		return fmt.Errorf("--kv-tokens %d: at least a block of %d is wanted", f.kvTokens, simulate.BlockTokens)
	}
	if len(f.objective) == 0 && (flags.Changed("ttl") || flags.Changed("max-concurrency")) {
		return errors.New("--ttl and --max-concurrency are flow control's: give them with --objectives")
	}
	// There 0 is the default: what is next to nothing stands for none.
	if f.cfg.Engine.BatchSlowdown == 0 {
		f.cfg.Engine.BatchSlowdown = math.SmallestNonzeroFloat64
	}
	if f.cfg.Engine.KVSlowdown == 0 {
		f.cfg.Engine.KVSlowdown = math.SmallestNonzeroFloat64
	}
	if f.cfg.ScrapeDelay == 0 {
		f.cfg.ScrapeDelay = time.Nanosecond
	}
	return nil
}

func aboutWorkloads() string {
	var b strings.Builder
	for _, name := range simulate.Builtins() {
		fmt.Fprintf(&b, "  %-14s %s\n", name, simulate.AboutBuiltin(name))
	}
	return b.String()
}

// parseObjectives reads name=priority:share.
func parseObjectives(texts []string) ([]simulate.Objective, error) {
	var list []simulate.Objective
	for _, text := range texts {
		name, rest, named := strings.Cut(text, "=")
		priority, share, shared := strings.Cut(rest, ":")
		o := simulate.Objective{Name: name}
		var errs [2]error
		o.Priority, errs[0] = strconv.Atoi(priority)
		o.Share, errs[1] = strconv.ParseFloat(share, 64)
		if !named || !shared || errs[0] != nil || errs[1] != nil {
			return nil, fmt.Errorf("--objectives: %q is no objective: name=priority:share is wanted, as in high=10:0.2", text)
		}
		list = append(list, o)
	}
	return list, nil
}

func (f *simFlags) run(cmd *cobra.Command) ([]*simulate.Result, error) {
	objectives, err := parseObjectives(f.objective)
	if err != nil {
		return nil, err
	}
	f.cfg.Flow.Objectives = objectives
	plan := simulate.Plan{
		Config: f.cfg, Policies: f.expandPolicies(), Speeds: f.speeds, Envoys: f.envoys, Seed: f.seed, Seeds: f.seeds,
		Capacity: f.capacity, Parallel: f.jobs,
	}
	if plan.Parallel == 0 {
		plan.Parallel = runtime.GOMAXPROCS(0)
	}
	plan.Config.Engine.Blocks = f.kvTokens / simulate.BlockTokens
	if f.trace == "" && (f.smooth || cmd.Flags().Changed("format")) {
		return nil, errors.New("--format and --smooth say how a trace is read: give one with --trace")
	}
	if f.trace != "" {
		if cmd.Flags().Changed("workload") {
			return nil, errors.New("--workload beside --trace, which is replayed in its place: leave one out")
		}
		w, err := f.readTrace(cmd)
		if err != nil {
			return nil, err
		}
		plan.Workloads = []simulate.Source{w}
		return plan.Run()
	}
	names := f.workloads
	if len(names) == 1 && names[0] == "all" {
		names = simulate.Builtins()
	}
	n := f.requests
	if n == 0 {
		n = 500 * f.cfg.Endpoints
	}
	for _, name := range names {
		plan.Workloads = append(plan.Workloads, func(seed uint64) (*simulate.Workload, error) {
			return simulate.Generate(name, f.cfg.Endpoints, n, seed)
		})
	}
	return plan.Run()
}

func (f *simFlags) expandPolicies() []string {
	if len(f.policies) == 0 {
		return append(simulate.Rivals(), "prefill-cost")
	}
	var out []string
	for _, p := range f.policies {
		switch p {
		case "all":
			out = append(out, simulate.Policies()...)
		case "rivals":
			out = append(out, simulate.Rivals()...)
		case "own":
			out = append(out, simulate.Policies()[len(simulate.Rivals()):]...)
		default:
			out = append(out, severalPolicies(p)...)
		}
	}
	return out
}

// severalPolicies takes a list without weights apart if one of its names is
// another router's: those are no parts of a policy.
func severalPolicies(text string) []string {
	names := strings.Split(text, ",")
	if !strings.ContainsAny(text, ":(") {
		for _, name := range names {
			if slices.Contains(simulate.Rivals(), name) {
				return names
			}
		}
	}
	return []string{text}
}

// readTrace reads the trace, of which the seed draws nothing but where smoothing
// puts the arrivals.
func (f *simFlags) readTrace(cmd *cobra.Command) (simulate.Source, error) {
	in := cmd.InOrStdin()
	if f.trace != "-" {
		file, err := os.Open(f.trace)
		if err != nil {
			return nil, fmt.Errorf("--trace: %w", err)
		}
		defer file.Close()
		in = file
	}
	w, err := simulate.ReadTrace(in, f.format)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.trace, err)
	}
	if w.Dropped > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "shunt: %s: %d lines without tokens are left out\n", f.trace, w.Dropped)
	}
	if f.requests > 0 && f.requests < len(w.Requests) {
		w.Requests = w.Requests[:f.requests]
	}
	return func(seed uint64) (*simulate.Workload, error) {
		if f.smooth {
			return w.Smoothed(seed), nil
		}
		return w, nil
	}, nil
}

func writePlot(path string, rows []*simulate.Result) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := simulate.WritePlot(file, rows); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}
