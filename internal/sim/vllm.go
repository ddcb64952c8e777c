package sim

import (
	"strconv"
	"strings"
)

// vllm writes the page of vLLM 0.33 (V1 engine, one API process): its own families, then what the Python client and
// the FastAPI instrumentator add. Names, help texts, label and family order are those of the real code.
type vllm struct{}

func (vllm) metricsPaths() []string { return []string{"/metrics"} }

func (vllm) contentType() string { return "text/plain; version=1.0.0; charset=utf-8" }

func (vllm) gzips() bool { return false }

func (vllm) owner() string { return "vllm" }

func (vllm) bounds(maxModelLen int) Bounds {
	return Bounds{
		TTFT:       []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560},
		TokenTime:  []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80},
		Latency:    []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680},
		Tokens:     oneTwoFive(maxModelLen),
		Iteration:  []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384},
		ParamsN:    []float64{1, 2, 5, 10, 20},
		Preemption: []float64{1, 2, 3, 4, 5, 10, 20},
	}
}

// oneTwoFive is vLLM's build_1_2_5_buckets: 1, 2, 5, 10, … up to limit.
func oneTwoFive(limit int) []float64 {
	var out []float64
	for e := 1; ; e *= 10 {
		for _, m := range []int{1, 2, 5} {
			if m*e > limit {
				return out
			}
			out = append(out, float64(m*e))
		}
	}
}

func (vllm) page(b []byte, pg *page) []byte {
	w := promWriter{b: b, created: pg.created}
	st := &pg.snap.Stats
	w.pythonProcess(pg)
	model := `model_name="` + escapeLabel(pg.model) + `"`
	own := `engine="0",` + model
	one := func(v float64) []sample { return []sample{{own, v}} }
	with := func(label string, values ...sample) []sample {
		for i := range values {
			values[i].labels = own + "," + label + `="` + values[i].labels + `"`
		}
		return values
	}

	w.gauge("vllm:num_requests_running", "Number of requests in model execution batches.",
		one(float64(pg.snap.Running)))
	w.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.",
		one(float64(pg.snap.Waiting)))
	w.gauge("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
		with("reason", sample{"capacity", float64(pg.snap.Waiting)}, sample{"deferred", 0}))
	awake, offloaded := 1.0, 0.0
	if pg.asleep {
		awake, offloaded = 0, 1
	}
	w.gauge("vllm:engine_sleep_state", "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
		with("sleep_state", sample{"awake", awake}, sample{"weights_offloaded", offloaded}, sample{"discard_all", 0}))
	w.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.",
		one(pg.snap.KVUsage))
	w.counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.",
		one(float64(st.PrefixQueries)))
	w.counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.",
		one(float64(st.PrefixHits)))
	w.counter("vllm:external_prefix_cache_queries", "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.",
		one(0))
	w.counter("vllm:external_prefix_cache_hits", "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.",
		one(0))
	w.counter("vllm:mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.",
		one(0))
	w.counter("vllm:mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.",
		one(0))
	w.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.",
		one(float64(st.Preemptions)))
	w.counter("vllm:prompt_tokens", "Number of prefill tokens processed.",
		one(float64(st.PromptTokens)))
	w.counter("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.",
		with("source", sample{"local_compute", float64(st.PromptTokens - st.CachedTokens)},
			sample{"local_cache_hit", float64(st.CachedTokens)}, sample{"external_kv_transfer", 0}))
	w.counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).",
		one(float64(st.CachedTokens)))
	w.counter("vllm:prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
		with("source", sample{"device", float64(st.CachedTokens)}, sample{"host", 0}, sample{"p2p", 0},
			sample{"disk", 0}, sample{"external_unspecified", 0}))
	w.counter("vllm:generation_tokens", "Number of generation tokens processed.",
		one(float64(st.GenerationTokens)))
	finished := make([]sample, 0, reasons)
	for r := Stop; r < reasons; r++ {
		finished = append(finished, sample{`engine="0",finished_reason="` + r.String() + `",` + model, float64(st.Finished[r])})
	}
	w.counter("vllm:request_success", "Count of successfully processed requests.",
		finished)
	w.counter("vllm:admission_rejections", "Number of admission attempts rejected by a queue limit, by reason.",
		[]sample{{model + `,reason="max_num_queued_reqs"`, 0}, {model + `,reason="max_num_queued_tokens"`, 0}})
	hist := func(name, help string, h *Histogram) { w.histogram(name, help, `engine="0"`, model, h) }
	hist("vllm:request_prompt_tokens", "Number of prefill tokens processed.", &st.RequestPrompt)
	hist("vllm:request_generation_tokens", "Number of generation tokens processed.", &st.RequestGeneration)
	hist("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", &st.IterationTokens)
	hist("vllm:request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", &st.RequestMaxGen)
	hist("vllm:request_params_n", "Histogram of the n request parameter.", &st.RequestParamsN)
	hist("vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", &st.RequestParamsMax)
	hist("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", &st.TTFT)
	hist("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", &st.InterToken)
	hist("vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", &st.PerOutputToken)
	hist("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", &st.E2E)
	hist("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", &st.Queue)
	hist("vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", &st.Inference)
	hist("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", &st.Prefill)
	hist("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", &st.Decode)
	hist("vllm:request_num_preemptions", "Histogram of the number of times a request was preempted.", &st.RequestPreempted)
	hist("vllm:request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", &st.RequestComputed)
	if pg.lora {
		lora := make([]sample, 0, len(pg.snap.Lora))
		for _, l := range pg.snap.Lora {
			lora = append(lora, sample{`max_lora="` + strconv.Itoa(pg.snap.Params.MaxLoras) + `",running_lora_adapters="` +
				escapeLabel(l.Running) + `",waiting_lora_adapters="` + escapeLabel(l.Waiting) + `"`, pg.unix(l.At)})
		}
		w.gauge("vllm:lora_requests_info", "Running stats on lora requests.",
			lora)
	}
	w.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", []sample{{cacheConfig(pg), 1}})
	pg.http.write(&w)
	return w.b
}

// cacheConfig is every field of vLLM's CacheConfig, which differ per version.
func cacheConfig(pg *page) string {
	p := pg.snap.Params
	size, blocks := strconv.Itoa(p.BlockSize), strconv.Itoa(p.Blocks)
	caching := "True"
	if p.NoPrefixCache {
		caching = "False"
	}
	concurrency := strconv.FormatFloat(float64(p.Blocks*p.BlockSize)/float64(pg.maxModelLen), 'f', 3, 64)
	var b strings.Builder
	for i, kv := range [][2]string{
		{"_block_size_resolved", "True"},
		{"block_size", size},
		{"cache_dtype", "auto"},
		{"cache_hit_alignment_tokens", "None"},
		{"effective_attention_block_size", "None"},
		{"enable_mamba_shared_prefix_checkpoint", "False"},
		{"enable_prefix_caching", caching},
		{"engine", "0"},
		{"gpu_memory_utilization", "0.92"},
		{"hash_block_size", size},
		{"is_attention_free", "False"},
		{"kv_cache_dtype_skip_layers", "[]"},
		{"kv_cache_layout", "None"},
		{"kv_cache_max_concurrency", concurrency},
		{"kv_cache_memory_bytes", "None"},
		{"kv_cache_size_tokens", strconv.Itoa(p.Blocks * p.BlockSize)},
		{"kv_offloading_backend", "native"},
		{"kv_offloading_size", "None"},
		{"kv_sharing_fast_prefill", "False"},
		{"mamba_block_size", "None"},
		{"mamba_cache_dtype", "auto"},
		{"mamba_cache_mode", "none"},
		{"mamba_page_size_padded", "None"},
		{"mamba_ssm_cache_dtype", "auto"},
		{"num_cpu_blocks", "None"},
		{"num_gpu_blocks", blocks},
		{"num_gpu_blocks_override", "None"},
		{"prefix_cache_retention_interval", "0"},
		{"prefix_caching_hash_algo", "sha256"},
		{"prefix_match_unit", "None"},
		{"replayssm_buffer_len", "16"},
		{"simple_cpu_offload_num_blocks", "None"},
		{"skip_page_size_padded", "None"},
		{"sliding_window", "None"},
		{"swa_bounded_replay", "True"},
		{"use_kda_recoverssm", "False"},
		{"use_replayssm", "False"},
		{"user_specified_block_size", "False"},
	} {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(kv[0] + `="` + kv[1] + `"`)
	}
	return b.String()
}
