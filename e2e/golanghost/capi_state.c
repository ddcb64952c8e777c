// The functions of api.h that take a processState: cgo.cc and golang_filter.cc.
#include "host.h"

#include <stdlib.h>
#include <string.h>

#define KIND(name) envoy_dynamic_module_type_http_header_type_##name

// What Go passes as a string slice.
typedef struct {
  const char* p;
  ptrdiff_t n;
} go_string;

void op_post(request_t* r, op_t* op) {
  if (r->last == NULL) {
    r->first = op;
  } else {
    r->last->next = op;
  }
  r->last = op;
  CB(http_filter_scheduler_commit)(r->scheduler, 0);
}

void op_free(op_t* op) {
  bytes_free(&op->a);
  bytes_free(&op->b);
  bytes_free(&op->c);
  reply_free(op->reply);
  free(op);
}

void op_run(request_t* r, op_t* op) {
  if (op->kind < OP_CLEAR_ROUTE) {
    run_state_op(r, op);
  } else {
    run_request_op(r, op);
  }
  op_free(op);
}

static op_t* op_new(enum op_kind kind, state_t* s) {
  op_t* op = calloc(1, sizeof(*op));
  op->kind = kind;
  op->state = s;
  return op;
}

// enter checks what contrib's wrapper checks, in its order, and takes the lock.
static CAPIStatus enter(void* state, const char* what) {
  state_t* s = state;
  request_t* r = request_of(s);
  atomic_fetch_add_explicit(&r->crossings, 1, memory_order_relaxed);
  pthread_mutex_lock(&r->lock);
  CAPIStatus status = CAPIOK;
  if (!state_processing(s) && !r->go.is_golang_processing_log) {
    status = CAPINotInGo;
  } else if (r->destroyed) {
    // While OnDestroy runs the filter still exists; later it most likely does not.
    status = on_worker(r) ? CAPIFilterIsDestroy : CAPIFilterIsGone;
  } else if (!on_worker(r) && (s->continue_posted || s->reply_posted)) {
    misuse("%s from a goroutine after %s, in %s: it races with the worker, which may have taken the request away", what,
           s->reply_posted ? "SendLocalReply" : "Continue", state_name(s));
  }
  if (status != CAPIOK) {
    pthread_mutex_unlock(&r->lock);
  }
  return status;
}

static CAPIStatus leave(void* state, CAPIStatus status) {
  pthread_mutex_unlock(&request_of(state)->lock);
  return status;
}

// ---- Continue and replies ----

// once ends the process when a request that was already continued or answered
// is continued or answered again.
static void once(state_t* s, const char* what) {
  if (s->continue_posted || s->reply_posted) {
    misuse("%s after %s in %s: the request is continued or answered twice", what,
           s->reply_posted ? "SendLocalReply" : "Continue()", state_name(s));
  }
}

EXPORT CAPIStatus envoyGoFilterHttpContinue(void* state, int status) {
  state_t* s = state;
  request_t* r = request_of(s);
  pthread_mutex_lock(&r->lock);
  if (!r->destroyed && state_processing(s)) {
    once(s, "Continue()");
  }
  pthread_mutex_unlock(&r->lock);
  const CAPIStatus checked = enter(s, "Continue");
  if (checked != CAPIOK) {
    return checked;
  }
  if (!state_processing(s)) {
    misuse("Continue() from OnLog or OnStreamComplete, in %s", state_name(s));
  }
  s->continue_posted = true;
  op_t* op = op_new(OP_CONTINUE, s);
  op->number = status;
  op_post(r, op);
  return leave(s, CAPIOK);
}

static CAPIStatus post_reply(state_t* s, reply_t* p, const char* what) {
  request_t* r = request_of(s);
  pthread_mutex_lock(&r->lock);
  if (!r->destroyed && state_processing(s)) {
    once(s, what);
  }
  pthread_mutex_unlock(&r->lock);
  const CAPIStatus checked = enter(s, what);
  if (checked != CAPIOK) {
    reply_free(p);
    return checked;
  }
  if (!state_processing(s)) {
    misuse("%s from OnLog or OnStreamComplete, in %s", what, state_name(s));
  }
  s->reply_posted = true;
  op_t* op = op_new(OP_REPLY, s);
  op->reply = p;
  op_post(r, op);
  return leave(s, CAPIOK);
}

EXPORT CAPIStatus envoyGoFilterHttpSendLocalReply(void* s, int code, void* body, int body_size, void* headers,
                                                  int headers_size, long long int grpc, void* details,
                                                  int details_size) {
  reply_t* p = reply_new(code, body, (size_t)body_size, grpc, details, (size_t)details_size);
  const go_string* list = headers;
  for (int i = 0; i + 1 < headers_size; i += 2) {
    if (list[i + 1].n > 0) { // contrib drops empty values
      reply_header(p, list[i].p, (size_t)list[i].n, list[i + 1].p, (size_t)list[i + 1].n);
    }
  }
  return post_reply(s, p, "SendLocalReply");
}

EXPORT CAPIStatus envoyGoFilterHttpSendPanicReply(void* state, void* details, int size) {
  state_t* s = state;
  request_t* r = request_of(s);
  pthread_mutex_lock(&r->lock);
  const bool destroyed = r->destroyed;
  filter_config_t* c = r->config;
  pthread_mutex_unlock(&r->lock);
  if (!destroyed) {
    config_panicked(c);
    host_log(4, "[go_plugin_http][%s] filter paniced with error details: %.*s", config_name(c), size,
             (const char*)details);
    if (config_aborts_on_panic(c)) {
      misuse("panic in %s: %.*s", state_name(s), size, (const char*)details);
    }
  }
  static const char text[] = "error happened in filter\r\n";
  return post_reply(s, reply_new(500, text, sizeof(text) - 1, 0, NULL, 0), "the reply to a panic");
}

// ---- headers ----

static envoy_dynamic_module_type_http_header_type header_kind(const state_t* s, bool trailers) {
  if (s->go.is_encoding) {
    return trailers ? KIND(ResponseTrailer) : KIND(ResponseHeader);
  }
  return trailers ? KIND(RequestTrailer) : KIND(RequestHeader);
}

EXPORT CAPIStatus envoyGoFilterHttpGetHeader(void* state, void* key, int key_size, uint64_t* value, int* value_size) {
  state_t* s = state;
  const CAPIStatus status = enter(s, "GetRaw");
  if (status != CAPIOK) {
    return status;
  }
  if (!s->has_headers) {
    return leave(s, CAPIInvalidPhase);
  }
  const header_t* e = headers_find(&s->headers, key, (size_t)key_size);
  if (e != NULL) {
    // Go keeps this pointer: it faults once the map is no longer the plugin's.
    char* copy = guarded_new(e->value_size == 0 ? 1 : e->value_size);
    memcpy(copy, e->value, e->value_size);
    s->raw.list = realloc(s->raw.list, (s->raw.count + 1) * sizeof(*s->raw.list));
    s->raw.list[s->raw.count++] = copy;
    *value = (uint64_t)(uintptr_t)copy;
    *value_size = (int)e->value_size;
  }
  return leave(s, CAPIOK);
}

static CAPIStatus copy_map(state_t* s, bool trailers, go_string* strings, char* buffer) {
  const CAPIStatus status = enter(s, trailers ? "access to trailers" : "access to headers");
  if (status != CAPIOK) {
    return status;
  }
  if (trailers ? !s->has_trailers : !s->has_headers) {
    return leave(s, CAPIInvalidPhase);
  }
  const headers_t* map = trailers ? &s->trailers : &s->headers;
  // Go made room for what it was told at the callback of this phase.
  if (map->count > s->given_count || map->bytes > s->given_bytes) {
    misuse("first access to a header map that has grown since its callback (%zu headers, %zu bytes; now %zu, %zu): "
           "contrib writes past Go's memory",
           s->given_count, s->given_bytes, map->count, map->bytes);
  }
  for (size_t i = 0; i < map->count; i++) {
    const header_t* e = &map->list[i];
    strings[2 * i] = (go_string){buffer, (ptrdiff_t)e->key_size};
    memcpy(buffer, e->key, e->key_size);
    buffer += e->key_size;
    strings[2 * i + 1].n = (ptrdiff_t)e->value_size;
    if (e->value_size > 0) { // else the pointer could be past Go's buffer
      strings[2 * i + 1].p = buffer;
      memcpy(buffer, e->value, e->value_size);
      buffer += e->value_size;
    }
  }
  return leave(s, CAPIOK);
}

EXPORT CAPIStatus envoyGoFilterHttpCopyHeaders(void* s, void* strings, void* buffer) {
  return copy_map(s, false, strings, buffer);
}

EXPORT CAPIStatus envoyGoFilterHttpCopyTrailers(void* s, void* strings, void* buffer) {
  return copy_map(s, true, strings, buffer);
}

// change changes a header in Envoy and in our copy. The lock is held.
static void change(state_t* s, bool trailers, const char* key, size_t key_size, const char* value, size_t value_size,
                   int how) {
  request_t* r = request_of(s);
  headers_t* map = trailers ? &s->trailers : &s->headers;
  const envoy_dynamic_module_type_http_header_type kind = header_kind(s, trailers);
  const envoy_dynamic_module_type_module_buffer name = MODULE(key, key_size);
  if (how != CHANGE_REMOVE && value_size == 0) {
    limitation("an empty value for header %.*s: a dynamic module can't set one", (int)key_size, key);
  }
  if (how != CHANGE_ADD) {
    headers_remove(map, key, key_size);
  }
  if (how != CHANGE_REMOVE) {
    headers_add(map, key, key_size, value, value_size);
  }
  if (s->synthetic) {
    return;
  }
  switch (how) {
  case CHANGE_SET:
    CB(http_set_header)(r->envoy, kind, name, MODULE(value, value_size));
    break;
  case CHANGE_ADD:
    CB(http_add_header)(r->envoy, kind, name, MODULE(value, value_size));
    break;
  default:
    CB(http_set_header)(r->envoy, kind, name, MODULE(NULL, 0));
  }
}

static CAPIStatus change_map(state_t* s, bool trailers, const void* key, int key_size, const void* value,
                             int value_size, int how) {
  const CAPIStatus status = enter(s, trailers ? "change of trailers" : "change of headers");
  if (status != CAPIOK) {
    return status;
  }
  if (trailers ? !s->has_trailers : !s->has_headers) {
    return leave(s, CAPIInvalidPhase);
  }
  request_t* r = request_of(s);
  if (on_worker(r)) {
    change(s, trailers, key, (size_t)key_size, value, (size_t)value_size, how);
  } else {
    op_t* op = op_new(trailers ? OP_TRAILER : OP_HEADER, s);
    bytes_append(&op->a, key, (size_t)key_size);
    bytes_append(&op->b, value, (size_t)value_size);
    op->number = how;
    op_post(r, op);
  }
  return leave(s, CAPIOK);
}

static int how_of(headerAction action) {
  if (action != HeaderSet && action != HeaderAdd) {
    misuse("unknown header action %d: contrib's RELEASE_ASSERT ends Envoy", (int)action);
  }
  return action == HeaderSet ? CHANGE_SET : CHANGE_ADD;
}

EXPORT CAPIStatus envoyGoFilterHttpSetHeaderHelper(void* s, void* key, int key_size, void* value, int value_size,
                                                   headerAction action) {
  return change_map(s, false, key, key_size, value, value_size, how_of(action));
}

EXPORT CAPIStatus envoyGoFilterHttpRemoveHeader(void* s, void* key, int key_size) {
  return change_map(s, false, key, key_size, NULL, 0, CHANGE_REMOVE);
}

EXPORT CAPIStatus envoyGoFilterHttpSetTrailer(void* s, void* key, int key_size, void* value, int value_size,
                                              headerAction action) {
  return change_map(s, true, key, key_size, value, value_size, how_of(action));
}

EXPORT CAPIStatus envoyGoFilterHttpRemoveTrailer(void* s, void* key, int key_size) {
  return change_map(s, true, key, key_size, NULL, 0, CHANGE_REMOVE);
}

// ---- bodies ----

static CAPIStatus enter_buffer(void* s, uint64_t handle, const char* what) {
  CAPIStatus status = enter(s, what);
  if (status == CAPIOK && !has_doing(s, handle)) {
    status = leave(s, CAPIInvalidPhase);
  }
  return status;
}

EXPORT CAPIStatus envoyGoFilterHttpGetBuffer(void* s, uint64_t handle, void* into) {
  const CAPIStatus status = enter_buffer(s, handle, "Bytes");
  if (status != CAPIOK) {
    return status;
  }
  const bytes_t* b = &((body_t*)(uintptr_t)handle)->bytes;
  memcpy(into, bytes_at(b), b->len);
  return leave(s, CAPIOK);
}

EXPORT CAPIStatus envoyGoFilterHttpDrainBuffer(void* s, uint64_t handle, uint64_t size) {
  const CAPIStatus status = enter_buffer(s, handle, "Drain");
  if (status != CAPIOK) {
    return status;
  }
  bytes_t* b = &((body_t*)(uintptr_t)handle)->bytes;
  if (size > b->len) {
    misuse("Drain of %llu bytes from a buffer of %zu: contrib asserts", (unsigned long long)size, b->len);
  }
  bytes_drain(b, size);
  return leave(s, CAPIOK);
}

EXPORT CAPIStatus envoyGoFilterHttpSetBufferHelper(void* s, uint64_t handle, void* data, int size,
                                                   bufferAction action) {
  const CAPIStatus status = enter_buffer(s, handle, "change of a body");
  if (status != CAPIOK) {
    return status;
  }
  bytes_t* b = &((body_t*)(uintptr_t)handle)->bytes;
  if (action == Set) {
    bytes_drain(b, b->len);
  }
  if (action == Prepend) {
    bytes_prepend(b, data, (size_t)size);
  } else {
    bytes_append(b, data, (size_t)size);
  }
  return leave(s, CAPIOK);
}

static void add_data(state_t* s, const void* data, size_t size) {
  if (s->synthetic) {
    limitation("AddData in a reply of the plugin's own");
  }
  CB(http_append_body)
  (request_of(s)->envoy,
   s->go.is_encoding ? envoy_dynamic_module_type_http_body_type_BufferedResponseBody
                     : envoy_dynamic_module_type_http_body_type_BufferedRequestBody,
   MODULE(data, size));
}

EXPORT CAPIStatus envoyGoFilterHttpAddData(void* state, void* data, int size, bool is_streaming) {
  (void)is_streaming; // a dynamic module always adds as if streaming
  state_t* s = state;
  const CAPIStatus status = enter(s, "AddData");
  if (status != CAPIOK) {
    return status;
  }
  if (s->go.state == StateProcessingData) {
    host_log(4, "golanghost: AddData when processing data is not supported, use BufferInstance.Append");
    return leave(s, CAPIInvalidPhase);
  }
  if (on_worker(request_of(s))) {
    leave(s, CAPIOK);
    add_data(s, data, (size_t)size);
    return CAPIOK;
  }
  op_t* op = op_new(OP_ADD_DATA, s);
  bytes_append(&op->a, data, (size_t)size);
  op_post(request_of(s), op);
  return leave(s, CAPIYield);
}

EXPORT CAPIStatus envoyGoFilterHttpInjectData(void* state, void* data, int size) {
  (void)data, (void)size;
  state_t* s = state;
  const CAPIStatus status = enter(s, "InjectData");
  if (status != CAPIOK) {
    return status;
  }
  if (s->go.state != StateProcessingData) {
    return leave(s, CAPIInvalidPhase);
  }
  if (on_worker(request_of(s))) {
    return leave(s, CAPIInvalidScene);
  }
  limitation("InjectData: dynamic modules have nothing like it");
}

// ---- upstream ----

EXPORT CAPIStatus envoyGoFilterHttpSetUpstreamOverrideHost(void* state, void* host, int size, bool strict) {
  state_t* s = state;
  const CAPIStatus status = enter(s, "SetUpstreamOverrideHost");
  if (status != CAPIOK) {
    return status;
  }
  request_t* r = request_of(s);
  if (s->go.is_encoding) {
    return leave(s, CAPIInvalidPhase);
  }
  if (on_worker(r)) {
    const bool ok = CB(http_set_upstream_override_host)(r->envoy, MODULE(host, (size_t)size), strict);
    return leave(s, ok ? CAPIOK : CAPIInvalidIPAddress);
  }
  if (strict) {
    misuse("SetUpstreamOverrideHost(strict) from a goroutine: contrib forgets strict there");
  }
  op_t* op = op_new(OP_OVERRIDE_HOST, s);
  bytes_append(&op->a, host, (size_t)size);
  op_post(r, op);
  return leave(s, CAPIOK);
}

// ---- on the worker ----

void run_state_op(request_t* r, op_t* op) {
  state_t* s = op->state;
  reply_t* p = op->reply;
  op->reply = NULL;
  switch (op->kind) {
  case OP_CONTINUE:
    pthread_mutex_lock(&r->lock);
    s->continue_posted = false;
    pthread_mutex_unlock(&r->lock);
    continue_from_go(s, op->number);
    break;
  case OP_REPLY:
    pthread_mutex_lock(&r->lock);
    s->reply_posted = false;
    pthread_mutex_unlock(&r->lock);
    release(s);
    bytes_free(&s->waiting);
    bytes_free(&s->out);
    if (!s->go.is_encoding) {
      pthread_mutex_lock(&r->lock);
      s->go.state = StateWaitingHeader;
      pthread_mutex_unlock(&r->lock);
    }
    reply_start(s, p);
    break;
  case OP_HEADER:
  case OP_TRAILER: {
    const bool trailers = op->kind == OP_TRAILER;
    pthread_mutex_lock(&r->lock);
    if (trailers ? s->has_trailers : s->has_headers) {
      change(s, trailers, bytes_at(&op->a), op->a.len, bytes_at(&op->b), op->b.len, op->number);
    }
    pthread_mutex_unlock(&r->lock);
    break;
  }
  case OP_ADD_DATA:
    add_data(s, bytes_at(&op->a), op->a.len);
    break;
  case OP_OVERRIDE_HOST:
    CB(http_set_upstream_override_host)(r->envoy, MODULE(bytes_at(&op->a), op->a.len), false);
    break;
  default:
    abort();
  }
}
