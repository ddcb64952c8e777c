// golanghost is a dynamic module that a stock Envoy loads. It does what the
// golang HTTP filter of Envoy contrib does: it loads a plugin written for that
// filter and gives it the functions of api.h, so that the plugin can be tested
// where there is no contrib Envoy. It is stricter than the real filter, never
// laxer; README.md lists how.
//
// One request is one struct request. Hooks and posted operations run on its
// worker; the functions of api.h may come from any thread.
#ifndef GOLANGHOST_HOST_H
#define GOLANGHOST_HOST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h" // of the dynamic modules, as the stock door uses it
#include "api.h" // of the golang filter's SDK, from the module cache

#include "states.h"

#define CB(name) envoy_dynamic_module_callback_##name
#define MODULE(text, size) ((envoy_dynamic_module_type_module_buffer){(text), (size)})
#define EXPORT __attribute__((visibility("default")))

// ---- memory.c ----

// A growing string of bytes; bytes before off are drained.
typedef struct {
  char* data;
  size_t off, len, cap; // len counts from off
} bytes_t;
void bytes_append(bytes_t* b, const void* data, size_t size);
void bytes_prepend(bytes_t* b, const void* data, size_t size);
void bytes_drain(bytes_t* b, size_t size);
void bytes_move(bytes_t* to, bytes_t* from); // appends, and leaves from empty
void bytes_free(bytes_t* b);
static inline const char* bytes_at(const bytes_t* b) { return b->data == NULL ? "" : b->data + b->off; }

typedef struct {
  char *key, *value;
  size_t key_size, value_size;
} header_t;

// A copy of a header map. Keys are lower case.
typedef struct {
  header_t* list;
  size_t count, cap;
  size_t bytes; // of all keys and values
} headers_t;
void headers_add(headers_t* h, const char* key, size_t key_size, const char* value, size_t value_size);
void headers_remove(headers_t* h, const char* key, size_t key_size);
const header_t* headers_find(const headers_t* h, const char* key, size_t key_size);
void headers_free(headers_t* h);

// guarded_new returns zeroed memory in pages of its own, at their end, with an
// unmapped page after it. guarded_free makes them fault on each later use; the
// last QUARANTINE of them stay so. Under AddressSanitizer it is calloc and
// free, whose reports say more.
#define QUARANTINE 16384
void* guarded_new(size_t size);
void guarded_free(void* memory);

// misuse says on stderr what the plugin did and ends the process.
_Noreturn void misuse(const char* format, ...) __attribute__((format(printf, 1, 2)));
// limitation does the same where the plugin is right and this host can't.
_Noreturn void limitation(const char* format, ...) __attribute__((format(printf, 1, 2)));
void host_log(int level, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- plugin.c ----

// The plugin's ten exports; never unloaded, as in contrib.
typedef struct plugin {
  struct plugin* next;
  char* id;
  uint64_t (*new_config)(httpConfig*);
  uint64_t (*merge_config)(uint64_t name, uint64_t size, uint64_t parent, uint64_t child);
  void (*destroy_config)(uint64_t id, int64_t need_delay);
  uint64_t (*on_header)(processState*, uint64_t end_stream, uint64_t count, uint64_t bytes);
  uint64_t (*on_data)(processState*, uint64_t end_stream, uint64_t buffer, uint64_t size);
  void (*on_log)(httpRequest*, uint64_t type, processState*, processState*, uint64_t, uint64_t, uint64_t, uint64_t,
                 uint64_t, uint64_t, uint64_t, uint64_t);
  void (*on_stream_complete)(httpRequest*);
  void (*on_destroy)(httpRequest*, uint64_t reason);
  void (*sema_dec)(httpRequest*);
  void (*clean_up)(void);
} plugin_t;

typedef struct filter_config filter_config_t;
plugin_t* config_plugin(const filter_config_t* c);
const char* config_name(const filter_config_t* c);
bool config_logs_start(const filter_config_t* c);
bool config_aborts_on_panic(const filter_config_t* c);
void config_panicked(const filter_config_t* c);
// config_merged is the id of the config a request gets: the filter's, merged
// with what its route adds.
uint64_t config_merged(const filter_config_t* c, const void* route);
void config_retain(filter_config_t* c);
// config_crossed adds a request and its crossings to what Envoy's statistics
// golanghost_requests and golanghost_crossings count, from Envoy 1.39 on.
void config_crossed(filter_config_t* c, uint64_t crossings);
void config_release(filter_config_t* c);

// Between these two, the plugin runs on this thread; the watchdog looks on.
void plugin_enter(const char* what);
void plugin_leave(void);

// overseer_start forces a garbage collection each gc_ms, and calls a callback of
// more than blocked_ms a misuse; 0 turns either off.
void overseer_start(plugin_t* p, unsigned gc_ms, unsigned blocked_ms);

// ---- stream.c, hooks.c ----

typedef struct body {
  struct body* next;
  bytes_t bytes;
} body_t;

// The metadata a plugin has set, as Values on the wire: Envoy can be asked for
// a value of unknown type only by guessing, and logs an error at each wrong
// guess.
typedef struct {
  struct {
    bytes_t ns, key, value;
  }* list;
  size_t count;
} metadata_t;

// What GetHeader returned: it is Envoy's memory in contrib.
typedef struct {
  void** list;
  size_t count;
} raw_t;

typedef struct request request_t;
typedef struct reply reply_t;

// One direction of a request.
typedef struct {
  processState go; // first: Go holds its address, reads is_encoding and state

  // Written on the worker under the request's lock, read by any thread under it.
  bool has_headers, has_trailers;
  bool synthetic; // encodes a reply of our own, which Envoy has not seen yet
  headers_t headers, trailers;
  headers_t kept; // the headers of a reply, when the plugin is done with them
  size_t given_count, given_bytes; // of the map, as the plugin was told
  body_t* doing;                   // chunks the plugin works on
  raw_t raw;

  // Written under the lock by any thread: what was posted and not yet done.
  bool continue_posted, reply_posted;

  // Worker only.
  bool end_stream;    // of the last header or chunk that came
  bool do_end_stream; // of the one the plugin works on
  bool had_data;      // a chunk came: contrib's data_buffer_ may exist
  bool in_envoy;      // Envoy buffers chunks for us, with its watermarks
  bytes_t waiting;    // chunks that came while the plugin waits for all
  bytes_t out;        // chunks the plugin let pass and Envoy has not got yet
} state_t;

enum { VALUES = 13 }; // ids 1 to 12 of capi_impl.go

struct request {
  httpRequest go; // first: Go holds its address
  state_t decoding, encoding;

  // Constant.
  filter_config_t* config;
  plugin_t* plugin;
  pthread_t worker;
  void* scheduler;

  atomic_ulong crossings; // calls into Go and out of it

  pthread_mutex_t lock; // protects what follows
  struct op *first, *last;
  bool destroyed; // OnDestroy has begun
  bool has_value[VALUES];
  char* values[VALUES];     // strings, as of the last entry into Go
  uint64_t numbers[VALUES]; // the same for integers
  char* text;               // what the last getter returned
  bytes_t blob;

  // Worker only.
  void* envoy; // of the hook that runs; NULL between hooks
  bool entered; // Go knows this request
  metadata_t metadata;
  reply_t* reply; // ours, on its way through Encode*
  bool replied;   // Envoy has it
};

static inline bool on_worker(const request_t* r) { return pthread_equal(r->worker, pthread_self()); }
static inline request_t* request_of(state_t* s) { return (request_t*)s->go.req; }
static inline bool state_processing(const state_t* s) {
  return s->go.state == StateProcessingHeader || s->go.state == StateProcessingData ||
         s->go.state == StateProcessingTrailer;
}
const char* state_name(const state_t* s);
const char* status_name(int status);
const char* side_name(const state_t* s);

// What the plugin may see.
void load_map(request_t* r, headers_t* into, envoy_dynamic_module_type_http_header_type kind);
void drop_headers(state_t* s);
void raw_free(raw_t* raw);
bool has_doing(const state_t* s, uint64_t handle);
void clear_doing(state_t* s);
void release(state_t* s);

// Into Go; they return whether the iteration goes on.
void into_go(request_t* r, const char* what);
bool run_headers(state_t* s, bool end_stream);
bool run_data(state_t* s, bytes_t* data, bool end_stream);
bool run_trailers(state_t* s);
void continue_from_go(state_t* s, int status);

// Bodies: the data buffer of a state, and what Envoy has.
envoy_dynamic_module_type_http_body_type received_body(const state_t* s);
envoy_dynamic_module_type_http_body_type buffered_body(const state_t* s);
bool no_data(const state_t* s);
void take_body(request_t* r, bytes_t* into, envoy_dynamic_module_type_http_body_type type);
bytes_t take_waiting(state_t* s);
void give_body(state_t* s, envoy_dynamic_module_type_http_body_type type);
bool too_large(state_t* s, size_t size);

// ---- reply.c ----

reply_t* reply_new(int status, const char* body, size_t body_size, int64_t grpc, const char* details,
                   size_t details_size);
void reply_header(reply_t* p, const char* key, size_t key_size, const char* value, size_t value_size);
void reply_free(reply_t* p);
// reply_start sends a reply through Encode* to Envoy. The request may be
// destroyed when it returns.
void reply_start(state_t* s, reply_t* p);
// reply_resume goes on after Encode* of a reply waited.
void reply_resume(request_t* r);

// ---- capi_state.c, capi_request.c ----

enum op_kind {
  OP_CONTINUE,
  OP_REPLY,
  OP_HEADER,
  OP_TRAILER,
  OP_ADD_DATA,
  OP_OVERRIDE_HOST,
  OP_CLEAR_ROUTE,
  OP_SET_METADATA,
  OP_SET_FILTER_STATE,
  OP_GET_METADATA, // from here on Go waits for envoyGoRequestSemaDec
  OP_GET_FILTER_STATE,
  OP_GET_PROPERTY,
  OP_GET_SECRET,
};

enum header_change { CHANGE_SET, CHANGE_ADD, CHANGE_REMOVE };

// Something that a goroutine asked for, to be done on the worker.
typedef struct op {
  struct op* next;
  enum op_kind kind;
  state_t* state;
  int number;
  bool flag;
  bytes_t a, b, c;
  reply_t* reply;
  uint64_t* value;
  int *value_size, *rc;
} op_t;
void op_post(request_t* r, op_t* op); // takes op; the lock is held
void op_run(request_t* r, op_t* op);  // on the worker
void op_free(op_t* op);
void run_state_op(request_t* r, op_t* op);
void run_request_op(request_t* r, op_t* op);

// take_values reads what goroutines may ask for later.
void take_values(request_t* r);

// ---- wire.c ----

// The protobuf messages google.protobuf.Value and Struct, as far as Envoy's
// dynamic modules can set and get them.
bool metadata_set(request_t* r, const bytes_t* ns, const bytes_t* key, const char* value, size_t size);
bool metadata_get(request_t* r, const char* ns, size_t ns_size, bytes_t* out);
void metadata_free(metadata_t* m);

#endif
