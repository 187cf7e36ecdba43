// Preloaded: hides every HIP runtime but those in folders that begin with $VISIBLE_HIP.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *dlopen(const char *name, int flags) {
  void *(*original)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
  const char *visible = getenv("VISIBLE_HIP");
  char absent[4096];
  if (name == NULL || strstr(name, "libamdhip64") == NULL) return original(name, flags);
  if (visible != NULL && strncmp(name, visible, strlen(visible)) == 0) return original(name, flags);
  snprintf(absent, sizeof(absent), "/absent/%s", name);
  return original(absent, flags);
}
