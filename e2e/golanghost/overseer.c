// Two threads: one forces the plugin's garbage collector again and again, so
// that what Go no longer refers to is finalized while it may still be in use
// elsewhere; one ends the process when a callback blocks a worker.
#include "host.h"

#include <stdlib.h>
#include <time.h>

// One thread that calls into a plugin; never freed.
typedef struct caller {
  struct caller* next;
  _Atomic(const char*) what; // NULL: not in the plugin
  atomic_long since;         // monotonic ms
} caller_t;

static _Atomic(caller_t*) callers;
static __thread caller_t* self;

static long now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

void plugin_enter(const char* what) {
  if (self == NULL) {
    self = calloc(1, sizeof(*self));
    self->next = atomic_load(&callers);
    while (!atomic_compare_exchange_weak(&callers, &self->next, self)) {
    }
  }
  atomic_store(&self->since, now_ms());
  atomic_store(&self->what, what);
}

void plugin_leave(void) { atomic_store(&self->what, NULL); }

typedef struct {
  plugin_t* plugin;
  unsigned ms;
} overseer_t;

static void pause_ms(unsigned ms) {
  const struct timespec interval = {ms / 1000, (long)(ms % 1000) * 1000000};
  nanosleep(&interval, NULL);
}

static void* collect(void* argument) {
  const overseer_t* o = argument;
  for (;;) {
    pause_ms(o->ms);
    o->plugin->clean_up(); // a whole collection, and its finalizers
  }
  return NULL;
}

static void* watch(void* argument) {
  const overseer_t* o = argument;
  for (;;) {
    pause_ms(100);
    for (caller_t* c = atomic_load(&callers); c != NULL; c = c->next) {
      const char* what = atomic_load(&c->what);
      const long since = atomic_load(&c->since);
      if (what != NULL && now_ms() - since > (long)o->ms && atomic_load(&c->since) == since) {
        misuse("%s has blocked its thread for more than %u ms: all streams of that worker wait", what, o->ms);
      }
    }
  }
  return NULL;
}

static void start(void* (*run)(void*), plugin_t* p, unsigned ms) {
  overseer_t* o = malloc(sizeof(*o));
  *o = (overseer_t){p, ms};
  pthread_t thread;
  if (pthread_create(&thread, NULL, run, o) == 0) {
    pthread_detach(thread);
  }
}

void overseer_start(plugin_t* p, unsigned gc_ms, unsigned blocked_ms) {
  if (gc_ms > 0) {
    start(collect, p, gc_ms);
  }
  static bool watched; // under the store's lock
  if (blocked_ms > 0 && !watched) {
    watched = true;
    start(watch, p, blocked_ms);
  }
}
