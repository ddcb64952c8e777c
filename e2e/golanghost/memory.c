#include "host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

static void* need(void* memory) {
  if (memory == NULL) {
    abort(); // as Envoy does
  }
  return memory;
}

void bytes_append(bytes_t* b, const void* data, size_t size) {
  if (size == 0) {
    return;
  }
  if (b->off + b->len + size > b->cap) {
    const size_t cap = 2 * (b->len + size);
    char* grown = need(malloc(cap));
    if (b->len > 0) {
      memcpy(grown, b->data + b->off, b->len);
    }
    free(b->data);
    b->data = grown;
    b->off = 0;
    b->cap = cap;
  }
  memcpy(b->data + b->off + b->len, data, size);
  b->len += size;
}

void bytes_prepend(bytes_t* b, const void* data, size_t size) {
  bytes_t joined = {0};
  bytes_append(&joined, data, size);
  bytes_append(&joined, bytes_at(b), b->len);
  free(b->data);
  *b = joined;
}

void bytes_drain(bytes_t* b, size_t size) {
  if (size > b->len) {
    size = b->len;
  }
  b->off += size;
  b->len -= size;
}

void bytes_move(bytes_t* to, bytes_t* from) {
  if (to->len == 0) {
    free(to->data);
    *to = *from;
  } else {
    bytes_append(to, bytes_at(from), from->len);
    free(from->data);
  }
  *from = (bytes_t){0};
}

void bytes_free(bytes_t* b) {
  free(b->data);
  *b = (bytes_t){0};
}

void headers_add(headers_t* h, const char* key, size_t key_size, const char* value, size_t value_size) {
  if (h->count == h->cap) {
    h->cap = h->cap == 0 ? 32 : 2 * h->cap;
    h->list = need(realloc(h->list, h->cap * sizeof(*h->list)));
  }
  header_t* e = &h->list[h->count++];
  e->key = need(malloc(key_size + value_size + 1));
  for (size_t i = 0; i < key_size; i++) {
    e->key[i] = (char)(key[i] >= 'A' && key[i] <= 'Z' ? key[i] | 0x20 : key[i]);
  }
  e->value = e->key + key_size;
  if (value_size > 0) {
    memcpy(e->value, value, value_size);
  }
  e->key_size = key_size;
  e->value_size = value_size;
  h->bytes += key_size + value_size;
}

static bool header_is(const header_t* e, const char* key, size_t key_size) {
  return e->key_size == key_size && strncasecmp(e->key, key, key_size) == 0;
}

void headers_remove(headers_t* h, const char* key, size_t key_size) {
  size_t kept = 0;
  for (size_t i = 0; i < h->count; i++) {
    if (header_is(&h->list[i], key, key_size)) {
      h->bytes -= h->list[i].key_size + h->list[i].value_size;
      free(h->list[i].key);
    } else {
      h->list[kept++] = h->list[i];
    }
  }
  h->count = kept;
}

const header_t* headers_find(const headers_t* h, const char* key, size_t key_size) {
  for (size_t i = 0; i < h->count; i++) {
    if (header_is(&h->list[i], key, key_size)) {
      return &h->list[i];
    }
  }
  return NULL;
}

void headers_free(headers_t* h) {
  for (size_t i = 0; i < h->count; i++) {
    free(h->list[i].key);
  }
  free(h->list);
  *h = (headers_t){0};
}

#ifdef __SANITIZE_ADDRESS__

void* guarded_new(size_t size) { return need(calloc(1, size)); }
void guarded_free(void* memory) { free(memory); }

#else

typedef struct {
  void* pages;
  size_t size; // without the page that is never mapped
} guarded_t;

// In front of each object, at the start of its first page.
static const size_t front = 64;

// The pages that fault, oldest overwritten first.
static struct {
  pthread_mutex_t lock; // protects the rest
  guarded_t ring[QUARANTINE];
  size_t next;
} quarantine = {.lock = PTHREAD_MUTEX_INITIALIZER};

void* guarded_new(size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size = (size + 15) & ~(size_t)15;
  const size_t mapped = (size + front + page - 1) & ~(page - 1);
  char* pages = mmap(NULL, mapped + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED || mprotect(pages, mapped, PROT_READ | PROT_WRITE) != 0) {
    abort();
  }
  *(guarded_t*)pages = (guarded_t){pages, mapped};
  return pages + mapped - size;
}

void guarded_free(void* memory) {
  if (memory == NULL) {
    return;
  }
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  // The object ends at the last mapped page's end and may span several.
  char* first = (char*)((uintptr_t)memory & ~(page - 1));
  if ((size_t)((char*)memory - first) < front) {
    first -= page;
  }
  const guarded_t g = *(guarded_t*)first;
  if (g.pages != first) {
    misuse("memory freed twice, or never ours");
  }
  // A fresh mapping gives the memory back and faults from now on.
  mmap(g.pages, g.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  pthread_mutex_lock(&quarantine.lock);
  guarded_t* slot = &quarantine.ring[quarantine.next++ % QUARANTINE];
  const guarded_t old = *slot;
  *slot = g;
  pthread_mutex_unlock(&quarantine.lock);
  if (old.pages != NULL) {
    munmap(old.pages, old.size + page);
  }
}

#endif

static _Noreturn void die(const char* kind, const char* format, va_list args) {
  char text[1024];
  vsnprintf(text, sizeof(text), format, args);
  fprintf(stderr, "\ngolanghost: %s: %s\n", kind, text);
  fflush(stderr);
  abort();
}

void misuse(const char* format, ...) {
  va_list args;
  va_start(args, format);
  die("MISUSE", format, args);
}

void limitation(const char* format, ...) {
  va_list args;
  va_start(args, format);
  die("LIMITATION of the host", format, args);
}

void host_log(int level, const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  const int size = vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  if (size > 0) {
    CB(log)
    ((envoy_dynamic_module_type_log_level)level,
     MODULE(text, (size_t)size < sizeof(text) ? (size_t)size : sizeof(text) - 1));
  }
}
