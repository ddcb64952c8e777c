package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
)

// errUnusable ends the command with exit code 2, its reason having been said.
var errUnusable = errors.New("the page is not usable")

func metricsCommand() *cobra.Command {
	var engine, output string
	var cfg metricsync.Config
	cmd := &cobra.Command{
		Use:   "metrics --engine ENGINE URL|FILE",
		Short: "Print what shunt reads from an engine's metrics page",
		Long: "Print what shunt reads from an engine's metrics page: each metric by its abstract name, with its value,\n" +
			"the engine's name for it and its age, and what is missing and why. Run it first when routing looks wrong.\n" +
			"A URL without a path is asked where the engine has its metrics. - is stdin; a file may be gzip.\n" +
			"The exit code is 0 if the page tells the engine's load, 2 if it does not, and 1 if there is no page to read.",
		Example: "  shunt metrics --engine vllm http://10.0.0.1:8000\n" +
			"  shunt metrics --engine sglang --output json page.prom",
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("--output: unknown format %q, valid: text, json", output)
			}
			e, err := pool.ParseEngine(engine)
			if err != nil {
				return fmt.Errorf("--engine: %w", err)
			}
			if err := checkMetricsFlags(cmd, args[0], &cfg); err != nil {
				return err
			}
			report, age, err := inspect(cmd, e, args[0], cfg)
			if err != nil {
				return fmt.Errorf("%s: %s", redacted(args[0]), asFlags.Replace(err.Error()))
			}
			report.Problem = asFlags.Replace(report.Problem)
			if output == "json" {
				err = printJSON(cmd.OutOrStdout(), report)
			} else {
				err = printText(cmd.OutOrStdout(), report, age)
			}
			if err != nil {
				return err
			}
			if !report.Usable {
				fmt.Fprintf(cmd.ErrOrStderr(), "shunt: %s: %s\n", args[0], report.Problem)
				return errUnusable
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&engine, "engine", "vllm", "vllm, sglang, trtllm or xllm")
	flags.StringVar(&output, "output", "text", "text or json")
	flags.DurationVar(&cfg.Timeout, "timeout", 5*time.Second, "for the whole page")
	flags.Int64Var(&cfg.MaxBytes, "max-bytes", 16<<20, "the largest page")
	flags.StringVar(&cfg.Access.CA, "ca", "", "PEM file with the authorities for https, in place of the system's")
	flags.StringVar(&cfg.Access.ServerName, "server-name", "", "name in the engine's certificate, if not the URL's host")
	flags.BoolVar(&cfg.Access.SkipVerify, "insecure-skip-verify", false, "take any certificate")
	flags.StringVar(&cfg.Access.TokenFile, "token-file", "", "file with a bearer token")
	flags.StringToStringVar(&cfg.Access.Headers, "header", nil, "NAME=VALUE, sent with the request; repeatable")
	return cmd
}

// asFlags names the flags of this command where a problem names the settings of a
// configuration.
var asFlags = strings.NewReplacer(
	"scrape.bearerTokenFile", "--token-file", "scrape.headers", "--header", "scrape.maxBytes", "--max-bytes",
	"scrape.tls.caFile", "--ca", "scrape.tls", "an https:// URL", "scrape.connectTimeout", "--timeout", "scrape.timeout", "--timeout",
	pool.LabelEngine, "--engine", pool.LabelMetricPort, "the URL's port",
)

// redacted is a source without its password.
func redacted(source string) string {
	if u, err := url.Parse(source); err == nil && u.User != nil {
		return u.Redacted()
	}
	return source
}

// isURL reports whether source is one, and of which scheme, in lower case.
func isURL(source string) (scheme string, ok bool) {
	scheme, _, ok = strings.Cut(strings.ToLower(source), "://")
	return scheme, ok && (scheme == "http" || scheme == "https")
}

// checkMetricsFlags refuses what would have no effect, or not that which is
// meant.
func checkMetricsFlags(cmd *cobra.Command, source string, cfg *metricsync.Config) error {
	if cfg.Timeout <= 0 {
		return fmt.Errorf("--timeout: %s is not above 0", cfg.Timeout)
	}
	if cfg.MaxBytes <= 0 {
		return fmt.Errorf("--max-bytes: %d is not above 0", cfg.MaxBytes)
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Access.Headers)) {
		if err := config.CheckHeader(name, cfg.Access.Headers[name]); err != nil {
			return fmt.Errorf("--header %q: %s", name, asFlags.Replace(err.Error()))
		}
	}
	if scheme, _ := isURL(source); scheme != "https" {
		for _, flag := range []string{"ca", "server-name", "insecure-skip-verify"} {
			if cmd.Flags().Changed(flag) {
				return fmt.Errorf("--%s has no effect on %s: it is for a URL of https", flag, source)
			}
		}
	}
	return nil
}

// inspect reads the page, and says how old it is.
func inspect(cmd *cobra.Command, engine pool.Engine, source string, cfg metricsync.Config) (*metricsync.Report, time.Duration, error) {
	if _, ok := isURL(source); ok {
		start := time.Now()
		report, err := metricsync.InspectURL(cmd.Context(), engine, source, cfg)
		return report, time.Since(start), err
	}
	page, age := cmd.InOrStdin(), time.Duration(0)
	if source != "-" {
		file, err := os.Open(source)
		if errors.Is(err, os.ErrNotExist) {
			return nil, 0, fmt.Errorf("there is no such file, and a URL begins with http:// or https://")
		}
		if err != nil {
			return nil, 0, err
		}
		defer file.Close()
		if info, err := file.Stat(); err == nil {
			age = max(time.Since(info.ModTime()), 0)
		}
		page = file
	}
	report, err := metricsync.Inspect(engine, page, cfg.MaxBytes)
	return report, age, err
}

// printJSON writes {"engine":…,"metrics":{name: {"value":…,"source":…}},
// "missing":{name: why}}, and "problem" if the page is not usable.
func printJSON(w io.Writer, r *metricsync.Report) error {
	type histogram struct {
		Sum   *float64 `json:"sum"`
		Count *float64 `json:"count"`
		P50   *float64 `json:"p50"`
		P99   *float64 `json:"p99"`
	}
	type metric struct {
		Value  any    `json:"value"`
		Source string `json:"source"`
	}
	out := struct {
		Engine  string            `json:"engine"`
		Metrics map[string]metric `json:"metrics"`
		Missing map[string]string `json:"missing"`
		Problem string            `json:"problem,omitempty"`
	}{r.Engine.String(), map[string]metric{}, map[string]string{}, r.Problem}
	for _, m := range r.Metrics {
		one := metric{Value: m.Value, Source: m.Source}
		switch h := m.Histogram; {
		case h != nil:
			one.Value = histogram{h.Sum, h.Count, h.P50, h.P99}
		case m.Names != nil:
			one.Value = m.Names
		}
		out.Metrics[m.Name] = one
	}
	for _, m := range r.Missing {
		out.Missing[m.Name] = m.Why
	}
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(out)
}

func printText(w io.Writer, r *metricsync.Report, age time.Duration) error {
	where := ""
	if r.Path != "" {
		where = " from " + r.Path
	}
	fmt.Fprintf(w, "%s, %d bytes%s\n\n", r.Engine, r.Bytes, where)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "METRIC\tVALUE\tSOURCE\tAGE")
	for _, m := range r.Metrics {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", m.Name, valueText(&m), m.Source, age.Round(time.Millisecond))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	table = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "MISSING\tWHY")
	for _, m := range r.Missing {
		fmt.Fprintf(table, "%s\t%s\n", m.Name, m.Why)
	}
	return table.Flush()
}

func valueText(m *metricsync.Found) string {
	text := func(v *float64) string {
		if v == nil {
			return "-"
		}
		return strconv.FormatFloat(*v, 'g', 6, 64)
	}
	switch h := m.Histogram; {
	case h != nil:
		return fmt.Sprintf("mean %s of %s, p50 %s, p99 %s", text(h.Mean), text(h.Count), text(h.P50), text(h.P99))
	case m.Names != nil:
		names := slices.Clone(m.Names)
		for i, name := range names {
			if strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsGraphic(r) || r == ' ' }) {
				names[i] = strconv.Quote(name) // nor may a page steer the terminal
			}
		}
		return "[" + strings.Join(names, " ") + "]"
	default:
		return strconv.FormatFloat(*m.Value, 'g', -1, 64)
	}
}
