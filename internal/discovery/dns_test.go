package discovery

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/shuntproxy/shunt/internal/pool"
)

// zone is a DNS server of which tests change the records.
type zone struct {
	addr netip.AddrPort

	mu       sync.Mutex
	records  map[string][]dns.RR // by name and type, as in "a.test. A"
	extra    map[string][]dns.RR
	rcode    int  // for all questions
	deaf     bool // answers nothing
	noEDNS   bool
	overTCP  bool                    // answers over UDP are truncated
	raw      func(q *dns.Msg) []byte // if not nil, what is sent instead
	asked    map[string]int
	question chan string // size 100
}

func newZone(t *testing.T) *zone {
	t.Helper()
	z := &zone{records: map[string][]dns.RR{}, extra: map[string][]dns.RR{}, asked: map[string]int{}, question: make(chan string, 100)}
	var udp net.PacketConn
	var tcp net.Listener
	for range 20 { // the same port for both
		var err error
		if udp, err = net.ListenPacket("udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if tcp, err = net.Listen("tcp", udp.LocalAddr().String()); err == nil {
			break
		}
		_ = udp.Close()
	}
	z.addr = netip.MustParseAddrPort(udp.LocalAddr().String())
	for _, s := range []*dns.Server{{PacketConn: udp, Handler: z}, {Listener: tcp, Handler: z}} {
		started, done := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { defer close(done); _ = s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() {
			if err := s.Shutdown(); err != nil {
				t.Error(err)
			}
			<-done
		})
	}
	return z
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	key := q.Question[0].Name + " " + dns.TypeToString[q.Question[0].Qtype]
	z.mu.Lock()
	defer z.mu.Unlock()
	z.asked[key]++
	select {
	case z.question <- key:
	default:
	}
	if z.deaf {
		return
	}
	if z.raw != nil {
		_, _ = w.Write(z.raw(q))
		return
	}
	m := new(dns.Msg)
	m.SetReply(q)
	_, tcp := w.RemoteAddr().(*net.TCPAddr)
	switch {
	case z.noEDNS && q.IsEdns0() != nil:
		m.Rcode = dns.RcodeFormatError
	case z.rcode != 0:
		m.Rcode = z.rcode
	case z.overTCP && !tcp:
		m.Truncated = true
	default:
		m.Answer, m.Extra = z.records[key], z.extra[key]
		exists := slices.ContainsFunc([]string{"A", "AAAA", "SRV"}, func(kind string) bool {
			return len(z.records[q.Question[0].Name+" "+kind]) > 0
		})
		if !exists {
			m.Rcode = dns.RcodeNameError
		}
	}
	_ = w.WriteMsg(m)
}

func (z *zone) set(t *testing.T, records ...string) {
	t.Helper()
	z.mu.Lock()
	defer z.mu.Unlock()
	z.rcode, z.deaf, z.raw = 0, false, nil
	clear(z.records)
	for _, text := range records {
		rr, err := dns.NewRR(text)
		if err != nil {
			t.Fatal(err)
		}
		key := rr.Header().Name + " " + dns.TypeToString[rr.Header().Rrtype]
		z.records[key] = append(z.records[key], rr)
	}
}

func (z *zone) change(f func(z *zone)) {
	z.mu.Lock()
	defer z.mu.Unlock()
	f(z)
}

func (z *zone) fail(rcode int) { z.change(func(z *zone) { z.rcode = rcode }) }

// delivered collects what a source delivers.
type delivered struct {
	all  chan Set
	stop func()
}

func follow(t *testing.T, s Source) *delivered {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	got, done := &delivered{all: make(chan Set, 100)}, make(chan error, 1)
	go func() { done <- s.Run(ctx, func(s Set) { got.all <- s }) }()
	got.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(got.stop)
	return got
}

// wait waits for a set that reads like want.
func (s *delivered) wait(t *testing.T, want string) Set {
	t.Helper()
	last := "nothing"
	for deadline := time.After(20 * time.Second); ; {
		select {
		case set := <-s.all:
			if last = text(set); last == want {
				return set
			}
		case <-deadline:
			t.Fatalf("got %s, want %s", last, want)
		}
	}
}

func text(s Set) string {
	var parts []string
	for _, t := range s.Targets {
		part := t.Addr.String()
		if t.Pod != "" {
			part += "=" + t.Pod
		}
		parts = append(parts, part)
	}
	slices.Sort(parts)
	out := strings.Join(parts, " ")
	if s.State == LastGood {
		out += " last-good"
	}
	return strings.TrimSpace(out)
}

func fastDNS(z *zone, names ...DNSName) DNSOptions {
	return DNSOptions{
		Names: names, Servers: []netip.AddrPort{z.addr}, ResolvConf: "/nonexistent", Timeout: patience,
		MinInterval: 5 * time.Millisecond, MaxInterval: 10 * time.Millisecond, RetryInterval: 5 * time.Millisecond,
	}
}

func TestDNSAddresses(t *testing.T) {
	z := newZone(t)
	z.set(t, "a.test. 1 A 10.0.0.2", "a.test. 1 A 10.0.0.1", "a.test. 1 AAAA fd00::1", "a.test. 1 A 0.0.0.0")
	source := NewDNS(fastDNS(z, DNSName{Name: "a.test", Port: 9000, Labels: map[string]string{pool.LabelModel: "m", pool.LabelEngine: "sglang"}}))
	got := follow(t, source)
	set := got.wait(t, "10.0.0.1:9000 10.0.0.2:9000 [fd00::1]:9000")
	want := pool.Target{Addr: netip.MustParseAddrPort("10.0.0.1:9000"), Model: "m", Engine: pool.EngineSGLang, EngineLabel: "sglang", MetricPort: 8000, Source: "dns"}
	if set.Targets[0] != want {
		t.Errorf("got %+v, want %+v", set.Targets[0], want)
	}
	z.set(t, "a.test. 1 A 10.0.0.3")
	got.wait(t, "10.0.0.3:9000")
	z.fail(dns.RcodeServerFailure)
	got.wait(t, "10.0.0.3:9000 last-good")
	if st := source.Status(); !strings.Contains(st.Error, "answers SERVFAIL") || st.Since.IsZero() || st.Endpoints != 1 || st.Failures != 1 {
		t.Errorf("status %+v", st)
	}
	z.set(t, "a.test. 1 A 10.0.0.4")
	got.wait(t, "10.0.0.4:9000")
	if st := source.Status(); st.Error != "" || !st.Since.IsZero() || st.Changes == 0 {
		t.Errorf("status %+v", st)
	}
	if st := source.Status(); len(st.Passed) != 0 {
		t.Errorf("passed %q", st.Passed)
	}
	z.set(t) // the name does not exist any more: nobody is there
	got.wait(t, "")
	if st := source.Status(); st.Error != "" || len(st.Passed) != 1 || !strings.HasPrefix(st.Passed[0], "a.test has no A or AAAA record") {
		t.Errorf("status %+v", st)
	}
}

func TestDNSPorts(t *testing.T) {
	z := newZone(t)
	z.set(t, "a.test. 1 A 10.0.0.1", "b.test. 1 A 10.0.0.2", "c.test. 1 A 10.0.0.1")
	got := follow(t, NewDNS(fastDNS(z, DNSName{Name: "a.test"}, DNSName{Name: "b.test", Labels: map[string]string{pool.LabelPort: "8001"}},
		DNSName{Name: "c.test", Labels: map[string]string{pool.LabelModel: "second"}})))
	set := got.wait(t, "10.0.0.1:8000 10.0.0.2:8001")
	if set.Targets[0].Model != "" {
		t.Error("the first name does not win an address of two")
	}
}

func TestDNSService(t *testing.T) {
	z := newZone(t)
	z.set(t, "_http._tcp.s.test. 1 SRV 0 5 8001 one.test.", "_http._tcp.s.test. 1 SRV 0 0 8002 two.test.", "_http._tcp.s.test. 1 SRV 9 0 8003 backup.test.",
		"_http._tcp.s.test. 1 SRV 0 0 8004 .", "one.test. 1 A 10.0.0.1", "two.test. 1 A 10.0.0.2", "two.test. 1 AAAA fd00::2", "backup.test. 1 A 10.0.0.9")
	got := follow(t, NewDNS(fastDNS(z, DNSName{Name: "_http._tcp.s.test", SRV: true})))
	got.wait(t, "10.0.0.1:8001=one.test 10.0.0.2:8002=two.test [fd00::2]:8002=two.test")
	// Additional records spare the second question.
	glue, _ := dns.NewRR("one.test. 1 A 10.0.0.7")
	z.mu.Lock()
	z.extra["_http._tcp.s.test. SRV"] = []dns.RR{glue}
	z.mu.Unlock()
	got.wait(t, "10.0.0.2:8002=two.test 10.0.0.7:8001=one.test [fd00::2]:8002=two.test")
}

func TestDNSServers(t *testing.T) {
	for name, prepare := range map[string]func(z *zone){
		"truncated": func(z *zone) { z.overTCP = true },
		"no EDNS":   func(z *zone) { z.noEDNS = true },
	} {
		t.Run(name, func(t *testing.T) {
			z := newZone(t)
			z.change(prepare)
			z.set(t, "a.test. 1 A 10.0.0.1")
			follow(t, NewDNS(fastDNS(z, DNSName{Name: "a.test"}))).wait(t, "10.0.0.1:8000")
		})
	}
	t.Run("the second server", func(t *testing.T) {
		deaf, z := newZone(t), newZone(t)
		deaf.change(func(z *zone) { z.deaf = true })
		z.set(t, "a.test. 1 A 10.0.0.1")
		o := fastDNS(z, DNSName{Name: "a.test"})
		o.Servers, o.Timeout = []netip.AddrPort{deaf.addr, z.addr}, 200*time.Millisecond
		follow(t, NewDNS(o)).wait(t, "10.0.0.1:8000")
	})
	t.Run("search domains", func(t *testing.T) {
		z := newZone(t)
		z.set(t, "engines.ns.svc.cluster.local. 1 A 10.0.0.1")
		o := fastDNS(z, DNSName{Name: "engines"})
		o.ResolvConf = filepath.Join(t.TempDir(), "resolv.conf")
		if err := os.WriteFile(o.ResolvConf, []byte("search ns.svc.cluster.local\nnameserver 127.0.0.1\noptions ndots:5\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		follow(t, NewDNS(o)).wait(t, "10.0.0.1:8000")
	})
	t.Run("no server", func(t *testing.T) {
		z := newZone(t)
		o := fastDNS(z, DNSName{Name: "a.test"})
		o.Servers = nil
		lines := make(chan string, 100)
		o.Log = func(_ slog.Level, msg string) { lines <- msg }
		follow(t, NewDNS(o))
		if line := <-lines; !strings.Contains(line, "no server to ask") {
			t.Error(line)
		}
	})
}

// TestDNSGarbage: what is no answer keeps the last good addresses.
func TestDNSGarbage(t *testing.T) {
	edited := func(edit func(m *dns.Msg)) func(q *dns.Msg) []byte {
		return func(q *dns.Msg) []byte {
			m := new(dns.Msg)
			m.SetReply(q)
			edit(m)
			text, _ := m.Pack()
			return text
		}
	}
	record := func(text string) dns.RR {
		rr, err := dns.NewRR(text)
		if err != nil {
			t.Fatal(err)
		}
		return rr
	}
	for name, raw := range map[string]func(q *dns.Msg) []byte{
		"nothing":      func(*dns.Msg) []byte { return []byte{} },
		"noise":        func(*dns.Msg) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") },
		"the question": func(q *dns.Msg) []byte { text, _ := q.Pack(); return text },
		"half an answer": func(q *dns.Msg) []byte {
			return edited(func(m *dns.Msg) { m.Answer = []dns.RR{record("a.test. 1 A 10.0.0.9")} })(q)[:30]
		},
		"another id":            edited(func(m *dns.Msg) { m.Id++ }),
		"another name":          edited(func(m *dns.Msg) { m.Question[0].Name = "b.test." }),
		"another type":          edited(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeTXT }),
		"no question":           edited(func(m *dns.Msg) { m.Question = nil }),
		"a referral":            edited(func(m *dns.Msg) { m.Ns = []dns.RR{record("test. 1 NS ns.test.")} }),
		"truncated without end": edited(func(m *dns.Msg) { m.Truncated = true }),
		"a name without end": func(q *dns.Msg) []byte {
			text := edited(func(*dns.Msg) {})(q)
			text[7] = 1
			return append(text, 0xc0, byte(len(text)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			z := newZone(t)
			z.set(t, "a.test. 1 A 10.0.0.1")
			o := fastDNS(z, DNSName{Name: "a.test"})
			o.Timeout = 200 * time.Millisecond // some of this reads as silence
			source := NewDNS(o)
			got := follow(t, source)
			got.wait(t, "10.0.0.1:8000")
			z.change(func(z *zone) { z.raw = raw })
			got.wait(t, "10.0.0.1:8000 last-good")
			if st := source.Status(); !strings.Contains(st.Error, z.addr.String()) {
				t.Errorf("status %+v", st)
			}
			z.set(t, "a.test. 1 A 10.0.0.2")
			got.wait(t, "10.0.0.2:8000")
		})
	}
}

// TestDNSWaitsForAllNames: half a set is not a full one.
func TestDNSWaitsForAllNames(t *testing.T) {
	z := newZone(t)
	z.set(t, "a.test. 1 A 10.0.0.1")
	other := newZone(t)
	other.change(func(z *zone) { z.deaf = true })
	o := fastDNS(z, DNSName{Name: "a.test"})
	got := follow(t, NewDNS(o))
	got.wait(t, "10.0.0.1:8000")
	got.stop()

	o.Servers, o.Timeout = []netip.AddrPort{other.addr}, 200*time.Millisecond
	o.Names = append(o.Names, DNSName{Name: "b.test"})
	got = follow(t, NewDNS(o))
	for seen := map[string]bool{}; len(seen) < 4; {
		seen[<-other.question] = true
	}
	if len(got.all) > 0 {
		t.Fatalf("got %s before any name was answered", text(<-got.all))
	}
	other.set(t, "a.test. 1 A 10.0.0.1", "b.test. 1 A 10.0.0.2")
	got.wait(t, "10.0.0.1:8000 10.0.0.2:8000")
}

// TestDNSStops: a source that waits for an answer ends with its context.
func TestDNSStops(t *testing.T) {
	z := newZone(t)
	z.change(func(z *zone) { z.deaf = true })
	o := fastDNS(z, DNSName{Name: "a.test"})
	o.Timeout = time.Hour
	got := follow(t, NewDNS(o))
	<-z.question
	got.stop()
}

// TestDNSFollowsTTL: a name is asked no earlier than its TTL allows.
func TestDNSFollowsTTL(t *testing.T) {
	for _, c := range []struct {
		name    string
		records []string
		want    time.Duration
	}{
		{"the least", []string{"a.test. 30 A 10.0.0.1", "a.test. 20 A 10.0.0.2"}, 20 * time.Second},
		{"of both kinds", []string{"a.test. 30 A 10.0.0.1", "a.test. 7 AAAA fd00::1"}, 7 * time.Second},
		{"zero", []string{"a.test. 0 A 10.0.0.1"}, 0},
		{"none", nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			z := newZone(t)
			z.set(t, c.records...)
			d := NewDNS(fastDNS(z, DNSName{Name: "a.test"}))
			_, ttl, err := d.lookUp(t.Context(), &d.options.Names[0])
			if err != nil || ttl != c.want {
				t.Errorf("got %v, %v, want %v", ttl, err, c.want)
			}
		})
	}
	z := newZone(t)
	z.set(t, "a.test. 3600 A 10.0.0.1")
	o := fastDNS(z, DNSName{Name: "a.test"})
	o.MaxInterval = time.Hour
	got := follow(t, NewDNS(o))
	got.wait(t, "10.0.0.1:8000")
	got.stop()
	z.mu.Lock()
	defer z.mu.Unlock()
	if fmt.Sprint(z.asked) != "map[a.test. A:1 a.test. AAAA:1]" {
		t.Errorf("asked %v", z.asked)
	}
}

// TestDNSPanics: a panic ends a look-up, and is told.
func TestDNSPanics(t *testing.T) {
	var told []any
	d := NewDNS(DNSOptions{
		Servers: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")},
		Fault:   func(cause any, _ []byte) { told = append(told, cause) },
	})
	var none context.Context
	_, _, err := d.guarded(none, &DNSName{Name: "one.test", SRV: true})
	if err == nil || !strings.HasPrefix(err.Error(), "one.test: internal error: ") || len(told) != 1 {
		t.Errorf("got %v, told %v", err, told)
	}
}

// TestRunPanics: a panic in Run's own goroutine, here of who takes the set,
// leaves it: what Run began ends before.
func TestRunPanics(t *testing.T) {
	z := newZone(t)
	z.set(t, "a.test. 1 A 10.0.0.1")
	file := filepath.Join(t.TempDir(), "f.yaml")
	for name, s := range map[string]Source{
		"dns":  NewDNS(fastDNS(z, DNSName{Name: "a.test"}, DNSName{Name: "a.test", Port: 1})),
		"file": NewFile(file, nil, func(slog.Level, string) {}),
	} {
		runPanics(t, name, s)
	}
}

func runPanics(t *testing.T, name string, s Source) {
	t.Helper()
	done := make(chan any, 1)
	go func() {
		defer func() { done <- recover() }()
		_ = s.Run(t.Context(), func(Set) { panic("in deliver") })
	}()
	select {
	case cause := <-done:
		if cause != "in deliver" {
			t.Errorf("%s: panicked with %v", name, cause)
		}
	case <-time.After(patience):
		t.Fatalf("%s: Run did not end", name)
	}
}
