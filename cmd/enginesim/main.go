// Command enginesim runs simulated LLM engines: the OpenAI API, a metrics page and a control API over a model of an
// engine. Several can share one process.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shuntproxy/shunt/internal/sim"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := command(os.Stdout).ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "enginesim:", err)
		os.Exit(1)
	}
}

func command(stdout io.Writer) *cobra.Command {
	var (
		cfg            sim.Config
		listen         []string
		engines        string
		control        string
		readyFile      string
		idle           = 5 * time.Second
		fastDelay      time.Duration
		headers, first time.Duration
		between        time.Duration
	)
	cmd := &cobra.Command{
		Use:   "enginesim",
		Short: "simulated LLM engines: OpenAI API, metrics page, control API under /_sim/",
		Example: `  enginesim --listen 127.0.0.1:8001 --models m --load-running 200 --load-waiting 20 --load-kv 0.9
  enginesim --engines engines.yaml --control 127.0.0.1:9000 --ready-file ready.json`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.IdleTimeout, cfg.FastDelay = sim.Duration(idle), sim.Duration(fastDelay)
			cfg.Delays = sim.Delays{BeforeHeaders: sim.Duration(headers), BeforeBody: sim.Duration(first), BetweenTokens: sim.Duration(between)}
			if err := checkFlags(cmd.Flags(), &cfg); err != nil {
				return err
			}
			var configs []sim.Config
			if engines != "" {
				var err error
				if configs, err = readSpec(engines); err != nil {
					return err
				}
			}
			if len(listen) == 0 && len(configs) == 0 {
				listen = []string{"127.0.0.1:0"}
			}
			for _, l := range listen {
				c := cfg
				c.Listen = l
				configs = append(configs, c)
			}
			return run(cmd.Context(), stdout, configs, control, readyFile)
		},
	}
	f := cmd.Flags()
	f.StringArrayVar(&listen, "listen", nil, "address of an engine with the flags below; repeatable, port 0 picks one (default 127.0.0.1:0)")
	f.StringVar(&engines, "engines", "", "YAML `FILE` with {engines: [{listen, models, load, …}]}, one entry per engine")
	f.StringVar(&control, "control", "", "address that serves /NAME/_sim/… for every engine, also while one refuses connections")
	f.StringVar(&readyFile, "ready-file", "", "write the bound addresses there as JSON, once all listen")
	f.StringVar(&cfg.Engine, "engine", "vllm", "whose metrics page: vllm, sglang, trtllm or xllm")
	f.StringSliceVar(&cfg.Models, "models", []string{"sim-model"}, "served model names, the first is the one in the metrics")
	f.BoolVar(&cfg.AnyModel, "any-model", false, "serve other model names too")
	f.StringSliceVar(&cfg.Adapters, "adapters", nil, "LoRA adapters")
	f.IntVar(&cfg.Params.MaxLoras, "max-loras", 4, "adapters in one batch")
	f.IntVar(&cfg.MaxModelLen, "max-model-len", 131_072, "tokens of prompt and output")
	f.IntVar(&cfg.Output, "output-tokens", 64, "tokens generated where a request sets no maximum")
	f.Float64Var(&cfg.Speedup, "speedup", 1, "engine time per wall time")
	f.IntVar(&cfg.Params.MaxRunning, "max-running", 256, "batch slots")
	f.IntVar(&cfg.Params.ChunkTokens, "chunk-tokens", 8192, "tokens per engine step")
	f.Float64Var(&cfg.Params.PrefillRate, "prefill-rate", 10_000, "prompt tokens per second")
	f.Float64Var(&cfg.Params.DecodeRate, "decode-rate", 100, "tokens per second of one sequence alone")
	f.Float64Var(&cfg.Params.BatchSlowdown, "batch-slowdown", 0.02, "share of a lone step that each further sequence adds")
	f.Float64Var(&cfg.Params.KVSlowdown, "kv-slowdown", 0.5, "share of a lone step that a full KV cache adds")
	f.IntVar(&cfg.Params.BlockSize, "block-size", 16, "tokens per KV block")
	f.IntVar(&cfg.Params.Blocks, "blocks", 27_534, "KV blocks")
	f.BoolVar(&cfg.Params.NoPrefixCache, "no-prefix-cache", false, "switch the prefix cache off")
	f.IntVar(&cfg.Load.Running, "load-running", 0, "running sequences to pretend")
	f.IntVar(&cfg.Load.Waiting, "load-waiting", 0, "waiting sequences to pretend")
	f.Float64Var(&cfg.Load.KVUsage, "load-kv", 0, "KV use to pretend, 0 to 1")
	f.DurationVar(&headers, "delay-headers", 0, "wait before response headers")
	f.DurationVar(&first, "delay-body", 0, "wait between headers and the first byte of the body")
	f.DurationVar(&between, "delay-tokens", 0, "wait between the tokens of a stream")
	f.DurationVar(&idle, "idle-timeout", 5*time.Second, "close idle connections after it, as uvicorn does; negative = never")
	f.BoolVar(&cfg.Fast, "fast", false, "fixed small answers at next to no cost, for benchmarks")
	f.DurationVar(&fastDelay, "fast-delay", 0, "wait before a fast answer, e.g. 1ms")
	f.IntVar(&cfg.Requests, "recorded-requests", 10_000, "how many requests are remembered")
	addQuirks(cmd, &cfg)
	return cmd
}

// checkFlags refuses what the engine would take for "not given", or can't be.
func checkFlags(flags *pflag.FlagSet, cfg *sim.Config) error {
	value := func(name string) string { return flags.Lookup(name).Value.String() }
	for _, name := range []string{
		"max-loras", "max-model-len", "output-tokens", "speedup", "max-running", "chunk-tokens", "prefill-rate", "decode-rate",
		"block-size", "blocks", "recorded-requests", "idle-timeout",
	} {
		v := value(name)
		if v == "0" || v == "0s" || v == "NaN" || strings.HasPrefix(v, "-") && name != "idle-timeout" {
			return fmt.Errorf("--%s %s: more than 0 is wanted", name, v)
		}
	}
	for _, name := range []string{
		"batch-slowdown", "kv-slowdown", "load-running", "load-waiting", "load-kv", "delay-headers", "delay-body", "delay-tokens", "fast-delay",
	} {
		if v := value(name); strings.HasPrefix(v, "-") || v == "NaN" {
			return fmt.Errorf("--%s %s: 0 or more is wanted", name, v)
		}
	}
	if cfg.Load.KVUsage > 1 {
		return fmt.Errorf("--load-kv %s: 0 to 1 is wanted", value("load-kv"))
	}
	// There 0 is the default: what is next to nothing stands for none.
	if cfg.Params.BatchSlowdown == 0 {
		cfg.Params.BatchSlowdown = math.SmallestNonzeroFloat64
	}
	if cfg.Params.KVSlowdown == 0 {
		cfg.Params.KVSlowdown = math.SmallestNonzeroFloat64
	}
	return nil
}

func readSpec(path string) ([]sim.Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--engines: %w", err)
	}
	defer func() { _ = f.Close() }()
	return sim.ReadSpec(f)
}

// ready is the line on stdout and the ready file.
type ready struct {
	Engines []readyEngine `json:"engines"`
	Control string        `json:"control,omitempty"`
}

type readyEngine struct {
	Name    string   `json:"name"`
	Address string   `json:"address"`
	Models  []string `json:"models"`
}

// run serves until ctx ends.
func run(ctx context.Context, stdout io.Writer, configs []sim.Config, control, readyFile string) (err error) {
	var info ready
	byName := map[string]*sim.Server{}
	for i, c := range configs {
		s, serr := sim.NewServer(c)
		if serr != nil {
			return fmt.Errorf("engines[%d]: %w", i, serr)
		}
		if serr := s.Start(); serr != nil {
			return fmt.Errorf("engines[%d]: %w", i, serr)
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		if byName[s.Name()] != nil {
			return fmt.Errorf("engines[%d].name: %q is taken", i, s.Name())
		}
		byName[s.Name()] = s
		info.Engines = append(info.Engines, readyEngine{s.Name(), s.Addr(), s.Config().Models})
	}
	if control != "" {
		l, lerr := net.Listen("tcp", control)
		if lerr != nil {
			return fmt.Errorf("--control: %w", lerr)
		}
		info.Control = l.Addr().String()
		hs := &http.Server{Handler: controlHandler(byName), ReadHeaderTimeout: 10 * time.Second}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = hs.Serve(l) // ends with Close below
		}()
		defer func() {
			err = errors.Join(err, hs.Close())
			<-done
		}()
	}
	line, err := json.Marshal(info)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	if readyFile != "" {
		if err := writeFile(readyFile, line); err != nil {
			return fmt.Errorf("--ready-file: %w", err)
		}
	}
	if _, err := stdout.Write(line); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// controlHandler serves /NAME/_sim/….
func controlHandler(byName map[string]*sim.Server) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		s := byName[name]
		if s == nil {
			http.Error(w, fmt.Sprintf("no engine %q; the path is /NAME/_sim/…, names are in the ready line", name), http.StatusNotFound)
			return
		}
		http.StripPrefix("/"+name, s.Control()).ServeHTTP(w, r)
	})
}

// writeFile makes the file appear whole.
func writeFile(path string, b []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".ready")
	if err != nil {
		return err
	}
	_, err = tmp.Write(b)
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		_ = os.Remove(tmp.Name())
	}
	return err
}
