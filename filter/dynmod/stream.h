// What the C files of the door share: one HTTP stream, and how a verdict is applied to it.
#ifndef SHUNT_STREAM_H
#define SHUNT_STREAM_H

#include <time.h>

#include "hooks.h"

#define CB(name) envoy_dynamic_module_callback_##name
#define HEADERS(name) envoy_dynamic_module_type_on_http_filter_request_headers_status_##name
#define BODY(name) envoy_dynamic_module_type_on_http_filter_request_body_status_##name
#define TRAILERS(name) envoy_dynamic_module_type_on_http_filter_request_trailers_status_##name
#define KIND(name) envoy_dynamic_module_type_http_header_type_##name
#define BODY_KIND(name) envoy_dynamic_module_type_http_body_type_##name
#define LITERAL(text) ((envoy_dynamic_module_type_module_buffer){text, sizeof(text) - 1})

#define DESTINATION_HEADER "x-gateway-destination-endpoint"
#define SUBSET_NAMESPACE "envoy.lb.subset_hint" // filter.MetadataSubset
#define SUBSET_HEADER "x-gateway-destination-endpoint-subset"
#define DROP_REASON_HEADER "x-llm-d-request-dropped-reason"

typedef void* envoy_t; // envoy_dynamic_module_type_http_filter_envoy_ptr

enum state {
  STATE_NEW,     // before the headers
  STATE_HEADERS, // the headers wait for the body that comes with them
  STATE_BODY,    // the body is being buffered for us
  STATE_WAIT,    // Go holds the request
  STATE_PASS,    // routed, or none of ours
  STATE_REPLIED, // answered: touch nothing
};

// One HTTP stream. Only its worker's thread reads or writes it.
typedef struct {
  uint32_t config;
  shunt_ref ref;
  uint32_t announced; // bytes of body that the headers wait for
  uint8_t state;
  bool routed;      // we set a destination
  bool local_reply; // the response is not the upstream's
  bool answered;    // response headers of the upstream came
  bool complete;    // and its response to the end
  bool in_body;     // we are in the body hook, whose chunk is not buffered yet
  bool watch;       // Go wants the response, or more of it
  uint16_t status;  // of the response
  int64_t limit, body; // bytes
  int64_t room;        // bytes of body that Go has room for
  int64_t routed_at, first_byte_at; // monotonic ns
  uint8_t destination_length;
  char destination[64]; // the picked ip:port
  uint8_t* response; // SHUNT_OP_RESPONSE records to apply later, or NULL
  size_t response_length;
  char* details; // of Envoy's own reply to a routed request, or NULL
  size_t details_length;
} stream_t;

static inline int64_t monotonic_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define TAPE_ON_STACK 2048
#define WITH_TAPE(tape)                                                                                                \
  uint8_t tape##_memory[TAPE_ON_STACK];                                                                                \
  shunt_tape tape = {.data = tape##_memory, .cap = TAPE_ON_STACK};

typedef struct {
  uint8_t op;
  const uint8_t *start, *end; // the whole record
  envoy_dynamic_module_type_module_buffer key, value;
} record_t;

#define HEADERS_ON_STACK 96 // of shunt_all_headers' memory

void shunt_tape_free(shunt_tape* tape);

// shunt_tape_next reads the record at *at and moves on; false at the end.
bool shunt_tape_next(const uint8_t** at, const uint8_t* end, record_t* r);

// shunt_all_headers fills memory, or memory of malloc's that the caller frees,
// with all headers of a kind.
shunt_header* shunt_all_headers(envoy_t envoy, envoy_dynamic_module_type_http_header_type kind, shunt_header* memory,
                                size_t* count);
void shunt_remove_header(envoy_t envoy, envoy_dynamic_module_type_http_header_type kind,
                         envoy_dynamic_module_type_module_buffer name);

// shunt_raise_buffer_limit keeps Envoy from refusing what we accept: our own
// sum is checked first.
void shunt_raise_buffer_limit(envoy_t envoy, int64_t limit);

// shunt_apply does what a tape says, the reply last. It sets the stream's state
// first, since a reply runs other hooks and may free the stream: after a reply
// the caller touches nothing of it. same_hook means that the headers were read
// in the hook that applies the verdict.
void shunt_apply(envoy_t envoy, stream_t* s, shunt_tape* tape, int action,
                 envoy_dynamic_module_type_http_header_type kind, bool same_hook);

#endif
