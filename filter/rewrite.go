package filter

import (
	"slices"
	"strconv"
	"strings"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/openai"
	"github.com/shuntproxy/shunt/internal/pool"
)

// rewriter says which model an engine is asked for. It is immutable; the zero
// value changes nothing.
type rewriter struct {
	aliases map[string]string
	exact   map[string]*rewriteRule
	generic *rewriteRule // for all models, and for requests without one
}

// rewriteRule is a choice among targets: the first whose bound is above a number
// drawn below the last bound.
type rewriteRule struct {
	targets []string
	bounds  []uint64 // sums of the weights, ascending
}

func newRewriter(cfg *config.Config) *rewriter {
	w := &rewriter{aliases: map[string]string{}, exact: map[string]*rewriteRule{}}
	for _, known := range cfg.Models.Known {
		for _, alias := range known.Aliases {
			w.aliases[alias] = known.Name
		}
	}
	for i := range cfg.Rewrites {
		rule, sum := new(rewriteRule), uint64(0)
		for _, t := range cfg.Rewrites[i].Targets {
			sum += uint64(max(t.Weight, 1)) // all have one, or none has
			rule.targets, rule.bounds = append(rule.targets, t.Model), append(rule.bounds, sum)
		}
		if len(cfg.Rewrites[i].Matches) == 0 {
			w.generic = rule
		}
		for _, m := range cfg.Rewrites[i].Matches {
			w.exact[m.Model] = rule
		}
	}
	return w
}

// supplies reports whether a request that names no model is given one.
func (w *rewriter) supplies(header string) bool { return header != "" || w.generic != nil }

// mayRewrite reports whether there is any model that is changed.
func (w *rewriter) mayRewrite(header string) bool {
	return header != "" || w.generic != nil || len(w.exact)+len(w.aliases) > 0
}

// target returns the model to ask an engine for, where a client asked for one
// ("" for none). A header is the client's explicit override and beats the
// rules. A rule for the model beats the one for all models. chance is a random
// number: a rule draws for each request anew.
func (w *rewriter) target(asked, header string, chance uint64) string {
	target := asked
	if header != "" {
		target = header
	} else if rule := w.rule(asked); rule != nil {
		target = rule.pick(chance)
	}
	if name, ok := w.aliases[target]; ok {
		return name
	}
	return target
}

func (w *rewriter) rule(asked string) *rewriteRule {
	if rule := w.exact[asked]; rule != nil {
		return rule
	}
	if name, ok := w.aliases[asked]; ok {
		if rule := w.exact[name]; rule != nil {
			return rule
		}
	}
	return w.generic
}

func (r *rewriteRule) pick(chance uint64) string {
	if len(r.targets) == 1 {
		return r.targets[0]
	}
	at := chance % r.bounds[len(r.bounds)-1] // weights are small: the remainder is fair enough
	i, found := slices.BinarySearch(r.bounds, at)
	if found {
		i++
	}
	return r.targets[i]
}

// knows reports whether the configuration names a model that clients ask for.
func (w *rewriter) knows(name string) bool {
	_, alias := w.aliases[name]
	return alias || w.exact[name] != nil
}

// names yields the models that only the configuration makes: aliases, and those
// that rules match.
func (w *rewriter) names(yield func(string) bool) {
	for name := range w.aliases {
		if !yield(name) {
			return
		}
	}
	for name := range w.exact {
		if !yield(name) {
			return
		}
	}
}

// setModels notes the model that the client asked for and the one that the
// engine gets, in memory of our own, and reports whether they differ.
func (r *Request) setModels(snap *pool.Snapshot, rewriter *rewriter, asked, header string, chance uint64) (rewritten bool) {
	r.asked = ownName(snap, asked)
	target := rewriter.target(asked, header, chance)
	if target == asked {
		r.model = r.asked
		return false
	}
	r.model = ownName(snap, target)
	return true
}

// missing is the message for a model that does not exist, and says where its
// name comes from.
func (r *Request) missing() string {
	if r.model == r.asked {
		return "model " + quote(r.model) + " does not exist"
	}
	if r.asked == "" {
		return "model " + quote(r.model) + ", which this request was given, does not exist"
	}
	return "model " + quote(r.model) + ", to which " + quote(r.asked) + " was rewritten, does not exist"
}

// readRewrite notes the model that the client asks to be given instead of the
// one its request names, or answers.
func (r *Request) readRewrite(h *Head, v *Verdict) bool {
	header := h.rewrite()
	if header == "" {
		return true
	}
	if len(header) > openai.MaxModel {
		r.refuse(400, string(openai.CodeInvalidValue), headerNames[hdrModelRewrite]+" is longer than "+
			strconv.Itoa(openai.MaxModel)+" bytes", headerNames[hdrModelRewrite], v)
		return false
	}
	r.identity.wish().rewrite = strings.Clone(header)
	return true
}
