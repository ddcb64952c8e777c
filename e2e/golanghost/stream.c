// The state machine of contrib's filter (golang_filter.cc, processor_state.cc)
// on the hooks of a dynamic module.
#include "host.h"

#include <stdlib.h>
#include <string.h>

#define HEADERS(name) envoy_dynamic_module_type_on_http_filter_request_headers_status_##name
#define BODY(name) envoy_dynamic_module_type_on_http_filter_request_body_status_##name
#define TRAILERS(name) envoy_dynamic_module_type_on_http_filter_request_trailers_status_##name
#define KIND(name) envoy_dynamic_module_type_http_header_type_##name
#define BODY_KIND(name) envoy_dynamic_module_type_http_body_type_##name

#define AS_NAME(name) #name,
static const char* const state_names[] = {FILTER_STATES(AS_NAME)};
static const char* const status_names[] = {GOLANG_STATUSES(AS_NAME)};

const char* state_name(const state_t* s) { return state_names[s->go.state]; }
const char* status_name(int status) {
  return status >= 0 && status < GolangStatuses ? status_names[status] : "an unknown status";
}
static const char* side(const state_t* s) { return s->go.is_encoding ? "encoding" : "decoding"; }

static void set_state(state_t* s, int state) {
  pthread_mutex_lock(&request_of(s)->lock);
  s->go.state = state;
  pthread_mutex_unlock(&request_of(s)->lock);
}

static envoy_dynamic_module_type_http_body_type received(const state_t* s) {
  return s->go.is_encoding ? BODY_KIND(ReceivedResponseBody) : BODY_KIND(ReceivedRequestBody);
}
static envoy_dynamic_module_type_http_body_type buffered(const state_t* s) {
  return s->go.is_encoding ? BODY_KIND(BufferedResponseBody) : BODY_KIND(BufferedRequestBody);
}

// ---- what the plugin may see ----

// load_map copies a header map of Envoy's. The lock is not held.
static void load_map(request_t* r, headers_t* into, envoy_dynamic_module_type_http_header_type kind) {
  const size_t count = CB(http_get_headers_size)(r->envoy, kind);
  envoy_dynamic_module_type_envoy_http_header* list = calloc(count + 1, sizeof(*list));
  headers_t fresh = {0};
  if (count > 0 && CB(http_get_headers)(r->envoy, kind, list)) {
    for (size_t i = 0; i < count; i++) {
      headers_add(&fresh, list[i].key_ptr, list[i].key_length, list[i].value_ptr, list[i].value_length);
    }
  }
  free(list);
  pthread_mutex_lock(&r->lock);
  headers_free(into);
  *into = fresh;
  pthread_mutex_unlock(&r->lock);
}

static void raw_free(raw_t* raw) {
  for (size_t i = 0; i < raw->count; i++) {
    guarded_free(raw->list[i]);
  }
  free(raw->list);
  *raw = (raw_t){0};
}

// drop_headers takes the header map, and what GetHeader returned, away from the
// plugin.
void drop_headers(state_t* s) {
  pthread_mutex_lock(&request_of(s)->lock);
  if (s->synthetic && s->has_headers) {
    headers_free(&s->kept);
    s->kept = s->headers;
    s->headers = (headers_t){0};
  }
  s->has_headers = false;
  headers_free(&s->headers);
  raw_free(&s->raw);
  pthread_mutex_unlock(&request_of(s)->lock);
}

static void give(state_t* s, const headers_t* map) {
  s->given_count = map->count;
  s->given_bytes = map->bytes;
}

bool has_doing(const state_t* s, uint64_t handle) {
  for (const body_t* b = s->doing; b != NULL; b = b->next) {
    if ((uint64_t)(uintptr_t)b == handle) {
      return true;
    }
  }
  return false;
}

static void clear_doing(state_t* s) {
  pthread_mutex_lock(&request_of(s)->lock);
  while (s->doing != NULL) {
    body_t* b = s->doing;
    s->doing = b->next;
    bytes_free(&b->bytes);
    guarded_free(b);
  }
  pthread_mutex_unlock(&request_of(s)->lock);
}

// release lets the chunks the plugin worked on pass.
void release(state_t* s) {
  pthread_mutex_lock(&request_of(s)->lock);
  for (body_t* b = s->doing; b != NULL; b = b->next) {
    bytes_move(&s->out, &b->bytes);
  }
  pthread_mutex_unlock(&request_of(s)->lock);
  clear_doing(s);
}

// ---- the tables ----

// judge ends the process when an answer would make contrib hang or crash.
// posted: it came through Continue, not as a return value.
static void judge(state_t* s, int status, bool posted) {
  const char* how = posted ? "Continue()" : "returned";
  if (status < 0 || status >= GolangStatuses || !state_processing(s) || (accepted[s->go.state] & 1u << status) == 0) {
    misuse("%s %s %s (%d) in %s: contrib logs \"unexpected status\" and the stream hangs", side(s), how,
           status_name(status), status, state_name(s));
  }
  if (posted) {
    if (status == StatusRunning || status == StatusLocalReply) {
      misuse("%s Continue(%s) in %s: does nothing, the stream hangs", side(s), status_name(status), state_name(s));
    }
  } else {
    if (status == StatusLocalReply && !s->reply_posted) {
      misuse("%s returned LocalReply in %s without SendLocalReply: the stream hangs", side(s), state_name(s));
    }
    if (status != StatusRunning && status != StatusLocalReply && s->reply_posted) {
      misuse("%s returned %s in %s after SendLocalReply: the request goes on beside the reply", side(s),
             status_name(status), state_name(s));
    }
    if (status != StatusRunning && s->continue_posted) {
      misuse("%s returned %s in %s after Continue(): it is continued twice", side(s), status_name(status),
             state_name(s));
    }
  }
  const bool wants_more =
      status == StatusStopAndBuffer || status == StatusStopAndBufferWatermark || status == StatusStopNoBuffer;
  if (wants_more && s->do_end_stream) {
    misuse("%s %s %s in %s with endStream: contrib logs \"want more data while stream is end\" and the stream hangs",
           side(s), how, status_name(status), state_name(s));
  }
}

static bool no_data(const state_t* s) { return s->waiting.len == 0 && !s->in_envoy; }

// handle moves the state by an answer, and tells whether the iteration goes on.
static bool handle(state_t* s, int status, bool posted) {
  judge(s, status, posted);
  if (status == StatusLocalReply || status == StatusRunning) {
    return false;
  }
  const int in = s->go.state;
  if (in == StateProcessingTrailer) {
    set_state(s, StateDone);
    return true;
  }
  if (status == StatusStopNoBuffer) {
    pthread_mutex_lock(&request_of(s)->lock);
    body_t** last = &s->doing;
    while (*last != NULL && (*last)->next != NULL) {
      last = &(*last)->next;
    }
    body_t* dropped = *last;
    *last = NULL;
    pthread_mutex_unlock(&request_of(s)->lock);
    if (dropped != NULL) {
      bytes_free(&dropped->bytes);
      guarded_free(dropped);
    }
  }
  int next = StateWaitingData;
  if (status == StatusContinue && s->do_end_stream) {
    next = StateDone;
  } else if (status == StatusStopAndBuffer) {
    next = StateWaitingAllData;
  }
  if (in == StateProcessingData && s->has_trailers && no_data(s)) {
    next = StateWaitingTrailer;
  }
  set_state(s, next);
  return status == StatusContinue;
}

// ---- into Go ----

static void into_go(request_t* r, const char* what) {
  if (!r->entered) {
    r->entered = true;
    r->go.configId = config_merged(r->config, CB(get_most_specific_route_config)(r->envoy));
  }
  plugin_enter(what);
}

// after_go: a goroutine may go on with the request from here.
static void after_go(request_t* r, int status) {
  plugin_leave();
  if (status == StatusRunning && r->envoy != NULL) {
    take_values(r);
  }
}

static bool headers_go(state_t* s, const headers_t* map, bool end_stream, const char* what) {
  request_t* r = request_of(s);
  give(s, map);
  into_go(r, what);
  const int status = (int)r->plugin->on_header(&s->go, end_stream ? 1 : 0, map->count, map->bytes);
  after_go(r, status);
  return handle(s, status, false);
}

bool run_headers(state_t* s, bool end_stream) {
  s->do_end_stream = end_stream;
  set_state(s, StateProcessingHeader);
  const bool done = headers_go(s, &s->headers, end_stream, s->go.is_encoding ? "EncodeHeaders" : "DecodeHeaders");
  if (done) {
    drop_headers(s);
  }
  return done;
}

bool run_data(state_t* s, bytes_t* data, bool end_stream) {
  request_t* r = request_of(s);
  s->do_end_stream = end_stream;
  body_t* b = guarded_new(sizeof(*b));
  bytes_move(&b->bytes, data);
  pthread_mutex_lock(&r->lock);
  s->go.state = StateProcessingData;
  body_t** last = &s->doing;
  while (*last != NULL) {
    last = &(*last)->next;
  }
  *last = b;
  pthread_mutex_unlock(&r->lock);
  into_go(r, s->go.is_encoding ? "EncodeData" : "DecodeData");
  const int status = (int)r->plugin->on_data(&s->go, end_stream ? 1 : 0, (uint64_t)(uintptr_t)b, b->bytes.len);
  after_go(r, status);
  return handle(s, status, false);
}

static bool run_trailers(state_t* s) {
  s->do_end_stream = true;
  set_state(s, StateProcessingTrailer);
  return headers_go(s, &s->trailers, true, s->go.is_encoding ? "EncodeTrailers" : "DecodeTrailers");
}

// ---- bodies in Envoy ----

static void take_body(request_t* r, bytes_t* into, envoy_dynamic_module_type_http_body_type type) {
  const size_t count = CB(http_get_body_chunks_size)(r->envoy, type);
  envoy_dynamic_module_type_envoy_buffer* chunks = calloc(count + 1, sizeof(*chunks));
  size_t size = 0;
  if (count > 0 && CB(http_get_body_chunks)(r->envoy, type, chunks)) {
    for (size_t i = 0; i < count; i++) {
      bytes_append(into, chunks[i].ptr, chunks[i].length);
      size += chunks[i].length;
    }
  }
  free(chunks);
  if (size > 0) {
    CB(http_drain_body)(r->envoy, type, size);
  }
}

// take_waiting empties the data buffer of a state.
static bytes_t take_waiting(state_t* s) {
  bytes_t all = s->waiting;
  s->waiting = (bytes_t){0};
  if (s->in_envoy) {
    s->in_envoy = false;
    take_body(request_of(s), &all, buffered(s));
  }
  return all;
}

static void give_body(state_t* s, envoy_dynamic_module_type_http_body_type type) {
  bytes_t out = s->out;
  s->out = (bytes_t){0};
  if (out.len > 0) {
    CB(http_append_body)(request_of(s)->envoy, type, MODULE(bytes_at(&out), out.len));
  }
  bytes_free(&out);
}

// resume lets Envoy go on with a stream that stopped. It may destroy it.
static void resume(state_t* s) {
  request_t* r = request_of(s);
  if (s->synthetic) {
    reply_resume(r);
    return;
  }
  give_body(s, buffered(s));
  if (s->go.is_encoding) {
    CB(http_filter_continue_encoding)(r->envoy);
  } else {
    CB(http_filter_continue_decoding)(r->envoy);
  }
}

// too_large answers as contrib's watermark buffer does, when what waits for
// the whole body passes the limit.
static bool too_large(state_t* s, size_t size) {
  request_t* r = request_of(s);
  const uint64_t limit = CB(http_get_buffer_limit)(r->envoy);
  if (limit == 0 || size <= limit) {
    return false;
  }
  if (s->go.is_encoding) {
    r->replied = true;
    static const char text[] = "Internal Server Error", details[] = "response_payload_too_large";
    CB(http_send_response)
    (r->envoy, 500, NULL, 0, MODULE(text, sizeof(text) - 1), MODULE(details, sizeof(details) - 1));
  } else {
    static const char text[] = "Payload Too Large", details[] = "request_payload_too_large";
    reply_start(s, reply_new(413, text, sizeof(text) - 1, 8, details, sizeof(details) - 1));
  }
  return true;
}

// ---- Continue, posted ----

void continue_from_go(state_t* s, int status) {
  const int saved = s->go.state;
  const bool done = handle(s, status, true);
  bool go_on = false;
  if (done && saved == StateProcessingHeader) {
    drop_headers(s); // contrib forgets this; we are stricter
    go_on = s->do_end_stream || !(s->end_stream || s->has_trailers);
    if (!go_on && !s->end_stream && no_data(s)) {
      misuse("%s Continue() from headers when trailers came without a body: contrib hangs (its own TODO in "
             "continueStatusInternal)",
             side(s));
    }
  } else if (done) {
    release(s);
    go_on = saved == StateProcessingTrailer || s->out.len > 0 || s->end_stream;
  }
  if (s->go.state == StateWaitingAllData && s->in_envoy) {
    const uint64_t limit = CB(http_get_buffer_limit)(request_of(s)->envoy);
    s->waiting = take_waiting(s);
    if (limit != 0 && s->waiting.len > limit && !s->end_stream && !s->has_trailers) {
      misuse("%s Continue(StopAndBuffer) with %zu bytes buffered, more than the limit of %llu: contrib has stopped "
             "reading and waits for all data",
             side(s), s->waiting.len, (unsigned long long)limit);
    }
  }
  const int now = s->go.state;
  if ((now == StateWaitingData && (!no_data(s) || s->end_stream)) ||
      (now == StateWaitingAllData && (s->end_stream || s->has_trailers))) {
    if (!s->had_data) {
      misuse("%s Continue(%s) when trailers came without a body: contrib dereferences a buffer it never made", side(s),
             status_name(status));
    }
    bytes_t data = take_waiting(s);
    if (!run_data(s, &data, s->end_stream)) {
      if (s->go.state == StateWaitingTrailer || (!state_processing(s) && s->has_trailers)) {
        misuse("%s wants more data after the last, in %s: contrib never comes to the trailers", side(s),
               state_name(s));
      }
      // What passed before is held while the plugin works on the next chunk:
      // Envoy's buffer would mix them. Contrib sends it at once.
      if (go_on && !state_processing(s)) {
        resume(s);
      }
      return;
    }
    release(s);
    go_on = true;
  }
  if (s->go.state == StateWaitingTrailer && s->has_trailers) {
    if (!run_trailers(s)) {
      return;
    }
    go_on = true;
  }
  if (go_on) {
    resume(s);
  }
}

// ---- hooks ----

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
    take_body(r, &data, received(s));
    done = run_data(s, &data, end_stream);
    break;
  case StateWaitingAllData:
    // A body in one chunk is not measured: contrib never buffers it.
    if (!end_stream || s->waiting.len > 0) {
      take_body(r, &s->waiting, received(s));
      if (too_large(s, s->waiting.len)) {
        return BODY(StopIterationNoBuffer);
      }
      if (!end_stream) {
        break;
      }
      bytes_move(&data, &s->waiting);
    } else {
      take_body(r, &data, received(s));
    }
    done = run_data(s, &data, true);
    break;
  case StateProcessingHeader:
  case StateProcessingData:
    s->in_envoy = true;
    return BODY(StopIterationAndWatermark);
  default:
    host_log(4, "golanghost: body in an unexpected state: %s %s", side(s), state_name(s));
  }
  if (!done) {
    return BODY(StopIterationNoBuffer);
  }
  release(s);
  give_body(s, received(s));
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
      misuse("%s held chunks with StopAndBufferWatermark until the trailers: contrib loses them", side(s));
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
    host_log(4, "golanghost: trailers in an unexpected state: %s %s", side(s), state_name(s));
  }
  if (done) {
    give_body(s, buffered(s));
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
  plugin_enter("OnDestroy");
  r->plugin->on_destroy(&r->go, terminate ? 1 : 0);
  plugin_leave();
  // From here Go's finalizer may free r at any time.
  raw_free(&raw[0]);
  raw_free(&raw[1]);
}

void request_free(request_t* r) {
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
