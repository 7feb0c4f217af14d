/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_library.c: finds an MPI and a launcher in this process, loads the module, and compares all three. */
#include "comm/mpi/mpi_library.h"
#include "comm/loaded.h"
#include "kernels/error.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 512, WORDS_BYTES = 160, TEXT_BYTES = 8192 + 1 /* MPICH's longest version */ };

enum kind { NONE, OPEN_MPI, MPICH };

const char *zr_mpi_module_file;

/* The function of the MPI that libzero itself loaded, and its lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const void *brought;

/* ---- what the process has ---- */

struct found {
    enum kind kind;
    char version[ZR_MPI_VERSION_BYTES], path[PATH_BYTES];
    void *function;
};

/* The kind of an MPI, by the first words of MPI_Get_library_version or a module's name. NONE: unknown. */
static enum kind kind_of(const char *text)
{
    static const char *const like_mpich[] = {"MPICH", "Intel(R) MPI", "MVAPICH"};
    if (!strncmp(text, "Open MPI", 8))
        return OPEN_MPI;
    for (size_t i = 0; i < sizeof like_mpich / sizeof *like_mpich; i++)
        if (!strncmp(text, like_mpich[i], strlen(like_mpich[i])))
            return MPICH;
    return NONE;
}

/* Shortens "Open MPI v4.1.4, package: ..." and "MPICH Version:\t4.0.2" to name and version. */
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
    memcpy(&get_version, &function, sizeof get_version); /* POSIX lets a data pointer hold a function's */
    get_version(text, &length);
    text[sizeof text - 1] = 0;
    f->function = function;
    f->kind = kind_of(text);
    shorten(text, f->version, sizeof f->version);
    zr_loaded_path(function, f->path, sizeof f->path);
}

/* Finds the MPI that the process has loaded. f->function is NULL if there is none. */
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
        return zr_fail(ZERO_ERR_NOTSUP,
                       "this process has loaded two MPIs, %s (%s) and %s (%s): load one of them only",
                       f->path, f->version, second.path, second.version);
    }
    if (f->kind == NONE)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "this process has an MPI that is neither Open MPI nor of MPICH's kind: \"%.60s\" (%s)",
                       f->version, f->path);
    return 0;
}

/* ---- which launcher started it ---- */

struct launcher {
    /* NONE: not a launcher of an MPI. */
    enum kind kind;
    char words[WORDS_BYTES];
};

/* Writes "Open MPI's mpirun (OMPI_COMM_WORLD_SIZE is 4)". name, other: environment variables that show that
 * program; other may be NULL. */
static void note(struct launcher *l, enum kind kind, const char *program, const char *name, const char *other)
{
    l->kind = kind;
    int n = snprintf(l->words, sizeof l->words, "%s (%s is %.20s", program, name, getenv(name));
    if (n > 0 && n < WORDS_BYTES)
        snprintf(l->words + n, sizeof l->words - (size_t)n, other ? ", %s is %.20s)" : ")", other,
                 other ? getenv(other) : "");
}

/* An mpirun inside a step of srun has the variables of both. mpirun was started later, so it counts. */
static struct launcher find_mpi_launcher(void)
{
    struct launcher l = {0};
    if (getenv("OMPI_COMM_WORLD_SIZE"))
        note(&l, OPEN_MPI, "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", NULL);
    else if (getenv("PMI_RANK") && getenv("PMI_SIZE"))
        note(&l, MPICH, "MPICH's launcher", "PMI_RANK", "PMI_SIZE");
    else if (getenv("PMI_FD"))
        note(&l, MPICH, "MPICH's launcher", "PMI_FD", NULL);
    else if (getenv("PMI_PORT"))
        note(&l, MPICH, "MPICH's launcher", "PMI_PORT", NULL);
    else if (getenv("PMIX_NAMESPACE") && getenv("PMIX_RANK"))
        note(&l, OPEN_MPI, "a launcher with PMIx", "PMIX_RANK", NULL);
    return l;
}

/* ---- the module ---- */

/* Writes the module's path. libzero-mpi.so is in the folder of libzero.so, or of the program or library that
 * libzero.a is linked into. */
static void find_module(char *path, size_t n)
{
    void *at = dlsym(RTLD_DEFAULT, "zero_version"); /* NULL in a program with libzero.a */
    struct link_map *map = NULL;
    char real[PATH_MAX];
    Dl_info info;
    if (zr_mpi_module_file) {
        snprintf(path, n, "%s", zr_mpi_module_file);
        return;
    }
    bool known = dladdr1(at ? at : (void *)&brought, &info, (void **)&map, RTLD_DL_LINKMAP);
    const char *file = known && map->l_name[0] ? map->l_name : "/proc/self/exe";
    if (!realpath(file, real))
        snprintf(real, sizeof real, "%s", file);
    char *slash = strrchr(real, '/');
    snprintf(path, n, "%.*s/libzero-mpi.so", slash ? (int)(slash - real) : 1, slash ? real : ".");
}

static int open_module(char *path, size_t n_path, void **library, const struct zr_mpi_shim **out)
{
    find_module(path, n_path);
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*library) {
#ifdef ZR_NO_MPI
        return zr_fail(ZERO_ERR_NOTSUP, "backend is mpi, but this libzero was built without MPI: %s",
                       ZR_NO_MPI);
#else
        const char *why = dlerror();
        return zr_fail(ZERO_ERR_NOTSUP, "backend is mpi, but libzero's module for MPI cannot be loaded: %s",
                       why ? why : path);
#endif
    }
    const struct zr_mpi_shim *shim = *out = dlsym(*library, ZR_MPI_SHIM_SYMBOL);
    if (!shim)
        return zr_fail(ZERO_ERR_NOTSUP, "%s has no %s: it is not libzero's module for MPI", path,
                       ZR_MPI_SHIM_SYMBOL);
    if (shim->version != ZR_MPI_SHIM_VERSION || shim->bytes != sizeof *shim)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "%s is of another libzero (its table is version %u of %u bytes, %d of %zu is needed): "
                       "install both again",
                       path, shim->version, shim->bytes, ZR_MPI_SHIM_VERSION, sizeof *shim);
    return 0;
}

/* Checks that the process's MPI is the module's. */
static int check_same(const struct zr_mpi_shim *shim, const char *path, const struct found *f)
{
    struct found other;
    const void *function = shim->address();
    if (!f->function)
        return 0;
    if (kind_of(shim->name) != f->kind)
        return zr_fail(ZERO_ERR_NOTSUP,
                       "this process has loaded %s (%s), but libzero was built for %s %s (%s): build both "
                       "with one MPI",
                       f->version, f->path, shim->name, shim->compiled, path);
    if (function == f->function)
        return 0;
    memcpy(&other.function, &function, sizeof function);
    identify(other.function, &other);
    return zr_fail(ZERO_ERR_NOTSUP,
                   "this process has loaded %s (%s), but libzero's module for MPI works with %s (%s): two "
                   "MPIs cannot be in one process",
                   f->version, f->path, other.version, other.path);
}

static int load_module(const struct found *f, struct zr_log *log, struct zr_mpi_library *out)
{
    char path[PATH_BYTES], text[256];
    void *library;
    int err = open_module(path, sizeof path, &library, &out->shim);
    if (!err)
        err = check_same(out->shim, path, f);
    if (err && library)
        dlclose(library);
    if (err)
        return err;
    if (!f->function)
        brought = out->shim->address();
    out->world = out->shim->world();
    out->is_programs = out->shim->address() != brought;
    out->shim->library(out->world, text, sizeof text);
    shorten(text, out->version, sizeof out->version);
    zr_info(log, "mpi: %s, by %s (%s)", out->version, path,
            out->is_programs ? "in the process already" : "loaded for libzero");
    return 0;
}

/* ---- module and launcher ---- */

/* Checks the launcher. Under the launcher of the other MPI, each rank would be a separate world. */
static int check_launched_by(const struct zr_mpi_library *m, const struct launcher *l)
{
    enum kind kind = kind_of(m->shim->name);
    if (m->is_launched)
        return 0;
    if (l->kind != NONE)
        return zr_fail(ZERO_ERR_ARG,
                       "this rank was started by %s, but libzero was built for %s, which sees 1 rank: start "
                       "it by %s, or build libzero and the program with %s",
                       l->words, m->version, kind == MPICH ? "mpiexec of MPICH" : "mpirun of Open MPI",
                       kind == MPICH ? "Open MPI (-Dmpi=ompi)" : "MPICH (-Dmpi=mpich)");
    /* Open MPI ends the process if Slurm started it and there is no PMIx. */
    if (kind == OPEN_MPI && getenv("SLURM_STEP_ID"))
        return zr_fail(
            ZERO_ERR_ARG,
            "this rank was started by srun without PMIx (PMIX_NAMESPACE is not set), and Open MPI cannot "
            "start there: use srun --mpi=pmix (srun --mpi=list shows what there is) or mpirun");
    return 0;
}

int zr_mpi_say_not_launched(void)
{
    return zr_fail(ZERO_ERR_NOTSUP,
                   "backend mpi needs ranks that one mpirun of Open MPI or one mpiexec of MPICH has started; "
                   "this rank shows no sign of that (no OMPI_COMM_WORLD_SIZE, no PMI_RANK); use one of these "
                   "launchers or another backend");
}

bool zr_mpi_is_loaded(void)
{
    return zr_loaded_find("MPI_Get_library_version").n > 0;
}

int zr_mpi_check_launcher(void)
{
    bool may_be = find_mpi_launcher().kind != NONE || zr_mpi_is_loaded();
    return may_be ? 0 : zr_mpi_say_not_launched();
}

int zr_mpi_load(struct zr_log *log, struct zr_mpi_library *out)
{
    struct launcher l = find_mpi_launcher();
    struct found f;
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    int err = find_loaded(&f);
    if (!err)
        err = load_module(&f, log, out);
    if (!err) {
        out->is_launched = l.kind == kind_of(out->shim->name) || out->shim->is_initialized(out->world);
        err = check_launched_by(out, &l);
    }
    pthread_mutex_unlock(&lock);
    return err;
}
