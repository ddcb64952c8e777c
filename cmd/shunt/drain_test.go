package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestDrain(t *testing.T) {
	var calls []string
	answers := []string{
		`{"state":"grace","grace_seconds":1,"in_flight_requests":2,"waiting_requests":1}`,
		`{"state":"grace","grace_seconds":0.5,"in_flight_requests":2,"waiting_requests":1}`,
		`{"state":"draining","in_flight_requests":1,"waiting_requests":0}`,
		`{"state":"draining","in_flight_requests":0,"waiting_requests":0}`,
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls = append(calls, fmt.Sprintf("%s %s %s", r.Method, r.URL, r.Header.Get("x-shunt-admin")))
		if r.URL.Query().Get("grace") == "2h0m0s" {
			http.Error(w, "too long", http.StatusBadRequest)
			return
		}
		_, _ = w.Write([]byte(answers[min(len(calls), len(answers))-1]))
	}))
	defer server.Close()
	admin := strings.TrimPrefix(server.URL, "http://")
	for _, tt := range []struct {
		args           []string
		code           int
		stdout, stderr string
		calls          string
	}{
		{args: []string{"--wait", "--grace", "1s"}, stdout: "grace: 2 in flight, 1 waiting\ndraining: 1 in flight, 0 waiting\ndraining: 0 in flight, 0 waiting\n",
			calls: "POST /drain?grace=1s 1,GET /drain 1,GET /drain 1,GET /drain 1"},
		{stdout: "grace: 2 in flight, 1 waiting\n", calls: "POST /drain 1"},
		{args: []string{"--undo"}, stdout: "grace: 2 in flight, 1 waiting\n", calls: "POST /undrain 1"},
		{args: []string{"--undo", "--wait"}, code: 1, stderr: "exclude each other"},
		{args: []string{"--undo", "--grace", "5s"}, code: 1, stderr: "--undo and --grace exclude each other"},
		{args: []string{"--grace", "2h"}, code: 1, stderr: "400 Bad Request: too long", calls: "POST /drain?grace=2h0m0s 1"},
	} {
		calls = nil
		code, stdout, stderr := shunt(t, "", append([]string{"drain", "--admin", admin}, tt.args...)...)
		if code != tt.code || stdout != tt.stdout || !strings.Contains(stderr, tt.stderr) || strings.Join(calls, ",") != tt.calls {
			t.Errorf("%v: code %d, stdout %q, stderr %q, calls %v", tt.args, code, stdout, stderr, calls)
		}
	}
	if code, _, stderr := shunt(t, "", "drain", "--admin", "127.0.0.1:1"); code != 1 || !strings.Contains(stderr, "refused") {
		t.Errorf("code %d, stderr %q", code, stderr)
	}
}
