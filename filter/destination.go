package filter

import (
	"math/rand/v2"
	"strings"

	"github.com/shuntproxy/shunt/internal/config"
	"github.com/shuntproxy/shunt/internal/pool"
)

// destinations is what the destination header names: the picked endpoint, then
// those that Envoy may try instead where it fails before its answer begins.
func (r *Request) destinations(snap *pool.Snapshot, picked int32) string {
	key := snap.Endpoints[picked].Key
	if r.set.cfg.Fallbacks == 0 {
		return key
	}
	var others [config.MaxFallbacks]int32
	n := leastBusy(snap, r.candidates(snap), picked, rand.Uint64(), others[:r.set.cfg.Fallbacks])
	if n == 0 {
		return key
	}
	var list strings.Builder
	list.Grow((n + 1) * (len(key) + 8))
	list.WriteString(key)
	for _, i := range others[:n] {
		list.WriteByte(',')
		list.WriteString(snap.Endpoints[i].Key)
	}
	return list.String()
}

// leastBusy fills into with the candidates that have the fewest requests in
// flight, but for one, and returns how many there are. Among equals seed decides.
func leastBusy(snap *pool.Snapshot, index []int32, except int32, seed uint64, into []int32) int {
	if len(index) == 0 {
		return 0
	}
	n := 0
	start := int(seed % uint64(len(index)))
	for k := range index {
		i := index[(start+k)%len(index)]
		if i == except {
			continue
		}
		load := snap.Endpoints[i].Live.InFlight()
		at := n
		for at > 0 && load < snap.Endpoints[into[at-1]].Live.InFlight() {
			at--
		}
		if at == len(into) {
			continue
		}
		n = min(n+1, len(into))
		copy(into[at+1:n], into[at:n-1])
		into[at] = i
	}
	return n
}
