package main

import (
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestProbe(t *testing.T) {
	var asked atomic.Bool
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/readyz":
			_, _ = w.Write([]byte("ready"))
		case "/moved":
			http.Redirect(w, r, "/readyz", http.StatusFound)
		case "/slow":
			asked.Store(true)
			<-r.Context().Done()
		default:
			http.Error(w, "not yet", http.StatusServiceUnavailable)
		}
	})
	tcp := httptest.NewServer(handler)
	defer tcp.Close()
	path := filepath.Join(t.TempDir(), "s")
	socket, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	unix := &httptest.Server{Listener: socket, Config: &http.Server{Handler: handler}}
	unix.Start()
	defer unix.Close()
	tests := []struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		{args: []string{tcp.URL + "/readyz"}},
		{args: []string{"--print", tcp.URL + "/readyz"}, stdout: "ready"},
		{args: []string{"unix:" + path + ":/readyz", "--print"}, stdout: "ready"},
		{args: []string{"unix:" + path + ":/other"}, code: 1, stderr: "answers 503"},
		{args: []string{"unix:" + path}, code: 1, stderr: "is written unix:"},
		{args: []string{tcp.URL + "/other"}, code: 1, stderr: "answers 503"},
		{args: []string{tcp.URL + "/moved"}, code: 1, stderr: "answers 302"},
		{args: []string{"http://127.0.0.1:1/"}, code: 1, stderr: "refused"},
	}
	for _, tt := range tests {
		code, stdout, stderr := shunt(t, "", append([]string{"probe", "--timeout", "1m"}, tt.args...)...)
		if code != tt.code || stdout != tt.stdout || !strings.Contains(stderr, tt.stderr) {
			t.Errorf("%v: code %d, stdout %q, stderr %q", tt.args, code, stdout, stderr)
		}
	}
	for timeout := 10 * time.Millisecond; !asked.Load() && timeout < time.Minute; timeout *= 2 { // a busy machine has no connection by then
		code, _, stderr := shunt(t, "", "probe", "--timeout", timeout.String(), tcp.URL+"/slow")
		if code != 1 || asked.Load() && !strings.Contains(stderr, "deadline exceeded") {
			t.Errorf("after %v: code %d, stderr %q", timeout, code, stderr)
		}
	}
	if !asked.Load() {
		t.Error("the slow one was never asked")
	}
}
