// Command demo shows shunt at work: a real Envoy with shunt inside, in front of four simulated engines. make demo, make
// up and make down run it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/scorer"
)

func main() {
	ctx, out, stop := life()
	err := run(ctx, os.Args[1:], out)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w; nothing is left behind", context.Cause(ctx))
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// life is how long the program runs, and its standard output: until a signal says so or nobody reads that any more (make
// demo | head). Then the world ends in order.
//
// SIGPIPE is none of the signals: who asks for it gets it for each connection that its peer has closed, such as that of a
// scrape which took too long. Without it standard output, under another number, gives an error like all others.
func life() (ctx context.Context, out io.Writer, stop func()) {
	ctx, unnotify := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	ctx, cancel := context.WithCancelCause(ctx)
	stop = func() { cancel(nil); unnotify() }
	fd, err := unix.FcntlInt(os.Stdout.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil { // it is closed, or there are too many files
		return ctx, os.Stdout, stop
	}
	return ctx, &output{os.NewFile(uintptr(fd), "stdout"), cancel}, stop
}

// output tells when nobody reads it any more.
type output struct {
	to   io.Writer
	gone func(error)
}

// Write is that of to.
func (o *output) Write(p []byte) (int, error) {
	n, err := o.to.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		o.gone(errors.New("nobody reads the output any more"))
	}
	return n, err
}

// settings are the flags.
type settings struct {
	root   string // of the repository
	door   string
	policy string

	listen, admin, shuntAdmin string // of up; demo takes free ports
	envoy                     string // for serve, which up calls: what findEnvoy found
	contrib                   string // Envoy contrib's path; empty has golanghost stand in for its golang filter
}

func run(ctx context.Context, args []string, out io.Writer) error {
	root := command(out)
	root.SetArgs(args)
	return root.ExecuteContext(ctx)
}

func command(out io.Writer) *cobra.Command {
	var s settings
	root := &cobra.Command{
		Use:           "demo",
		Short:         "Envoy with shunt inside, in front of four simulated engines",
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return s.complete()
		},
	}
	root.SetOut(out)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		return fmt.Errorf("%w; ARGS=--help lists those that there are", err)
	})
	root.CompletionOptions.DisableDefaultCmd = true
	root.PersistentFlags().StringVar(&s.door, "door", bootstrap.DoorStock, "how Envoy loads shunt: stock, or contrib, in the Envoy that ENVOY_CONTRIB names or else in a stock one under golanghost")

	show := &cobra.Command{Use: "show", Short: "send 300 chat requests and four bad ones, show what became of them, end", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return show(cmd.Context(), s, out) }}
	up := &cobra.Command{Use: "up", Short: "leave it running in the background", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return up(cmd.Context(), s, out) }}
	down := &cobra.Command{Use: "down", Short: "end what up started", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return down(cmd.Context(), s.stateDir(), out) }}
	serve := &cobra.Command{Use: "serve", Short: "what up starts", Args: cobra.NoArgs, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), s) }}
	for _, c := range []*cobra.Command{show, up, serve} {
		c.Flags().StringVar(&s.policy, "policy", "least-request", "how shunt picks: "+strings.Join(scorer.Names(), ", "))
	}
	for _, c := range []*cobra.Command{up, serve} {
		c.Flags().StringVar(&s.listen, "listen", "127.0.0.1:8080", "`IP:port` for traffic")
		c.Flags().StringVar(&s.admin, "admin", "127.0.0.1:9901", "`IP:port` of Envoy's admin interface")
		c.Flags().StringVar(&s.shuntAdmin, "shunt-admin", "127.0.0.1:9902", "`IP:port` of shunt's admin listener")
	}
	serve.Flags().StringVar(&s.envoy, "envoy", "", "Envoy's `path`")
	root.AddCommand(show, up, down, serve)
	return root
}

// complete checks the flags and finds the repository.
func (s *settings) complete() error {
	switch s.door {
	case bootstrap.DoorStock:
	case bootstrap.DoorContrib:
		s.contrib = os.Getenv("ENVOY_CONTRIB")
	default:
		return fmt.Errorf("--door %q: unknown door, valid: stock, contrib", s.door)
	}
	if !slices.Contains(scorer.Names(), s.policy) {
		return fmt.Errorf("--policy %q: unknown policy, valid: %s", s.policy, strings.Join(scorer.Names(), ", "))
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	s.root, err = findRoot(dir)
	return err
}

// findRoot is the repository that dir is in.
func findRoot(dir string) (string, error) {
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "build", "envoy.sh")); err == nil {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("%s is not inside a clone of shunt: change to one", dir)
		}
	}
}

// loading is how Envoy loads shunt, as bootstrap.Options has it.
type loading struct{ door, host, module, hostModule string }

// loading finds the modules of the door, which must be built already.
func (s *settings) loading() (loading, error) {
	out := filepath.Join(s.root, "build", "out")
	l := loading{door: s.door, module: filepath.Join(out, "libshunt.so")}
	if s.door == bootstrap.DoorContrib {
		l.module, l.host = filepath.Join(out, "libshunt_contrib.so"), bootstrap.HostContrib
		if s.contrib == "" {
			l.host, l.hostModule = bootstrap.HostGolanghost, filepath.Join(out, "libgolanghost.so")
		}
	}
	for _, path := range []string{l.module, l.hostModule} {
		if path == "" {
			continue
		}
		if _, err := os.Stat(path); err != nil {
			return l, fmt.Errorf("build/out/%s is missing: run make demo or make up, which build it", filepath.Base(path))
		}
	}
	return l, nil
}

// findEnvoy is the Envoy to run: of the contrib door the one that ENVOY_CONTRIB names.
func (s *settings) findEnvoy(ctx context.Context) (string, error) {
	if s.contrib == "" {
		return envoyrun.Binary(ctx, s.root, "")
	}
	path, err := filepath.Abs(s.contrib)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		return "", fmt.Errorf("ENVOY_CONTRIB: %w", err)
	}
	return path, nil
}

// stateDir is where up keeps its files.
func (s *settings) stateDir() string { return filepath.Join(s.root, "build", "out", "demo") }
