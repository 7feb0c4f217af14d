/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_arena.c: arenas of the communicators over MPI. If hosts have several ranks, the ranks of a host map
 * each other's arenas. Each communicator reserves a part at the end of its arena. */
#include "comm/meet/rendezvous.h"
#include "comm/mpi/mpi_comm.h"
#include "comm/shared_memory.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int make_mpi_arena(const struct zr_mpi_set *p, int64_t bytes, struct zr_arena **out)
{
    char name[48];
    if (bytes <= 0 || bytes > INT64_MAX / 2)
        return zr_fail(ZERO_ERR_ARG, "mpi: the arena is %lld bytes: more than 0 are allowed",
                       (long long)bytes);
    snprintf(name, sizeof name, "zero-mpi-arena-%d", p->rank);
    return p->tiers ? zr_shared_arena("mpi", name, bytes, out) : zr_plain_arena(p->dev, "mpi", bytes, out);
}

/* What a rank tells the others in each exchange: its error, and its arena. */
struct record {
    int32_t err;
    int32_t role;
    /* Rank at the first place of the group. */
    int32_t first;
    int64_t bytes;
    /* Process, descriptor and inode of this rank's arena, for other ranks of its host. */
    int32_t pid, fd;
    uint64_t inode;
};

static struct record *new_mpi_records(const struct zr_mpi *m)
{
    struct record *all;
    if (ZR_ZALLOC(all, m->set->world, "%d ranks of mpi %s", m->set->world, m->name))
        zr_rendezvous_fail(m->set->rdv, ZERO_ERR_NOMEM);
    return all;
}

/* Exchanges results, so that all ranks of the world go on or none does. err is this rank's result. Sizes are
 * equal within a group; pipeline stages have different ones. */
static int agree_mpi_records(struct zr_mpi *m, int err, struct record *mine, struct record *all)
{
    struct zr_mpi_set *p = m->set;
    int met = zr_rendezvous_agree_and_exchange(p->rdv, err, &mine->err, sizeof *mine, all);
    for (int i = 0; i < p->world && !met; i++) {
        const struct record *first = &all[all[i].first];
        if (all[i].role != all[0].role)
            met =
                zr_fail(ZERO_ERR_MISMATCH, "rank 0 opens communicator \"%s\", rank %d \"%s\"",
                        zr_role_name((enum zr_role)all[0].role), i, zr_role_name((enum zr_role)all[i].role));
        else if (all[i].bytes != first->bytes)
            met = zr_fail(ZERO_ERR_MISMATCH, "mpi %s: the arena has %lld bytes on rank %d, %lld on rank %d",
                          m->name, (long long)all[i].bytes, i, (long long)first->bytes, all[i].first);
    }
    return met;
}

int zr_mpi_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct zr_mpi *m = zr_mpi_of(c);
    struct zr_arena *a = NULL;
    struct record mine = {.bytes = bytes, .role = (int32_t)c->role, .first = zr_comm_rank(c, 0)},
                  *all = new_mpi_records(m);
    if (!all)
        return ZERO_ERR_NOMEM;
    int err = agree_mpi_records(m, make_mpi_arena(m->set, bytes, &a), &mine, all);
    free(all);
    if (err)
        zr_arena_drop(a);
    else
        *out = a;
    return err;
}

void zr_mpi_unmap(struct zr_mpi *m)
{
    for (int i = 0; m->peer && i < m->base.group.size; i++) {
        if (m->peer[i] && i != m->base.group.rank)
            zr_shared_unmap(m->peer[i], m->base.held->bytes);
        m->peer[i] = NULL;
    }
}

/* Maps the arenas of the group's ranks on this host, read-only, so that a stray write faults. */
static int map_mpi_peers(struct zr_mpi *m, const struct record *all)
{
    int err = 0;
    for (int i = 0; i < m->spread.size && !err; i++) {
        int32_t rank = zr_comm_rank(&m->base, i);
        const struct zr_shared_at where = {rank, all[rank].pid, all[rank].fd, all[rank].inode};
        if (i == m->base.group.rank)
            m->peer[i] = m->base.held->base;
        else if (m->spread.host_of[i] == m->spread.host)
            err = zr_shared_map(&where, m->base.held->bytes, PROT_READ, &m->peer[i]);
    }
    return err;
}

int zr_mpi_attach(struct zr_comm *c, struct zr_arena *a)
{
    struct zr_mpi *m = zr_mpi_of(c);
    int fd = zr_arena_fd(a);
    struct record mine = {.bytes = a->bytes,
                          .role = (int32_t)c->role,
                          .first = zr_comm_rank(c, 0),
                          .pid = (int32_t)getpid(),
                          .fd = fd},
                  *all = new_mpi_records(m);
    if (!all)
        return ZERO_ERR_NOMEM;
    int err = zr_comm_check_reserve(c, a);
    if (!err && fd >= 0)
        err = zr_shared_inode(fd, &mine.inode);
    err = agree_mpi_records(m, err, &mine, all);
    if (!err && m->set->tiers)
        err = agree_mpi_records(m, map_mpi_peers(m, all), &mine, all);
    free(all);
    if (err)
        zr_mpi_unmap(m);
    m->own = a->base + a->bytes - a->taken - c->reserve;
    return err;
}
