/* SPDX-License-Identifier: Apache-2.0 */
/* fake_mpi_shim.c: a stand-in for libzero's MPI module, linked with fake_mpi.c. It can be loaded, and not
 * used. */
#include "comm/mpi/mpi_shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FAKE_VERSION
#define FAKE_VERSION ZR_MPI_SHIM_VERSION
#endif

int MPI_Get_library_version(char *text, int *length);

struct zr_mpi_world {
    int nothing;
};

static struct zr_mpi_world the_world;

static struct zr_mpi_world *world(void)
{
    return &the_world;
}

static void library(struct zr_mpi_world *w, char *text, size_t n)
{
    char all[256];
    int length;
    (void)w;
    MPI_Get_library_version(all, &length);
    all[strcspn(all, "\n")] = 0;
    snprintf(text, n, "%s", all);
}

static const void *address(void)
{
    int (*function)(char *, int *) = MPI_Get_library_version;
    const void *at;
    memcpy(&at, &function, sizeof at);
    return at;
}

/* Answers what the test asks for in FAKE_MPI_HAS_BEGUN. */
static bool is_initialized(struct zr_mpi_world *w)
{
    (void)w;
    return getenv("FAKE_MPI_HAS_BEGUN") != NULL;
}

extern __attribute__((visibility("default"))) const struct zr_mpi_shim zero_mpi_shim_1;
__attribute__((visibility("default"))) const struct zr_mpi_shim zero_mpi_shim_1 = {
    .version = FAKE_VERSION,
    .bytes = sizeof(struct zr_mpi_shim),
    .name = FAKE_NAME,
    .compiled = "1.2.3",
    .world = world,
    .library = library,
    .address = address,
    .is_initialized = is_initialized,
};
