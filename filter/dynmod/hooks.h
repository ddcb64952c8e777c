// What hooks.c and the Go side of the door say to each other. Strings are
// borrowed in both directions: for the time of one call.
#ifndef SHUNT_HOOKS_H
#define SHUNT_HOOKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if !__has_include("abi.h")
#error "run make build once: it copies abi.h from the module cache"
#endif
#include "abi.h"

typedef envoy_dynamic_module_type_envoy_http_header shunt_header;
typedef envoy_dynamic_module_type_envoy_buffer shunt_buffer;

// What Go answers: filter.Action; and what the door makes of a reply to a stream
// whose response has begun.
enum shunt_action { SHUNT_CONTINUE = 0, SHUNT_NEED_BODY = 1, SHUNT_WAIT = 2, SHUNT_REPLY = 3, SHUNT_RESET = 4 };

// Why a stream's worker is to look at it.
enum shunt_event { SHUNT_EVENT_RESUME = 0, SHUNT_EVENT_EVICT = 1 };

// What is on a tape, in this order: one byte of op, two 32-bit lengths (key,
// value), key, value. Integers are in the machine's byte order.
enum shunt_op {
  SHUNT_OP_REMOVE = 1,      // key: request header or trailer to remove
  SHUNT_OP_DESTINATION = 2, // value: the picked ip:port, then fallbacks, with commas
  SHUNT_OP_TEXT = 3,        // key, value: metadata, namespace shunt
  SHUNT_OP_NUMBER = 4,      // key, value: the same, value is a double
  SHUNT_OP_RESPONSE = 5,    // key, value: a header to add to the response
  SHUNT_OP_STATUS = 6,      // value: uint32 status, uint32 grpc-status or 0
  SHUNT_OP_HEADER = 7,      // key, value: a header of the reply
  SHUNT_OP_DETAILS = 8,     // value: response_code_details
  SHUNT_OP_BODY = 9,        // value: the reply's body, or its grpc-message
  SHUNT_OP_EDIT = 11,       // key: uint64 offset and length in the request's body, value: what comes there instead
  SHUNT_OP_SET = 10,        // key, value: request header to set; after those to remove
};

// A tape is a verdict as bytes. Go writes it into data and, if it needs more
// than cap, into memory of malloc's which C frees.
typedef struct {
  uint8_t* data;
  size_t cap;
  size_t len;
  bool grown;
  int64_t room;  // with SHUNT_NEED_BODY: bytes to hold without asking, 0 for no bound
  int64_t limit; // with SHUNT_NEED_BODY, in bytes
  bool watch;    // the response's headers, or more of its body, are wanted
} shunt_tape;

// Where a request is in Go: a slot of its worker; slot 0 is none.
typedef struct {
  uint32_t worker;
  uint32_t slot;
  bool hinted; // at its first call: the metadata has a list of endpoints to keep to
} shunt_ref;

bool shunt_metadata(void* envoy, const char* ns, size_t ns_length, const char* key, size_t key_length,
                    shunt_buffer* value);
// shunt_metadata_list_size is how many entries a list of dynamic metadata has, -1
// where there is no list; shunt_metadata_list_string reads one that is text.
int64_t shunt_metadata_list_size(void* envoy, const char* ns, size_t ns_length, const char* key, size_t key_length);
bool shunt_metadata_list_string(void* envoy, const char* ns, size_t ns_length, const char* key, size_t key_length,
                                size_t index, shunt_buffer* value);
// shunt_edit_body puts with in the place of length bytes at offset of the body
// that Envoy holds of a request. body_hook says that the hook is the body's,
// whose bytes are not buffered yet.
void shunt_edit_body(void* envoy, bool body_hook, size_t offset, size_t length,
                     envoy_dynamic_module_type_module_buffer with);
void shunt_log(int level, const char* text, size_t length);
void* shunt_scheduler_new(void* envoy);
void shunt_scheduler_commit(void* scheduler, uint64_t event);
void shunt_scheduler_delete(void* scheduler);
uint32_t shunt_concurrency(void);
bool shunt_validation_mode(void);

#endif
