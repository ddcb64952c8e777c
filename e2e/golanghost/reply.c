// Replies of the plugin's own. In contrib they run through the plugin's
// Encode* like each response; a dynamic module's own replies don't, so they
// are run through it here first.
#include "host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct reply {
  int status;
  int64_t grpc;
  headers_t headers;
  bytes_t body, details;
  bool has_body; // that Encode* gets to see
};

reply_t* reply_new(int status, const char* body, size_t body_size, int64_t grpc, const char* details,
                   size_t details_size) {
  reply_t* p = calloc(1, sizeof(*p));
  p->status = status;
  p->grpc = grpc;
  bytes_append(&p->body, body, body_size);
  bytes_append(&p->details, details, details_size);
  return p;
}

void reply_header(reply_t* p, const char* key, size_t key_size, const char* value, size_t value_size) {
  headers_add(&p->headers, key, key_size, value, value_size);
}

void reply_free(reply_t* p) {
  if (p != NULL) {
    headers_free(&p->headers);
    bytes_free(&p->body);
    bytes_free(&p->details);
    free(p);
  }
}

static envoy_dynamic_module_type_envoy_buffer request_header(request_t* r, const char* key) {
  envoy_dynamic_module_type_envoy_buffer value = {NULL, 0};
  CB(http_get_header)
  (r->envoy, envoy_dynamic_module_type_http_header_type_RequestHeader, MODULE(key, strlen(key)), &value, 0, NULL);
  return value;
}

static bool is_grpc(request_t* r) {
  static const char grpc[] = "application/grpc";
  const envoy_dynamic_module_type_envoy_buffer type = request_header(r, "content-type");
  return type.length >= sizeof(grpc) - 1 && strncasecmp(type.ptr, grpc, sizeof(grpc) - 1) == 0 &&
         (type.length == sizeof(grpc) - 1 || strchr("+;", type.ptr[sizeof(grpc) - 1]) != NULL);
}

static bool is_head(request_t* r) {
  const envoy_dynamic_module_type_envoy_buffer method = request_header(r, ":method");
  return method.length == 4 && memcmp(method.ptr, "HEAD", 4) == 0;
}

static void set(headers_t* h, const char* key, const char* value, size_t size) {
  headers_remove(h, key, strlen(key));
  headers_add(h, key, strlen(key), value, size);
}

// present makes the headers that Envoy would show the filters.
static void present(request_t* r, const reply_t* p, headers_t* h, bool grpc) {
  char number[24];
  const int size = snprintf(number, sizeof(number), "%d", grpc ? 200 : p->status);
  headers_add(h, ":status", 7, number, (size_t)size);
  for (size_t i = 0; i < p->headers.count; i++) {
    const header_t* e = &p->headers.list[i];
    headers_add(h, e->key, e->key_size, e->value, e->value_size);
  }
  if (grpc) {
    set(h, "content-type", "application/grpc", 16);
    if (headers_find(h, "grpc-status", 11) == NULL) {
      const int digits = snprintf(number, sizeof(number), "%lld", (long long)p->grpc);
      headers_add(h, "grpc-status", 11, number, (size_t)digits);
    }
    if (p->body.len > 0 && !is_head(r)) {
      set(h, "grpc-message", bytes_at(&p->body), p->body.len);
    }
    headers_remove(h, "content-length", 14);
  } else if (p->body.len > 0) {
    const int digits = snprintf(number, sizeof(number), "%zu", p->body.len);
    set(h, "content-length", number, (size_t)digits);
    if (headers_find(h, "content-type", 12) == NULL) {
      headers_add(h, "content-type", 12, "text/plain", 10);
    }
  } else {
    headers_remove(h, "content-length", 14);
    headers_remove(h, "content-type", 12);
  }
}

// deliver gives the reply to Envoy. r may be destroyed when it returns.
static void deliver(request_t* r, reply_t* p, const headers_t* h, bool grpc) {
  envoy_dynamic_module_type_module_http_header* list = calloc(h->count + 1, sizeof(*list));
  size_t count = 0;
  int status = p->status;
  for (size_t i = 0; i < h->count; i++) {
    const header_t* e = &h->list[i];
    if (e->key_size == 7 && memcmp(e->key, ":status", 7) == 0) {
      char digits[8] = {0};
      memcpy(digits, e->value, e->value_size < 7 ? e->value_size : 7);
      status = grpc ? p->status : atoi(digits);
      continue;
    }
    // These Envoy makes itself, from the body.
    if ((e->key_size == 14 && memcmp(e->key, "content-length", 14) == 0) ||
        (grpc && ((e->key_size == 12 && (memcmp(e->key, "grpc-message", 12) == 0 ||
                                         memcmp(e->key, "content-type", 12) == 0))))) {
      continue;
    }
    list[count++] = (envoy_dynamic_module_type_module_http_header){e->key, e->key_size, e->value, e->value_size};
  }
  r->replied = true;
  CB(http_send_response)
  (r->envoy, (uint32_t)status, list, count, MODULE(bytes_at(&p->body), p->body.len),
   MODULE(bytes_at(&p->details), p->details.len));
  free(list);
}

// finish gives Envoy what Encode* left of the reply.
static void finish(request_t* r) {
  reply_t* p = r->reply;
  state_t* s = &r->encoding;
  drop_headers(s); // into kept, if they are not there yet
  if (p->has_body) {
    bytes_free(&p->body);
    bytes_move(&p->body, &s->out);
  }
  headers_t h = s->kept;
  s->kept = (headers_t){0};
  r->reply = NULL;
  s->synthetic = false;
  deliver(r, p, &h, is_grpc(r));
  headers_free(&h);
  reply_free(p);
}

void reply_start(state_t* from, reply_t* p) {
  request_t* r = request_of(from);
  state_t* s = &r->encoding;
  const bool grpc = is_grpc(r);
  headers_t h = {0};
  present(r, p, &h, grpc);
  if (r->reply != NULL || r->replied || s->go.state != StateWaitingHeader) {
    // A response is on its way already: Envoy sends it without the filters, or
    // resets.
    reply_t* old = r->reply;
    r->reply = NULL;
    s->synthetic = false;
    deliver(r, p, &h, grpc);
    headers_free(&h);
    reply_free(p);
    reply_free(old);
    return;
  }
  p->has_body = !grpc && p->body.len > 0 && !is_head(r);
  r->reply = p;
  pthread_mutex_lock(&r->lock);
  headers_free(&s->headers);
  s->headers = h;
  s->has_headers = true;
  s->synthetic = true;
  pthread_mutex_unlock(&r->lock);
  s->end_stream = !p->has_body;
  const bool done = run_headers(s, !p->has_body);
  if (!p->has_body) {
    if (done) {
      finish(r);
    }
    return;
  }
  // Envoy encodes the body right after the headers, whatever they answered.
  bytes_t body = {0};
  bytes_append(&body, bytes_at(&p->body), p->body.len);
  s->end_stream = true;
  s->had_data = true;
  if (state_processing(s)) {
    s->waiting = body;
  } else if (run_data(s, &body, true)) {
    release(s);
    finish(r);
  }
}

void reply_resume(request_t* r) { finish(r); }
