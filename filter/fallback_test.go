package filter

import (
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

func TestFallbackIsLoggedOnce(t *testing.T) {
	w := newWorld(t, "policy: least-kv-cache")
	w.publish("default", ep(1, "m"), ep(2, "m"))
	send := func() {
		s := w.stream()
		s.chat(t, chatBody)
		s.finish(End{})
	}
	const begins, ends = "can score no endpoint of model \"m\" and picks at random", "policy least-kv-cache scores endpoints again"
	for range 5 {
		send()
	}
	if w.log.count(begins) != 1 || w.log.count(ends) != 0 {
		t.Errorf("log:\n%s", w.log)
	}
	m := &pool.Metrics{Taken: w.now()}
	m.Set(pool.KVCacheUsagePerc, 0.5)
	w.publishInput("default", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{ep(1, "m")}, Metrics: []*pool.Metrics{m}})
	send()
	if w.log.count(ends) != 0 {
		t.Error("said at the first pick that was scored")
	}
	w.clock.advance(11 * time.Second)
	m = &pool.Metrics{Taken: w.now()}
	m.Set(pool.KVCacheUsagePerc, 0.5)
	w.publishInput("default", pool.Input{Complete: true, Fresh: true, Endpoints: []pool.Endpoint{ep(1, "m")}, Metrics: []*pool.Metrics{m}})
	for range 3 {
		send()
	}
	if w.log.count(begins) != 1 || w.log.count(ends) != 1 {
		t.Errorf("log:\n%s", w.log)
	}
}
