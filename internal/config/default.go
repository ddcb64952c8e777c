package config

import (
	"fmt"
	"reflect"
)

// setDefaults fills each field that the document leaves out from the field's
// default tag. A field that the document sets wrongly gets its default too, so
// that one mistake is one problem.
func setDefaults(into any, dec *decoder) {
	defaults(reflect.ValueOf(into).Elem(), "", dec)
}

func defaults(v reflect.Value, path string, dec *decoder) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			defaults(v.Elem(), path, dec)
		}
	case reflect.Slice:
		for i := range v.Len() {
			at := indexPath(path, i)
			if pool, ok := v.Index(i).Interface().(Pool); ok {
				at = fieldPath(path, pool.Name)
			}
			defaults(v.Index(i), at, dec)
		}
	case reflect.Struct:
		if policy, ok := v.Addr().Interface().(*Policy); ok {
			defaults(reflect.ValueOf(&policy.Parts).Elem(), path, dec)
			return
		}
		for i := range v.NumField() {
			field := v.Type().Field(i)
			at := fieldPath(path, fieldName(field))
			text, ok := field.Tag.Lookup("default")
			switch {
			case !ok:
				defaults(v.Field(i), at, dec)
			case !dec.has(at) || dec.bad[at]:
				if err := setScalar(v.Field(i), text); err != nil {
					// A test reads every tag, so this is a defect in the program.
					dec.fail(at, "has a broken default: %v", err)
				}
			case v.Field(i).Kind() == reflect.Struct:
				defaults(v.Field(i), at, dec)
			}
		}
	}
}

// Default is a document that sets nothing, defaults filled in. It is not valid:
// a pool is missing.
func Default() (*Config, error) {
	cfg, dec := &Config{}, decodeDocument(nil, &Config{})
	setDefaults(cfg, dec)
	if len(dec.problems) > 0 {
		return nil, fmt.Errorf("defaults: %w", dec.problems)
	}
	return cfg, nil
}
