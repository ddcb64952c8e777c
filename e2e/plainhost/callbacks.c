// The callbacks of the ABI that a module may use here.
#include "plainhost.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CB(name) envoy_dynamic_module_callback_##name
#define ATTRIBUTE(name) envoy_dynamic_module_type_attribute_id_##name

#pragma GCC visibility push(default)

// here is a stream that its worker's thread asks about; all else is a bug of
// the module.
static stream_t* here(void* envoy) {
  stream_t* s = envoy;
  if (atomic_load(&s->destroyed)) {
    fail("a callback for a stream that is destroyed");
  }
  if (!pthread_equal(s->worker->thread, pthread_self())) {
    fail("a callback from a thread that is not the stream's worker");
  }
  return s;
}

static bool give(view_t* into, const bytes_t* value) {
  *into = value == NULL ? (view_t){NULL, 0} : (view_t){value->data == NULL ? "" : value->data, value->size};
  return value != NULL;
}

void CB(log)(envoy_dynamic_module_type_log_level level, text_t message) {
  fprintf(stderr, "[%d] %.*s\n", (int)level, (int)message.length, message.ptr);
}
bool CB(log_enabled)(envoy_dynamic_module_type_log_level level) { return level >= 3; }
uint32_t CB(get_concurrency)(void) { return (uint32_t)worker_count; }
bool CB(is_validation_mode)(void) { return false; }

// ---- headers ----

size_t CB(http_get_headers_size)(void* envoy, envoy_dynamic_module_type_http_header_type type) {
  return here(envoy)->maps[type].count;
}
bool CB(http_get_headers)(void* envoy, envoy_dynamic_module_type_http_header_type type,
                          envoy_dynamic_module_type_envoy_http_header* out) {
  const map_t* m = &here(envoy)->maps[type];
  for (size_t i = 0; i < m->count; i++) {
    const pair_t* p = &m->list[i];
    out[i] = (envoy_dynamic_module_type_envoy_http_header){p->key.data, p->key.size,
                                                            p->value.data == NULL ? "" : p->value.data, p->value.size};
  }
  return m->count > 0;
}
bool CB(http_get_header)(void* envoy, envoy_dynamic_module_type_http_header_type type, text_t key, view_t* out,
                         size_t index, size_t* count) {
  const pair_t* p = map_find(&here(envoy)->maps[type], key.ptr, key.length);
  if (count != NULL) {
    *count = p != NULL;
  }
  return give(out, p != NULL && index == 0 ? &p->value : NULL);
}
bool CB(http_set_header)(void* envoy, envoy_dynamic_module_type_http_header_type type, text_t key, text_t value) {
  map_set(&here(envoy)->maps[type], key.ptr, key.length, value.ptr, value.length, false);
  return true;
}
bool CB(http_add_header)(void* envoy, envoy_dynamic_module_type_http_header_type type, text_t key, text_t value) {
  map_set(&here(envoy)->maps[type], key.ptr, key.length, value.ptr, value.length, true);
  return true;
}

// ---- bodies ----

static bytes_t* body_of(stream_t* s, envoy_dynamic_module_type_http_body_type type) {
  switch (type) {
  case envoy_dynamic_module_type_http_body_type_ReceivedRequestBody:
    return s->received[0];
  case envoy_dynamic_module_type_http_body_type_BufferedRequestBody:
    return &s->buffered[0];
  case envoy_dynamic_module_type_http_body_type_ReceivedResponseBody:
    return s->received[1];
  default:
    return &s->buffered[1];
  }
}

size_t CB(http_get_body_size)(void* envoy, envoy_dynamic_module_type_http_body_type type) {
  const bytes_t* b = body_of(here(envoy), type);
  return b == NULL ? 0 : b->size;
}
// A body lies in two pieces, so that a module can't take it for one.
size_t CB(http_get_body_chunks_size)(void* envoy, envoy_dynamic_module_type_http_body_type type) {
  const bytes_t* b = body_of(here(envoy), type);
  return b == NULL || b->size == 0 ? 0 : b->size == 1 ? 1 : 2;
}
bool CB(http_get_body_chunks)(void* envoy, envoy_dynamic_module_type_http_body_type type, view_t* out) {
  const bytes_t* b = body_of(here(envoy), type);
  if (b == NULL) {
    return false;
  }
  const size_t half = b->size / 2;
  if (b->size == 1) {
    out[0] = (view_t){b->data, 1};
  } else if (b->size > 1) {
    out[0] = (view_t){b->data, half};
    out[1] = (view_t){b->data + half, b->size - half};
  }
  return true;
}
bool CB(http_append_body)(void* envoy, envoy_dynamic_module_type_http_body_type type, text_t data) {
  bytes_t* b = body_of(here(envoy), type);
  if (b == NULL) {
    return false;
  }
  put(b, data.ptr, data.length);
  return true;
}
bool CB(http_drain_body)(void* envoy, envoy_dynamic_module_type_http_body_type type, size_t size) {
  bytes_t* b = body_of(here(envoy), type);
  if (b == NULL) {
    return false;
  }
  if (size > b->size) {
    size = b->size;
  }
  memmove(b->data, b->data + size, b->size - size);
  b->size -= size;
  return true;
}
bool CB(http_received_buffered_request_body)(void* envoy) {
  (void)here(envoy);
  return false;
}
uint64_t CB(http_get_buffer_limit)(void* envoy) {
  (void)here(envoy);
  return 1 << 20;
}
void CB(http_set_buffer_limit)(void* envoy, uint64_t limit) { (void)here(envoy), (void)limit; }

// ---- going on ----

static void go_on(stream_t* s, int direction) {
  if (!s->stopped[direction]) {
    return;
  }
  s->stopped[direction] = false;
  if (direction == 0) {
    put(&s->seen, s->buffered[0].data, s->buffered[0].size);
  }
  s->buffered[direction].size = 0;
  atomic_fetch_add(&counts.resumed, 1);
}
void CB(http_filter_continue_decoding)(void* envoy) { go_on(here(envoy), 0); }
void CB(http_filter_continue_encoding)(void* envoy) { go_on(here(envoy), 1); }

// A reply of the module ends the stream before this returns, as it may in Envoy.
static void reply(stream_t* s, int status, text_t details) {
  if (s->sent_reply) {
    fail("two replies for one stream");
  }
  s->sent_reply = true;
  s->reply_status = status;
  if (hooks.local_reply != NULL) {
    hooks.local_reply(s, s->module, (uint32_t)status, (view_t){details.ptr, details.length}, false);
  }
  atomic_fetch_add(&counts.replied, 1);
  stream_end(s);
}
void CB(http_send_response)(void* envoy, uint32_t status, envoy_dynamic_module_type_module_http_header* headers,
                            size_t count, text_t body, text_t details) {
  size_t all = body.length; // reads every byte, for the sanitizers
  for (size_t i = 0; i < count; i++) {
    all += strnlen(headers[i].key_ptr, headers[i].key_length) + strnlen(headers[i].value_ptr, headers[i].value_length);
  }
  if (status < 200 || status > 599 || all == 0) {
    fail("a reply of status %u with %zu bytes", status, all);
  }
  reply(here(envoy), (int)status, details);
}
void CB(http_send_response_headers)(void* envoy, envoy_dynamic_module_type_module_http_header* headers, size_t count,
                                    bool end) {
  (void)headers, (void)count, (void)end;
  reply(here(envoy), 200, (text_t){"", 0});
}
// A reset ends the stream without completing it.
void CB(http_filter_reset_stream)(void* envoy, envoy_dynamic_module_type_http_filter_stream_reset_reason reason,
                                  text_t details) {
  (void)reason;
  if (details.length == 0) {
    fail("a reset without details");
  }
  stream_t* s = here(envoy);
  if (s->sent_reply) {
    fail("a reset after a reply");
  }
  s->sent_reply = true;
  stream_end(s);
}

// ---- the scheduler ----

void* CB(http_filter_scheduler_new)(void* envoy) {
  stream_t* s = here(envoy);
  atomic_fetch_add(&s->references, 1);
  atomic_fetch_add(&counts.schedulers, 1);
  stream_t** scheduler = malloc(sizeof(*scheduler)); // its own memory, for the sanitizers
  *scheduler = s;
  return scheduler;
}
void CB(http_filter_scheduler_delete)(void* scheduler) {
  stream_release(*(stream_t**)scheduler);
  free(scheduler);
  atomic_fetch_sub(&counts.schedulers, 1);
}
void CB(http_filter_scheduler_commit)(void* scheduler, uint64_t id) { // from any thread
  stream_t* s = *(stream_t**)scheduler;
  event_t* e = calloc(1, sizeof(*e));
  atomic_fetch_add(&s->references, 1);
  e->stream = s;
  e->id = id;
  worker_t* w = s->worker;
  pthread_mutex_lock(&w->lock);
  if (w->last == NULL) {
    w->first = e;
  } else {
    w->last->next = e;
  }
  w->last = e;
  pthread_cond_signal(&w->wake);
  pthread_mutex_unlock(&w->lock);
}

// ---- what is known of a stream ----

const void* CB(get_most_specific_route_config)(void* envoy) { return here(envoy)->routed ? route : NULL; }
uint32_t CB(http_filter_get_worker_index)(void* envoy) { return (uint32_t)here(envoy)->worker->index; }
bool CB(http_filter_get_attribute_string)(void* envoy, envoy_dynamic_module_type_attribute_id id, view_t* out) {
  stream_t* s = here(envoy);
  static const char protocol[] = "HTTP/1.1", route_name[] = "all", client[] = "127.0.0.1:4711", aborted[] = "downstream_remote_disconnect";
  switch (id) {
  case ATTRIBUTE(RequestProtocol):
    *out = (view_t){protocol, sizeof(protocol) - 1};
    return true;
  case ATTRIBUTE(XdsRouteName):
    *out = (view_t){route_name, sizeof(route_name) - 1};
    return true;
  case ATTRIBUTE(SourceAddress):
    *out = (view_t){client, sizeof(client) - 1};
    return true;
  case ATTRIBUTE(ResponseCodeDetails):
    *out = (view_t){aborted, sizeof(aborted) - 1};
    return s->abort_in == 0;
  case ATTRIBUTE(UpstreamAddress): {
    static const char destination[] = "x-gateway-destination-endpoint";
    const pair_t* p = map_find(&s->maps[0], destination, sizeof(destination) - 1);
    return s->phase >= PHASE_RESPONSE && give(out, p == NULL ? NULL : &p->value);
  }
  default:
    return false;
  }
}
bool CB(http_filter_get_attribute_int)(void* envoy, envoy_dynamic_module_type_attribute_id id, uint64_t* out) {
  stream_t* s = here(envoy);
  *out = s->sent_reply ? (uint64_t)s->reply_status : 200;
  return id == ATTRIBUTE(ResponseCode) && (s->sent_reply || s->phase >= PHASE_RESPONSE);
}
bool CB(http_get_cluster_name)(void* envoy, view_t* out) {
  (void)here(envoy);
  *out = (view_t){"up", 2};
  return true;
}
void CB(http_clear_route_cache)(void* envoy) { (void)here(envoy); }
bool CB(http_set_upstream_override_host)(void* envoy, text_t host, bool strict) {
  (void)here(envoy), (void)strict;
  return host.length > 0;
}

// ---- metadata: keys are namespace, a zero byte and the key; values are text ----

static void metadata(void* envoy, text_t ns, text_t key, const char* value, size_t size) {
  bytes_t name = {0};
  put(&name, ns.ptr, ns.length);
  put(&name, "", 1);
  put(&name, key.ptr, key.length);
  map_set(&here(envoy)->metadata, name.data, name.size, size == 0 ? " " : value, size == 0 ? 1 : size, false);
  free(name.data);
}
void CB(http_set_dynamic_metadata_string)(void* envoy, text_t ns, text_t key, text_t value) {
  metadata(envoy, ns, key, value.ptr, value.length);
}
void CB(http_set_dynamic_metadata_string_batch)(void* envoy, text_t ns,
                                                const envoy_dynamic_module_type_module_http_header* list,
                                                size_t count) {
  for (size_t i = 0; i < count; i++) {
    metadata(envoy, ns, (text_t){list[i].key_ptr, list[i].key_length}, list[i].value_ptr, list[i].value_length);
  }
}
void CB(http_set_dynamic_metadata_number)(void* envoy, text_t ns, text_t key, double value) {
  metadata(envoy, ns, key, (char*)&value, sizeof(value));
}
void CB(http_set_dynamic_metadata_bool)(void* envoy, text_t ns, text_t key, bool value) {
  metadata(envoy, ns, key, value ? "true" : "false", 5 - value);
}
bool CB(http_add_dynamic_metadata_list_string)(void* envoy, text_t ns, text_t key, text_t value) {
  metadata(envoy, ns, key, value.ptr, value.length);
  return true;
}
bool CB(http_add_dynamic_metadata_list_number)(void* envoy, text_t ns, text_t key, double value) {
  metadata(envoy, ns, key, (char*)&value, sizeof(value));
  return true;
}
bool CB(http_add_dynamic_metadata_list_bool)(void* envoy, text_t ns, text_t key, bool value) {
  metadata(envoy, ns, key, value ? "true" : "false", 5 - value);
  return true;
}

static bool in_namespace(const pair_t* p, text_t ns) {
  return p->key.size > ns.length && p->key.data[ns.length] == 0 && memcmp(p->key.data, ns.ptr, ns.length) == 0;
}
size_t CB(http_get_metadata_keys_count)(void* envoy, envoy_dynamic_module_type_metadata_source source, text_t ns) {
  (void)source;
  const map_t* m = &here(envoy)->metadata;
  size_t count = 0;
  for (size_t i = 0; i < m->count; i++) {
    count += in_namespace(&m->list[i], ns);
  }
  return count;
}
bool CB(http_get_metadata_keys)(void* envoy, envoy_dynamic_module_type_metadata_source source, text_t ns, view_t* out) {
  (void)source;
  const map_t* m = &here(envoy)->metadata;
  for (size_t i = 0; i < m->count; i++) {
    if (in_namespace(&m->list[i], ns)) {
      *out++ = (view_t){m->list[i].key.data + ns.length + 1, m->list[i].key.size - ns.length - 1};
    }
  }
  return true;
}
#define NO_METADATA(name, type)                                                                                        \
  bool CB(http_get_metadata_##name)(void* envoy, envoy_dynamic_module_type_metadata_source source, text_t ns,          \
                                    text_t key, type* out) {                                                           \
    (void)here(envoy), (void)source, (void)ns, (void)key, (void)out;                                                   \
    return false;                                                                                                      \
  }
NO_METADATA(string, view_t)
NO_METADATA(number, double)
NO_METADATA(bool, bool)
NO_METADATA(list_size, size_t)
#define NO_LIST(name, type)                                                                                            \
  bool CB(http_get_metadata_list_##name)(void* envoy, envoy_dynamic_module_type_metadata_source source, text_t ns,     \
                                         text_t key, size_t index, type* out) {                                        \
    (void)here(envoy), (void)source, (void)ns, (void)key, (void)index, (void)out;                                      \
    return false;                                                                                                      \
  }
NO_LIST(string, view_t)
NO_LIST(number, double)
NO_LIST(bool, bool)

bool CB(http_set_filter_state_bytes)(void* envoy, text_t key, text_t value) {
  map_set(&here(envoy)->state, key.ptr, key.length, value.ptr, value.length, false);
  return true;
}
bool CB(http_get_filter_state_bytes)(void* envoy, text_t key, view_t* out) {
  const pair_t* p = map_find(&here(envoy)->state, key.ptr, key.length);
  return give(out, p == NULL ? NULL : &p->value);
}

// ---- metrics: none is kept ----

#define DEFINE(name)                                                                                                   \
  envoy_dynamic_module_type_metrics_result CB(http_filter_config_define_##name)(void* config, text_t text,             \
                                                                                text_t* labels, size_t count,          \
                                                                                size_t* id) {                          \
    (void)config, (void)text, (void)labels, (void)count;                                                               \
    *id = 0;                                                                                                           \
    return envoy_dynamic_module_type_metrics_result_Frozen;                                                            \
  }
DEFINE(counter)
DEFINE(gauge)
DEFINE(histogram)
