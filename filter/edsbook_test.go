package filter

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
)

// bookDriver lets an edsBook live in a time of its own.
type bookDriver struct {
	book *edsBook
	now  time.Time
	log  []string
}

func (d *bookDriver) put(key offerKey, targets ...pool.Target) {
	d.book.put(key, targets, metricsync.Complete)
	d.run(0)
}

// run lets time go on, and notes what is written and handed on, and when.
func (d *bookDriver) run(span time.Duration) {
	end := d.now.Add(span)
	for {
		if content, want := d.book.version(d.now); content != nil {
			d.book.written(want, d.now)
			d.note("file " + addressesIn(content))
		}
		gifts := d.book.gifts(d.now)
		slices.SortFunc(gifts, func(a, b gift) int { return strings.Compare(a.source, b.source) })
		for _, g := range gifts {
			var list []string
			for _, t := range g.targets {
				list = append(list, t.Addr.Addr().String())
			}
			d.note(g.source + " " + strings.Join(list, ","))
		}
		next := d.book.next(d.now)
		if next.IsZero() || next.After(end) {
			d.now = end
			return
		}
		if !next.After(d.now) {
			next = d.now.Add(time.Millisecond)
		}
		d.now = next
	}
}

func (d *bookDriver) note(what string) {
	d.log = append(d.log, fmt.Sprintf("%v %s", d.now.Sub(time.Unix(0, 0)), what))
}

func addressesIn(content []byte) string {
	var file struct {
		Resources []struct {
			Endpoints []struct {
				LbEndpoints []struct {
					HealthStatus string `json:"health_status"`
					Endpoint     struct {
						Address struct {
							SocketAddress struct{ Address string } `json:"socket_address"`
						}
					}
				} `json:"lb_endpoints"`
			}
		}
	}
	if err := json.Unmarshal(content, &file); err != nil {
		return err.Error()
	}
	var list []string
	for _, e := range file.Resources[0].Endpoints[0].LbEndpoints {
		list = append(list, e.Endpoint.Address.SocketAddress.Address+strings.ToLower(strings.TrimPrefix(e.HealthStatus, "DRAIN")))
	}
	return strings.Join(list, ",")
}

func edsTarget(host string, change ...func(*pool.Target)) pool.Target {
	t := pool.Target{Addr: mustAddr(host + ":8000"), Model: "m"}
	for _, f := range change {
		f(&t)
	}
	return t
}

// TestEDSBook: an address is picked only once Envoy can know it, what is gone is
// picked no more at once, and the file changes at most every 250 ms.
func TestEDSBook(t *testing.T) {
	p := new(Pool)
	kube, file := offerKey{p, "kubernetes"}, offerKey{p, "file"}
	a, b, c := edsTarget("10.0.0.1"), edsTarget("10.0.0.2"), edsTarget("10.0.0.3")
	leaving := edsTarget("10.0.0.1", func(t *pool.Target) { t.NotReady = "the pod is terminating" })
	prefill := edsTarget("10.0.0.9", func(t *pool.Target) { t.PrefillOnly = true })
	for _, tc := range []struct {
		name string
		do   func(d *bookDriver)
		want string
	}{
		{"first set", func(d *bookDriver) {
			d.put(kube, a, b)
			d.run(10 * time.Second)
		}, "0s file 10.0.0.1,10.0.0.2; 150ms kubernetes 10.0.0.1,10.0.0.2"},
		{"no endpoints", func(d *bookDriver) { d.put(kube); d.run(time.Second) }, "0s file ; 0s kubernetes "},
		{"one more", func(d *bookDriver) {
			d.put(kube, a)
			d.run(time.Second)
			d.put(kube, a, b)
			d.run(time.Second)
		}, "0s file 10.0.0.1; 150ms kubernetes 10.0.0.1; 1s file 10.0.0.1,10.0.0.2; 1s kubernetes 10.0.0.1; 1.15s kubernetes 10.0.0.1,10.0.0.2"},
		{"one less, which stays in the file for a while", func(d *bookDriver) {
			d.put(kube, a, b)
			d.run(time.Second)
			d.put(kube, a)
			d.run(10 * time.Second)
		}, "0s file 10.0.0.1,10.0.0.2; 150ms kubernetes 10.0.0.1,10.0.0.2; 1s file 10.0.0.1,10.0.0.2ing; 1s kubernetes 10.0.0.1; 6s file 10.0.0.1"},
		{"one for another", func(d *bookDriver) {
			d.put(kube, a)
			d.run(time.Second)
			d.put(kube, b)
			d.run(time.Second)
		}, "0s file 10.0.0.1; 150ms kubernetes 10.0.0.1; 1s file 10.0.0.1ing,10.0.0.2; 1s kubernetes ; 1.15s kubernetes 10.0.0.2"},
		{"terminating", func(d *bookDriver) {
			d.put(kube, a)
			d.run(time.Second)
			d.put(kube, leaving)
			d.run(time.Second)
		}, "0s file 10.0.0.1; 150ms kubernetes 10.0.0.1; 1s file 10.0.0.1ing; 1s kubernetes 10.0.0.1"},
		{"a storm", func(d *bookDriver) {
			d.put(kube, a)
			d.run(100 * time.Millisecond)
			d.put(kube, a, b)
			d.run(50 * time.Millisecond)
			d.put(kube, a, b, c)
			d.run(time.Second)
		}, "0s file 10.0.0.1; 250ms file 10.0.0.1,10.0.0.2,10.0.0.3; 400ms kubernetes 10.0.0.1,10.0.0.2,10.0.0.3"},
		{"two sources", func(d *bookDriver) {
			d.put(kube, a, b)
			d.put(file, b)
			d.run(time.Second)
			d.put(kube, a)
			d.run(10 * time.Second)
		}, "0s file 10.0.0.1,10.0.0.2; 150ms file 10.0.0.2; 150ms kubernetes 10.0.0.1,10.0.0.2; 1s kubernetes 10.0.0.1"},
		{"a source that is taken away", func(d *bookDriver) {
			d.put(kube, a)
			d.run(time.Second)
			d.book.drop(p, []string{"file"})
			d.run(10 * time.Second)
		}, "0s file 10.0.0.1; 150ms kubernetes 10.0.0.1; 1s file 10.0.0.1ing; 6s file "},
		{"back within the linger", func(d *bookDriver) {
			d.put(kube, a, b)
			d.run(time.Second)
			d.put(kube, a)
			d.run(time.Second)
			d.put(kube, a, b)
			d.run(10 * time.Second)
		}, "0s file 10.0.0.1,10.0.0.2; 150ms kubernetes 10.0.0.1,10.0.0.2; 1s file 10.0.0.1,10.0.0.2ing; 1s kubernetes 10.0.0.1; " +
			"2s file 10.0.0.1,10.0.0.2; 2s kubernetes 10.0.0.1,10.0.0.2"},
		{"somebody else's file", func(d *bookDriver) {
			d.put(kube, a)
			for range 3 { // again and again
				d.run(100 * time.Millisecond)
				d.book.lost = true
				d.run(400 * time.Millisecond)
			}
		}, "0s file 10.0.0.1; 150ms kubernetes 10.0.0.1; 250ms file 10.0.0.1; 1.25s file 10.0.0.1"},
		{"prefill only", func(d *bookDriver) { d.put(kube, prefill, a); d.run(time.Second) },
			"0s file 10.0.0.1; 150ms kubernetes 10.0.0.9,10.0.0.1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := &bookDriver{book: newEDSBook(), now: time.Unix(0, 0)}
			tc.do(d)
			if got := strings.Join(d.log, "; "); got != tc.want {
				t.Errorf("got  %s\nwant %s", got, tc.want)
			}
		})
	}
}

// TestEDSBookRetries: a version that can't be written comes again, and what it
// would have told Envoy is not picked.
func TestEDSBookRetries(t *testing.T) {
	key := offerKey{new(Pool), "file"}
	b := newEDSBook()
	now := time.Unix(0, 0)
	b.put(key, []pool.Target{edsTarget("10.0.0.1")}, metricsync.Complete)
	if content, _ := b.version(now); content == nil {
		t.Fatal("nothing to write")
	}
	b.failed = now
	if g := b.gifts(now.Add(time.Hour)); len(g) != 0 {
		t.Errorf("handed on: %v", g)
	}
	if at := b.next(now); !at.Equal(now.Add(edsRetry)) {
		t.Errorf("looks again at %v", at)
	}
	if content, _ := b.version(now.Add(edsRetry - 1)); content != nil {
		t.Error("written too early")
	}
	if content, _ := b.version(now.Add(edsRetry)); content == nil {
		t.Error("never written again")
	}

	// A version that nobody wants any more is not missed.
	_, want := b.version(now.Add(edsRetry))
	b.written(want, now.Add(edsRetry))
	later := now.Add(time.Minute)
	b.put(key, []pool.Target{edsTarget("10.0.0.1"), edsTarget("10.0.0.2")}, metricsync.Complete)
	b.failed = later
	b.put(key, []pool.Target{edsTarget("10.0.0.1")}, metricsync.Complete)
	if content, _ := b.version(later.Add(edsRetry)); content != nil || !b.failed.IsZero() {
		t.Errorf("%s is written, failed %v", content, b.failed)
	}
}

// TestLeastBusy: fallbacks are the candidates with the fewest requests, without
// the picked one, and equals take turns.
func TestLeastBusy(t *testing.T) {
	w := newWorld(t, "")
	w.publish("default", ep(1, "m"), ep(2, "m"), ep(3, "m"), ep(4, "m"))
	snap := w.pool("default").holder.Load()
	index := snap.ForModel("m").Index
	for i, n := range []int{3, 0, 2, 1} {
		for range n {
			snap.Endpoints[index[i]].Live.Reserve(pool.Load{}, time.Unix(0, 0))
		}
	}
	for _, c := range []struct {
		n    int
		want string
	}{{0, ""}, {1, "4"}, {2, "4 3"}, {3, "4 3 1"}, {8, "4 3 1"}} {
		for seed := range uint64(4) {
			into := make([]int32, c.n)
			var got []string
			for _, i := range into[:leastBusy(snap, index, index[1], seed, into)] {
				got = append(got, fmt.Sprint(i+1))
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("%d fallbacks: %v, want %s", c.n, got, c.want)
			}
		}
	}
	first := map[int32]bool{}
	w.publish("default", ep(1, "m"), ep(2, "m"), ep(3, "m"))
	snap = w.pool("default").holder.Load()
	for seed := range uint64(12) {
		into := make([]int32, 1)
		leastBusy(snap, snap.ForModel("m").Index, 0, seed, into)
		first[into[0]] = true
	}
	if len(first) != 2 || first[0] {
		t.Errorf("of two equals %v come first", first)
	}
}
