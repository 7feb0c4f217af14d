/* SPDX-License-Identifier: Apache-2.0 */
/* where_mpi.c: runs ranks on the host, over the stand-in for MPI. Each rank's thread sets its rank there. */
#include "comm/mpi/mpi_library.h"
#include "test/zero/where.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const bool where_has_gpu = false;

/* Read by AddressSanitizer: what an MPI communicator leaves behind on purpose after a failure. Requests and
 * threads may still use it (comm/mpi/README.md). */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:make_process\nleak:make_mpi_set\nleak:zr_mpi_make\nleak:make_mpi_arena\nleak:make_role\n";
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void (*be)(int rank);

static void find_stand_in(void)
{
    zr_mpi_module_file = getenv("MPI_STAND_IN");
    void *library = dlopen(zr_mpi_module_file, RTLD_NOW | RTLD_LOCAL);
    void *at = library ? dlsym(library, "mpi_stand_in_be") : NULL;
    if (!at) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    memcpy(&be, &at, sizeof be);
}

void where_open(int rank, struct zero_config *cfg)
{
    pthread_once(&once, find_stand_in);
    be(rank);
    cfg->launch.backend = ZERO_BACKEND_MPI;
}

void where_close(struct zero_config *cfg)
{
    (void)cfg;
}

void where_wait(const struct zero_config *cfg)
{
    (void)cfg;
}

void *where_alloc(size_t n_bytes)
{
    return calloc(1, n_bytes);
}

void where_release(void *at)
{
    free(at);
}
