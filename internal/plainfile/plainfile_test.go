package plainfile

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for name, content := range map[string]string{"file": "12345", "empty": ""} {
		if err := os.WriteFile(in(name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("file", in("link")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(in("pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("pipe", in("linked-pipe")); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", in("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct {
		path  string
		limit int64
		want  string
		err   string
	}{
		{in("file"), 5, "12345", ""},
		{in("file"), 4, "", in("file") + " is larger than 4 bytes"},
		{in("empty"), 5, "", ""},
		{in("link"), 5, "12345", ""},
		{in("none"), 5, "", "no such file"},
		{dir, 5, "", dir + " is no regular file"},
		{in("pipe"), 5, "", in("pipe") + " is no regular file"},
		{in("linked-pipe"), 5, "", in("linked-pipe") + " is no regular file"},
		{in("socket"), 5, "", in("socket")},
		{"/dev/zero", 5, "", "/dev/zero is no regular file"},
	} {
		got, err := Read(c.path, c.limit)
		if string(got) != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %q, %v; want %q, %q", c.path, got, err, c.want, c.err)
		}
	}
}
