/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_fixture.c: opens the fixtures of mpi_fixture.h. */
#include "test/comm/mpi/mpi_fixture.h"
#include "comm/topology.h"
#include "test/cmocka.h"
#include "test/stand_in/mpi_stand_in.h"

#include <stdio.h>
#include <string.h>

enum { START_MS = 60000 };

/* With n_hosts 0 the hosts are not set. */
static struct zr_topology hosts;

void mpi_fixture_hosts(int world, const int32_t *host_of)
{
    zr_topology_free(&hosts);
    memset(&hosts, 0, sizeof hosts);
    if (!host_of || zr_topology_assume(world, 1, &hosts))
        return;
    hosts.n_hosts = 0;
    for (int i = 0; i < world; i++) {
        hosts.host_of[i] = host_of[i];
        hosts.n_hosts = host_of[i] >= hosts.n_hosts ? host_of[i] + 1 : hosts.n_hosts;
    }
}

/* Read by AddressSanitizer: what an MPI communicator leaves behind on purpose after a failure. Requests
 * and threads may still use it (comm/mpi/README.md). */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:make_process\nleak:make_mpi_set\nleak:zr_mpi_make\nleak:make_mpi_arena\nleak:make_role\n";
}

struct zr_mpi_library mpi_fixture_library(void)
{
    const struct zr_mpi_shim *shim = mpi_stand_in_shim();
    struct zr_mpi_library lib = {.shim = shim, .world = shim->world(), .is_launched = true};
    shim->library(lib.world, lib.version, sizeof lib.version);
    return lib;
}

static int open_rank(const struct zr_world *w, struct zr_device **out)
{
    mpi_stand_in_be(w->rank);
    return zr_host_device_open(out);
}

static int open_host(const struct zr_world *w, struct zr_device **out)
{
    return zr_host_device_open(out);
}

static int64_t reserve(int world, int i)
{
    const struct zr_group g = {.size = world};
    const struct zr_role_ask ask = {&g, MPI_SLICE_BYTES, 0};
    return zr_mpi_role_bytes(i ? ZR_ROLE_REDUCE : ZR_ROLE_GATHER, &ask, true);
}

void mpi_fixture_ask(const struct fixture *o, struct zr_role_ask ask[ZR_ROLES])
{
    memset(ask, 0, ZR_ROLES * sizeof *ask);
    for (int r = ZR_ROLE_GATHER; r <= ZR_ROLE_REDUCE; r++)
        ask[r] = (struct zr_role_ask){&o->group, MPI_SLICE_BYTES, 0};
}

int mpi_fixture_open(struct fixture *o, const struct zr_mpi_options *opt,
                     const struct zr_role_ask ask[ZR_ROLES])
{
    struct zr_comm *comm[ZR_ROLES];
    int err = zr_mpi_open(o->rdv, o->dev, opt, ask, comm);
    memcpy(o->comm, comm, sizeof o->comm);
    return err;
}

static int open_pair(struct fixture *o, const struct zr_mpi_options *opt)
{
    struct zr_role_ask ask[ZR_ROLES];
    mpi_fixture_ask(o, ask);
    return mpi_fixture_open(o, opt, ask);
}

static int open_stand_in(struct fixture *o, int n, int64_t timeout_ms)
{
    struct zr_mpi_library lib = mpi_fixture_library();
    const struct zr_mpi_options opt = {.timeout_ms = timeout_ms,
                                       .start_timeout_ms = START_MS,
                                       .topology = hosts.n_hosts ? &hosts : NULL,
                                       .library = &lib};
    (void)n; /* always a pair */
    return open_pair(o, &opt);
}

static int open_real(struct fixture *o, int n, int64_t timeout_ms)
{
    const struct zr_mpi_options opt = {
        .timeout_ms = timeout_ms, .start_timeout_ms = START_MS, .topology = hosts.n_hosts ? &hosts : NULL};
    return open_pair(o, &opt);
}

const struct fixture_kind fixture_mpi = {.open_device = open_rank,
                                         .open_comms = open_stand_in,
                                         .reserve_bytes = reserve,
                                         .exact = true,
                                         .one_reduces = true};
const struct fixture_kind fixture_real_mpi = {.open_device = open_host,
                                              .open_comms = open_real,
                                              .reserve_bytes = reserve,
                                              .exact = true,
                                              .one_reduces = true};

static struct rank *run(int n, void (*fn)(struct rank *r), void *arg, int *n_misuses, const char **first)
{
    mpi_stand_in_the_machine()->n_ranks = n;
    struct rank *r = run_ranks(false, n, fn, arg, NULL);
    *n_misuses = mpi_stand_in_end(first);
    return r;
}

struct rank *mpi_run_ranks(int n, void (*fn)(struct rank *r), void *arg)
{
    const char *first;
    int n_misuses;
    struct rank *r = run(n, fn, arg, &n_misuses, &first);
    if (n_misuses)
        fail_msg("%d misuses of MPI by %d ranks, the first: %s", n_misuses, n, first);
    return r;
}

struct rank *mpi_run_disturbed(int n, void (*fn)(struct rank *r), void *arg)
{
    const char *first;
    int n_misuses;
    struct rank *r = run(n, fn, arg, &n_misuses, &first);
    if (n_misuses && !strstr(first, "at the end") && !strstr(first, "were not freed"))
        fail_msg("%d misuses of MPI by %d ranks, the first: %s", n_misuses, n, first);
    return r;
}
