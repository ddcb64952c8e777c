// The hooks that Envoy calls, and the life of a request.
#include "host.h"

#include <stdlib.h>
#include <string.h>

#define HEADERS(name) envoy_dynamic_module_type_on_http_filter_request_headers_status_##name
#define BODY(name) envoy_dynamic_module_type_on_http_filter_request_body_status_##name
#define TRAILERS(name) envoy_dynamic_module_type_on_http_filter_request_trailers_status_##name
#define KIND(name) envoy_dynamic_module_type_http_header_type_##name

static request_t* hook(void* envoy, const void* module) {
  request_t* r = (request_t*)module;
  r->envoy = envoy;
  return r;
}

EXPORT envoy_dynamic_module_type_http_filter_module_ptr
envoy_dynamic_module_on_http_filter_new(envoy_dynamic_module_type_http_filter_config_module_ptr config,
                                        envoy_dynamic_module_type_http_filter_envoy_ptr envoy) {
  filter_config_t* c = (filter_config_t*)config;
  request_t* r = guarded_new(sizeof(*r));
  r->go.plugin_name.data = config_name(c);
  r->go.plugin_name.len = strlen(config_name(c));
  r->go.worker_id = CB(http_filter_get_worker_index)(envoy);
  r->decoding.go.req = &r->go;
  r->encoding.go.req = &r->go;
  r->encoding.go.is_encoding = 1;
  r->config = c;
  config_retain(c);
  r->plugin = config_plugin(c);
  r->worker = pthread_self();
  r->scheduler = CB(http_filter_scheduler_new)(envoy);
  pthread_mutex_init(&r->lock, NULL);
  return r;
}

static void log_to_go(request_t* r, int type);
static void request_free(request_t* r);

static bool on_headers(request_t* r, state_t* s, bool end_stream) {
  load_map(r, &s->headers, s->go.is_encoding ? KIND(ResponseHeader) : KIND(RequestHeader));
  take_values(r);
  if (!s->go.is_encoding && config_logs_start(r->config)) {
    log_to_go(r, 4);
  }
  s->end_stream = end_stream;
  s->has_headers = true;
  return run_headers(s, end_stream);
}

static int on_body(request_t* r, state_t* s, bool end_stream) {
  bytes_t data = {0};
  bool done = false;
  s->end_stream = end_stream;
  s->had_data = true;
  switch (s->go.state) {
  case StateWaitingData:
    take_body(r, &data, received_body(s));
    done = run_data(s, &data, end_stream);
    break;
  case StateWaitingAllData:
    // A body in one chunk is not measured: contrib never buffers it.
    if (!end_stream || s->waiting.len > 0) {
      take_body(r, &s->waiting, received_body(s));
      if (too_large(s, s->waiting.len)) {
        return BODY(StopIterationNoBuffer);
      }
      if (!end_stream) {
        break;
      }
      bytes_move(&data, &s->waiting);
    } else {
      take_body(r, &data, received_body(s));
    }
    done = run_data(s, &data, true);
    break;
  case StateProcessingHeader:
  case StateProcessingData:
    s->in_envoy = true;
    return BODY(StopIterationAndWatermark);
  default:
    host_log(4, "golanghost: body in an unexpected state: %s %s", side_name(s), state_name(s));
  }
  if (!done) {
    return BODY(StopIterationNoBuffer);
  }
  release(s);
  give_body(s, received_body(s));
  return BODY(Continue);
}

static bool on_trailers(request_t* r, state_t* s) {
  load_map(r, &s->trailers, s->go.is_encoding ? KIND(ResponseTrailer) : KIND(RequestTrailer));
  s->has_trailers = true;
  bool done = false;
  switch (s->go.state) {
  case StateWaitingTrailer:
  case StateWaitingData: {
    const bool held = s->doing != NULL;
    done = run_trailers(s);
    if (done && held) {
      misuse("%s held chunks with StopAndBufferWatermark until the trailers: contrib loses them", side_name(s));
    }
    break;
  }
  case StateWaitingAllData:
    if (!no_data(s)) {
      bytes_t data = take_waiting(s);
      run_data(s, &data, false);
      if (s->go.state != StateWaitingTrailer) {
        break;
      }
    }
    release(s);
    done = run_trailers(s);
    break;
  case StateProcessingHeader:
  case StateProcessingData:
    break;
  default:
    host_log(4, "golanghost: trailers in an unexpected state: %s %s", side_name(s), state_name(s));
  }
  if (done) {
    give_body(s, buffered_body(s));
  }
  return done;
}

EXPORT envoy_dynamic_module_type_on_http_filter_request_headers_status
envoy_dynamic_module_on_http_filter_request_headers(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                    envoy_dynamic_module_type_http_filter_module_ptr module,
                                                    bool end_stream) {
  request_t* r = hook(envoy, module);
  return on_headers(r, &r->decoding, end_stream) ? HEADERS(Continue) : HEADERS(StopIteration);
}

EXPORT envoy_dynamic_module_type_on_http_filter_request_body_status envoy_dynamic_module_on_http_filter_request_body(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    bool end_stream) {
  request_t* r = hook(envoy, module);
  if (r->replied || r->reply != NULL) { // Envoy's filter chain ends here in contrib
    return BODY(StopIterationNoBuffer);
  }
  return (envoy_dynamic_module_type_on_http_filter_request_body_status)on_body(r, &r->decoding, end_stream);
}

EXPORT envoy_dynamic_module_type_on_http_filter_request_trailers_status
envoy_dynamic_module_on_http_filter_request_trailers(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                     envoy_dynamic_module_type_http_filter_module_ptr module) {
  request_t* r = hook(envoy, module);
  if (r->replied || r->reply != NULL) {
    return TRAILERS(StopIteration);
  }
  return on_trailers(r, &r->decoding) ? TRAILERS(Continue) : TRAILERS(StopIteration);
}

EXPORT envoy_dynamic_module_type_on_http_filter_response_headers_status
envoy_dynamic_module_on_http_filter_response_headers(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                     envoy_dynamic_module_type_http_filter_module_ptr module,
                                                     bool end_stream) {
  request_t* r = hook(envoy, module);
  // While a reply of ours waits in Encode*, Envoy's own (a timeout) wins.
  if (r->reply != NULL) {
    return envoy_dynamic_module_type_on_http_filter_response_headers_status_Continue;
  }
  const bool done = on_headers(r, &r->encoding, end_stream);
  return done ? envoy_dynamic_module_type_on_http_filter_response_headers_status_Continue
              : envoy_dynamic_module_type_on_http_filter_response_headers_status_StopIteration;
}

EXPORT envoy_dynamic_module_type_on_http_filter_response_body_status
envoy_dynamic_module_on_http_filter_response_body(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                  envoy_dynamic_module_type_http_filter_module_ptr module,
                                                  bool end_stream) {
  request_t* r = hook(envoy, module);
  if (r->reply != NULL) {
    return envoy_dynamic_module_type_on_http_filter_response_body_status_Continue;
  }
  return (envoy_dynamic_module_type_on_http_filter_response_body_status)on_body(r, &r->encoding, end_stream);
}

EXPORT envoy_dynamic_module_type_on_http_filter_response_trailers_status
envoy_dynamic_module_on_http_filter_response_trailers(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                      envoy_dynamic_module_type_http_filter_module_ptr module) {
  request_t* r = hook(envoy, module);
  if (r->reply != NULL || on_trailers(r, &r->encoding)) {
    return envoy_dynamic_module_type_on_http_filter_response_trailers_status_Continue;
  }
  return envoy_dynamic_module_type_on_http_filter_response_trailers_status_StopIteration;
}

EXPORT void envoy_dynamic_module_on_http_filter_scheduled(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t event) {
  (void)event;
  request_t* r = hook(envoy, module);
  pthread_mutex_lock(&r->lock);
  op_t* op = r->first;
  if (op != NULL) {
    r->first = op->next;
    if (r->first == NULL) {
      r->last = NULL;
    }
  }
  pthread_mutex_unlock(&r->lock);
  if (op != NULL) {
    op_run(r, op); // frees op; r may be gone
  }
}

// ---- the end ----

static void log_to_go(request_t* r, int type) {
  state_t *d = &r->decoding, *e = &r->encoding;
  pthread_mutex_lock(&r->lock);
  const bool trailers = d->has_trailers;
  pthread_mutex_unlock(&r->lock);
  headers_t response_trailers = {0};
  load_map(r, &d->headers, KIND(RequestHeader));
  load_map(r, &e->headers, KIND(ResponseHeader));
  load_map(r, &response_trailers, KIND(ResponseTrailer));
  if (trailers) {
    load_map(r, &d->trailers, KIND(RequestTrailer));
  }
  take_values(r);
  pthread_mutex_lock(&r->lock);
  d->has_headers = true;
  e->has_headers = e->headers.count > 0;
  headers_free(&e->trailers);
  e->trailers = response_trailers;
  e->has_trailers = e->trailers.count > 0;
  d->given_count = e->given_count = SIZE_MAX; // four maps were given at once
  d->given_bytes = e->given_bytes = SIZE_MAX;
  pthread_mutex_unlock(&r->lock);
  into_go(r, "OnLog");
  r->go.is_golang_processing_log = 1;
  r->plugin->on_log(&r->go, (uint64_t)type, &d->go, &e->go, d->headers.count, d->headers.bytes, d->trailers.count,
                    d->trailers.bytes, e->headers.count, e->headers.bytes, e->trailers.count, e->trailers.bytes);
  r->go.is_golang_processing_log = 0;
  plugin_leave();
}

EXPORT void envoy_dynamic_module_on_http_filter_stream_complete(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module) {
  request_t* r = hook(envoy, module);
  if (r == NULL) {
    return;
  }
  if (r->entered) {
    take_values(r);
    r->go.is_golang_processing_log = 1;
    atomic_fetch_add_explicit(&r->crossings, 1, memory_order_relaxed);
    plugin_enter("OnStreamComplete");
    r->plugin->on_stream_complete(&r->go);
    plugin_leave();
    r->go.is_golang_processing_log = 0;
  }
  // Contrib logs next, also a request that Go has not seen yet.
  log_to_go(r, 6);
}

EXPORT void envoy_dynamic_module_on_http_filter_destroy(envoy_dynamic_module_type_http_filter_module_ptr module) {
  request_t* r = (request_t*)module;
  if (!r->entered) {
    request_free(r);
    return;
  }
  pthread_mutex_lock(&r->lock);
  r->destroyed = true;
  const bool terminate = state_processing(&r->decoding) || state_processing(&r->encoding);
  raw_t raw[] = {r->decoding.raw, r->encoding.raw};
  r->decoding.raw = r->encoding.raw = (raw_t){0};
  pthread_mutex_unlock(&r->lock);
  // OnDestroy and Finalize are two more.
  config_crossed(r->config, atomic_load_explicit(&r->crossings, memory_order_relaxed) + 2);
  plugin_enter("OnDestroy");
  r->plugin->on_destroy(&r->go, terminate ? 1 : 0);
  plugin_leave();
  // From here Go's finalizer may free r at any time.
  raw_free(&raw[0]);
  raw_free(&raw[1]);
}

static void request_free(request_t* r) {
  CB(http_filter_scheduler_delete)(r->scheduler);
  for (state_t* s = &r->decoding; s != NULL; s = s == &r->decoding ? &r->encoding : NULL) {
    drop_headers(s);
    clear_doing(s);
    headers_free(&s->trailers);
    headers_free(&s->kept);
    bytes_free(&s->waiting);
    bytes_free(&s->out);
  }
  while (r->first != NULL) {
    op_t* op = r->first;
    r->first = op->next;
    op_free(op);
  }
  for (size_t i = 0; i < VALUES; i++) {
    free(r->values[i]);
  }
  free(r->text);
  bytes_free(&r->blob);
  reply_free(r->reply);
  metadata_free(&r->metadata);
  pthread_mutex_destroy(&r->lock);
  config_release(r->config);
  guarded_free(r);
}

EXPORT void envoyGoFilterHttpFinalize(void* request, int reason) {
  (void)reason;
  request_t* r = request;
  pthread_mutex_lock(&r->lock);
  const bool destroyed = r->destroyed;
  pthread_mutex_unlock(&r->lock);
  if (!destroyed) {
    misuse("Finalize of a request before OnDestroy");
  }
  request_free(r);
}

// ---- hooks that Envoy demands ----

EXPORT void envoy_dynamic_module_on_http_filter_http_callout_done(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t id, envoy_dynamic_module_type_http_callout_result result,
    envoy_dynamic_module_type_envoy_http_header* headers, size_t headers_size,
    envoy_dynamic_module_type_envoy_buffer* body, size_t body_size) {
  (void)envoy, (void)module, (void)id, (void)result, (void)headers, (void)headers_size, (void)body, (void)body_size;
}
EXPORT void envoy_dynamic_module_on_http_filter_http_stream_headers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t id, envoy_dynamic_module_type_envoy_http_header* headers, size_t headers_size, bool end_stream) {
  (void)envoy, (void)module, (void)id, (void)headers, (void)headers_size, (void)end_stream;
}
EXPORT void envoy_dynamic_module_on_http_filter_http_stream_data(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t id, const envoy_dynamic_module_type_envoy_buffer* data, size_t count, bool end_stream) {
  (void)envoy, (void)module, (void)id, (void)data, (void)count, (void)end_stream;
}
EXPORT void envoy_dynamic_module_on_http_filter_http_stream_trailers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t id, envoy_dynamic_module_type_envoy_http_header* trailers, size_t trailers_size) {
  (void)envoy, (void)module, (void)id, (void)trailers, (void)trailers_size;
}
EXPORT void envoy_dynamic_module_on_http_filter_http_stream_complete(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t id) {
  (void)envoy, (void)module, (void)id;
}
EXPORT void envoy_dynamic_module_on_http_filter_http_stream_reset(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    uint64_t id, envoy_dynamic_module_type_http_stream_reset_reason reason) {
  (void)envoy, (void)module, (void)id, (void)reason;
}
EXPORT void envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module) {
  (void)envoy, (void)module;
}
EXPORT void envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module) {
  (void)envoy, (void)module;
}
