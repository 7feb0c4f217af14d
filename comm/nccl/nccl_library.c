/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_library.c: finds libnccl at run time. If it were linked, libzero would not load on machines without
 * it. A program that brings NCCL (as Python packages do) would also get a second one. So a library that the
 * program has loaded comes first (comm/loaded.h). */
#include "comm/loaded.h"
#include "comm/nccl/nccl_comm.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static int check_user_library(const struct zr_loaded *s)
{
    char first[256], second[256];
    if (s->n == 0)
        return zr_fail(
            ZERO_ERR_NOTSUP,
            "nccl_comm is set, but its NCCL is not visible in this process (linked statically?), and "
            "libnccl.so.2 would be another: link the program with libnccl.so.2, or leave nccl_comm NULL");
    if (s->n == 1)
        return 0;
    zr_loaded_path(s->function[0], first, sizeof first);
    zr_loaded_path(s->function[1], second, sizeof second);
    return zr_fail(ZERO_ERR_NOTSUP,
                   "nccl_comm is set, but this process has loaded NCCL twice, %s and %s, and it is not known "
                   "which made nccl_comm: load only one, or leave nccl_comm NULL",
                   first, second);
}

/* --- loading --- */

int zr_nccl_load(const char *library, bool user_comm, struct zr_nccl_api *api)
{
    const char *path = library ? library : "libnccl.so.2";
    memset(api, 0, sizeof *api);
    struct zr_loaded seen = zr_loaded_find("ncclGetVersion");
    int err = user_comm ? check_user_library(&seen) : 0;
    if (err)
        return err;
    void *lib = library || seen.n == 0 ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : seen.handle;
    if (!lib && (library || seen.n == 0))
        return zr_fail(
            ZERO_ERR_NOTSUP,
            "there is no NCCL: %s; install it, or add the folder of libnccl.so.2 to LD_LIBRARY_PATH",
            dlerror());
    const char *missing = NULL;
    /* dlsym returns a data pointer; POSIX guarantees that it can hold a function's. */
#define X(name) *(void **)&api->name = dlsym(lib, "nccl" #name);
    ZR_NCCL_NEEDED(X)
    ZR_NCCL_OPTIONAL(X)
    ZR_NCCL_BY_NAME(X)
#undef X
#define X(name)                                                                                              \
    if (!api->name)                                                                                          \
        missing = "nccl" #name;
    ZR_NCCL_NEEDED(X)
#undef X
    if (api->GetVersion)
        zr_loaded_path(*(void **)&api->GetVersion, api->path, sizeof api->path);
    if (missing) {
        char version[32];
        if (!api->GetVersion || api->GetVersion(&api->version))
            err =
                zr_fail(ZERO_ERR_NOTSUP,
                        "%s has no %s: it is not NCCL, or older than the 2.14 that is needed", path, missing);
        else {
            zr_nccl_version_text(api->version, version, sizeof version);
            err = zr_fail(ZERO_ERR_NOTSUP, "%s is NCCL %s, without %s: 2.14 or newer is needed", api->path,
                          version, missing);
        }
        if (lib != seen.handle)
            dlclose(lib);
        return err;
    }
    api->GetVersion(&api->version);
    return 0; /* never closed, as NCCL has running threads */
}
