package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func probeCommand() *cobra.Command {
	var timeout time.Duration
	var show bool
	cmd := &cobra.Command{
		Use:   "probe URL",
		Short: "Ask a URL; the exit code is 0 if it answers 200",
		Long: "Ask a URL with GET; the exit code is 0 if it answers 200. It is the health check of images that have no\n" +
			"other HTTP client. A listener on a Unix socket is unix:/path/of/socket:/path/of/url.",
		Example: "  shunt probe http://127.0.0.1:9902/readyz\n" +
			"  shunt probe --print http://127.0.0.1:9902/statusz.json",
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return probe(ctx, args[0], show, cmd.OutOrStdout())
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Second, "give up after it")
	cmd.Flags().BoolVar(&show, "print", false, "print what it answers")
	return cmd
}

// probe ends with ctx. No proxy is used and no redirect followed: neither can
// vouch for the process that is asked.
func probe(ctx context.Context, url string, show bool, stdout io.Writer) error {
	transport := &http.Transport{DisableKeepAlives: true}
	if socket, ok := strings.CutPrefix(url, "unix:"); ok {
		path, below, ok := strings.Cut(socket, ":")
		if !ok {
			return errors.New("a Unix socket is written unix:/path/of/socket:/path/of/url")
		}
		url = "http://unix" + below
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	}
	if !strings.HasPrefix(url, "http://") && !strings.HasPrefix(url, "https://") {
		return fmt.Errorf("%q is no URL: http://, https:// or unix: is how one begins", url)
	}
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if show {
		if _, err := io.Copy(stdout, resp.Body); err != nil {
			return err
		}
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, resp.Status)
	}
	return nil
}
