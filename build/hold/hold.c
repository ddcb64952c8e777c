// A dynamic module for the benchmark: it makes the calls into Envoy that shunt's
// contract asks for, and does nothing else. It holds a request until its body is
// whole, asks for headers, pieces of bodies and the upstream's address, sets the
// destination header for an ORIGINAL_DST cluster (its endpoints in turn) and the
// dynamic metadata. No Go runs, nothing that Envoy hands over is read. What shunt
// costs beyond it is shunt's own.
#define _GNU_SOURCE // strtok_r
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

#define CB(name) envoy_dynamic_module_callback_##name
#define HOOK(name) envoy_dynamic_module_on_http_filter_##name
#define TEXT(text) ((envoy_dynamic_module_type_module_buffer){text, sizeof(text) - 1})
#define ENTRY(key, value) {key, sizeof(key) - 1, value, sizeof(value) - 1}
#define DESTINATION "x-gateway-destination-endpoint"

typedef void* envoy_t;

// Of Envoy 1.39; abi.h is older.
void CB(http_set_dynamic_metadata_string_batch)(envoy_t envoy, envoy_dynamic_module_type_module_buffer ns,
                                                const envoy_dynamic_module_type_module_http_header* entries,
                                                size_t count);

typedef const void* config_ptr;
typedef const void* filter_ptr;

// The endpoints, separated by blanks.
typedef struct {
  atomic_uint turn;
  uint32_t count;
  envoy_dynamic_module_type_module_buffer endpoints[16];
  char text[];
} config_t;

const char* envoy_dynamic_module_on_program_init(void) { return envoy_dynamic_modules_abi_version; }

config_ptr HOOK(config_new)(envoy_t envoy, envoy_dynamic_module_type_envoy_buffer name,
                            envoy_dynamic_module_type_envoy_buffer text) {
  (void)envoy, (void)name;
  config_t* c = calloc(1, sizeof(*c) + text.length + 1);
  if (c == NULL) {
    return NULL;
  }
  memcpy(c->text, text.ptr, text.length);
  char* rest = NULL;
  for (char* t = strtok_r(c->text, " ", &rest); t != NULL && c->count < 16; t = strtok_r(NULL, " ", &rest)) {
    c->endpoints[c->count++] = (envoy_dynamic_module_type_module_buffer){t, strlen(t)};
  }
  if (c->count == 0) {
    free(c);
    return NULL;
  }
  return c;
}
void HOOK(config_destroy)(config_ptr config) { free((void*)config); }

filter_ptr HOOK(new)(config_ptr config, envoy_t envoy) {
  (void)envoy;
  return config; // a stream needs no state
}
void HOOK(destroy)(filter_ptr filter) { (void)filter; }

#define MANY 128

static void get_headers(envoy_t envoy, envoy_dynamic_module_type_http_header_type kind) {
  envoy_dynamic_module_type_envoy_http_header headers[MANY];
  if (CB(http_get_headers_size)(envoy, kind) <= MANY) {
    CB(http_get_headers)(envoy, kind, headers);
  }
}

static void get_body(envoy_t envoy, envoy_dynamic_module_type_http_body_type kind) {
  envoy_dynamic_module_type_envoy_buffer chunks[MANY];
  const size_t count = CB(http_get_body_chunks_size)(envoy, kind);
  if (count > 0 && count <= MANY) {
    CB(http_get_body_chunks)(envoy, kind, chunks);
  }
}

static void send_on(envoy_t envoy, config_t* c) {
  get_headers(envoy, envoy_dynamic_module_type_http_header_type_RequestHeader);
  get_body(envoy, envoy_dynamic_module_type_http_body_type_BufferedRequestBody);
  get_body(envoy, envoy_dynamic_module_type_http_body_type_ReceivedRequestBody);
  const envoy_dynamic_module_type_module_buffer to = c->endpoints[atomic_fetch_add(&c->turn, 1) % c->count];
  CB(http_add_header)(envoy, envoy_dynamic_module_type_http_header_type_RequestHeader, TEXT(DESTINATION), to);
  CB(http_set_dynamic_metadata_string)(envoy, TEXT("envoy.lb"), TEXT(DESTINATION), to);
  const envoy_dynamic_module_type_module_http_header texts[] = {
      ENTRY("model", "bench-model"), ENTRY("target_model", "bench-model"), ENTRY("policy", "least-request"),
      {"endpoint", 8, to.ptr, to.length}, {"pod", 3, to.ptr, to.length}};
  CB(http_set_dynamic_metadata_string_batch)(envoy, TEXT("shunt"), texts, sizeof(texts) / sizeof(texts[0]));
  CB(http_set_dynamic_metadata_number)(envoy, TEXT("shunt"), TEXT("pick_us"), 1);
}

envoy_dynamic_module_type_on_http_filter_request_headers_status HOOK(request_headers)(envoy_t envoy, filter_ptr filter,
                                                                                       bool end) {
  if (!end) {
    return envoy_dynamic_module_type_on_http_filter_request_headers_status_StopIteration;
  }
  send_on(envoy, (config_t*)filter);
  return envoy_dynamic_module_type_on_http_filter_request_headers_status_Continue;
}
envoy_dynamic_module_type_on_http_filter_request_body_status HOOK(request_body)(envoy_t envoy, filter_ptr filter,
                                                                                 bool end) {
  if (!end) {
    return envoy_dynamic_module_type_on_http_filter_request_body_status_StopIterationAndBuffer;
  }
  send_on(envoy, (config_t*)filter);
  return envoy_dynamic_module_type_on_http_filter_request_body_status_Continue;
}
envoy_dynamic_module_type_on_http_filter_request_trailers_status HOOK(request_trailers)(envoy_t envoy,
                                                                                         filter_ptr filter) {
  (void)envoy, (void)filter; // the load has none
  return envoy_dynamic_module_type_on_http_filter_request_trailers_status_Continue;
}
envoy_dynamic_module_type_on_http_filter_response_headers_status HOOK(response_headers)(envoy_t envoy,
                                                                                         filter_ptr filter, bool end) {
  (void)filter, (void)end;
  get_headers(envoy, envoy_dynamic_module_type_http_header_type_ResponseHeader);
  envoy_dynamic_module_type_envoy_buffer address;
  CB(http_filter_get_attribute_string)(envoy, envoy_dynamic_module_type_attribute_id_UpstreamAddress, &address);
  return envoy_dynamic_module_type_on_http_filter_response_headers_status_Continue;
}
envoy_dynamic_module_type_on_http_filter_response_body_status HOOK(response_body)(envoy_t envoy, filter_ptr filter,
                                                                                   bool end) {
  (void)filter, (void)end;
  get_body(envoy, envoy_dynamic_module_type_http_body_type_ReceivedResponseBody);
  return envoy_dynamic_module_type_on_http_filter_response_body_status_Continue;
}
envoy_dynamic_module_type_on_http_filter_response_trailers_status HOOK(response_trailers)(envoy_t envoy,
                                                                                           filter_ptr filter) {
  (void)envoy, (void)filter;
  return envoy_dynamic_module_type_on_http_filter_response_trailers_status_Continue;
}
void HOOK(stream_complete)(envoy_t envoy, filter_ptr filter) {
  (void)filter;
  CB(http_set_dynamic_metadata_string)(envoy, TEXT("shunt"), TEXT("usage"), TEXT("reported"));
  CB(http_set_dynamic_metadata_number)(envoy, TEXT("shunt"), TEXT("ttft_ms"), 1);
  CB(http_set_dynamic_metadata_number)(envoy, TEXT("shunt"), TEXT("prompt_tokens"), 1);
  CB(http_set_dynamic_metadata_number)(envoy, TEXT("shunt"), TEXT("completion_tokens"), 1);
  CB(http_set_dynamic_metadata_number)(envoy, TEXT("shunt"), TEXT("total_tokens"), 1);
}

// ---- hooks that Envoy demands ----

envoy_dynamic_module_type_on_http_filter_local_reply_status HOOK(local_reply)(
    envoy_t envoy, filter_ptr filter, uint32_t code, envoy_dynamic_module_type_envoy_buffer details, bool reset) {
  (void)envoy, (void)filter, (void)code, (void)details, (void)reset;
  return envoy_dynamic_module_type_on_http_filter_local_reply_status_Continue;
}
void HOOK(scheduled)(envoy_t envoy, filter_ptr filter, uint64_t event) { (void)envoy, (void)filter, (void)event; }
void HOOK(downstream_above_write_buffer_high_watermark)(envoy_t envoy, filter_ptr filter) { (void)envoy, (void)filter; }
void HOOK(downstream_below_write_buffer_low_watermark)(envoy_t envoy, filter_ptr filter) { (void)envoy, (void)filter; }
void HOOK(http_callout_done)(envoy_t envoy, filter_ptr filter, uint64_t id,
                             envoy_dynamic_module_type_http_callout_result result,
                             envoy_dynamic_module_type_envoy_http_header* headers, size_t header_count,
                             envoy_dynamic_module_type_envoy_buffer* body, size_t pieces) {
  (void)envoy, (void)filter, (void)id, (void)result, (void)headers, (void)header_count, (void)body, (void)pieces;
}
void HOOK(http_stream_headers)(envoy_t envoy, filter_ptr filter, uint64_t id,
                               envoy_dynamic_module_type_envoy_http_header* headers, size_t count, bool end) {
  (void)envoy, (void)filter, (void)id, (void)headers, (void)count, (void)end;
}
void HOOK(http_stream_data)(envoy_t envoy, filter_ptr filter, uint64_t id,
                            const envoy_dynamic_module_type_envoy_buffer* data, size_t count, bool end) {
  (void)envoy, (void)filter, (void)id, (void)data, (void)count, (void)end;
}
void HOOK(http_stream_trailers)(envoy_t envoy, filter_ptr filter, uint64_t id,
                                envoy_dynamic_module_type_envoy_http_header* trailers, size_t count) {
  (void)envoy, (void)filter, (void)id, (void)trailers, (void)count;
}
void HOOK(http_stream_complete)(envoy_t envoy, filter_ptr filter, uint64_t id) { (void)envoy, (void)filter, (void)id; }
void HOOK(http_stream_reset)(envoy_t envoy, filter_ptr filter, uint64_t id,
                             envoy_dynamic_module_type_http_stream_reset_reason reason) {
  (void)envoy, (void)filter, (void)id, (void)reason;
}
config_ptr HOOK(per_route_config_new)(envoy_dynamic_module_type_envoy_buffer name,
                                      envoy_dynamic_module_type_envoy_buffer text) {
  (void)name, (void)text;
  return NULL;
}
void HOOK(per_route_config_destroy)(config_ptr config) { (void)config; }
