// An executable that has the golang filter's functions, as a contrib Envoy
// does, and loads golanghost. It prints what golanghost's init returned.
#include <dlfcn.h>
#include <stdio.h>

__attribute__((visibility("default"))) int envoyGoFilterHttpContinue(void* s, int status) { return s != NULL && status; }

int main(int count, char** arguments) {
  if (count != 2) {
    return 2;
  }
  void* module = dlopen(arguments[1], RTLD_LAZY | RTLD_GLOBAL);
  if (module == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  const char* (*init)(void);
  *(void**)&init = dlsym(module, "envoy_dynamic_module_on_program_init");
  const char* version = init();
  printf("%s\n", version == NULL ? "refused" : version);
  return 0;
}
