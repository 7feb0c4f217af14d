/* SPDX-License-Identifier: Apache-2.0 */
/* self.c: the communicator of a single rank, which has all data already. A gather in place, a broadcast, an
 * exchange and an agreement do nothing. Another gather, an all-to-all and a shift copy. A sum is one pass
 * from src to dst. */
#include "comm/backend.h"
#include "comm/flight.h"
#include "comm/shared_memory.h"
#include "kernels/alloc.h"

#include <stdlib.h>

/* The communicator. */
struct self {
    struct zr_comm base; /* must be first: callers hold its address */
    struct zr_device *dev;
    struct zr_first failure;
    _Atomic uint32_t alarm; /* 1: it was aborted, and failure says why */
};

static struct self *self_of(struct zr_comm *c)
{
    return (struct self *)c;
}

static int self_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    return zr_plain_arena(self_of(c)->dev, "self", bytes, out);
}

static int gather_one(struct self *m, struct zr_stream *s, const struct zr_gather_seg *g)
{
    if (g->src == g->dst || g->cut.total == 0)
        return 0;
    return m->dev->ops->copy(s, m->base.arena + g->dst, m->base.arena + g->src, g->cut.total);
}

static int reduce_one(struct self *m, struct zr_stream *s, const struct zr_reduce_seg *g)
{
    const struct zr_device_ops *ops = m->dev->ops;
    int64_t n = g->cut.total / zr_dtype_bytes(g->dtype);
    float *dst = (float *)(m->base.arena + g->dst);
    void *src = m->base.arena + g->src;
    if (n == 0)
        return 0;
    if (!g->accumulate && g->dtype == ZERO_F32)
        return dst == src ? 0 : ops->copy(s, dst, src, g->cut.total);
    if (!g->accumulate)
        return ops->cast(s, dst, ZERO_F32, src, g->dtype, n);
    return ops->add(s, dst, src, g->dtype, n);
}

/* An operation counts as done when it is issued: what it puts on the stream cannot fail any more. */
static int self_run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    bool passes = op->post.op == ZR_OP_ALL_TO_ALL || op->post.op == ZR_OP_SHIFT;
    int err = 0;
    if (passes && op->post.bytes)
        err = self_of(c)->dev->ops->copy(s, c->arena + op->to, c->arena + op->off, op->post.bytes);
    for (uint32_t i = 0; i < op->post.n_seg && !err; i++)
        err = op->post.op == ZR_OP_ALL_GATHER ? gather_one(self_of(c), s, &op->gather[i])
                                              : reduce_one(self_of(c), s, &op->reduce[i]);
    if (err)
        return err;
    zr_flight_start(&op->mark);
    zr_comm_done(c, op);
    return 0;
}

static void self_abort(struct zr_comm *c, int code, const char *why)
{
    struct self *m = self_of(c);
    zr_first_keep(&m->failure, code, why);
    atomic_store(&m->alarm, 1);
}

static void self_close(struct zr_comm *c)
{
    zr_arena_drop(c->held);
    free(self_of(c));
}

static const struct zr_comm_ops self_ops = {
    .name = "self",
    .deterministic = true,
    .arena = self_arena,
    .run = self_run,
    .abort = self_abort,
    .close = self_close,
};

int zr_self_open(struct zr_device *dev, enum zr_role role, struct zr_comm **out)
{
    struct self *m;
    ZR_TRY(ZR_ZALLOC(m, 1, "a communicator of one rank"));
    m->base = (struct zr_comm){.ops = &self_ops,
                               .group = zr_group_of_all(0, 1),
                               .role = role,
                               .alarm = &m->alarm,
                               .failure = &m->failure};
    m->dev = dev;
    *out = &m->base;
    return 0;
}

static int self_open_roles(struct zr_rendezvous *rdv, struct zr_device *dev,
                           const struct zr_backend_config *config, const struct zr_role_ask ask[ZR_ROLES],
                           struct zr_comm *comm[ZR_ROLES])
{
    int err = 0;
    (void)rdv, (void)config;
    for (int r = 0; !err && r < ZR_ROLES; r++)
        if (ask[r].group)
            err = zr_self_open(dev, (enum zr_role)r, &comm[r]);
    return err;
}

const struct zr_backend zr_backend_self = {.name = "self", .alone = true, .open = self_open_roles};
