// google.protobuf.Value and Struct on the wire.
#include "host.h"

#include <stdlib.h>
#include <string.h>

#define DYNAMIC envoy_dynamic_module_type_metadata_source_Dynamic

// Field numbers of google.protobuf.Value.
enum { VALUE_NULL = 1, VALUE_NUMBER = 2, VALUE_STRING = 3, VALUE_BOOL = 4, VALUE_STRUCT = 5, VALUE_LIST = 6 };

typedef struct {
  const char *at, *end;
} wire_t;

static bool varint(wire_t* w, uint64_t* out) {
  *out = 0;
  for (unsigned shift = 0; w->at < w->end && shift < 64; shift += 7) {
    const uint8_t byte = (uint8_t)*w->at++;
    *out |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) {
      return true;
    }
  }
  return false;
}

typedef struct {
  unsigned field;
  wire_t data;     // of length-delimited fields
  uint64_t number; // of the others
} field_t;

static bool next(wire_t* w, field_t* f) {
  uint64_t tag;
  if (w->at == w->end || !varint(w, &tag)) {
    return false;
  }
  f->field = (unsigned)(tag >> 3);
  f->number = 0;
  switch (tag & 7) {
  case 0:
    return varint(w, &f->number);
  case 1:
    if (w->end - w->at < 8) {
      return false;
    }
    memcpy(&f->number, w->at, 8);
    w->at += 8;
    return true;
  case 2:
    if (!varint(w, &f->number) || (uint64_t)(w->end - w->at) < f->number) {
      return false;
    }
    f->data = (wire_t){w->at, w->at + f->number};
    w->at += f->number;
    return true;
  }
  return false;
}

static double as_double(uint64_t bits) {
  double number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

static bool list_set(void* envoy, envoy_dynamic_module_type_module_buffer ns,
                     envoy_dynamic_module_type_module_buffer key, wire_t list) {
  field_t item, value;
  while (next(&list, &item)) {
    wire_t w = item.data;
    if (!next(&w, &value)) {
      return false;
    }
    switch (value.field) {
    case VALUE_NUMBER:
      CB(http_add_dynamic_metadata_list_number)(envoy, ns, key, as_double(value.number));
      break;
    case VALUE_STRING:
      CB(http_add_dynamic_metadata_list_string)(envoy, ns, key, MODULE(value.data.at, value.number));
      break;
    case VALUE_BOOL:
      CB(http_add_dynamic_metadata_list_bool)(envoy, ns, key, value.number != 0);
      break;
    default:
      return false;
    }
  }
  return true;
}

static bool same(const bytes_t* b, const char* data, size_t size) {
  return b->len == size && memcmp(bytes_at(b), data, size) == 0;
}

static bytes_t* noted(metadata_t* m, const char* ns, size_t ns_size, const char* key, size_t key_size) {
  for (size_t i = 0; i < m->count; i++) {
    if (same(&m->list[i].ns, ns, ns_size) && same(&m->list[i].key, key, key_size)) {
      return &m->list[i].value;
    }
  }
  return NULL;
}

static void note(metadata_t* m, const bytes_t* ns, const bytes_t* key, const char* value, size_t size) {
  bytes_t* at = noted(m, bytes_at(ns), ns->len, bytes_at(key), key->len);
  if (at == NULL) {
    m->list = realloc(m->list, (m->count + 1) * sizeof(*m->list));
    memset(&m->list[m->count], 0, sizeof(*m->list));
    bytes_append(&m->list[m->count].ns, bytes_at(ns), ns->len);
    bytes_append(&m->list[m->count].key, bytes_at(key), key->len);
    at = &m->list[m->count++].value;
  }
  bytes_free(at);
  bytes_append(at, value, size);
}

void metadata_free(metadata_t* m) {
  for (size_t i = 0; i < m->count; i++) {
    bytes_free(&m->list[i].ns);
    bytes_free(&m->list[i].key);
    bytes_free(&m->list[i].value);
  }
  free(m->list);
  *m = (metadata_t){0};
}

bool metadata_set(request_t* r, const bytes_t* ns_bytes, const bytes_t* key_bytes, const char* data, size_t size) {
  void* envoy = r->envoy;
  note(&r->metadata, ns_bytes, key_bytes, data, size);
  const envoy_dynamic_module_type_module_buffer ns = MODULE(bytes_at(ns_bytes), ns_bytes->len);
  const envoy_dynamic_module_type_module_buffer key = MODULE(bytes_at(key_bytes), key_bytes->len);
  wire_t w = {data, data + size};
  field_t value;
  if (!next(&w, &value)) {
    return false;
  }
  switch (value.field) {
  case VALUE_NUMBER:
    CB(http_set_dynamic_metadata_number)(envoy, ns, key, as_double(value.number));
    return true;
  case VALUE_STRING:
    CB(http_set_dynamic_metadata_string)(envoy, ns, key, MODULE(value.data.at, value.number));
    return true;
  case VALUE_BOOL:
    CB(http_set_dynamic_metadata_bool)(envoy, ns, key, value.number != 0);
    return true;
  case VALUE_LIST:
    return list_set(envoy, ns, key, value.data);
  }
  return false;
}

static void put_varint(bytes_t* b, uint64_t number) {
  char bytes[10];
  size_t n = 0;
  do {
    bytes[n++] = (char)((number & 0x7f) | (number > 0x7f ? 0x80 : 0));
    number >>= 7;
  } while (number > 0);
  bytes_append(b, bytes, n);
}

static void put_bytes(bytes_t* b, unsigned field, const char* data, size_t size) {
  put_varint(b, field << 3 | 2);
  put_varint(b, size);
  bytes_append(b, data, size);
}

static void put_double(bytes_t* b, double number) {
  put_varint(b, VALUE_NUMBER << 3 | 1);
  bytes_append(b, &number, sizeof(number));
}

static void put_bool(bytes_t* b, bool value) {
  put_varint(b, VALUE_BOOL << 3);
  put_varint(b, value ? 1 : 0);
}

// one_value writes the Value of a key that another filter has set, by asking for
// each type it could have.
static void one_value(void* envoy, envoy_dynamic_module_type_module_buffer ns,
                      envoy_dynamic_module_type_module_buffer key, bytes_t* out) {
  envoy_dynamic_module_type_envoy_buffer text;
  double number;
  bool boolean;
  size_t count;
  if (CB(http_get_metadata_string)(envoy, DYNAMIC, ns, key, &text)) {
    put_bytes(out, VALUE_STRING, text.ptr, text.length);
  } else if (CB(http_get_metadata_number)(envoy, DYNAMIC, ns, key, &number)) {
    put_double(out, number);
  } else if (CB(http_get_metadata_bool)(envoy, DYNAMIC, ns, key, &boolean)) {
    put_bool(out, boolean);
  } else if (CB(http_get_metadata_list_size)(envoy, DYNAMIC, ns, key, &count)) {
    bytes_t list = {0};
    for (size_t i = 0; i < count; i++) {
      bytes_t item = {0};
      if (CB(http_get_metadata_list_string)(envoy, DYNAMIC, ns, key, i, &text)) {
        put_bytes(&item, VALUE_STRING, text.ptr, text.length);
      } else if (CB(http_get_metadata_list_number)(envoy, DYNAMIC, ns, key, i, &number)) {
        put_double(&item, number);
      } else if (CB(http_get_metadata_list_bool)(envoy, DYNAMIC, ns, key, i, &boolean)) {
        put_bool(&item, boolean);
      }
      put_bytes(&list, 1, bytes_at(&item), item.len);
      bytes_free(&item);
    }
    put_bytes(out, VALUE_LIST, bytes_at(&list), list.len);
    bytes_free(&list);
  }
}

bool metadata_get(request_t* r, const char* ns_data, size_t ns_size, bytes_t* out) {
  const envoy_dynamic_module_type_module_buffer ns = MODULE(ns_data, ns_size);
  void* envoy = r->envoy;
  const size_t count = CB(http_get_metadata_keys_count)(envoy, DYNAMIC, ns);
  if (count == 0) {
    return false;
  }
  envoy_dynamic_module_type_envoy_buffer* keys = calloc(count, sizeof(*keys));
  const bool ok = CB(http_get_metadata_keys)(envoy, DYNAMIC, ns, keys);
  for (size_t i = 0; ok && i < count; i++) {
    bytes_t value = {0}, entry = {0};
    const bytes_t* own = noted(&r->metadata, ns_data, ns_size, keys[i].ptr, keys[i].length);
    if (own != NULL) {
      bytes_append(&value, bytes_at(own), own->len);
    } else {
      one_value(envoy, ns, MODULE(keys[i].ptr, keys[i].length), &value);
    }
    put_bytes(&entry, 1, keys[i].ptr, keys[i].length);
    put_bytes(&entry, 2, bytes_at(&value), value.len);
    put_bytes(out, 1, bytes_at(&entry), entry.len);
    bytes_free(&value);
    bytes_free(&entry);
  }
  free(keys);
  return ok;
}
