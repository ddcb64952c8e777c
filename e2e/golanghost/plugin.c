// Loading the plugin, its configs, its metrics, and the thread that forces its
// garbage collector and looks for callbacks that block a worker.
#include "host.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "settings.h"

#define MAX_METRICS 256

enum metric_type { METRIC_COUNTER = 0, METRIC_GAUGE = 1, METRIC_HISTOGRAM = 2 };

// Envoy 1.39 and later let a metric be changed outside a stream; abi.h of 1.38
// does not declare it. Without them a metric only has its shadow.
#define WEAK_METRIC(name)                                                                                              \
  extern envoy_dynamic_module_type_metrics_result envoy_dynamic_module_callback_http_filter_config_##name(             \
      void*, size_t, envoy_dynamic_module_type_module_buffer*, size_t, uint64_t) __attribute__((weak));
WEAK_METRIC(increment_counter)
WEAK_METRIC(increment_gauge)
WEAK_METRIC(decrement_gauge)
WEAK_METRIC(set_gauge)
WEAK_METRIC(record_histogram_value)

typedef struct {
  uint32_t id; // as contrib numbers them: the type, plus 4 for each of its kind
  bool in_envoy;
  size_t envoy_id;
  uint64_t shadow;
} metric_t;

// What Go holds for a filter config; freed by its finalizer.
typedef struct {
  httpConfig go; // first: Go holds its address
  filter_config_t* config;
  bool gone; // under the config's lock
} go_config_t;

struct filter_config {
  // Constant.
  plugin_t* plugin;
  settings_t settings;
  uint64_t id;
  void* envoy;

  size_t requests_id, crossings_id;
  bool counts; // they are Envoy's counters

  atomic_int references; // Envoy's, each request's, and the Go config's
  atomic_ulong panics;

  pthread_mutex_t lock; // protects the rest
  bool gone;            // Envoy destroyed it
  metric_t metrics[MAX_METRICS];
  size_t metric_count;
};

// One level of a route: what contrib calls RoutePluginConfig.
typedef struct {
  char* any;
  size_t any_size;
  uint64_t id, merged, parent;
} level_t;

typedef struct {
  plugin_t* plugin;
  settings_t settings;
  pthread_rwlock_t lock; // protects the levels
  level_t levels[MAX_LEVELS];
  size_t count;
} route_t;

// Plugins by id and by name, never removed: contrib's DsoManager.
static struct {
  pthread_mutex_t lock; // protects the rest
  plugin_t* first;
  struct {
    char* name;
    plugin_t* plugin;
  } names[64];
  size_t count;
} store = {.lock = PTHREAD_MUTEX_INITIALIZER};

plugin_t* config_plugin(const filter_config_t* c) { return c->plugin; }
const char* config_name(const filter_config_t* c) { return c->settings.plugin_name; }
bool config_logs_start(const filter_config_t* c) { return c->settings.log_start; }
bool config_aborts_on_panic(const filter_config_t* c) { return c->settings.abort_on_panic; }
void config_panicked(const filter_config_t* c) { atomic_fetch_add(&((filter_config_t*)c)->panics, 1); }
void config_retain(filter_config_t* c) { atomic_fetch_add(&c->references, 1); }
void config_release(filter_config_t* c) {
  if (atomic_fetch_sub(&c->references, 1) == 1) {
    settings_free(&c->settings);
    free(c);
  }
}

// ---- loading ----

// Where this module lies in memory.
static bool ours(const void* address) {
  Dl_info mine, other;
  return dladdr((void*)&store, &mine) != 0 && dladdr(address, &other) != 0 && mine.dli_fbase == other.dli_fbase;
}

EXPORT envoy_dynamic_module_type_abi_version_module_ptr envoy_dynamic_module_on_program_init(void) {
  Dl_info mine;
  if (dladdr((void*)&store, &mine) == 0) {
    return NULL;
  }
  // A plugin finds our functions only in the global scope. Its Go runtime can't
  // be unloaded, so neither can we.
  if (dlopen(mine.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL | RTLD_NODELETE) == NULL) {
    fprintf(stderr, "golanghost: can't stay in memory: %s\n", dlerror());
    return NULL;
  }
  const void* found = dlsym(RTLD_DEFAULT, "envoyGoFilterHttpContinue");
  if (found == NULL || !ours(found)) {
    Dl_info other = {0};
    dladdr(found, &other);
    fprintf(stderr,
            "golanghost: refused: %s has the golang filter's functions itself (envoyGoFilterHttpContinue), so a plugin "
            "would call those with our memory. In a contrib Envoy use envoy.filters.http.golang.\n",
            other.dli_fname == NULL ? "something loaded before" : other.dli_fname);
    return NULL;
  }
  return envoy_dynamic_modules_abi_version;
}

static bool resolve(void* library, const char* path, const char* symbol, void* into) {
  void* found = dlsym(library, symbol);
  if (found == NULL) {
    host_log(4, "golanghost: lib: %s, cannot find symbol: %s, err: %s", path, symbol, dlerror());
    return false;
  }
  memcpy(into, &found, sizeof(found));
  return true;
}

// plugin_load returns the plugin of an id, loading it at the first call; a
// second path for the same id is ignored, as in contrib.
static plugin_t* plugin_load(const settings_t* s) {
  pthread_mutex_lock(&store.lock);
  plugin_t* p = store.first;
  while (p != NULL && strcmp(p->id, s->library_id) != 0) {
    p = p->next;
  }
  if (p == NULL) {
    void* library = dlopen(s->library_path, RTLD_LAZY);
    if (library == NULL) {
      host_log(4, "golanghost: cannot load : %s error: %s", s->library_path, dlerror());
      pthread_mutex_unlock(&store.lock);
      return NULL;
    }
    p = calloc(1, sizeof(*p));
#define RESOLVE(field, symbol) ok &= resolve(library, s->library_path, symbol, &p->field);
    bool ok = p != NULL;
    RESOLVE(new_config, "envoyGoFilterNewHttpPluginConfig")
    RESOLVE(merge_config, "envoyGoFilterMergeHttpPluginConfig")
    RESOLVE(destroy_config, "envoyGoFilterDestroyHttpPluginConfig")
    RESOLVE(on_header, "envoyGoFilterOnHttpHeader")
    RESOLVE(on_data, "envoyGoFilterOnHttpData")
    RESOLVE(on_log, "envoyGoFilterOnHttpLog")
    RESOLVE(on_stream_complete, "envoyGoFilterOnHttpStreamComplete")
    RESOLVE(on_destroy, "envoyGoFilterOnHttpDestroy")
    RESOLVE(sema_dec, "envoyGoRequestSemaDec")
    RESOLVE(clean_up, "envoyGoFilterCleanUp")
    if (!ok) {
      free(p);
      pthread_mutex_unlock(&store.lock);
      return NULL;
    }
    p->id = strdup(s->library_id);
    p->next = store.first;
    store.first = p;
    overseer_start(p, s->gc_interval_ms, s->blocked_ms);
  }
  size_t i = 0;
  while (i < store.count && strcmp(store.names[i].name, s->plugin_name) != 0) {
    i++;
  }
  if (i == store.count && i < sizeof(store.names) / sizeof(*store.names)) {
    store.names[store.count++].name = strdup(s->plugin_name);
  }
  store.names[i].plugin = p; // the last one with a name has it
  pthread_mutex_unlock(&store.lock);
  return p;
}

static plugin_t* plugin_named(const char* name) {
  plugin_t* p = NULL;
  pthread_mutex_lock(&store.lock);
  for (size_t i = 0; i < store.count; i++) {
    if (strcmp(store.names[i].name, name) == 0) {
      p = store.names[i].plugin;
    }
  }
  pthread_mutex_unlock(&store.lock);
  return p;
}

// new_go_config hands a serialized Any to the plugin's parser. The bytes are
// gone when this returns, as in contrib.
static uint64_t new_go_config(plugin_t* p, httpConfig* c, const char* name, const char* any, size_t size, bool route,
                              uint32_t concurrency) {
  char* bytes = guarded_new(size == 0 ? 1 : size);
  memcpy(bytes, any, size);
  c->plugin_name_ptr = (uint64_t)(uintptr_t)name;
  c->plugin_name_len = strlen(name);
  c->config_ptr = (uint64_t)(uintptr_t)bytes;
  c->config_len = size;
  c->is_route_config = route ? 1 : 0;
  c->concurrency = concurrency;
  plugin_enter("Parse");
  const uint64_t id = p->new_config(c);
  plugin_leave();
  guarded_free(bytes);
  return id;
}

// ---- filter config ----

EXPORT envoy_dynamic_module_type_http_filter_config_module_ptr
envoy_dynamic_module_on_http_filter_config_new(envoy_dynamic_module_type_http_filter_config_envoy_ptr envoy,
                                               envoy_dynamic_module_type_envoy_buffer name,
                                               envoy_dynamic_module_type_envoy_buffer json) {
  (void)name;
  filter_config_t* c = calloc(1, sizeof(*c));
  pthread_mutex_init(&c->lock, NULL);
  atomic_store(&c->references, 1);
  c->envoy = envoy;
  if (!settings_parse(&c->settings, json.ptr, json.length) || !settings_complete(&c->settings, false) ||
      (c->plugin = plugin_load(&c->settings)) == NULL) {
    host_log(4, "golanghost: golang_filter: load library failed: %s %s", c->settings.library_id,
             c->settings.library_path);
    config_release(c);
    return NULL;
  }
  c->counts = CB(http_filter_config_increment_counter) != NULL &&
              CB(http_filter_config_define_counter)(envoy, MODULE("golanghost_requests", 19), NULL, 0,
                                                    &c->requests_id) == envoy_dynamic_module_type_metrics_result_Success &&
              CB(http_filter_config_define_counter)(envoy, MODULE("golanghost_crossings", 20), NULL, 0,
                                                    &c->crossings_id) == envoy_dynamic_module_type_metrics_result_Success;
  go_config_t* g = guarded_new(sizeof(*g));
  g->config = c;
  config_retain(c);
  c->id = new_go_config(c->plugin, &g->go, c->settings.plugin_name, c->settings.levels[0].data,
                        c->settings.levels[0].size, false, CB(get_concurrency)());
  if (c->id == 0) {
    host_log(4, "golanghost: golang filter failed to parse plugin config: %s %s", c->settings.library_id,
             c->settings.library_path);
    pthread_mutex_lock(&c->lock);
    c->gone = true;
    pthread_mutex_unlock(&c->lock);
    config_release(c);
    return NULL;
  }
  return c;
}

EXPORT void
envoy_dynamic_module_on_http_filter_config_destroy(envoy_dynamic_module_type_http_filter_config_module_ptr config) {
  filter_config_t* c = (filter_config_t*)config;
  // Gone first: in contrib the weak pointer has expired when Destroy runs, and
  // a metric used there is a panic that ends Envoy.
  pthread_mutex_lock(&c->lock);
  c->gone = true;
  pthread_mutex_unlock(&c->lock);
  plugin_enter("Destroy");
  c->plugin->destroy_config(c->id, 0);
  plugin_leave();
  config_release(c);
}

EXPORT void envoyGoConfigHttpFinalize(void* config) {
  go_config_t* g = config;
  filter_config_t* c = g->config;
  guarded_free(g);
  config_release(c);
}

// ---- route config ----

EXPORT envoy_dynamic_module_type_http_filter_per_route_config_module_ptr
envoy_dynamic_module_on_http_filter_per_route_config_new(envoy_dynamic_module_type_envoy_buffer name,
                                                         envoy_dynamic_module_type_envoy_buffer json) {
  (void)name;
  route_t* route = calloc(1, sizeof(*route));
  pthread_rwlock_init(&route->lock, NULL);
  if (!settings_parse(&route->settings, json.ptr, json.length) || !settings_complete(&route->settings, true)) {
    settings_free(&route->settings);
    free(route);
    return NULL;
  }
  route->count = route->settings.level_count;
  for (size_t i = 0; i < route->count; i++) {
    route->levels[i].any = route->settings.levels[i].data;
    route->levels[i].any_size = route->settings.levels[i].size;
  }
  // The library may not be loaded yet: then the first request parses.
  route->plugin = plugin_named(route->settings.plugin_name);
  for (size_t i = 0; route->plugin != NULL && i < route->count; i++) {
    httpConfig c = {0};
    level_t* level = &route->levels[i];
    level->id =
        new_go_config(route->plugin, &c, route->settings.plugin_name, level->any, level->any_size, true, 0);
    if (level->id == 0) {
      host_log(4, "golanghost: golang filter failed to parse plugin config: %s", route->settings.plugin_name);
      envoy_dynamic_module_on_http_filter_per_route_config_destroy(route);
      return NULL;
    }
  }
  return route;
}

EXPORT void envoy_dynamic_module_on_http_filter_per_route_config_destroy(
    envoy_dynamic_module_type_http_filter_per_route_config_module_ptr config) {
  route_t* route = (route_t*)config;
  for (size_t i = 0; i < route->count; i++) {
    const level_t* level = &route->levels[i];
    plugin_enter("Destroy of a route");
    if (level->id > 0) {
      route->plugin->destroy_config(level->id, 0);
    }
    if (level->merged > 0 && level->merged != level->id) {
      route->plugin->destroy_config(level->merged, 0);
    }
    plugin_leave();
  }
  settings_free(&route->settings);
  free(route);
}

static uint64_t level_merged(route_t* route, level_t* level, uint64_t parent) {
  pthread_rwlock_rdlock(&route->lock);
  uint64_t merged = level->merged > 0 && level->parent == parent ? level->merged : 0;
  pthread_rwlock_unlock(&route->lock);
  if (merged > 0) {
    return merged;
  }
  pthread_rwlock_wrlock(&route->lock);
  if (level->merged > 0 && level->parent == parent) {
    merged = level->merged;
    pthread_rwlock_unlock(&route->lock);
    return merged;
  }
  const char* name = route->settings.plugin_name;
  if (route->plugin == NULL) {
    route->plugin = plugin_named(name);
  }
  if (level->merged > 0) {
    plugin_enter("Destroy of a merged config");
    route->plugin->destroy_config(level->merged, 1);
    plugin_leave();
  }
  if (level->id == 0) {
    httpConfig c = {0};
    level->id = new_go_config(route->plugin, &c, name, level->any, level->any_size, true, 0);
    if (level->id == 0) {
      misuse("Parse of a route's config fails at its first request: contrib's RELEASE_ASSERT ends Envoy here");
    }
  }
  plugin_enter("Merge");
  level->merged = route->plugin->merge_config((uint64_t)(uintptr_t)name, strlen(name), parent, level->id);
  plugin_leave();
  level->parent = parent;
  merged = level->merged;
  pthread_rwlock_unlock(&route->lock);
  return merged;
}

uint64_t config_merged(const filter_config_t* c, const void* config) {
  route_t* route = (route_t*)config;
  uint64_t id = c->id;
  if (route != NULL && strcmp(route->settings.plugin_name, c->settings.plugin_name) == 0) {
    for (size_t i = 0; i < route->count; i++) {
      id = level_merged(route, &route->levels[i], id);
    }
  }
  return id;
}

// ---- metrics ----

// locked_config is the config with its lock taken, or NULL when it is gone.
static filter_config_t* locked_config(void* config) {
  filter_config_t* c = ((go_config_t*)config)->config;
  pthread_mutex_lock(&c->lock);
  if (c->gone) {
    pthread_mutex_unlock(&c->lock);
    return NULL;
  }
  return c;
}

EXPORT CAPIStatus envoyGoFilterHttpDefineMetric(void* config, uint32_t type, void* name, int size, uint32_t* id) {
  filter_config_t* c = locked_config(config);
  if (c == NULL) {
    return CAPIFilterIsGone;
  }
  CAPIStatus status = CAPIOK;
  if (type > METRIC_HISTOGRAM) {
    status = CAPIValueNotFound;
  } else if (c->metric_count == MAX_METRICS) {
    limitation("more than %d metrics of one config", MAX_METRICS);
  } else {
    metric_t* m = &c->metrics[c->metric_count++];
    m->id = type;
    for (size_t i = 0; i < c->metric_count; i++) {
      m->id += (c->metrics[i].id & 3) == type ? 4 : 0;
    }
    const envoy_dynamic_module_type_module_buffer text = MODULE(name, (size_t)size);
    envoy_dynamic_module_type_metrics_result result;
    if (type == METRIC_COUNTER) {
      result = CB(http_filter_config_define_counter)(c->envoy, text, NULL, 0, &m->envoy_id);
    } else if (type == METRIC_GAUGE) {
      result = CB(http_filter_config_define_gauge)(c->envoy, text, NULL, 0, &m->envoy_id);
    } else {
      result = CB(http_filter_config_define_histogram)(c->envoy, text, NULL, 0, &m->envoy_id);
    }
    m->in_envoy = result == envoy_dynamic_module_type_metrics_result_Success;
    *id = m->id;
  }
  pthread_mutex_unlock(&c->lock);
  return status;
}

void config_crossed(filter_config_t* c, uint64_t crossings) {
  if (!c->counts) {
    return;
  }
  pthread_mutex_lock(&c->lock);
  if (!c->gone) {
    CB(http_filter_config_increment_counter)(c->envoy, c->requests_id, NULL, 0, 1);
    CB(http_filter_config_increment_counter)(c->envoy, c->crossings_id, NULL, 0, crossings);
  }
  pthread_mutex_unlock(&c->lock);
}

static metric_t* metric_of(filter_config_t* c, uint32_t id) {
  for (size_t i = 0; i < c->metric_count; i++) {
    if (c->metrics[i].id == id) {
      return &c->metrics[i];
    }
  }
  return NULL;
}

#define TELL(c, m, name, value)                                                                                        \
  do {                                                                                                                 \
    if ((m)->in_envoy && CB(http_filter_config_##name) != NULL) {                                                      \
      CB(http_filter_config_##name)((c)->envoy, (m)->envoy_id, NULL, 0, (value));                                      \
    }                                                                                                                  \
  } while (0)

EXPORT CAPIStatus envoyGoFilterHttpIncrementMetric(void* config, uint32_t id, int64_t offset) {
  filter_config_t* c = locked_config(config);
  if (c == NULL) {
    return CAPIFilterIsGone;
  }
  metric_t* m = metric_of(c, id);
  if (m != NULL && offset > 0 && (id & 3) != METRIC_HISTOGRAM) {
    m->shadow += (uint64_t)offset;
    if ((id & 3) == METRIC_COUNTER) {
      TELL(c, m, increment_counter, (uint64_t)offset);
    } else {
      TELL(c, m, increment_gauge, (uint64_t)offset);
    }
  } else if (m != NULL && offset < 0 && (id & 3) == METRIC_GAUGE) {
    m->shadow -= (uint64_t)-offset;
    TELL(c, m, decrement_gauge, (uint64_t)-offset);
  }
  pthread_mutex_unlock(&c->lock);
  return CAPIOK;
}

EXPORT CAPIStatus envoyGoFilterHttpGetMetric(void* config, uint32_t id, uint64_t* value) {
  filter_config_t* c = locked_config(config);
  if (c == NULL) {
    return CAPIFilterIsGone;
  }
  const metric_t* m = metric_of(c, id);
  if (m != NULL && (id & 3) != METRIC_HISTOGRAM) {
    *value = m->shadow;
  }
  pthread_mutex_unlock(&c->lock);
  return CAPIOK;
}

EXPORT CAPIStatus envoyGoFilterHttpRecordMetric(void* config, uint32_t id, uint64_t value) {
  filter_config_t* c = locked_config(config);
  if (c == NULL) {
    return CAPIFilterIsGone;
  }
  metric_t* m = metric_of(c, id);
  if (m != NULL) {
    switch (id & 3) {
    case METRIC_COUNTER: // adds, as in contrib
      m->shadow += value;
      TELL(c, m, increment_counter, value);
      break;
    case METRIC_GAUGE:
      m->shadow = value;
      TELL(c, m, set_gauge, value);
      break;
    default:
      TELL(c, m, record_histogram_value, value);
    }
  }
  pthread_mutex_unlock(&c->lock);
  return CAPIOK;
}
