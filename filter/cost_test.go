package filter

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/shuntproxy/shunt/internal/pool"
)

// TestRequestSize: a request that waits is this struct, its door's part and its
// model's name. The budget is 1 KiB beyond Envoy's own memory for all of them.
func TestRequestSize(t *testing.T) {
	const budget = 704
	size := unsafe.Sizeof(Request{})
	t.Logf("a Request is %d bytes", size)
	if size > budget {
		t.Errorf("a Request is %d bytes, over %d", size, budget)
	}
}

// allocs are how often a normal request allocates in this package.
const allocs = 0

func TestAllocs(t *testing.T) {
	oneHundred(t, "")
}

// oneHundred checks how often a request for a pool of 100 endpoints allocates,
// and returns the door's side of it.
func oneHundred(t *testing.T, config string) *host {
	t.Helper()
	w := newWorld(t, config)
	endpoints := make([]pool.Endpoint, 100)
	for i := range endpoints {
		endpoints[i] = ep(byte(i), "m")
	}
	w.publish("default", endpoints...)
	var h Head
	var r Request
	var v Verdict
	door := newHost()
	body := [][]byte{[]byte(chatBody)}
	got := testing.AllocsPerRun(1000, func() {
		r = Request{}
		oneRequest(&r, door, w, &h, &v, body)
	})
	t.Logf("%v allocations for each request", got)
	if got > allocs && !raceEnabled {
		t.Errorf("%s: %v allocations for each request, more than %d", config, got, allocs)
	}
	return door
}

// typicalHeaders are a client's behind a proxy.
var typicalHeaders = [][2]string{
	{":authority", "llm.example.com"}, {":path", chatPath}, {":method", "POST"}, {":scheme", "https"},
	{"accept", "application/json"}, {"content-type", "application/json"}, {"user-agent", "OpenAI/Python 2.8.1"},
	{"x-stainless-lang", "python"}, {"x-stainless-retry-count", "0"}, {"authorization", "Bearer sk-0123456789abcdef"},
	{"content-length", "1024"}, {"x-forwarded-for", "192.0.2.1"}, {"x-forwarded-proto", "https"},
	{"x-request-id", "00000000-0000-0000-0000-000000000000"}, {"x-llm-d-inference-fairness-id", "tenant-1"},
}

func oneRequest(r *Request, host Host, w *world, h *Head, v *Verdict, body [][]byte) {
	r.Init(host, w.gen)
	h.Reset()
	for _, p := range typicalHeaders {
		h.Add(p[0], p[1])
	}
	r.Headers(h, false, nil, v)
	r.Body(body, v)
	r.Finish(End{Answered: true, FirstByte: time.Millisecond}, v)
}

// BenchmarkRequest is the whole of a request but for its door: headers, body,
// pick and end.
func BenchmarkRequest(b *testing.B) {
	for _, size := range []int{1 << 10, 256 << 10} {
		for _, endpoints := range []int{4, 100} {
			b.Run(fmt.Sprintf("body=%dk/endpoints=%d", size>>10, endpoints), func(b *testing.B) {
				w := newWorld(b, "")
				list := make([]pool.Endpoint, endpoints)
				for i := range list {
					addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 8000)
					list[i] = pool.Endpoint{
						Target: pool.Target{Addr: addr, Model: "m"}, Live: &pool.Live{Addr: addr.String()}, Judged: true, Ready: true,
					}
				}
				w.publish("default", list...)
				text := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("All work and no play. ", size/22) + `"}]}`
				const chunk = 16 << 10 // as Envoy's buffers cut it
				var body [][]byte
				for rest := []byte(text); len(rest) > 0; rest = rest[min(chunk, len(rest)):] {
					body = append(body, rest[:min(chunk, len(rest))])
				}
				door := newHost()
				b.SetBytes(int64(len(text)))
				b.ReportAllocs()
				b.RunParallel(func(pb *testing.PB) {
					var h Head
					var v Verdict
					for pb.Next() {
						r := new(Request) // as a door makes one
						oneRequest(r, door, w, &h, &v, body)
						if v.Action != Continue {
							b.Fail()
						}
					}
				})
			})
		}
	}
}
