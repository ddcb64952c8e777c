package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/shuntproxy/shunt/internal/pool"
)

// DNSOptions say what is looked up.
type DNSOptions struct {
	Names []DNSName
	// Servers are asked in order, ip:port; none means those of ResolvConf.
	Servers []netip.AddrPort
	// ResolvConf is read at each start for servers and search domains.
	ResolvConf string
	// Timeout of one question to one server.
	Timeout time.Duration
	// MinInterval and MaxInterval bound the time between two look-ups of a name,
	// which is the least TTL of its answer. A failed look-up is tried again after
	// RetryInterval.
	MinInterval, MaxInterval, RetryInterval time.Duration
	// Log gets one line per change, or is nil.
	Log func(level slog.Level, msg string)
	// Fault is told of panics.
	Fault Fault
}

// DNSName is one name.
type DNSName struct {
	Name string
	// SRV asks for SRV records, which have ports; else A and AAAA are asked for.
	SRV bool
	// Port of A and AAAA endpoints, 0 for that of the labels.
	Port uint16
	// Labels of all its endpoints, valid for pool.ParseTarget.
	Labels map[string]string
}

// DNS is a source of endpoints in DNS. A name that can't be looked up keeps its
// last good addresses; one that does not exist, or has none, has no endpoints.
type DNS struct {
	options DNSOptions
	log     func(level slog.Level, msg string)

	// mu protects status.
	mu     sync.Mutex
	status Status
}

// NewDNS returns a source that asks once it runs.
func NewDNS(o DNSOptions) *DNS {
	d := &DNS{options: o, log: o.Log}
	if d.log == nil {
		d.log = func(slog.Level, string) {}
	}
	if d.options.ResolvConf == "" {
		d.options.ResolvConf = "/etc/resolv.conf"
	}
	names := make([]string, len(o.Names))
	for i, n := range o.Names {
		names[i] = n.Name
	}
	d.status.Where = strings.Join(names, ", ")
	return d
}

// Status implements Source.
func (d *DNS) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status
}

// dnsFound is the outcome of one look-up.
type dnsFound struct {
	name    int
	targets []pool.Target
	ttl     time.Duration
	err     error
}

// dnsKnown is what is known of one name; Run's goroutine owns it.
type dnsKnown struct {
	targets []pool.Target
	good    bool // once
	err     error
}

// Run implements Source.
func (d *DNS) Run(ctx context.Context, deliver func(Set)) error {
	found := make(chan dnsFound)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer wg.Wait()
	defer cancel() // also where this panics
	for i := range d.options.Names {
		wg.Go(func() { d.follow(ctx, i, found) })
	}
	known := make([]dnsKnown, len(d.options.Names))
	var last *Set
	for {
		select {
		case <-ctx.Done():
			return nil
		case f := <-found:
			d.take(&known[f.name], f)
		}
		set, ready := merged(known)
		d.note(known, len(set.Targets), ready)
		if !ready || last != nil && last.State == set.State && slices.Equal(last.Targets, set.Targets) {
			continue
		}
		first := last == nil
		last = &Set{Targets: slices.Clone(set.Targets), State: set.State}
		d.delivered(len(set.Targets), first)
		deliver(set)
	}
}

// follow looks one name up, again and again.
func (d *DNS) follow(ctx context.Context, i int, found chan<- dnsFound) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		targets, ttl, err := d.guarded(ctx, &d.options.Names[i])
		select {
		case <-ctx.Done():
			return
		case found <- dnsFound{i, targets, ttl, err}:
		}
		wait := min(max(ttl, d.options.MinInterval), d.options.MaxInterval)
		if err != nil {
			wait = d.options.RetryInterval
		}
		timer.Reset(wait)
	}
}

// guarded keeps an answer that nobody thought of from ending Envoy.
func (d *DNS) guarded(ctx context.Context, name *DNSName) (targets []pool.Target, ttl time.Duration, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("%s: %w", name.Name, d.options.Fault.caught(cause))
		}
	}()
	return d.lookUp(ctx, name)
}

func (d *DNS) take(k *dnsKnown, f dnsFound) {
	name := d.options.Names[f.name].Name
	switch {
	case f.err != nil && k.err == nil:
		d.log(slog.LevelWarn, fmt.Sprintf("dns: %v; keeping the last good set of %d endpoints", f.err, len(k.targets)))
	case f.err == nil && k.err != nil:
		d.log(slog.LevelInfo, fmt.Sprintf("dns: %s is answered again", name))
	}
	if f.err == nil {
		if k.good && len(k.targets) > 0 && len(f.targets) == 0 {
			d.log(slog.LevelWarn, fmt.Sprintf("dns: %s has no address any more", name))
		}
		k.targets, k.good = f.targets, true
	}
	k.err = f.err
}

// merged is the set of all names, the first to name an address winning. It is
// ready once each name was answered.
func merged(known []dnsKnown) (set Set, ready bool) {
	seen := make(map[netip.AddrPort]struct{})
	set.Targets, ready = []pool.Target{}, true
	for _, k := range known {
		ready = ready && k.good
		if k.err != nil {
			set.State = LastGood
		}
		for _, t := range k.targets {
			if _, dup := seen[t.Addr]; !dup {
				seen[t.Addr] = struct{}{}
				set.Targets = append(set.Targets, t)
			}
		}
	}
	return set, ready
}

func (d *DNS) note(known []dnsKnown, endpoints int, ready bool) {
	var errs, passed []string
	for i, k := range known {
		switch {
		case k.err != nil:
			errs = append(errs, k.err.Error())
		case k.good && len(k.targets) == 0 && len(passed) < maxPassed:
			passed = append(passed, d.options.Names[i].nothing())
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if ready {
		d.status.Endpoints = endpoints
	}
	d.status.Passed = passed
	d.status.setError(strings.Join(errs, "; "), time.Now())
}

func (d *DNS) delivered(endpoints int, first bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status.Endpoints, d.status.Loaded = endpoints, time.Now()
	if !first {
		d.status.Changes++
	}
}

// setError notes why the source can't tell what there is, "" if it can.
func (s *Status) setError(msg string, now time.Time) {
	switch {
	case msg == "":
		s.Since = time.Time{}
	case s.Error == "":
		s.Since = now
		s.Failures++
	}
	s.Error = msg
}

// lookUp asks for the endpoints of one name, in order of address.
func (d *DNS) lookUp(ctx context.Context, name *DNSName) ([]pool.Target, time.Duration, error) {
	r, err := d.newResolver()
	if err != nil {
		return nil, 0, err
	}
	targets := map[netip.AddrPort]pool.Target{}
	add := func(addr netip.AddrPort, pod string) {
		labels := maps.Clone(name.Labels)
		delete(labels, pool.LabelPort) // it is in addr
		t, problems := pool.ParseTarget(addr.String(), labels, pod)
		for _, p := range problems {
			if p.Field == "address" { // 0.0.0.0 and the like
				return
			}
		}
		t.Source = "dns"
		targets[t.Addr] = t
	}
	var ttl time.Duration
	if name.SRV {
		ttl, err = r.srv(ctx, name.Name, add)
	} else {
		var addrs []netip.Addr
		addrs, ttl, err = r.addresses(ctx, name.Name)
		for _, ip := range addrs {
			add(netip.AddrPortFrom(ip, name.port()), "")
		}
	}
	if err != nil {
		return nil, 0, err
	}
	return slices.SortedFunc(maps.Values(targets), func(a, b pool.Target) int { return a.Addr.Compare(b.Addr) }), ttl, nil
}

// nothing says what a name without endpoints lacks.
func (n *DNSName) nothing() string {
	if n.SRV {
		return n.Name + " has no SRV record with an address"
	}
	return n.Name + " has no A or AAAA record (names in /etc/hosts are not read)"
}

func (n *DNSName) port() uint16 {
	if n.Port != 0 {
		return n.Port
	}
	t, _ := pool.ParseTarget("127.0.0.1", n.Labels, "") // its label's, or the default
	return t.Addr.Port()
}

// resolver asks the servers of one moment.
type resolver struct {
	servers []string
	conf    *dns.ClientConfig
	timeout time.Duration
	fault   Fault
}

func (d *DNS) newResolver() (*resolver, error) {
	r := &resolver{timeout: d.options.Timeout, fault: d.options.Fault, conf: &dns.ClientConfig{Ndots: 1}}
	conf, err := dns.ClientConfigFromFile(d.options.ResolvConf)
	if err == nil {
		r.conf = conf
	} else if len(d.options.Servers) == 0 {
		return nil, fmt.Errorf("no server to ask: %w", err)
	}
	for _, s := range d.options.Servers {
		r.servers = append(r.servers, s.String())
	}
	if len(r.servers) == 0 {
		for _, s := range r.conf.Servers {
			ip, err := netip.ParseAddr(s)
			if err == nil {
				r.servers = append(r.servers, netip.AddrPortFrom(ip, 53).String())
			}
		}
	}
	if len(r.servers) == 0 {
		return nil, fmt.Errorf("no server to ask: %s names none", d.options.ResolvConf)
	}
	return r, nil
}

// addresses are those of A and AAAA records, none where the name does not exist.
func (r *resolver) addresses(ctx context.Context, name string) ([]netip.Addr, time.Duration, error) {
	type answer struct {
		addrs []netip.Addr
		ttl   time.Duration
		err   error
	}
	ask := func(kind uint16) (a answer) {
		defer func() { // one of the two runs in a goroutine of its own
			if cause := recover(); cause != nil {
				a = answer{err: fmt.Errorf("%s: %w", name, r.fault.caught(cause))}
			}
		}()
		msg, err := r.search(ctx, name, kind)
		if err != nil {
			return answer{err: err}
		}
		return answer{addressesOf(msg.Answer), leastTTL(msg), nil}
	}
	six := make(chan answer, 1)
	go func() { six <- ask(dns.TypeAAAA) }()
	a := ask(dns.TypeA)
	b := <-six
	// A server that can't say one of the two can't say what there is.
	if err := errors.Join(a.err, b.err); err != nil {
		return nil, 0, err
	}
	ttl := min(a.ttl, b.ttl)
	switch { // a kind that a name has none of must not set the pace
	case len(a.addrs) > 0 && len(b.addrs) == 0:
		ttl = a.ttl
	case len(b.addrs) > 0 && len(a.addrs) == 0:
		ttl = b.ttl
	}
	return append(a.addrs, b.addrs...), ttl, nil
}

func addressesOf(records []dns.RR) []netip.Addr {
	var addrs []netip.Addr
	for _, rr := range records {
		var ip netip.Addr
		switch rr := rr.(type) {
		case *dns.A:
			ip, _ = netip.AddrFromSlice(rr.A)
		case *dns.AAAA:
			ip, _ = netip.AddrFromSlice(rr.AAAA)
		}
		if ip.IsValid() {
			addrs = append(addrs, ip.Unmap())
		}
	}
	return addrs
}

// srv adds the addresses behind SRV records: those of the best priority, as
// their weights are for clients that balance load by nothing else.
func (r *resolver) srv(ctx context.Context, name string, add func(netip.AddrPort, string)) (time.Duration, error) {
	msg, err := r.search(ctx, name, dns.TypeSRV)
	if err != nil {
		return 0, err
	}
	ttl := leastTTL(msg)
	var records []*dns.SRV
	for _, rr := range msg.Answer {
		srv, ok := rr.(*dns.SRV)
		if !ok || srv.Target == "." || srv.Port == 0 {
			continue
		}
		if len(records) > 0 && srv.Priority < records[0].Priority {
			records = records[:0]
		}
		if len(records) == 0 || srv.Priority == records[0].Priority {
			records = append(records, srv)
		}
	}
	for _, srv := range records {
		var glue []dns.RR
		for _, rr := range msg.Extra {
			if strings.EqualFold(rr.Header().Name, srv.Target) {
				glue = append(glue, rr)
			}
		}
		addrs := addressesOf(glue)
		if len(addrs) > 0 {
			for _, rr := range glue {
				ttl = min(ttl, time.Duration(rr.Header().Ttl)*time.Second)
			}
		} else {
			var hostTTL time.Duration
			if addrs, hostTTL, err = r.addresses(ctx, srv.Target); err != nil {
				return 0, err
			}
			ttl = min(ttl, hostTTL)
		}
		for _, ip := range addrs {
			add(netip.AddrPortFrom(ip, srv.Port), strings.TrimSuffix(srv.Target, "."))
		}
	}
	return ttl, nil
}

// leastTTL is that of the answer, or of its SOA where there is none (RFC 2308).
func leastTTL(msg *dns.Msg) time.Duration {
	const none = 1<<32 - 1
	ttl := uint32(none)
	for _, rr := range msg.Answer {
		ttl = min(ttl, rr.Header().Ttl)
	}
	if len(msg.Answer) == 0 {
		for _, rr := range msg.Ns {
			if soa, ok := rr.(*dns.SOA); ok {
				ttl = min(ttl, soa.Hdr.Ttl, soa.Minttl)
			}
		}
		if ttl == none {
			ttl = 0 // nothing says how long it stays empty
		}
	}
	return time.Duration(ttl) * time.Second
}

// search asks for a name with the search domains of resolv.conf. The last
// candidate's answer counts where none exists.
func (r *resolver) search(ctx context.Context, name string, kind uint16) (*dns.Msg, error) {
	var msg *dns.Msg
	for _, candidate := range r.conf.NameList(name) {
		var err error
		if msg, err = r.ask(ctx, candidate, kind); err != nil {
			return nil, err
		}
		if msg.Rcode == dns.RcodeSuccess && len(msg.Answer) > 0 {
			return msg, nil
		}
	}
	if msg == nil {
		return nil, fmt.Errorf("%q is not a name that can be asked for", name)
	}
	return msg, nil
}

// ask puts one question to the servers, in order, until one can answer. That
// the name does not exist is an answer.
func (r *resolver) ask(ctx context.Context, name string, kind uint16) (*dns.Msg, error) {
	var errs []error
	for _, server := range r.servers {
		msg, err := r.exchange(ctx, server, name, kind)
		switch {
		case err != nil:
			errs = append(errs, err)
		case msg.Rcode == dns.RcodeSuccess || msg.Rcode == dns.RcodeNameError:
			return msg, nil
		default:
			errs = append(errs, fmt.Errorf("%s answers %s", server, dns.RcodeToString[msg.Rcode]))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, fmt.Errorf("%s %s: %w", name, dns.TypeToString[kind], errors.Join(errs...))
}

// udpSize is what passes without fragments on any path.
const udpSize = 1232

func (r *resolver) exchange(ctx context.Context, server, name string, kind uint16) (*dns.Msg, error) {
	question := new(dns.Msg)
	question.SetQuestion(dns.Fqdn(name), kind)
	question.SetEdns0(udpSize, false)
	client := dns.Client{Timeout: r.timeout, UDPSize: udpSize}
	msg, err := ask(ctx, &client, question, server)
	if err == nil && msg.Rcode == dns.RcodeFormatError { // a server that knows no EDNS
		question.Extra = nil
		msg, err = ask(ctx, &client, question, server)
	}
	if err == nil && msg.Truncated {
		client.Net = "tcp"
		msg, err = ask(ctx, &client, question, server)
	}
	if err == nil {
		err = nonsense(question, msg)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", server, err)
	}
	return msg, nil
}

// ask sends one question. The client's own Exchange looks at ctx only before it
// waits: a source that is stopped would hold up its pool until the timeout.
func ask(ctx context.Context, client *dns.Client, question *dns.Msg, server string) (*dns.Msg, error) {
	conn, err := client.DialContext(ctx, server)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	msg, _, err := client.ExchangeWithConnContext(ctx, question, conn)
	return msg, err
}

// nonsense is why a message is no answer to a question: what is none must not
// read as that there are no endpoints.
func nonsense(question, msg *dns.Msg) error {
	if msg.Rcode != dns.RcodeSuccess && msg.Rcode != dns.RcodeNameError {
		return nil // an error, whatever else it says
	}
	asked := question.Question[0]
	switch {
	case !msg.Response:
		return errors.New("sends a question and no answer")
	case len(msg.Question) != 1 || !strings.EqualFold(msg.Question[0].Name, asked.Name) || msg.Question[0].Qtype != asked.Qtype || msg.Question[0].Qclass != asked.Qclass:
		return errors.New("answers another question")
	case msg.Truncated:
		return errors.New("cuts its answer over TCP too")
	}
	referral := false
	for _, rr := range msg.Ns {
		switch rr.(type) {
		case *dns.SOA:
			return nil
		case *dns.NS:
			referral = true
		}
	}
	if referral && len(msg.Answer) == 0 && msg.Rcode == dns.RcodeSuccess && !msg.Authoritative {
		return errors.New("refers to other servers, where one is wanted that asks them itself")
	}
	return nil
}
