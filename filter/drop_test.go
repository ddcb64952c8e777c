package filter

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// dropTable is the table of dropped reason values of the llm-d header
// reference, with the gRPC status and the range of retry-after beside it.
const dropTable = `
rejected-saturated          429  8  1-3
evicted                     429  8  5-10
rejected-ttl-expired        429  8  1-3
rejected-no-endpoints       503 14  1-3
rejected-context-cancelled  503 14  1-3
rejected-shutting-down      503 14  1-3
rejected-internal           500 13  none
`

func TestDropReasons(t *testing.T) {
	rows := strings.Split(strings.TrimSpace(dropTable), "\n")
	if len(rows) != int(numDropReasons)-1 {
		t.Fatalf("%d reasons, the reference has %d", numDropReasons-1, len(rows))
	}
	types := map[string]string{"429": "rate_limit_error", "503": "overloaded_error", "500": "api_error"}
	for i, row := range rows {
		f := strings.Fields(row)
		reason, status, grpc, after := f[0], f[1], f[2], f[3]
		d := DropReason(i + 1)
		w := newWorld(t, "")
		drop := func(h *Head) *Verdict {
			s := w.stream()
			s.Headers(h, false, nil, &s.v)
			s.v.Reset()
			s.v.Destination = "10.0.0.1:8000"
			s.drop(d, `no "room"`, &s.v)
			if s.word.Load() != stateDone {
				t.Errorf("%s: the request goes on", reason)
			}
			if s.v.Destination != "" {
				t.Errorf("%s: a reply has a destination", reason)
			}
			return &s.v
		}
		seen := map[string]bool{}
		for range 300 {
			v := drop(post(chatPath))
			seen[v.replyHeader("retry-after")] = true
			retry := ""
			if after != "none" {
				retry = "<retry-after:N> "
			}
			want := fmt.Sprintf("reply reason=%s fairness_id=default-flow status=%s details=shunt_%s <x-llm-d-request-dropped-reason:%s> %s<content-type:application/json> "+
				`{"error":{"message":"no \"room\"","type":"%s","code":"%s","param":null}}`, reason, status, reason, reason, retry, types[status], reason)
			if got := show(v); got != want {
				t.Fatalf("got\n%s\nwant\n%s", got, want)
			}
		}
		want := map[string]bool{}
		if least, most, ok := strings.Cut(after, "-"); ok {
			from, _ := strconv.Atoi(least)
			to, _ := strconv.Atoi(most)
			for s := from; s <= to; s++ {
				want[strconv.Itoa(s)] = true
			}
		} else {
			want[""] = true
		}
		if fmt.Sprint(seen) != fmt.Sprint(want) {
			t.Errorf("%s: retry-after %v, want %v", reason, seen, want)
		}

		v := drop(post("/v1/messages"))
		if got, want := string(v.Reply.Body), `{"type":"error","error":{"type":"`+types[status]+`","message":"no \"room\""}}`; got != want {
			t.Errorf("%s, Anthropic: got %s, want %s", reason, got, want)
		}
		v = drop(post(chatPath, "content-type", "application/grpc"))
		if strconv.Itoa(v.Reply.GRPC) != grpc || v.Reply.Message != `no "room"` || len(v.Reply.Body) != 0 ||
			v.replyHeader("content-type") != "" || v.replyHeader(HeaderDropReason) != reason || v.meta("reason") != reason {
			t.Errorf("%s, gRPC: %s", reason, show(v))
		}
		if n := w.counterValue(t, "shunt_drops_total", "pool", "default", "reason", reason); n != 302 {
			t.Errorf("%s: %v counted", reason, n)
		}
	}
}
