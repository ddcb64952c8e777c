// A reader of one flat JSON object: strings, numbers, booleans and arrays of
// strings, which is all the host's config has.
#include "settings.h"

#include <stdlib.h>
#include <string.h>

#include "host.h"

typedef struct {
  const char *at, *end;
} json_t;

static void space(json_t* j) {
  while (j->at < j->end && strchr(" \t\r\n", *j->at) != NULL) {
    j->at++;
  }
}

static bool token(json_t* j, char c) {
  space(j);
  if (j->at < j->end && *j->at == c) {
    j->at++;
    return true;
  }
  return false;
}

// text reads a string into fresh memory; NULL if there is none.
static char* text(json_t* j) {
  if (!token(j, '"')) {
    return NULL;
  }
  char* out = malloc((size_t)(j->end - j->at) + 1);
  size_t size = 0;
  while (j->at < j->end && *j->at != '"') {
    char c = *j->at++;
    if (c == '\\' && j->at < j->end) {
      c = *j->at++;
      if (c == 'u' && j->end - j->at >= 4) {
        char hex[5] = {0};
        memcpy(hex, j->at, 4);
        j->at += 4;
        c = (char)strtoul(hex, NULL, 16); // only ASCII is ever escaped so
      } else if (c == 'n') {
        c = '\n';
      } else if (c == 't') {
        c = '\t';
      } else if (c == 'r') {
        c = '\r';
      }
    }
    out[size++] = c;
  }
  out[size] = 0;
  if (!token(j, '"')) {
    free(out);
    return NULL;
  }
  return out;
}

static bool base64(const char* in, char** out, size_t* size) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  *out = malloc(strlen(in) + 1);
  *size = 0;
  unsigned bits = 0, have = 0;
  for (; *in != 0 && *in != '='; in++) {
    const char* digit = strchr(digits, *in);
    if (digit == NULL) {
      return false;
    }
    bits = bits << 6 | (unsigned)(digit - digits);
    have += 6;
    if (have >= 8) {
      have -= 8;
      (*out)[(*size)++] = (char)(bits >> have);
    }
  }
  return true;
}

static bool level(settings_t* s, const char* encoded) {
  if (s->level_count == MAX_LEVELS ||
      !base64(encoded, &s->levels[s->level_count].data, &s->levels[s->level_count].size)) {
    host_log(4, "golanghost: plugin_config is not base64, or has more than %d levels", MAX_LEVELS);
    return false;
  }
  s->level_count++;
  return true;
}

static bool levels(settings_t* s, json_t* j) {
  if (!token(j, '[')) {
    char* one = text(j);
    const bool ok = one != NULL && level(s, one);
    free(one);
    return ok;
  }
  while (!token(j, ']')) {
    token(j, ',');
    char* one = text(j);
    const bool ok = one != NULL && level(s, one);
    free(one);
    if (!ok) {
      return false;
    }
  }
  return true;
}

static bool word(json_t* j, bool* into) {
  space(j);
  *into = j->end - j->at >= 4 && memcmp(j->at, "true", 4) == 0;
  if (*into || (j->end - j->at >= 5 && memcmp(j->at, "false", 5) == 0)) {
    j->at += *into ? 4 : 5;
    return true;
  }
  return false;
}

static bool number(json_t* j, unsigned* into) {
  space(j);
  char digits[32] = {0};
  for (size_t n = 0; j->at < j->end && n < sizeof(digits) - 1 && strchr("0123456789.+-eE", *j->at) != NULL; n++) {
    digits[n] = *j->at++;
  }
  *into = (unsigned)strtod(digits, NULL);
  return digits[0] != 0;
}

static bool field(settings_t* s, const char* key, json_t* j) {
  char** texts[] = {&s->library_id, &s->library_path, &s->plugin_name};
  const char* names[] = {"library_id", "library_path", "plugin_name"};
  for (size_t i = 0; i < 3; i++) {
    if (strcmp(key, names[i]) == 0) {
      free(*texts[i]);
      *texts[i] = text(j);
      return *texts[i] != NULL;
    }
  }
  if (strcmp(key, "plugin_config") == 0) {
    return levels(s, j);
  }
  if (strcmp(key, "gc_interval_ms") == 0) {
    return number(j, &s->gc_interval_ms);
  }
  if (strcmp(key, "blocked_ms") == 0) {
    return number(j, &s->blocked_ms);
  }
  if (strcmp(key, "log_start") == 0) {
    return word(j, &s->log_start);
  }
  if (strcmp(key, "abort_on_panic") == 0) {
    return word(j, &s->abort_on_panic);
  }
  return false;
}

bool settings_parse(settings_t* s, const char* data, size_t size) {
  *s = (settings_t){.gc_interval_ms = 20, .blocked_ms = 10000};
  json_t j = {data, data + size};
  bool ok = token(&j, '{');
  while (ok && !token(&j, '}')) {
    token(&j, ',');
    char* key = text(&j);
    ok = key != NULL && token(&j, ':') && field(s, key, &j);
    if (!ok) {
      host_log(4,
               "golanghost: filter_config: %s is unknown or wrong; valid: library_id, library_path, plugin_name "
               "(strings), plugin_config (base64 of a serialized Any; per route also a list, outermost first), "
               "gc_interval_ms, blocked_ms (numbers), log_start, abort_on_panic (booleans)",
               key == NULL ? "it" : key);
    }
    free(key);
  }
  return ok;
}

bool settings_complete(settings_t* s, bool route) {
  const bool filter = s->library_id != NULL && s->library_path != NULL && s->level_count == 1;
  if (s->plugin_name == NULL || s->level_count == 0 || (!route && !filter)) {
    host_log(4, "golanghost: filter_config: plugin_name and plugin_config are needed; library_id and library_path too "
                "but in a route's");
    return false;
  }
  return true;
}

void settings_free(settings_t* s) {
  free(s->library_id);
  free(s->library_path);
  free(s->plugin_name);
  for (size_t i = 0; i < s->level_count; i++) {
    free(s->levels[i].data);
  }
  *s = (settings_t){0};
}
