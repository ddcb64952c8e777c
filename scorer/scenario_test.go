package scorer

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/shuntproxy/shunt/internal/pool"
)

var update = flag.Bool("update", false, "rewrite the expected output of the scenarios")

// TestScenarios runs the files in testdata. A file holds cases: a line "case",
// lines that describe a world and a request (see scenario.line), and after "--"
// what comes of it, which -update rewrites:
//
//	case fewest in flight
//	policy least-request
//	endpoint a in-flight=3
//	endpoint b in-flight=1
//	--
//	a        least-request 0
//	b  100%  least-request 1
//
// The shares are of 400 seeds, to the nearest 5 %.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scenarios", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScenarios(t, string(text))
			if *update {
				if err := os.WriteFile(file, got, 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if !bytes.Equal(got, text) {
				t.Errorf("differs (-update rewrites it):\n%s", firstDifference(string(text), string(got)))
			}
		})
	}
}

func firstDifference(want, got string) string {
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	name := ""
	for i := range max(len(a), len(b)) {
		x, y := "", ""
		if i < len(a) {
			x = a[i]
		}
		if i < len(b) {
			y = b[i]
		}
		if strings.HasPrefix(x, "case ") {
			name = x
		}
		if x != y {
			return fmt.Sprintf("line %d, %s\nwant %s\ngot  %s", i+1, name, x, y)
		}
	}
	return ""
}

func runScenarios(t *testing.T, text string) []byte {
	t.Helper()
	var out bytes.Buffer
	var sc *scenario
	finish := func() {
		if sc != nil {
			out.WriteString("--\n" + sc.run() + "\n")
		}
		sc = nil
	}
	skipping := false
	for n, line := range strings.Split(strings.TrimRight(text, "\n"), "\n") {
		switch {
		case strings.HasPrefix(line, "case "):
			finish()
			skipping = false
			sc = &scenario{t: t, where: fmt.Sprintf("line %d, %s", n+1, line)}
			sc.world.request.output = -1
			out.WriteString(line + "\n")
		case sc == nil:
			out.WriteString(line + "\n")
		case line == "--":
			skipping = true
		case skipping:
		case strings.TrimSpace(line) == "":
		default:
			sc.where = fmt.Sprintf("line %d, %s", n+1, line)
			sc.line(line)
			out.WriteString(line + "\n")
		}
	}
	finish()
	return append(bytes.TrimRight(out.Bytes(), "\n"), '\n')
}

// scenario is one case.
type scenario struct {
	t      *testing.T
	where  string
	world  worldSpec
	policy *Policy
	parts  []Part
}

func (sc *scenario) fail(format string, args ...any) {
	sc.t.Helper()
	sc.t.Fatalf("%s: %s", sc.where, fmt.Sprintf(format, args...))
}

// line reads one line of a case:
//
//	policy NAME | NAME:WEIGHT,…        or lines part NAME weight=2 slack=16
//	endpoint NAME key=value …          endpoints N key=value … makes many
//	request prompt=N blocks=N …
//	request … ttft=200ms tpot=20ms     and admission prefer | only
//	guards doubted wedged pushback overload warm-up slow-start=10s
//	profile model=m hardware=h100 PROMPT/OUTPUT=CAPACITY …
func (sc *scenario) line(line string) {
	words := strings.Fields(line)
	switch words[0] {
	case "policy":
		p, err := Parse(strings.Join(words[1:], " "))
		if err != nil {
			sc.fail("%v", err)
		}
		sc.policy = p
	case "part":
		part := Part{Name: words[1], Weight: 1, Params: map[string]string{}}
		sc.pairs(words[2:], func(key, value string) {
			if key == "weight" {
				part.Weight = sc.number(value)
				return
			}
			part.Params[key] = value
		})
		sc.parts = append(sc.parts, part)
	case "endpoint":
		sc.world.endpoints = append(sc.world.endpoints, sc.endpoint(words[1], words[2:], 0))
	case "endpoints":
		for i := range int(sc.number(words[1])) {
			sc.world.endpoints = append(sc.world.endpoints, sc.endpoint(strconv.Itoa(i), words[2:], i))
		}
	case "request":
		sc.pairs(words[1:], func(key, value string) {
			r := &sc.world.request
			switch key {
			case "ttft":
				r.goals.TTFT = sc.duration(value)
				return
			case "tpot":
				r.goals.TPOT = sc.duration(value)
				return
			}
			switch n := int(sc.number(value)); key {
			case "prompt":
				r.prompt = n
			case "output":
				r.output = n
			case "blocks":
				r.blocks = n
			case "session":
				r.session = uint64(n)
			default:
				sc.fail("a request has no %s", key)
			}
		})
	case "admission":
		switch words[1] {
		case "prefer":
			sc.world.admission = AdmitPrefer
		case "only":
			sc.world.admission = AdmitOnly
		default:
			sc.fail("no admission %s", words[1])
		}
	case "guards":
		for _, word := range words[1:] {
			g := &sc.world.guards
			switch key, value, _ := strings.Cut(word, "="); key {
			case "doubted":
				g.Doubted = true
			case "wedged":
				g.Wedged = true
			case "pushback":
				g.Pushback = true
			case "overload":
				g.OverloadVeto = true
			case "warm-up":
				g.WarmUp = true
			case "slow-start":
				g.SlowStart = sc.duration(value)
			default:
				sc.fail("no guard %s", word)
			}
		}
	case "profile":
		var p Profile
		sc.pairs(words[1:], func(key, value string) {
			switch key {
			case "model":
				p.Model = value
			case "hardware":
				p.Hardware = value
			default:
				prompt, output, _ := strings.Cut(key, "/")
				p.Points = append(p.Points, Point{int64(sc.number(prompt)), int64(sc.number(output)), sc.number(value)})
			}
		})
		sc.world.profiles = append(sc.world.profiles, p)
	default:
		sc.fail("unknown line")
	}
}

func (sc *scenario) pairs(words []string, each func(key, value string)) {
	for _, word := range words {
		key, value, ok := strings.Cut(word, "=")
		if !ok {
			sc.fail("%q is not key=value", word)
		}
		each(key, value)
	}
}

func (sc *scenario) number(text string) float64 {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		sc.fail("%q is not a number", text)
	}
	return v
}

func (sc *scenario) duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		sc.fail("%v", err)
	}
	return d
}

// endpoint reads an endpoint's keys; in a value, %N is its number modulo N.
func (sc *scenario) endpoint(name string, words []string, number int) endpointSpec {
	e := endpointSpec{name: name}
	ints := map[string]*int{
		"in-flight": &e.inFlight, "prefill": &e.prefill, "tokens": &e.tokens, "lora-max": &e.loraMax, "holds": &e.holds,
		"blocks": &e.blocks, "kv-tokens": &e.kvTokens,
	}
	floats := map[string]*float64{
		"cost": &e.cost, "output-rate": &e.outputRate, "read-rate": &e.readRate, "avg-prompt": &e.avgPrompt, "avg-output": &e.avgOutput,
	}
	durations := map[string]*time.Duration{"age": &e.age, "ready": &e.ready, "pace": &e.pace}
	lists := map[string]*[]string{"lora-running": &e.running, "lora-waiting": &e.waiting}
	bools := map[string]*bool{"wedged": &e.wedged, "pushed-back": &e.pushedBack, "doubted": &e.doubted}
	metrics := map[string]pool.Metric{
		"kv": pool.KVCacheUsagePerc, "waiting": pool.NumRequestsWaiting, "running": pool.NumRequestsRunning,
		"utilization": pool.EngineUtilization, "queue-time": pool.RequestQueueTime, "prefill-time": pool.RequestPrefillTime,
		"decode-time": pool.RequestDecodeTime, "itl": pool.InterTokenLatency,
		"ttft-mean": pool.TimeToFirstToken, "prompt-mean": pool.PromptTokensPerRequest, "hits": pool.KVCacheHitRate,
		"per-second": pool.RequestRate,
	}
	sc.pairs(words, func(key, value string) {
		if modulus, ok := strings.CutPrefix(value, "%"); ok {
			value = strconv.Itoa(number % int(sc.number(modulus)))
		}
		m, isMetric := metrics[key]
		switch {
		case ints[key] != nil:
			*ints[key] = int(sc.number(value))
		case floats[key] != nil:
			*floats[key] = sc.number(value)
		case durations[key] != nil:
			*durations[key] = sc.duration(value)
		case lists[key] != nil:
			*lists[key] = strings.Split(value, "|")
		case bools[key] != nil:
			*bools[key] = value == "true"
		case isMetric:
			if e.metrics == nil {
				e.metrics = map[pool.Metric]float64{}
			}
			e.metrics[m] = sc.number(value)
		case key == "hardware":
			e.hardware = value
		default:
			sc.fail("an endpoint has no %s", key)
		}
	})
	return e
}

// run picks with many seeds and describes what comes of it.
func (sc *scenario) run() string {
	if sc.parts != nil {
		p, problems := Compile(sc.parts)
		if len(problems) > 0 {
			sc.fail("%+v", problems)
		}
		sc.policy = p
	}
	const seeds = 400
	in := sc.world.build(sc.t)
	wins := make([]int, len(sc.world.endpoints))
	fallbacks := map[Fallback]int{}
	var guards [NumGuards]int
	var slo [NumSLOOutcomes]int
	cached := map[int32]int64{}
	for seed := range uint64(seeds) {
		in.Seed = mix(seed)
		c := sc.policy.Pick(in)
		if slo[c.SLO]++; c.SLO != SLORefused {
			wins[c.Index]++
			cached[c.Index] = c.Cached
			fallbacks[c.Fallback]++
		}
		for g := range NumGuards {
			if c.Guarded.Has(g) {
				guards[g]++
			}
		}
	}
	share := func(n int) string { return fmt.Sprintf("%d%%", int(math.Round(20*float64(n)/seeds))*5) }

	var out strings.Builder
	if n := len(wins); n > 12 {
		won := 0
		for _, w := range wins {
			if w > 0 {
				won++
			}
		}
		few, many := slices.Min(wins), slices.Max(wins)
		fmt.Fprintf(&out, "%d of %d win, %s to %s each\n", won, n, share(few), share(many))
	} else {
		var why Explanation
		in.Seed, in.Explain = mix(0), &why
		c := sc.policy.PickAndReserve(in) // last: it changes the load
		c.Reservation.Release(now, true)
		width := 0
		for i := range sc.world.endpoints {
			width = max(width, len(sc.world.endpoints[i].name))
		}
		for i := range sc.world.endpoints {
			one := &why.Candidates[i]
			won := ""
			if wins[i] > 0 {
				won = share(wins[i])
			}
			fmt.Fprintf(&out, "%-*s  %4s", width, sc.world.endpoints[i].name, won)
			for p := range sc.policy.parts {
				name := kinds[sc.policy.parts[p].kind].name
				if v, ok := one.Scores[name]; ok {
					fmt.Fprintf(&out, "  %s %.3g", name, v)
				}
			}
			if one.Total != nil && len(sc.policy.parts) > 1 {
				fmt.Fprintf(&out, "  total %.3g", *one.Total)
			}
			if wins[i] > 0 && cached[int32(i)] > 0 {
				fmt.Fprintf(&out, "  cached %d", cached[int32(i)])
			}
			if one.Skipped != "" {
				fmt.Fprintf(&out, "  (%s)", one.Skipped)
			}
			out.WriteByte('\n')
		}
	}
	for _, f := range []Fallback{FallbackRandom, FallbackFull} {
		if n := fallbacks[f]; n > 0 {
			fmt.Fprintf(&out, "fallback %s %s\n", f, share(n))
		}
	}
	for g, n := range guards {
		if n > 0 {
			fmt.Fprintf(&out, "guard %s %s\n", Guard(g), share(n))
		}
	}
	for o, n := range slo[1:] {
		if n > 0 {
			fmt.Fprintf(&out, "slo %s %s\n", SLOOutcome(o+1), share(n))
		}
	}
	return out.String()
}
