// Package bootstrap prints the reference Envoy bootstrap: one listener with shunt
// in its filter chain and one ORIGINAL_DST cluster, with what LLM traffic needs
// and Envoy's defaults break. Each choice is explained by a comment in the output.
package bootstrap

import (
	"bytes"
	"cmp"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/shuntproxy/shunt/internal/config"
)

//go:embed *.yaml.tmpl
var templates embed.FS

const (
	// DoorStock loads shunt as a dynamic module, in any Envoy image.
	DoorStock = "stock"
	// DoorContrib loads shunt as a plugin of the golang filter, which is in Envoy's
	// contrib image.
	DoorContrib = "contrib"

	// HostContrib is the golang filter itself.
	HostContrib = "contrib"
	// HostGolanghost is a dynamic module that stands in for the golang filter in a
	// stock Envoy, for tests.
	HostGolanghost = "golanghost"
)

// ContribLibrary is where the contrib image of build/Dockerfile has the library.
const ContribLibrary = "/usr/local/lib/libshunt_contrib.so"

// Options say what to print.
type Options struct {
	// Door is how Envoy loads shunt: stock or contrib. Empty means stock.
	Door string
	// Host is what loads the plugin of the contrib door: contrib or golanghost. Empty
	// means contrib; it must be empty for another door.
	Host string
	// Listen is the IP:port that clients connect to; port 0 lets the system choose.
	Listen string
	// Admin is the IP:port of Envoy's admin interface; port 0 as above.
	Admin string
	// Module is the absolute path of libshunt.so, for the contrib door of
	// libshunt_contrib.so. Empty, Envoy searches for libshunt.so by name, and the
	// other is ContribLibrary.
	Module string
	// HostModule is the absolute path of libgolanghost.so; empty, Envoy searches for
	// it by name. For HostGolanghost only.
	HostModule string
	// Document is shunt's config, YAML or JSON, with its pools in it. It is printed
	// inline unless ConfigFile is set, and its limits shape the rest.
	Document []byte
	// ConfigFile, if set, is the path from which shunt reads Document at run time.
	ConfigFile string
	// HeapBytes is the size of Envoy's heap at which it sheds load; 0 means twice
	// the default of limits.heldBodies, 2 GiB.
	HeapBytes int64
	// LDSFile moves the listener out of the bootstrap: Envoy watches that file, whose
	// text Listener returns.
	LDSFile string
	// ExtraRoutes and ExtraClusters are YAML list items without indentation: routes
	// that come before the one for everything, and further clusters.
	ExtraRoutes   string
	ExtraClusters string
}

// MetadataFields are the keys of the dynamic metadata namespace shunt that the
// access log prints.
func MetadataFields() []string {
	return []string{
		"model", "target_model", "endpoint", "pod", "policy", "fallback", "reason", "objective", "priority",
		"fairness_id", "queue_ms", "pick_us", "ttft_ms", "prompt_tokens", "completion_tokens", "total_tokens",
		"cached_tokens", "usage",
	}
}

// view is what the templates see.
type view struct {
	Options
	FilterTemplate string
	FilterConfig   string
	MetadataFields []string
	SubsetHeader   bool
	RequestBody    config.Size
	BufferLimit    int64
	EDSFile        string
	Retries        int
}

// bufferMargin is how far Envoy's body limit is above shunt's: enough for one
// read of a chunk on top of the sum at which shunt answers 413.
const bufferMargin = 1 << 20

const defaultHeapBytes = 2 << 30

// Generate returns the bootstrap as YAML. The error is a config.Problems where
// the document is at fault.
func Generate(o Options) ([]byte, error) { return render("bootstrap.yaml.tmpl", o) }

// Listener returns the content of Options.LDSFile: the listener as a discovery
// response in YAML.
func Listener(o Options) ([]byte, error) {
	text, err := render("listener.yaml.tmpl", o)
	if err != nil {
		return nil, err
	}
	const head = "resources:\n- \"@type\": type.googleapis.com/envoy.config.listener.v3.Listener\n  "
	return []byte(head + indent(2, string(text)) + "\n"), nil
}

// Endpoints returns what the file eds.path must hold before Envoy starts: no
// endpoints yet.
func Endpoints() []byte { return []byte("{\"resources\": []}\n") }

func render(name string, o Options) ([]byte, error) {
	v, err := newView(o)
	if err != nil {
		return nil, err
	}
	root := template.New("").Option("missingkey=error")
	root.Funcs(template.FuncMap{
		"include": func(name string, v view) (string, error) {
			var b strings.Builder
			err := root.ExecuteTemplate(&b, name, v)
			return strings.TrimRight(b.String(), "\n"), err
		},
		"indent":          indent,
		"quote":           quote,
		"socket":          socket,
		"openAIErrors":    func() []errorKind { return openAIErrors },
		"anthropicErrors": func() []errorKind { return anthropicErrors },
	})
	if root, err = root.ParseFS(templates, "*.yaml.tmpl"); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := root.ExecuteTemplate(&b, name, v); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func newView(o Options) (view, error) {
	v := view{Options: o, MetadataFields: MetadataFields()}
	if err := v.chooseDoor(); err != nil {
		return v, err
	}
	for name, address := range map[string]string{"listen": o.Listen, "admin": o.Admin} {
		if _, err := netip.ParseAddrPort(address); err != nil {
			return v, fmt.Errorf("%s address %q is not IP:port", name, address)
		}
	}
	for name, path := range map[string]string{"module": o.Module, "host module": o.HostModule} {
		if path != "" && !filepath.IsAbs(path) {
			return v, fmt.Errorf("%s path %q is not absolute: Envoy would search from its own working directory", name, path)
		}
	}
	cfg, err := config.Parse(o.Document)
	if err != nil {
		return v, err
	}
	if cfg.ConfigFile != "" {
		return v, errors.New("the config is a configFile itself: give the file that it names with --config, and the same path with --config-path")
	}
	if v.FilterConfig, err = filterConfig(v.Options, cfg); err != nil {
		return v, err
	}
	if v.HeapBytes == 0 {
		v.HeapBytes = max(defaultHeapBytes, 2*int64(cfg.Limits.HeldBodies))
	}
	if cfg.Destination == config.DestinationEDS {
		v.EDSFile, v.Retries = cfg.EDS.Path, max(1, cfg.Fallbacks)
	}
	v.SubsetHeader = cfg.SubsetHeader
	v.RequestBody = cfg.Limits.RequestBody
	v.BufferLimit = int64(cfg.Limits.RequestBody) + bufferMargin
	return v, nil
}

// chooseDoor sets what depends on the door and on its host.
func (v *view) chooseDoor() error {
	v.Door = cmp.Or(v.Door, DoorStock)
	switch v.Door {
	case DoorStock:
		if v.Host != "" {
			return fmt.Errorf("host %q: only the door %s has hosts", v.Host, DoorContrib)
		}
		v.FilterTemplate = "stock.yaml.tmpl"
	case DoorContrib:
		v.Host = cmp.Or(v.Host, HostContrib)
		v.Module = cmp.Or(v.Module, ContribLibrary)
		switch v.Host {
		case HostContrib:
			v.FilterTemplate = "contrib.yaml.tmpl"
		case HostGolanghost:
			v.FilterTemplate = "golanghost.yaml.tmpl"
		default:
			return fmt.Errorf("unknown host %q; valid: %s, %s", v.Host, HostContrib, HostGolanghost)
		}
	default:
		return fmt.Errorf("unknown door %q; valid: %s, %s", v.Door, DoorStock, DoorContrib)
	}
	if v.HostModule != "" && v.Host != HostGolanghost {
		return fmt.Errorf("host module %s: only the host %s is a module", v.HostModule, HostGolanghost)
	}
	return nil
}

// indent puts n spaces before every line but the first, and none before empty
// lines.
func indent(n int, text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i := 1; i < len(lines); i++ {
		if lines[i] != "" {
			lines[i] = strings.Repeat(" ", n) + lines[i]
		}
	}
	return strings.Join(lines, "\n")
}

// quote writes a JSON string, which YAML reads alike.
func quote(text string) (string, error) {
	b, err := json.Marshal(text)
	return string(b), err
}

// socket writes the fields of a socket_address.
func socket(address string) (string, error) {
	ap, err := netip.ParseAddrPort(address)
	return fmt.Sprintf("{address: %q, port_value: %d}", ap.Addr(), ap.Port()), err
}

// errorKind is the type that an error object of Envoy's has where its status is
// Status (EQ), or that or more (GE).
type errorKind struct {
	Op     string
	Status int
	Kind   string
}

// The first that fits counts. They are what internal/openai has for shunt's own
// errors.
var (
	openAIErrors = []errorKind{
		{"EQ", http.StatusTooManyRequests, "rate_limit_error"},
		{"EQ", http.StatusServiceUnavailable, "overloaded_error"},
		{"GE", http.StatusInternalServerError, "api_error"},
		{"GE", http.StatusBadRequest, "invalid_request_error"},
	}
	anthropicErrors = append([]errorKind{
		{"EQ", http.StatusUnauthorized, "authentication_error"},
		{"EQ", http.StatusForbidden, "permission_error"},
		{"EQ", http.StatusNotFound, "not_found_error"},
		{"EQ", http.StatusRequestEntityTooLarge, "request_too_large"},
	}, openAIErrors...)
)
