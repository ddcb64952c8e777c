package filter

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/shuntproxy/shunt/internal/discovery"
)

// nameServer answers for engines.test once it is told to, also who asked before.
type nameServer struct {
	addr  string
	asked chan struct{} // size 100

	mu     sync.Mutex
	told   chan struct{} // closed once there is an answer
	answer func(q *dns.Msg) *dns.Msg
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &nameServer{addr: conn.LocalAddr().String(), asked: make(chan struct{}, 100), told: make(chan struct{})}
	started, ended := make(chan struct{}), make(chan struct{})
	server := &dns.Server{PacketConn: conn, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		select {
		case s.asked <- struct{}{}:
		default:
		}
		select {
		case <-s.told:
		case <-ended:
			return
		}
		s.mu.Lock()
		answer := s.answer
		s.mu.Unlock()
		_ = w.WriteMsg(answer(q))
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() {
		close(ended)
		_ = server.Shutdown()
		<-done
	})
	return s
}

func (s *nameServer) tell(answer func(q *dns.Msg) *dns.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answer == nil {
		close(s.told)
	}
	s.answer = answer
}

func localhost(q *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(q)
	if q.Question[0].Qtype == dns.TypeA {
		rr, _ := dns.NewRR(q.Question[0].Name + " 1 A 127.0.0.1")
		m.Answer = []dns.RR{rr}
	}
	return m
}

func broken(q *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	return m.SetRcode(q, dns.RcodeServerFailure)
}

// modelServer serves model m and an empty page of metrics.
func modelServer(t *testing.T) netip.AddrPort {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"object":"list","data":[{"id":"m"}]}`)
		}
	}))
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String())
}

func dnsPool(server string, port uint16, more string) string {
	return fmt.Sprintf(`
pools: {default: {dns: {names: [{name: engines.test., port: %d, labels: {model.aibrix.ai/name: m, model.aibrix.ai/metric-port: "%d"}}], servers: ["%s"], timeout: 30s, minInterval: 100ms}}}
admin: {address: ""}
%s`, port, port, server, more)
}

// TestStartupHoldOfASource: a request that comes before a source has told its
// first set waits for it, however it comes, and no longer than startupHold.
func TestStartupHoldOfASource(t *testing.T) {
	for _, c := range []struct {
		name  string
		hold  time.Duration
		first func(q *dns.Msg) *dns.Msg // nil: silence
		then  func(q *dns.Msg) *dns.Msg
		want  string
	}{
		{"late", 30 * time.Second, nil, localhost, ""},
		{"after a retry", 30 * time.Second, broken, localhost, ""},
		{"never", 300 * time.Millisecond, nil, nil, "rejected-no-endpoints"},
		{"failing", 300 * time.Millisecond, broken, broken, "rejected-no-endpoints"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var (
				address netip.AddrPort
				server  *nameServer
				rt      *Runtime
				s       *stream
			)
			for hold := c.hold; s == nil || s.v.Action != Wait; hold *= 2 { // it may be over before a busy machine has sent the request
				if hold > 2*time.Minute {
					t.Fatalf("got %s", show(&s.v))
				}
				address, server = modelServer(t), newNameServer(t)
				if c.first != nil {
					server.tell(c.first)
				}
				rt, _ = newRuntime(t)
				gen, err := rt.Load([]byte(dnsPool(server.addr, address.Port(), fmt.Sprint("startupHold: ", hold))))
				if err != nil {
					t.Fatal(err)
				}
				s = &stream{host: newHost()}
				s.Init(s.host, gen)
				s.chat(t, chatBody)
			}
			if why := rt.notReady(); !strings.Contains(why, "discovery has not delivered yet") {
				t.Errorf("not ready because %q", why)
			}
			<-server.asked
			if c.then != nil {
				server.tell(c.then)
			}
			for s.v.Action == Wait {
				select {
				case <-s.posts:
					s.Resume(&s.v)
				case <-time.After(30 * time.Second):
					t.Fatal("never woken")
				}
			}
			if got := s.v.meta("reason"); got != c.want || c.want == "" && s.v.Destination != address.String() {
				t.Errorf("got %s", show(&s.v))
			}
			s.finish(End{})
			if c.then == nil {
				server.tell(broken) // else the end waits for the query's time to run out
			}
		})
	}
}

// TestSourcesOfOnePool: what they find is one set, the first to name an address
// wins, and one that never answers holds back no endpoint of the others.
func TestSourcesOfOnePool(t *testing.T) {
	address, server := modelServer(t), newNameServer(t)
	file := filepath.Join(t.TempDir(), "list.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, "[{address: %q, pod: by-file}, {address: \"127.0.0.2:1\", pod: file-only}]", address), 0o600); err != nil {
		t.Fatal(err)
	}
	rt, _ := newRuntime(t)
	gen, err := rt.Load(fmt.Appendf(nil, `
pools:
  default:
    static: [{address: "127.0.0.3:1", pod: static-only}]
    file: {path: %s}
    dns: {names: [{name: engines.test., port: %d}], servers: ["%s"], timeout: 30s, minInterval: 100ms}
admin: {address: ""}`, file, address.Port(), server.addr))
	if err != nil {
		t.Fatal(err)
	}
	route := func() *stream {
		s := &stream{host: newHost()}
		s.Init(s.host, gen)
		s.chat(t, chatBody)
		return s
	}
	eventually(t, "the file's endpoint is routed to", func() bool {
		s := route()
		defer s.finish(End{})
		return s.v.Destination == address.String() && s.v.meta("pod") == "by-file"
	})
	if st := rt.Status(); st.Ready || st.Pools[0].Complete {
		t.Error("ready although a source has not answered")
	}
	server.tell(localhost)
	eventually(t, "all sources are there", func() bool { return rt.Status().Pools[0].Complete })
	st := rt.Status().Pools[0]
	var got []string
	for _, e := range st.Endpoints {
		got = append(got, e.Source+" "+e.Pod)
	}
	if strings.Join(got, ", ") != "file by-file, file file-only, static static-only" {
		t.Errorf("got %q", got)
	}
	got = nil
	for _, s := range st.Sources {
		got = append(got, fmt.Sprintf("%s %d %v %q", s.Source, s.Endpoints, s.Delivered, s.Error))
	}
	if strings.Join(got, ", ") != `static 1 true "", file 2 true "", dns 1 true ""` {
		t.Errorf("got %q", got)
	}
	for _, c := range []struct {
		metric, source string
		want           float64
	}{{"shunt_discovery_up", "dns", 1}, {"shunt_discovery_endpoints", "file", 2}} {
		if v := metricValue(t, rt, c.metric, "pool", "default", "source", c.source); v != c.want {
			t.Errorf("%s of %s is %v, want %v", c.metric, c.source, v, c.want)
		}
	}

	// The name server is away: the last good set stays, and that shows.
	server.tell(broken)
	eventually(t, "the gauge falls", func() bool {
		return metricValue(t, rt, "shunt_discovery_up", "pool", "default", "source", "dns") == 0
	})
	if st := rt.Status().Pools[0]; !st.Complete || len(st.Endpoints) != 3 {
		t.Errorf("complete %v, %d endpoints", st.Complete, len(st.Endpoints))
	}
}

// TestSourceIsReplaced: the last set of a source stays until its new definition
// has found all, and then goes.
func TestSourceIsReplaced(t *testing.T) {
	address, server, silent := modelServer(t), newNameServer(t), newNameServer(t)
	server.tell(localhost)
	rt, _ := newRuntime(t)
	first, err := rt.Load([]byte(dnsPool(server.addr, address.Port(), "")))
	if err != nil {
		t.Fatal(err)
	}
	endpoints := func() string {
		var all []string
		for _, e := range rt.Status().Pools[0].Endpoints {
			all = append(all, e.Endpoint)
		}
		return strings.Join(all, " ")
	}
	eventually(t, "the first set", func() bool { return endpoints() == address.String() })
	second, err := rt.Load([]byte(dnsPool(silent.addr, 1, "")))
	if err != nil {
		t.Fatal(err)
	}
	<-silent.asked
	if got := endpoints(); got != address.String() {
		t.Errorf("got %q before the new source has answered", got)
	}
	silent.tell(localhost)
	eventually(t, "the second set", func() bool { return endpoints() == "127.0.0.1:1" })
	first.Release()
	second.Release()
}

// TestResourcesOfAPool: rules of resources stand behind those of the
// configuration, and count from the next request on.
func TestResourcesOfAPool(t *testing.T) {
	w := newWorld(t, `
rewrites: [{matches: [{model: a}], targets: [{model: own}]}]`)
	w.publish("default", ep(1, "m", "own", "found", "all", "x"))
	model := func(asked string) string {
		s := w.stream()
		defer s.finish(End{})
		return s.chat(t, strings.Replace(chatBody, `"m"`, `"`+asked+`"`, 1)).meta("target_model")
	}
	set := func(rules ...discovery.Rewrite) {
		w.takeResources(w.pool("default"), discovery.Resources{Rewrites: rules, Objectives: []discovery.Objective{{Name: "gold", Priority: 3}}})
	}
	to := func(model string) []discovery.RewriteTarget { return []discovery.RewriteTarget{{Model: model}} }
	for _, c := range []struct {
		rules []discovery.Rewrite
		want  string // of a, b and x
	}{
		{nil, "own x"},
		{[]discovery.Rewrite{{Models: []string{"a", "b"}, Targets: to("found")}}, "own found x"},
		{[]discovery.Rewrite{{Targets: to("all")}, {Models: []string{"b"}, Targets: to("found")}}, "own found all"},
		{[]discovery.Rewrite{{Targets: to("m")}}, "own m m"},
		{nil, "own x"},
	} {
		set(c.rules...)
		got := []string{model("a")}
		if len(c.rules) > 0 {
			got = append(got, model("b"))
		}
		got = append(got, model("x"))
		if strings.Join(got, " ") != c.want {
			t.Errorf("%v: got %v, want %s", c.rules, got, c.want)
		}
	}
	s := w.stream()
	if v := s.chat(t, strings.Replace(chatBody, `"m"`, `"x"`, 1), "x-llm-d-inference-objective", "gold"); s.priority() != 3 {
		t.Errorf("priority %d: %s", s.priority(), show(v))
	}
	s.finish(End{})
}

// TestSourceBeginsAnew: a source that panics is begun again, and until then what
// it found stays.
func TestSourceBeginsAnew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, path, "[{address: 10.0.0.1}]")
	log, panics := newLines(), atomic.Bool{}
	rt := NewRuntime(Options{Linger: time.Millisecond, Log: func(l slog.Level, line string) {
		log.write(l, line)
		if strings.Contains(line, "read 2 endpoints") && panics.CompareAndSwap(false, true) {
			panic("in a line")
		}
	}})
	t.Cleanup(rt.Stop)
	gen, err := rt.Load([]byte("pools: {default: {file: {path: " + path + "}}}\nadmin: {address: \"\"}"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(gen.Release)
	endpoints := func() int { return len(rt.poolList()[0].holder.Load().Endpoints) }
	eventually(t, "the first set", func() bool { return endpoints() == 1 })
	write(t, path, "[{address: 10.0.0.1}, {address: 10.0.0.2}]")
	log.wait(t, 1, "internal error in discovery of pool default: in a line")
	if n := endpoints(); n != 1 {
		t.Errorf("%d endpoints after the panic, want those before it", n)
	}
	eventually(t, "the second set", func() bool { return endpoints() == 2 })
	if n := metricValue(t, rt, "shunt_internal_errors_total", "where", "discovery of pool default"); n != 1 {
		t.Errorf("%v panics were counted", n)
	}
	write(t, path, "[{address: 10.0.0.3}]")
	eventually(t, "a change after that", func() bool { return endpoints() == 1 })
}
