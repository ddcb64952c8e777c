// The JSON that Envoy hands over for the filter and for a route.
#ifndef GOLANGHOST_SETTINGS_H
#define GOLANGHOST_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>

#define MAX_LEVELS 8

typedef struct {
  char* library_id;
  char* library_path;
  char* plugin_name;
  // Serialized google.protobuf.Any: the plugin's config. A route may have
  // several, outermost first, which contrib merges one after the other.
  struct {
    char* data;
    size_t size;
  } levels[MAX_LEVELS];
  size_t level_count;
  unsigned gc_interval_ms; // between two forced garbage collections; 0: none
  unsigned blocked_ms;     // a callback that takes longer is a misuse; 0: none
  bool log_start;          // call OnLogDownstreamStart
  bool abort_on_panic;     // a panic is a misuse, not just a 500
} settings_t;

// settings_parse and settings_complete say what is wrong in Envoy's log.
bool settings_parse(settings_t* s, const char* json, size_t size);
bool settings_complete(settings_t* s, bool route);
void settings_free(settings_t* s);

#endif
