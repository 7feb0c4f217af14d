/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi_shim.c: makes every call of one MPI's shim, as one of N ranks of that MPI's launcher.
 *
 *     test_mpi_shim SHIM NAME N
 *
 * SHIM is the shim's file, and NAME the name by which its MPI calls itself. Compiled WITH_MPI, it is a
 * program that uses MPI itself: it starts and ends MPI, and lends a communicator. */
#include "comm/mpi/mpi_shim.h"
#include "test/comm/mpi/mpi_traffic.h"

#ifdef WITH_MPI
#include <mpi.h>
#endif

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct zr_mpi_shim *shim;
static struct zr_mpi_world *w;
static int rank = -1, size;

#define CHECK(cond)                                                                                          \
    do {                                                                                                     \
        if (!(cond))                                                                                         \
            fail(__LINE__, #cond);                                                                           \
    } while (0)

static void fail(int line, const char *what)
{
    fprintf(stderr, "rank %d of %d: line %d: %s\n", rank, size, line, what);
    _exit(1); /* the launcher ends the others */
}

static void load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail(__LINE__, dlerror());
    shim = dlsym(library, ZR_MPI_SHIM_SYMBOL);
    CHECK(shim && shim->version == ZR_MPI_SHIM_VERSION && shim->bytes == sizeof *shim);
    w = shim->world();
    CHECK(w && w == shim->world());
}

/* Runs before MPI has begun. */
static void names(const char *name)
{
    char text[256], cut[4];
    shim->library(w, text, sizeof text);
    CHECK(!strcmp(shim->name, name) && strstr(text, shim->name) == text && !strchr(text, '\n'));
    CHECK(strstr(text, shim->compiled)); /* it runs with the version it was compiled for */
    shim->library(w, cut, sizeof cut);
    CHECK(strlen(cut) == 3);
    CHECK(!shim->is_initialized(w) && !shim->is_finalized(w));
    CHECK(shim->address());
    Dl_info info;
    CHECK(dladdr(shim->address(), &info) && info.dli_sname &&
          strstr(info.dli_sname, "MPI_Get_library_version"));
}

static void *user_comm;

/* Starts MPI, as the program or through the shim. */
static void begin(void)
{
#ifdef WITH_MPI
    static MPI_Comm reversed;
    int level, world;
    CHECK(shim->address() == (void *)MPI_Get_library_version);
    CHECK(!MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) && level == MPI_THREAD_MULTIPLE);
    MPI_Comm_rank(MPI_COMM_WORLD, &world);
    CHECK(!MPI_Comm_split(MPI_COMM_WORLD, 0, -world, &reversed));
    MPI_Comm_rank(reversed, &rank);
    user_comm = &reversed;
    CHECK(shim->thread_level(w) == ZR_MPI_MULTIPLE);
#else
    enum zr_mpi_level level;
    CHECK(!shim->init(w, ZR_MPI_SERIALIZED, &level));
    CHECK(level >= ZR_MPI_SERIALIZED && shim->thread_level(w) == level);
#endif
}

#ifdef WITH_MPI
/* Counts calls through MPI's profiling interface. libzero's library finds this function too. */
static int n_probes;

__attribute__((visibility("default"))) int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *flag,
                                                      MPI_Status *status)
{
    n_probes++;
    return PMPI_Iprobe(from, tag, comm, flag, status);
}

/* MPI makes progress although no request is pending: a request that has ended may still have bytes to
 * send. */
static void polled_without_requests(void)
{
    static struct zr_mpi_done done[ZR_MPI_SLOTS];
    int before = n_probes;
    CHECK(shim->poll(w, done) == 0);
    CHECK(n_probes > before);
}

/* Values that a program could lend by mistake: not communicators of ranks. */
static void other_user_comm(void)
{
    MPI_Comm none = MPI_COMM_NULL, half, between;
    int at = 0, n = 7, color = rank % 2;
    CHECK(!shim->rank_of(w, &none, &at, &n) && at == -1 && n == 0);
    CHECK(!MPI_Comm_split(*(MPI_Comm *)user_comm, color, rank, &half));
    CHECK(!MPI_Intercomm_create(half, 0, *(MPI_Comm *)user_comm, 1 - color, 5, &between));
    CHECK(shim->rank_of(w, &between, &at, &n) == MPI_ERR_COMM);
    MPI_Comm_free(&between);
    MPI_Comm_free(&half);
}
#endif

/* A communicator made by the shim returns errors, and they have a text. */
static void errors(void)
{
    int32_t member[64], comm, other, slot = 0;
    char text[256] = "";
    for (int i = 0; i < size; i++)
        member[i] = i;
    CHECK(!shim->make(w, user_comm, member, size, 3, &comm));
    int err = shim->send(w, comm, text, 1, size, 1, &slot); /* to a rank that does not exist */
    CHECK(err > 0 && slot == -1);
    shim->error(w, err, text, sizeof text);
    CHECK(text[0] && !strchr(text, '\n'));
    for (int i = 0; i < 2; i++) { /* a freed slot can be used again */
        CHECK(!shim->copy(w, comm, &other));
        CHECK(!shim->free(w, other));
    }
    CHECK(!shim->free(w, comm));
}

static int n_begun;

static void finalize_begins(void *arg)
{
    CHECK(arg == &n_begun && !shim->is_finalized(w));
    n_begun++;
}

static void end(void)
{
#ifdef WITH_MPI
    MPI_Comm_free((MPI_Comm *)user_comm);
    CHECK(!MPI_Finalize());
#else
    CHECK(!shim->finalize(w));
#endif
    CHECK(shim->is_finalized(w) && shim->is_initialized(w));
}

int main(int argc, char **argv)
{
    char wrong[512];
    if (argc != 4)
        return 2;
    alarm(120);
    load(argv[1]);
    names(argv[2]);
    begin();
    CHECK(!shim->rank_of(w, user_comm, &rank, &size) && size == atoi(argv[3]) && rank >= 0 && rank < size);
    CHECK(!shim->on_finalize(w, NULL, NULL));
    CHECK(!shim->on_finalize(w, finalize_begins, NULL));
    CHECK(!shim->on_finalize(w, finalize_begins, &n_begun));
    if (!mpi_traffic(shim, w, user_comm, wrong, sizeof wrong))
        fail(__LINE__, wrong);
    errors();
#ifdef WITH_MPI
    polled_without_requests();
    other_user_comm();
#endif
    end();
    CHECK(n_begun == 1);
    return 0;
}
