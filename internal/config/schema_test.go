package config

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	reflectschema "github.com/invopop/jsonschema"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/shuntproxy/shunt/scorer"
)

const schemaFile = "../../docs/config.schema.json"

// generateSchema makes the JSON Schema of a filter config from the structs, their
// comments and their default tags.
func generateSchema(t *testing.T) []byte {
	t.Helper()
	number := `^-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?$`
	text := func(pattern, kind string) *reflectschema.Schema {
		schemas := []*reflectschema.Schema{{Type: "string", Pattern: pattern}}
		if kind != "" {
			schemas = append([]*reflectschema.Schema{{Type: kind}}, schemas...)
			return &reflectschema.Schema{AnyOf: schemas}
		}
		return schemas[0]
	}
	reflector := &reflectschema.Reflector{ExpandedStruct: true}
	reflector.Mapper = func(typ reflect.Type) *reflectschema.Schema {
		switch typ {
		case reflect.TypeFor[time.Duration]():
			return text(`^[-+]?(0|([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)$`, "")
		case reflect.TypeFor[Size]():
			return text(`^[0-9]+(\.[0-9]+)? *([kKMG]B|[KMG]iB|B)?$`, "integer")
		case reflect.TypeFor[int]():
			return text(number, "integer")
		case reflect.TypeFor[float64]():
			return text(number, "number")
		case reflect.TypeFor[Value]():
			return &reflectschema.Schema{AnyOf: []*reflectschema.Schema{{Type: "string"}, {Type: "number"}, {Type: "boolean"}}}
		case reflect.TypeFor[Policy]():
			return &reflectschema.Schema{AnyOf: []*reflectschema.Schema{
				text(`^ *(`+strings.Join(scorer.Valid(), "|")+`)( *:[^,]*)?(,.*)?$`, ""),
				{Type: "array", Items: &reflectschema.Schema{Ref: "#/$defs/PolicyPart"}},
			}}
		case reflect.TypeFor[Pools]():
			return &reflectschema.Schema{
				Type:                 "object",
				AdditionalProperties: &reflectschema.Schema{Ref: "#/$defs/Pool"},
			}
		}
		return nil
	}
	if err := reflector.AddGoComments("github.com/shuntproxy/shunt/internal/config", "."); err != nil {
		t.Fatal(err)
	}
	schema := reflector.Reflect(&Config{})
	pool := reflector.Reflect(&Pool{}) // reached through Pools alone
	part := reflector.Reflect(&PolicyPart{})
	schema.ID = "https://github.com/shuntproxy/shunt/docs/config.schema.json"
	schema.Title = "shunt configuration"
	for name, def := range pool.Definitions {
		schema.Definitions[name] = def
	}
	pool.Definitions, pool.Version, pool.ID = nil, "", ""
	schema.Definitions["Pool"] = pool
	part.Definitions, part.Version, part.ID = nil, "", ""
	schema.Definitions["PolicyPart"] = part
	schema.Definitions["Config"] = schema
	for _, typ := range []any{Config{}, Paths{}, RewriteTarget{}, PolicyPart{}, Guards{}, PrefixCache{}, CostPoint{}, DNS{}, DNSName{}, Kubernetes{}, Models{}, Scrape{}, ScrapeTLS{}, Prometheus{}, PrometheusLabels{}, PrometheusTLS{}, Limits{}, FlowControl{}, FlowBand{}, Objective{}, Drain{}, Explain{}, Health{}, Runtime{}, Admin{}, Metrics{}} {
		addDefaults(t, schema.Definitions[reflect.TypeOf(typ).Name()], reflect.TypeOf(typ))
	}
	delete(schema.Definitions, "Config")
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(schema); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func addDefaults(t *testing.T, schema *reflectschema.Schema, typ reflect.Type) {
	t.Helper()
	for i := range typ.NumField() {
		field := typ.Field(i)
		property, ok := schema.Properties.Get(fieldName(field))
		if !ok {
			t.Fatalf("%s.%s is not in the schema", typ.Name(), field.Name)
		}
		if property.Description == "" {
			// A $ref's siblings are kept by drafts from 2019-09 on.
			t.Errorf("%s.%s has no description in the schema", typ.Name(), field.Name)
		}
		if typ == reflect.TypeFor[PolicyPart]() && field.Name == "Policy" {
			for _, name := range scorer.Valid() {
				property.Enum = append(property.Enum, name)
			}
		}
		if field.Name == "AllowedPolicies" {
			for _, name := range scorer.Valid() {
				property.Items.Enum = append(property.Items.Enum, name)
			}
		}
		value, ok := field.Tag.Lookup("default")
		if !ok {
			continue
		}
		comment := strings.Join(strings.Fields(property.Description), " ")
		if !strings.Contains(comment, "Default: ") && !strings.Contains(comment, "is the default") {
			t.Errorf("%s.%s: the comment does not say the default", typ.Name(), field.Name)
		}
		property.Default = value
		switch field.Type.Kind() {
		case reflect.Slice:
			property.Default = strings.Split(value, ",")
		case reflect.Bool:
			property.Default = value == "true"
		case reflect.Int, reflect.Int64:
			if n, err := strconv.Atoi(value); err == nil && field.Type != reflect.TypeFor[time.Duration]() {
				property.Default = n
			}
		}
	}
}

func TestSchemaFileIsCurrent(t *testing.T) {
	got := generateSchema(t)
	if *update {
		if err := os.MkdirAll(filepath.Dir(schemaFile), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(schemaFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is out of date: run go test ./internal/config -update", schemaFile)
	}
}

// TestSchemaAgrees holds the schema against the examples: it accepts each good
// one, and refuses the bad ones whose mistake a schema can state.
func TestSchemaAgrees(t *testing.T) {
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(generateSchema(t)))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("config.schema.json", document); err != nil {
		t.Fatal(err)
	}
	schema, err := compiler.Compile("config.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	check := func(t *testing.T, file string) error {
		t.Helper()
		var value any
		if err := yaml.Unmarshal(read(t, file), &value); err != nil {
			if err := json.Unmarshal(read(t, file), &value); err != nil {
				t.Fatal(err)
			}
		}
		text, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		return schema.Validate(instance)
	}
	for _, file := range documents(t, "good") {
		if err := check(t, file); err != nil {
			t.Errorf("%s: the schema refuses it: %v", file, err)
		}
	}
	for _, name := range []string{
		"unknown-field", "unknown-nested-field", "policy-unknown", "policy-part-unknown", "allowed-policy-unknown",
		"duration-without-unit", "duration-words", "size-words", "size-fraction", "destination-unknown",
		"on-internal-error", "scalar-for-object", "object-for-scalar", "pools-list", "address-missing",
		"port-label-number", "boolean-word", "null-item",
	} {
		if check(t, filepath.Join("testdata", "bad", name+".yaml")) == nil {
			t.Errorf("%s: the schema accepts it", name)
		}
	}
}
