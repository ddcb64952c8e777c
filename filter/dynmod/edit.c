// Changing the body of a request that Envoy holds: the one place where shunt
// copies a body.
#include "hooks.h"

#include <stdlib.h>
#include <string.h>

#define CB(name) envoy_dynamic_module_callback_##name
#define BODY_KIND(name) envoy_dynamic_module_type_http_body_type_##name

typedef envoy_dynamic_module_type_http_body_type kind_t;

// A part of the body: what Envoy has buffered, or what came in this hook.
typedef struct {
  kind_t kind;
  shunt_buffer* chunks; // malloc's
  size_t count, size;
} part_t;

static void part_get(void* envoy, kind_t kind, bool there, part_t* p) {
  *p = (part_t){.kind = kind};
  p->count = there ? CB(http_get_body_chunks_size)(envoy, kind) : 0;
  if (p->count == 0) {
    return;
  }
  p->chunks = malloc(p->count * sizeof(*p->chunks));
  if (p->chunks == NULL) {
    abort(); // as Envoy itself does when memory ends
  }
  if (!CB(http_get_body_chunks)(envoy, kind, p->chunks)) {
    p->count = 0;
  }
  for (size_t i = 0; i < p->count; i++) {
    p->size += p->chunks[i].length;
  }
}

// part_copy appends the part's bytes from one offset of the body to another;
// base is the part's own.
static char* part_copy(char* into, const part_t* p, size_t base, size_t from, size_t to) {
  for (size_t i = 0; i < p->count; base += p->chunks[i++].length) {
    const size_t end = base + p->chunks[i].length;
    const size_t first = from > base ? from : base, last = to < end ? to : end;
    if (first < last) {
      memcpy(into, p->chunks[i].ptr + (first - base), last - first);
      into += last - first;
    }
  }
  return into;
}

void shunt_edit_body(void* envoy, bool body_hook, size_t offset, size_t length,
                     envoy_dynamic_module_type_module_buffer with) {
  part_t buffered, received;
  part_get(envoy, BODY_KIND(ReceivedRequestBody), body_hook, &received);
  // A filter before us may hand over what it buffered: the same bytes, once.
  part_get(envoy, BODY_KIND(BufferedRequestBody), !body_hook || !CB(http_received_buffered_request_body)(envoy), &buffered);
  const size_t size = buffered.size + received.size;
  if (offset > size || length > size - offset) {
    const char text[] = "shunt: internal error: an edit is outside of the request's body";
    shunt_log(envoy_dynamic_module_type_log_level_Error, text, sizeof(text) - 1);
    free(buffered.chunks);
    free(received.chunks);
    return;
  }
  // Envoy's buffers only let go of bytes in front and take bytes at the end, so
  // the body is written anew.
  char* whole = malloc(size - length + with.length + 1);
  if (whole == NULL) {
    abort();
  }
  char* end = part_copy(whole, &buffered, 0, 0, offset);
  end = part_copy(end, &received, buffered.size, 0, offset);
  memcpy(end, with.ptr, with.length);
  end = part_copy(end + with.length, &buffered, 0, offset + length, size);
  end = part_copy(end, &received, buffered.size, offset + length, size);
  if (buffered.size > 0) {
    CB(http_drain_body)(envoy, buffered.kind, buffered.size);
  }
  if (received.size > 0) {
    CB(http_drain_body)(envoy, received.kind, received.size);
  }
  CB(http_append_body)(envoy, body_hook ? received.kind : buffered.kind,
                       (envoy_dynamic_module_type_module_buffer){whole, (size_t)(end - whole)});
  free(whole);
  free(buffered.chunks);
  free(received.chunks);
}
