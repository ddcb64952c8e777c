package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/internal/config"
)

func checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE",
		Short: "Check a shunt config, or an Envoy configuration that holds some",
		Long: "Check a shunt config, or an Envoy configuration (bootstrap, listener or route file; YAML or JSON)\n" +
			"with shunt's filter configs, the files they name, and its per-route configs, whose pools must exist.\n" +
			"Relative file names start at the working directory, as they do in Envoy. - is stdin.\n" +
			"Every problem is a line on stderr, and the exit code is 1.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := readDocument(cmd, args[0])
			if err != nil {
				return err
			}
			if bootstrap.IsEnvoy(text) {
				return checkEnvoy(cmd, args[0], text)
			}
			cfg, err := config.Parse(text)
			if err == nil && cfg.ConfigFile != "" {
				cfg, err = config.ParseFile(cfg.ConfigFile)
			}
			if err != nil {
				return fileError{args[0], err}
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: ok: %d pools, the first is %s\n", args[0], len(cfg.Pools), cfg.Pools[0].Name)
			return nil
		},
	}
}

func checkEnvoy(cmd *cobra.Command, file string, text []byte) error {
	report, err := bootstrap.Check(text, config.ParseFile)
	if err != nil {
		return fileError{file, err}
	}
	for _, warning := range report.Warnings {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: warning: %s\n", file, warning)
	}
	if len(report.Problems) > 0 {
		return fileError{file, report.Problems}
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: ok: %d filter configs, %d route configs\n", file, report.Filters, report.Routes)
	return nil
}
