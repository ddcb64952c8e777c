package loopback

import (
	"errors"
	"net"
	"syscall"
	"testing"
)

func TestReserve(t *testing.T) {
	addr := Reserve(t)
	if other := Reserve(t); other == addr {
		t.Fatalf("two have %s", addr)
	}
	for range 3 {
		if _, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("while nobody listens: %v", err)
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		_ = l.Close()
	}
	t.Run("ends", func(t *testing.T) {
		t.Cleanup(func() {
			if l, err := net.Listen("tcp", addr); err != nil {
				t.Errorf("another's end took it: %v", err)
			} else {
				_ = l.Close()
			}
		})
		Reserve(t)
	})
}

// TestReservedIsGivenToNobody asks the system for ports so often that it would
// come upon one of the reserved ones.
func TestReservedIsGivenToNobody(t *testing.T) {
	reserved := map[string]bool{}
	for range 200 {
		reserved[Reserve(t)] = true
	}
	for range 3000 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		_ = l.Close()
		if reserved[l.Addr().String()] {
			t.Fatalf("%s was given to another", l.Addr())
		}
	}
}
