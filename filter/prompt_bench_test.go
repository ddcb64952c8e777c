package filter

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

// fullConfig is all that a request can meet: queues, metrics, and llm-d's default
// weights.
const fullConfig = "flowControl: {enabled: true}\npolicy: queue:2,kv-cache:2,prefix-cache:3"

// prose is what clients send: with a quote, a newline or a tab in each forty bytes.
const prose = `Please look at the function below, explain why the \"retry\" branch can run twice,\nand suggest the smallest fix. ` +
	`Keep the public signature; the callers in cmd/ rely on it.\n\tif err := s.flush(ctx); err != nil { return err }\n`

// cpuTime is what this process has used: of use where others have the machine, too.
func cpuTime() time.Duration {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) != nil {
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// conversation is a chat body of about size bytes whose turns begin with a name
// each.
func conversation(size int, first, last string) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"m","messages":[{"role":"system","content":"You are a careful assistant. ` + first + `"}`)
	for turn := 0; b.Len() < size; turn++ {
		role := [2]string{"user", "assistant"}[turn%2]
		b.WriteString(`,{"role":"` + role + `","content":"` + strings.Repeat(prose, 8) + `"}`)
	}
	b.WriteString(`,{"role":"user","content":"` + last + `"}],"temperature":0.7,"max_tokens":256}`)
	return []byte(b.String())
}

// pieces cuts a body as Envoy's buffers do.
func pieces(body []byte) (chunks [][]byte) {
	const size = 16 << 10
	for ; len(body) > 0; body = body[min(size, len(body)):] {
		chunks = append(chunks, body[:min(size, len(body))])
	}
	return chunks
}

// BenchmarkFull is the whole of a request but for its door, with all that it can
// meet: the body is scanned, its prompt hashed, looked up and noted. same sends one
// prompt again and again, turns many conversations that grow by a turn, and new
// prompts that nobody has seen.
func BenchmarkFull(b *testing.B) {
	for _, size := range []int{1 << 10, 16 << 10, 256 << 10} {
		bodies := map[string][][][]byte{}
		bodies["same"] = [][][]byte{pieces(conversation(size, "", ""))}
		for i := range 64 {
			for turn := range 4 {
				body := conversation(size*(5+turn)/8, fmt.Sprint("I am ", i), "")
				bodies["turns"] = append(bodies["turns"], pieces(body))
			}
		}
		for i := range 256 { // by the time that one comes again it has gone
			bodies["new"] = append(bodies["new"], pieces(conversation(size, fmt.Sprintf("I am %010d", i), "")))
		}
		for _, kind := range []string{"same", "turns", "new"} {
			for _, n := range []int{4, 100} {
				b.Run(fmt.Sprintf("body=%dk/%s/endpoints=%d", size>>10, kind, n), func(b *testing.B) {
					config := fullConfig
					if kind == "new" {
						config += fmt.Sprintf("\nprefixCache: {blocksPerEndpoint: %d}", max(16, 128*size/256/n))
					}
					w := newWorld(b, config)
					in := pool.Input{Complete: true, Fresh: true}
					for i := range n {
						in.Endpoints = append(in.Endpoints, ep(byte(i+1), "m"))
						m := &pool.Metrics{Taken: w.now(), BlockSize: 16, NumBlocks: 1 << 14}
						m.Set(pool.NumRequestsWaiting, float64(i%3))
						m.Set(pool.KVCacheUsagePerc, float64(i%10)/20)
						in.Metrics = append(in.Metrics, m)
					}
					w.publishInput("default", in)
					door := newHost()
					send := bodies[kind]
					b.SetBytes(int64(size))
					b.ReportAllocs()
					var h Head
					var v Verdict
					var r Request
					i := 0
					for range 2 * len(send) { // the memory of all grows
						r = Request{}
						oneRequest(&r, door, w, &h, &v, send[i%len(send)])
						i++
					}
					start := cpuTime()
					for b.Loop() {
						r = Request{}
						oneRequest(&r, door, w, &h, &v, send[i%len(send)])
						i++
						if v.Action != Continue {
							b.Fatal(show(&v))
						}
					}
					b.ReportMetric(float64(cpuTime()-start)/float64(b.N), "cpu-ns/op")
				})
			}
		}
	}
}
