/* SPDX-License-Identifier: Apache-2.0 */
/* check_comm.c: see check_comm.h. What each collective promises about its order is in comm/comm.h. */
#include "shard/engine/check/check_comm.h"
#include "comm/segment.h"

#include <stdlib.h>

struct checked {
    struct zr_comm base; /* first: callers hold its address */
    struct zr_comm_ops ops;
    struct zr_comm *inner;
    struct zr_check *check;
    char *arena, *made;          /* the latter: by this one, and so removed by it */
    struct zr_check_part *parts; /* (cap) of the collective being issued */
    int n_parts, cap;
};

static struct checked *of(struct zr_comm *c)
{
    return (struct checked *)c;
}

static int arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct checked *m = of(c);
    int err = m->inner->ops->arena(m->inner, bytes, out);
    if (err)
        return err;
    m->made = (*out)->base;
    /* The other ranks have their arenas and go on: so does this one, unwatched. */
    if (zr_check_add(m->check, zr_role_name(c->role), m->made, bytes))
        zr_check_stop(m->check);
    return 0;
}

static int attach(struct zr_comm *c, struct zr_arena *a)
{
    struct checked *m = of(c);
    int err = m->inner->ops->attach(m->inner, a);
    if (err)
        return err;
    m->arena = a->base;
    m->base.alarm = m->inner->alarm;
    return 0;
}

/* ---- parts ---- */

/* Room for n; false: the check has stopped. */
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

static void check_part(struct checked *m, int64_t at, int64_t bytes, int how)
{
    if (bytes > 0)
        m->parts[m->n_parts++] = (struct zr_check_part){m->arena + at, bytes, how};
}

/* What others read, but for a rank that has none. */
static void others_read(struct checked *m, int64_t at, int64_t bytes)
{
    if (m->base.group.size > 1)
        check_part(m, at, bytes, ZR_OTHERS_READ);
}

static void report(struct checked *m, struct zr_stream *s, enum zr_op op, const struct zr_tag *tag,
                   bool starts, bool ends)
{
    zr_check_collective(m->check, s, zr_op_name(op), tag->unit, tag->step, m->parts, m->n_parts, starts,
                        ends);
}

/* ---- collectives ---- */

static int all_gather(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                      const struct zr_tag *tag)
{
    struct checked *m = of(c);
    bool reported = begin_parts(m, 4 * n_seg);
    for (int i = 0; reported && i < n_seg; i++) {
        const struct zr_gather_seg *g = &seg[i];
        int64_t before = zr_cut_at(&g->cut, c->group.rank), own = zr_cut_bytes(&g->cut, c->group.rank);
        int64_t from = zr_gather_own(g, c->group.rank);
        bool in_place = from == g->dst + before;
        others_read(m, from, own);
        if (!in_place)
            check_part(m, from, own, ZR_MINE_READ);
        check_part(m, g->dst, in_place ? before : g->cut.total, ZR_MINE_WRITE);
        if (in_place)
            check_part(m, from + own, g->cut.total - before - own, ZR_MINE_WRITE);
    }
    if (reported)
        report(m, s, ZR_OP_ALL_GATHER, tag, true, false);
    return m->inner->ops->all_gather(m->inner, zr_check_inner(s), seg, n_seg, tag);
}

static int reduce_scatter(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg, int n_seg,
                          const struct zr_tag *tag)
{
    struct checked *m = of(c);
    bool reported = begin_parts(m, 4 * n_seg);
    for (int i = 0; reported && i < n_seg; i++) {
        const struct zr_reduce_seg *g = &seg[i];
        int64_t before = zr_cut_at(&g->cut, c->group.rank), own = zr_cut_bytes(&g->cut, c->group.rank);
        check_part(m, g->src + before, own, ZR_MINE_READ);
        others_read(m, g->src, before);
        others_read(m, g->src + before + own, g->cut.total - before - own);
        check_part(m, g->dst, own / zr_dtype_bytes(g->dtype) * (int64_t)sizeof(float), ZR_MINE_WRITE);
    }
    if (reported)
        report(m, s, ZR_OP_REDUCE_SCATTER, tag, true, true);
    return m->inner->ops->reduce_scatter(m->inner, zr_check_inner(s), seg, n_seg, tag);
}

static int broadcast(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                     const struct zr_tag *tag)
{
    struct checked *m = of(c);
    bool reported = begin_parts(m, 1);
    bool mine = root == c->group.rank;
    if (reported && mine)
        others_read(m, off, bytes);
    else if (reported)
        check_part(m, off, bytes, ZR_MINE_WRITE);
    /* Others wait for the root and it for them, but not for each other. */
    if (reported)
        report(m, s, ZR_OP_BROADCAST, tag, mine, mine);
    return m->inner->ops->broadcast(m->inner, zr_check_inner(s), off, bytes, root, tag);
}

static int check_exchange(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                          const struct zr_tag *tag)
{
    struct checked *m = of(c);
    bool reported = begin_parts(m, 3);
    int64_t own = off + c->group.rank * slot_bytes;
    if (reported) {
        others_read(m, own, slot_bytes);
        check_part(m, off, own - off, ZR_MINE_WRITE);
        check_part(m, own + slot_bytes, (c->group.size - c->group.rank - 1) * slot_bytes, ZR_MINE_WRITE);
        report(m, s, ZR_OP_EXCHANGE, tag, true, true);
    }
    return m->inner->ops->exchange(m->inner, zr_check_inner(s), off, slot_bytes, tag);
}

/* First all read all records, then each writes its own; in between they meet. */
static int check_agree(struct zr_comm *c, struct zr_stream *s, int64_t off, int32_t n_sum, int32_t n_max,
                       const struct zr_tag *tag)
{
    struct checked *m = of(c);
    int64_t bytes = ((int64_t)n_sum + n_max) * (int64_t)sizeof(uint64_t);
    if (begin_parts(m, 2)) {
        others_read(m, off, bytes);
        check_part(m, off, bytes, ZR_MINE_READ);
        report(m, s, ZR_OP_AGREE, tag, true, true);
        begin_parts(m, 1);
        check_part(m, off, bytes, ZR_MINE_WRITE);
        report(m, s, ZR_OP_AGREE, tag, true, true);
    }
    return m->inner->ops->agree(m->inner, zr_check_inner(s), off, n_sum, n_max, tag);
}

/* ---- the rest ---- */

static void abort_all(struct zr_comm *c, int code, const char *why)
{
    of(c)->inner->ops->abort(of(c)->inner, code, why);
}

static int status(struct zr_comm *c, char *why, size_t why_bytes)
{
    return of(c)->inner->ops->status(of(c)->inner, why, why_bytes);
}

static void stats(struct zr_comm *c, struct zr_comm_stats *out)
{
    of(c)->inner->ops->stats(of(c)->inner, out);
}

static bool last(struct zr_comm *c, char *text, size_t n_text)
{
    struct zr_comm *inner = of(c)->inner;
    if (inner->ops->last)
        return inner->ops->last(inner, text, n_text);
    text[0] = 0;
    return false;
}

static void called(struct zr_comm *c, const struct zr_called *call)
{
    struct zr_comm *inner = of(c)->inner;
    if (inner->ops->called)
        inner->ops->called(inner, call);
}

static void compare(struct zr_comm *c, int code, const char *what)
{
    struct zr_comm *inner = of(c)->inner;
    if (inner->ops->compare)
        inner->ops->compare(inner, code, what);
    else
        inner->ops->abort(inner, code, what);
}

static bool has_room(struct zr_comm *c, int n_ops, int n_seg)
{
    struct zr_comm *inner = of(c)->inner;
    return !inner->ops->has_room || inner->ops->has_room(inner, n_ops, n_seg);
}

static bool stuck(struct zr_comm *c)
{
    struct zr_comm *inner = of(c)->inner;
    return inner->ops->stuck && inner->ops->stuck(inner);
}

static void close_comm(struct zr_comm *c)
{
    if (!c)
        return;
    struct checked *m = of(c);
    if (m->made)
        zr_check_remove(m->check, m->made);
    m->inner->ops->close(m->inner);
    free(m->parts);
    free(m);
}

static const struct zr_comm_ops checked_ops = {
    .arena = arena,
    .attach = attach,
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .broadcast = broadcast,
    .exchange = check_exchange,
    .agree = check_agree,
    .abort = abort_all,
    .status = status,
    .stats = stats,
    .last = last,
    .called = called,
    .compare = compare,
    .has_room = has_room,
    .stuck = stuck,
    .close = close_comm,
};

int zr_check_comm_open(struct zr_check *check, struct zr_comm *inner, struct zr_comm **out)
{
    struct checked *m = calloc(1, sizeof *m);
    *out = NULL;
    if (!m) {
        inner->ops->close(inner);
        return zr_fail(ZR_ERR_NOMEM, "check: no memory for a communicator");
    }
    m->ops = checked_ops;
    m->ops.name = inner->ops->name;
    m->ops.deterministic = inner->ops->deterministic;
    m->base = *inner;
    m->base.ops = &m->ops;
    m->inner = inner;
    m->check = check;
    *out = &m->base;
    return 0;
}
