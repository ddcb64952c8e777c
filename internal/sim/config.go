package sim

import (
	"errors"
	"fmt"
	"io"
	"time"

	"go.yaml.in/yaml/v3"
)

// Config describes one simulated engine. Zero fields take the default.
type Config struct {
	Name        string       `yaml:"name" json:"name"`                   // in the ready line and on the control listener; the address
	Listen      string       `yaml:"listen" json:"listen"`               // 127.0.0.1:0
	Engine      string       `yaml:"engine" json:"engine"`               // whose metrics: vllm (default), sglang, trtllm or xllm
	Models      []string     `yaml:"models" json:"models"`               // served names, the first is the label in the metrics; sim-model
	AnyModel    bool         `yaml:"any_model" json:"any_model"`         // serve names that are not listed too
	Adapters    []string     `yaml:"adapters" json:"adapters"`           // LoRA adapters
	MaxModelLen int          `yaml:"max_model_len" json:"max_model_len"` // tokens of prompt and output; 131,072, at most what the KV cache holds
	Params      Params       `yaml:"params" json:"params"`
	Output      int          `yaml:"output_tokens" json:"output_tokens"`         // tokens generated where the client sets no maximum; 64
	Speedup     float64      `yaml:"speedup" json:"speedup"`                     // model time per wall time; 1
	IdleTimeout Duration     `yaml:"idle_timeout" json:"idle_timeout"`           // idle connections are closed after it, as uvicorn does; 5s, negative = never
	Fast        bool         `yaml:"fast" json:"fast"`                           // fixed small answer to every request, no model, nothing recorded
	FastDelay   Duration     `yaml:"fast_delay" json:"fast_delay"`               // how long Fast waits before it answers
	Compress    bool         `yaml:"compress" json:"compress"`                   // gzip answers that are no stream, for clients that accept it
	Requests    int          `yaml:"recorded_requests" json:"recorded_requests"` // how many requests are remembered; 10,000
	MaxBody     int64        `yaml:"max_body" json:"max_body"`                   // bytes; 256 MiB
	Load        Load         `yaml:"load" json:"load"`                           // to start with
	Delays      Delays       `yaml:"delays" json:"delays"`                       // to start with
	Hold        bool         `yaml:"hold" json:"hold"`                           // to start with
	Asleep      bool         `yaml:"asleep" json:"asleep"`                       // to start with
	Quirks      Quirks       `yaml:"quirks" json:"quirks"`                       // to start with
	Metrics     MetricsFault `yaml:"metrics" json:"metrics"`                     // to start with
}

func (c *Config) setDefaults() error {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.Engine == "" {
		c.Engine = "vllm"
	}
	if len(c.Models) == 0 {
		c.Models = []string{"sim-model"}
	}
	c.Params.setDefaults()
	if c.MaxModelLen == 0 {
		c.MaxModelLen = 131_072
	}
	c.MaxModelLen = min(c.MaxModelLen, c.Params.Blocks*c.Params.BlockSize)
	if c.Output == 0 {
		c.Output = 64
	}
	if c.Speedup == 0 {
		c.Speedup = 1
	}
	if c.IdleTimeout == 0 {
		c.IdleTimeout = Duration(5 * time.Second)
	}
	if c.Requests == 0 {
		c.Requests = 10_000
	}
	if c.MaxBody == 0 {
		c.MaxBody = 256 << 20
	}
	var errs []error
	if err := c.Params.validate(); err != nil {
		errs = append(errs, fmt.Errorf("params: %w", err))
	}
	errs = append(errs, c.Quirks.validate(c.Engine), c.Metrics.validate())
	if c.Metrics.Kind == MetricsFrozen {
		errs = append(errs, errors.New("metrics.kind: frozen shows the page of the moment it is set, which there is not at the start"))
	}
	if c.MaxModelLen < 2 || c.Output < 1 || !(c.Speedup > 0) || c.Requests < 1 || c.MaxBody < 1 || c.FastDelay < 0 {
		errs = append(errs, errors.New("max_model_len, output_tokens, speedup, recorded_requests, max_body and fast_delay must be positive"))
	}
	return errors.Join(errs...)
}

// ReadSpec reads a YAML document `engines: [Config…]`. Unknown fields are errors.
func ReadSpec(r io.Reader) ([]Config, error) {
	var spec struct {
		Engines []Config `yaml:"engines"`
	}
	dec := yaml.NewDecoder(r)
	dec.KnownFields(true)
	if err := dec.Decode(&spec); err != nil {
		return nil, fmt.Errorf("engines spec: %w", err)
	}
	if len(spec.Engines) == 0 {
		return nil, errors.New("engines spec: engines: none given")
	}
	return spec.Engines, nil
}

// Duration is a time.Duration that is a string like "10ms" in YAML and JSON.
type Duration time.Duration

// UnmarshalText reads what time.ParseDuration reads.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%q is not a duration such as 10ms", b)
	}
	*d = Duration(v)
	return nil
}

// MarshalText writes the form UnmarshalText reads.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// Delays slow the answers in wall time, on top of the model. Speedup doesn't shorten them.
type Delays struct {
	BeforeHeaders Duration `yaml:"before_headers" json:"before_headers"`
	BeforeBody    Duration `yaml:"before_body" json:"before_body"`       // headers are out, the first byte of the body is not
	BetweenTokens Duration `yaml:"between_tokens" json:"between_tokens"` // streams only
}

// FaultKind is what goes wrong with a request.
type FaultKind string

// The faults of requests. All read the whole body first, but for FaultEarlyStatus.
const (
	FaultStatus      FaultKind = "status"       // answer Status
	FaultEarlyStatus FaultKind = "early_status" // the same without reading the body
	FaultReset       FaultKind = "reset"        // reset the connection (HTTP/2: the stream) before headers
	FaultResetMid    FaultKind = "reset_mid"    // reset it after AfterTokens tokens of a stream, or half of a body
	FaultHang        FaultKind = "hang"         // never answer, until the client leaves or the fault is cleared
	FaultHangMid     FaultKind = "hang_mid"     // the same after AfterTokens tokens of a stream, or half of a body
)

// Fault is one thing to go wrong, for the first Count requests it fits.
type Fault struct {
	Kind        FaultKind         `json:"kind"`
	Path        string            `json:"path,omitempty"`   // "" = every path but /metrics, /health and /v1/models
	Count       int               `json:"count,omitempty"`  // 0 = until cleared
	Status      int               `json:"status,omitempty"` // 500
	Body        string            `json:"body,omitempty"`   // "" = an error object in the engine's form
	Headers     map[string]string `json:"headers,omitempty"`
	AfterTokens int               `json:"after_tokens,omitempty"`
}

func (f *Fault) validate() error {
	switch f.Kind {
	case FaultStatus, FaultEarlyStatus:
		if f.Status == 0 {
			f.Status = 500
		}
		if f.Status < 200 || f.Status > 599 {
			return fmt.Errorf("status: %d is not 200 to 599", f.Status)
		}
	case FaultReset, FaultResetMid, FaultHang, FaultHangMid:
	default:
		return fmt.Errorf("kind: unknown fault %q, valid: status, early_status, reset, reset_mid, hang, hang_mid", f.Kind)
	}
	if f.Count < 0 || f.AfterTokens < 0 {
		return errors.New("count and after_tokens must not be negative")
	}
	return nil
}

// MetricsKind is what goes wrong with the metrics page.
type MetricsKind string

// The faults of the page; "" is none.
const (
	MetricsStatus  MetricsKind = "status" // Status and no page
	MetricsEmpty   MetricsKind = "empty"  // 200 and no byte
	MetricsGarbage MetricsKind = "garbage"
	MetricsJSON    MetricsKind = "json"   // 200 and a JSON array
	MetricsSlow    MetricsKind = "slow"   // the page after Delay
	MetricsHuge    MetricsKind = "huge"   // the page after Bytes of other series
	MetricsFrozen  MetricsKind = "frozen" // the page of the moment the fault was set, for ever
	MetricsReset   MetricsKind = "reset"
	MetricsHang    MetricsKind = "hang"
	MetricsMoved   MetricsKind = "moved" // 307 to the same path with a slash at its end, where the page is
)

// MetricsFault is what is wrong with the metrics page until it is replaced.
type MetricsFault struct {
	Kind   MetricsKind `yaml:"kind" json:"kind"`
	Status int         `yaml:"status" json:"status,omitempty"` // 503
	Delay  Duration    `yaml:"delay" json:"delay,omitempty"`
	Bytes  int         `yaml:"bytes" json:"bytes,omitempty"` // 32 MiB
}

func (f *MetricsFault) validate() error {
	switch f.Kind {
	case "", MetricsEmpty, MetricsGarbage, MetricsJSON, MetricsSlow, MetricsFrozen, MetricsReset, MetricsHang, MetricsMoved:
	case MetricsStatus:
		if f.Status == 0 {
			f.Status = 503
		}
		if f.Status < 200 || f.Status > 599 {
			return fmt.Errorf("status: %d is not 200 to 599", f.Status)
		}
	case MetricsHuge:
		if f.Bytes == 0 {
			f.Bytes = 32 << 20
		}
	default:
		return fmt.Errorf("kind: unknown metrics fault %q, valid: status, empty, garbage, json, slow, huge, frozen, reset, hang, moved", f.Kind)
	}
	if f.Bytes < 0 || f.Delay < 0 {
		return errors.New("bytes and delay must not be negative")
	}
	return nil
}
