// The functions of api.h that take an httpRequest, and the log.
#include "host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ATTRIBUTE(name) envoy_dynamic_module_type_attribute_id_##name

// The ids of capi_impl.go. What TLS connections say is not asked for here.
enum {
  VALUE_PROTOCOL = 3,
  VALUE_RESPONSE_CODE = 4,
  VALUE_ATTEMPT_COUNT = 6,
  VALUE_CLUSTER = 11,
  VALUE_VIRTUAL_CLUSTER = 12,
  VALUE_SSL_EXISTS = 100,
  VALUE_SSL_LAST = 119,
};

static const struct {
  int id;
  envoy_dynamic_module_type_attribute_id attribute;
} strings[] = {
    {1, ATTRIBUTE(XdsRouteName)},       {2, ATTRIBUTE(XdsFilterChainName)}, {5, ATTRIBUTE(ResponseCodeDetails)},
    {7, ATTRIBUTE(DestinationAddress)}, {8, ATTRIBUTE(SourceAddress)},      {9, ATTRIBUTE(UpstreamLocalAddress)},
    {10, ATTRIBUTE(UpstreamAddress)},
};

static const char* const protocols[] = {"HTTP/1.0", "HTTP/1.1", "HTTP/2", "HTTP/3"};

static void keep(request_t* r, int id, bool found, envoy_dynamic_module_type_envoy_buffer value) {
  free(r->values[id]);
  r->values[id] = NULL;
  r->has_value[id] = found;
  if (found) {
    r->values[id] = malloc(value.length + 1);
    memcpy(r->values[id], value.ptr, value.length);
    r->values[id][value.length] = 0;
    r->numbers[id] = value.length;
  }
}

void take_values(request_t* r) {
  pthread_mutex_lock(&r->lock);
  envoy_dynamic_module_type_envoy_buffer value = {NULL, 0};
  for (size_t i = 0; i < sizeof(strings) / sizeof(*strings); i++) {
    const bool found = CB(http_filter_get_attribute_string)(r->envoy, strings[i].attribute, &value);
    keep(r, strings[i].id, found, value);
  }
  keep(r, VALUE_CLUSTER, CB(http_get_cluster_name)(r->envoy, &value), value);
  r->has_value[VALUE_PROTOCOL] = false;
  if (CB(http_filter_get_attribute_string)(r->envoy, ATTRIBUTE(RequestProtocol), &value)) {
    for (uint64_t i = 0; i < sizeof(protocols) / sizeof(*protocols); i++) {
      if (value.length == strlen(protocols[i]) && memcmp(value.ptr, protocols[i], value.length) == 0) {
        r->has_value[VALUE_PROTOCOL] = true;
        r->numbers[VALUE_PROTOCOL] = i;
      }
    }
  }
  r->has_value[VALUE_RESPONSE_CODE] =
      CB(http_filter_get_attribute_int)(r->envoy, ATTRIBUTE(ResponseCode), &r->numbers[VALUE_RESPONSE_CODE]);
  r->has_value[VALUE_ATTEMPT_COUNT] = CB(http_filter_get_attribute_int)(
      r->envoy, ATTRIBUTE(UpstreamRequestAttemptCount), &r->numbers[VALUE_ATTEMPT_COUNT]);
  pthread_mutex_unlock(&r->lock);
}

// enter checks what contrib's wrapper checks, in its order, and takes the lock.
static CAPIStatus enter(request_t* r, const char* what) {
  atomic_fetch_add_explicit(&r->crossings, 1, memory_order_relaxed);
  pthread_mutex_lock(&r->lock);
  const state_t* states[] = {&r->decoding, &r->encoding};
  bool processing = r->go.is_golang_processing_log != 0, left = processing;
  const char* after = "Continue";
  for (int i = 0; i < 2; i++) {
    if (state_processing(states[i])) {
      processing = true;
      if (!states[i]->continue_posted && !states[i]->reply_posted) {
        left = true;
      } else if (states[i]->reply_posted) {
        after = "SendLocalReply";
      }
    }
  }
  CAPIStatus status = CAPIOK;
  if (r->destroyed) {
    status = on_worker(r) ? (processing ? CAPIFilterIsDestroy : CAPINotInGo) : CAPIFilterIsGone;
  } else if (!processing) {
    status = CAPINotInGo;
  } else if (!left && !on_worker(r)) {
    misuse("%s from a goroutine after %s: it races with the worker, which may have taken the request away", what,
           after);
  }
  if (status != CAPIOK) {
    pthread_mutex_unlock(&r->lock);
  }
  return status;
}

static CAPIStatus leave(request_t* r, CAPIStatus status) {
  pthread_mutex_unlock(&r->lock);
  return status;
}

static op_t* op_new(enum op_kind kind) {
  op_t* op = calloc(1, sizeof(*op));
  op->kind = kind;
  return op;
}

// answer hands a string to Go, which copies it before it calls again.
static void answer(request_t* r, const char* text, size_t size, uint64_t* value, int* value_size) {
  char* copy = malloc(size + 1);
  memcpy(copy, text, size);
  copy[size] = 0;
  free(r->text);
  r->text = copy;
  *value = (uint64_t)(uintptr_t)copy;
  *value_size = (int)size;
}

// ---- values ----

EXPORT CAPIStatus envoyGoFilterHttpGetStringValue(void* request, int id, uint64_t* value, int* size) {
  request_t* r = request;
  const CAPIStatus status = enter(r, "a value of StreamInfo");
  if (status != CAPIOK) {
    return status;
  }
  if (id <= 0 || id == VALUE_PROTOCOL || id == VALUE_RESPONSE_CODE || id == VALUE_ATTEMPT_COUNT ||
      (id > VALUE_VIRTUAL_CLUSTER && id <= VALUE_SSL_EXISTS) || id > VALUE_SSL_LAST) {
    misuse("invalid string value id %d: contrib's RELEASE_ASSERT ends Envoy", id);
  }
  if (id >= VALUES || !r->has_value[id]) {
    return leave(r, CAPIValueNotFound);
  }
  answer(r, r->values[id], r->numbers[id], value, size);
  return leave(r, CAPIOK);
}

EXPORT CAPIStatus envoyGoFilterHttpGetIntegerValue(void* request, int id, uint64_t* value) {
  request_t* r = request;
  const CAPIStatus status = enter(r, "a value of StreamInfo");
  if (status != CAPIOK) {
    return status;
  }
  if (id == VALUE_SSL_EXISTS) {
    *value = 0;
    return leave(r, CAPIOK);
  }
  if (id > VALUE_SSL_EXISTS && id <= VALUE_SSL_LAST) {
    return leave(r, CAPIValueNotFound);
  }
  if (id != VALUE_PROTOCOL && id != VALUE_RESPONSE_CODE && id != VALUE_ATTEMPT_COUNT) {
    misuse("invalid integer value id %d: contrib's RELEASE_ASSERT ends Envoy", id);
  }
  if (!r->has_value[id]) {
    return leave(r, CAPIValueNotFound);
  }
  *value = r->numbers[id];
  return leave(r, CAPIOK);
}

// ---- what waits for the worker ----

// The paths of CEL attributes that a dynamic module can read as strings.
static const struct {
  const char* path;
  envoy_dynamic_module_type_attribute_id attribute;
} properties[] = {
    {"request.path", ATTRIBUTE(RequestPath)},
    {"request.url_path", ATTRIBUTE(RequestUrlPath)},
    {"request.host", ATTRIBUTE(RequestHost)},
    {"request.scheme", ATTRIBUTE(RequestScheme)},
    {"request.method", ATTRIBUTE(RequestMethod)},
    {"request.referer", ATTRIBUTE(RequestReferer)},
    {"request.useragent", ATTRIBUTE(RequestUserAgent)},
    {"request.id", ATTRIBUTE(RequestId)},
    {"request.protocol", ATTRIBUTE(RequestProtocol)},
    {"request.query", ATTRIBUTE(RequestQuery)},
    {"response.code_details", ATTRIBUTE(ResponseCodeDetails)},
    {"source.address", ATTRIBUTE(SourceAddress)},
    {"destination.address", ATTRIBUTE(DestinationAddress)},
    {"upstream.address", ATTRIBUTE(UpstreamAddress)},
    {"upstream.local_address", ATTRIBUTE(UpstreamLocalAddress)},
    {"xds.cluster_name", ATTRIBUTE(XdsClusterName)},
    {"xds.route_name", ATTRIBUTE(XdsRouteName)},
    {"xds.filter_chain_name", ATTRIBUTE(XdsFilterChainName)},
};

// get answers one of the getters that goroutines wait for. The lock is held.
static CAPIStatus get(request_t* r, enum op_kind kind, const char* key, size_t size, uint64_t* value, int* value_size) {
  envoy_dynamic_module_type_envoy_buffer found = {NULL, 0};
  switch (kind) {
  case OP_GET_METADATA:
    bytes_free(&r->blob);
    if (metadata_get(r, key, size, &r->blob)) {
      answer(r, bytes_at(&r->blob), r->blob.len, value, value_size);
    }
    return CAPIOK;
  case OP_GET_FILTER_STATE:
    if (CB(http_get_filter_state_bytes)(r->envoy, MODULE(key, size), &found)) {
      answer(r, found.ptr, found.length, value, value_size);
    }
    return CAPIOK;
  case OP_GET_PROPERTY:
    for (size_t i = 0; i < sizeof(properties) / sizeof(*properties); i++) {
      if (strlen(properties[i].path) == size && memcmp(properties[i].path, key, size) == 0) {
        if (!CB(http_filter_get_attribute_string)(r->envoy, properties[i].attribute, &found)) {
          return CAPIValueNotFound;
        }
        answer(r, found.ptr, found.length, value, value_size);
        return CAPIOK;
      }
    }
    limitation("GetProperty(%.*s): this path can't be read by a dynamic module", (int)size, key);
  default: // no secret is ever configured
    *value_size = -1;
    return CAPIOK;
  }
}

static CAPIStatus get_or_wait(request_t* r, enum op_kind kind, const char* what, const void* key, int size,
                              uint64_t* value, int* value_size, int* rc) {
  CAPIStatus status = enter(r, what);
  if (status != CAPIOK) {
    return status;
  }
  if (on_worker(r)) {
    status = get(r, kind, key, (size_t)size, value, value_size);
    return leave(r, status);
  }
  op_t* op = op_new(kind);
  bytes_append(&op->a, key, (size_t)size);
  op->value = value;
  op->value_size = value_size;
  op->rc = rc;
  op_post(r, op);
  return leave(r, CAPIYield);
}

EXPORT CAPIStatus envoyGoFilterHttpGetDynamicMetadata(void* r, void* name, int size, uint64_t* value,
                                                      int* value_size) {
  return get_or_wait(r, OP_GET_METADATA, "DynamicMetadata().Get", name, size, value, value_size, NULL);
}

EXPORT CAPIStatus envoyGoFilterHttpGetStringFilterState(void* r, void* key, int size, uint64_t* value,
                                                        int* value_size) {
  return get_or_wait(r, OP_GET_FILTER_STATE, "FilterState().GetString", key, size, value, value_size, NULL);
}

EXPORT CAPIStatus envoyGoFilterHttpGetStringProperty(void* r, void* key, int size, uint64_t* value, int* value_size,
                                                     int* rc) {
  if (!on_worker(r)) {
    misuse("GetProperty from a goroutine: contrib keeps its key without a copy");
  }
  return get_or_wait(r, OP_GET_PROPERTY, "GetProperty", key, size, value, value_size, rc);
}

EXPORT CAPIStatus envoyGoFilterHttpGetStringSecret(void* r, void* key, int size, uint64_t* value, int* value_size) {
  return get_or_wait(r, OP_GET_SECRET, "GetGenericSecret", key, size, value, value_size, NULL);
}

// ---- what does not ----

static CAPIStatus do_or_post(request_t* r, op_t* op, const char* what) {
  const CAPIStatus status = enter(r, what);
  if (status != CAPIOK) {
    op_free(op);
    return status;
  }
  if (!on_worker(r)) {
    op_post(r, op);
    return leave(r, CAPIOK);
  }
  leave(r, CAPIOK);
  op_run(r, op);
  return CAPIOK;
}

EXPORT CAPIStatus envoyGoFilterHttpClearRouteCache(void* r, bool refresh) {
  op_t* op = op_new(OP_CLEAR_ROUTE);
  op->flag = refresh;
  return do_or_post(r, op, "ClearRouteCache");
}

EXPORT CAPIStatus envoyGoFilterHttpSetDynamicMetadata(void* r, void* name, int name_size, void* key, int key_size,
                                                      void* data, int size) {
  op_t* op = op_new(OP_SET_METADATA);
  bytes_append(&op->a, name, (size_t)name_size);
  bytes_append(&op->b, key, (size_t)key_size);
  bytes_append(&op->c, data, (size_t)size);
  return do_or_post(r, op, "DynamicMetadata().Set");
}

EXPORT CAPIStatus envoyGoFilterHttpSetStringFilterState(void* r, void* key, int key_size, void* value, int value_size,
                                                        int state_type, int life_span, int stream_sharing) {
  (void)state_type, (void)life_span, (void)stream_sharing; // a dynamic module's lives as long as the filter chain
  op_t* op = op_new(OP_SET_FILTER_STATE);
  bytes_append(&op->a, key, (size_t)key_size);
  bytes_append(&op->b, value, (size_t)value_size);
  return do_or_post(r, op, "FilterState().SetString");
}

EXPORT CAPIStatus envoyGoFilterHttpSetDrainConnectionUponCompletion(void* request) {
  request_t* r = request;
  const CAPIStatus status = enter(r, "DrainConnectionUponCompletion");
  if (status != CAPIOK) {
    return status;
  }
  limitation("DrainConnectionUponCompletion: dynamic modules have nothing like it");
}

void run_request_op(request_t* r, op_t* op) {
  switch (op->kind) {
  case OP_CLEAR_ROUTE:
    CB(http_clear_route_cache)(r->envoy);
    if (op->flag) { // the next look at the route finds it anew
      envoy_dynamic_module_type_envoy_buffer name;
      CB(http_get_cluster_name)(r->envoy, &name);
    }
    return;
  case OP_SET_METADATA:
    if (!metadata_set(r, &op->a, &op->b, bytes_at(&op->c), op->c.len)) {
      limitation("dynamic metadata %.*s: a value that is no string, number, bool, or list of those", (int)op->b.len,
                 bytes_at(&op->b));
    }
    return;
  case OP_SET_FILTER_STATE:
    CB(http_set_filter_state_bytes)
    (r->envoy, MODULE(bytes_at(&op->a), op->a.len), MODULE(bytes_at(&op->b), op->b.len));
    return;
  default:
    break;
  }
  pthread_mutex_lock(&r->lock);
  const CAPIStatus status = get(r, op->kind, bytes_at(&op->a), op->a.len, op->value, op->value_size);
  if (op->rc != NULL) {
    *op->rc = status;
  }
  pthread_mutex_unlock(&r->lock);
  plugin_enter("envoyGoRequestSemaDec");
  r->plugin->sema_dec(&r->go);
  plugin_leave();
}

// ---- the log ----

EXPORT void envoyGoFilterLog(uint32_t level, void* message, int size) {
  static const char forced[] = "golang filter enforcing GC"; // by the overseer, many times a second
  if (size == sizeof(forced) - 1 && memcmp(message, forced, sizeof(forced) - 1) == 0) {
    return;
  }
  if (level > envoy_dynamic_module_type_log_level_Off) {
    misuse("log level %u: contrib's PANIC ends Envoy", level);
  }
  if (level < envoy_dynamic_module_type_log_level_Off) {
    CB(log)((envoy_dynamic_module_type_log_level)level, MODULE(message, (size_t)size));
  }
}

EXPORT uint32_t envoyGoFilterLogLevel(void) {
  for (uint32_t level = 0; level < envoy_dynamic_module_type_log_level_Off; level++) {
    if (CB(log_enabled)((envoy_dynamic_module_type_log_level)level)) {
      return level;
    }
  }
  return envoy_dynamic_module_type_log_level_Off;
}
