package metricsync

// kind is what a metric's value means.
type kind uint8

const (
	gauge kind = iota
	counter
	histogram
	labelSet // names, or a number, in the labels of a series
)

func (k kind) String() string {
	return [...]string{"gauge", "counter", "histogram", "label"}[k]
}

// metric is an abstract metric, a position in definitions.
type metric uint8

// The abstract metrics: those of the AIBrix table, in its order, and from
// blockSize on those that shunt has beside it.
const (
	numRequestsRunning metric = iota
	numRequestsWaiting
	numRequestsSwapped
	engineSleepState
	httpRequests
	numPreemptions
	requestSuccess
	numPrefillPrealloc
	numDecodePrealloc
	e2eLatency
	queueTime
	inferenceTime
	perStageLatency
	httpDuration
	httpDurationHighr
	promptTokens
	requestPromptTokens
	generationTokens
	requestGenerationTokens
	requestMaxTokens
	iterationTokens
	timeToFirstToken
	timePerOutputToken
	interTokenLatency
	decodeTime
	prefillTime
	requestTimePerOutputToken
	gpuCacheUsage
	cpuCacheUsage
	kvCacheUsage
	engineUtilization
	kvCacheHitRate
	prefixCacheQueries
	prefixCacheHits
	externalPrefixQueries
	externalPrefixHits
	nixlXferTime
	nixlPostTime
	nixlBytes
	nixlDescriptors
	nixlFailedTransfers
	nixlFailedNotifications
	avgPromptThroughput
	avgGenerationThroughput
	maxLoRA
	runningLoRA
	waitingLoRA

	blockSize
	numBlocks
	processStart
	numDefinitions
)

// definition is one abstract metric.
type definition struct {
	name string
	kind kind
	// unit is what the value counts, after conversion.
	unit string
}

// definitions has them by metric.
var definitions = [numDefinitions]definition{
	numRequestsRunning:        {"num_requests_running", gauge, "requests"},
	numRequestsWaiting:        {"num_requests_waiting", gauge, "requests"},
	numRequestsSwapped:        {"num_requests_swapped", gauge, "requests"},
	engineSleepState:          {"engine_sleep_state", gauge, "1 awake, 0 asleep"},
	httpRequests:              {"http_requests_total", counter, "requests"},
	numPreemptions:            {"num_preemptions_total", counter, "preemptions"},
	requestSuccess:            {"request_success_total", counter, "requests"},
	numPrefillPrealloc:        {"num_prefill_prealloc_queue_reqs", gauge, "requests"},
	numDecodePrealloc:         {"num_decode_prealloc_queue_reqs", gauge, "requests"},
	e2eLatency:                {"e2e_request_latency_seconds", histogram, "seconds"},
	queueTime:                 {"request_queue_time_seconds", histogram, "seconds"},
	inferenceTime:             {"request_inference_time_seconds", histogram, "seconds"},
	perStageLatency:           {"per_stage_req_latency_seconds", histogram, "seconds"},
	httpDuration:              {"http_request_duration_seconds", histogram, "seconds"},
	httpDurationHighr:         {"http_request_duration_highr_seconds", histogram, "seconds"},
	promptTokens:              {"prompt_tokens_total", counter, "tokens"},
	requestPromptTokens:       {"request_prompt_tokens", histogram, "tokens"},
	generationTokens:          {"generation_tokens_total", counter, "tokens"},
	requestGenerationTokens:   {"request_generation_tokens", histogram, "tokens"},
	requestMaxTokens:          {"request_max_num_generation_tokens", histogram, "tokens"},
	iterationTokens:           {"iteration_tokens_total", histogram, "tokens"},
	timeToFirstToken:          {"time_to_first_token_seconds", histogram, "seconds"},
	timePerOutputToken:        {"time_per_output_token_seconds", histogram, "seconds"},
	interTokenLatency:         {"inter_token_latency_seconds", histogram, "seconds"},
	decodeTime:                {"request_decode_time_seconds", histogram, "seconds"},
	prefillTime:               {"request_prefill_time_seconds", histogram, "seconds"},
	requestTimePerOutputToken: {"request_time_per_output_token_seconds", histogram, "seconds"},
	gpuCacheUsage:             {"gpu_cache_usage_perc", gauge, "share, 0 to 1"},
	cpuCacheUsage:             {"cpu_cache_usage_perc", gauge, "share, 0 to 1"},
	kvCacheUsage:              {"kv_cache_usage_perc", gauge, "share, 0 to 1"},
	engineUtilization:         {"engine_utilization", gauge, "as the engine has it"},
	kvCacheHitRate:            {"kv_cache_hit_rate", gauge, "share, 0 to 1"},
	prefixCacheQueries:        {"prefix_cache_queries_total", counter, "tokens"},
	prefixCacheHits:           {"prefix_cache_hits_total", counter, "tokens"},
	externalPrefixQueries:     {"external_prefix_cache_queries_total", counter, "tokens"},
	externalPrefixHits:        {"external_prefix_cache_hits_total", counter, "tokens"},
	nixlXferTime:              {"nixl_xfer_time_seconds", histogram, "seconds"},
	nixlPostTime:              {"nixl_post_time_seconds", histogram, "seconds"},
	nixlBytes:                 {"nixl_bytes_transferred", histogram, "bytes"},
	nixlDescriptors:           {"nixl_num_descriptors", histogram, "descriptors"},
	nixlFailedTransfers:       {"nixl_num_failed_transfers_total", counter, "transfers"},
	nixlFailedNotifications:   {"nixl_num_failed_notifications_total", counter, "notifications"},
	avgPromptThroughput:       {"avg_prompt_throughput_toks_per_s", gauge, "tokens/s"},
	avgGenerationThroughput:   {"avg_generation_throughput_toks_per_s", gauge, "tokens/s"},
	maxLoRA:                   {"max_lora", labelSet, "adapters"},
	runningLoRA:               {"running_lora_adapters", labelSet, "names"},
	waitingLoRA:               {"waiting_lora_adapters", labelSet, "names"},

	blockSize:    {"cache_block_size", gauge, "tokens"},
	numBlocks:    {"cache_num_blocks", gauge, "blocks"},
	processStart: {"process_start_time_seconds", gauge, "unix seconds"},
}

func (m metric) String() string { return definitions[m].name }
