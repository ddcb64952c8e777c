package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/scorer"
)

func explainCommand() *cobra.Command {
	var admin, id, output string
	var n int
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Show why requests went where they did",
		Long: "Show the newest decisions that shunt keeps: those of requests with x-shunt-explain: 1 where explain.header allows\n" +
			"it, and a sample of explain.sample. It reads /explain of the admin listener.\n" +
			"The id is the x-request-id that Envoy's access log has: Envoy replaces the client's, unless its\n" +
			"preserve_external_request_id is set.",
		Example: "  shunt explain -n 5\n" +
			"  shunt explain --id 7e2f6a7c-… --output json\n" +
			"  shunt explain --admin unix:/run/shunt.sock",
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return fmt.Errorf("--output %q: unknown form, valid: text, json", output)
			}
			if err := checkAdmin(admin); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			var body bytes.Buffer
			query := url.Values{"n": {fmt.Sprint(n)}}
			if id != "" {
				query.Set("id", id)
			}
			if err := probe(ctx, adminURL(admin, "/explain?"+query.Encode()), true, &body); err != nil {
				return fromAdmin(admin, err)
			}
			if output == "json" {
				_, err := cmd.OutOrStdout().Write(body.Bytes())
				return err
			}
			var list []scorer.Explanation
			if err := json.Unmarshal(body.Bytes(), &list); err != nil {
				return fmt.Errorf("%s: %w", admin, err)
			}
			if len(list) == 0 {
				fmt.Fprintln(cmd.ErrOrStderr(), "shunt: "+nothingKept(id))
			}
			return showExplanations(cmd.OutOrStdout(), list)
		},
	}
	cmd.Flags().StringVar(&admin, "admin", "127.0.0.1:9902", "the admin listener: IP:port or unix:PATH")
	cmd.Flags().StringVar(&id, "id", "", "only the request with this x-request-id, as in Envoy's access log")
	cmd.Flags().IntVarP(&n, "number", "n", 10, "show so many, the newest first")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// nothingKept says why there may be no decision to show.
func nothingKept(id string) string {
	if id != "" {
		return fmt.Sprintf("no decision is kept of a request %q: Envoy gives requests ids of its own (request_id in its access log); without --id the newest are shown", id)
	}
	return "no decision is kept: send x-shunt-explain: 1 with explain.header set, or set explain.sample"
}

// checkAdmin tells a flag --admin that can't be one from a listener that is not there.
func checkAdmin(admin string) error {
	if path, ok := strings.CutPrefix(admin, "unix:"); ok && path != "" {
		return nil
	}
	if host, port, err := net.SplitHostPort(admin); err != nil || host == "" || port == "" || strings.Contains(admin, "/") {
		return fmt.Errorf("--admin %q is not IP:port or unix:PATH, such as 127.0.0.1:9902", admin)
	}
	return nil
}

// fromAdmin says what to look at where nobody answers.
func fromAdmin(admin string, err error) error {
	var unanswered *url.Error
	if errors.As(err, &unanswered) {
		return fmt.Errorf("%w; is an Envoy with shunt up, with admin.address %s? --admin names another", err, admin)
	}
	return err
}

// adminURL is the URL of a path on the admin listener, as probe takes it.
func adminURL(admin, path string) string {
	if strings.HasPrefix(admin, "unix:") {
		return admin + ":" + path
	}
	return "http://" + admin + path
}

// showExplanations prints one table a decision: parts are columns.
func showExplanations(w io.Writer, list []scorer.Explanation) error {
	for i := range list {
		e := &list[i]
		model := e.Model
		if e.TargetModel != e.Model {
			model += " → " + e.TargetModel
		}
		fmt.Fprintf(w, "%s  %s  model %s  policy %s  winner %s", e.Time.Format(time.RFC3339Nano), e.ID, model, e.Policy, e.Winner)
		if e.Fallback != "" {
			fmt.Fprintf(w, "  fallback %s", e.Fallback)
		}
		fmt.Fprintln(w)
		parts := map[string]bool{}
		for _, c := range e.Candidates {
			for name := range c.Scores {
				parts[name] = true
			}
		}
		names := slices.Sorted(maps.Keys(parts))
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(table, "  \t"+strings.Join(slices.Concat([]string{"endpoint"}, names, []string{"total", "skipped"}), "\t"))
		for _, c := range e.Candidates {
			mark := " "
			if c.Endpoint == e.Winner {
				mark = "*"
			}
			fmt.Fprintf(table, "  %s\t%s", mark, c.Endpoint)
			for _, name := range names {
				score, ok := c.Scores[name]
				fmt.Fprintf(table, "\t%s", number(score, ok))
			}
			total, ok := 0.0, c.Total != nil
			if ok {
				total = *c.Total
			}
			fmt.Fprintf(table, "\t%s\t%s\n", number(total, ok), c.Skipped)
		}
		if err := table.Flush(); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	return nil
}

func number(v float64, ok bool) string {
	if !ok {
		return "-"
	}
	return fmt.Sprintf("%.3f", v)
}
