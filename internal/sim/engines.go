package sim

import (
	_ "embed"
	"math"
	"strconv"
	"strings"
)

//go:embed pages/sglang.prom
var sglangPage string

//go:embed pages/trtllm.prom
var trtllmPage string

//go:embed pages/xllm.prom
var xllmPage string

// number makes a reader of a number of the page.
func number(f func(pg *page) float64) reader {
	return reader{value: func(pg *page, _ *point) float64 { return f(pg) }}
}

// double is number for a C++ double.
func double(f func(pg *page) float64) reader {
	r := number(f)
	r.double = true
	return r
}

func histogramOf(f func(st *Stats) *Histogram) reader {
	return reader{hist: func(st *Stats, _ *point) *Histogram { return f(st) }}
}

// What several engines say.
func running(pg *page) float64    { return float64(pg.snap.Running) }
func waiting(pg *page) float64    { return float64(pg.snap.Waiting) }
func kvUsage(pg *page) float64    { return pg.snap.KVUsage }
func kvBlocks(pg *page) float64   { return float64(pg.snap.Params.Blocks) }
func usedBlocks(pg *page) float64 { return math.Round(pg.snap.KVUsage * kvBlocks(pg)) }
func freeBlocks(pg *page) float64 { return kvBlocks(pg) - usedBlocks(pg) }
func blockSize(pg *page) float64  { return float64(pg.snap.Params.BlockSize) }
func kvTokens(pg *page) float64   { return kvBlocks(pg) * blockSize(pg) }
func usedTokens(pg *page) float64 { return usedBlocks(pg) * blockSize(pg) }
func prompt(pg *page) float64     { return float64(pg.snap.Stats.PromptTokens) }
func cached(pg *page) float64     { return float64(pg.snap.Stats.CachedTokens) }
func generated(pg *page) float64  { return float64(pg.snap.Stats.GenerationTokens) }
func finished(pg *page) float64 {
	return float64(pg.snap.Stats.Finished[Stop] + pg.snap.Stats.Finished[Length])
}

func hitRate(pg *page) float64 {
	if pg.snap.Stats.PrefixQueries == 0 {
		return 0
	}
	return float64(pg.snap.Stats.PrefixHits) / float64(pg.snap.Stats.PrefixQueries)
}

// throughput is what a batch of this size generates, in tokens per second.
func throughput(pg *page) float64 {
	n, par := running(pg), &pg.snap.Params
	if n == 0 {
		return 0
	}
	return n * par.DecodeRate / (1 + par.BatchSlowdown*(n-1) + par.KVSlowdown*pg.snap.KVUsage)
}

// requests to a path, of the HTTP server's counters.
func requests(pg *page, path string) float64 {
	for _, h := range pg.http.handlers {
		if h.labels == `handler="`+path+`"` {
			return h.n
		}
	}
	return 0
}

func pyFormat(v float64, _ reader) string { return string(appendPyFloat(nil, v)) }

// named reads a page and puts a model's name into its labels.
func named(text, model string) []family {
	families := parseFamilies(text)
	model = escapeLabel(model)
	for i := range families {
		for j := range families[i].samples {
			for _, name := range []string{"model_name", "model"} {
				if p := &families[i].samples[j]; p.has(name) {
					*p = p.with(name, model)
				}
			}
		}
	}
	return families
}

// sglang is the page of SGLang 0.5.23 with --enable-metrics, one rank.
type sglang struct{ t template }

func newSGLang(model string) *sglang {
	byEndpoint := reader{value: func(pg *page, p *point) float64 { return requests(pg, p.label("endpoint")) }}
	t := template{families: named(sglangPage, model), format: pyFormat, streams: true}
	t.values = map[string]reader{
		"sglang:num_running_reqs":           number(running),
		"sglang:num_queue_reqs":             number(waiting),
		"sglang:token_usage":                number(kvUsage),
		"sglang:full_token_usage":           number(kvUsage),
		"sglang:num_used_tokens":            number(usedTokens),
		"sglang:kv_used_tokens":             number(usedTokens),
		"sglang:kv_available_tokens":        number(func(pg *page) float64 { return kvTokens(pg) - usedTokens(pg) }),
		"sglang:kv_evictable_tokens":        number(func(*page) float64 { return 0 }),
		"sglang:gen_throughput":             number(throughput),
		"sglang:cache_hit_rate":             number(hitRate),
		"sglang:max_total_num_tokens":       number(kvTokens),
		"sglang:page_size":                  number(blockSize),
		"sglang:num_pages":                  number(kvBlocks),
		"sglang:context_len":                number(func(pg *page) float64 { return float64(pg.maxModelLen) }),
		"sglang:prompt_tokens_total":        number(prompt),
		"sglang:generation_tokens_total":    number(generated),
		"sglang:cached_tokens_total":        number(cached),
		"sglang:num_requests_total":         number(finished),
		"sglang:num_aborted_requests_total": number(func(pg *page) float64 { return float64(pg.snap.Stats.Finished[Aborted]) }),
		"sglang:realtime_tokens_total": {value: func(pg *page, p *point) float64 {
			switch p.label("mode") {
			case "prefill_compute":
				return prompt(pg) - cached(pg)
			case "prefill_cache":
				return cached(pg)
			}
			return generated(pg)
		}},
		"sglang:cuda_graph_passes_total": {value: func(pg *page, p *point) float64 {
			if p.label("mode") == "decode_cuda_graph" {
				return float64(pg.snap.Stats.Steps)
			}
			return 0
		}},
		"sglang:http_requests_active": number(func(*page) float64 { return 0 }),
		"sglang:http_requests_total":  byEndpoint,
		"sglang:http_responses_total": byEndpoint,
		"sglang:queue_time_seconds":   histogramOf(func(st *Stats) *Histogram { return &st.Queue }),
		"sglang:per_stage_req_latency_seconds": {hist: func(st *Stats, p *point) *Histogram {
			switch p.label("stage") {
			case "prefill_waiting":
				return &st.Queue
			case "prefill_forward":
				return &st.Prefill
			case "decode_forward":
				return &st.Decode
			}
			return nil
		}},
		"sglang:time_to_first_token_seconds":           histogramOf(func(st *Stats) *Histogram { return &st.TTFT }),
		"sglang:e2e_request_latency_seconds":           histogramOf(func(st *Stats) *Histogram { return &st.E2E }),
		"sglang:request_time_per_output_token_seconds": histogramOf(func(st *Stats) *Histogram { return &st.PerOutputToken }),
		"sglang:inter_token_latency_seconds":           histogramOf(func(st *Stats) *Histogram { return &st.InterToken }),
		"sglang:prompt_tokens_histogram":               histogramOf(func(st *Stats) *Histogram { return &st.RequestPrompt }),
		"sglang:uncached_prompt_tokens_histogram":      histogramOf(func(st *Stats) *Histogram { return &st.RequestComputed }),
		"sglang:generation_tokens_histogram":           histogramOf(func(st *Stats) *Histogram { return &st.RequestGeneration }),
	}
	return &sglang{t}
}

func (*sglang) metricsPaths() []string { return []string{"/metrics"} }
func (*sglang) contentType() string    { return "text/plain; version=1.0.0; charset=utf-8" }
func (*sglang) gzips() bool            { return true }
func (*sglang) owner() string          { return "sglang" }

func (e *sglang) bounds(int) Bounds {
	return Bounds{
		TTFT:      e.t.boundsOf("sglang:time_to_first_token_seconds"),
		TokenTime: e.t.boundsOf("sglang:inter_token_latency_seconds", "sglang:request_time_per_output_token_seconds"),
		Latency:   e.t.boundsOf("sglang:e2e_request_latency_seconds", "sglang:queue_time_seconds", "sglang:per_stage_req_latency_seconds"),
		Tokens:    e.t.boundsOf("sglang:prompt_tokens_histogram", "sglang:generation_tokens_histogram"),
		Iteration: []float64{1}, ParamsN: []float64{1}, Preemption: []float64{1},
	}
}

func (e *sglang) page(b []byte, pg *page) []byte { return appendFamilies(b, e.t.render(pg)) }

// trtllm is the page of TensorRT-LLM's main branch (1.3) with
// return_perf_metrics and iteration statistics on.
type trtllm struct{ t template }

func newTRTLLM(model string) *trtllm {
	slots := number(func(pg *page) float64 { return float64(pg.snap.Params.MaxRunning) })
	reused := number(func(pg *page) float64 { return math.Floor(float64(pg.snap.Stats.PrefixHits) / blockSize(pg)) })
	missed := number(func(pg *page) float64 {
		return math.Floor(float64(pg.snap.Stats.PrefixQueries-pg.snap.Stats.PrefixHits) / blockSize(pg))
	})
	t := template{families: named(trtllmPage, model), format: pyFormat}
	t.values = map[string]reader{
		"trtllm_request_success_total": {value: func(pg *page, p *point) float64 {
			if p.label("finished_reason") == "length" {
				return float64(pg.snap.Stats.Finished[Length])
			}
			return float64(pg.snap.Stats.Finished[Stop])
		}},
		"trtllm_prompt_tokens_total":               number(prompt),
		"trtllm_generation_tokens_total":           number(generated),
		"trtllm_kv_cache_reused_blocks_total":      reused,
		"trtllm_kv_cache_missed_blocks_total":      missed,
		"trtllm_kv_cache_iter_reused_blocks_total": reused,
		"trtllm_kv_cache_iter_missed_blocks_total": missed,
		"trtllm_num_requests_completed_total":      number(finished),
		"trtllm_prompt_cached_tokens_total":        number(cached),
		"trtllm_kv_cache_hit_rate":                 number(hitRate),
		"trtllm_kv_cache_utilization":              number(kvUsage),
		"trtllm_kv_cache_iter_reuse_rate":          number(hitRate),
		"trtllm_num_requests_running":              number(running),
		"trtllm_num_requests_waiting":              number(waiting),
		"trtllm_max_num_active_requests":           slots,
		"trtllm_max_batch_size_static":             slots,
		"trtllm_max_batch_size_runtime":            slots,
		"trtllm_max_num_tokens_runtime":            number(func(pg *page) float64 { return float64(pg.snap.Params.ChunkTokens) }),
		"trtllm_kv_cache_max_blocks":               number(kvBlocks),
		"trtllm_kv_cache_free_blocks":              number(freeBlocks),
		"trtllm_kv_cache_used_blocks":              number(usedBlocks),
		"trtllm_kv_cache_tokens_per_block":         number(blockSize),
		"trtllm_num_context_requests":              number(func(*page) float64 { return 0 }),
		"trtllm_num_generation_requests":           number(running),
		"trtllm_num_scheduled_requests":            number(running),
		"trtllm_e2e_request_latency_seconds":       histogramOf(func(st *Stats) *Histogram { return &st.E2E }),
		"trtllm_time_to_first_token_seconds":       histogramOf(func(st *Stats) *Histogram { return &st.TTFT }),
		"trtllm_time_per_output_token_seconds":     histogramOf(func(st *Stats) *Histogram { return &st.PerOutputToken }),
		"trtllm_request_queue_time_seconds":        histogramOf(func(st *Stats) *Histogram { return &st.Queue }),
		"trtllm_request_prefill_time_seconds":      histogramOf(func(st *Stats) *Histogram { return &st.Prefill }),
		"trtllm_request_decode_time_seconds":       histogramOf(func(st *Stats) *Histogram { return &st.Decode }),
		"trtllm_request_inference_time_seconds":    histogramOf(func(st *Stats) *Histogram { return &st.Inference }),
		"trtllm_prefill_batch_tokens":              histogramOf(func(st *Stats) *Histogram { return &st.IterationTokens }),
	}
	return &trtllm{t}
}

func (*trtllm) metricsPaths() []string { return []string{"/prometheus/metrics"} }
func (*trtllm) contentType() string    { return "text/plain; version=1.0.0; charset=utf-8" }
func (*trtllm) gzips() bool            { return true }
func (*trtllm) owner() string          { return "tensorrt_llm" }

func (e *trtllm) bounds(maxModelLen int) Bounds {
	return Bounds{
		TTFT:      e.t.boundsOf("trtllm_time_to_first_token_seconds"),
		TokenTime: e.t.boundsOf("trtllm_time_per_output_token_seconds"),
		Latency:   e.t.boundsOf("trtllm_e2e_request_latency_seconds", "trtllm_request_prefill_time_seconds"),
		Tokens:    oneTwoFive(maxModelLen),
		Iteration: e.t.boundsOf("trtllm_prefill_batch_tokens"), ParamsN: []float64{1}, Preemption: []float64{1},
	}
}

func (e *trtllm) page(b []byte, pg *page) []byte { return appendFamilies(b, e.t.render(pg)) }

// xllm is the page that brpc makes of xLLM's variables: all gauges, no label of
// ours, no help text.
type xllm struct{ t template }

func newXLLM() *xllm {
	t := template{families: parseFamilies(xllmPage), format: cppFormat}
	t.values = map[string]reader{
		"kv_cache_utilization_perc":             double(kvUsage),
		"num_running_requests":                  number(running),
		"num_running_sequences":                 number(running),
		"num_waiting_requests":                  number(waiting),
		"num_pending_requests":                  number(func(pg *page) float64 { return running(pg) + waiting(pg) }),
		"num_concurrent_requests":               number(func(pg *page) float64 { return running(pg) + waiting(pg) }),
		"num_preempted_requests":                number(func(pg *page) float64 { return float64(pg.snap.Stats.Preemptions) }),
		"num_free_blocks":                       number(freeBlocks),
		"num_used_blocks":                       number(usedBlocks),
		"num_processing_tokens_total_prompt":    double(prompt),
		"num_processing_tokens_total_generated": double(generated),
		"request_status_total_ok":               number(finished),
		"request_status_total_cancelled":        number(func(pg *page) float64 { return float64(pg.snap.Stats.Finished[Aborted]) }),
		"server_request_total_ok":               number(finished),
		"server_request_in_total":               number(func(pg *page) float64 { return requests(pg, "/v1/chat/completions") + requests(pg, "/v1/completions") }),
		"server_request_total_fail":             number(func(*page) float64 { return 0 }),
	}
	recorder := func(name string, scale float64, h func(st *Stats) *Histogram) {
		of := func(f func(h *Histogram) float64) reader {
			return number(func(pg *page) float64 { return math.Round(scale * f(h(&pg.snap.Stats))) })
		}
		t.values[name+"_count"] = number(func(pg *page) float64 { return float64(h(&pg.snap.Stats).N) })
		t.values[name+"_latency"] = of((*Histogram).mean)
		t.values[name+"_qps"] = number(func(*page) float64 { return 0 })
		for suffix, q := range map[string]float64{"_80": 0.8, "_90": 0.9, "_99": 0.99, "_999": 0.999, "_9999": 0.9999} {
			t.values[name+"_latency"+suffix] = of(func(h *Histogram) float64 { return h.quantile(q) })
		}
		t.values[name+"_max_latency"] = of(func(h *Histogram) float64 { return h.quantile(1) })
	}
	recorder("end_2_end_latency_milliseconds", 1000, func(st *Stats) *Histogram { return &st.E2E })
	recorder("time_to_first_token_latency_milliseconds", 1000, func(st *Stats) *Histogram { return &st.TTFT })
	recorder("inter_token_latency_milliseconds", 1000, func(st *Stats) *Histogram { return &st.InterToken })
	recorder("num_prompt_tokens_per_request", 1, func(st *Stats) *Histogram { return &st.RequestPrompt })
	recorder("num_generated_tokens_per_request", 1, func(st *Stats) *Histogram { return &st.RequestGeneration })
	return &xllm{t}
}

// cppFormat writes a double as std::ostream does, in six digits, and the rest as
// integers.
func cppFormat(v float64, r reader) string {
	if r.double {
		s := strconv.FormatFloat(v, 'g', 6, 64)
		return strings.Replace(s, "NaN", "nan", 1)
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

func (*xllm) metricsPaths() []string { return []string{"/brpc_metrics"} }
func (*xllm) contentType() string    { return "text/plain" }
func (*xllm) gzips() bool            { return false }
func (*xllm) owner() string          { return "xllm" }

func (*xllm) bounds(maxModelLen int) Bounds {
	b := vllm{}.bounds(maxModelLen)
	return b
}

func (e *xllm) page(b []byte, pg *page) []byte { return appendFamilies(b, e.t.render(pg)) }
