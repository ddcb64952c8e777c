package filter

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// TestPromptsMeetReloads: the size of blocks, the policy and the bounds of the
// index change while prompts of all lengths are sent, and everything is explained.
func TestPromptsMeetReloads(t *testing.T) {
	rt, _ := newRuntime(t)
	one, two := engine(t, "m"), engine(t, "m")
	config := func(i int) string {
		return staticConfig(entry(one, "m"), entry(two, "m")) + fmt.Sprintf(`
policy: %s
prefixCache: {blockSize: %s, blocksPerEndpoint: %d}
explain: {sample: 1}
guards: {overloadVeto: %v}
`, []string{"prefix-cache", "queue:2,kv-cache:2,prefix-cache:3", "least-request", "prefix-hrw", "slo-headroom", "preble"}[i%6],
			[]string{"0", "256B", "300B", "4KiB"}[i%4], []int{0, 1, 7, 1000}[i%4], i%2 == 0)
	}
	var current atomic.Pointer[Generation]
	current.Store(mustLoad(t, rt, config(0)))
	first := current.Load().stream()
	first.settled(t) // from now on the endpoints are known
	first.finish(End{Answered: true})

	var texts []string
	for _, size := range []int{0, 1, 255, 256, 257, 511, 4096, 4097, 3 << 20} {
		texts = append(texts, chatOf(strings.Repeat("x", size)))
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for worker := range 3 {
		wg.Go(func() {
			for i := worker; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				s := current.Load().stream()
				if v := s.chat(t, texts[i%len(texts)]); v.Action != Continue || v.Destination == "" {
					t.Errorf("got %s", show(v))
					return
				}
				s.finish(End{Answered: true})
			}
		})
	}
	for i := range 24 {
		next := mustLoad(t, rt, config(i+1))
		current.Swap(next).Release()
	}
	close(stop)
	wg.Wait()
	if n := load(rt.pool("default")); n != 0 {
		t.Errorf("%d are left in flight", n)
	}
	if len(rt.explained.newest("", 1)) == 0 {
		t.Error("nothing is explained")
	}
}
