/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_parts.c: all-to-all and shift, in which each rank sends parts to places further on in the group. A part
 * from a rank of another host is a message. A part from a rank of this host is copied out of its arena. */
#include "comm/mpi/mpi_comm.h"

/* The parts of one operation. At each distance from first to end - 1, this rank sends a part to the place
 * that far ahead, and receives one from the place that far behind. */
struct parts {
    struct zr_mpi *m;
    const struct zr_comm_op *op;
    int first, end;
    /* Bytes from the part of one place to that of the next. */
    int64_t stride;
};

static bool comes_by_copy(const struct parts *p, int place)
{
    const struct zr_spread *s = &p->m->spread;
    return place == p->m->base.group.rank || (s->size && s->host_of[place] == s->host);
}

static int begin_messages(const struct parts *p, int distance)
{
    int to = zr_shift_from(&p->m->base.group, -distance), from = zr_shift_from(&p->m->base.group, distance);
    char *arena = p->m->base.arena;
    int64_t bytes = p->op->post.bytes;
    return zr_mpi_swap(p->m, arena + p->op->off + to * p->stride, comes_by_copy(p, to) ? 0 : bytes, to,
                       arena + p->op->to + from * p->stride, comes_by_copy(p, from) ? 0 : bytes, from);
}

static int copy_part(const struct parts *p, int distance)
{
    int me = p->m->base.group.rank, from = zr_shift_from(&p->m->base.group, distance);
    if (!comes_by_copy(p, from))
        return 0;
    const char *arena = from == me ? p->m->base.arena : p->m->peer[from];
    return zr_mpi_pull(p->m, p->m->base.arena + p->op->to + from * p->stride,
                       arena + p->op->off + me * p->stride, p->op->post.bytes);
}

int zr_mpi_pass(struct zr_mpi *m, const struct zr_comm_op *op)
{
    const int size = m->base.group.size, distance = (op->by % size + size) % size;
    const bool all = op->post.op == ZR_OP_ALL_TO_ALL;
    const struct parts p = {.m = m,
                            .op = op,
                            .first = all ? 0 : distance,
                            .end = all ? size : distance + 1,
                            .stride = all ? op->post.bytes : 0};
    int err = 0;
    for (int k = p.first; k < p.end && !err; k++)
        err = begin_messages(&p, k);
    for (int k = p.first; k < p.end && !err; k++)
        err = copy_part(&p, k);
    err = err ? err : zr_mpi_await(m, &m->data[0], 0);
    return err || !m->spread.size ? err : zr_mpi_meet_host(m); /* no rank reads my arena any more */
}
