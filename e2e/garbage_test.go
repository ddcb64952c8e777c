package e2e

import (
	"context"
	"encoding/base64"
	"errors"
	"math"
	"strings"
	"testing"

	xds "github.com/cncf/xds/go/xds/type/v3"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shuntproxy/shunt/e2e/envoyrun"
	"github.com/shuntproxy/shunt/internal/bootstrap"
)

// garbage is what no operator means, as text. All of it has to be refused.
func garbage() map[string]string {
	return map[string]string{
		"bytes":            "\x00\x01\xff\xfe\x80{",
		"a byte of a text": "pools: {\xff: 1}",
		"a number":         "42", "a list": "[]", "a text": `"pools"`, "null": "null", "nothing": "",
		"another shape": "pools: 3\nscrape: []\nlimits: {requestBody: {}}\n",
		"brackets":      strings.Repeat("[", 1<<20),
		"nested":        "pools: " + strings.Repeat("{a: ", 50_000) + "1" + strings.Repeat("}", 50_000),
		"huge":          "# " + strings.Repeat("x", 1<<20) + "\nnonsense: 1\n",
		"a huge number": "scrape: {interval: " + strings.Repeat("9", 1<<20) + "}\npools: {default: {static: []}}\n",
		"many fields":   strings.Repeat("a", 100) + strings.Repeat(": 1\n"+strings.Repeat("b", 100), 10_000) + ": 1\n",
		"copies of copies": "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\n" +
			"e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\npools: *f\n",
	}
}

// wrongAnys are messages that only the golang filter hands over as they are.
func wrongAnys(t *testing.T) map[string][]byte {
	t.Helper()
	pack := func(m proto.Message) []byte {
		any, err := anypb.New(m)
		if err != nil {
			t.Fatal(err)
		}
		b, err := proto.Marshal(any)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	named := func(url string, value []byte) []byte {
		b, err := proto.Marshal(&anypb.Any{TypeUrl: url, Value: value})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	deep := structpb.NewStringValue("x")
	for range 5000 {
		deep = structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{deep}})
	}
	typed := func(v *structpb.Value) proto.Message {
		return &xds.TypedStruct{Value: &structpb.Struct{Fields: map[string]*structpb.Value{"pools": v}}}
	}
	return map[string][]byte{
		"no message":               []byte("\xff\xff\xff\xff no message"),
		"no type":                  named("", nil),
		"an unknown type":          named("type.googleapis.com/nobody.knows.This", []byte("x")),
		"another type":             pack(&emptypb.Empty{}),
		"a Struct":                 pack(&structpb.Struct{}),
		"a broken TypedStruct":     named("type.googleapis.com/xds.type.v3.TypedStruct", []byte("\x12\xff\xff\xff\xff\x0f")),
		"an empty TypedStruct":     pack(&xds.TypedStruct{}),
		"a TypedStruct of NaN":     pack(typed(structpb.NewNumberValue(math.NaN()))),
		"a TypedStruct of no kind": pack(typed(&structpb.Value{})),
		"a deep TypedStruct":       pack(typed(deep)),
		"a broken StringValue":     named("type.googleapis.com/google.protobuf.StringValue", []byte("\x0a\x05\xff\xfe")),
		"a StringValue not UTF-8":  named("type.googleapis.com/google.protobuf.StringValue", []byte("\x0a\x02\xff\xfe")),
		"an empty StringValue":     pack(wrapperspb.String("")),
	}
}

// TestGarbageConfigs: whatever the configuration is, Envoy ends with an error
// that shunt has logged, and not by a signal; and shunt had no fault over it.
func TestGarbageConfigs(t *testing.T) {
	allDoorsAtOnce(t, func(t *testing.T, d door) {
		w := prepareWorld(t, d, setup{engines: 1})
		refused := func(t *testing.T, edit func(b doc)) {
			t.Helper()
			w.setup.edit = edit
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			e, err := envoyrun.Start(ctx, w.envoyOptions(t))
			if err == nil {
				_ = e.Stop()
				t.Fatal("Envoy started")
			}
			var start *envoyrun.StartError
			if !errors.As(err, &start) || !strings.Contains(start.Reason, "exit status 1") {
				t.Fatalf("%.3000s", err)
			}
			log := strings.Join(start.Log, "\n")
			if !strings.Contains(log, "shunt: configuration refused") || strings.Contains(log, "internal error") {
				t.Errorf("%.3000s", err)
			}
			if long := longest(start.Log); long > 8<<10 {
				t.Errorf("a line of the log has %d bytes", long)
			}
		}
		for name, text := range garbage() {
			t.Run(name, func(t *testing.T) {
				if d.host == bootstrap.HostContrib && strings.ToValidUTF8(text, "") != text {
					t.Skip("Envoy itself refuses it")
				}
				refused(t, func(b doc) {
					object, field := d.config(b)
					object[field] = garbageText(t, d, object, text)
				})
			})
		}
		if d.host != bootstrap.HostGolanghost {
			return // only there can the bytes be chosen
		}
		for name, any := range wrongAnys(t) {
			t.Run(name, func(t *testing.T) {
				refused(t, func(b doc) {
					object, field := d.config(b)
					object[field] = base64.StdEncoding.EncodeToString(any)
				})
			})
		}
	})
}

func longest(lines []string) (n int) {
	for _, l := range lines {
		if strings.Contains(l, "shunt: ") {
			n = max(n, len(l))
		}
	}
	return n
}

// garbageText is a door's way to take a text for its configuration, which may
// be no UTF-8.
func garbageText(t *testing.T, d door, object doc, text string) string {
	t.Helper()
	switch d.host {
	case bootstrap.HostGolanghost:
		value := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), text)
		b, err := proto.Marshal(&anypb.Any{TypeUrl: "type.googleapis.com/google.protobuf.StringValue", Value: value})
		if err != nil {
			t.Fatal(err)
		}
		return base64.StdEncoding.EncodeToString(b)
	case bootstrap.HostContrib:
		return text
	default:
		object["@type"] = "type.googleapis.com/google.protobuf.BytesValue"
		return base64.StdEncoding.EncodeToString([]byte(text))
	}
}

// TestGarbageRoutes: the golang filter reads a route's configuration at its first
// request. Where it is garbage, that route answers 503 and nothing else changes.
func TestGarbageRoutes(t *testing.T) {
	t.Parallel()
	for _, d := range doors() {
		if d.host == bootstrap.HostGolanghost { // only there can the bytes be chosen
			t.Run(d.name, func(t *testing.T) { garbageRoutes(t, d) })
		}
	}
}

func garbageRoutes(t *testing.T, d door) {
	var routes strings.Builder
	var paths []string
	for name, any := range wrongAnys(t) {
		if strings.HasPrefix(name, "an empty") {
			continue // a route that asks for nothing
		}
		path := "/garbage" + string(rune('a'+len(paths)))
		paths = append(paths, path)
		routes.WriteString(routeWith(path, "shunt_engines",
			modulePerRoute("golanghost", `{"plugin_name": "shunt", "plugin_config": "`+base64.StdEncoding.EncodeToString(any)+`"}`)))
	}
	w := start(t, d, setup{routes: routes.String(), expect: []string{`shunt: `}})
	for proto, c := range w.protocols() {
		for _, path := range paths {
			for range 2 {
				r := w.must(t, c, call{path: path, body: strings.NewReader(chat)})
				if r.status != 503 || errorOf(t, r).Error.Code != "rejected-no-endpoints" {
					t.Errorf("%s %s: %v", proto, path, r)
				}
			}
		}
		if r := w.must(t, c, call{body: strings.NewReader(chat)}); r.status != 200 {
			t.Errorf("%v", r)
		}
	}
	for _, l := range w.envoy.Log() {
		if strings.Contains(l, "internal error") {
			t.Error(l)
		}
	}
}
