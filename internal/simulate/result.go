package simulate

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
	"time"
)

// Percentiles are of one measure over all requests.
type Percentiles struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
}

// Result is what a run showed. Times are milliseconds.
type Result struct {
	Policy   string  `json:"policy"`
	Workload string  `json:"workload,omitempty"`
	Speed    float64 `json:"speed,omitempty"`
	Envoys   int     `json:"envoys,omitempty"`
	Seeds    int     `json:"seeds,omitempty"`
	// TTFT is from a request's arrival to its first token, TPOT the mean time between
	// its tokens. Both are over the requests that were answered.
	TTFT Percentiles `json:"ttft_ms"`
	TPOT Percentiles `json:"tpot_ms"`
	// HitRate is the share of prompt tokens that engines had in their caches.
	HitRate float64 `json:"hit_rate"`
	// Throughput is output tokens per second, from the first arrival to the last
	// token.
	Throughput float64 `json:"throughput_tok_s"`
	// Imbalance is the most requests at one endpoint over the mean of all, averaged
	// over the seconds in which there were as many as endpoints; 1 is even.
	Imbalance float64 `json:"imbalance"`
	// Attainment is the share of all requests that kept the goals.
	Attainment float64 `json:"slo_attainment"`
	// Within is the share of requests whose first token came within 2 s.
	Within float64 `json:"-"`
	// Requests arrived, of which Broken were lost and Refused too long for an engine.
	Requests int `json:"requests"`
	Broken   int `json:"broken"`
	Refused  int `json:"refused"`
	// Preemptions are how often an engine had to stop a request for want of room.
	Preemptions int `json:"preemptions"`
	// Dropped are those that flow control answered, and Objectives what it did by
	// objective, in the order in which they were given.
	Dropped    int               `json:"dropped,omitempty"`
	Objectives []ObjectiveResult `json:"objectives,omitempty"`
	// Capacity is the highest speed at which 98 % of requests have their first token
	// within 2 s, 0 if it was not asked for.
	Capacity float64 `json:"capacity,omitempty"`
}

// ObjectiveResult is what became of the requests of one objective.
type ObjectiveResult struct {
	Name     string      `json:"name"`
	Priority int         `json:"priority"`
	Requests int         `json:"requests"`
	Dropped  int         `json:"dropped"`
	TTFT     Percentiles `json:"ttft_ms"`
	// Alone is the same without the requests of all other objectives; only the highest
	// has it.
	Alone *Percentiles `json:"ttft_alone_ms,omitempty"`
}

// capacityTTFT is the goal of Capacity.
const (
	capacityTTFT  = 2 * time.Second
	capacityShare = 0.98
)

func (s *world) result(policy string) *Result {
	r := &Result{Policy: policy, Workload: s.w.Name, Envoys: s.cfg.Envoys, Requests: len(s.jobs), Imbalance: s.load.mean()}
	var ttft, tpot []float64
	var last time.Duration
	output, prompt, cached, attained, within := 0, 0, 0, 0, 0
	objectives := s.cfg.Flow.Objectives
	byObjective := make([][]float64, len(objectives))
	for _, o := range objectives {
		r.Objectives = append(r.Objectives, ObjectiveResult{Name: o.Name, Priority: o.Priority})
	}
	for i := range s.jobs {
		j := &s.jobs[i]
		last = max(last, j.end)
		if len(objectives) > 0 {
			r.Objectives[j.req.objective].Requests++
		}
		switch j.state {
		case dropped:
			r.Dropped++
			r.Objectives[j.req.objective].Dropped++
			continue
		case broken:
			r.Broken++
			continue
		case refused:
			r.Refused++
			continue
		}
		first := j.first - j.arrival
		ttft = append(ttft, millis(first))
		if len(objectives) > 0 {
			byObjective[j.req.objective] = append(byObjective[j.req.objective], millis(first))
		}
		each := time.Duration(0)
		if j.seq.Output > 1 {
			each = (j.seq.LastToken - j.seq.FirstToken) / time.Duration(j.seq.Output-1)
			tpot = append(tpot, millis(each))
		}
		output += j.seq.Output
		prompt += j.req.Prompt
		cached += j.seq.Cached
		r.Preemptions += j.seq.Preempted
		if first <= s.cfg.GoalTTFT && (s.cfg.GoalTPOT <= 0 || each <= s.cfg.GoalTPOT) {
			attained++
		}
		if first <= capacityTTFT {
			within++
		}
	}
	r.TTFT, r.TPOT = percentiles(ttft), percentiles(tpot)
	for i := range byObjective {
		r.Objectives[i].TTFT = percentiles(byObjective[i])
	}
	if n := float64(r.Requests - r.Refused); n > 0 {
		r.Attainment, r.Within = float64(attained)/n, float64(within)/n
	}
	if prompt > 0 {
		r.HitRate = float64(cached) / float64(prompt)
	}
	if span := last - s.jobs[0].arrival; span > 0 {
		r.Throughput = float64(output) / span.Seconds()
	}
	return r
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// percentiles are by nearest rank.
func percentiles(v []float64) Percentiles {
	if len(v) == 0 {
		return Percentiles{}
	}
	slices.Sort(v)
	at := func(p float64) float64 { return v[min(len(v)-1, max(0, int(math.Ceil(p*float64(len(v))))-1))] }
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return Percentiles{sum / float64(len(v)), at(0.5), at(0.9), at(0.99)}
}

// Mean is the mean of runs that differ in their seeds alone.
func Mean(runs []*Result) *Result {
	out := *runs[0]
	n := float64(len(runs))
	out.Seeds = len(runs)
	avg := func(of func(r *Result) *float64) {
		sum := 0.0
		for _, r := range runs {
			sum += *of(r)
		}
		*of(&out) = sum / n
	}
	for _, of := range []func(r *Result) *float64{
		func(r *Result) *float64 { return &r.TTFT.Mean }, func(r *Result) *float64 { return &r.TTFT.P50 },
		func(r *Result) *float64 { return &r.TTFT.P90 }, func(r *Result) *float64 { return &r.TTFT.P99 },
		func(r *Result) *float64 { return &r.TPOT.Mean }, func(r *Result) *float64 { return &r.TPOT.P50 },
		func(r *Result) *float64 { return &r.TPOT.P90 }, func(r *Result) *float64 { return &r.TPOT.P99 },
		func(r *Result) *float64 { return &r.HitRate }, func(r *Result) *float64 { return &r.Throughput },
		func(r *Result) *float64 { return &r.Imbalance }, func(r *Result) *float64 { return &r.Attainment },
		func(r *Result) *float64 { return &r.Within }, func(r *Result) *float64 { return &r.Capacity },
	} {
		avg(of)
	}
	out.Requests, out.Broken, out.Refused, out.Preemptions, out.Dropped = 0, 0, 0, 0, 0
	out.Objectives = meanObjectives(runs)
	for _, r := range runs {
		out.Dropped += r.Dropped
		out.Requests += r.Requests
		out.Broken += r.Broken
		out.Refused += r.Refused
		out.Preemptions += r.Preemptions
	}
	return &out
}

func meanObjectives(runs []*Result) []ObjectiveResult {
	out := slices.Clone(runs[0].Objectives)
	n := float64(len(runs))
	mean := func(of func(r *Result) *Percentiles) Percentiles {
		var p Percentiles
		for _, r := range runs {
			one := of(r)
			p.Mean, p.P50, p.P90, p.P99 = p.Mean+one.Mean/n, p.P50+one.P50/n, p.P90+one.P90/n, p.P99+one.P99/n
		}
		return p
	}
	for i := range out {
		out[i].Requests, out[i].Dropped = 0, 0
		for _, r := range runs {
			out[i].Requests += r.Objectives[i].Requests
			out[i].Dropped += r.Objectives[i].Dropped
		}
		out[i].TTFT = mean(func(r *Result) *Percentiles { return &r.Objectives[i].TTFT })
		if !slices.ContainsFunc(runs, func(r *Result) bool { return r.Objectives[i].Alone == nil }) {
			alone := mean(func(r *Result) *Percentiles { return r.Objectives[i].Alone })
			out[i].Alone = &alone
		}
	}
	return out
}

// Capacity is the highest speed at which 98 % of the workload's requests have
// their first token within 2 s, to 3 %; 0 where even a sixteenth is too fast, and
// 64 at the most.
func Capacity(w *Workload, policy string, cfg Config) (float64, error) {
	good := func(speed float64) (bool, error) {
		r, err := Run(w.WithSpeed(speed), policy, cfg)
		return err == nil && r.Within >= capacityShare, err
	}
	low, high := 0.0, 1.0
	for {
		ok, err := good(high)
		if err != nil {
			return 0, err
		}
		if !ok {
			break
		}
		if low = high; low >= 64 {
			return low, nil
		}
		high *= 2
	}
	for low == 0 {
		if high < 1.0/16 {
			return 0, nil
		}
		ok, err := good(high / 2)
		if err != nil {
			return 0, err
		}
		if ok {
			low = high / 2
		} else {
			high /= 2
		}
	}
	for high/low > 1.03 {
		mid := math.Sqrt(low * high)
		ok, err := good(mid)
		if err != nil {
			return 0, err
		}
		if ok {
			low = mid
		} else {
			high = mid
		}
	}
	return low, nil
}

// WriteJSON writes {"rows": [...]}.
func WriteJSON(w io.Writer, rows []*Result) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(struct {
		Rows []*Result `json:"rows"`
	}{rows})
}

// WriteTable writes rows for people.
func WriteTable(w io.Writer, rows []*Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	last := ""
	for _, r := range rows {
		if head := fmt.Sprintf("%s, speed %g, %d Envoys, %d requests", r.Workload, r.Speed, r.Envoys, r.Requests); head != last {
			if err := t.Flush(); err != nil {
				return err
			}
			fmt.Fprintf(w, "\n%s\n", head)
			last = head
			fmt.Fprintln(t, "POLICY\tTTFT mean\tp50\tp90\tp99\tTPOT mean\tp50\tp90\tp99\tHITS\tTOK/S\tIMBAL\tSLO\tBROKEN\tCAP\t")
		}
		capacity := "-"
		if r.Capacity > 0 {
			capacity = fmt.Sprintf("%.2f", r.Capacity)
		}
		fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f%%\t%.0f\t%.2f\t%.1f%%\t%d\t%s\t\n",
			r.Policy, r.TTFT.Mean, r.TTFT.P50, r.TTFT.P90, r.TTFT.P99, r.TPOT.Mean, r.TPOT.P50, r.TPOT.P90, r.TPOT.P99,
			100*r.HitRate, r.Throughput, r.Imbalance, 100*r.Attainment, r.Broken, capacity)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range rows {
		if r.Refused > 0 {
			fmt.Fprintf(w, "%s, speed %g, %s: %d of %d requests are too long for an engine and have no part in these figures\n",
				r.Workload, r.Speed, r.Policy, r.Refused, r.Requests)
		}
	}
	return writeObjectives(w, rows)
}

// writeObjectives writes what became of each objective.
func writeObjectives(w io.Writer, rows []*Result) error {
	if len(rows) == 0 || len(rows[0].Objectives) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\nby objective; p99 ALONE is without the requests of all others")
	fmt.Fprintln(t, "WORKLOAD\tSPEED\tPOLICY\tOBJECTIVE\tPRIORITY\tREQUESTS\tDROPPED\tTTFT mean\tp50\tp90\tp99\tALONE\tRATIO\t")
	for _, r := range rows {
		for _, o := range r.Objectives {
			alone, ratio := "-", "-"
			if o.Alone != nil && o.Alone.P99 > 0 {
				alone, ratio = fmt.Sprintf("%.0f", o.Alone.P99), fmt.Sprintf("%.2f", o.TTFT.P99/o.Alone.P99)
			}
			fmt.Fprintf(t, "%s\t%g\t%s\t%s\t%d\t%d\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%s\t%s\t\n",
				r.Workload, r.Speed, r.Policy, o.Name, o.Priority, o.Requests, o.Dropped, o.TTFT.Mean, o.TTFT.P50, o.TTFT.P90, o.TTFT.P99, alone, ratio)
		}
	}
	return t.Flush()
}
