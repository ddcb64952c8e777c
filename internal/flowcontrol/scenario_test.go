package flowcontrol

import (
	"bufio"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

var update = flag.Bool("update", false, "rewrite the expected output of scenarios")

// TestScenarios runs each file of testdata/scenarios: a command a line, and
// below it, indented, what happens.
//
//	config KEY=VALUE ...             change the configuration
//	endpoints NAME:MODEL[,MODEL] ... the pool's endpoints
//	scrape NAME [waiting=N] [kv=F] [running=N]   a new reading
//	arrive NAME [KEY=VALUE ...]      a request; A..B in the name is several
//	finish NAME ...                  the answer ends, or the client leaves the queue
//	doubt NAME, trust NAME           an endpoint had a fault; it answered
//	sends NAME ...                   its engine sends something: a late one that was asked to ends
//	advance DURATION
//	drain, undrain
//	show
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/scenarios/*.txt")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d scenarios, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := play(t, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			} else if got != string(want) {
				t.Errorf("%s differs (-update rewrites it); got:\n%s", file, got)
			}
		})
	}
}

func play(t *testing.T, text string) string {
	var out strings.Builder
	w := newWorld(defaultConfig())
	for lines := bufio.NewScanner(strings.NewReader(text)); lines.Scan(); {
		line := lines.Text()
		if strings.HasPrefix(line, "    ") {
			continue // what happened when it was written
		}
		out.WriteString(line + "\n")
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		words := strings.Fields(line)
		if err := w.command(words[0], words[1:]); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		for _, said := range w.log {
			out.WriteString("    " + said + "\n")
		}
		w.log = nil
	}
	return out.String()
}

func (w *world) command(name string, args []string) error {
	switch name {
	case "config":
		for _, arg := range args {
			if err := w.set(arg); err != nil {
				return err
			}
		}
		w.ctl.Apply(w.config)
	case "endpoints":
		var names []string
		for _, arg := range args {
			n, models, _ := strings.Cut(arg, ":")
			names = append(names, n)
			w.models[n] = strings.Split(models, ",")
		}
		w.setEndpoints(names)
	case "scrape":
		m := &pool.Metrics{Taken: w.clock}
		for _, arg := range args[1:] {
			key, value, _ := strings.Cut(arg, "=")
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return err
			}
			metric, ok := map[string]pool.Metric{
				"waiting": pool.NumRequestsWaiting, "kv": pool.KVCacheUsagePerc, "running": pool.NumRequestsRunning,
			}[key]
			if !ok {
				return fmt.Errorf("unknown metric %q", key)
			}
			m.Set(metric, v)
		}
		w.metrics[args[0]] = m
		w.publish()
	case "arrive":
		return w.arriveCommand(args)
	case "finish":
		for _, n := range args {
			if w.requests[n] == nil {
				return fmt.Errorf("no request %q", n)
			}
			w.finish(n)
		}
	case "doubt":
		w.live[args[0]].Doubt(w.clock)
	case "trust":
		w.live[args[0]].Trust(w.clock)
		w.publish() // as the pool's writer does
	case "sends":
		for _, n := range args {
			w.requests[n].evicted()
		}
	case "advance":
		d, err := time.ParseDuration(args[0])
		if err != nil {
			return err
		}
		w.advance(d)
	case "drain":
		w.room.Drain()
	case "undrain":
		w.room.Undrain()
	case "show":
		w.say("%s", w.show())
	default:
		return fmt.Errorf("unknown command")
	}
	return nil
}

func (w *world) arriveCommand(args []string) error {
	ask := Ask{Model: "m", Flow: "default-flow", Bytes: 1}
	for _, arg := range args[1:] {
		key, value, _ := strings.Cut(arg, "=")
		var err error
		switch key {
		case "flow":
			ask.Flow = value
		case "model":
			ask.Model = value
		case "evict":
			ask.Subset = value
		case "band":
			ask.Priority, err = strconv.Atoi(value)
		case "bytes":
			ask.Bytes, err = strconv.ParseInt(value, 10, 64)
		case "cost":
			ask.Cost, err = strconv.ParseInt(value, 10, 64)
		case "ttl":
			ask.TTL, err = time.ParseDuration(value)
		case "ttft":
			ask.TTFT, err = time.ParseDuration(value)
		default:
			err = fmt.Errorf("unknown key %q", key)
		}
		if err != nil {
			return err
		}
	}
	name, rest, many := strings.Cut(args[0], "..")
	if !many {
		w.arrive(name, ask)
		return nil
	}
	digits := len(name) - len(strings.TrimRight(name, "0123456789"))
	prefix := name[:len(name)-digits]
	from, err := strconv.Atoi(name[len(prefix):])
	if err != nil {
		return err
	}
	to, err := strconv.Atoi(rest)
	if err != nil {
		return err
	}
	for i := from; i <= to; i++ {
		w.arrive(prefix+strconv.Itoa(i), ask)
	}
	return nil
}

func (w *world) set(arg string) (err error) {
	c := &w.config
	key, value, _ := strings.Cut(arg, "=")
	switch key {
	case "enabled":
		c.Enabled, err = strconv.ParseBool(value)
	case "eviction":
		c.Eviction, err = strconv.ParseBool(value)
	case "displace":
		c.Displace, err = strconv.ParseBool(value)
	case "saturation":
		c.Detector.Saturation, err = ParseSaturation(value)
	case "fairness":
		c.Fairness, err = ParseFairness(value)
	case "order":
		c.Order, err = ParseOrder(value)
	case "ttl":
		c.TTL, err = time.ParseDuration(value)
	case "emptyPoolTTL":
		c.EmptyPoolTTL, err = time.ParseDuration(value)
	case "concurrency":
		c.Detector.MaxConcurrency, err = strconv.ParseInt(value, 10, 64)
	case "flow", "band", "total":
		requests, bytes, _ := strings.Cut(value, ",")
		limit := map[string]*Limit{"flow": &c.Flow, "band": &c.Band, "total": &c.Total}[key]
		if limit.Requests, err = strconv.Atoi(requests); err == nil && bytes != "" {
			limit.Bytes, err = strconv.ParseInt(bytes, 10, 64)
		}
	case "weights":
		c.Weights = map[string]float64{}
		for pair := range strings.SplitSeq(value, ",") {
			name, weight, _ := strings.Cut(pair, ":")
			if c.Weights[name], err = strconv.ParseFloat(weight, 64); err != nil {
				return err
			}
		}
	case "bandTTL": // PRIORITY:TTL
		priority, ttl, _ := strings.Cut(value, ":")
		b := BandConfig{}
		if b.Priority, err = strconv.Atoi(priority); err == nil {
			b.TTL, err = time.ParseDuration(ttl)
		}
		c.Bands = []BandConfig{b}
	default:
		err = fmt.Errorf("unknown key %q", key)
	}
	return err
}

func TestParse(t *testing.T) {
	for _, name := range []string{"round-robin", "weighted", "global-fcfs"} {
		if _, err := ParseFairness(name); err != nil {
			t.Error(err)
		}
	}
	for what, err := range map[string]error{
		`unknown fairness "x", valid: round-robin, weighted, global-fcfs`:  second(ParseFairness("x")),
		`unknown order "x", valid: fcfs, edf`:                              second(ParseOrder("x")),
		`unknown saturation detector "x", valid: utilization, concurrency`: second(ParseSaturation("x")),
	} {
		if err == nil || err.Error() != what {
			t.Errorf("%v, want %s", err, what)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestAllowance is the room of one reading, by hand.
func TestAllowance(t *testing.T) {
	for _, c := range []struct {
		waiting, running, kv float64 // NaN is none
		flying               int64
		want                 int64
	}{
		{0, 0, 0, 0, 5},               // an idle engine: the threshold
		{0, 10, 0.1, 10, 15},          // may double
		{0, 10, 0.4, 10, 10},          // the cache has place for ten more
		{0, 100, 0.79, 100, 1},        // for one, and one is the least
		{2, 10, 0.1, 12, 3},           // what is left below the threshold
		{4.5, 10, 0.1, 12, 1},         // rounded up
		{math.NaN(), 10, 0.2, 10, 15}, // the queue is not reported
		{0, math.NaN(), 0.2, 7, 12},   // nor what runs: what is in flight
		{0, 10, math.NaN(), 10, 15},   // nor the cache
	} {
		w := newWorld(defaultConfig())
		w.config.Detector.Saturation = Utilization
		w.models["e"] = []string{"m"}
		m := &pool.Metrics{Taken: w.clock}
		m.Set(pool.NumRequestsWaiting, c.waiting)
		m.Set(pool.NumRequestsRunning, c.running)
		m.Set(pool.KVCacheUsagePerc, c.kv)
		w.metrics["e"] = m
		w.setEndpoints([]string{"e"})
		view := w.config.Detector.View(w.snap, w.clock)
		if got := view.allowance(0, c.flying); got != c.want {
			t.Errorf("waiting %v running %v kv %v: %d, want %d", c.waiting, c.running, c.kv, got, c.want)
		}
	}
}
