/* mpi_arena.c: arenas of MPI's communicators: memory of the device's, which no other rank reads, with what
 * each communicator has for itself at its end. */
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"
#include "comm/plain_arena.h"
#include "comm/verdict.h"

#include <stdlib.h>

struct mpi_arena {
    struct zr_arena base;
    struct zr_device *dev;
    /* bytes at the end, of those that it is attached to */
    int64_t taken;
};

static void free_mpi_arena(struct zr_arena *a)
{
    const struct mpi_arena *own = (struct mpi_arena *)a;
    own->dev->ops->free(own->dev, a->base, a->bytes);
    free(a);
}

static int make_mpi_arena(struct zr_mpi_set *p, int64_t bytes, struct zr_arena **out)
{
    void *at;
    if (bytes <= 0)
        return zr_fail(ZR_ERR_ARG, "mpi: the arena is %lld bytes: more than 0 are allowed", (long long)bytes);
    struct mpi_arena *a = calloc(1, sizeof *a);
    if (!a)
        return zr_fail(ZR_ERR_NOMEM, "mpi: no memory for an arena of %lld bytes", (long long)bytes);
    int err = p->dev->ops->alloc(p->dev, bytes, &at);
    if (err) {
        free(a);
        return err;
    }
    a->base = (struct zr_arena){.free = free_mpi_arena, .base = at, .bytes = bytes, .n_held = 1};
    a->dev = p->dev;
    err = zr_plain_zero(p->dev, at, bytes);
    if (err)
        zr_arena_drop(&a->base);
    else
        *out = &a->base;
    return err;
}

/* What a rank tells of its step. */
struct card {
    int64_t bytes;
    int32_t role;
    ZR_VERDICT(240);
};

/* All ranks of the world go on or none does. err: of this rank's step. */
static int agree_mpi_cards(struct zr_mpi *m, int err, int64_t bytes)
{
    struct zr_mpi_set *p = m->set;
    struct card mine = {.bytes = bytes, .role = (int32_t)m->base.role},
                *all = calloc((size_t)p->world, sizeof *all);
    if (!all)
        return zr_rendezvous_fail(p->rdv,
                                  zr_fail(ZR_ERR_NOMEM, "mpi %s: no memory for %d ranks", m->name, p->world));
    zr_verdict_put(&mine, err);
    int met = zr_rendezvous_exchange(p->rdv, &mine, sizeof mine, all);
    met = zr_verdict(met, &mine, all, p->world, p->rank);
    for (int i = 1; i < p->world && !met; i++)
        if (all[i].role != all[0].role)
            met =
                zr_fail(ZR_ERR_MISMATCH, "rank 0 opens communicator \"%s\", rank %d \"%s\"",
                        zr_role_name((enum zr_role)all[0].role), i, zr_role_name((enum zr_role)all[i].role));
        else if (all[i].bytes != all[0].bytes)
            met = zr_fail(ZR_ERR_MISMATCH, "mpi %s: the arena has %lld bytes on rank %d, %lld on rank 0",
                          m->name, (long long)all[i].bytes, i, (long long)all[0].bytes);
    free(all);
    return met;
}

int zr_mpi_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct zr_mpi *m = zr_mpi_of(c);
    struct zr_arena *a = NULL;
    int err = agree_mpi_cards(m, make_mpi_arena(m->set, bytes, &a), bytes);
    if (err)
        zr_arena_drop(a);
    else
        *out = a;
    return err;
}

int zr_mpi_attach(struct zr_comm *c, struct zr_arena *a)
{
    struct zr_mpi *m = zr_mpi_of(c);
    struct mpi_arena *own = (struct mpi_arena *)a;
    int64_t taken = own->taken + m->reserve;
    int err = 0;
    if (m->held)
        return zr_fail(ZR_ERR_ORDER, "mpi %s: an arena is attached once", m->name);
    if (a->bytes <= taken || (taken && a->bytes % ZR_MPI_ALIGN))
        err = zr_fail(ZR_ERR_ARG,
                      "mpi %s: the arena is %lld bytes: more than what is ours of it (%lld)%s is allowed",
                      m->name, (long long)a->bytes, (long long)taken, taken ? ", a multiple of 256," : "");
    err = agree_mpi_cards(m, err, a->bytes);
    if (err)
        return err;
    atomic_fetch_add(&a->n_held, 1);
    own->taken = taken;
    m->held = a;
    m->arena = a->base;
    m->usable = a->bytes - taken;
    m->own = a->base + m->usable;
    return 0;
}
