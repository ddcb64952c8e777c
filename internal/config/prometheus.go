package config

import (
	"net/url"
	"regexp"
	"time"
)

var (
	labelNameRule = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
	// A string as in PromQL, in double or single quotes.
	matcher      = `[a-zA-Z_][a-zA-Z0-9_]*\s*(=|!=|=~|!~)\s*("([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*')`
	selectorRule = regexp.MustCompile(`^\s*` + matcher + `(\s*,\s*` + matcher + `)*\s*$`)
)

func (c *checker) prometheus(p Prometheus) {
	const at = "prometheus."
	inRange(c, at+"interval", p.Interval, 100*time.Millisecond, 10*time.Minute)
	inRange(c, at+"timeout", p.Timeout, 10*time.Millisecond, time.Minute)
	if p.Selector != "" && !selectorRule.MatchString(p.Selector) {
		c.fail(at+"selector", "%q is not a list of PromQL label matchers, such as job=\"pods\", without braces", p.Selector)
	}
	for _, l := range []struct{ path, name string }{{at + "labels.instance", p.Labels.Instance}, {at + "labels.model", p.Labels.Model}} {
		if !labelNameRule.MatchString(l.name) {
			c.fail(l.path, "%q is not a label name: letters, digits and _", l.name)
		}
	}
	if p.Labels.Instance == p.Labels.Model {
		c.fail(at+"labels.model", "is the same as %slabels.instance", at)
	}
	if (p.TLS.CertFile == "") != (p.TLS.KeyFile == "") {
		c.fail(at+"tls", "has one of certFile and keyFile: both are needed")
	}
	if b := p.BasicAuth; b != nil {
		if b.Username == "" {
			c.fail(at+"basicAuth.username", "is missing")
		}
		if b.PasswordFile == "" {
			c.fail(at+"basicAuth.passwordFile", "is missing: name the file that holds the password")
		}
		if p.BearerTokenFile != "" {
			c.fail(at+"bearerTokenFile", "stands beside %sbasicAuth: a query carries one of them", at)
		}
	}
	if p.URL == "" {
		return
	}
	u, err := url.Parse(p.URL)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		c.fail(at+"url", "%q is not a URL such as http://prometheus:9090", p.URL)
	case u.User != nil:
		c.fail(at+"url", "holds credentials: use %sbasicAuth", at)
	case u.RawQuery != "" || u.Fragment != "":
		c.fail(at+"url", "%q has a query or a fragment: end it before /api/v1", p.URL)
	}
}
