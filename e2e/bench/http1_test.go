package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
)

// feedAll feeds input in pieces cut by cut and returns where each message ended, and their heads' first lines.
func feedAll(m *message, input []byte, cut func(left int) int) (ends []int, firsts []string, err error) {
	at := 0
	for at < len(input) {
		piece := input[at:]
		piece = piece[:cut(len(piece))]
		for len(piece) > 0 {
			n, done, err := m.feed(piece)
			if err != nil {
				return ends, firsts, err
			}
			if n == 0 {
				return ends, firsts, fmt.Errorf("no progress at %d", at)
			}
			at += n
			piece = piece[n:]
			if done {
				first, _, _ := strings.Cut(string(m.head), "\r\n")
				ends, firsts = append(ends, at), append(firsts, first)
			}
		}
	}
	return ends, firsts, nil
}

func TestMessagesCutAnywhere(t *testing.T) {
	responses := []string{
		"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1A;x=y\r\n" + strings.Repeat("\r\n", 13) + "\r\n0\r\n\r\n",
		"HTTP/1.1 204 No Content\r\nserver: envoy\r\n\r\n",
		"HTTP/1.1 503 Service Unavailable\r\nContent-Length:0\r\n\r\n",
		"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-trailer: b\r\n\r\n",
		"HTTP/1.1 200 OK\r\nx-content-length: 9\r\ncontent-length:   12  \r\n\r\n\r\n\r\nHTTP/1.1",
	}
	var input []byte
	var wantEnds []int
	for _, r := range responses {
		input = append(input, r...)
		wantEnds = append(wantEnds, len(input))
		// The dumb reader agrees that this is one whole message.
		br := bufio.NewReader(strings.NewReader(r))
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(resp.Body); err != nil {
			t.Fatal(err)
		}
		if rest, _ := io.ReadAll(br); len(rest) > 0 {
			t.Fatalf("%q has more than one message", r)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for try := range 500 {
		limit := 1 + try%40
		m := &message{response: true}
		ends, firsts, err := feedAll(m, input, func(left int) int { return 1 + rng.IntN(min(left, limit)) })
		if err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(ends) != fmt.Sprint(wantEnds) {
			t.Fatalf("messages end at %v, want %v", ends, wantEnds)
		}
		for i, first := range firsts {
			if !strings.HasPrefix(responses[i], first+"\r\n") {
				t.Fatalf("message %d begins %q", i, first)
			}
		}
	}
}

func TestMessageHead(t *testing.T) {
	m := &message{}
	n, done, err := m.feed([]byte("GET /metrics HTTP/1.1\r\nHost: a\r\nX-Y: 1\r\n\r\nrest"))
	if n != 42 || !done || err != nil {
		t.Fatalf("feed = %d, %v, %v", n, done, err)
	}
	if string(m.path()) != "/metrics" || string(m.header("host")) != "a" || string(m.header("x-y")) != "1" || m.header("x") != nil {
		t.Errorf("path %q, host %q, x-y %q, x %q", m.path(), m.header("host"), m.header("x-y"), m.header("x"))
	}
	r := &message{response: true}
	if _, _, err := r.feed([]byte("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")); err != nil || r.status() != 404 {
		t.Errorf("status %d, %v", r.status(), err)
	}
}

func TestMessageErrors(t *testing.T) {
	for name, input := range map[string]string{
		"no length":       "HTTP/1.1 200 OK\r\n\r\n",
		"bad length":      "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
		"negative length": "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
		"bad chunk":       "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
		"endless head":    "HTTP/1.1 200 OK\r\nx: " + strings.Repeat("a", maxHead),
	} {
		if _, _, err := (&message{response: true}).feed([]byte(input)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func FuzzMessage(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 204 x\r\n\r\n"), uint8(3))
	f.Add([]byte("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"), uint8(1))
	f.Fuzz(func(t *testing.T, input []byte, step uint8) {
		whole := &message{response: true}
		ends, _, err := feedAll(whole, bytes.Clone(input), func(left int) int { return left })
		cutUp := &message{response: true}
		cutEnds, _, cutErr := feedAll(cutUp, input, func(left int) int { return min(left, 1+int(step)) })
		if fmt.Sprint(ends) != fmt.Sprint(cutEnds) || (err == nil) != (cutErr == nil) {
			t.Fatalf("in one piece: %v, %v; cut: %v, %v", ends, err, cutEnds, cutErr)
		}
	})
}
