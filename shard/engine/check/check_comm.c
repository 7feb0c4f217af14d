/* SPDX-License-Identifier: Apache-2.0 */
/* check_comm.c: check mode for collectives. It watches a communicator (struct zr_comm_watch), and tells the
 * check (check_device.h) which memory each collective reads and writes before it begins. comm/comm.h says
 * what each collective promises about its order. */
#include "shard/engine/check/check_comm.h"
#include "comm/segment.h"
#include "kernels/alloc.h"

#include <stdlib.h>

/* A communicator that is watched. */
struct checked {
    struct zr_comm_watch base; /* first, because the communicator holds its address */
    struct zr_check *check;
    char *made_arena;            /* the arena that this communicator made, which is removed with it */
    struct zr_check_part *parts; /* (cap) parts of the operation that is being issued */
    int n_parts, cap;
};

static struct checked *checked_of(struct zr_comm_watch *w)
{
    return (struct checked *)w;
}

static void check_made(struct zr_comm_watch *w, struct zr_comm *c, const struct zr_arena *a)
{
    struct checked *m = checked_of(w);
    m->made_arena = a->base;
    /* The other ranks have their arenas and go on. This rank goes on too, unwatched. */
    if (zr_check_add(m->check, zr_role_name(c->role), m->made_arena, a->bytes))
        zr_check_stop(m->check);
}

/* ---- parts ---- */

/* Begins the list of parts of an operation, with room for n. Returns false if the check has stopped. */
static bool begin_parts(struct checked *m, int n)
{
    m->n_parts = 0;
    if (n <= m->cap)
        return true;
    struct zr_check_part *more = realloc(m->parts, (size_t)n * sizeof *more);
    if (!more) {
        zr_check_stop(m->check);
        return false;
    }
    m->parts = more;
    m->cap = n;
    return true;
}

/* Adds bytes of the arena to the list, unless there are none. */
static void add_part(struct checked *m, const struct zr_comm *c, int64_t at, int64_t bytes, int how)
{
    if (bytes > 0)
        m->parts[m->n_parts++] = (struct zr_check_part){c->arena + at, bytes, how};
}

/* Adds bytes of this rank's arena that other ranks read, if there are other ranks. */
static void add_others_read(struct checked *m, const struct zr_comm *c, int64_t at, int64_t bytes)
{
    if (c->group.size > 1)
        add_part(m, c, at, bytes, ZR_OTHERS_READ);
}

/* ---- collectives ---- */

static void note_gather(struct checked *m, const struct zr_comm *c, const struct zr_gather_seg *g)
{
    int64_t before = zr_cut_at(&g->cut, c->group.rank), own = zr_cut_bytes(&g->cut, c->group.rank);
    int64_t from = zr_gather_own(g, c->group.rank);
    bool in_place = from == g->dst + before;
    add_others_read(m, c, from, own);
    if (!in_place)
        add_part(m, c, from, own, ZR_MINE_READ);
    add_part(m, c, g->dst, in_place ? before : g->cut.total, ZR_MINE_WRITE);
    if (in_place)
        add_part(m, c, from + own, g->cut.total - before - own, ZR_MINE_WRITE);
}

static void note_reduce(struct checked *m, const struct zr_comm *c, const struct zr_reduce_seg *g)
{
    int64_t before = zr_cut_at(&g->cut, c->group.rank), own = zr_cut_bytes(&g->cut, c->group.rank);
    add_part(m, c, g->src + before, own, ZR_MINE_READ);
    add_others_read(m, c, g->src, before);
    add_others_read(m, c, g->src + before + own, g->cut.total - before - own);
    add_part(m, c, g->dst, own / zr_dtype_bytes(g->dtype) * (int64_t)sizeof(float), ZR_MINE_WRITE);
}

static void note_exchange(struct checked *m, const struct zr_comm *c, const struct zr_comm_op *op)
{
    int64_t bytes_per_rank = op->post.bytes, own = op->off + c->group.rank * bytes_per_rank;
    add_others_read(m, c, own, bytes_per_rank);
    add_part(m, c, op->off, own - op->off, ZR_MINE_WRITE);
    add_part(m, c, own + bytes_per_rank, (c->group.size - c->group.rank - 1) * bytes_per_rank, ZR_MINE_WRITE);
}

/* n parts of these bytes are sent. This rank copies its own part, if there is one. */
static void note_sent(struct checked *m, const struct zr_comm *c, const struct zr_comm_op *op, int64_t n)
{
    const int64_t bytes = op->post.bytes;
    add_others_read(m, c, op->off, n * bytes);
    add_part(m, c, n > 1 ? op->off + c->group.rank * bytes : op->off, bytes, ZR_MINE_READ);
    add_part(m, c, op->to, n * bytes, ZR_MINE_WRITE);
}

/* Notes the arrays of the program, which may be memory that the check knows. */
static void note_arrays(struct checked *m, const struct zr_comm *c, const struct zr_comm_op *op)
{
    const enum zr_op which = (enum zr_op)op->post.op;
    const struct zr_arrays *a = &op->arrays;
    const int64_t bytes = op->post.bytes, whole = bytes * c->group.size,
                  strided = (c->group.size - 1) * a->stride * zr_dtype_bytes(a->dtype) + bytes;
    const bool all = which == ZR_OP_ALL_TO_ALL;
    m->parts[m->n_parts++] = (struct zr_check_part){a->src,
                                                    all                             ? strided
                                                    : which == ZR_OP_REDUCE_SCATTER ? whole
                                                                                    : bytes,
                                                    ZR_MINE_READ};
    m->parts[m->n_parts++] =
        (struct zr_check_part){a->dst, all || which == ZR_OP_ALL_GATHER ? whole : bytes, ZR_MINE_WRITE};
}

/* Notes the memory that an operation touches. For an agreement, notes only what it reads. */
static void note_parts(struct checked *m, const struct zr_comm *c, const struct zr_comm_op *op)
{
    bool mine = op->post.root == c->group.rank;
    if (op->arrays.src) {
        note_arrays(m, c, op);
        return;
    }
    switch ((enum zr_op)op->post.op) {
    case ZR_OP_ALL_GATHER:
        for (uint32_t i = 0; i < op->post.n_seg; i++)
            note_gather(m, c, &op->gather[i]);
        break;
    case ZR_OP_REDUCE_SCATTER:
        for (uint32_t i = 0; i < op->post.n_seg; i++)
            note_reduce(m, c, &op->reduce[i]);
        break;
    case ZR_OP_BROADCAST:
        if (mine)
            add_others_read(m, c, op->off, op->post.bytes);
        else
            add_part(m, c, op->off, op->post.bytes, ZR_MINE_WRITE);
        break;
    case ZR_OP_EXCHANGE:
        note_exchange(m, c, op);
        break;
    case ZR_OP_AGREE:
        add_others_read(m, c, op->off, op->post.bytes);
        add_part(m, c, op->off, op->post.bytes, ZR_MINE_READ);
        break;
    case ZR_OP_ALL_TO_ALL:
        note_sent(m, c, op, c->group.size);
        break;
    case ZR_OP_SHIFT:
        note_sent(m, c, op, 1);
        break;
    case ZR_OP_ALL_REDUCE: /* only of arrays */
        break;
    }
}

/* Declares the operation, and which ranks wait for each other. In a broadcast the others wait for the root,
 * and it for them. A shift counts as if all waited for all, though only neighbours do; the simulator knows
 * that (comm/sim). In a gather, and in an operation of arrays, all wait for all at its start only.
 * In an agreement all read all records, then they meet, and then each writes its record. */
static struct zr_stream *check_puts(struct zr_comm_watch *w, struct zr_comm *c, struct zr_stream *s,
                                    const struct zr_comm_op *op)
{
    struct checked *m = checked_of(w);
    enum zr_op kind = (enum zr_op)op->post.op;
    const char *name = zr_op_name(kind);
    bool starts = kind != ZR_OP_BROADCAST || op->post.root == c->group.rank;
    if (!begin_parts(m, 4 * ((int)op->post.n_seg + 1)))
        return zr_check_inner(s);
    note_parts(m, c, op);
    zr_check_collective(m->check, s, name, op->post.unit, op->post.step, m->parts, m->n_parts, starts,
                        starts && kind != ZR_OP_ALL_GATHER && !op->arrays.src);
    if (kind == ZR_OP_AGREE) {
        m->n_parts = 0;
        add_part(m, c, op->off, op->post.bytes, ZR_MINE_WRITE);
        zr_check_collective(m->check, s, name, op->post.unit, op->post.step, m->parts, m->n_parts, true,
                            true);
    }
    return zr_check_inner(s);
}

static void check_closes(struct zr_comm_watch *w, struct zr_comm *c)
{
    struct checked *m = checked_of(w);
    c->watch = NULL;
    if (m->made_arena)
        zr_check_remove(m->check, m->made_arena);
    free(m->parts);
    free(m);
}

int zr_check_comm_watch(struct zr_check *check, struct zr_comm *c)
{
    struct checked *m;
    ZR_TRY(ZR_ZALLOC(m, 1, "the check of a communicator"));
    m->base = (struct zr_comm_watch){.made = check_made, .puts = check_puts, .closes = check_closes};
    m->check = check;
    c->watch = &m->base;
    return 0;
}
