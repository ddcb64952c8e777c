// The hooks of Envoy's dynamic module ABI. They move headers, bodies and
// verdicts between Envoy and Go in as few calls as the life of a request
// needs, and decide nothing.
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"
#include "stream.h"

static __thread uint32_t worker; // Go's number of this thread
static atomic_uint routes;       // route configurations alive

// ---- config ----

envoy_dynamic_module_type_abi_version_module_ptr envoy_dynamic_module_on_program_init(void) {
  return envoy_dynamic_modules_abi_version;
}

envoy_dynamic_module_type_http_filter_config_module_ptr
envoy_dynamic_module_on_http_filter_config_new(envoy_dynamic_module_type_http_filter_config_envoy_ptr config_envoy,
                                               envoy_dynamic_module_type_envoy_buffer name,
                                               envoy_dynamic_module_type_envoy_buffer config) {
  (void)config_envoy;
  return (const void*)(uintptr_t)shuntConfigNew((char*)name.ptr, name.length, (char*)config.ptr, config.length);
}

void envoy_dynamic_module_on_http_filter_config_destroy(
    envoy_dynamic_module_type_http_filter_config_module_ptr config) {
  shuntConfigFree((uint32_t)(uintptr_t)config);
}

envoy_dynamic_module_type_http_filter_per_route_config_module_ptr
envoy_dynamic_module_on_http_filter_per_route_config_new(envoy_dynamic_module_type_envoy_buffer name,
                                                         envoy_dynamic_module_type_envoy_buffer config) {
  (void)name;
  const uint32_t route = shuntRouteNew((char*)config.ptr, config.length);
  if (route != 0) {
    atomic_fetch_add(&routes, 1);
  }
  return (const void*)(uintptr_t)route;
}

void envoy_dynamic_module_on_http_filter_per_route_config_destroy(
    envoy_dynamic_module_type_http_filter_per_route_config_module_ptr config) {
  shuntRouteFree((uint32_t)(uintptr_t)config);
  atomic_fetch_sub(&routes, 1);
}

// ---- life of a stream ----

envoy_dynamic_module_type_http_filter_module_ptr
envoy_dynamic_module_on_http_filter_new(envoy_dynamic_module_type_http_filter_config_module_ptr config,
                                        envoy_dynamic_module_type_http_filter_envoy_ptr envoy) {
  (void)envoy;
  stream_t* s = calloc(1, sizeof(*s));
  if (s == NULL) {
    return NULL; // Envoy closes the stream
  }
  s->config = (uint32_t)(uintptr_t)config;
  return s;
}

static uint32_t route_of(envoy_t envoy) {
  // The look-up walks the route's levels: spared where no route has a config.
  return atomic_load(&routes) == 0 ? 0 : (uint32_t)(uintptr_t)CB(get_most_specific_route_config)(envoy);
}

// look_for_hint spares Go the question for a list that most requests don't have.
static void look_for_hint(envoy_t envoy, stream_t* s) {
  size_t size;
  s->ref.hinted = CB(http_get_metadata_list_size)(envoy, envoy_dynamic_module_type_metadata_source_Dynamic,
                                                  LITERAL(SUBSET_NAMESPACE), LITERAL(SUBSET_HEADER), &size);
}

// decide_headers hands the headers to Go and applies what it says.
static int decide_headers(envoy_t envoy, stream_t* s, const shunt_header* headers, size_t count, bool end_of_stream) {
  look_for_hint(envoy, s);
  WITH_TAPE(tape)
  const int action =
      shuntHeaders(envoy, s->config, route_of(envoy), &s->ref, (shunt_header*)headers, count, end_of_stream, &tape);
  shunt_apply(envoy, s, &tape, action, KIND(RequestHeader), true);
  shunt_tape_free(&tape);
  return action;
}

static bool is_header(const shunt_header* h, const char* name, size_t length) {
  return h->key_length == length && memcmp(h->key_ptr, name, length) == 0;
}
#define IS_HEADER(h, name) is_header(h, name, sizeof(name) - 1)

// announced_body returns the length of a small body that is sure to follow, else
// 0: it is announced, the client waits for nothing (Envoy takes expect away where
// it answers that itself), and it is not a tunnel's. Most often it is already
// there, and one call decides headers and body. A longer body, or one of unknown
// length, may be refused by its headers alone.
static uint32_t announced_body(const shunt_header* headers, size_t count) {
  uint32_t length = 0;
  for (size_t i = 0; i < count; i++) {
    const shunt_header* h = &headers[i];
    if (IS_HEADER(h, "content-length")) {
      length = 0;
      for (size_t d = 0; d < h->value_length; d++) {
        const uint32_t digit = (uint32_t)(h->value_ptr[d] - '0');
        if (digit > 9 || d == 5) { // no number, or 100,000 bytes and more
          return 0;
        }
        length = length * 10 + digit;
      }
    } else if (IS_HEADER(h, "upgrade") || IS_HEADER(h, "expect") ||
               (IS_HEADER(h, ":method") && h->value_length == 7 && memcmp(h->value_ptr, "CONNECT", 7) == 0)) {
      return 0;
    }
  }
  return length;
}

envoy_dynamic_module_type_on_http_filter_request_headers_status envoy_dynamic_module_on_http_filter_request_headers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    bool end_of_stream) {
  stream_t* s = (stream_t*)module;
  if (worker == 0) {
    worker = shuntWorker();
  }
  s->ref.worker = worker;
  shunt_header memory[HEADERS_ON_STACK];
  size_t count;
  shunt_header* headers = shunt_all_headers(envoy, KIND(RequestHeader), memory, &count);
  int action = SHUNT_WAIT;
  if (!end_of_stream && (s->announced = announced_body(headers, count)) > 0) {
    s->state = STATE_HEADERS;
  } else {
    action = decide_headers(envoy, s, headers, count, end_of_stream);
  }
  if (headers != memory) {
    free(headers);
  }
  return action == SHUNT_CONTINUE ? HEADERS(Continue) : HEADERS(StopIteration);
}

// late_headers decides by the headers alone, when not all of the body came with
// them.
static int late_headers(envoy_t envoy, stream_t* s) {
  shunt_header memory[HEADERS_ON_STACK];
  size_t count;
  shunt_header* headers = shunt_all_headers(envoy, KIND(RequestHeader), memory, &count);
  const int action = decide_headers(envoy, s, headers, count, false);
  if (headers != memory) {
    free(headers);
  }
  return action;
}

#define CHUNKS_ON_STACK 256

// The pieces of a body as they lie in Envoy's buffers.
typedef struct {
  shunt_buffer memory[CHUNKS_ON_STACK];
  shunt_buffer* chunks; // memory, or malloc's
  size_t count;
} pieces_t;

// pieces_get borrows the whole body: what is buffered and then, in the body
// hook, what it received and is not buffered yet.
static void pieces_get(envoy_t envoy, bool body_hook, pieces_t* p) {
  size_t buffered = 0, received = 0;
  if (body_hook) {
    received = CB(http_get_body_chunks_size)(envoy, BODY_KIND(ReceivedRequestBody));
  }
  // A filter before us may hand over what it buffered: the same bytes, once.
  if (!body_hook || !CB(http_received_buffered_request_body)(envoy)) {
    buffered = CB(http_get_body_chunks_size)(envoy, BODY_KIND(BufferedRequestBody));
  }
  p->chunks = p->memory;
  if (buffered + received > CHUNKS_ON_STACK &&
      (p->chunks = malloc((buffered + received) * sizeof(*p->chunks))) == NULL) {
    abort(); // as Envoy itself does when memory ends
  }
  if (buffered > 0 && !CB(http_get_body_chunks)(envoy, BODY_KIND(BufferedRequestBody), p->chunks)) {
    buffered = 0;
  }
  if (received > 0 && !CB(http_get_body_chunks)(envoy, BODY_KIND(ReceivedRequestBody), p->chunks + buffered)) {
    received = 0;
  }
  p->count = buffered + received;
}

static void pieces_free(pieces_t* p) {
  if (p->chunks != p->memory) {
    free(p->chunks);
  }
}

// whole_body hands the body to Go.
static int whole_body(envoy_t envoy, stream_t* s, bool body_hook, shunt_tape* tape) {
  pieces_t p;
  pieces_get(envoy, body_hook, &p);
  const int action = shuntBody(s->ref, p.chunks, p.count, tape);
  pieces_free(&p);
  return action;
}

static envoy_dynamic_module_type_on_http_filter_request_body_status body_status(int action) {
  switch (action) {
  case SHUNT_CONTINUE:
    return BODY(Continue);
  case SHUNT_REPLY:
    return BODY(StopIterationNoBuffer);
  default:
    return BODY(StopIterationAndBuffer);
  }
}

// more_room asks whether a body of unknown length may grow.
static envoy_dynamic_module_type_on_http_filter_request_body_status more_room(envoy_t envoy, stream_t* s) {
  WITH_TAPE(tape)
  const int action = shuntMore(s->ref, s->body, &tape);
  shunt_apply(envoy, s, &tape, action, KIND(RequestHeader), false);
  shunt_tape_free(&tape);
  return body_status(action);
}

// whole_request decides headers and body in one call.
static int whole_request(envoy_t envoy, stream_t* s) {
  shunt_header memory[HEADERS_ON_STACK];
  size_t count;
  shunt_header* headers = shunt_all_headers(envoy, KIND(RequestHeader), memory, &count);
  pieces_t p;
  pieces_get(envoy, true, &p);
  look_for_hint(envoy, s);
  WITH_TAPE(tape)
  const int action =
      shuntRequest(envoy, s->config, route_of(envoy), &s->ref, headers, count, p.chunks, p.count, &tape);
  if (headers != memory) {
    free(headers);
  }
  pieces_free(&p);
  if (action == SHUNT_WAIT) {
    shunt_raise_buffer_limit(envoy, tape.limit); // Envoy is about to buffer the body
  }
  shunt_apply(envoy, s, &tape, action, KIND(RequestHeader), true);
  shunt_tape_free(&tape);
  return action;
}

envoy_dynamic_module_type_on_http_filter_request_body_status envoy_dynamic_module_on_http_filter_request_body(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    bool end_of_stream) {
  stream_t* s = (stream_t*)module;
  s->in_body = true;
  if (s->state == STATE_HEADERS) {
    if (!end_of_stream && CB(http_get_body_size)(envoy, BODY_KIND(ReceivedRequestBody)) == s->announced) {
      // All is here, but of HTTP/1 the end comes apart. An answer before it
      // would cost the client its connection.
      shunt_raise_buffer_limit(envoy, s->announced);
      return BODY(StopIterationAndBuffer);
    }
    const int action = end_of_stream ? whole_request(envoy, s) : late_headers(envoy, s);
    if (end_of_stream || action == SHUNT_CONTINUE || action == SHUNT_REPLY) {
      return body_status(action);
    }
  }
  switch (s->state) {
  case STATE_BODY:
    break;
  case STATE_WAIT:
    return BODY(StopIterationAndWatermark);
  case STATE_REPLIED:
    return BODY(StopIterationNoBuffer);
  default:
    return BODY(Continue);
  }
  s->body += (int64_t)CB(http_get_body_size)(envoy, BODY_KIND(ReceivedRequestBody));
  if (s->body <= s->limit && !end_of_stream) {
    return s->body <= s->room ? BODY(StopIterationAndBuffer) : more_room(envoy, s);
  }
  WITH_TAPE(tape)
  const int action = s->body > s->limit ? shuntTooLarge(s->ref, &tape) : whole_body(envoy, s, true, &tape);
  shunt_apply(envoy, s, &tape, action, KIND(RequestHeader), false);
  shunt_tape_free(&tape);
  return body_status(action);
}

envoy_dynamic_module_type_on_http_filter_request_trailers_status envoy_dynamic_module_on_http_filter_request_trailers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module) {
  stream_t* s = (stream_t*)module;
  s->in_body = false;
  if (s->state == STATE_HEADERS && late_headers(envoy, s) == SHUNT_REPLY) { // no body came after all
    return TRAILERS(StopIteration);
  }
  if (s->state == STATE_REPLIED) {
    return TRAILERS(StopIteration);
  }
  {
    shunt_header memory[HEADERS_ON_STACK];
    size_t count;
    shunt_header* headers = shunt_all_headers(envoy, KIND(RequestTrailer), memory, &count);
    WITH_TAPE(tape)
    shuntTrailers(s->ref, headers, count, &tape);
    if (headers != memory) {
      free(headers);
    }
    const uint8_t state = s->state;
    tape.watch = s->watch;
    shunt_apply(envoy, s, &tape, SHUNT_CONTINUE, KIND(RequestTrailer), false);
    s->state = state; // removing trailers decides nothing
    shunt_tape_free(&tape);
  }
  switch (s->state) {
  case STATE_WAIT:
    return TRAILERS(StopIteration);
  case STATE_BODY:
    break;
  default:
    return TRAILERS(Continue);
  }
  WITH_TAPE(tape)
  const int action = whole_body(envoy, s, false, &tape);
  shunt_apply(envoy, s, &tape, action, KIND(RequestHeader), false);
  shunt_tape_free(&tape);
  return action == SHUNT_CONTINUE ? TRAILERS(Continue) : TRAILERS(StopIteration);
}

static int64_t first_byte_ns(const stream_t* s) { return s->first_byte_at > 0 ? s->first_byte_at - s->routed_at : 0; }

// evict ends a routed stream that flow control has asked to end. Once the
// response has begun, only a reset can.
static void evict(envoy_t envoy, stream_t* s) {
  if (s->state != STATE_PASS || !s->routed || s->local_reply) {
    return; // it ends, or has ended, by itself
  }
  const bool answered = s->answered;
  WITH_TAPE(tape)
  const int action = shuntEvicted(s->ref, s->status, answered, s->complete, first_byte_ns(s), &tape);
  if (action == SHUNT_REPLY) {
    s->watch = false;
    shunt_apply(envoy, s, &tape, answered ? SHUNT_RESET : SHUNT_REPLY, KIND(RequestHeader), false);
  }
  shunt_tape_free(&tape);
}

// A request that waited is decided, or one is to end, on its own worker.
void envoy_dynamic_module_on_http_filter_scheduled(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                   envoy_dynamic_module_type_http_filter_module_ptr module,
                                                   uint64_t event) {
  stream_t* s = (stream_t*)module;
  if (event == SHUNT_EVENT_EVICT) {
    evict(envoy, s);
    return;
  }
  if (s->state != STATE_WAIT) {
    return;
  }
  WITH_TAPE(tape)
  const int action = shuntResume(s->ref, &tape);
  shunt_apply(envoy, s, &tape, action, KIND(RequestHeader), false);
  shunt_tape_free(&tape);
  if (action == SHUNT_CONTINUE) {
    CB(http_filter_continue_decoding)(envoy);
  }
}

envoy_dynamic_module_type_on_http_filter_local_reply_status
envoy_dynamic_module_on_http_filter_local_reply(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                envoy_dynamic_module_type_http_filter_module_ptr module,
                                                uint32_t response_code, envoy_dynamic_module_type_envoy_buffer details,
                                                bool reset_imminent) {
  (void)envoy, (void)response_code, (void)reset_imminent;
  stream_t* s = (stream_t*)module;
  s->local_reply = true;
  // Kept from here: Envoy 1.38 does not have them as an attribute.
  if (s->routed && s->details == NULL && details.length > 0 && (s->details = malloc(details.length)) != NULL) {
    memcpy(s->details, details.ptr, details.length);
    s->details_length = details.length;
  }
  return envoy_dynamic_module_type_on_http_filter_local_reply_status_Continue;
}

// served_elsewhere tells Go where the request really went, if not where we
// said.
static void served_elsewhere(envoy_t envoy, stream_t* s) {
  envoy_dynamic_module_type_envoy_buffer address;
  if (!CB(http_filter_get_attribute_string)(envoy, envoy_dynamic_module_type_attribute_id_UpstreamAddress, &address) ||
      address.length == 0 ||
      (address.length == s->destination_length && memcmp(address.ptr, s->destination, address.length) == 0)) {
    return;
  }
  WITH_TAPE(tape)
  shuntServed(s->ref, (char*)address.ptr, address.length, &tape);
  tape.watch = s->watch;
  shunt_apply(envoy, s, &tape, SHUNT_CONTINUE, KIND(RequestHeader), false);
  shunt_tape_free(&tape);
}

// What the headers of a response say that matters here.
typedef struct {
  uint32_t status;
  shunt_buffer content_type, content_encoding;
  bool drop_reason;
} response_t;

static response_t read_response(const shunt_header* headers, size_t count) {
  response_t r = {0};
  for (size_t i = 0; i < count; i++) {
    const shunt_header* h = &headers[i];
    const shunt_buffer value = {h->value_ptr, h->value_length};
    if (IS_HEADER(h, ":status")) {
      for (size_t j = 0; j < value.length && j < 3; j++) {
        r.status = r.status * 10 + (uint32_t)(value.ptr[j] - '0');
      }
    } else if (IS_HEADER(h, "content-type")) {
      r.content_type = value;
    } else if (IS_HEADER(h, "content-encoding")) {
      r.content_encoding = value;
    } else if (IS_HEADER(h, DROP_REASON_HEADER)) {
      r.drop_reason = true;
    }
  }
  return r;
}

// watch_response shows Go the headers of a response that it asked for.
static void watch_response(envoy_t envoy, stream_t* s, response_t* response, bool end_of_stream) {
  WITH_TAPE(tape)
  shuntResponse(s->ref, response->status, &response->content_type, &response->content_encoding, end_of_stream, &tape);
  shunt_apply(envoy, s, &tape, SHUNT_CONTINUE, KIND(ResponseHeader), false);
  shunt_tape_free(&tape);
}

envoy_dynamic_module_type_on_http_filter_response_headers_status envoy_dynamic_module_on_http_filter_response_headers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    bool end_of_stream) {
  stream_t* s = (stream_t*)module;
  if (s->state == STATE_REPLIED) {
    return envoy_dynamic_module_type_on_http_filter_response_headers_status_Continue; // Envoy 1.38 shows us our own
  }
  shunt_header memory[HEADERS_ON_STACK];
  size_t count;
  shunt_header* headers = shunt_all_headers(envoy, KIND(ResponseHeader), memory, &count);
  response_t response = read_response(headers, count);
  if (headers != memory) {
    free(headers);
  }
  if (s->routed && !s->local_reply) {
    s->answered = true;
    s->complete = end_of_stream;
    s->status = (uint16_t)response.status;
    s->first_byte_at = monotonic_ns();
    served_elsewhere(envoy, s);
    if (s->watch) {
      watch_response(envoy, s, &response, end_of_stream);
    }
  } else {
    s->watch = false;
  }
  if (response.drop_reason) { // the header is ours
    CB(http_set_header)
    (envoy, KIND(ResponseHeader), LITERAL(DROP_REASON_HEADER), (envoy_dynamic_module_type_module_buffer){NULL, 0});
  }
  record_t r;
  for (const uint8_t *at = s->response, *end = at + s->response_length; at != NULL && shunt_tape_next(&at, end, &r);) {
    CB(http_set_header)(envoy, KIND(ResponseHeader), r.key, r.value);
  }
  return envoy_dynamic_module_type_on_http_filter_response_headers_status_Continue;
}

// watch_body shows Go a piece of the response in place, and puts another into
// its place if Go says so.
static void watch_body(envoy_t envoy, stream_t* s) {
  const envoy_dynamic_module_type_http_body_type kind = BODY_KIND(ReceivedResponseBody);
  size_t count = CB(http_get_body_chunks_size)(envoy, kind);
  if (count == 0) {
    return;
  }
  shunt_buffer memory[CHUNKS_ON_STACK];
  shunt_buffer* chunks = memory;
  if (count > CHUNKS_ON_STACK && (chunks = malloc(count * sizeof(*chunks))) == NULL) {
    abort(); // as Envoy itself does when memory ends
  }
  if (!CB(http_get_body_chunks)(envoy, kind, chunks)) {
    count = 0;
  }
  WITH_TAPE(tape)
  if (shuntResponseBody(s->ref, chunks, count, &tape)) {
    CB(http_drain_body)(envoy, kind, CB(http_get_body_size)(envoy, kind));
    CB(http_append_body)(envoy, kind, (envoy_dynamic_module_type_module_buffer){(char*)tape.data, tape.len});
  }
  s->watch = tape.watch;
  shunt_tape_free(&tape);
  if (chunks != memory) {
    free(chunks);
  }
}

envoy_dynamic_module_type_on_http_filter_response_body_status envoy_dynamic_module_on_http_filter_response_body(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module,
    bool end_of_stream) {
  stream_t* s = (stream_t*)module;
  s->complete = end_of_stream;
  if (s->watch) {
    watch_body(envoy, s);
  }
  return envoy_dynamic_module_type_on_http_filter_response_body_status_Continue;
}

envoy_dynamic_module_type_on_http_filter_response_trailers_status envoy_dynamic_module_on_http_filter_response_trailers(
    envoy_dynamic_module_type_http_filter_envoy_ptr envoy, envoy_dynamic_module_type_http_filter_module_ptr module) {
  shunt_remove_header(envoy, KIND(ResponseTrailer), LITERAL(DROP_REASON_HEADER));
  ((stream_t*)module)->complete = true;
  return envoy_dynamic_module_type_on_http_filter_response_trailers_status_Continue;
}

void envoy_dynamic_module_on_http_filter_stream_complete(envoy_dynamic_module_type_http_filter_envoy_ptr envoy,
                                                         envoy_dynamic_module_type_http_filter_module_ptr module) {
  stream_t* s = (stream_t*)module;
  if (s == NULL || s->ref.slot == 0) {
    return;
  }
  WITH_TAPE(tape)
  const shunt_ref ref = s->ref;
  s->ref.slot = 0;
  shuntFinish(ref, s->status, s->answered, s->complete, s->details, s->details_length, first_byte_ns(s), &tape);
  const uint8_t state = s->state;
  shunt_apply(envoy, s, &tape, SHUNT_CONTINUE, KIND(RequestHeader), false);
  s->state = state;
  shunt_tape_free(&tape);
}

void envoy_dynamic_module_on_http_filter_destroy(envoy_dynamic_module_type_http_filter_module_ptr module) {
  stream_t* s = (stream_t*)module;
  if (s->ref.slot != 0) { // Envoy ended the stream without completing it
    WITH_TAPE(tape)
    shuntFinish(s->ref, s->status, s->answered, s->complete, NULL, 0, 0, &tape);
    shunt_tape_free(&tape);
  }
  free(s->details);
  free(s->response);
  free(s);
}
