package filter

import (
	"io/fs"
	"strings"
	"testing"
)

func files(m map[string]string) func(string) ([]byte, error) {
	return func(name string) ([]byte, error) {
		if text, ok := m[name]; ok {
			return []byte(text), nil
		}
		return nil, fs.ErrNotExist
	}
}

func TestOnlyDoor(t *testing.T) {
	const head = "7f00-7f01 r-xp 00000000 08:01 1   "
	for _, c := range []struct {
		name string
		maps string
		want []string // in the error; none is no error
	}{
		{"nothing of ours", head + "/usr/lib/libc.so.6\n" + head + "[heap]\n7f00-7f01 rw-p 00000000 00:00 0 \n", nil},
		{"one, in several parts", head + "/lib/libshunt.so\n" + head + "/lib/libshunt.so\n", nil},
		{"one that was replaced on disk", head + "/lib/libshunt.so (deleted)\n", nil},
		{"a file that only sounds like it", head + "/lib/libshunt.so\n" + head + "/lib/notlibshunt.so\n" + head + "/lib/libshunt.conf\n" + head + "/libshunt.so/other\n", nil},
		{"two versions", head + "/lib/libshunt.so\n" + head + "/new/libshunt.so\n", []string{"/lib/libshunt.so, /new/libshunt.so", "more than one shunt", "restart Envoy"}},
		{"two doors", head + "/lib/libshunt.so\n" + head + "/lib/libshunt-contrib.so\n", []string{"/lib/libshunt.so", "/lib/libshunt-contrib.so"}},
		{"one before and after it was replaced", head + "/lib/libshunt.so (deleted)\n" + head + "/lib/libshunt.so\n", []string{"(deleted)"}},
	} {
		err := OnlyDoor(files(map[string]string{"/proc/self/maps": c.maps}))
		if (err == nil) != (len(c.want) == 0) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not say %q", c.name, err, want)
			}
		}
	}
	if err := OnlyDoor(files(nil)); err != nil {
		t.Errorf("without /proc: %v", err)
	}
}

func TestCgroupMemory(t *testing.T) {
	const v2, v1 = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
	for _, c := range []struct {
		files map[string]string
		want  int64
	}{
		{nil, 0},
		{map[string]string{v2: "1073741824\n"}, 1 << 30},
		{map[string]string{v2: "max\n"}, 0},
		{map[string]string{v2: "max\n", v1: "1024\n"}, 0},
		{map[string]string{v1: "536870912\n"}, 1 << 29},
		{map[string]string{v1: "9223372036854771712\n"}, 0},
		{map[string]string{v2: "0\n"}, 0},
		{map[string]string{v2: ""}, 0},
		{map[string]string{v2: "-1"}, 0},
	} {
		if got := CgroupMemory(files(c.files)); got != c.want {
			t.Errorf("%v: %d, want %d", c.files, got, c.want)
		}
	}
}
