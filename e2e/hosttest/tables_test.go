package hosttest

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func read(t *testing.T, parts ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(parts...))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// contrib is a file of the golang filter's sources, in the module cache, of the version that go.mod names.
func contrib(t *testing.T, path string) string {
	t.Helper()
	api, err := folder(golangAPI)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, api, "..", "..", "..", path)
}

// enum is the names of a C++ enum class, in order.
func enum(t *testing.T, source, name string) []string {
	t.Helper()
	_, after, ok := strings.Cut(source, "enum class "+name+" {")
	body, _, ok2 := strings.Cut(after, "};")
	if !ok || !ok2 {
		t.Fatalf("no enum class %s", name)
	}
	body = regexp.MustCompile(`//[^\n]*`).ReplaceAllString(body, "")
	return regexp.MustCompile(`\w+`).FindAllString(body, -1)
}

// macro is the names in one of states.h's tables, in order.
func macro(t *testing.T, source, name string) []string {
	t.Helper()
	_, after, ok := strings.Cut(source, "#define "+name+"(X)")
	if !ok {
		t.Fatalf("no table %s", name)
	}
	body, _, _ := strings.Cut(after, "\n\n")
	var names []string
	for _, m := range regexp.MustCompile(`X\((\w+)\)`).FindAllStringSubmatch(body, -1) {
		names = append(names, m[1])
	}
	return names
}

// The host's states and statuses are those of contrib, with the same numbers; those that Go reads have its numbers too.
func TestTables(t *testing.T) {
	ours := read(t, root, "e2e", "golanghost", "states.h")
	theirs := contrib(t, "filters/http/source/processor_state.h")
	for table, class := range map[string]string{"FILTER_STATES": "FilterState", "GOLANG_STATUSES": "GolangStatus"} {
		if got, want := macro(t, ours, table), enum(t, theirs, class); !slices.Equal(got, want) {
			t.Errorf("%s has %v, %s %v", table, got, class, want)
		}
	}
	states := macro(t, ours, "FILTER_STATES")
	for _, m := range regexp.MustCompile(`(Processing\w+)\s*=\s*(\d)`).FindAllStringSubmatch(contrib(t, "filters/http/source/go/pkg/http/filter.go"), -1) {
		if i := slices.Index(states, m[1]); i != int(m[2][0]-'0') {
			t.Errorf("Go says %s is %s, the host %d", m[1], m[2], i)
		}
	}
	// What each handler of processor_state.cc has a case for is what the host accepts.
	source := contrib(t, "filters/http/source/processor_state.cc")
	for state, handler := range map[string]string{"ProcessingHeader": "handleHeaderGolangStatus", "ProcessingData": "handleDataGolangStatus", "ProcessingTrailer": "handleTrailerGolangStatus"} {
		_, body, _ := strings.Cut(source, "bool ProcessorState::"+handler)
		body, _, _ = strings.Cut(body, "\n};")
		var want []string
		for _, m := range regexp.MustCompile(`case GolangStatus::(\w+):`).FindAllStringSubmatch(body, -1) {
			want = append(want, m[1])
		}
		_, row, _ := strings.Cut(ours, "[State"+state+"] =")
		row, _, _ = strings.Cut(row, ",\n")
		var got []string
		for _, m := range regexp.MustCompile(`BIT\((\w+)\)`).FindAllStringSubmatch(row, -1) {
			got = append(got, m[1])
		}
		slices.Sort(got)
		slices.Sort(want)
		if len(want) == 0 || !slices.Equal(got, want) {
			t.Errorf("%s: the host accepts %v, contrib %v", state, got, want)
		}
	}
}

// symbols are the dynamic symbols of a shared object that nm prints with a flag.
func symbols(t *testing.T, file, flag string) []string {
	t.Helper()
	out, err := run("nm", "-D", flag, file)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		names = append(names, fields[len(fields)-1])
	}
	return names
}

var declared = regexp.MustCompile(`(?s)\b((?:CAPIStatus|void|uint32_t|void\*)\s+(envoyGo\w+)\(([^)]*)\))`)

// Every function that a plugin needs is defined by the host, and declared by the SDK's api.h, whose prototypes the
// compiler held it to.
func TestSymbols(t *testing.T) {
	api := contrib(t, "common/go/api/api.h")
	known := map[string]bool{}
	for _, m := range declared.FindAllStringSubmatch(api, -1) {
		known[m[2]] = true
	}
	if len(known) < 40 {
		t.Fatalf("api.h declares only %d functions: is it parsed rightly?", len(known))
	}
	defined := symbols(t, hostModule, "--defined-only")
	for _, name := range defined {
		if strings.HasPrefix(name, "envoyGo") && !known[name] {
			t.Errorf("golanghost defines %s, which api.h doesn't declare", name)
		}
	}
	for _, m := range declared.FindAllStringSubmatch(contrib(t, "filters/http/source/cgo.cc"), -1) {
		if name := m[2]; known[name] && !slices.Contains(defined, name) {
			t.Errorf("contrib's cgo.cc defines %s, golanghost does not", name)
		}
	}
	for _, file := range plugins(t) {
		exports := symbols(t, file, "--defined-only")
		wanted := regexp.MustCompile(`"(envoyGo\w+)"`).FindAllStringSubmatch(httpExports(t), -1)
		if len(wanted) != 10 {
			t.Fatalf("dso.cc asks for %d functions of a plugin, the host for 10", len(wanted))
		}
		for _, m := range wanted {
			if !slices.Contains(exports, m[1]) {
				t.Errorf("%s does not export %s", file, m[1])
			}
			if !strings.Contains(read(t, root, "e2e", "golanghost", "plugin.c"), `"`+m[1]+`"`) {
				t.Errorf("golanghost does not ask for %s", m[1])
			}
		}
		undefined := 0
		for _, name := range symbols(t, file, "--undefined-only") {
			if strings.HasPrefix(name, "envoyGo") {
				undefined++
				if !slices.Contains(defined, name) {
					t.Errorf("%s needs %s, which golanghost does not define", file, name)
				}
			}
		}
		if undefined == 0 {
			t.Errorf("%s needs nothing of its host: is it a plugin?", file)
		}
	}
}

// httpExports is the constructor that looks the HTTP plugin's functions up.
func httpExports(t *testing.T) string {
	t.Helper()
	_, body, _ := strings.Cut(contrib(t, "common/dso/dso.cc"), "HttpFilterDsoImpl::HttpFilterDsoImpl")
	body, _, _ = strings.Cut(body, "\n}\n")
	return body
}

// plugins are the misuse plugin and, where it can be built, shunt's.
func plugins(t *testing.T) []string {
	t.Helper()
	list := []string{plugin}
	if *pluginFlag != "" {
		return append(list, *pluginFlag)
	}
	if _, err := os.Stat(filepath.Join(root, "build", "libshunt_contrib", "main.go")); err != nil {
		t.Log("there is no build/libshunt_contrib yet")
		return list
	}
	shunt := filepath.Join(scratch, "libshunt_contrib.so")
	if err := buildPlugin(shunt, "./build/libshunt_contrib"); err != nil {
		t.Fatal(err)
	}
	return append(list, shunt)
}

// The struct that Go reads is laid out by api.h alone: the host must not have one of its own.
func TestNoOwnLayout(t *testing.T) {
	sources, err := filepath.Glob(filepath.Join(root, "e2e", "golanghost", "*.[ch]"))
	if err != nil || len(sources) == 0 {
		t.Fatal("no sources", err)
	}
	for _, file := range sources {
		b := []byte(read(t, file))
		for _, name := range []string{"httpRequest;", "processState;", "httpConfig;"} {
			if bytes.Contains(b, []byte("} "+name)) {
				t.Errorf("%s defines %s itself", file, name)
			}
		}
	}
}
