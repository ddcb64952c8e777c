package flowcontrol

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// dumb is flow control as one would write it for ten requests: one list, read
// from end to end for each step. It knows the concurrency detector.
type dumb struct {
	config Config
	now    int64
	names  []string
	models map[string][]string
	flying map[string]int64
	list   []*dumbRequest // all that wait, by arrival
	all    map[string]*dumbRequest
	flows  map[string]*dumbFlow // by band and name
	round  map[int]int64        // by band
	turn   map[int]int
	seq    int
	log    []string
	waited map[string]int64 // since when nothing came free, by band and model
	born   map[string]int   // the order in which the same were first waited for
	asks   []int64          // when requests were asked to end
	flew   []*dumbRequest   // sheddable and in flight, in the order of sending
}

type dumbRequest struct {
	name     string
	ask      Ask
	seq      int
	deadline int64
	goal     int64
	on       string
	asked    bool
	askedAt  int64
}

type dumbFlow struct {
	round, deficit int64
	turn           int
}

func newDumb(config Config) *dumb {
	return &dumb{
		config: config, models: map[string][]string{}, flying: map[string]int64{}, all: map[string]*dumbRequest{},
		flows: map[string]*dumbFlow{}, round: map[int]int64{}, turn: map[int]int{}, waited: map[string]int64{}, born: map[string]int{},
	}
}

func (d *dumb) say(format string, args ...any) { d.log = append(d.log, fmt.Sprintf(format, args...)) }

func (d *dumb) serves(endpoint, model string) bool { return slices.Contains(d.models[endpoint], model) }

func (d *dumb) flow(r *dumbRequest) (*dumbFlow, string) {
	name := r.ask.Flow
	if d.config.Fairness == GlobalFCFS {
		name = ""
	}
	key := fmt.Sprint(r.ask.Priority, "/", name)
	f := d.flows[key]
	if f == nil {
		d.turn[r.ask.Priority]++
		f = &dumbFlow{round: d.round[r.ask.Priority], turn: d.turn[r.ask.Priority]}
		d.flows[key] = f
	}
	return f, key
}

func (d *dumb) share(r *dumbRequest) int64 {
	if d.config.Fairness != Weighted {
		return 1
	}
	if w, ok := d.config.Weights[r.ask.Flow]; ok {
		return int64(w * quantum)
	}
	return quantum
}

func (d *dumb) cost(r *dumbRequest) int64 {
	if d.config.Fairness != Weighted {
		return 1
	}
	return max(1, r.ask.Cost)
}

// heads are the first requests of each flow and model in a band, in their order.
func (d *dumb) heads(band int) []*dumbRequest {
	var heads []*dumbRequest
	for _, r := range d.list {
		if r.ask.Priority != band {
			continue
		}
		_, key := d.flow(r)
		i := slices.IndexFunc(heads, func(h *dumbRequest) bool {
			_, other := d.flow(h)
			return other == key && h.ask.Model == r.ask.Model
		})
		switch {
		case i < 0:
			heads = append(heads, r)
		case d.config.Order == EDF && r.goal < heads[i].goal:
			heads[i] = r
		}
	}
	return heads
}

func (d *dumb) due(r *dumbRequest) int64 {
	f, _ := d.flow(r)
	due, deficit := f.round, f.deficit
	for deficit < d.cost(r) {
		deficit += d.share(r)
		due++
	}
	return due
}

func (d *dumb) bands() []int {
	var bands []int
	for _, r := range d.list {
		if !slices.Contains(bands, r.ask.Priority) {
			bands = append(bands, r.ask.Priority)
		}
	}
	slices.Sort(bands)
	slices.Reverse(bands)
	return bands
}

// next is who goes to an endpoint with room.
func (d *dumb) next(endpoint string) *dumbRequest {
	for _, band := range d.bands() {
		var best *dumbRequest
		for _, r := range d.heads(band) {
			if d.serves(endpoint, r.ask.Model) && (best == nil || d.before(r, best)) {
				best = r
			}
		}
		if best != nil {
			return best
		}
	}
	return nil
}

func (d *dumb) before(a, b *dumbRequest) bool {
	fa, _ := d.flow(a)
	fb, _ := d.flow(b)
	switch {
	case d.due(a) != d.due(b):
		return d.due(a) < d.due(b)
	case fa != fb:
		return fa.turn < fb.turn
	case d.config.Order == EDF && a.goal != b.goal:
		return a.goal < b.goal
	default:
		return a.seq < b.seq
	}
}

func (d *dumb) grant(endpoint string) bool {
	r := d.next(endpoint)
	if r == nil {
		return false
	}
	f, key := d.flow(r)
	due := d.due(r)
	f.deficit += (due-f.round)*d.share(r) - d.cost(r)
	f.round = max(due, d.round[r.ask.Priority])
	d.round[r.ask.Priority] = f.round
	d.remove(r)
	if d.flows[key] != nil {
		again := false
		for _, h := range d.heads(r.ask.Priority) {
			if hf, _ := d.flow(h); hf == f && d.due(h) == f.round {
				again = true
			}
		}
		if !again {
			d.turn[r.ask.Priority]++
			f.turn = d.turn[r.ask.Priority]
		}
	}
	d.waited[r.claim()] = d.now
	d.send(r, endpoint)
	return true
}

// claim is what a request waits in line for.
func (r *dumbRequest) claim() string { return fmt.Sprint(r.ask.Priority, "/", r.ask.Model) }

func (d *dumb) send(r *dumbRequest, endpoint string) {
	d.flying[endpoint]++
	r.on = endpoint
	d.say("%s -> %s", r.name, endpoint)
	if d.config.Eviction && r.ask.Priority < 0 && r.evict() != "no" {
		d.flew = append(d.flew, r)
	}
}

func (r *dumbRequest) evict() string { return r.ask.Subset }

// claims are what a band's requests wait for, each with how many do.
func (d *dumb) claims(band int) (names []string, waiting map[string]int, model map[string]string) {
	waiting, model = map[string]int{}, map[string]string{}
	for _, r := range d.list {
		if r.ask.Priority != band {
			continue
		}
		if waiting[r.claim()] == 0 {
			names = append(names, r.claim())
		}
		waiting[r.claim()]++
		model[r.claim()] = r.ask.Model
	}
	slices.SortFunc(names, func(a, b string) int { return d.born[a] - d.born[b] })
	return names, waiting, model
}

// look asks those to end who have to, ends those that end at once, and reports
// whether there were any.
func (d *dumb) look() bool {
	if !d.config.Eviction {
		return false
	}
	outstanding := 0
	for _, f := range d.flew {
		if f.asked && d.now < f.askedAt+evictConfirm {
			outstanding++
		}
	}
	taken := map[string]bool{}
	var victims []*dumbRequest
	for _, band := range d.bands() {
		names, waiting, model := d.claims(band)
		for _, name := range names {
			if d.now < d.waited[name]+evictPatience {
				continue
			}
			missing := waiting[name]
			for _, f := range d.flew {
				if f.asked && d.now < f.askedAt+evictConfirm && slices.Contains(d.names, f.on) && d.serves(f.on, model[name]) {
					missing--
				}
			}
			lately := 0
			for _, at := range d.asks {
				if d.now < at+evictPatience {
					lately++
				}
			}
			for ; missing > 0 && outstanding < evictAtOnce && lately < evictAtOnce; missing-- {
				var best *dumbRequest
				for _, f := range d.flew { // the newest of the lowest
					if !f.asked && f.ask.Priority < band && slices.Contains(d.names, f.on) && d.serves(f.on, model[name]) && !taken[f.on] &&
						d.flying[f.on] >= d.config.Detector.MaxConcurrency && (best == nil || f.ask.Priority <= best.ask.Priority) {
						best = f
					}
				}
				if best == nil {
					break
				}
				best.asked, best.askedAt = true, d.now
				outstanding++
				lately++
				d.asks = append(d.asks, d.now)
				d.waited[name] = d.now
				victims = append(victims, best)
			}
		}
		for _, name := range names {
			for _, e := range d.names {
				taken[e] = taken[e] || d.serves(e, model[name])
			}
		}
	}
	for _, v := range victims {
		if v.evict() == "late" {
			d.say("%s is asked to end", v.name)
		} else {
			d.say("%s: evicted", v.name)
			d.release(v)
		}
	}
	return len(victims) > 0
}

// release gives the slot of a request on.
func (d *dumb) release(r *dumbRequest) {
	e := r.on
	d.flying[e]--
	r.on = ""
	d.flew = slices.DeleteFunc(d.flew, func(f *dumbRequest) bool { return f == r })
	if slices.Contains(d.names, e) {
		for d.flying[e] < d.config.Detector.MaxConcurrency && d.grant(e) {
		}
	}
}

// sends is that the engine of a request sends something.
func (d *dumb) sends(name string) {
	if r := d.all[name]; r.on != "" && r.asked && r.evict() == "late" {
		d.say("%s: evicted", name)
		d.release(r)
	}
}

// steps are the times up to the end of an advance at which something may happen.
func (d *dumb) steps(end int64) int64 {
	next := end
	for _, r := range d.list {
		next = min(next, max(d.now, r.deadline))
		if at := d.waited[r.claim()] + evictPatience; at > d.now {
			next = min(next, at)
		}
	}
	for _, at := range d.asks {
		if at += evictPatience; at > d.now {
			next = min(next, at)
		}
	}
	for _, f := range d.flew {
		if at := f.askedAt + evictConfirm; f.asked && at > d.now {
			next = min(next, at)
		}
	}
	return next
}

func (d *dumb) remove(r *dumbRequest) {
	_, key := d.flow(r)
	d.list = slices.DeleteFunc(d.list, func(x *dumbRequest) bool { return x == r })
	for _, other := range d.list {
		if _, k := d.flow(other); k == key {
			return
		}
	}
	delete(d.flows, key)
}

func (d *dumb) dispatch() {
	rooms := map[string]int64{}
	for _, e := range d.names {
		rooms[e] = max(0, d.config.Detector.MaxConcurrency-d.flying[e])
	}
	for progress := true; progress; {
		progress = false
		for _, e := range d.names {
			if rooms[e] > 0 && d.grant(e) {
				rooms[e]--
				progress = true
			}
		}
	}
}

func (d *dumb) arrive(name string, ask Ask) {
	r := &dumbRequest{name: name, ask: ask}
	d.all[name] = r
	best, served := "", false
	for _, e := range d.names {
		if !d.serves(e, ask.Model) {
			continue
		}
		served = true
		if d.flying[e] < d.config.Detector.MaxConcurrency && (best == "" || d.flying[e] < d.flying[best]) {
			best = e
		}
	}
	if slices.ContainsFunc(d.list, func(o *dumbRequest) bool { return o.ask.Model == ask.Model }) {
		best = ""
	}
	switch {
	case best != "":
		d.send(r, best)
		return
	case !served:
		d.say("%s: rejected-no-endpoints", name)
		return
	}
	inFlow, inBand := 1, 1
	for _, o := range d.list {
		if o.ask.Priority == ask.Priority {
			inBand++
			if o.ask.Flow == ask.Flow {
				inFlow++
			}
		}
	}
	total := len(d.list) + 1
	over := d.config.Flow.Requests > 0 && inFlow > d.config.Flow.Requests || d.config.Band.Requests > 0 && inBand > d.config.Band.Requests
	if !over && d.config.Total.Requests > 0 && total > d.config.Total.Requests {
		over = true
		if bands := d.bands(); d.config.Displace && bands[len(bands)-1] < ask.Priority {
			over = false
			for i := len(d.list) - 1; i >= 0; i-- {
				if o := d.list[i]; o.ask.Priority == bands[len(bands)-1] {
					d.remove(o)
					d.say("%s: rejected-saturated, displaced", o.name)
					break
				}
			}
		}
	}
	if over {
		d.say("%s: rejected-saturated", name)
		return
	}
	d.seq++
	r.seq = d.seq
	r.deadline = d.now + int64(min(ask.TTL, d.config.TTL))
	r.goal = r.deadline
	if ask.TTFT > 0 {
		r.goal = d.now + int64(ask.TTFT)
	}
	d.flow(r)
	if names, _, _ := d.claims(ask.Priority); !slices.Contains(names, r.claim()) {
		d.waited[r.claim()], d.born[r.claim()] = d.now, d.seq
	}
	d.list = append(d.list, r)
	d.say("%s waits", name)
}

func (d *dumb) finish(name string) {
	r := d.all[name]
	switch {
	case r.on != "":
		d.release(r)
	case slices.Contains(d.list, r):
		d.remove(r)
		d.say("%s: rejected-context-cancelled", name)
	}
}

func (d *dumb) advance(span time.Duration) {
	for end := d.now + int64(span); ; {
		d.expire()
		for d.look() {
		}
		next := d.steps(end)
		if next == d.now {
			return
		}
		d.now = next
	}
}

func (d *dumb) expire() {
	for {
		var due *dumbRequest
		for _, r := range d.list {
			if r.deadline <= d.now && (due == nil || r.deadline < due.deadline) {
				due = r
			}
		}
		if due == nil {
			return
		}
		reason := "rejected-no-endpoints"
		for _, e := range d.names {
			if d.serves(e, due.ask.Model) {
				reason = "rejected-ttl-expired"
			}
		}
		d.remove(due)
		d.say("%s: %s", due.name, reason)
	}
}

// TestAgainstDumb plays random worlds to both.
func TestAgainstDumb(t *testing.T) {
	worlds := 120
	if testing.Short() {
		worlds = 20
	}
	queued, granted, evicted := 0, 0, 0
	for seed := range uint64(worlds) {
		rng := rand.New(rand.NewPCG(seed, 8))
		config := defaultConfig()
		config.Fairness = Fairness(rng.IntN(3))
		config.Order = Order(rng.IntN(2))
		config.Displace = rng.IntN(2) == 0
		config.Eviction = rng.IntN(3) > 0
		config.Weights = map[string]float64{"f1": 3, "f2": 0.5}
		config.Detector.MaxConcurrency = 1 + rng.Int64N(3)
		config.TTL = time.Hour // two that expire at the same time have no order
		config.Flow.Requests, config.Band.Requests, config.Total.Requests = 8*rng.IntN(2), 12*rng.IntN(2), 20*rng.IntN(2)
		real, ref := newWorld(config), newDumb(config)
		models := []string{"a", "b", "c"}[:1+rng.IntN(3)]
		for i := range 6 {
			name := fmt.Sprintf("e%d", i)
			serves := []string{models[rng.IntN(len(models))]}
			if more := models[rng.IntN(len(models))]; more != serves[0] {
				serves = append(serves, more)
			}
			real.models[name], ref.models[name] = serves, serves
		}
		endpoints := func() {
			var names []string
			for i := range 6 {
				if rng.IntN(2) == 0 {
					names = append(names, fmt.Sprintf("e%d", i))
				}
			}
			ref.names = names
			ref.dispatch()
			real.setEndpoints(names)
		}
		endpoints()
		var script []string
		var open []string
		for step := range 300 {
			switch op := rng.IntN(20); {
			case op < 11:
				name := fmt.Sprintf("r%d", step)
				ask := Ask{
					Model: models[rng.IntN(len(models))], Flow: fmt.Sprintf("f%d", rng.IntN(4)), Priority: rng.IntN(4) - 2, Subset: []string{"", "", "late", "no"}[rng.IntN(4)],
					Bytes: 1, Cost: rng.Int64N(3000), TTL: time.Duration(rng.Int64N(int64(30*time.Second))) + 1,
				}
				if rng.IntN(2) == 0 {
					ask.TTFT = time.Duration(1 + rng.Int64N(int64(5*time.Second)))
				}
				script = append(script, fmt.Sprintf("arrive %s %+v", name, ask))
				real.arrive(name, ask)
				ref.arrive(name, ask)
				open = append(open, name)
			case op < 12 && len(open) > 0:
				name := open[rng.IntN(len(open))]
				script = append(script, "sends "+name)
				real.requests[name].evicted()
				ref.sends(name)
			case op < 18 && len(open) > 0:
				i := rng.IntN(min(len(open), 8))
				script = append(script, "finish "+open[i])
				real.finish(open[i])
				ref.finish(open[i])
				open = slices.Delete(open, i, i+1)
			case op == 18:
				span := time.Duration(rng.Int64N(int64(4 * time.Second)))
				script = append(script, "advance "+span.String())
				real.advance(span)
				ref.advance(span)
			case op == 19 && rng.IntN(3) == 0:
				endpoints()
				script = append(script, fmt.Sprint("endpoints ", real.names))
			}
			for i, line := range real.log {
				real.log[i], _, _ = strings.Cut(line, ", its band")
				if strings.HasSuffix(line, "waits") {
					queued++
				}
				if strings.HasSuffix(line, "evicted") {
					evicted++
				}
				if strings.Contains(line, "->") {
					granted++
				}
			}
			if !slices.Equal(real.log, ref.log) {
				t.Fatalf("seed %d, after\n%s\nreal: %v\nwant: %v", seed, strings.Join(script[max(0, len(script)-40):], "\n"), real.log, ref.log)
			}
			real.log, ref.log = nil, nil
			check(t, real)
		}
	}
	if queued < worlds || granted < worlds || evicted < worlds {
		t.Errorf("%d queued, %d granted, %d evicted: too few to mean anything", queued, granted, evicted)
	}
}

// check reads a controller's lists from end to end.
func check(t *testing.T, w *world) {
	t.Helper()
	c := w.ctl
	total, bytes := 0, int64(0)
	for _, b := range c.bands {
		n, size := 0, int64(0)
		var last uint64
		for x := b.waiters.first; x != nil; x = x.links[inBand].next {
			if x.seq <= last || x.links[inBand].next == nil && b.waiters.last != x {
				t.Fatal("a band is out of order")
			}
			last = x.seq
			n++
			size += x.bytes
		}
		inLanes := 0
		for _, in := range b.list {
			for i, s := range in.subs {
				if s.index != i || s.length == 0 || i > 0 && in.subs[i].before(in.subs[(i-1)/2]) {
					t.Fatal("a heap of flows is out of order")
				}
				inLanes += s.length
			}
		}
		flows := 0
		for name, f := range b.flows {
			if f.requests == 0 || f.name != name {
				t.Fatalf("flow %q has %d requests", name, f.requests)
			}
			flows += f.requests
		}
		if n != b.requests || size != b.bytes || inLanes != n || flows != n {
			t.Fatalf("band %d: %d in line, %d counted, %d in lanes, %d in flows", b.priority, n, b.requests, inLanes, flows)
		}
		total += n
		bytes += size
	}
	if total != int(c.Waiting()) || bytes != c.bytes || bytes != w.room.bytes || total != len(w.room.byDeadline) {
		t.Fatalf("%d wait, %d counted; %d bytes, %d and %d counted", total, c.Waiting(), bytes, c.bytes, w.room.bytes)
	}
	for i, d := range w.room.byDeadline {
		if d.w.index != int32(i) || d.at != d.w.deadline || i > 0 && d.at < w.room.byDeadline[(i-1)/children].at {
			t.Fatal("the heap of deadlines is out of order")
		}
	}
}

// TestWeightedShares: flows that always have requests get tokens by their
// weight, to within a turn and a request each.
func TestWeightedShares(t *testing.T) {
	config := defaultConfig()
	config.Fairness = Weighted
	config.Weights = map[string]float64{"a": 4, "b": 1, "c": 0.25}
	w := newWorld(config)
	w.models["e"] = []string{"m"}
	w.setEndpoints([]string{"e"})
	rng := rand.New(rand.NewPCG(1, 2))
	last := "first"
	w.arrive(last, Ask{Model: "m", Flow: "z"})
	served := map[string]float64{}
	n := 0
	add := func(flow string) {
		n++
		w.arrive(fmt.Sprintf("%s%d", flow, n), Ask{Model: "m", Flow: flow, Cost: 1 + rng.Int64N(4000)})
	}
	for range 3 {
		add("a")
		add("b")
		add("c")
	}
	for range 20000 {
		w.log = nil
		w.finish(last)
		last, _, _ = strings.Cut(w.log[0], " ")
		flow := last[:1]
		served[flow] += float64(w.requests[last].ask.Cost) / config.Weights[flow]
		add(flow)
		for _, x := range []string{"a", "b", "c"} {
			// One turn is quantum, one request at the most 4000 tokens, by weight.
			if lag := served["a"] - served[x]; lag > quantum+4000/0.25+4000 || -lag > quantum+4000/0.25+4000 {
				t.Fatalf("%v", served)
			}
		}
	}
}
