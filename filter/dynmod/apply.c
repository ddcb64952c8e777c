// How a verdict, which Go wrote to a tape, is applied to a stream.
#include <stdlib.h>
#include <string.h>

#include "stream.h"

void shunt_tape_free(shunt_tape* tape) {
  if (tape->grown) {
    free(tape->data);
  }
}

bool shunt_tape_next(const uint8_t** at, const uint8_t* end, record_t* r) {
  if (end - *at < 9) {
    return false;
  }
  uint32_t key, value;
  r->start = *at;
  r->op = **at;
  memcpy(&key, *at + 1, 4);
  memcpy(&value, *at + 5, 4);
  r->key = (envoy_dynamic_module_type_module_buffer){(const char*)*at + 9, key};
  r->value = (envoy_dynamic_module_type_module_buffer){(const char*)*at + 9 + key, value};
  *at += 9 + (size_t)key + value;
  r->end = *at;
  return true;
}

#define MAX_REPLY_HEADERS 16

// A reply as it is gathered from a tape; all of it points into the tape.
typedef struct {
  uint32_t status, grpc;
  envoy_dynamic_module_type_module_http_header headers[MAX_REPLY_HEADERS];
  size_t header_count;
  envoy_dynamic_module_type_module_buffer details, body;
} reply_t;

static void reply_header(reply_t* reply, envoy_dynamic_module_type_module_buffer key,
                         envoy_dynamic_module_type_module_buffer value) {
  if (reply->header_count < MAX_REPLY_HEADERS) {
    reply->headers[reply->header_count++] =
        (envoy_dynamic_module_type_module_http_header){key.ptr, key.length, value.ptr, value.length};
  }
}

// send_reply ends the stream. Envoy may run other hooks of it before this
// returns, so the caller touches nothing after. For a gRPC request Envoy makes
// a trailers-only response of it, with the body as grpc-message and status 0,
// success, unless we name one.
static void send_reply(envoy_t envoy, reply_t* reply) {
  char code[4];
  size_t digits = 0;
  if (reply->grpc >= 10) {
    code[digits++] = (char)('0' + reply->grpc / 10);
  }
  code[digits++] = (char)('0' + reply->grpc % 10);
  if (reply->grpc != 0) {
    reply_header(reply, LITERAL("grpc-status"), (envoy_dynamic_module_type_module_buffer){code, digits});
  }
  CB(http_send_response)(envoy, reply->status, reply->headers, reply->header_count, reply->body, reply->details);
}

static void keep_for_response(stream_t* s, const record_t* r) {
  const size_t size = (size_t)(r->end - r->start);
  uint8_t* grown = realloc(s->response, s->response_length + size);
  if (grown == NULL) {
    return;
  }
  memcpy(grown + s->response_length, r->start, size);
  s->response = grown;
  s->response_length += size;
}

shunt_header* shunt_all_headers(envoy_t envoy, envoy_dynamic_module_type_http_header_type kind, shunt_header* memory,
                                size_t* count) {
  *count = CB(http_get_headers_size)(envoy, kind);
  shunt_header* headers = memory;
  if (*count > HEADERS_ON_STACK) {
    headers = malloc(*count * sizeof(*headers));
    if (headers == NULL) {
      *count = 0;
      return memory;
    }
  }
  if (*count > 0 && !CB(http_get_headers)(envoy, kind, headers)) {
    *count = 0;
  }
  return headers;
}

// has_header looks a header up by reading all of them. Envoy's own look-up of a
// name that it does not know first builds a hash table of the whole map, which
// costs more than all else that shunt does to the headers of a request.
static bool has_header(envoy_t envoy, envoy_dynamic_module_type_http_header_type kind,
                       envoy_dynamic_module_type_module_buffer name) {
  shunt_header memory[HEADERS_ON_STACK];
  size_t count;
  shunt_header* headers = shunt_all_headers(envoy, kind, memory, &count);
  bool found = false;
  for (size_t i = 0; i < count && !found; i++) {
    found = headers[i].key_length == name.length && memcmp(headers[i].key_ptr, name.ptr, name.length) == 0;
  }
  if (headers != memory) {
    free(headers);
  }
  return found;
}

void shunt_remove_header(envoy_t envoy, envoy_dynamic_module_type_http_header_type kind,
                         envoy_dynamic_module_type_module_buffer name) {
  if (has_header(envoy, kind, name)) {
    CB(http_set_header)(envoy, kind, name, (envoy_dynamic_module_type_module_buffer){NULL, 0});
  }
}

// set_destination replaces whatever another filter may have put there since
// the client's was removed: the cluster reads the first value.
static void set_destination(envoy_t envoy, stream_t* s, envoy_dynamic_module_type_module_buffer value,
                            bool same_hook) {
  if (!same_hook && has_header(envoy, KIND(RequestHeader), LITERAL(DESTINATION_HEADER))) {
    CB(http_set_header)(envoy, KIND(RequestHeader), LITERAL(DESTINATION_HEADER), value);
  } else {
    CB(http_add_header)(envoy, KIND(RequestHeader), LITERAL(DESTINATION_HEADER), value);
  }
  CB(http_set_dynamic_metadata_string)(envoy, LITERAL("envoy.lb"), LITERAL(DESTINATION_HEADER), value);
  s->routed = true;
  s->routed_at = monotonic_ns();
  s->destination_length = 0;
  const char* comma = memchr(value.ptr, ',', value.length);
  const size_t first = comma == NULL ? value.length : (size_t)(comma - value.ptr);
  if (first < sizeof(s->destination)) {
    memcpy(s->destination, value.ptr, first);
    s->destination_length = (uint8_t)first;
  }
}

// Envoy 1.39 and later set several values in one call, which builds and merges
// one Struct instead of one each; NULL in 1.38. abi.h of 1.38 does not declare
// it.
extern void envoy_dynamic_module_callback_http_set_dynamic_metadata_string_batch(
    envoy_t envoy, envoy_dynamic_module_type_module_buffer ns,
    const envoy_dynamic_module_type_module_http_header* entries, size_t count) __attribute__((weak));

#define MAX_BATCH 16

// texts_t gathers metadata of the namespace shunt.
typedef struct {
  envoy_dynamic_module_type_module_http_header entries[MAX_BATCH];
  size_t count;
} texts_t;

static void set_texts(envoy_t envoy, texts_t* texts) {
  if (texts->count == 0) {
    return;
  }
  if (CB(http_set_dynamic_metadata_string_batch) != NULL) {
    CB(http_set_dynamic_metadata_string_batch)(envoy, LITERAL("shunt"), texts->entries, texts->count);
  } else {
    for (size_t i = 0; i < texts->count; i++) {
      const envoy_dynamic_module_type_module_http_header* e = &texts->entries[i];
      CB(http_set_dynamic_metadata_string)
      (envoy, LITERAL("shunt"), (envoy_dynamic_module_type_module_buffer){e->key_ptr, e->key_length},
       (envoy_dynamic_module_type_module_buffer){e->value_ptr, e->value_length});
    }
  }
  texts->count = 0;
}

// By how much a rewritten body may be longer than the one that was accepted.
#define EDIT_MARGIN 65536

void shunt_raise_buffer_limit(envoy_t envoy, int64_t limit) {
  const uint64_t now = CB(http_get_buffer_limit)(envoy), need = (uint64_t)limit + EDIT_MARGIN;
  if (now != 0 && now < need) {
    CB(http_set_buffer_limit)(envoy, need);
  }
}

void shunt_apply(envoy_t envoy, stream_t* s, shunt_tape* tape, int action,
                 envoy_dynamic_module_type_http_header_type kind, bool same_hook) {
  const envoy_dynamic_module_type_module_buffer none = {NULL, 0};
  reply_t reply = {0};
  texts_t texts = {0};
  record_t r;
  for (const uint8_t *at = tape->data, *end = at + tape->len; shunt_tape_next(&at, end, &r);) {
    switch (r.op) {
    case SHUNT_OP_REMOVE:
      CB(http_set_header)(envoy, kind, r.key, none);
      break;
    case SHUNT_OP_SET:
      CB(http_set_header)(envoy, KIND(RequestHeader), r.key, r.value);
      break;
    case SHUNT_OP_EDIT: {
      uint64_t at[2];
      memcpy(at, r.key.ptr, sizeof(at));
      shunt_edit_body(envoy, s->in_body, at[0], at[1], r.value);
      break;
    }
    case SHUNT_OP_DESTINATION:
      set_destination(envoy, s, r.value, same_hook);
      break;
    case SHUNT_OP_TEXT:
      if (texts.count == MAX_BATCH) {
        set_texts(envoy, &texts);
      }
      texts.entries[texts.count++] = (envoy_dynamic_module_type_module_http_header){r.key.ptr, r.key.length,
                                                                                    r.value.ptr, r.value.length};
      break;
    case SHUNT_OP_NUMBER: {
      double number;
      memcpy(&number, r.value.ptr, sizeof(number));
      CB(http_set_dynamic_metadata_number)(envoy, LITERAL("shunt"), r.key, number);
      break;
    }
    case SHUNT_OP_RESPONSE:
      keep_for_response(s, &r);
      break;
    case SHUNT_OP_STATUS:
      memcpy(&reply.status, r.value.ptr, 4);
      memcpy(&reply.grpc, r.value.ptr + 4, 4);
      break;
    case SHUNT_OP_HEADER:
      reply_header(&reply, r.key, r.value);
      break;
    case SHUNT_OP_DETAILS:
      reply.details = r.value;
      break;
    case SHUNT_OP_BODY:
      reply.body = r.value;
      break;
    }
  }
  set_texts(envoy, &texts);
  switch (action) {
  case SHUNT_CONTINUE:
    s->state = STATE_PASS;
    s->watch = tape->watch;
    break;
  case SHUNT_NEED_BODY:
    s->state = STATE_BODY;
    s->limit = tape->limit;
    s->room = tape->room == 0 ? tape->limit : tape->room;
    shunt_raise_buffer_limit(envoy, tape->limit);
    break;
  case SHUNT_WAIT:
    s->state = STATE_WAIT;
    break;
  case SHUNT_REPLY:
    s->state = STATE_REPLIED;
    send_reply(envoy, &reply);
    break;
  case SHUNT_RESET:
    s->state = STATE_REPLIED;
    CB(http_filter_reset_stream)
    (envoy, envoy_dynamic_module_type_http_filter_stream_reset_reason_LocalReset, reply.details);
    break;
  }
}
