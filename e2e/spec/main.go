// Command spec runs the tests behind every sentence of the two specification
// pages that says something about headers or endpoints, and prints each sentence
// with its tests and their results through both doors:
//
//	go run ./e2e/spec -modules build/out/e2e
//
// It fails if a test fails, did not run through a door, or a sentence has none.
package main

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

//go:embed sentences.yaml
var text []byte

// page is one page of the specification.
type page struct {
	Page      string     `yaml:"page"`
	Sentences []sentence `yaml:"sentences"`
}

// sentence is what a page says, and the tests that show that it is so.
//
// A test is the name of one of the e2e suite's without the door: "TestErrors" or
// "TestScore/usage"; or one that needs no door, with its package:
// "./filter TestDropReasons".
type sentence struct {
	Says  string   `yaml:"says"`
	Tests []string `yaml:"tests"`
}

// doors are those that every e2e test must have run through.
var doors = []string{"stock", "contrib"}

func main() {
	modules := flag.String("modules", "", "folder with the modules to test, as the e2e suite's flag")
	list := flag.Bool("list", false, "only list the sentences and their tests")
	flag.Parse()
	if err := run(os.Stdout, *modules, *list); err != nil {
		fmt.Fprintln(os.Stderr, "spec:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, modules string, list bool) error {
	pages, err := sentences()
	if err != nil {
		return err
	}
	results := map[string]string{}
	if !list {
		if results, err = runTests(pages, modules); err != nil {
			return err
		}
	}
	bad := 0
	for _, p := range pages {
		fmt.Fprintf(out, "\n%s\n", p.Page)
		for _, s := range p.Sentences {
			lines, ok := judge(s, results)
			if !ok {
				bad++
			}
			mark := map[bool]string{true: "ok  ", false: "FAIL"}[ok]
			if list {
				mark = "    "
			}
			fmt.Fprintf(out, "%s  %s\n", mark, s.Says)
			for _, l := range lines {
				fmt.Fprintf(out, "          %s\n", l)
			}
		}
	}
	if bad > 0 && !list {
		return fmt.Errorf("%d sentences without a test that passes through both doors", bad)
	}
	return nil
}

// sentences reads the data.
func sentences() ([]page, error) {
	var pages []page
	dec := yaml.NewDecoder(strings.NewReader(string(text)))
	dec.KnownFields(true)
	if err := dec.Decode(&pages); err != nil {
		return nil, fmt.Errorf("sentences.yaml: %w", err)
	}
	return pages, nil
}

// judge says how a sentence's tests went, a line for each.
func judge(s sentence, results map[string]string) (lines []string, ok bool) {
	if len(s.Tests) == 0 {
		return []string{"no test"}, false
	}
	ok = true
	for _, test := range s.Tests {
		if strings.HasPrefix(test, "./") {
			pkg, name, _ := strings.Cut(test, " ")
			r := resultOf(results, pkg+" "+strings.ReplaceAll(name, " ", "_"))
			ok = ok && r == "pass"
			lines = append(lines, test+": "+r)
			continue
		}
		line := test + ":"
		for _, d := range doors {
			top, sub, nested := strings.Cut(test, "/")
			name := top + "/" + d
			if nested {
				name += "/" + strings.ReplaceAll(sub, " ", "_")
			}
			r := resultOf(results, "./e2e "+name)
			ok = ok && r == "pass"
			line += " " + d + " " + r
		}
		lines = append(lines, line)
	}
	return lines, ok
}

func resultOf(results map[string]string, name string) string {
	if r, ok := results[name]; ok {
		return r
	}
	return "did not run"
}

// runTests runs what the sentences name and returns the results by "package
// test".
func runTests(pages []page, modules string) (map[string]string, error) {
	byPackage := map[string][]string{}
	for _, p := range pages {
		for _, s := range p.Sentences {
			for _, test := range s.Tests {
				pkg, name := "./e2e", test
				if strings.HasPrefix(test, "./") {
					pkg, name, _ = strings.Cut(test, " ")
				}
				top, _, _ := strings.Cut(name, "/")
				if !slices.Contains(byPackage[pkg], top) {
					byPackage[pkg] = append(byPackage[pkg], top)
				}
			}
		}
	}
	results := map[string]string{}
	for pkg, names := range byPackage {
		args := []string{"test", "-json", "-count=1", "-timeout=30m", "-run", "^(" + strings.Join(names, "|") + ")$", pkg}
		if pkg == "./e2e" && modules != "" {
			args = append(args, "-modules", modules)
		}
		if err := runPackage(pkg, args, results); err != nil {
			return nil, err
		}
	}
	return results, nil
}

func runPackage(pkg string, args []string, results map[string]string) error {
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var event struct{ Action, Test, Output string }
		if json.Unmarshal(lines.Bytes(), &event) != nil {
			continue
		}
		switch event.Action {
		case "pass", "fail", "skip":
			results[pkg+" "+event.Test] = event.Action
		case "build-output": // of a package that does not compile
			fmt.Fprint(os.Stderr, event.Output)
		case "output":
			if strings.Contains(event.Output, "_test.go:") || event.Test == "" {
				fmt.Fprint(os.Stderr, event.Output)
			}
		}
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) { // a test that failed is in the results
		return err
	}
	return lines.Err()
}
