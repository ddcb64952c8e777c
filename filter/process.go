package filter

import (
	"bufio"
	"bytes"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// OnlyDoor returns an error if another shunt is loaded into this process: two
// Go runtimes in one Envoy are not supported, be it the other door or another
// version. readFile reads /proc/self/maps; where there is none, nothing is
// known and nothing refused.
func OnlyDoor(readFile func(string) ([]byte, error)) error {
	maps, _ := readFile("/proc/self/maps") // empty where there is none
	var loaded []string
	for lines := bufio.NewScanner(bytes.NewReader(maps)); lines.Scan(); {
		_, file, ok := strings.Cut(lines.Text(), "/")
		base := strings.TrimSuffix(path.Base(file), " (deleted)")
		if ok && strings.HasPrefix(base, "libshunt") && strings.Contains(base, ".so") && !slices.Contains(loaded, "/"+file) {
			loaded = append(loaded, "/"+file)
		}
	}
	if len(loaded) > 1 {
		return fmt.Errorf("more than one shunt is loaded into this Envoy (%s): keep one, and restart Envoy to change it", strings.Join(loaded, ", "))
	}
	return nil
}

// CgroupMemory returns the memory limit of the process's cgroup in bytes, or 0
// where there is none.
func CgroupMemory(readFile func(string) ([]byte, error)) int64 {
	for _, file := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		text, err := readFile(file)
		if err != nil {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		const unlimited = 1 << 60 // version 1 writes a number near 2^63 for none
		if err != nil || n <= 0 || n >= unlimited {
			return 0 // "max"
		}
		return n
	}
	return 0
}
