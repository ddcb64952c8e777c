package metricsync

// The tables of the engines. A row's spec is the name in AIBrix's table; also
// are the names that were seen in the engines' own code, with the versions
// where they are not the newest.

func vllm() *table {
	v := func(name string) string { return "vllm:" + name }
	same := func(m metric, r rule) row { return row{metric: m, rule: r, spec: v(m.String())} }
	return &table{
		paths: []string{"/metrics"},
		rows: []row{
			same(numRequestsRunning, sum),
			same(numRequestsWaiting, sum),
			same(numRequestsSwapped, sum), // 0.6 to 0.8, V0
			{metric: engineSleepState, rule: least, spec: v("engine_sleep_state"), where: labelValue{"sleep_state", "awake"}},
			// The instrumentator's, which has no prefix and no model.
			{metric: httpRequests, rule: sum, spec: v("http_requests_total"), also: []string{"http_requests_total"}},
			same(numPreemptions, sum),
			// No version exports the name that the table has.
			{metric: requestSuccess, rule: sum, spec: v("num_requests_success_total"), also: []string{v("request_success_total")}},
			same(e2eLatency, sum),
			same(queueTime, sum),
			same(inferenceTime, sum),
			{metric: httpDuration, rule: sum, spec: "http_request_duration_seconds"},
			{metric: httpDurationHighr, rule: sum, spec: "http_request_duration_highr_seconds"},
			same(promptTokens, sum),
			same(requestPromptTokens, sum),
			same(generationTokens, sum),
			same(requestGenerationTokens, sum),
			same(requestMaxTokens, sum),
			same(iterationTokens, sum),
			same(timeToFirstToken, sum),
			// Renamed in 0.11, which has both; 0.33 has the new name alone.
			{metric: timePerOutputToken, rule: sum, spec: v("time_per_output_token_seconds"), also: []string{v("inter_token_latency_seconds")}},
			{metric: interTokenLatency, rule: sum, spec: v("inter_token_latency_seconds"), also: []string{v("time_per_output_token_seconds")}},
			same(decodeTime, sum),
			same(prefillTime, sum),
			same(requestTimePerOutputToken, sum), // since 0.11
			// Renamed between 0.9.2 and 0.11.
			{metric: gpuCacheUsage, rule: mean, spec: v("gpu_cache_usage_perc"), also: []string{v("kv_cache_usage_perc")}},
			same(cpuCacheUsage, mean),
			{metric: kvCacheUsage, rule: mean, spec: v("kv_cache_usage_perc"), also: []string{v("gpu_cache_usage_perc")}},
			// 0.6, V0: -1 where prefix caching is off. Later it is derived from the
			// two counters below.
			{metric: kvCacheHitRate, rule: mean, also: []string{v("gpu_prefix_cache_hit_rate")}},
			// 0.8 to 0.10 had the prefix gpu_, and 0.8 counted blocks.
			{metric: prefixCacheQueries, rule: sum, spec: v("prefix_cache_queries_total"), also: []string{v("gpu_prefix_cache_queries_total")}},
			{metric: prefixCacheHits, rule: sum, spec: v("prefix_cache_hits_total"), also: []string{v("gpu_prefix_cache_hits_total")}},
			same(externalPrefixQueries, sum),
			same(externalPrefixHits, sum),
			same(nixlXferTime, sum),
			same(nixlPostTime, sum),
			same(nixlBytes, sum),
			same(nixlDescriptors, sum),
			// prometheus_client adds _total to a counter's name.
			{metric: nixlFailedTransfers, rule: sum, spec: v("nixl_num_failed_transfers"), also: []string{v("nixl_num_failed_transfers_total")}},
			{metric: nixlFailedNotifications, rule: sum, spec: v("nixl_num_failed_notifications"), also: []string{v("nixl_num_failed_notifications_total")}},
			same(avgPromptThroughput, sum),
			same(avgGenerationThroughput, sum),
			{metric: maxLoRA, rule: newest, spec: v("lora_requests_info"), label: "max_lora"},
			{metric: runningLoRA, rule: newest, spec: v("lora_requests_info"), label: "running_lora_adapters"},
			{metric: waitingLoRA, rule: newest, spec: v("lora_requests_info"), label: "waiting_lora_adapters"},
			{metric: blockSize, rule: peak, also: []string{v("cache_config_info")}, label: "block_size"},
			{metric: numBlocks, rule: sum, also: []string{v("cache_config_info")}, label: "num_gpu_blocks"},
			{metric: processStart, rule: peak, also: []string{"process_start_time_seconds"}},
		},
	}
}

func sglang() *table {
	s := func(name string) string { return "sglang:" + name }
	return &table{
		paths: []string{"/metrics"},
		hint:  "start SGLang with --enable-metrics",
		// Tensor, pipeline and expert ranks run the same requests, and a gauge's pid
		// is that of the rank. Data-parallel ranks, dp_rank, do not.
		sameLabels: []string{"tp_rank", "pp_rank", "moe_ep_rank", "pid"},
		totalLabel: "priority",
		rows: []row{
			{metric: numRequestsRunning, rule: sum, spec: s("num_running_reqs")},
			{metric: numRequestsWaiting, rule: sum, spec: s("num_queue_reqs")},
			{metric: numRequestsSwapped, rule: sum, spec: s("num_retracted_reqs")},
			{metric: numPreemptions, rule: sum, also: []string{s("num_retracted_requests_total")}},
			{metric: requestSuccess, rule: sum, spec: s("num_requests_total")},
			// Renamed by 0.5.23.
			{metric: numPrefillPrealloc, rule: sum, spec: s("num_prefill_prealloc_queue_reqs"), also: []string{s("num_prefill_bootstrap_queue_reqs")}},
			{metric: numDecodePrealloc, rule: sum, spec: s("num_decode_prealloc_queue_reqs")},
			{metric: e2eLatency, rule: sum, spec: s("e2e_request_latency_seconds")},
			{metric: queueTime, rule: sum, also: []string{s("queue_time_seconds")}},
			{metric: perStageLatency, rule: sum, spec: s("per_stage_req_latency_seconds")},
			{metric: promptTokens, rule: sum, also: []string{s("prompt_tokens_total")}},
			{metric: requestPromptTokens, rule: sum, also: []string{s("prompt_tokens_histogram")}},
			{metric: generationTokens, rule: sum, also: []string{s("generation_tokens_total")}},
			{metric: requestGenerationTokens, rule: sum, also: []string{s("generation_tokens_histogram")}},
			{metric: timeToFirstToken, rule: sum, spec: s("time_to_first_token_seconds")},
			{metric: timePerOutputToken, rule: sum, spec: s("inter_token_latency_seconds")},
			{metric: interTokenLatency, rule: sum, spec: s("inter_token_latency_seconds")},
			{metric: requestTimePerOutputToken, rule: sum, also: []string{s("request_time_per_output_token_seconds")}},
			{metric: gpuCacheUsage, rule: mean, spec: s("token_usage")},
			{metric: kvCacheUsage, rule: mean, spec: s("token_usage")},
			{metric: kvCacheHitRate, rule: mean, also: []string{s("cache_hit_rate")}},
			{metric: avgGenerationThroughput, rule: sum, spec: s("gen_throughput")},
			{metric: blockSize, rule: peak, also: []string{s("page_size")}},
			{metric: numBlocks, rule: sum, also: []string{s("num_pages")}},
		},
	}
}

func trtllm() *table {
	t := func(name string) string { return "trtllm_" + name }
	// Up to 1.1 the names have no prefix.
	both := func(m metric, name string) row {
		return row{metric: m, rule: sum, spec: t(name), also: []string{name}}
	}
	only := func(m metric, r rule, name string) row { return row{metric: m, rule: r, also: []string{t(name)}} }
	return &table{
		paths: []string{"/prometheus/metrics"},
		hint:  "set return_perf_metrics, enable_iter_perf_stats and enable_iter_req_stats to true in TensorRT-LLM's config, and scrape /prometheus/metrics",
		rows: []row{
			// Gauges have a series for each process that ever lived, told apart by
			// pid: queues add up, and of a ratio the largest is the careful reading.
			only(numRequestsRunning, sum, "num_requests_running"), // since 1.3
			only(numRequestsWaiting, sum, "num_requests_waiting"), // since 1.3
			both(requestSuccess, "request_success_total"),
			both(e2eLatency, "e2e_request_latency_seconds"),
			both(queueTime, "request_queue_time_seconds"),
			only(inferenceTime, sum, "request_inference_time_seconds"), // since 1.3
			only(promptTokens, sum, "prompt_tokens_total"),             // since 1.3
			only(generationTokens, sum, "generation_tokens_total"),     // since 1.3
			both(timeToFirstToken, "time_to_first_token_seconds"),
			both(timePerOutputToken, "time_per_output_token_seconds"),
			both(interTokenLatency, "time_per_output_token_seconds"),
			only(decodeTime, sum, "request_decode_time_seconds"),   // since 1.3
			only(prefillTime, sum, "request_prefill_time_seconds"), // since 1.3
			{metric: kvCacheUsage, rule: peak, spec: t("kv_cache_utilization")},
			{metric: kvCacheHitRate, rule: peak, spec: t("kv_cache_hit_rate")},
			only(blockSize, peak, "kv_cache_tokens_per_block"), // since 1.3
			only(numBlocks, peak, "kv_cache_max_blocks"),       // since 1.3
		},
	}
}

func xllm() *table {
	recorder := func(m metric, unit float64, stem string) row {
		return row{metric: m, rule: sum, also: []string{stem}, recorder: true, unit: unit}
	}
	const milli = 1e-3
	return &table{
		// The table has /metrics; brpc itself serves /brpc_metrics.
		paths: []string{"/metrics", "/brpc_metrics"},
		rows: []row{
			{metric: numRequestsRunning, rule: sum, also: []string{"num_running_requests"}},
			{metric: numRequestsWaiting, rule: sum, also: []string{"num_waiting_requests"}},
			{metric: numPreemptions, rule: sum, also: []string{"num_preempted_requests"}},
			{metric: requestSuccess, rule: sum, also: []string{"request_status_total_ok", "server_request_total_ok"}},
			recorder(e2eLatency, milli, "end_2_end_latency_milliseconds"),
			{metric: promptTokens, rule: sum, also: []string{"num_processing_tokens_total_prompt"}},
			recorder(requestPromptTokens, 1, "num_prompt_tokens_per_request"),
			{metric: generationTokens, rule: sum, also: []string{"num_processing_tokens_total_generated"}},
			recorder(requestGenerationTokens, 1, "num_generated_tokens_per_request"),
			recorder(timeToFirstToken, milli, "time_to_first_token_latency_milliseconds"),
			recorder(timePerOutputToken, milli, "inter_token_latency_milliseconds"),
			recorder(interTokenLatency, milli, "inter_token_latency_milliseconds"),
			{metric: gpuCacheUsage, rule: mean, spec: "kv_cache_utilization", also: []string{"kv_cache_utilization_perc"}},
			{metric: kvCacheUsage, rule: mean, spec: "kv_cache_utilization", also: []string{"kv_cache_utilization_perc"}},
			{metric: engineUtilization, rule: mean, spec: "engine_utilization", also: []string{"xllm_gpu_utilization"}},
		},
	}
}
