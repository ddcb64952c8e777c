// Package loopback gives tests addresses of 127.0.0.1 that stay theirs. Linux
// only.
package loopback

import (
	"net"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// Reserve returns an address of 127.0.0.1, as IP:port, that the system gives to
// nobody else until the test ends. The test may listen there, close that and
// listen again, as often as it likes; a connection is refused while it doesn't.
//
// The port of a listener that was closed is soon another's: that of a test that
// runs beside, which then is mistaken for the one that has gone.
func Reserve(t testing.TB) string {
	t.Helper()
	// A socket that is bound and does not listen holds the port. Who asks for
	// just that one can have it all the same, since both allow reuse, as Go's
	// listeners do.
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("loopback: a socket: %v", err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		t.Fatalf("loopback: reuse: %v", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatalf("loopback: no free port: %v", err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatalf("loopback: its address: %v", err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(at.(*unix.SockaddrInet4).Port))
}
