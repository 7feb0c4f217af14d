/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_own.c: puts MPI's own collectives on a communicator's stream, for zero-bench comm. */
#include "comm/mpi/mpi_own.h"
#include "comm/mpi/mpi_comm.h"

#include <stdatomic.h>

static const struct {
    const char *name;
    enum zr_mpi_own_call call;
} owns[ZR_MPI_OWNS] = {
    [ZR_MPI_OWN_ALLGATHER] = {"MPI_Allgather", ZR_MPI_ALLGATHER},
    [ZR_MPI_OWN_REDUCE_SCATTER] = {"MPI_Reduce_scatter", ZR_MPI_REDUCE_SCATTER},
    [ZR_MPI_OWN_REDUCE_SCATTER_BLOCK] = {"MPI_Reduce_scatter_block", ZR_MPI_REDUCE_SCATTER_BLOCK},
    [ZR_MPI_OWN_IREDUCE_SCATTER_BLOCK] = {"MPI_Ireduce_scatter_block", ZR_MPI_REDUCE_SCATTER_BLOCK},
};

static _Atomic bool blocks;

struct own {
    struct zr_mpi *m;
    enum zr_mpi_own call;
    const float *in;
    float *out;
    int64_t n;
};

_Static_assert(sizeof(struct own) <= ZR_CALL_BYTES, "it travels in a call");

const char *zr_mpi_own_name(enum zr_mpi_own call)
{
    return owns[call].name;
}

bool zr_mpi_own_blocks(void)
{
    return atomic_load(&blocks);
}

static int run_blocking(const struct own *k)
{
    struct zr_mpi_set *p = k->m->set;
    int err = zr_mpi_enter(p->process, p->opt.timeout_ms);
    if (err)
        return err;
    atomic_store(&blocks, true);
    int class = zr_mpi_shim_of(p->process)
                    ->own(zr_mpi_world_of(p->process), k->m->comm, owns[k->call].call, k->in, k->out, k->n);
    atomic_store(&blocks, false);
    zr_mpi_leave(p->process);
    return class ? zr_mpi_say(p->process, class, owns[k->call].name) : 0;
}

static void run_own(void *arg)
{
    const struct own *k = arg;
    int err = zr_first_code(&k->m->set->failure);
    if (err)
        return;
    if (k->call == ZR_MPI_OWN_IREDUCE_SCATTER_BLOCK) {
        zr_mpi_reduce_block(k->m, k->in, k->out, k->n); /* it keeps its failure itself */
        return;
    }
    err = run_blocking(k);
    if (err)
        zr_mpi_fail(k->m->set, err, zr_error_text());
}

int zr_mpi_own_put(struct zr_comm *c, struct zr_stream *s, enum zr_mpi_own call, const float *in, float *out,
                   int64_t n)
{
    struct zr_mpi *m = zr_mpi_of(c);
    const struct own k = {.m = m, .call = call, .in = in, .out = out, .n = n};
    return m->set->dev->ops->call(s, run_own, &k, sizeof k);
}
