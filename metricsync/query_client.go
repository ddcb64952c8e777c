package metricsync

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode"

	"github.com/prometheus/client_golang/api"
	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"

	"github.com/shuntproxy/shunt/internal/plainfile"
)

// maxAnswer is the largest answer to one query that is read: some 50,000
// series.
const maxAnswer = 8 << 20

var errLargeAnswer = fmt.Errorf("the answer is larger than %d bytes", maxAnswer)

// queryClient asks one Prometheus server. Its files are read anew for each
// round, so that a rotated secret needs no restart; the connections are kept as
// long as nothing changes.
type queryClient struct {
	signature [sha256.Size]byte
	transport *http.Transport
	api       promv1.API
}

// refresh makes the client that cfg and the files it names ask for.
func (c *queryClient) refresh(cfg *QueryConfig) error {
	var ca, cert, key, password, token []byte
	for _, f := range []struct {
		path string
		into *[]byte
	}{{cfg.TLS.CAFile, &ca}, {cfg.TLS.CertFile, &cert}, {cfg.TLS.KeyFile, &key}, {cfg.PasswordFile, &password}, {cfg.BearerTokenFile, &token}} {
		if f.path == "" {
			continue
		}
		b, err := plainfile.Read(f.path, maxSecret)
		if err != nil {
			return err
		}
		*f.into = b
	}
	// Editors and Secrets end a file with a newline, which no secret has.
	password, token = bytes.TrimRight(password, "\r\n"), bytes.TrimSpace(token)
	h := sha256.New()
	_, _ = fmt.Fprintf(h, "%q", []any{cfg.URL, cfg.TLS, cfg.Username, ca, cert, key, password, token})
	var signature [sha256.Size]byte
	h.Sum(signature[:0])
	if c.api != nil && signature == c.signature {
		return nil
	}

	base, err := url.Parse(cfg.URL)
	if err != nil {
		return err
	}
	conf := &tls.Config{ServerName: cfg.TLS.ServerName, InsecureSkipVerify: cfg.TLS.InsecureSkipVerify, MinVersion: tls.VersionTLS12}
	if ca != nil {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(ca) {
			return fmt.Errorf("%s holds no PEM certificate", cfg.TLS.CAFile)
		}
	}
	if cert != nil {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return fmt.Errorf("%s with %s: %w", cfg.TLS.CertFile, cfg.TLS.KeyFile, err)
		}
		conf.Certificates = []tls.Certificate{pair}
	}
	// No proxy: the environment is not configuration.
	transport := &http.Transport{
		DialContext: (&net.Dialer{}).DialContext, TLSClientConfig: conf, ForceAttemptHTTP2: true,
		MaxIdleConns: queriesAtOnce, MaxIdleConnsPerHost: queriesAtOnce, IdleConnTimeout: 2 * time.Minute,
	}
	client, err := api.NewClient(api.Config{Address: cfg.URL, Client: &http.Client{
		Transport: &queryTransport{next: transport, host: base.Host, username: cfg.Username, password: string(password), token: string(token)},
		CheckRedirect: func(req *http.Request, via []*http.Request) error {
			if req.URL.Host != base.Host || len(via) > 3 {
				return http.ErrUseLastResponse
			}
			return nil
		},
	}})
	if err != nil {
		return err
	}
	c.close()
	c.signature, c.transport, c.api = signature, transport, promv1.NewAPI(client)
	return nil
}

func (c *queryClient) close() {
	if c.transport != nil {
		c.transport.CloseIdleConnections()
	}
}

// queryTransport adds the credentials and bounds the answers.
type queryTransport struct {
	next                            http.RoundTripper
	host, username, password, token string
}

func (t *queryTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Host == t.host { // nobody else is told
		req = req.Clone(req.Context())
		switch {
		case t.token != "":
			req.Header.Set("Authorization", "Bearer "+t.token)
		case t.username != "":
			req.SetBasicAuth(t.username, t.password)
		}
	}
	resp, err := t.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxAnswer}
	return resp, nil
}

type boundedBody struct {
	io.ReadCloser
	left int64
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errLargeAnswer
	}
	return n, err
}

// failure says what kind of failure an error of a query is, in words that stay
// the same while it lasts, and whether no other query needs to be tried.
func failure(err error) (kind string, all bool) {
	answer, answered := errors.AsType[*promv1.Error](err)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "it does not answer in time", true
	case errors.Is(err, errLargeAnswer):
		return errLargeAnswer.Error(), false
	case answered:
		// A query of its own can be wrong, or cost too much; all else is the
		// server's state, or not a Prometheus server.
		own := answer.Type == promv1.ErrBadData || answer.Type == promv1.ErrExec || answer.Type == promv1.ErrTimeout
		return brief(string(answer.Type) + ": " + answer.Msg), !own
	default:
		// Ports of our own side differ from one attempt to the next.
		if op, ok := errors.AsType[*net.OpError](err); ok {
			return fmt.Sprintf("%s %s: %v", op.Op, op.Net, op.Err), true
		}
		return brief(err.Error()), true
	}
}

// brief is a server's text as a log line may hold it.
func brief(s string) string {
	const most = 300
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}
