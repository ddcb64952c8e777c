package filter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
)

// listenRetry is how often an address in use is tried again.
const listenRetry = time.Second

// listener serves one address until it is stopped. A port in use is retried:
// the process that has it may be the Envoy we replace.
type listener struct {
	address string
	cancel  context.CancelFunc
	done    sync.WaitGroup
}

func (rt *Runtime) listen(name, address string, handler http.Handler) *listener {
	ctx, cancel := context.WithCancel(context.Background())
	l := &listener{address: address, cancel: cancel}
	l.done.Go(func() {
		defer rt.contain(name + " listener")
		rt.serve(ctx, name, address, handler)
	})
	return l
}

// stop closes the listener and its connections and waits, but not for handlers:
// they may be waiting for a lock that the caller holds.
func (l *listener) stop() {
	l.cancel()
	l.done.Wait()
}

func (rt *Runtime) serve(ctx context.Context, name, address string, handler http.Handler) {
	network, addr := "tcp", address
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, addr = "unix", path
	}
	failed := false
	retry := time.NewTimer(listenRetry)
	defer retry.Stop()
	for {
		ln, err := listenOn(network, addr)
		if err == nil {
			rt.log(slog.LevelInfo, name+" listens on "+address)
			server := &http.Server{
				Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
				WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
			}
			stop := context.AfterFunc(ctx, func() { _ = server.Close() })
			err = server.Serve(netutil.LimitListener(ln, maxConnections))
			stop()
			if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
				return
			}
		}
		if !failed {
			failed = true
			rt.log(slog.LevelError, name+": cannot listen on "+address+": "+err.Error()+"; trying again every second")
		}
		retry.Reset(listenRetry)
		select {
		case <-ctx.Done():
			return
		case <-retry.C:
		}
	}
}

// listenOn takes over a unix socket that nobody answers on.
func listenOn(network, addr string) (net.Listener, error) {
	ln, err := net.Listen(network, addr)
	if err == nil || network != "unix" {
		return ln, err
	}
	if c, dialErr := net.DialTimeout(network, addr, listenRetry); dialErr == nil {
		_ = c.Close()
		return nil, err
	}
	if info, statErr := os.Stat(addr); statErr != nil || info.Mode()&os.ModeSocket == 0 {
		return nil, err
	}
	if rmErr := os.Remove(addr); rmErr != nil {
		return nil, err
	}
	return net.Listen(network, addr)
}

// monitorHandler serves what a scraper and a kubelet ask.
func (rt *Runtime) monitorHandler() http.Handler {
	mux := http.NewServeMux()
	rt.monitorPages(mux)
	servePaths(mux, monitorPaths)
	return mux
}

const (
	monitorPaths = "GET /metrics, /healthz, /readyz"
	adminPaths   = monitorPaths + ", /statusz.json, /explain, /drain; POST /drain, /undrain"
)

// servePaths says at the root what there is, and of all other pages that they are not.
func servePaths(mux *http.ServeMux, paths string) {
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "shunt %s: %s\n", Version, paths)
	})
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, fmt.Sprintf("no GET %s here; there are: %s", r.URL.Path, paths), http.StatusNotFound)
	})
}

func (rt *Runtime) monitorPages(mux *http.ServeMux) {
	mux.Handle("GET /metrics", rt.pages.alone(promhttp.HandlerFor(rt.metrics.registry, promhttp.HandlerOpts{}), pageWait))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if why := rt.notReady(); why != "" {
			http.Error(w, why, http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	})
}

// adminHandler serves everything.
func (rt *Runtime) adminHandler() http.Handler {
	mux := http.NewServeMux()
	rt.monitorPages(mux)
	mux.Handle("GET /explain", rt.pages.alone(http.HandlerFunc(rt.serveExplain), pageWait))
	mux.Handle("GET /statusz.json", rt.pages.alone(http.HandlerFunc(rt.serveStatus), pageWait))
	rt.drainHandlers(mux)
	injectAdmin(rt, mux)
	servePaths(mux, adminPaths)
	return mux
}

func (rt *Runtime) serveStatus(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("content-type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(rt.Status()) // a client that has gone needs no answer
}
