package config

import (
	"net/url"
	"slices"
	"strings"
)

func (c *checker) paths(p Paths) {
	for i, prefix := range p.Prefixes {
		at := indexPath("paths.prefixes", i)
		parsed, err := url.Parse(prefix)
		switch {
		case !strings.HasPrefix(prefix, "/") || err != nil || parsed.Path != prefix:
			c.fail(at, "%q is not the beginning of a path: it starts with /, and has no query, escapes or spaces", prefix)
		case strings.Trim(prefix, "/") == "":
			c.fail(at, "is only a slash: the API's own paths need no prefix")
		}
	}
	c.oneOf("paths.unknown", "value", p.Unknown, []string{UnknownRoute, UnknownReject})
}

const maxWeight = 1_000_000

func (c *checker) rewrites(rules []Rewrite, models Models) {
	aliases := map[string]string{}
	for i, known := range models.Known {
		for j, alias := range known.Aliases {
			aliases[alias] = indexPath(indexPath("models.known", i)+".aliases", j)
		}
	}
	exact, generic := map[string]string{}, ""
	for i, rule := range rules {
		at := indexPath("rewrites", i)
		if len(rule.Matches) == 0 {
			if generic != "" {
				c.fail(at, "is never used: %s matches every model too and comes first", generic)
			}
			generic = at
		}
		for j, match := range rule.Matches {
			at := indexPath(at+".matches", j) + ".model"
			switch {
			case match.Model == "":
				c.fail(at, "is missing: name the model, or leave matches out to match all")
			case exact[match.Model] != "":
				c.fail(at, "%q is matched before, at %s", match.Model, exact[match.Model])
			case aliases[match.Model] != "":
				c.fail(at, "%q is also an alias, at %s: keep one of them", match.Model, aliases[match.Model])
			default:
				exact[match.Model] = at
			}
		}
		c.targets(at, rule.Targets)
	}
}

func (c *checker) targets(path string, targets []RewriteTarget) {
	if len(targets) == 0 {
		c.fail(path+".targets", "is missing: name at least one model to ask for")
	}
	weighted := slices.ContainsFunc(targets, func(t RewriteTarget) bool { return t.Weight != 0 })
	for j, target := range targets {
		at := indexPath(path+".targets", j)
		if target.Model == "" {
			c.fail(at+".model", "is missing: name the model")
		}
		switch {
		case target.Weight == 0 && weighted:
			c.fail(at+".weight", "is missing, but another target of the rule has one: give each target a weight, or none")
		case weighted:
			inRange(c, at+".weight", target.Weight, 1, maxWeight)
		}
	}
}
