//go:build unix

package openai

import (
	"math/rand/v2"
	"syscall"
	"testing"
)

// TestSkipGuarded lets texts of all lengths end, and begin, where memory does: reading past them would crash.
func TestSkipGuarded(t *testing.T) {
	page := syscall.Getpagesize()
	m, err := syscall.Mmap(-1, 0, 3*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Munmap(m); err != nil {
			t.Error(err)
		}
	}()
	for _, guard := range [][]byte{m[:page], m[2*page:]} {
		if err := syscall.Mprotect(guard, syscall.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	r := rand.New(rand.NewPCG(11, 12))
	inner := m[page : 2*page]
	for n := range 301 {
		for _, escapes := range []int{0, 1, 3, 50} {
			for _, p := range [][]byte{inner[page-n:], inner[:n]} {
				fillText(r, p, escapes, 0)
				for i := range min(n+1, 70) {
					if err := checkSkip(p, i); err != nil {
						t.Fatal(err)
					}
				}
				if n > 0 {
					p[n-1] = '\\' // an escape that the end cuts
				}
				if err := checkSkip(p, 0); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}
