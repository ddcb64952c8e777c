// The state machine of contrib's filter (golang_filter.cc, processor_state.cc)
// on the hooks of a dynamic module.
#include "host.h"

#include <stdlib.h>
#include <string.h>

#define BODY_KIND(name) envoy_dynamic_module_type_http_body_type_##name

#define AS_NAME(name) #name,
static const char* const state_names[] = {FILTER_STATES(AS_NAME)};
static const char* const status_names[] = {GOLANG_STATUSES(AS_NAME)};

const char* state_name(const state_t* s) { return state_names[s->go.state]; }
const char* status_name(int status) {
  return status >= 0 && status < GolangStatuses ? status_names[status] : "an unknown status";
}
const char* side_name(const state_t* s) { return s->go.is_encoding ? "encoding" : "decoding"; }

static void set_state(state_t* s, int state) {
  pthread_mutex_lock(&request_of(s)->lock);
  s->go.state = state;
  pthread_mutex_unlock(&request_of(s)->lock);
}

envoy_dynamic_module_type_http_body_type received_body(const state_t* s) {
  return s->go.is_encoding ? BODY_KIND(ReceivedResponseBody) : BODY_KIND(ReceivedRequestBody);
}
envoy_dynamic_module_type_http_body_type buffered_body(const state_t* s) {
  return s->go.is_encoding ? BODY_KIND(BufferedResponseBody) : BODY_KIND(BufferedRequestBody);
}

// ---- what the plugin may see ----

// load_map copies a header map of Envoy's. The lock is not held.
void load_map(request_t* r, headers_t* into, envoy_dynamic_module_type_http_header_type kind) {
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

void raw_free(raw_t* raw) {
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

void clear_doing(state_t* s) {
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
    misuse("%s %s %s (%d) in %s: contrib logs \"unexpected status\" and the stream hangs", side_name(s), how,
           status_name(status), status, state_name(s));
  }
  if (posted) {
    if (status == StatusRunning || status == StatusLocalReply) {
      misuse("%s Continue(%s) in %s: does nothing, the stream hangs", side_name(s), status_name(status), state_name(s));
    }
  } else {
    if (status == StatusLocalReply && !s->reply_posted) {
      misuse("%s returned LocalReply in %s without SendLocalReply: the stream hangs", side_name(s), state_name(s));
    }
    if (status != StatusRunning && status != StatusLocalReply && s->reply_posted) {
      misuse("%s returned %s in %s after SendLocalReply: the request goes on beside the reply", side_name(s),
             status_name(status), state_name(s));
    }
    if (status != StatusRunning && s->continue_posted) {
      misuse("%s returned %s in %s after Continue(): it is continued twice", side_name(s), status_name(status),
             state_name(s));
    }
  }
  const bool wants_more =
      status == StatusStopAndBuffer || status == StatusStopAndBufferWatermark || status == StatusStopNoBuffer;
  if (wants_more && s->do_end_stream) {
    misuse("%s %s %s in %s with endStream: contrib logs \"want more data while stream is end\" and the stream hangs",
           side_name(s), how, status_name(status), state_name(s));
  }
}

bool no_data(const state_t* s) { return s->waiting.len == 0 && !s->in_envoy; }

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

void into_go(request_t* r, const char* what) {
  if (!r->entered) {
    r->entered = true;
    r->go.configId = config_merged(r->config, CB(get_most_specific_route_config)(r->envoy));
  }
  atomic_fetch_add_explicit(&r->crossings, 1, memory_order_relaxed);
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

bool run_trailers(state_t* s) {
  s->do_end_stream = true;
  set_state(s, StateProcessingTrailer);
  return headers_go(s, &s->trailers, true, s->go.is_encoding ? "EncodeTrailers" : "DecodeTrailers");
}

// ---- bodies in Envoy ----

void take_body(request_t* r, bytes_t* into, envoy_dynamic_module_type_http_body_type type) {
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
bytes_t take_waiting(state_t* s) {
  bytes_t all = s->waiting;
  s->waiting = (bytes_t){0};
  if (s->in_envoy) {
    s->in_envoy = false;
    take_body(request_of(s), &all, buffered_body(s));
  }
  return all;
}

void give_body(state_t* s, envoy_dynamic_module_type_http_body_type type) {
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
  give_body(s, buffered_body(s));
  if (s->go.is_encoding) {
    CB(http_filter_continue_encoding)(r->envoy);
  } else {
    CB(http_filter_continue_decoding)(r->envoy);
  }
}

// too_large answers as contrib's watermark buffer does, when what waits for
// the whole body passes the limit.
bool too_large(state_t* s, size_t size) {
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
             side_name(s));
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
             side_name(s), s->waiting.len, (unsigned long long)limit);
    }
  }
  const int now = s->go.state;
  if ((now == StateWaitingData && (!no_data(s) || s->end_stream)) ||
      (now == StateWaitingAllData && (s->end_stream || s->has_trailers))) {
    if (!s->had_data) {
      misuse("%s Continue(%s) when trailers came without a body: contrib dereferences a buffer it never made", side_name(s),
             status_name(status));
    }
    bytes_t data = take_waiting(s);
    if (!run_data(s, &data, s->end_stream)) {
      if (s->go.state == StateWaitingTrailer || (!state_processing(s) && s->has_trailers)) {
        misuse("%s wants more data after the last, in %s: contrib never comes to the trailers", side_name(s),
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
