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
	// Capacity is the highest speed at which 98 % of requests have their first token
	// within 2 s, 0 if it was not asked for.
	Capacity float64 `json:"capacity,omitempty"`
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
	for i := range s.jobs {
		j := &s.jobs[i]
		last = max(last, j.end)
		switch j.state {
		case broken:
			r.Broken++
			continue
		case refused:
			r.Refused++
			continue
		}
		first := j.first - j.arrival
		ttft = append(ttft, millis(first))
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
	out.Requests, out.Broken, out.Refused, out.Preemptions = 0, 0, 0, 0
	for _, r := range runs {
		out.Requests += r.Requests
		out.Broken += r.Broken
		out.Refused += r.Refused
		out.Preemptions += r.Preemptions
	}
	return &out
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
	return t.Flush()
}
