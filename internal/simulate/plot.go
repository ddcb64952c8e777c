package simulate

import (
	"fmt"
	"html"
	"io"
	"math"
	"strings"
)

// panel is one measure in a plot.
type panel struct {
	title, unit string
	log         bool
	values      func(r *Result) []float64 // one bar, or p50, p90 and p99
}

var panels = []panel{
	{"Time to first token", "ms", true, func(r *Result) []float64 { return []float64{r.TTFT.P50, r.TTFT.P90, r.TTFT.P99} }},
	{"Time per output token", "ms", true, func(r *Result) []float64 { return []float64{r.TPOT.P50, r.TPOT.P90, r.TPOT.P99} }},
	{"Prefix hit rate", "%", false, func(r *Result) []float64 { return []float64{100 * r.HitRate} }},
	{"Within the goals", "%", false, func(r *Result) []float64 { return []float64{100 * r.Attainment} }},
	{"Output", "tokens/s", false, func(r *Result) []float64 { return []float64{r.Throughput} }},
	{"Imbalance", "most / mean", false, func(r *Result) []float64 { return []float64{r.Imbalance} }},
}

const (
	plotRow, plotLabel, plotWidth, plotGap = 18, 230, 360, 70
)

// shades are those of p50, p90 and p99.
var shades = []string{"#1b4f72", "#2e86c1", "#aed6f1"}

// WritePlot draws rows as an SVG image: a panel for each measure, a bar for each
// row; latencies have their percentiles one behind the other, on a logarithmic
// scale.
func WritePlot(w io.Writer, rows []*Result) error {
	several := false
	for _, r := range rows {
		several = several || r.Workload != rows[0].Workload || r.Speed != rows[0].Speed || r.Envoys != rows[0].Envoys
	}
	height := len(rows)*plotRow + 60
	total := (len(panels) + 1) / 2 * height
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n",
		2*(plotLabel+plotWidth+plotGap), total+20)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	for i := range panels {
		drawPanel(&b, &panels[i], rows, several, i%2*(plotLabel+plotWidth+plotGap), i/2*height+20)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func drawPanel(b *strings.Builder, p *panel, rows []*Result, several bool, x, y int) {
	low, high := math.Inf(1), 0.0
	for _, r := range rows {
		for _, v := range p.values(r) {
			high = max(high, v)
			if v > 0 {
				low = min(low, v)
			}
		}
	}
	if high == 0 {
		low, high = 1, 1
	}
	at := func(v float64) float64 { return v / high * plotWidth }
	if p.log {
		from := math.Floor(math.Log10(low)*2)/2 - 0.5
		at = func(v float64) float64 {
			if v <= 0 {
				return 0
			}
			return (math.Log10(v) - from) / (math.Log10(high) - from) * plotWidth
		}
	}
	scale := ""
	if p.log {
		scale = ", p50 p90 p99, logarithmic"
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" font-weight="bold">%s (%s%s)</text>`+"\n", x+plotLabel, y, p.title, p.unit, scale)
	for k, r := range rows {
		top := y + 10 + k*plotRow
		name := r.Policy
		if several {
			name = fmt.Sprintf("%s %g× %dE %s", r.Workload, r.Speed, r.Envoys, r.Policy)
		}
		fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", x+plotLabel-6, top+12, html.EscapeString(name))
		values := p.values(r)
		for n := len(values) - 1; n >= 0; n-- {
			fmt.Fprintf(b, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n",
				x+plotLabel, top, max(1, at(values[n])), plotRow-4, shades[n])
		}
		most := values[len(values)-1]
		fmt.Fprintf(b, `<text x="%.1f" y="%d">%.4g</text>`+"\n", float64(x+plotLabel)+at(most)+4, top+12, most)
	}
}
