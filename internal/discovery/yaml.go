package discovery

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// ParseYAML reads the one document of a text, nil for an empty text. An error
// says on which line the text is no YAML, and what to look for there.
func ParseYAML(text []byte) (*yaml.Node, error) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, NotYAML(text, err)
	}
	if err := dec.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document: keep one, without a second ---")
	}
	return doc.Content[0], nil
}

// NotYAML says what err, the library's, found in text. The library counts some
// lines from 0 and leaves out the first, so its lines are only near.
func NotYAML(text []byte, err error) error {
	tab := 0
	for i, line := range bytes.Split(text, []byte("\n")) {
		if at := bytes.IndexFunc(line, func(r rune) bool { return r < ' ' && r != '\t' && r != '\r' }); at >= 0 {
			return fmt.Errorf("not YAML or JSON: line %d: has the control character %#x: text is wanted", i+1, line[at])
		}
		if !utf8.Valid(line) {
			return fmt.Errorf("not YAML or JSON: line %d: is not UTF-8: save the file as UTF-8", i+1)
		}
		if indent := line[:len(line)-len(bytes.TrimLeft(line, " \t-"))]; tab == 0 && bytes.ContainsRune(indent, '\t') {
			tab = i + 1
		}
	}
	said := strings.TrimPrefix(err.Error(), "yaml: ")
	if tab > 0 {
		return fmt.Errorf("not YAML or JSON: line %d: has a tab before its text: indent with spaces (%s)", tab, said)
	}
	if strings.Contains(said, "anchor") { // whose line the library doesn't tell
		return fmt.Errorf("not YAML or JSON: %s: an anchor is written &NAME, before its use as *NAME; quote a text that begins with *", said)
	}
	if !strings.HasPrefix(said, "line ") {
		said = "line 1: " + said
	}
	return fmt.Errorf("not YAML or JSON: near %s: look for a bracket, a quote, a colon or a space that is missing or too many", said)
}
