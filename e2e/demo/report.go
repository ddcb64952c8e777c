package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// percentile is the smallest value that at least p percent of values do not exceed (nearest rank); 0 of none. p is above
// 0 and at most 100.
func percentile[T cmp.Ordered](values []T, p float64) T {
	var none T
	if len(values) == 0 {
		return none
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(int(math.Ceil(p/100*float64(len(sorted))))-1, 0)]
}

// roundRobin is how many of n requests go to the marked pods when each pod in turn gets one.
func roundRobin(n int, marked []bool) int {
	count := 0
	for i := range n {
		if marked[i%len(marked)] {
			count++
		}
	}
	return count
}

// row is what one pod got.
type row struct {
	pod             pod
	endpoint        string
	requests        int
	streamed, whole []time.Duration // to the first byte
}

// rows counts the outcomes by pod; addresses are those of the pods. Requests that failed are left out.
func rows(pods []pod, addresses []string, outcomes []outcome) []row {
	list := make([]row, len(pods))
	for i, p := range pods {
		list[i] = row{pod: p, endpoint: addresses[i]}
	}
	for _, o := range outcomes {
		i := slices.Index(addresses, o.endpoint)
		if o.err != nil || i < 0 {
			continue
		}
		list[i].requests++
		if o.chat.stream {
			list[i].streamed = append(list[i].streamed, o.firstByte)
		} else {
			list[i].whole = append(list[i].whole, o.firstByte)
		}
	}
	return list
}

// share is, of the requests for one model, those that loaded pods got, and what round robin would have given them.
type share struct {
	requests, loaded, roundRobin int
}

func shareOf(model string, list []row) share {
	var s share
	var marked []bool
	for _, r := range list {
		if r.pod.model != model {
			continue
		}
		marked = append(marked, r.pod.loaded)
		s.requests += r.requests
		if r.pod.loaded {
			s.loaded += r.requests
		}
	}
	if len(marked) > 0 {
		s.roundRobin = roundRobin(s.requests, marked)
	}
	return s
}

func percent(part, all int) string {
	if all == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(all))
}

// millis is a percentile in milliseconds, "–" of nothing.
func millis(values []time.Duration, p float64) string {
	if len(values) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.0f", float64(percentile(values, p))/float64(time.Millisecond))
}

// table prints cells in columns, indented by two; the first columns are text, the others numbers.
func table(out io.Writer, text int, cells [][]string) {
	width := map[int]int{}
	for _, line := range cells {
		for i, c := range line {
			width[i] = max(width[i], len([]rune(c)))
		}
	}
	for _, line := range cells {
		var b strings.Builder
		for i, c := range line {
			gap := strings.Repeat(" ", width[i]-len([]rune(c)))
			if i < text {
				b.WriteString("  " + c + gap)
			} else {
				b.WriteString("  " + gap + c)
			}
		}
		fmt.Fprintln(out, strings.TrimRight(b.String(), " "))
	}
}
