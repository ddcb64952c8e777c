package filter

import (
	"net/netip"
	"strings"

	"github.com/shuntproxy/shunt/internal/pool"
)

// MetadataSubset is the dynamic metadata namespace in which a hop before shunt
// says which endpoints a request may go to: a list of strings, ip:port or ip,
// under the key HeaderSubset.
const MetadataSubset = "envoy.lb.subset_hint"

// HeaderSubset says the same, as a list with commas. It counts only where the
// configuration trusts it.
const HeaderSubset = "x-gateway-destination-endpoint-subset"

// emptySubset is a list that names nothing. It can't be "", which is no list.
const emptySubset = ","

// readSubset returns the endpoints that a request may go to as a list with
// commas, "" where it says nothing of them. The metadata beats the header: a
// client can't write it.
func (r *Request) readSubset(h *Head) string {
	if list, ok := r.host.SubsetHint(); ok {
		if len(list) == 0 {
			return emptySubset
		}
		return strings.Clone(strings.Join(list, ",")) // Join gives back a single entry as it is: borrowed
	}
	if !r.set.cfg.SubsetHeader || h.seen&(1<<hdrDestinationSubset) == 0 {
		return ""
	}
	if v := h.value(hdrDestinationSubset); v != "" {
		return strings.Clone(v)
	}
	return emptySubset
}

// inSubset keeps the candidates that a comma-separated list of ip:port or ip
// names. What is neither names nothing.
func inSubset(snap *pool.Snapshot, index []int32, subset string) []int32 {
	pairs := map[netip.AddrPort]bool{}
	hosts := map[netip.Addr]bool{}
	for entry := range strings.SplitSeq(subset, ",") {
		entry = strings.TrimSpace(entry)
		if pair, err := netip.ParseAddrPort(entry); err == nil {
			pairs[netip.AddrPortFrom(pair.Addr().Unmap(), pair.Port())] = true
			continue
		}
		bare, bracketed := strings.CutPrefix(entry, "[")
		if bracketed {
			bare = strings.TrimSuffix(bare, "]")
		}
		if host, err := netip.ParseAddr(bare); err == nil {
			hosts[host.Unmap()] = true
		}
	}
	var kept []int32
	for _, i := range index {
		address := snap.Endpoints[i].Addr
		host := address.Addr().Unmap()
		if hosts[host] || pairs[netip.AddrPortFrom(host, address.Port())] {
			kept = append(kept, i)
		}
	}
	return kept
}
