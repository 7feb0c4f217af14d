/* nccl_library.c: finds NCCL when a program asks for it. Linking it instead would keep libzero from loading
 * where there is none; and this way a program that brings its own NCCL (Python packages do) has one, not two.
 */
#include "comm/nccl_comm.h"

#include <dlfcn.h>
#include <string.h>

int zr_nccl_load(const char *library, struct zr_nccl_api *api)
{
    const char *path = library ? library : "libnccl.so.2";
    memset(api, 0, sizeof *api);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return zr_fail(ZR_ERR_NOTSUP, "there is no NCCL: %s", dlerror());
    const char *missing = NULL;
    /* dlsym gives a data pointer; POSIX has it hold a function's. */
#define X(name) *(void **)&api->name = dlsym(lib, "nccl" #name);
    ZR_NCCL_NEEDED(X)
    ZR_NCCL_OPTIONAL(X)
#undef X
#define X(name)                                                                                              \
    if (!api->name)                                                                                          \
        missing = "nccl" #name;
    ZR_NCCL_NEEDED(X)
#undef X
    if (missing) {
        dlclose(lib);
        return zr_fail(ZR_ERR_NOTSUP, "%s has no %s: NCCL 2.14 or newer is needed", path, missing);
    }
    api->GetVersion(&api->version);
    return 0; /* never closed: NCCL has threads of its own */
}
