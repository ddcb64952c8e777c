package metricsync

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/shuntproxy/shunt/internal/plainfile"
)

// Access is how engines let themselves be asked: for metrics, for models and for
// their health.
type Access struct {
	// TLS asks over HTTPS. CA is a PEM file with the authorities that count, in
	// place of the system's. ServerName is the name in the engines' certificates,
	// the IP if empty. SkipVerify takes any certificate.
	TLS        bool
	CA         string
	ServerName string
	SkipVerify bool
	// TokenFile holds a bearer token, sent with each request.
	TokenFile string
	// Headers are sent with each request, by name.
	Headers map[string]string
}

// maxSecret bounds a file with a token, a key or authorities.
const maxSecret = 4 << 20

// rereadAfter is how old what was read of a file may be.
const rereadAfter = 10 * time.Second

// credentials are what Access names, read from its files and read again while
// they are in use: tokens and authorities are replaced under way. Safe for
// concurrent use.
type credentials struct {
	log func(format string, args ...any)

	mu      sync.Mutex
	of      *Config // whose files were read
	checked time.Time
	token   string
	tls     *tls.Config
	said    string // the problem that was logged last
}

// read returns what cfg asks for. What can't be read is what it was before, and
// logged; it is an error if it never could.
func (c *credentials) read(cfg *Config, now time.Time) (token string, config *tls.Config, err error) {
	a := &cfg.Access
	if !a.TLS && a.TokenFile == "" {
		return "", nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of != cfg || now.Sub(c.checked) >= rereadAfter || now.Before(c.checked) {
		c.refresh(cfg)
		c.checked = now
	}
	if a.TokenFile != "" && c.token == "" || a.TLS && c.tls == nil {
		return "", nil, errors.New(c.said)
	}
	return c.token, c.tls, nil
}

func (c *credentials) refresh(cfg *Config) {
	if c.of == nil || c.of.Access.TokenFile != cfg.Access.TokenFile {
		c.token = ""
	}
	if c.of == nil || !sameTLS(&c.of.Access, &cfg.Access) {
		c.tls = nil
	}
	c.of = cfg
	var problems []error
	if file := cfg.Access.TokenFile; file != "" {
		if token, err := readToken(file); err == nil {
			c.token = token
		} else {
			problems = append(problems, fmt.Errorf("scrape.bearerTokenFile: %w", err))
		}
	}
	if cfg.Access.TLS {
		if config, err := tlsConfig(&cfg.Access, c.tls); err == nil {
			c.tls = config
		} else {
			problems = append(problems, fmt.Errorf("scrape.tls.caFile: %w", err))
		}
	}
	said := ""
	if err := errors.Join(problems...); err != nil {
		said = err.Error()
	}
	if said != c.said && said != "" {
		c.log("%s", said)
	}
	c.said = said
}

func sameTLS(a, b *Access) bool {
	return a.TLS == b.TLS && a.CA == b.CA && a.ServerName == b.ServerName && a.SkipVerify == b.SkipVerify
}

func readToken(file string) (string, error) {
	data, err := plainfile.Read(file, maxSecret)
	if err != nil {
		return "", err
	}
	token := bytes.TrimSpace(data)
	if len(token) == 0 {
		return "", fmt.Errorf("%s is empty", file)
	}
	for _, b := range token {
		if b <= ' ' || b >= 0x7f {
			return "", fmt.Errorf("%s holds more than one token", file)
		}
	}
	return string(token), nil
}

// tlsConfig makes the settings of a; last is returned if nothing changed, since
// it holds sessions to resume.
func tlsConfig(a *Access, last *tls.Config) (*tls.Config, error) {
	c := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: a.ServerName, InsecureSkipVerify: a.SkipVerify,
		NextProtos: []string{"http/1.1"}, ClientSessionCache: tls.NewLRUClientSessionCache(0),
	}
	if a.CA != "" {
		pem, err := plainfile.Read(a.CA, maxSecret)
		if err != nil {
			return nil, err
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate in PEM", a.CA)
		}
	}
	if last != nil && (a.CA == "" || last.RootCAs.Equal(c.RootCAs)) {
		return last, nil
	}
	return c, nil
}

// secured returns dial, with TLS where config asks for it.
func (s *Syncer) secured(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := s.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	_, config, err := s.credentials.read(s.cfg.Load(), time.Now())
	if err != nil || config == nil {
		if err != nil {
			_ = conn.Close()
			return nil, err
		}
		return conn, nil
	}
	if config.ServerName == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			_ = conn.Close()
			return nil, err
		}
		config = config.Clone()
		config.ServerName = host
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("TLS with %s: %w", address, err)
	}
	return secure, nil
}

// headers returns the lines that Access adds to each request.
func (s *Syncer) headers(cfg *Config) ([]byte, error) {
	token, _, err := s.credentials.read(cfg, time.Now())
	if err != nil {
		return nil, err
	}
	var b []byte
	for _, name := range cfg.headerNames {
		b = append(append(append(append(b, name...), ": "...), cfg.Access.Headers[name]...), "\r\n"...)
	}
	if token != "" {
		b = append(append(append(b, "Authorization: Bearer "...), token...), "\r\n"...)
	}
	return b, nil
}
