package filter

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
	"github.com/shuntproxy/shunt/metricsync"
)

const (
	// edsGap is the least time between two versions of an EDS file.
	edsGap = 250 * time.Millisecond
	// edsSettle is how long Envoy is given to read a version: an address is picked
	// only after that.
	edsSettle = 150 * time.Millisecond
	// edsLinger is how long an address stays in the file after its source has let go
	// of it: a request may be on its way there.
	edsLinger = 5 * time.Second
	// edsRetry is the pause after a version that could not be written.
	edsRetry = time.Second
)

// edsCluster is the name under which the file holds the endpoints.
const edsCluster = "shunt_engines"

// offerKey is one source of one pool.
type offerKey struct {
	pool   *Pool
	source string
}

// offer is the newest set of a source.
type offer struct {
	targets []pool.Target
	state   metricsync.State
	// begun says that the source has handed a set to its pool before; part, that the
	// part of this one that Envoy knows was; whole, that all of it was.
	begun, part, whole bool
}

// gift is a set for a pool.
type gift struct {
	offerKey
	targets []pool.Target
	state   metricsync.State
}

// edsBook decides what an EDS file holds, and when a pool may pick an address:
// never before Envoy could read of it. Its time is the caller's.
type edsBook struct {
	offers map[offerKey]*offer
	listed map[netip.AddrPort]time.Time // in the file, since when
	gone   map[netip.AddrPort]time.Time // in the file, but no source's any more, since when
	file   map[netip.AddrPort]bool      // what the newest version holds, nil before there is one
	wrote  time.Time                    // the newest version
	failed time.Time                    // the newest that could not be written, zero after one that could

	lost     bool      // what was written last is not in the file any more: somebody else's doing
	restored time.Time // when it was written again, the last time
}

func newEDSBook() *edsBook {
	return &edsBook{offers: map[offerKey]*offer{}, listed: map[netip.AddrPort]time.Time{}, gone: map[netip.AddrPort]time.Time{}}
}

// put takes the newest set of a source.
func (b *edsBook) put(key offerKey, targets []pool.Target, state metricsync.State) {
	next := &offer{targets: targets, state: state}
	if before := b.offers[key]; before != nil {
		next.begun = before.begun
	}
	b.offers[key] = next
}

// drop forgets those sources of a pool that keep does not name.
func (b *edsBook) drop(p *Pool, keep []string) {
	maps.DeleteFunc(b.offers, func(k offerKey, _ *offer) bool { return k.pool == p && !slices.Contains(keep, k.source) })
}

// reckon notes what has gone by now, and returns the addresses that the file
// should hold, each with whether it takes no new requests.
func (b *edsBook) reckon(now time.Time) map[netip.AddrPort]bool {
	want := map[netip.AddrPort]bool{}
	for _, o := range b.offers {
		for i := range o.targets {
			if t := &o.targets[i]; !t.PrefillOnly {
				draining, twice := want[t.Addr]
				want[t.Addr] = t.NotReady != "" && (draining || !twice)
			}
		}
	}
	for addr := range b.gone {
		if _, back := want[addr]; back {
			delete(b.gone, addr)
		}
	}
	for addr := range b.listed {
		if _, still := want[addr]; still {
			continue
		}
		if _, noted := b.gone[addr]; !noted {
			b.gone[addr] = now
		}
		if now.Sub(b.gone[addr]) < edsLinger {
			want[addr] = true
		}
	}
	return want
}

// version returns the file's next content, and nil where there is none or its
// time has not come.
func (b *edsBook) version(now time.Time) ([]byte, map[netip.AddrPort]bool) {
	if now.Before(b.earliest()) {
		return nil, nil
	}
	want := b.reckon(now)
	if b.holds(want) {
		b.failed = time.Time{} // what could not be written is not wanted any more
		return nil, nil
	}
	return edsContent(want), want
}

// earliest is when the next version may be written. What somebody else takes away
// comes back once a second: it may be another that keeps a file there.
func (b *edsBook) earliest() time.Time {
	at := latest(b.wrote.Add(edsGap), b.failed.Add(edsRetry))
	if b.lost {
		at = latest(at, b.restored.Add(edsRetry))
	}
	return at
}

// holds reports whether that is what the newest version holds.
func (b *edsBook) holds(want map[netip.AddrPort]bool) bool {
	return b.file != nil && !b.lost && maps.Equal(b.file, want)
}

// written notes that a version is in the file.
func (b *edsBook) written(want map[netip.AddrPort]bool, now time.Time) {
	if b.lost {
		b.lost, b.restored = false, now
	}
	b.file, b.wrote, b.failed = want, now, time.Time{}
	maps.DeleteFunc(b.listed, func(addr netip.AddrPort, _ time.Time) bool { _, ok := want[addr]; return !ok })
	maps.DeleteFunc(b.gone, func(addr netip.AddrPort, _ time.Time) bool { _, ok := want[addr]; return !ok })
	for addr := range want {
		if _, before := b.listed[addr]; !before {
			b.listed[addr] = now
		}
	}
}

// gifts are the sets that pools may have now. A source's first comes whole; of
// a later one what Envoy knows already comes at once, and so does that something
// has gone.
func (b *edsBook) gifts(now time.Time) []gift {
	var out []gift
	for key, o := range b.offers {
		if o.whole {
			continue
		}
		known := slices.DeleteFunc(slices.Clone(o.targets), func(t pool.Target) bool { return !t.PrefillOnly && !b.known(t.Addr, now) })
		switch {
		case len(known) == len(o.targets):
			o.whole, o.begun = true, true
			out = append(out, gift{key, known, o.state})
		case o.begun && !o.part:
			o.part = true
			out = append(out, gift{key, known, o.state})
		}
	}
	return out
}

// known reports whether Envoy has had the time to read of an address.
func (b *edsBook) known(addr netip.AddrPort, now time.Time) bool {
	since, ok := b.listed[addr]
	return ok && !now.Before(since.Add(edsSettle))
}

// next is when the book has to be looked at again, zero for not before
// something is put into it.
func (b *edsBook) next(now time.Time) time.Time {
	var next time.Time
	by := func(t time.Time) {
		if t = latest(t, b.earliest()); next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for _, o := range b.offers {
		if o.whole {
			continue
		}
		for i := range o.targets {
			t := &o.targets[i]
			if since, ok := b.listed[t.Addr]; !t.PrefillOnly && !b.known(t.Addr, now) {
				if !ok {
					by(now)
				} else if at := since.Add(edsSettle); next.IsZero() || at.Before(next) {
					next = at
				}
			}
		}
	}
	if !b.holds(b.reckon(now)) {
		by(now)
	}
	for _, since := range b.gone {
		by(since.Add(edsLinger))
	}
	return next
}

func latest(times ...time.Time) time.Time {
	return slices.MaxFunc(times, time.Time.Compare)
}

// edsContent is the file as Envoy reads it: JSON, which is YAML too.
func edsContent(want map[netip.AddrPort]bool) []byte {
	type object = map[string]any
	addresses := slices.SortedFunc(maps.Keys(want), netip.AddrPort.Compare)
	endpoints := make([]object, 0, len(addresses))
	for _, addr := range addresses {
		e := object{"endpoint": object{"address": object{"socket_address": object{
			"address": addr.Addr().Unmap().String(), "port_value": addr.Port(),
		}}}}
		if want[addr] {
			e["health_status"] = "DRAINING"
		}
		endpoints = append(endpoints, e)
	}
	text, _ := json.MarshalIndent(object{"resources": []any{object{ // of strings, numbers, maps and lists
		"@type":        "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
		"cluster_name": edsCluster,
		"endpoints":    []object{{"lb_endpoints": endpoints}},
	}}}, "", " ")
	return append(text, '\n')
}
