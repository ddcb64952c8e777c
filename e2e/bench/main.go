// Command bench measures what shunt costs in a real Envoy, in one run on one machine, beside a bare Envoy, one with an
// empty Go module (the floor), and one with a C module that asks of Envoy what shunt does and reads nothing (hold):
//
//	go run ./e2e/bench                              all of it, about 20 minutes
//	go run ./e2e/bench -quick -cases bare,floor     a smoke run
//	go run ./e2e/bench -profile stock               where the CPU time goes (needs perf)
//	go run ./e2e/bench -count                       instructions a request, counted one by one
//
// Every repetition starts the Envoys anew, since where a process's memory lands moves its figures by a few percent, and
// then runs each body and load through all of them in turn, a different one first each time; an idle Envoy beside the
// measured one costs next to nothing. CPU is that of the Envoy process alone, all its threads, by its own CPU clock.
//
// Envoy has one worker. On a machine with at least two cores that worker is kept on core 0 and the load generator with
// the backends on core 1 (-pin=false: nothing is pinned). Envoy's other threads, among them the Go runtime's, are never
// pinned, so that the module sees the machine as it is.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
)

type flags struct {
	root    string
	envoy   string
	out     string
	cases   []string
	bodies  []string
	loads   []string
	reps    int
	quick   bool
	pin     bool
	gate    bool
	profile string
	count   bool
}

func main() {
	f, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	if err == nil {
		err = run(ctx, f)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string) (flags, error) {
	var f flags
	var cases, bodyList, loads string
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.StringVar(&f.root, "root", ".", "the repository; modules are taken from its build/out")
	fs.StringVar(&f.envoy, "envoy", "", "Envoy's binary (default: what build/envoy.sh finds)")
	fs.StringVar(&f.out, "out", "", "the JSON file to write (default: build/out/bench.json)")
	fs.StringVar(&cases, "cases", strings.Join(caseNames, ","), "which Envoys")
	fs.StringVar(&bodyList, "bodies", "1k,256k,sse", "which request bodies; sse: a stream, to its first event, load half alone")
	fs.StringVar(&loads, "loads", strings.Join(loadNames, ","), "which loads: sat closed loop, 32 connections; rate 1,000/s; half of bare's sat; low 30/s")
	fs.IntVar(&f.reps, "reps", 5, "repetitions, the figures are their medians")
	fs.BoolVar(&f.quick, "quick", false, "one short repetition; its figures mean little")
	fs.BoolVar(&f.pin, "pin", runtime.NumCPU() > 1, "Envoy's worker on core 0, the load on core 1")
	fs.BoolVar(&f.gate, "gate", false, "fail if the case stock is over a gated budget")
	fs.StringVar(&f.profile, "profile", "", "instead of all that, run perf on this case under each of -bodies, saturated")
	fs.BoolVar(&f.count, "count", false, "instead of all that, step through requests and count instructions (default cases: "+strings.Join(countable, ",")+")")
	if err := fs.Parse(args); err != nil {
		return f, err
	}
	if fs.NArg() > 0 {
		return f, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	if f.reps < 1 {
		return f, fmt.Errorf("-reps %d: at least 1", f.reps)
	}
	if f.quick {
		f.reps = 1
	}
	if f.count && !given(fs, "cases") {
		cases = strings.Join(countable, ",")
	}
	if f.out == "" {
		f.out = filepath.Join(f.root, "build", "out", "bench.json")
	}
	var bodyNames []string
	for _, b := range bodies {
		bodyNames = append(bodyNames, b.name)
	}
	for _, l := range []struct {
		flag, value string
		valid       []string
		into        *[]string
	}{{"cases", cases, caseNames, &f.cases}, {"bodies", bodyList, bodyNames, &f.bodies}, {"loads", loads, loadNames, &f.loads}} {
		for name := range strings.SplitSeq(l.value, ",") {
			if !slices.Contains(l.valid, name) {
				return f, fmt.Errorf("-%s: unknown %q, valid: %s", l.flag, name, strings.Join(l.valid, ", "))
			}
			*l.into = append(*l.into, name)
		}
	}
	if f.profile != "" && !slices.Contains(caseNames, f.profile) {
		return f, fmt.Errorf("-profile: unknown %q, valid: %s", f.profile, strings.Join(caseNames, ", "))
	}
	return f, nil
}

// given tells whether a flag is on the command line.
func given(fs *flag.FlagSet, name string) (yes bool) {
	fs.Visit(func(f *flag.Flag) { yes = yes || f.Name == name })
	return yes
}

var loadNames = []string{"sat", "rate", "half", "low"}

// loadFor gives the load of that name; half is bare Envoy's requests/s at saturation.
func loadFor(name string, saturation float64, quick bool) load {
	l := load{conns: 64, warm: 500 * time.Millisecond, count: 3 * time.Second}
	switch name {
	case "sat":
		l.conns = 32
	case "rate":
		l.rate = 1000
	case "half":
		l.rate = saturation / 2
	case "low":
		l.rate, l.count = 30, 4*time.Second
	}
	if quick {
		l.warm, l.count = 200*time.Millisecond, time.Second
	}
	return l
}

type bench struct {
	flags
	setup    *setup
	requests map[string][]byte // by body
}

func run(ctx context.Context, f flags) (err error) {
	b := &bench{flags: f, requests: map[string][]byte{}}
	for _, body := range bodies {
		if b.requests[body.name], err = request(body); err != nil {
			return err
		}
	}
	out, err := filepath.Abs(filepath.Join(f.root, "build", "out"))
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }() // only takes room
	if f.envoy == "" {
		if f.envoy, err = envoyrun.Binary(ctx, f.root, ""); err != nil {
			return err
		}
	}
	b.setup = &setup{envoy: f.envoy, outDir: out, scratch: scratch}
	if f.profile != "" {
		b.cases = []string{f.profile}
	}
	for _, name := range b.cases { // a missing module is said before anything runs
		if _, err := b.setup.options(name); err != nil {
			return err
		}
	}
	engines, err := startBackends(4)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engines.close()) }()
	b.setup.backends = engines.addrs
	if f.profile != "" {
		return b.perf(ctx)
	}
	if f.count {
		return b.count(ctx)
	}
	results, err := b.measure(ctx)
	if err != nil {
		return err
	}
	if err := printTable(os.Stdout, results); err != nil {
		return err
	}
	fmt.Println()
	missed := printBudgets(os.Stdout, budgets(results))
	if err := writeJSON(f.out, results); err != nil {
		return err
	}
	fmt.Println("written to", f.out)
	if f.gate && missed > 0 {
		return fmt.Errorf("%d gated budgets missed", missed)
	}
	return nil
}

// start runs the Envoy of a case and pins its worker.
func (b *bench) start(ctx context.Context, name string) (*envoyrun.Envoy, error) {
	o, err := b.setup.options(name)
	if err != nil {
		return nil, err
	}
	if b.pin { // a child inherits: let it have every core
		if err := pinSelf(allCores()...); err != nil {
			return nil, err
		}
	}
	e, err := envoyrun.Start(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("case %s: %w", name, err)
	}
	if b.pin {
		err = pinSelf(1)
		threads, threadErr := e.Threads()
		err = errors.Join(err, threadErr)
		for tid, thread := range threads {
			if thread == "wrk:worker_0" {
				err = errors.Join(err, pinThread(tid, 0))
			}
		}
	}
	if err == nil {
		_, err = b.one(e, "1k", load{conns: 4, warm: 10 * time.Millisecond, count: 100 * time.Millisecond})
	}
	if err != nil {
		return nil, fmt.Errorf("case %s: %w", name, errors.Join(err, b.end(e)))
	}
	return e, nil
}

// end stops an Envoy; it fails if Envoy logged an error, or ended before.
func (b *bench) end(e *envoyrun.Envoy) error { return errors.Join(e.Stop(), e.CheckLog()) }

func allCores() []int {
	cores := make([]int, runtime.NumCPU())
	for i := range cores {
		cores[i] = i
	}
	return cores
}

func (b *bench) one(e *envoyrun.Envoy, body string, l load) (sample, error) {
	addr, err := netip.ParseAddrPort(e.Addr("bench"))
	if err != nil {
		return sample{}, fmt.Errorf("Envoy's listener: %w", err)
	}
	l.first = bodyNamed(body).stream
	return generate(addr, b.requests[body], l, e.CPU)
}

// counted is one with the crossings of the case contrib, which golanghost counts.
func (b *bench) counted(ctx context.Context, name string, e *envoyrun.Envoy, body string, l load) (sample, error) {
	if name != "contrib" {
		return b.one(e, body, l)
	}
	count := func() (requests, crossings int64, err error) {
		stats, err := e.Stats(ctx, "golanghost_")
		for stat, n := range stats {
			if strings.HasSuffix(stat, "golanghost_requests") {
				requests += n
			} else {
				crossings += n
			}
		}
		return requests, crossings, err
	}
	requests, crossings, err := count()
	if err != nil {
		return sample{}, err
	}
	s, err := b.one(e, body, l)
	if err != nil {
		return s, err
	}
	requests2, crossings2, err := count()
	if n := requests2 - requests; n > 0 {
		s.crossings = float64(crossings2-crossings) / float64(n)
	}
	return s, err
}

// measure runs all repetitions.
func (b *bench) measure(ctx context.Context) (_ []result, err error) {
	saturation := map[string]float64{}
	if slices.Contains(b.loads, "half") {
		if saturation, err = b.saturate(ctx); err != nil {
			return nil, err
		}
	}
	type key struct{ caseName, body, load string }
	samples := map[key][]sample{}
	turn := 0
	for rep := range b.reps {
		noise, err := startNoise()
		if err != nil {
			return nil, err
		}
		err = b.withAll(ctx, func(envoys map[string]*envoyrun.Envoy) error {
			for _, body := range b.bodies {
				for _, loadName := range b.loads {
					if !bodyNamed(body).under(loadName) {
						continue
					}
					turn++
					for i := range b.cases {
						name := b.cases[(turn+i)%len(b.cases)]
						if ctx.Err() != nil {
							return ctx.Err()
						}
						s, err := b.counted(ctx, name, envoys[name], body, loadFor(loadName, saturation[body], b.quick))
						if err == nil && s.rps == 0 && !b.quick { // a short window on a busy machine may see none
							err = errors.New("no answer within the window")
						}
						if err != nil {
							return fmt.Errorf("case %s, body %s, load %s: %w", name, body, loadName, err)
						}
						k := key{name, body, loadName}
						samples[k] = append(samples[k], s)
					}
				}
			}
			cores, err := noise.cores(envoys)
			fmt.Fprintf(os.Stderr, "bench: repetition %d of %d; other processes used %.2f cores meanwhile\n", rep+1, b.reps, cores)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	var results []result
	for _, body := range b.bodies {
		for _, loadName := range b.loads {
			for _, name := range b.cases {
				if !bodyNamed(body).under(loadName) {
					continue
				}
				results = append(results, combine(name, body, loadName, samples[key{name, body, loadName}]))
			}
		}
	}
	return results, nil
}

// saturate measures bare Envoy's requests/s at saturation for each body, which half is half of.
func (b *bench) saturate(ctx context.Context) (map[string]float64, error) {
	e, err := b.start(ctx, "bare")
	if err != nil {
		return nil, err
	}
	saturation := map[string]float64{}
	for _, body := range b.bodies {
		s, err := b.one(e, body, loadFor("sat", 0, b.quick))
		if err != nil {
			return nil, errors.Join(err, b.end(e))
		}
		saturation[body] = s.rps
	}
	return saturation, b.end(e)
}

// withAll starts the Envoys of all cases, calls f and ends them.
func (b *bench) withAll(ctx context.Context, f func(map[string]*envoyrun.Envoy) error) (err error) {
	envoys := map[string]*envoyrun.Envoy{}
	defer func() {
		for name, e := range envoys {
			if endErr := b.end(e); endErr != nil {
				err = errors.Join(err, fmt.Errorf("case %s: %w", name, endErr))
			}
		}
	}()
	for _, name := range b.cases {
		if envoys[name], err = b.start(ctx, name); err != nil {
			delete(envoys, name)
			return err
		}
	}
	return f(envoys)
}
