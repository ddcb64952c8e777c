package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/shuntproxy/shunt/internal/sim"
)

// addQuirks adds the flags for what is odd, or wrong, about the metrics page.
// They are set before the command runs.
func addQuirks(cmd *cobra.Command, cfg *sim.Config) {
	f, q := cmd.Flags(), &cfg.Quirks
	f.IntVar(&q.Ranks, "ranks", 0, "vllm, sglang: data-parallel ranks on one page")
	f.IntVar(&q.TPRanks, "tp-ranks", 0, "sglang: schedulers of a tensor-parallel group that all say the same")
	f.BoolVar(&q.Priority, "priority", false, "sglang: queue metrics under priority=\"\" and again by priority")
	f.BoolVar(&q.Undefined, "undefined-labels", false, "model_name and engine_type are \"undefined\", as trtllm-serve has them")
	f.BoolVar(&q.NoModel, "no-model-label", false, "no label model_name")
	f.BoolVar(&q.PID, "pid", false, "gauges have a label pid")
	f.IntVar(&q.DeadPIDs, "dead-pids", 0, "ended processes that left their gauges, beside those with a pid")
	f.StringSliceVar(&q.NaN, "nan", nil, "families whose values are NaN")
	f.StringSliceVar(&q.Missing, "missing", nil, "families that are left out")
	f.Var(&pairs{&q.Rename}, "rename", "OLD=NEW, a family under another name; repeatable")
	f.Var(&pairs{&q.Extra}, "extra", "SERIES=VALUE, a further gauge; repeatable")
	f.BoolVar(&q.Multiproc, "multiproc", false, "vllm: a page gathered from several API processes")
	f.BoolVar(&q.Sidecar, "sidecar", false, "vllm: the copies under aibrix: that the AIBrix runtime sidecar adds")
	f.Var(&optional{&q.Gzip}, "gzip", "pack the page for who accepts it: true or false (default as the engine does)")
	f.Lookup("gzip").NoOptDefVal = "true"
	f.StringSliceVar(&q.Paths, "metrics-path", nil, "where the metrics page is, in place of the engine's own path")
	f.BoolVar(&q.CRLF, "crlf", false, "lines of the page end in CR LF")
	f.BoolVar(&q.Cut, "cut", false, "no newline at the page's end")
	f.BoolVar(&q.TwoTypes, "two-types", false, "HELP and TYPE lines come twice")
	f.BoolVar(&q.Cold, "cold", false, "the page is empty until a request has finished")
	f.BoolVar(&cfg.Asleep, "asleep", false, "vllm: the page says that the engine sleeps")
	f.StringVar((*string)(&cfg.Metrics.Kind), "metrics-fault", "", "what is wrong with the page: status, empty, garbage, json, slow, huge, reset, hang or moved")
	f.IntVar(&cfg.Metrics.Status, "metrics-status", 0, "status of the fault status (default 503)")
	f.DurationVar((*time.Duration)(&cfg.Metrics.Delay), "metrics-delay", 0, "how late the page of the fault slow is")
	f.IntVar(&cfg.Metrics.Bytes, "metrics-bytes", 0, "size of the fault huge (default 32 MiB)")
}

// pairs is a flag that fills a map with KEY=VALUE, cut at the last =: a series
// may hold others.
type pairs struct{ into *map[string]string }

var _ pflag.Value = (*pairs)(nil)

// String is the default in the help text.
func (p *pairs) String() string { return "" }

// Type names the value in the help text.
func (p *pairs) Type() string { return "key=value" }

// Set takes one pair.
func (p *pairs) Set(text string) error {
	i := strings.LastIndexByte(text, '=')
	if i <= 0 || i == len(text)-1 {
		return fmt.Errorf("%q is not KEY=VALUE", text)
	}
	if *p.into == nil {
		*p.into = make(map[string]string)
	}
	(*p.into)[text[:i]] = text[i+1:]
	return nil
}

// optional is a flag that stays nil until it is given.
type optional struct{ into **bool }

var _ pflag.Value = (*optional)(nil)

// String is the default in the help text.
func (o *optional) String() string { return "" }

// Type names the value in the help text.
func (o *optional) Type() string { return "bool" }

// Set takes true or false.
func (o *optional) Set(text string) error {
	switch text {
	case "true", "false":
		*o.into = new(text == "true")
		return nil
	default:
		return fmt.Errorf("%q is not true or false", text)
	}
}
