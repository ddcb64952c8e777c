// Package config is shunt's configuration: one strict YAML or JSON document,
// decoded, defaulted and validated in three separate steps, with every problem
// reported at once by its path. Nothing here starts, reads or watches anything
// except ParseFile, which reads the one file it is given.
package config

import "time"

// Config is one whole document. A Config that Parse or ParseFile returned is
// valid, has its defaults filled in and must not be written to: several
// goroutines read it.
type Config struct {
	// ConfigFile names a file that holds the document instead. It stands alone:
	// any field beside it is an error. A relative path starts at Envoy's working
	// directory. The file is watched, and a change applies without touching
	// Envoy's listeners. Default: none.
	ConfigFile string `json:"configFile,omitempty"`

	// Pools are the sets of endpoints that requests may go to, by name. The first
	// is used where a route names none: first in the document when it is YAML
	// text. JSON objects have no order (Envoy's Struct loses it), so there the
	// pool named "default" comes first and the others follow by name. At least
	// one is required.
	Pools Pools `json:"pools,omitempty"`

	// Paths are those on which requests are understood.
	Paths Paths `json:"paths,omitempty"`

	// Rewrites give requests another model, by the model they ask for. The header
	// x-llm-d-model-name-rewrite of a request beats them. Default: none.
	Rewrites []Rewrite `json:"rewrites,omitempty"`

	// Models says which model names are known and how endpoints are asked.
	Models Models `json:"models,omitempty"`

	// Policy ranks the candidates of each request: a name, such as least-request;
	// names with weights, such as prefix-cache:2,least-request:1; or a list, such as
	// [{policy: prefix-cache, weight: 3, params: {slack: 16}}, {policy: queue, weight:
	// 2}]. docs/policies.md has them all. Default: least-request.
	Policy Policy `json:"policy,omitempty" default:"least-request"`

	// AllowedPolicies are the policies a client may ask for in the header
	// routing-strategy, alone or with weights; another name there is a 400. Default:
	// none, and the header is ignored.
	AllowedPolicies []string `json:"allowedPolicies,omitempty"`

	// Guards are rules around every policy.
	Guards Guards `json:"guards,omitempty"`

	// SlowStart is the time over which the share of an endpoint that joins a running
	// pool grows to its full size, 0s to 10m. 0s is off. Default: 10s.
	SlowStart time.Duration `json:"slowStart,omitempty" default:"10s"`

	// PrefixCache is how prompts are compared.
	PrefixCache PrefixCache `json:"prefixCache,omitempty"`

	// Sessions say which requests belong together, for session-affinity.
	Sessions Sessions `json:"sessions,omitempty"`

	// Profiles are what was measured of endpoints, for slo-least-load and
	// slo-pack-load. Without one that fits, the price of a request is its tokens over
	// those that the engine's KV cache holds. Default: none.
	Profiles []CostProfile `json:"profiles,omitempty"`

	// Scrape is how the metrics pages of engines are read.
	Scrape Scrape `json:"scrape,omitempty"`

	// Prometheus is a server that is asked for the metrics it computes from what
	// it scraped of the engines.
	Prometheus Prometheus `json:"prometheus,omitempty"`

	// Limits bound what one request, and all together, may hold in memory.
	Limits Limits `json:"limits,omitempty"`

	// FlowControl lets requests wait while all endpoints that could serve them are
	// full.
	FlowControl FlowControl `json:"flowControl,omitempty"`

	// SLO is what goals for the latency do.
	SLO SLO `json:"slo,omitempty"`

	// Objectives are what a request can ask for by name: a priority, goals, a time to
	// live. A request that names none, or one that is not here, has priority 0.
	// Default: none.
	Objectives []Objective `json:"objectives,omitempty"`

	// Drain is how this Envoy takes leave.
	Drain Drain `json:"drain,omitempty"`

	// Explain is what a client may see of a decision.
	Explain Explain `json:"explain,omitempty"`

	// TrustMetadata is a namespace of Envoy's dynamic metadata, written by a filter
	// before shunt that knows who the client is. Its strings objective and
	// fairness_id then count instead of the request's headers, which are removed,
	// forwardControlHeaders or not: clients can't choose their priority. Default:
	// "", and the headers count.
	TrustMetadata string `json:"trustMetadata,omitempty"`

	// ForwardControlHeaders passes the headers that steer shunt on to the engine.
	// Default: false, and they are removed.
	ForwardControlHeaders bool `json:"forwardControlHeaders,omitempty" default:"false"`

	// SubsetHeader lets a request narrow its candidates with
	// x-gateway-destination-endpoint-subset. Only for a trusted hop in front:
	// whoever can send it can choose the endpoint. Default: false, and the header
	// is removed.
	SubsetHeader bool `json:"subsetHeader,omitempty" default:"false"`

	// RestoreModelName puts the model that the client named back into the answer
	// to a request whose model was rewritten. Compressed answers are left alone,
	// and counted. Default: true.
	RestoreModelName bool `json:"restoreModelName,omitempty" default:"true"`

	// Health is how an endpoint's serving port is probed.
	Health Health `json:"health,omitempty"`

	// StartupHold is how long after a pool's start requests may wait for its
	// discovery's first full set and for the first answer of an endpoint, and how
	// long after new endpoints came for theirs, where no other serves the request;
	// 0s to 1m. Default: 5s.
	StartupHold time.Duration `json:"startupHold,omitempty" default:"5s"`

	// Runtime sets the Go runtime inside Envoy, once, at the first config.
	Runtime Runtime `json:"runtime,omitempty"`

	// Destination is how Envoy's cluster finds the picked endpoint: original_dst
	// (an ORIGINAL_DST cluster that reads the destination header) or eds (an EDS
	// cluster with the load balancing policy override_host, whose endpoints are in
	// the file that eds.path names). Default: original_dst.
	Destination string `json:"destination,omitempty" default:"original_dst" jsonschema:"enum=original_dst,enum=eds"`

	// EDS is the file of endpoints for destination: eds.
	EDS EDS `json:"eds,omitempty"`

	// Fallbacks is how many endpoints follow the picked one in the destination
	// header, for Envoy's retries, 0 to 8. An ORIGINAL_DST cluster can't read a
	// list, so it must be 0 there. Default: 0.
	Fallbacks int `json:"fallbacks,omitempty" default:"0"`

	// OnInternalError is what happens to a request when shunt itself fails:
	// reject (500 with rejected-internal) or route (a least-request pick instead,
	// where the model is known or the pool has only one). Default: reject.
	OnInternalError string `json:"onInternalError,omitempty" default:"reject" jsonschema:"enum=reject,enum=route"`

	// Admin is the listener for operators, which serves everything.
	Admin Admin `json:"admin,omitempty"`

	// Metrics is a second listener that serves only /metrics, /healthz, /readyz.
	Metrics Metrics `json:"metrics,omitempty"`
}

// Pools are in the order described at Config.Pools.
type Pools []Pool

// Pool is one set of endpoints. It needs at least one source; with several its
// endpoints are those of all of them.
type Pool struct {
	// Name is the pool's key in the document.
	Name string `json:"-"`

	// Static lists endpoints that never change. It may be an empty list. Default:
	// none.
	Static []Endpoint `json:"static,omitempty"`

	// File reads endpoints from a file and watches it. Default: none.
	File *File `json:"file,omitempty"`

	// DNS looks endpoints up by name. Default: none.
	DNS *DNS `json:"dns,omitempty"`

	// Kubernetes finds endpoints in the pods of a cluster. Default: none.
	Kubernetes *Kubernetes `json:"kubernetes,omitempty"`
}

// Endpoint is one engine in a static list. internal/pool's ParseTarget says what
// the address and the labels mean together.
type Endpoint struct {
	// Address is IP or IP:port, an IPv6 with a port in brackets. Without a port,
	// the label model.aibrix.ai/port gives it, else it is 8000; a label with
	// another port is an error. A host name is an error: names go under dns.
	// Required.
	Address string `json:"address"`

	// Labels are those of an AIBrix pod: model.aibrix.ai/name (the model it
	// serves; without it, it is asked), model.aibrix.ai/engine (vllm, sglang,
	// trtllm, xllm; default vllm), model.aibrix.ai/port (default 8000),
	// model.aibrix.ai/metric-port (default 8000) and model.aibrix.ai/hardware
	// (for profiles). Others are not read. Values are strings: a port is written
	// in quotes. Default: none.
	Labels map[string]string `json:"labels,omitempty"`

	// Pod is the name shown beside the address, in logs, metrics and
	// /statusz.json. Default: none.
	Pod string `json:"pod,omitempty"`
}

// File is a source of endpoints in a file.
type File struct {
	// Path of a YAML file that holds a list as under static. A relative path
	// starts at Envoy's working directory. A file that breaks or goes
	// keeps the last good set; at the start, with no such set, it is an error.
	// Required.
	Path string `json:"path"`
}

// Paths are those on which requests are understood.
type Paths struct {
	// Prefixes may stand before the paths of the API: with /openai,
	// /openai/v1/chat/completions is read like /v1/chat/completions. The path goes
	// on as it came; prefix_rewrite in Envoy's route changes it. Default: /openai.
	Prefixes []string `json:"prefixes,omitempty" default:"/openai"`

	// Unknown is what becomes of a request to a path that shunt does not know:
	// route (to the ready endpoint with the fewest requests, whatever model it
	// serves) or reject (404). Reject also closes the engines' own paths, such as
	// /metrics and /health, to clients. Default: route.
	Unknown string `json:"unknown,omitempty" default:"route" jsonschema:"enum=route,enum=reject"`
}

// Rewrite is one rule. A rule that names a request's model beats the one that
// matches all, wherever it stands in the list.
type Rewrite struct {
	// Matches are the models the rule is for. Default: none, and the rule is for
	// every model, and for requests that name none.
	Matches []RewriteMatch `json:"matches,omitempty"`

	// Targets are the models to ask the engine for instead. With several each
	// request goes to one at random, by weight. Required.
	Targets []RewriteTarget `json:"targets"`
}

// RewriteMatch is a condition on a request.
type RewriteMatch struct {
	// Model is the model that the request names. Required.
	Model string `json:"model"`
}

// RewriteTarget is a model to ask for.
type RewriteTarget struct {
	// Model is its name. Required.
	Model string `json:"model"`

	// Weight is its share of the requests, 1 to 1000000: all targets of a rule have
	// one, or none has. Default: 0, and all have the same share.
	Weight int `json:"weight,omitempty" default:"0"`
}

// Models says what is known about model names.
type Models struct {
	// Discover asks endpoints for GET /v1/models: when one becomes ready, every
	// 30s, and when a request's model is not found. Off, an endpoint without a
	// model label serves any model. Default: true.
	Discover bool `json:"discover,omitempty" default:"true"`

	// List answers GET /v1/models and /v1/models/ID with the models of the pool's
	// endpoints, and with those that known and rewrites name. Off, an engine
	// answers for itself. Default: true.
	List bool `json:"list,omitempty" default:"true"`

	// Memory is how long a model stays known after the last endpoint of it was
	// seen: a request for it meanwhile is 503, not NotFoundStatus. 0s to 24h.
	// Default: 10m.
	Memory time.Duration `json:"memory,omitempty" default:"10m"`

	// Known are models that always exist: with no endpoint, a request for one is
	// 503 (come back later) and not NotFoundStatus (no such model). Default: none.
	Known []KnownModel `json:"known,omitempty"`

	// NotFoundStatus is the status for a model that does not exist: 400, as AIBrix
	// answers, or 404, as OpenAI does. Default: 400.
	NotFoundStatus int `json:"notFoundStatus,omitempty" default:"400"`
}

// KnownModel is one model that config names.
type KnownModel struct {
	// Name is the model as requests name it. Required.
	Name string `json:"name"`

	// Aliases are other names that requests may use for it: the engine is asked for
	// Name, and the answer names the alias again. Default: none.
	Aliases []string `json:"aliases,omitempty"`

	// Adapters are further model names (LoRA adapters) that each endpoint serving
	// Name also serves, before its own metrics list them. Default: none.
	Adapters []string `json:"adapters,omitempty"`
}

// Scrape is how the metrics pages of engines are read: one loop per endpoint.
type Scrape struct {
	// Interval between two scrapes of an endpoint, 50ms to 5m. Shorter follows
	// load more closely and costs CPU here and in the engine. Default: 1s.
	Interval time.Duration `json:"interval,omitempty" default:"1s"`

	// Timeout of one scrape, 10ms to 1m. Default: 1s.
	Timeout time.Duration `json:"timeout,omitempty" default:"1s"`

	// StaleAfter is the age at which readings no longer count, from Interval to
	// 1h: the endpoint is then judged by live load alone. Default: 5s.
	StaleAfter time.Duration `json:"staleAfter,omitempty" default:"5s"`

	// MaxBytes is the largest page that is read, 1KiB to 1GiB; a larger one is a
	// failed scrape. Default: 16MiB.
	MaxBytes Size `json:"maxBytes,omitempty" default:"16MiB"`

	// ConnectTimeout of one connection, 10ms to Timeout. Default: 0s, which is
	// Timeout.
	ConnectTimeout time.Duration `json:"connectTimeout,omitempty" default:"0s"`

	// Jitter is the share of Interval over which the scrapes of a pool are spread,
	// 0 to 1, by a hash of the addresses. 0 asks all endpoints at the same moment.
	// Default: 1.
	Jitter float64 `json:"jitter,omitempty" default:"1"`

	// MaxBackOff is how rarely a page that keeps failing is asked, 50ms to 10m;
	// below Interval it is Interval. Default: 30s.
	MaxBackOff time.Duration `json:"maxBackOff,omitempty" default:"30s"`

	// TLS asks the engines over HTTPS: for metrics, models and health.
	TLS ScrapeTLS `json:"tls,omitempty"`

	// BearerTokenFile holds a token that goes along with each of these requests. It
	// is read anew every 10s; a broken one leaves the last good token in use. A
	// relative path starts at Envoy's working directory. Default: none.
	BearerTokenFile string `json:"bearerTokenFile,omitempty"`

	// Headers go along with each of these requests, by name. Default: none.
	Headers map[string]string `json:"headers,omitempty"`
}

// ScrapeTLS is how engines are known.
type ScrapeTLS struct {
	// Enabled uses HTTPS. Default: false.
	Enabled bool `json:"enabled,omitempty" default:"false"`

	// CAFile holds the certificates, PEM, that may have signed the engines'. It is
	// read anew every 10s. Default: the system's.
	CAFile string `json:"caFile,omitempty"`

	// ServerName is the name in the engines' certificates. Default: the
	// endpoint's IP.
	ServerName string `json:"serverName,omitempty"`

	// InsecureSkipVerify believes any engine. Default: false.
	InsecureSkipVerify bool `json:"insecureSkipVerify,omitempty" default:"false"`
}

// Prometheus is a server that is asked for query-based metrics: one query per
// metric, for all endpoints together. No request waits for it; without an answer
// those metrics are absent.
type Prometheus struct {
	// URL of the server, http or https, up to the part before /api/v1. Credentials
	// don't belong in it. "" asks none. Default: "".
	URL string `json:"url,omitempty"`

	// Interval between two rounds of queries, 100ms to 10m. Readings end two
	// intervals and one timeout after they were asked for. Default: 15s.
	Interval time.Duration `json:"interval,omitempty" default:"15s"`

	// Timeout of one query, 10ms to 1m. Default: 2s.
	Timeout time.Duration `json:"timeout,omitempty" default:"2s"`

	// Selector narrows all queries: PromQL label matchers such as job="pods". Set
	// it where the server scrapes the engines in more than one job, or rates count
	// them twice. Default: "".
	Selector string `json:"selector,omitempty"`

	// Labels are the names of the labels that say what a series belongs to.
	Labels PrometheusLabels `json:"labels,omitempty"`

	// TLS is used where URL is https.
	TLS PrometheusTLS `json:"tls,omitempty"`

	// BasicAuth logs in with a name and a password. Not beside bearerTokenFile.
	// Default: none.
	BasicAuth *BasicAuth `json:"basicAuth,omitempty"`

	// BearerTokenFile holds a token that goes along with each query. It is read
	// anew for each round. Default: none.
	BearerTokenFile string `json:"bearerTokenFile,omitempty"`
}

// PrometheusLabels are label names.
type PrometheusLabels struct {
	// Instance is the label with ip:port of an endpoint's metrics page, or with its
	// pod's name. Default: instance.
	Instance string `json:"instance,omitempty" default:"instance"`

	// Model is the label with the model. Default: model_name.
	Model string `json:"model,omitempty" default:"model_name"`
}

// PrometheusTLS is how the server is known, and shunt to it. Files are PEM and
// read anew for each round; a relative path starts at Envoy's working directory.
type PrometheusTLS struct {
	// CAFile holds the certificates that may have signed the server's. Default: the
	// system's.
	CAFile string `json:"caFile,omitempty"`

	// CertFile and keyFile are shown to a server that asks who its client is.
	// Default: none.
	CertFile string `json:"certFile,omitempty"`

	// KeyFile is the private key of certFile. Default: none.
	KeyFile string `json:"keyFile,omitempty"`

	// ServerName is the name in the server's certificate, where it is not the
	// URL's. Default: the URL's.
	ServerName string `json:"serverName,omitempty"`

	// InsecureSkipVerify believes any server. Default: false.
	InsecureSkipVerify bool `json:"insecureSkipVerify,omitempty" default:"false"`
}

// BasicAuth is a name and a password.
type BasicAuth struct {
	// Username is the name. Required.
	Username string `json:"username"`

	// PasswordFile holds the password and is read anew for each round. Required.
	PasswordFile string `json:"passwordFile"`
}

// Limits bound memory.
type Limits struct {
	// RequestBody is the largest body of an inference request, 1KiB to 1GiB; a
	// larger one is 413. It also bounds what a compressed body may decode to. Audio
	// and base64 images need more than the default. Envoy's own buffer limit must
	// not be below it (the stock door raises it). Default: 4MiB.
	RequestBody Size `json:"requestBody,omitempty" default:"4MiB"`

	// HeldBodies bounds the bodies that this process holds of requests which are
	// not decided yet: still coming in, or waiting. What is over is refused with
	// 429 rejected-saturated. A body takes the room that its content-length
	// announces; one without takes more as it grows, but on the contrib door,
	// which sees it only at its end, 64KiB until then. 0 is the default: a quarter
	// of the cgroup's memory, at most 1GiB. Otherwise at least RequestBody.
	HeldBodies Size `json:"heldBodies,omitempty" default:"0"`

	// JSONDepth is how deep objects and arrays in a body may nest, 8 to 1024; a
	// deeper one is 400. Default: 512.
	JSONDepth int `json:"jsonDepth,omitempty" default:"512"`
}

// Explain is what a client may see of a decision.
type Explain struct {
	// Header adds x-shunt-endpoint, x-shunt-policy and x-shunt-fallback to the
	// response of a request that has x-shunt-explain: 1. It shows addresses to
	// clients. Default: false.
	Header bool `json:"header,omitempty" default:"false"`

	// Sample is the share of requests whose decision is kept for /explain on the
	// admin listener, 0 to 1, beside those that ask with x-shunt-explain where header
	// allows it. Default: 0.
	Sample float64 `json:"sample,omitempty" default:"0"`
}

// Health is how an endpoint's serving port is probed.
type Health struct {
	// Path is asked over HTTP, and 200 means ready (vLLM and TensorRT-LLM:
	// /health; SGLang's generates a token). Empty, a TCP connect is the probe and
	// only while scrapes fail. Default: empty.
	Path string `json:"path,omitempty"`

	// Interval between two probes, 100ms to 10m. Default: 5s.
	Interval time.Duration `json:"interval,omitempty" default:"5s"`

	// Timeout of one probe, 10ms to 1m. Default: 2s.
	Timeout time.Duration `json:"timeout,omitempty" default:"2s"`
}

// Runtime sets the Go runtime inside Envoy.
type Runtime struct {
	// MemoryLimit is the soft limit of Go's heap (GOMEMLIMIT, which wins if it is
	// set), at least 64MiB. 0 is the default: a quarter of the cgroup's limit, at
	// least 256MiB, none without a cgroup limit.
	MemoryLimit Size `json:"memoryLimit,omitempty" default:"0"`

	// Yield gives Go's scheduler a sign of life from each of Envoy's workers, at
	// most every 8ms: without it, every call into shunt costs more under load.
	// Stock door only. For measuring. Default: true.
	Yield bool `json:"yield,omitempty" default:"true"`
}

// Admin is the listener for operators.
type Admin struct {
	// Address is IP:port or unix:PATH. A port in use is retried, never fatal. "" is
	// off. Default: 127.0.0.1:9902.
	Address string `json:"address,omitempty" default:"127.0.0.1:9902"`
}

// EDS is where Envoy learns of the endpoints.
type EDS struct {
	// Path of the file that shunt keeps and that the cluster's path_config_source
	// names; it ends in .yaml or .json. Envoy refuses to start without the file:
	// shunt envoy-config --print-endpoints prints its first content. A relative
	// path starts at Envoy's working directory. Default: none, and with destination:
	// eds it is required.
	Path string `json:"path,omitempty"`
}

// Metrics is the listener for scrapers.
type Metrics struct {
	// Address is IP:port. "" is off. Default: "".
	Address string `json:"address,omitempty"`
}

// Values of Config.OnInternalError.
const (
	OnErrorReject = "reject"
	OnErrorRoute  = "route"
)

// Values of Paths.Unknown.
const (
	UnknownRoute  = "route"
	UnknownReject = "reject"
)

// Values of Config.Destination.
const (
	DestinationOriginalDst = "original_dst"
	DestinationEDS         = "eds"
)

// MaxFallbacks bounds Config.Fallbacks: each is a part of a header.
const MaxFallbacks = 8

// Route is the config of one route, virtual host or weighted cluster.
type Route struct {
	// Pool that requests of this route use. Default: the first of the filter's
	// config.
	Pool string `json:"pool,omitempty"`

	// Policy that ranks this route's candidates, as policy of the filter's config.
	// Default: the filter's policy.
	Policy Policy `json:"policy,omitempty"`

	// Disabled leaves the route's requests alone, but for the destination headers,
	// which are removed. Such a route must name another cluster: the ORIGINAL_DST
	// one answers 503 without a destination. It stands alone. Default: false.
	Disabled bool `json:"disabled,omitempty" default:"false"`
}

// Lookup returns the pool of that name; the empty name means the first pool.
func (ps Pools) Lookup(name string) (*Pool, bool) {
	for i := range ps {
		if name == "" || ps[i].Name == name {
			return &ps[i], true
		}
	}
	return nil, false
}

// Names lists the pools in order.
func (ps Pools) Names() []string {
	names := make([]string, len(ps))
	for i := range ps {
		names[i] = ps[i].Name
	}
	return names
}

// maxHeldBodies is the most that waiting bodies may take unless config says more.
const maxHeldBodies Size = 1 << 30

// HeldBodiesIn is HeldBodies with its default resolved: cgroup is the memory
// limit of the process's cgroup in bytes, 0 if it has none.
func (l Limits) HeldBodiesIn(cgroup int64) int64 {
	if l.HeldBodies > 0 {
		return int64(l.HeldBodies)
	}
	held := maxHeldBodies
	if cgroup > 0 {
		held = min(held, Size(cgroup/4))
	}
	return int64(max(held, l.RequestBody))
}

// minMemoryLimit is the least Go heap that the default leaves.
const minMemoryLimit = 256 << 20

// MemoryLimitIn is MemoryLimit with its default resolved: cgroup is the memory
// limit of the process's cgroup in bytes, 0 if it has none. 0 means no limit.
func (r Runtime) MemoryLimitIn(cgroup int64) int64 {
	switch {
	case r.MemoryLimit > 0:
		return int64(r.MemoryLimit)
	case cgroup <= 0:
		return 0
	default:
		return max(cgroup/4, minMemoryLimit)
	}
}
