package main

import (
	"errors"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/internal/bootstrap"
	"github.com/shuntproxy/shunt/internal/config"
)

func envoyConfigCommand() *cobra.Command {
	var o bootstrap.Options
	var file string
	var listener, endpoints bool
	cmd := &cobra.Command{
		Use:   "envoy-config --config FILE",
		Short: "Print an Envoy bootstrap with shunt in it",
		Long: "Print an Envoy bootstrap with shunt in it, each choice with a comment.\n" +
			"The config is checked first; every problem is a line on stderr, and the exit code is 1.",
		Example: "  shunt envoy-config --config shunt.yaml --module /opt/shunt/libshunt.so > envoy.yaml\n" +
			"  envoy -c envoy.yaml",
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if endpoints {
				_, err := cmd.OutOrStdout().Write(bootstrap.Endpoints())
				return err
			}
			if file == "" {
				return errConfigMissing
			}
			var err error
			if o.Document, err = readDocument(cmd, file); err != nil {
				return err
			}
			for _, path := range []*string{&o.Module, &o.HostModule} {
				if *path == "" {
					continue
				}
				// Envoy has its own working directory; the path is meant from this one.
				if *path, err = filepath.Abs(*path); err != nil {
					return err
				}
			}
			generate := bootstrap.Generate
			if listener {
				generate = bootstrap.Listener
			}
			text, err := generate(o)
			var problems config.Problems
			switch {
			case errors.As(err, &problems):
				return fileError{file, problems}
			case err != nil:
				return err // a flag's
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&file, "config", "", "shunt's config, YAML or JSON; - is stdin (required)")
	flags.StringVar(&o.Door, "door", bootstrap.DoorStock, "how Envoy loads shunt: stock (any image) or contrib (the contrib image's golang filter)")
	flags.StringVar(&o.Host, "host", "", "what loads the plugin of the contrib door: contrib (default) or golanghost (a stock Envoy, for tests)")
	flags.StringVar(&o.Listen, "listen", "0.0.0.0:8080", "IP:port for clients; port 0 lets the system choose")
	flags.StringVar(&o.Admin, "admin", "127.0.0.1:9901", "IP:port of Envoy's admin interface; port 0 lets the system choose")
	flags.StringVar(&o.Module, "module", "", "path of libshunt.so (default: Envoy searches for it by name), or of libshunt_contrib.so (default: "+bootstrap.ContribLibrary+")")
	flags.StringVar(&o.HostModule, "host-module", "", "path of libgolanghost.so (default: Envoy searches for it by name)")
	flags.StringVar(&o.ConfigFile, "config-path", "", "let shunt read and watch its config at this path, instead of inline")
	flags.StringVar(&o.LDSFile, "lds-path", "", "let Envoy read and watch the listener at this path (see --print-listener)")
	flags.BoolVar(&endpoints, "print-endpoints", false, "print the first content of the file eds.path instead, for destination: eds; Envoy does not start without it")
	flags.BoolVar(&listener, "print-listener", false, "print the content for --lds-path instead of the bootstrap")
	return cmd
}
