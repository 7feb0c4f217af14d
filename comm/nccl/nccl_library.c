/* nccl_library.c: finds NCCL when a program asks for it. Linking it instead would keep libzero from loading
 * where there is none; and this way a program that brings its own NCCL (Python packages do) has one, not two.
 *
 * What the program has loaded comes first: a communicator that it lends is that library's, and another one
 * would take its memory for something else. A library that does not show its functions (linked statically
 * into a program or another library) cannot be seen. */
#include "comm/nccl/nccl_comm.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- what the process has --- */

struct names {
    char **name;
    int n;
};

static int note_name(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct names *all = arg;
    (void)size;
    if (!info->dlpi_name || !info->dlpi_name[0]) /* the program itself: looked at by dlsym's default */
        return 0;
    char **more = realloc(all->name, (size_t)(all->n + 1) * sizeof *more), *copy = strdup(info->dlpi_name);
    if (more)
        all->name = more;
    if (more && copy)
        all->name[all->n++] = copy;
    else
        free(copy);
    return 0;
}

/* NCCLs that show their functions, each once, whichever way they are come upon. */
struct seen {
    int n;
    void *function[2]; /* of the first two, ncclGetVersion */
    void *handle;      /* of the first */
};

static void look_in(void *handle, struct seen *s)
{
    void *function = dlsym(handle, "ncclGetVersion");
    if (!function || (s->n > 0 && function == s->function[0]) || (s->n > 1 && function == s->function[1]))
        return;
    if (s->n == 0)
        s->handle = handle;
    if (s->n < 2)
        s->function[s->n] = function;
    s->n++;
}

/* First what the program's own calls reach. */
static struct seen look_around(void)
{
    struct names all = {0};
    struct seen s = {0};
    look_in(RTLD_DEFAULT, &s);
    dl_iterate_phdr(note_name, &all); /* which holds the loader's lock: opened afterwards */
    for (int i = 0; i < all.n; i++) {
        void *handle = dlopen(all.name[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        int before = s.n;
        if (handle)
            look_in(handle, &s);
        if (handle && (s.n == before || before > 0))
            dlclose(handle);
        free(all.name[i]);
    }
    free(all.name);
    return s;
}

static void path_of(void *function, char *path, size_t n_path)
{
    Dl_info info;
    bool known = function && dladdr(function, &info) && info.dli_fname;
    snprintf(path, n_path, "%s", known ? info.dli_fname : "an unknown file");
}

static int check_lent_library(const struct seen *s)
{
    char first[256], second[256];
    if (s->n == 0)
        return zr_fail(
            ZR_ERR_NOTSUP,
            "an ncclComm_t is lent, but the NCCL that it is of cannot be seen in this process (linked "
            "statically?), and libnccl.so.2 would be another: link the program with libnccl.so.2, or lend "
            "none");
    if (s->n == 1)
        return 0;
    path_of(s->function[0], first, sizeof first);
    path_of(s->function[1], second, sizeof second);
    return zr_fail(
        ZR_ERR_NOTSUP,
        "an ncclComm_t is lent, but this process has loaded NCCL twice, %s and %s, and it cannot be "
        "told of which it is: load one of them only, or lend none",
        first, second);
}

/* --- loading --- */

int zr_nccl_load(const char *library, bool lent, struct zr_nccl_api *api)
{
    const char *path = library ? library : "libnccl.so.2";
    memset(api, 0, sizeof *api);
    struct seen seen = look_around();
    int err = lent ? check_lent_library(&seen) : 0;
    if (err)
        return err;
    void *lib = library || seen.n == 0 ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : seen.handle;
    if (!lib && (library || seen.n == 0))
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
    if (api->GetVersion)
        path_of(*(void **)&api->GetVersion, api->path, sizeof api->path);
    if (missing) {
        char version[32];
        if (!api->GetVersion || api->GetVersion(&api->version))
            err = zr_fail(ZR_ERR_NOTSUP, "%s has no %s: it is not NCCL 2.14 or newer, which is needed", path,
                          missing);
        else {
            zr_nccl_version_text(api->version, version, sizeof version);
            err = zr_fail(ZR_ERR_NOTSUP, "%s is NCCL %s, without %s: 2.14 or newer is needed", api->path,
                          version, missing);
        }
        if (lib != seen.handle)
            dlclose(lib);
        return err;
    }
    api->GetVersion(&api->version);
    return 0; /* never closed: NCCL has threads of its own */
}
