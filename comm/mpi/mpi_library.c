/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_library.c: see mpi_library.h. */
#include "comm/mpi/mpi_library.h"
#include "comm/loaded.h"
#include "kernels/error.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 512, WORDS_BYTES = 160, TEXT_BYTES = 8192 + 1 /* MPICH's longest version */ };

static const struct {
    const char *key, *name;
    /* why there is no library for it */
    const char *missing;
} kinds[] = {
    [ZR_MPI_AUTO] = {"auto", "", ""},
#ifdef ZR_NO_OMPI
    [ZR_MPI_OMPI] = {"ompi", "Open MPI", ZR_NO_OMPI},
#else
    [ZR_MPI_OMPI] = {"ompi", "Open MPI", NULL},
#endif
#ifdef ZR_NO_MPICH
    [ZR_MPI_MPICH] = {"mpich", "MPICH", ZR_NO_MPICH},
#else
    [ZR_MPI_MPICH] = {"mpich", "MPICH", NULL},
#endif
};

/* Of the MPI that this library itself brought into the process. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const void *brought;

/* ---- what the process has ---- */

struct found {
    enum zr_mpi_kind kind;
    char version[ZR_MPI_VERSION_BYTES], path[PATH_BYTES];
    void *function;
};

/* By the first words of MPI_Get_library_version; ZR_MPI_AUTO: none that is known. */
static enum zr_mpi_kind kind_of(const char *text)
{
    static const char *const like_mpich[] = {"MPICH", "Intel(R) MPI", "MVAPICH"};
    if (!strncmp(text, "Open MPI", 8))
        return ZR_MPI_OMPI;
    for (size_t i = 0; i < sizeof like_mpich / sizeof *like_mpich; i++)
        if (!strncmp(text, like_mpich[i], strlen(like_mpich[i])))
            return ZR_MPI_MPICH;
    return ZR_MPI_AUTO;
}

/* "Open MPI v4.1.4, package: ..." and "MPICH Version:\t4.0.2" without what only looks well in a table. */
static void shorten(const char *text, char *version, size_t n)
{
    char word[32] = "", rest[64] = "";
    if (sscanf(text, "%31s Version%*[ :\t]%63[^\n]", word, rest) == 2)
        snprintf(version, n, "%s %s", word, rest);
    else
        snprintf(version, n, "%.*s", (int)strcspn(text, ",\n"), text);
}

static void identify(void *function, struct found *f)
{
    static _Thread_local char text[TEXT_BYTES];
    int (*get_version)(char *, int *);
    int length = 0;
    memset(text, 0, sizeof text);
    memcpy(&get_version, &function, sizeof get_version); /* POSIX has a data pointer hold a function's */
    get_version(text, &length);
    text[sizeof text - 1] = 0;
    f->function = function;
    f->kind = kind_of(text);
    shorten(text, f->version, sizeof f->version);
    zr_loaded_path(function, f->path, sizeof f->path);
}

/* f->function NULL: none. */
static int find_loaded(struct found *f)
{
    struct zr_loaded l = zr_loaded_find("MPI_Get_library_version");
    struct found second;
    memset(f, 0, sizeof *f);
    if (l.n == 0)
        return 0;
    identify(l.function[0], f);
    if (l.n > 1) {
        identify(l.function[1], &second);
        return zr_fail(ZR_ERR_NOTSUP,
                       "this process has loaded two MPIs, %s (%s) and %s (%s): load one of them only",
                       f->path, f->version, second.path, second.version);
    }
    if (f->kind == ZR_MPI_AUTO)
        return zr_fail(ZR_ERR_NOTSUP,
                       "this process has an MPI that is neither Open MPI nor of MPICH's kind: \"%.60s\" (%s)",
                       f->version, f->path);
    return 0;
}

/* ---- who started it ---- */

struct launcher {
    /* ZR_MPI_AUTO: no MPI's */
    enum zr_mpi_kind kind;
    char words[WORDS_BYTES];
};

static void note(struct launcher *l, enum zr_mpi_kind kind, const char *who, const char *name,
                 const char *other)
{
    l->kind = kind;
    int n = snprintf(l->words, sizeof l->words, "%s (%s is %.20s", who, name, getenv(name));
    if (n > 0 && n < WORDS_BYTES)
        snprintf(l->words + n, sizeof l->words - (size_t)n, other ? ", %s is %.20s)" : ")", other,
                 other ? getenv(other) : "");
}

/* An mpirun inside a step of srun has both's variables: mpirun was later. */
static struct launcher find_mpi_launcher(void)
{
    struct launcher l = {0};
    if (getenv("OMPI_COMM_WORLD_SIZE"))
        note(&l, ZR_MPI_OMPI, "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", NULL);
    else if (getenv("PMI_RANK") && getenv("PMI_SIZE"))
        note(&l, ZR_MPI_MPICH, "MPICH's launcher", "PMI_RANK", "PMI_SIZE");
    else if (getenv("PMI_FD"))
        note(&l, ZR_MPI_MPICH, "MPICH's launcher", "PMI_FD", NULL);
    else if (getenv("PMI_PORT"))
        note(&l, ZR_MPI_MPICH, "MPICH's launcher", "PMI_PORT", NULL);
    else if (getenv("PMIX_NAMESPACE") && getenv("PMIX_RANK"))
        note(&l, ZR_MPI_OMPI, "a launcher with PMIx", "PMIX_RANK", NULL);
    return l;
}

/* ---- which it is to be ---- */

static bool has_begun(const struct zr_mpi_library *m)
{
    return m->shim->is_initialized(m->world);
}

/* Started by one MPI, with the other in the process: each rank would be a world of its own. */
static int check_crossed(const struct zr_mpi_library *m, const struct found *f, const struct launcher *l)
{
    if (l->kind == ZR_MPI_AUTO || l->kind == m->kind || has_begun(m))
        return 0;
    if (m->kind == ZR_MPI_MPICH)
        return zr_fail(ZR_ERR_ARG,
                       "this rank was started by %s, but the program has loaded %s (%s), which sees 1 rank: "
                       "start it by mpiexec of MPICH, or link it with Open MPI",
                       l->words, f->version, f->path);
    return zr_fail(
        ZR_ERR_ARG,
        "this rank was started by %s, but the program has loaded %s (%s), which sees 1 rank: start "
        "it by mpirun of Open MPI, or link it with MPICH",
        l->words, f->version, f->path);
}

/* Open MPI ends the process where it was started by Slurm and finds no PMIx. */
static int check_slurm(const struct zr_mpi_library *m, const struct launcher *l)
{
    if (m->kind != ZR_MPI_OMPI || l->kind != ZR_MPI_AUTO || !getenv("SLURM_STEP_ID") || has_begun(m))
        return 0;
    return zr_fail(
        ZR_ERR_ARG,
        "this rank was started by srun without PMIx (PMIX_NAMESPACE is not set), and Open MPI cannot "
        "begin there: srun --mpi=pmix (srun --mpi=list tells what there is), or mpirun");
}

static int check_wanted(enum zr_mpi_kind wanted, const struct found *f, const struct launcher *l)
{
    if (wanted == ZR_MPI_AUTO)
        return 0;
    if (f->function && f->kind != wanted)
        return zr_fail(ZR_ERR_ARG, "mpi is %s, but this process has loaded %s (%s); allowed: auto, %s",
                       kinds[wanted].key, f->version, f->path, kinds[f->kind].key);
    if (!f->function && l->kind != ZR_MPI_AUTO && l->kind != wanted)
        return zr_fail(ZR_ERR_ARG, "mpi is %s, but this rank was started by %s; allowed: auto, %s",
                       kinds[wanted].key, l->words, kinds[l->kind].key);
    return 0;
}

/* ---- libzero's library for it ---- */

/* The file in the folder that ZERO_MPI_SHIMS names, else where it is installed: in zero/ beside the library
 * that holds this function, else where this was configured to be. Always a path, which no LD_LIBRARY_PATH
 * turns into another. */
static void file_of(enum zr_mpi_kind kind, char *path, size_t n)
{
    const char *folder = getenv("ZERO_MPI_SHIMS"), *slash;
    Dl_info here;
    if (folder && *folder) {
        snprintf(path, n, "%s%s/libzero-mpi-%s.so", strchr(folder, '/') ? "" : "./", folder, kinds[kind].key);
        return;
    }
    if (dladdr(&brought, &here) && here.dli_fname && (slash = strrchr(here.dli_fname, '/'))) {
        snprintf(path, n, "%.*s/zero/libzero-mpi-%s.so", (int)(slash - here.dli_fname), here.dli_fname,
                 kinds[kind].key);
        if (access(path, R_OK) == 0)
            return;
    }
    snprintf(path, n, "%s/libzero-mpi-%s.so", ZR_MPI_SHIM_DIR, kinds[kind].key);
}

static int no_shim(enum zr_mpi_kind kind, const char *path)
{
    const char *why = dlerror();
    if (kinds[kind].missing)
        return zr_fail(ZR_ERR_NOTSUP, "backend is mpi, but this libzero was built without %s: %s",
                       kinds[kind].name, kinds[kind].missing);
    return zr_fail(ZR_ERR_NOTSUP,
                   "backend is mpi, but libzero's library for %s is not there: looked for %s: %s",
                   kinds[kind].name, path, why ? why : "it cannot be loaded");
}

static int open_shim(enum zr_mpi_kind kind, char *path, size_t n_path, const struct zr_mpi_shim **out)
{
    file_of(kind, path, n_path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return no_shim(kind, path);
    const struct zr_mpi_shim *shim = dlsym(library, ZR_MPI_SHIM_SYMBOL);
    int err = 0;
    if (!shim)
        err = zr_fail(ZR_ERR_NOTSUP, "%s has no %s: it is not libzero's library for %s", path,
                      ZR_MPI_SHIM_SYMBOL, kinds[kind].name);
    else if (shim->version != ZR_MPI_SHIM_VERSION || shim->bytes != sizeof *shim)
        err = zr_fail(ZR_ERR_NOTSUP,
                      "%s is of another libzero (its table is version %u of %u bytes, %d of %zu is needed): "
                      "install both anew",
                      path, shim->version, shim->bytes, ZR_MPI_SHIM_VERSION, sizeof *shim);
    if (err)
        dlclose(library);
    *out = shim;
    return err;
}

/* The MPI that ours brought is the one that was there, if one was. */
static int check_same(const struct zr_mpi_shim *shim, const struct found *f)
{
    struct found other;
    const void *function = shim->address();
    if (!f->function || function == f->function)
        return 0;
    memcpy(&other.function, &function, sizeof function);
    identify(other.function, &other);
    return zr_fail(
        ZR_ERR_NOTSUP,
        "this process has loaded %s (%s), but libzero's library for %s works with %s (%s): two MPIs "
        "cannot be in one process",
        f->version, f->path, kinds[f->kind].name, other.version, other.path);
}

static enum zr_mpi_kind choose(enum zr_mpi_kind wanted, const struct found *f, const struct launcher *l)
{
    char path[PATH_BYTES];
    if (f->function)
        return f->kind;
    if (l->kind != ZR_MPI_AUTO)
        return l->kind;
    if (wanted != ZR_MPI_AUTO)
        return wanted;
    file_of(ZR_MPI_OMPI, path, sizeof path); /* nobody says */
    return access(path, R_OK) == 0 ? ZR_MPI_OMPI : ZR_MPI_MPICH;
}

static int load_one(enum zr_mpi_kind kind, const struct found *f, struct zr_log *log,
                    struct zr_mpi_library *out)
{
    char path[PATH_BYTES], text[256];
    int err = open_shim(kind, path, sizeof path, &out->shim);
    if (!err)
        err = check_same(out->shim, f);
    if (err)
        return err;
    if (!f->function)
        brought = out->shim->address();
    out->kind = kind;
    out->world = out->shim->world();
    out->is_programs = out->shim->address() != brought;
    out->shim->library(out->world, text, sizeof text);
    shorten(text, out->version, sizeof out->version);
    zr_info(log, "mpi: %s, by %s (%s)", out->version, path,
            out->is_programs ? "in the process already" : "loaded for libzero");
    return 0;
}

int zr_mpi_say_not_launched(void)
{
    return zr_fail(
        ZR_ERR_NOTSUP,
        "backend mpi needs ranks that one mpirun of Open MPI or one mpiexec of MPICH has started; "
        "nothing says so of this one (no OMPI_COMM_WORLD_SIZE, no PMI_RANK); use one of these launchers, or "
        "another backend");
}

bool zr_mpi_is_loaded(void)
{
    return zr_loaded_find("MPI_Get_library_version").n > 0;
}

int zr_mpi_check_launcher(void)
{
    bool may_be = find_mpi_launcher().kind != ZR_MPI_AUTO || zr_mpi_is_loaded();
    return may_be ? 0 : zr_mpi_say_not_launched();
}

int zr_mpi_load(enum zr_mpi_kind wanted, struct zr_log *log, struct zr_mpi_library *out)
{
    struct launcher l = find_mpi_launcher();
    struct found f;
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    int err = find_loaded(&f);
    if (!err)
        err = check_wanted(wanted, &f, &l);
    if (!err)
        err = load_one(choose(wanted, &f, &l), &f, log, out);
    if (!err)
        out->is_launched = l.kind == out->kind || has_begun(out);
    if (!err)
        err = check_crossed(out, &f, &l);
    if (!err)
        err = check_slurm(out, &l);
    pthread_mutex_unlock(&lock);
    return err;
}
