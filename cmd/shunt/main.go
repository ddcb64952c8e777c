// Command shunt is the operator's tool: it checks configs, prints the Envoy
// bootstrap, shows what is read of a metrics page and probes what runs. It needs neither Envoy nor libshunt.so.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/filter"
	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/discovery"
)

func main() {
	discovery.KeepQuiet(func(cause any, stack []byte) { // else stderr is this tool's
		fmt.Fprintf(os.Stderr, "internal error: %v\n%s", cause, stack)
	})
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is main with its surroundings as arguments. It returns the exit code: 0,
// or 1 after the problems were written to stderr, one a line; a command may
// have a code of its own.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := &cobra.Command{
		Use:           "shunt",
		Short:         "Check shunt's configuration, print an Envoy bootstrap for it, show what it reads of engines, probe what runs",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.ArbitraryArgs, // what is no command comes to RunE
		RunE:          noCommand,

		DisableFlagsInUseLine:      true,
		SuggestionsMinimumDistance: 2,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())
	})
	root.AddCommand(envoyConfigCommand(), checkCommand(), metricsCommand(), endpointsCommand(), explainCommand(), probeCommand(), drainCommand(), simCommand(), versionCommand())
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	switch err := root.ExecuteContext(context.Background()); {
	case errors.Is(err, errUnusable):
		return 2
	case err != nil:
		writeError(stderr, err)
		return 1
	}
	return 0
}

// fileError is an error about the content of one file.
type fileError struct {
	file string
	err  error
}

func (e fileError) Error() string { return e.file + ": " + e.err.Error() }
func (e fileError) Unwrap() error { return e.err }

func writeError(w io.Writer, err error) {
	var inFile fileError
	var problems config.Problems
	if errors.As(err, &inFile) && errors.As(err, &problems) {
		for _, p := range byLine(problems) {
			fmt.Fprintf(w, "%s: %s\n", inFile.file, p)
		}
		return
	}
	fmt.Fprintf(w, "shunt: %v\n", err)
}

// byLine is in the order of the lines; what has none, such as a missing field,
// comes last.
func byLine(problems config.Problems) config.Problems {
	return slices.SortedStableFunc(slices.Values(problems), func(a, b config.Problem) int {
		if a.Line == 0 || b.Line == 0 {
			return cmp.Compare(b.Line, a.Line)
		}
		return cmp.Compare(a.Line, b.Line)
	})
}

func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	hint := ""
	if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
		hint = " (did you mean " + strings.Join(like, " or ") + "?)"
	}
	return fmt.Errorf("unknown command %q%s; see %s --help", args[0], hint, cmd.CommandPath())
}

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%s takes flags alone, and got %q; see %s --help", cmd.CommandPath(), args[0], cmd.CommandPath())
}

// oneArgument names what is missing, as the usage line has it.
func oneArgument(cmd *cobra.Command, args []string) error {
	if len(args) == 1 {
		return nil
	}
	return fmt.Errorf("%s: one argument is wanted, not %d; see %s --help", cmd.Use, len(args), cmd.CommandPath())
}

var errConfigMissing = errors.New("--config FILE is required; - is stdin")

// parseConfig reads shunt's config in text, or the one in the file that it names. in is
// the file that has it, which errors name.
func parseConfig(file string, text []byte) (cfg *config.Config, in string, err error) {
	cfg, err = config.Parse(text)
	if err == nil && cfg.ConfigFile != "" {
		file = cfg.ConfigFile
		cfg, err = config.ParseFile(file)
	}
	if err != nil {
		return nil, "", fileError{file, err}
	}
	return cfg, file, nil
}

// readDocument reads a file, or stdin for "-".
func readDocument(cmd *cobra.Command, file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(cmd.InOrStdin())
	}
	return os.ReadFile(file)
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArguments,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), version())
		},
	}
}

// version is what the linker or the Go toolchain put into the binary.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "shunt " + filter.Version
	}
	text := "shunt " + filter.Version
	if filter.Version == "dev" {
		text = "shunt " + info.Main.Version
	}
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" {
			text += " " + setting.Value
		}
		if setting.Key == "vcs.modified" && setting.Value == "true" {
			text += " (modified)"
		}
	}
	return text + " " + info.GoVersion
}
