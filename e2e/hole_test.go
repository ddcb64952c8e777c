package e2e

import (
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
)

// hole is an engine that accepts connections and answers nothing until it is
// opened.
type hole struct {
	addr, port string
	open       func()
}

func startHole(t *testing.T) *hole {
	t.Helper()
	opened := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-opened:
		case <-r.Context().Done():
		}
		w.WriteHeader(http.StatusOK)
	}))
	t.Cleanup(s.Close)
	addr := s.Listener.Addr().String()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	return &hole{addr, port, func() { close(opened) }}
}
