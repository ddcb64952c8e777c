#include "plainhost.h"

#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define AT_ONCE 64 // streams of one worker
#define STUCK 60   // seconds without an event in which all streams wait

hooks_t hooks;
struct counts counts;
const void* route;
int worker_count = 3;

static const char* vary_name; // a header with one of several values
static char* vary_values[64];
static size_t vary_count;

static pthread_mutex_t config_lock = PTHREAD_MUTEX_INITIALIZER;
static config_t* current; // protected by config_lock
static atomic_int running; // workers

void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "plainhost: ");
  vfprintf(stderr, format, args);
  fprintf(stderr, "\n");
  abort();
}

// ---- memory ----

void put(bytes_t* b, const void* data, size_t size) {
  if (size == 0) {
    return;
  }
  if (b->size + size > b->cap) {
    b->cap = 2 * (b->size + size);
    b->data = realloc(b->data, b->cap);
  }
  memcpy(b->data + b->size, data, size);
  b->size += size;
}

const pair_t* map_find(const map_t* m, const char* key, size_t key_size) {
  for (size_t i = 0; i < m->count; i++) {
    if (m->list[i].key.size == key_size && strncasecmp(m->list[i].key.data, key, key_size) == 0) {
      return &m->list[i];
    }
  }
  return NULL;
}

static void pair_free(pair_t* p) {
  free(p->key.data);
  free(p->value.data);
}

void map_set(map_t* m, const char* key, size_t key_size, const char* value, size_t value_size, bool add) {
  for (const pair_t* p; !add && (p = map_find(m, key, key_size)) != NULL;) {
    const size_t i = (size_t)(p - m->list);
    pair_free(&m->list[i]);
    m->list[i] = m->list[--m->count];
  }
  if (value_size == 0) {
    return; // removes
  }
  m->list = realloc(m->list, (m->count + 1) * sizeof(*m->list));
  pair_t* p = &m->list[m->count++];
  *p = (pair_t){0};
  put(&p->key, key, key_size);
  put(&p->value, value, value_size);
}

void map_free(map_t* m) {
  for (size_t i = 0; i < m->count; i++) {
    pair_free(&m->list[i]);
  }
  free(m->list);
  *m = (map_t){0};
}

static uint64_t pick(worker_t* w, uint64_t below) {
  w->random ^= w->random << 13;
  w->random ^= w->random >> 7;
  w->random ^= w->random << 17;
  return w->random % below;
}

// ---- configs ----

static view_t view(const bytes_t* b) { return (view_t){b->data, b->size}; }

static config_t* config_load(const bytes_t* text) {
  config_t* c = calloc(1, sizeof(*c));
  atomic_store(&c->references, 1);
  c->module = hooks.config_new(c, (view_t){"shunt", 5}, view(text));
  if (c->module == NULL) {
    fail("the module refused the config");
  }
  atomic_fetch_add(&counts.configs, 1);
  return c;
}

static void config_release(config_t* c) {
  if (atomic_fetch_sub(&c->references, 1) == 1) {
    hooks.config_destroy(c->module);
    free(c);
  }
}

static config_t* config_use(void) {
  pthread_mutex_lock(&config_lock);
  config_t* c = current;
  atomic_fetch_add(&c->references, 1);
  pthread_mutex_unlock(&config_lock);
  return c;
}

// ---- streams ----

void stream_release(stream_t* s) {
  if (atomic_fetch_sub(&s->references, 1) != 1) {
    return;
  }
  for (int i = 0; i < 4; i++) {
    map_free(&s->maps[i]);
  }
  map_free(&s->metadata);
  map_free(&s->state);
  free(s->buffered[0].data);
  free(s->buffered[1].data);
  free(s->seen.data);
  free(s->whole.data);
  free(s);
}

void stream_end(stream_t* s) {
  if (atomic_load(&s->destroyed)) {
    fail("a stream ends twice");
  }
  hooks.complete(s, s->module);
  hooks.destroy(s->module);
  atomic_store(&s->destroyed, true);
  config_release(s->config);
}

static void header(stream_t* s, int map, const char* key, const char* value) {
  map_set(&s->maps[map], key, strlen(key), value, strlen(value), true);
}

static stream_t* stream_new(worker_t* w) {
  stream_t* s = calloc(1, sizeof(*s));
  atomic_store(&s->references, 1);
  s->worker = w;
  s->config = config_use();
  s->routed = route != NULL && pick(w, 3) == 0;
  s->with_trailers = pick(w, 4) == 0;
  s->abort_in = pick(w, 5) == 0 ? (int)pick(w, 8) : -1;
  s->stopped[0] = s->stopped[1] = false;
  const bool get = !s->with_trailers && pick(w, 5) == 0;
  header(s, 0, ":method", get ? "GET" : "POST");
  header(s, 0, ":path", get ? "/v1/models" : "/v1/chat/completions");
  header(s, 0, ":authority", "plain.host");
  header(s, 0, ":scheme", "http");
  if (vary_count > 0) {
    header(s, 0, vary_name, vary_values[pick(w, vary_count)]);
  }
  if (!get) {
    header(s, 0, "content-type", "application/json");
    static const char before[] = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"", after[] = "\"}]}";
    put(&s->whole, before, sizeof(before) - 1);
    for (uint64_t n = pick(w, 4) == 0 ? pick(w, 60000) : pick(w, 200); n > 0; n--) {
      put(&s->whole, &"abcdefgh "[pick(w, 9)], 1);
    }
    put(&s->whole, after, sizeof(after) - 1);
    s->chunk = pick(w, 2) == 0 ? s->whole.size : 1 + s->whole.size / (1 + pick(w, 6));
  }
  s->module = hooks.filter_new(s->config->module, s);
  if (s->module == NULL) {
    fail("no filter");
  }
  atomic_fetch_add(&counts.streams, 1);
  return s;
}

static bool waits(const stream_t* s) {
  return (s->phase == PHASE_RESPONSE && s->stopped[0]) || (s->phase == PHASE_RESPONSE_END && s->stopped[1]);
}

static void body_step(stream_t* s, int direction, const char* data, size_t size, bool end) {
  bytes_t chunk = {0};
  put(&chunk, data, size);
  s->received[direction] = &chunk;
  const int status = hooks.body[direction](s, s->module, end);
  if (!atomic_load(&s->destroyed)) {
    s->received[direction] = NULL;
    bytes_t* buffered = &s->buffered[direction];
    switch (status) {
    case 0:
      put(buffered, chunk.data, chunk.size);
      if (direction == 0) {
        put(&s->seen, buffered->data, buffered->size);
      }
      buffered->size = 0;
      s->stopped[direction] = false;
      break;
    case 1:
    case 2:
      put(buffered, chunk.data, chunk.size);
      s->stopped[direction] = true;
      break;
    default:
      s->stopped[direction] = true;
    }
  }
  free(chunk.data);
}

static void response_starts(stream_t* s) {
  if (s->seen.size != s->whole.size || memcmp(s->seen.data, s->whole.data, s->seen.size) != 0) {
    if (s->whole.size > 0) {
      fail("the upstream saw %zu bytes of a body of %zu, or others", s->seen.size, s->whole.size);
    }
  }
  header(s, 2, ":status", "200");
  header(s, 2, "content-type", "application/json");
  s->phase = PHASE_RESPONSE_BODY;
  s->stopped[1] = hooks.headers[1](s, s->module, false) != 0;
}

// step does the next thing of a stream that does not wait.
static void step(stream_t* s) {
  static const char answer[] = "{\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}";
  switch (s->phase) {
  case PHASE_HEADERS: {
    const bool end = s->whole.size == 0 && !s->with_trailers;
    s->phase = end ? PHASE_RESPONSE : s->whole.size == 0 ? PHASE_TRAILERS : PHASE_BODY;
    s->stopped[0] = hooks.headers[0](s, s->module, end) != 0;
    return;
  }
  case PHASE_BODY: {
    size_t size = s->whole.size - s->at;
    if (size > s->chunk) {
      size = s->chunk;
    }
    const char* data = s->whole.data + s->at;
    s->at += size;
    const bool last = s->at == s->whole.size;
    if (last) {
      s->phase = s->with_trailers ? PHASE_TRAILERS : PHASE_RESPONSE;
    }
    body_step(s, 0, data, size, last && !s->with_trailers);
    return;
  }
  case PHASE_TRAILERS:
    header(s, 1, "x-checksum", "1");
    s->phase = PHASE_RESPONSE;
    if (hooks.trailers[0](s, s->module) != 0) {
      if (!atomic_load(&s->destroyed)) {
        s->stopped[0] = true;
      }
    } else {
      put(&s->seen, s->buffered[0].data, s->buffered[0].size);
      s->buffered[0].size = 0;
      s->stopped[0] = false;
    }
    return;
  case PHASE_RESPONSE:
    response_starts(s);
    return;
  case PHASE_RESPONSE_BODY:
    s->phase = PHASE_RESPONSE_END;
    body_step(s, 1, answer, sizeof(answer) - 1, true);
    return;
  case PHASE_RESPONSE_END:
    atomic_fetch_add(&counts.passed, 1);
    stream_end(s);
  }
}

// ---- workers ----

static event_t* next_event(worker_t* w, bool wait) {
  pthread_mutex_lock(&w->lock);
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += STUCK;
  while (wait && w->first == NULL) {
    if (pthread_cond_timedwait(&w->wake, &w->lock, &until) == ETIMEDOUT) {
      fail("all streams of a worker wait, and nothing has happened for %d s", STUCK);
    }
  }
  event_t* e = w->first;
  if (e != NULL) {
    w->first = e->next;
    if (w->first == NULL) {
      w->last = NULL;
    }
  }
  pthread_mutex_unlock(&w->lock);
  return e;
}

static void run_event(event_t* e) {
  if (!atomic_load(&e->stream->destroyed)) {
    hooks.scheduled(e->stream, e->stream->module, e->id);
  }
  stream_release(e->stream);
  free(e);
}

// aborts lets the client go away, now or later.
static bool aborts(stream_t* s) {
  if (s->abort_in < 0 || s->abort_in-- > 0) {
    return false;
  }
  s->abort_in = 0;
  atomic_fetch_add(&counts.aborted, 1);
  stream_end(s);
  return true;
}

static void* work(void* argument) {
  worker_t* w = argument;
  w->thread = pthread_self(); // pthread_create may not have said it yet
  stream_t* streams[AT_ONCE] = {0};
  size_t count = 0;
  while (w->left > 0 || count > 0) {
    for (event_t* e; (e = next_event(w, false)) != NULL;) {
      run_event(e);
    }
    if (w->left > 0 && count < AT_ONCE) {
      w->left--;
      streams[count++] = stream_new(w);
    }
    bool moved = false;
    for (size_t i = 0; i < count; i++) {
      stream_t* s = streams[i];
      if (!atomic_load(&s->destroyed) && !aborts(s) && !waits(s)) {
        step(s);
        moved = true;
      }
      if (atomic_load(&s->destroyed)) {
        streams[i--] = streams[--count];
        stream_release(s);
        moved = true;
      }
    }
    if (!moved && count > 0 && (count == AT_ONCE || w->left == 0)) {
      event_t* e = next_event(w, true);
      run_event(e);
    }
  }
  for (event_t* e; (e = next_event(w, false)) != NULL;) {
    run_event(e);
  }
  atomic_fetch_sub(&running, 1);
  return NULL;
}

// ---- the program ----

static void load(const char* path) {
  void* module = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (module == NULL) {
    fail("%s", dlerror());
  }
  const struct {
    const char* name;
    void* into;
    bool optional;
  } wanted[] = {
      {"program_init", &hooks.program_init, false},
      {"http_filter_config_new", &hooks.config_new, false},
      {"http_filter_config_destroy", &hooks.config_destroy, false},
      {"http_filter_per_route_config_new", &hooks.route_new, false},
      {"http_filter_per_route_config_destroy", &hooks.route_destroy, false},
      {"http_filter_new", &hooks.filter_new, false},
      {"http_filter_request_headers", &hooks.headers[0], false},
      {"http_filter_request_body", &hooks.body[0], false},
      {"http_filter_request_trailers", &hooks.trailers[0], false},
      {"http_filter_response_headers", &hooks.headers[1], false},
      {"http_filter_response_body", &hooks.body[1], false},
      {"http_filter_response_trailers", &hooks.trailers[1], false},
      {"http_filter_stream_complete", &hooks.complete, false},
      {"http_filter_destroy", &hooks.destroy, false},
      {"http_filter_scheduled", &hooks.scheduled, false},
      {"http_filter_local_reply", &hooks.local_reply, true},
  };
  for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
    char name[128];
    snprintf(name, sizeof(name), "envoy_dynamic_module_on_%s", wanted[i].name);
    void* found = dlsym(module, name);
    if (found == NULL && !wanted[i].optional) {
      fail("%s has no %s", path, name);
    }
    memcpy(wanted[i].into, &found, sizeof(found));
  }
  if (hooks.program_init() == NULL) {
    fail("the module refused to load");
  }
}

static bytes_t file(const char* path) {
  bytes_t b = {0};
  char block[4096];
  FILE* f = fopen(path, "r");
  if (f == NULL) {
    fail("%s: %s", path, strerror(errno));
  }
  for (size_t n; (n = fread(block, 1, sizeof(block), f)) > 0;) {
    put(&b, block, n);
  }
  fclose(f);
  return b;
}

static void sleep_ms(long ms) {
  const struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

int main(int argc, char** argv) {
  static const struct option options[] = {
      {"module", required_argument, NULL, 'm'},  {"config", required_argument, NULL, 'c'},
      {"route", required_argument, NULL, 'r'},   {"vary", required_argument, NULL, 'v'},
      {"workers", required_argument, NULL, 'w'}, {"streams", required_argument, NULL, 'n'},
      {"reload", required_argument, NULL, 'l'},  {"seed", required_argument, NULL, 's'},
      {"settle", required_argument, NULL, 't'},  {"leave", no_argument, NULL, 'e'},
      {NULL, 0, NULL, 0},
  };
  const char *module = NULL, *config_path = NULL, *route_path = NULL;
  size_t total = 3000;
  long reload = 0, settle = 0;
  uint64_t seed = 1;
  bool leave = false;
  for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
    switch (c) {
    case 'm':
      module = optarg;
      break;
    case 'c':
      config_path = optarg;
      break;
    case 'r':
      route_path = optarg;
      break;
    case 'v': // name=value,value,…
      vary_name = strsep(&optarg, "=");
      for (char* v; (v = strsep(&optarg, ",")) != NULL && vary_count < 64;) {
        vary_values[vary_count++] = v;
      }
      break;
    case 'w':
      worker_count = atoi(optarg);
      break;
    case 'n':
      total = strtoul(optarg, NULL, 10);
      break;
    case 'l': // ms between two configs
      reload = atol(optarg);
      break;
    case 's':
      seed = strtoull(optarg, NULL, 10);
      break;
    case 't': // ms before the first stream
      settle = atol(optarg);
      break;
    case 'e': // schedulers may be left: nobody forces the plugin's finalizers
      leave = true;
      break;
    default:
      return 2;
    }
  }
  if (module == NULL || config_path == NULL || optind != argc) {
    fprintf(stderr, "usage: plainhost --module FILE --config FILE [--route FILE] [--vary NAME=VALUE,…] [--workers N] "
                    "[--streams N] [--reload MS] [--settle MS] [--seed N] [--leave]\n");
    return 2;
  }
  load(module);
  const bytes_t text = file(config_path);
  current = config_load(&text);
  bytes_t route_text = {0};
  if (route_path != NULL) {
    route_text = file(route_path);
    route = hooks.route_new((view_t){"shunt", 5}, view(&route_text));
    if (route == NULL) {
      fail("the module refused the route's config");
    }
  }
  sleep_ms(settle);
  worker_t* workers = calloc((size_t)worker_count, sizeof(*workers));
  atomic_store(&running, worker_count);
  for (int i = 0; i < worker_count; i++) {
    worker_t* w = &workers[i];
    w->index = i;
    w->random = (seed + (uint64_t)i) * 0x9E3779B97F4A7C15u | 1;
    w->left = total / (size_t)worker_count;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    pthread_create(&w->thread, NULL, work, w);
  }
  while (atomic_load(&running) > 0) {
    sleep_ms(reload > 0 ? reload : 10);
    if (reload > 0) {
      config_t* fresh = config_load(&text);
      pthread_mutex_lock(&config_lock);
      config_t* old = current;
      current = fresh;
      pthread_mutex_unlock(&config_lock);
      config_release(old);
    }
  }
  for (int i = 0; i < worker_count; i++) {
    pthread_join(workers[i].thread, NULL);
  }
  if (route != NULL) {
    hooks.route_destroy(route);
  }
  config_release(current);
  for (int i = 0; !leave && i < 100 * STUCK && atomic_load(&counts.schedulers) > 0; i++) {
    sleep_ms(10); // a plugin's finalizers free some
  }
  if (!leave && atomic_load(&counts.schedulers) > 0) {
    fail("%lu schedulers are left", atomic_load(&counts.schedulers));
  }
  printf("streams %lu passed %lu replied %lu aborted %lu resumed %lu configs %lu\n", atomic_load(&counts.streams),
         atomic_load(&counts.passed), atomic_load(&counts.replied), atomic_load(&counts.aborted),
         atomic_load(&counts.resumed), atomic_load(&counts.configs));
  free(text.data);
  free(route_text.data);
  free(workers);
  fflush(stdout);
  _exit(0); // a Go runtime has threads that nobody can end
}
