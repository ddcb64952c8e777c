package scorer

import (
	"math"

	"github.com/shuntproxy/shunt/internal/pool"
)

// Profile says how many requests of some sizes one endpoint serves at the same
// time within its goals, as measured.
type Profile struct {
	// Model and Hardware select endpoints; "" is any.
	Model, Hardware string
	Points          []Point
}

// Point is one measured size.
type Point struct {
	// Prompt and Output are tokens.
	Prompt, Output int64
	// Capacity is the number of such requests at the same time, above 0. By
	// Little's law it is requests per second times the seconds of one.
	Capacity float64
}

// Costs prices requests in normalised load, 1 being an endpoint's capacity. It
// is immutable; the nil one prices by tokens.
type Costs struct{ profiles []Profile }

const (
	// defaultCapacityTokens is an endpoint's capacity where neither a profile nor
	// the engine says one.
	defaultCapacityTokens = 131072
	// defaultOutputTokens is what a request is taken to generate at most.
	defaultOutputTokens = 256
)

// NewCosts makes a price list. The first profile that fits an endpoint counts.
func NewCosts(profiles []Profile) *Costs {
	return &Costs{profiles: profiles}
}

// of is the price of a request on the endpoint at a position.
func (c *Costs) of(r *Request, s *pool.Snapshot, i int32) float64 {
	if r.Model == "" && r.Prompt == 0 {
		return 0 // it generates nothing
	}
	output := float64(defaultOutputTokens)
	if r.Output >= 0 {
		output = min(output, float64(r.Output))
	}
	if c != nil {
		for at := range c.profiles {
			p := &c.profiles[at]
			if (p.Model == "" || p.Model == r.Model) && (p.Hardware == "" || p.Hardware == s.Endpoints[i].Hardware) {
				return 1 / p.capacity(float64(r.Prompt), output)
			}
		}
	}
	room := s.KVTokens(i)
	if room <= 0 {
		room = defaultCapacityTokens
	}
	return (float64(r.Prompt) + output) / room
}

// capacity is that of the nearest point by the logarithms of both sizes.
func (p *Profile) capacity(prompt, output float64) float64 {
	best, at := math.Inf(1), 0
	for i := range p.Points {
		dp := math.Log2((prompt + 1) / float64(p.Points[i].Prompt+1))
		do := math.Log2((output + 1) / float64(p.Points[i].Output+1))
		if d := dp*dp + do*do; d < best {
			best, at = d, i
		}
	}
	return p.Points[at].Capacity
}
