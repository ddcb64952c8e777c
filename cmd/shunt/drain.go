package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shuntproxy/shunt/filter"
)

// drainPoll is how often a drain is looked after.
const drainPoll = 200 * time.Millisecond

func drainCommand() *cobra.Command {
	var admin string
	var grace, timeout time.Duration
	var wait bool
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Make this Envoy take leave: not ready at once, refusing requests after a grace",
		Long: "Make this Envoy take leave. /readyz says no at once; requests are served for the grace, while load balancers\n" +
			"notice; then new and waiting ones get 503 rejected-shutting-down, and those in flight finish. --wait returns\n" +
			"once none is left, for a preStop hook. --undo takes it back.",
		Example: "  shunt drain --wait\n" +
			"  shunt drain --grace 30s --wait --admin unix:/run/shunt/admin.sock",
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkAdmin(admin); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			undo, _ := cmd.Flags().GetBool("undo")
			client, base := adminClient(admin)
			path := "/drain"
			switch {
			case undo && wait:
				return errors.New("--undo and --wait exclude each other")
			case undo && cmd.Flags().Changed("grace"):
				return errors.New("--undo and --grace exclude each other")
			case undo:
				path = "/undrain"
			case cmd.Flags().Changed("grace"):
				path += "?grace=" + grace.String()
			}
			status, err := askDrain(ctx, client, http.MethodPost, base+path)
			if err != nil {
				return fromAdmin(admin, err)
			}
			return follow(ctx, client, base, status, wait, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&admin, "admin", "127.0.0.1:9902", "the admin listener: IP:port or unix:PATH")
	cmd.Flags().DurationVar(&grace, "grace", 0, "how long requests are still served (default: drain.grace of the configuration)")
	cmd.Flags().BoolVar(&wait, "wait", false, "return once the grace is over and no request is left")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Hour, "give up after it")
	cmd.Flags().Bool("undo", false, "serve again")
	return cmd
}

// adminClient speaks to an admin listener.
func adminClient(address string) (client *http.Client, base string) {
	transport := &http.Transport{DisableKeepAlives: true}
	base = "http://" + address
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		base = "http://unix"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	}
	return &http.Client{Transport: transport}, base
}

func askDrain(ctx context.Context, client *http.Client, method, url string) (filter.DrainStatus, error) {
	var status filter.DrainStatus
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return status, err
	}
	req.Header.Set(filter.HeaderAdmin, "1")
	resp, err := client.Do(req)
	if err != nil {
		return status, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err != nil {
		return status, err
	}
	if resp.StatusCode != http.StatusOK {
		return status, fmt.Errorf("%s answers %s: %s", url, resp.Status, strings.TrimSpace(string(body)))
	}
	if err := json.Unmarshal(body, &status); err != nil {
		return status, fmt.Errorf("%s does not answer as shunt does: %w", url, err)
	}
	return status, nil
}

// follow says how a drain goes, and with wait until nothing is left.
func follow(ctx context.Context, client *http.Client, base string, status filter.DrainStatus, wait bool, stdout io.Writer) error {
	said := filter.DrainStatus{InFlight: -1}
	ticker := time.NewTicker(drainPoll)
	defer ticker.Stop()
	for {
		if status.State != said.State || status.InFlight != said.InFlight || status.Waiting != said.Waiting {
			said = status
			fmt.Fprintf(stdout, "%s: %d in flight, %d waiting\n", status.State, status.InFlight, status.Waiting)
		}
		if !wait || status.State == filter.StateDraining && status.InFlight == 0 && status.Waiting == 0 {
			return nil
		}
		if status.State == filter.StateServing {
			return errors.New("the drain was taken back")
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d requests are still in flight: %w", status.InFlight, ctx.Err())
		case <-ticker.C:
		}
		var err error
		if status, err = askDrain(ctx, client, http.MethodGet, base+"/drain"); err != nil {
			return err
		}
	}
}
