package compose

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// stage is one target of the Dockerfile, as far as it says what is in a container.
type stage struct {
	base       string
	files      map[string]string // path in the image: name below /out
	user       string
	entrypoint []string
}

// dockerfile reads build/Dockerfile: the arguments before the first stage, and the stages by name.
func dockerfile(t *testing.T) (args map[string]string, stages map[string]*stage) {
	t.Helper()
	text, err := os.ReadFile(root + "/build/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	args, stages = map[string]string{}, map[string]*stage{}
	var now *stage
	for line := range strings.SplitSeq(strings.ReplaceAll(string(text), "\\\n", ""), "\n") {
		word, rest, _ := strings.Cut(line, " ")
		fields := strings.Fields(rest)
		switch word {
		case "ARG":
			if name, value, ok := strings.Cut(rest, "="); ok && now == nil {
				args[name] = value
			}
		case "FROM":
			now = &stage{base: fields[len(fields)-3], files: map[string]string{}}
			stages[fields[len(fields)-1]] = now
		case "COPY":
			if fields[0] == "--from=build" {
				now.files[fields[2]] = strings.TrimPrefix(fields[1], "/out/")
			}
		case "USER":
			now.user = rest
		case "ENTRYPOINT":
			if err := json.Unmarshal([]byte(rest), &now.entrypoint); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
		}
	}
	return args, stages
}

// TestDockerfile holds what needs no Docker to be seen.
func TestDockerfile(t *testing.T) {
	args, stages := dockerfile(t)
	for _, target := range []string{"contrib", "stock", "module", "enginesim", "tools"} {
		s := stages[target]
		if s == nil {
			t.Fatalf("there is no target %s", target)
		}
		if !regexp.MustCompile(`^[1-9][0-9]*:[1-9][0-9]*$`).MatchString(s.user) {
			t.Errorf("%s runs as %q: a number other than 0 is wanted, which Kubernetes can see is not root", target, s.user)
		}
		if s.base == "scratch" {
			if len(s.entrypoint) != 1 || s.files[s.entrypoint[0]] == "" {
				t.Errorf("%s starts %v, which is not in it", target, s.entrypoint)
			}
		}
		if name := strings.Trim(s.base, "${}"); s.base != "scratch" && args[name] == "" {
			t.Errorf("%s is based on %s, which is no argument with a release", target, s.base)
		}
	}
	for name, image := range args {
		if !regexp.MustCompile(`:[a-z-]*v?[0-9]+\.[0-9]+\.[0-9]+(-[a-z]+)?(@sha256:[0-9a-f]{64})?$`).MatchString(image) {
			t.Errorf("%s=%s is no release", name, image)
		}
	}
	// What must be of one release, in files of different kinds.
	for _, same := range []struct{ name, file, pattern, prefix string }{
		{"ENVOY_CONTRIB_IMAGE", "go.mod", `github.com/envoyproxy/envoy (v[0-9.]+)`, "envoyproxy/envoy:contrib-"},
		{"ENVOY_STOCK_IMAGE", "build/envoy.sh", `(?m)^default=([0-9.]+)`, "envoyproxy/envoy:v"},
	} {
		text, err := os.ReadFile(filepath.Join(root, same.file))
		if err != nil {
			t.Fatal(err)
		}
		found := regexp.MustCompile(same.pattern).FindSubmatch(text)
		if found == nil {
			t.Fatalf("%s has no %s", same.file, same.pattern)
		}
		if image, _, _ := strings.Cut(args[same.name], "@"); image != same.prefix+string(found[1]) {
			t.Errorf("%s is %s, but %s says %s", same.name, image, same.file, found[1])
		}
	}
	text, err := os.ReadFile(root + "/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	language := regexp.MustCompile(`(?m)^go ([0-9]+\.[0-9]+)`).FindSubmatch(text)
	if !strings.HasPrefix(args["GO_IMAGE"], "golang:"+string(language[1])+".") {
		t.Errorf("GO_IMAGE is %s, go.mod wants Go %s", args["GO_IMAGE"], language[1])
	}
}

// TestLibraries: what make build left loads in the image, and fits its name in the Dockerfile.
func TestLibraries(t *testing.T) {
	if *outFlag == "" {
		t.Skip("needs -out, the folder of what make build leaves: make e2e-host gives it")
	}
	_, stages := dockerfile(t)
	libraries := []string{"2.35"}
	for _, s := range stages {
		for _, file := range s.files {
			path := filepath.Join(*outFlag, file)
			if _, err := os.Stat(path); err != nil {
				t.Errorf("the Dockerfile copies /out/%s, which make build doesn't leave: %v", file, err)
			} else if strings.HasSuffix(file, ".so") && !slices.Contains(libraries, path) {
				libraries = append(libraries, path)
			}
		}
	}
	if out, err := exec.Command(root+"/build/glibc.sh", libraries...).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	for _, wrong := range [][]string{{"2.2", libraries[1]}, {"2.35", root + "/build/glibc.sh"}} {
		if out, err := exec.Command(root+"/build/glibc.sh", wrong...).CombinedOutput(); err == nil {
			t.Errorf("glibc.sh accepts %v:\n%s", wrong, out)
		}
	}
}
