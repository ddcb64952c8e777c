package config

import (
	"fmt"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/scorer"
)

// Policy ranks candidates: text, which is a name or AIBrix's string form, or a
// list of parts.
type Policy struct {
	Text  string       `json:"-"`
	Parts []PolicyPart `json:"-"`
}

// PolicyPart is one rule and what it weighs.
type PolicyPart struct {
	// Policy is the rule's name. Required.
	Policy string `json:"policy"`

	// Weight of its score, which is from 0 to 1; 0 leaves the part out. Default: 1.
	Weight float64 `json:"weight,omitempty" default:"1"`

	// Params are the rule's parameters; docs/policies.md lists them. Default: the
	// rule's.
	Params map[string]Value `json:"params,omitempty"`
}

// Value is a string, a number or a boolean, as text.
type Value string

// Set reports whether the document has a policy here.
func (p *Policy) Set() bool { return p.Text != "" || p.Parts != nil }

// Compile makes the policy ready to pick with. A Policy of a valid Config gives
// no error.
func (p *Policy) Compile() (*scorer.Policy, error) {
	if p.Parts == nil {
		return scorer.Parse(p.Text)
	}
	compiled, problems := scorer.Compile(p.parts())
	if len(problems) > 0 {
		return nil, fmt.Errorf("%s: %s", problems[0].Field, problems[0].Message)
	}
	return compiled, nil
}

func (p *Policy) parts() []scorer.Part {
	parts := make([]scorer.Part, len(p.Parts))
	for i := range p.Parts {
		parts[i] = scorer.Part{Name: p.Parts[i].Policy, Weight: p.Parts[i].Weight, Params: map[string]string{}}
		for name, value := range p.Parts[i].Params {
			parts[i].Params[name] = string(value)
		}
	}
	return parts
}

// Guards are rules around every policy. They take endpoints out before it ranks
// them; one that would leave none is ignored.
type Guards struct {
	// Doubted sends no new request to an endpoint to which one could not connect,
	// or that broke one off, until a probe of its serving port was answered: some
	// milliseconds, 10s at most. Default: true.
	Doubted bool `json:"doubted,omitempty" default:"true"`

	// Wedged sends no new request to an endpoint that has work in flight and has
	// shown no token and no completion for 3s, and 2ms more for each prompt token it
	// has to read. Default: true.
	Wedged bool `json:"wedged,omitempty" default:"true"`

	// Pushback lowers an endpoint's share to a quarter for the second after it
	// answered 429 or 503. Default: true.
	Pushback bool `json:"pushback,omitempty" default:"true"`

	// OverloadVeto sends no new request to an endpoint whose last reading has 95 %
	// of its KV cache in use, or 32 requests waiting. Default: false.
	OverloadVeto bool `json:"overloadVeto,omitempty" default:"false"`

	// WarmUp sends one in eight of the requests whose prefix no endpoint holds to
	// those that hold little: true, false, or auto, which is true for policies on
	// prefixes. Default: auto.
	WarmUp Value `json:"warmUp,omitempty" default:"auto"`
}

// WarmUpFor says whether the guard is on for a policy.
func (g *Guards) WarmUpFor(p *scorer.Policy) bool {
	return g.WarmUp == "true" || g.WarmUp == "auto" && p.NeedsPrefix()
}

// PrefixCache is how prompts are compared.
type PrefixCache struct {
	// BlockSize is the text of one block, 256 to 64KiB. 0 is the default: four bytes
	// for each token of a block of the engine's cache, where its metrics tell it, and
	// at least 256.
	BlockSize Size `json:"blockSize,omitempty" default:"0"`

	// BlocksPerEndpoint bounds what is remembered of one endpoint, 0 to 10000000. 0
	// is the default: what its cache holds, where its metrics tell it, else 31250,
	// and all endpoints together in a quarter of runtime.memoryLimit at most.
	BlocksPerEndpoint int `json:"blocksPerEndpoint,omitempty" default:"0"`
}

// Sessions say which requests belong together: the header x-session-id, else
// x-session-affinity, else the cookie, else prompt_cache_key in the body.
type Sessions struct {
	// Cookie is the name of a cookie. Default: none.
	Cookie string `json:"cookie,omitempty"`
}

// CostProfile is what was measured of one kind of endpoint: slo-least-load and
// slo-pack-load price requests by it.
type CostProfile struct {
	// Model that requests name. Default: any.
	Model string `json:"model,omitempty"`

	// Hardware is the label model.aibrix.ai/hardware of the endpoints. Default: any.
	Hardware string `json:"hardware,omitempty"`

	// Points are measured sizes; the nearest one counts. At least one is required.
	Points []CostPoint `json:"points"`
}

// CostPoint is one size of request.
type CostPoint struct {
	// PromptTokens of a request, 0 to 10000000. Default: 0.
	PromptTokens int `json:"promptTokens,omitempty" default:"0"`

	// OutputTokens of a request, 0 to 10000000. Default: 0.
	OutputTokens int `json:"outputTokens,omitempty" default:"0"`

	// Capacity is how many such requests one endpoint serves at the same time within
	// its goals: requests per second times seconds per request. Above 0. Required.
	Capacity float64 `json:"capacity"`
}

// CostList makes the price list of the profiles.
func (c *Config) CostList() *scorer.Costs {
	profiles := make([]scorer.Profile, len(c.Profiles))
	for i, p := range c.Profiles {
		profiles[i] = scorer.Profile{Model: p.Model, Hardware: p.Hardware}
		for _, at := range p.Points {
			profiles[i].Points = append(profiles[i].Points, scorer.Point{
				Prompt: int64(at.PromptTokens), Output: int64(at.OutputTokens), Capacity: at.Capacity,
			})
		}
	}
	return scorer.NewCosts(profiles)
}

func (c *checker) policy(path string, p *Policy) {
	if p.Parts == nil {
		names := scorer.Mentioned(p.Text)
		for _, name := range names {
			if !slices.Contains(scorer.Valid(), name) {
				c.oneOf(path, "policy", name, scorer.Names())
				return
			}
		}
		if _, err := scorer.Parse(p.Text); err != nil {
			c.fail(path, "%v", err)
		}
		return
	}
	known := true
	for i := range p.Parts {
		if at := indexPath(path, i) + ".policy"; p.Parts[i].Policy == "" {
			c.fail(at, "is missing: name a policy, such as least-request")
			known = false
		} else if !slices.Contains(scorer.Valid(), p.Parts[i].Policy) {
			c.oneOf(at, "policy", p.Parts[i].Policy, scorer.Names())
			known = false
		}
	}
	if !known {
		return
	}
	_, problems := scorer.Compile(p.parts())
	for _, problem := range problems {
		c.fail(path+problem.Field, "%s", problem.Message)
	}
}

func (c *checker) scoring(cfg *Config) {
	c.policy("policy", &cfg.Policy)
	for i, name := range cfg.AllowedPolicies {
		if !slices.Contains(scorer.Valid(), name) {
			c.oneOf(indexPath("allowedPolicies", i), "policy", name, scorer.Names())
		}
	}
	c.oneOf("guards.warmUp", "value", string(cfg.Guards.WarmUp), []string{"auto", "true", "false"})
	inRange(c, "slowStart", cfg.SlowStart, 0, 10*time.Minute)
	if size := cfg.PrefixCache.BlockSize; size != 0 {
		inRange(c, "prefixCache.blockSize", size, scorer.MinBlockBytes, 64<<10)
	}
	if cookie := cfg.Sessions.Cookie; cookie != "" && !headerNameRule.MatchString(cookie) {
		c.fail("sessions.cookie", "%q is not a cookie name", cookie)
	}
	const most = 10_000_000
	inRange(c, "prefixCache.blocksPerEndpoint", cfg.PrefixCache.BlocksPerEndpoint, 0, most)
	inRange(c, "explain.sample", cfg.Explain.Sample, 0, 1)
	for i, p := range cfg.Profiles {
		at := indexPath("profiles", i)
		if len(p.Points) == 0 {
			c.fail(at+".points", "is missing: at least one measured size is needed")
		}
		for j, point := range p.Points {
			at := indexPath(at+".points", j)
			inRange(c, at+".promptTokens", point.PromptTokens, 0, most)
			inRange(c, at+".outputTokens", point.OutputTokens, 0, most)
			if !(point.Capacity > 0 && point.Capacity <= 1e9) {
				c.fail(at+".capacity", "is %s: more than 0 is wanted", text(point.Capacity))
			}
		}
	}
}
