// plainhost is a small program that loads a dynamic module as Envoy does, fakes
// the callbacks of its ABI, and drives the hooks from several threads: headers,
// bodies in chunks, trailers, waits that end through the scheduler, replies,
// clients that go away, and configs that change meanwhile. So a module, or a
// plugin inside golanghost, can run under tools that do not work in Envoy: the
// race detector and AddressSanitizer.
#ifndef PLAINHOST_H
#define PLAINHOST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h" // of the dynamic modules

typedef envoy_dynamic_module_type_envoy_buffer view_t;
typedef envoy_dynamic_module_type_module_buffer text_t;

typedef struct {
  char* data;
  size_t size, cap;
} bytes_t;

typedef struct {
  bytes_t key, value;
} pair_t;

typedef struct {
  pair_t* list;
  size_t count;
} map_t;

// The module's hooks.
typedef struct {
  const char* (*program_init)(void);
  const void* (*config_new)(void*, view_t, view_t);
  void (*config_destroy)(const void*);
  const void* (*route_new)(view_t, view_t);
  void (*route_destroy)(const void*);
  const void* (*filter_new)(const void*, void*);
  int (*headers[2])(void*, const void*, bool); // of the request, of the response
  int (*body[2])(void*, const void*, bool);
  int (*trailers[2])(void*, const void*);
  void (*complete)(void*, const void*);
  void (*destroy)(const void*);
  void (*scheduled)(void*, const void*, uint64_t);
  int (*local_reply)(void*, const void*, uint32_t, view_t, bool); // NULL where there is none
} hooks_t;
extern hooks_t hooks;

// A config lives until the last stream that uses it is gone.
typedef struct {
  atomic_int references;
  const void* module;
} config_t;

typedef struct event {
  struct event* next;
  struct stream* stream;
  uint64_t id;
} event_t;

// One thread, as Envoy's workers.
typedef struct {
  int index;
  pthread_t thread;
  uint64_t random; // state of its generator
  size_t left;     // streams still to start

  pthread_mutex_t lock; // protects the rest
  pthread_cond_t wake;
  event_t *first, *last;
} worker_t;

enum phase { PHASE_HEADERS, PHASE_BODY, PHASE_TRAILERS, PHASE_RESPONSE, PHASE_RESPONSE_BODY, PHASE_RESPONSE_END };

// One stream. Only its worker touches it, but for references.
typedef struct stream {
  atomic_int references; // the worker's, and each scheduler's
  atomic_bool destroyed;
  worker_t* worker;
  config_t* config;
  const void* module;

  map_t maps[4]; // by envoy_dynamic_module_type_http_header_type
  map_t metadata, state;
  bytes_t buffered[2];
  bytes_t* received[2]; // in a body hook
  bytes_t seen;         // what the next filter got of the request
  view_t last;          // a value handed out

  // What it will do.
  bytes_t whole;        // the request's body
  size_t chunk, at;     // bytes a chunk; where the next begins
  bool with_trailers;
  bool routed;
  int abort_in;         // steps until the client goes away; -1: it stays

  enum phase phase;
  bool stopped[2];
  bool sent_reply;  // by the module
  int reply_status;
} stream_t;

// Counted over all workers.
extern struct counts {
  atomic_ulong streams, passed, replied, aborted, resumed, configs, schedulers;
} counts;

extern const void* route; // or NULL
extern int worker_count;

void put(bytes_t* b, const void* data, size_t size);
void map_set(map_t* m, const char* key, size_t key_size, const char* value, size_t value_size, bool add);
const pair_t* map_find(const map_t* m, const char* key, size_t key_size);
void map_free(map_t* m);
void stream_release(stream_t* s);
// stream_end completes and destroys a stream.
void stream_end(stream_t* s);
void fail(const char* format, ...) __attribute__((format(printf, 1, 2), noreturn));

#endif
