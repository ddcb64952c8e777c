package main

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/internal/config"
)

func checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE",
		Short: "Check a shunt config, or an Envoy configuration that holds some",
		Long: "Check a shunt config, or an Envoy configuration (bootstrap, listener or route file; YAML or JSON) with\n" +
			"shunt's filter configs, the files they name, its per-route configs, whose pools must exist and whose keys\n" +
			"must be the filter's name, and the clusters of the static routes that shunt serves. It warns of what Envoy's\n" +
			"defaults break: README.md lists it.\n" +
			"Relative file names start at the working directory, as they do in Envoy. - is stdin.\n" +
			"Every problem is a line on stderr, and the exit code is 1. A warning is a line there too, and changes no\n" +
			"exit code: what it tells is legal and likely not meant.\n" +
			"It checks shunt's part of an Envoy configuration; envoy --mode validate -c FILE checks the rest.",
		Example: "  shunt check shunt.yaml\n" +
			"  shunt check my-envoy.yaml && envoy --mode validate -c my-envoy.yaml",
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := readDocument(cmd, args[0])
			if err != nil {
				return err
			}
			if bootstrap.IsEnvoy(text) {
				return checkEnvoy(cmd, args[0], text)
			}
			cfg, file, err := parseConfig(args[0], text)
			if err != nil {
				return err
			}
			problems, warnings := bootstrap.CheckEndpoints(cfg)
			writeWarnings(cmd, file, slices.Concat(warnings, bootstrap.CheckFlow(cfg)))
			if len(problems) > 0 {
				return fileError{file, problems}
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: ok: %s, the first is %s\n", args[0], count(len(cfg.Pools), "pool"), cfg.Pools[0].Name)
			return nil
		},
	}
}

func checkEnvoy(cmd *cobra.Command, file string, text []byte) error {
	report, err := bootstrap.Check(text, config.ParseFile)
	if err != nil {
		return fileError{file, err}
	}
	writeWarnings(cmd, file, report.Warnings)
	if len(report.Problems) > 0 {
		return fileError{file, report.Problems}
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: ok: %s, %s\n", file, count(report.Filters, "filter config"), count(report.Routes, "route config"))
	return nil
}

func writeWarnings(cmd *cobra.Command, file string, warnings config.Problems) {
	for _, warning := range byLine(warnings) {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: warning: %s\n", file, warning)
	}
}

// count is "1 pool" or "2 pools".
func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}
