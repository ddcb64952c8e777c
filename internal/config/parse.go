package config

import (
	"fmt"

	"github.com/shuntproxy/shunt/internal/plainfile"
)

// maxFile bounds the file that a configFile names: it may hold some 100,000
// endpoints.
const maxFile = 16 << 20

// Parse reads a filter config: JSON (from Envoy's Struct) or YAML text. The
// error is a Problems with every mistake in the document. Where ConfigFile is set
// it is the only field set, and the caller goes on with ParseFile.
func Parse(text []byte) (*Config, error) {
	cfg := &Config{}
	dec := decodeDocument(text, cfg)
	if dec.tooLarge() {
		return nil, dec.problems.capped()
	}
	if cfg.ConfigFile != "" || dec.has("configFile") {
		problems := dec.problems
		if cfg.ConfigFile == "" && !dec.failed("configFile") {
			problems = append(problems, dec.problem("configFile", "is empty: name a file, or leave it out"))
		}
		for _, name := range dec.topFields() {
			if name != "configFile" {
				problems = append(problems, dec.problem(name, "stands beside configFile: move it into that file, or leave configFile out"))
			}
		}
		if len(problems) > 0 {
			return nil, problems
		}
		return cfg, nil
	}
	setDefaults(cfg, dec)
	problems := append(dec.problems, validate(cfg, dec)...)
	if len(problems) > 0 {
		return nil, problems.capped()
	}
	return cfg, nil
}

// ParseFile reads the document that a configFile names. Such a file can't name
// another one. The error is a Problems, or says why the file can't be read.
func ParseFile(path string) (*Config, error) {
	text, err := plainfile.Read(path, maxFile)
	if err != nil {
		return nil, Problems{{Path: "configFile", Message: fmt.Sprintf("can't be read: %v", err)}}
	}
	cfg, err := Parse(text)
	if err != nil {
		return nil, err
	}
	if cfg.ConfigFile != "" {
		return nil, Problems{{Path: "configFile", Message: fmt.Sprintf("%s names a configFile itself: write the whole config in it", path)}}
	}
	return cfg, nil
}

// ParseRoute reads the config of one route: JSON or YAML text. The error is a
// Problems. Whether the pool exists is for the caller to check, because Envoy
// builds routes before it builds the filter.
func ParseRoute(text []byte) (*Route, error) {
	route := &Route{}
	dec := decodeDocument(text, route)
	setDefaults(route, dec)
	problems := append(dec.problems, validateRoute(route, dec)...)
	if len(problems) > 0 {
		return nil, problems
	}
	return route, nil
}
