package e2e

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// startEcho is an engine that only knows upgrades: it accepts each and sends
// back what comes.
func startEcho(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { echo(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

func echo(c net.Conn) {
	defer func() { _ = c.Close() }()
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		if req.Header.Get("Upgrade") == "" {
			_, _ = io.WriteString(c, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
			continue
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n")
		_, _ = io.Copy(c, r)
		return
	}
}

// readHead reads the lines up to the empty one.
func readHead(t *testing.T, c *conn) string {
	t.Helper()
	var head strings.Builder
	for {
		line, err := c.r.ReadString('\n')
		if err != nil {
			t.Fatalf("%v after %q", err, head.String())
		}
		if line == "\r\n" {
			return head.String()
		}
		head.WriteString(line)
	}
}
