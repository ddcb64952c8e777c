// Calls of Envoy's that Go needs by themselves, and the hooks that Envoy demands and shunt does not use.
#include "stream.h"

void shunt_log(int level, const char* text, size_t length) {
  CB(log)((envoy_dynamic_module_type_log_level)level, (envoy_dynamic_module_type_module_buffer){text, length});
}
bool shunt_metadata(void* envoy, const char* ns, size_t ns_length, const char* key, size_t key_length,
                    shunt_buffer* value) {
  return CB(http_get_metadata_string)(envoy, envoy_dynamic_module_type_metadata_source_Dynamic,
                                      (envoy_dynamic_module_type_module_buffer){ns, ns_length},
                                      (envoy_dynamic_module_type_module_buffer){key, key_length}, value);
}
int64_t shunt_metadata_list_size(void* envoy, const char* ns, size_t ns_length, const char* key, size_t key_length) {
  size_t size = 0;
  const bool found = CB(http_get_metadata_list_size)(envoy, envoy_dynamic_module_type_metadata_source_Dynamic,
                                                     (envoy_dynamic_module_type_module_buffer){ns, ns_length},
                                                     (envoy_dynamic_module_type_module_buffer){key, key_length}, &size);
  return found ? (int64_t)size : -1;
}
bool shunt_metadata_list_string(void* envoy, const char* ns, size_t ns_length, const char* key, size_t key_length,
                                size_t index, shunt_buffer* value) {
  return CB(http_get_metadata_list_string)(envoy, envoy_dynamic_module_type_metadata_source_Dynamic,
                                           (envoy_dynamic_module_type_module_buffer){ns, ns_length},
                                           (envoy_dynamic_module_type_module_buffer){key, key_length}, index, value);
}
void* shunt_scheduler_new(void* envoy) { return CB(http_filter_scheduler_new)(envoy); }
void shunt_scheduler_commit(void* scheduler, uint64_t event) { CB(http_filter_scheduler_commit)(scheduler, event); }
void shunt_scheduler_delete(void* scheduler) { CB(http_filter_scheduler_delete)(scheduler); }
uint32_t shunt_concurrency(void) { return CB(get_concurrency)(); }
bool shunt_validation_mode(void) { return CB(is_validation_mode)(); }

void envoy_dynamic_module_on_http_filter_http_callout_done(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t callout, envoy_dynamic_module_type_http_callout_result result, shunt_header* headers, size_t headers_size,
    shunt_buffer* body_chunks, size_t body_chunks_size) {
  (void)envoy, (void)module, (void)callout, (void)result, (void)headers, (void)headers_size, (void)body_chunks,
      (void)body_chunks_size;
}
void envoy_dynamic_module_on_http_filter_http_stream_headers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t stream, shunt_header* headers, size_t headers_size, bool end_stream) {
  (void)envoy, (void)module, (void)stream, (void)headers, (void)headers_size, (void)end_stream;
}
void envoy_dynamic_module_on_http_filter_http_stream_data(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t stream, const shunt_buffer* data, size_t data_count, bool end_stream) {
  (void)envoy, (void)module, (void)stream, (void)data, (void)data_count, (void)end_stream;
}
void envoy_dynamic_module_on_http_filter_http_stream_trailers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t stream, shunt_header* trailers, size_t trailers_size) {
  (void)envoy, (void)module, (void)stream, (void)trailers, (void)trailers_size;
}
void envoy_dynamic_module_on_http_filter_http_stream_complete(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t stream) {
  (void)envoy, (void)module, (void)stream;
}
void envoy_dynamic_module_on_http_filter_http_stream_reset(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t stream, envoy_dynamic_module_type_http_stream_reset_reason reason) {
  (void)envoy, (void)module, (void)stream, (void)reason;
}
void envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module) {
  (void)envoy, (void)module;
}
void envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module) {
  (void)envoy, (void)module;
}
