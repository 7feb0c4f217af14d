/* SPDX-License-Identifier: Apache-2.0 */
/* self.c: the communicator of one rank. Everything this rank needs it already has: a gather in place
 * and an exchange are nothing at all, and a reduce is one pass from src to dst. */
#include "comm/backend.h"
#include "comm/flight.h"
#include "comm/plain_arena.h"
#include "comm/segment.h"
#include "kernels/first_failure.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct self {
    struct zr_comm base; /* first: callers hold its address */
    struct zr_device *dev;
    struct zr_arena *held;
    char *arena; /* its */
    int64_t arena_bytes;
    _Atomic int64_t n_all_gather, n_reduce_scatter, n_broadcast, n_exchange, n_agree;
    struct zr_first failure;
    _Atomic uint32_t alarm;
};

static struct self *self_of(struct zr_comm *c)
{
    return (struct self *)c;
}

static int self_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    return zr_plain_arena(self_of(c)->dev, "self", bytes, out);
}

static int self_attach(struct zr_comm *c, struct zr_arena *a)
{
    struct self *m = self_of(c);
    if (m->held)
        return zr_fail(ZR_ERR_ORDER, "self: an arena is attached once");
    atomic_fetch_add(&a->n_held, 1);
    m->held = a;
    m->arena = a->base;
    m->arena_bytes = a->bytes;
    return 0;
}

static int self_all_gather(struct zr_comm *c, struct zr_stream *s, const struct zr_gather_seg *seg, int n_seg,
                           const struct zr_tag *tag)
{
    struct self *m = self_of(c);
    int err = zr_gather_check("self all_gather", 1, m->arena_bytes, seg, n_seg);
    if (err || zr_first_code(&m->failure))
        return err;
    for (int i = 0; i < n_seg && !err; i++)
        if (seg[i].src != seg[i].dst && seg[i].cut.total > 0)
            err = m->dev->ops->copy(s, m->arena + seg[i].dst, m->arena + seg[i].src, seg[i].cut.total);
    m->n_all_gather += !err;
    if (!err)
        zr_flight_at_once(&tag->mark);
    return err;
}

static int reduce_one(struct self *m, struct zr_stream *s, const struct zr_reduce_seg *g)
{
    const struct zr_device_ops *ops = m->dev->ops;
    int64_t n = g->cut.total / zr_dtype_bytes(g->dtype);
    float *dst = (float *)(m->arena + g->dst);
    void *src = m->arena + g->src;
    if (n == 0)
        return 0;
    if (!g->accumulate && g->dtype == ZR_F32)
        return dst == src ? 0 : ops->copy(s, dst, src, g->cut.total);
    if (!g->accumulate)
        return ops->cast(s, dst, ZR_F32, src, g->dtype, n);
    return ops->add(s, dst, src, g->dtype, n);
}

static int self_reduce_scatter(struct zr_comm *c, struct zr_stream *s, const struct zr_reduce_seg *seg,
                               int n_seg, const struct zr_tag *tag)
{
    struct self *m = self_of(c);
    int err = zr_reduce_check("self reduce_scatter", 1, 0, m->arena_bytes, seg, n_seg);
    if (err || zr_first_code(&m->failure))
        return err;
    for (int i = 0; i < n_seg && !err; i++)
        err = reduce_one(m, s, &seg[i]);
    m->n_reduce_scatter += !err;
    if (!err)
        zr_flight_at_once(&tag->mark);
    return err;
}

static int self_broadcast(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t bytes, int root,
                          const struct zr_tag *tag)
{
    struct self *m = self_of(c);
    (void)s;
    if (root != 0)
        return zr_fail(ZR_ERR_ARG, "self broadcast: root is %d: 0 is allowed (of one rank)", root);
    int err = zr_range_check("self broadcast", m->arena_bytes, off, bytes, 1);
    if (!err && !zr_first_code(&m->failure)) {
        m->n_broadcast++;
        zr_flight_at_once(&tag->mark);
    }
    return err;
}

static int self_exchange(struct zr_comm *c, struct zr_stream *s, int64_t off, int64_t slot_bytes,
                         const struct zr_tag *tag)
{
    struct self *m = self_of(c);
    (void)s;
    int err = zr_range_check("self exchange", m->arena_bytes, off, slot_bytes, 1);
    if (!err && !zr_first_code(&m->failure)) {
        m->n_exchange++;
        zr_flight_at_once(&tag->mark);
    }
    return err;
}

static int self_agree(struct zr_comm *c, struct zr_stream *s, int64_t off, int32_t n_sum, int32_t n_max,
                      const struct zr_tag *tag)
{
    struct self *m = self_of(c);
    (void)s;
    int err = zr_agree_check("self agree", m->arena_bytes, off, n_sum, n_max);
    if (!err && !zr_first_code(&m->failure)) {
        m->n_agree++;
        zr_flight_at_once(&tag->mark);
    }
    return err;
}

static void self_abort(struct zr_comm *c, int code, const char *why)
{
    struct self *m = self_of(c);
    zr_first_keep(&m->failure, code, why);
    atomic_store(&m->alarm, 1);
}

static int self_status(struct zr_comm *c, char *why, size_t why_bytes)
{
    return zr_first_report(&self_of(c)->failure, why, why_bytes);
}

/* Operations are counted when they are issued: what they enqueue cannot fail any more. */
static void self_stats(struct zr_comm *c, struct zr_comm_stats *out)
{
    struct self *m = self_of(c);
    *out = (struct zr_comm_stats){.n_all_gather = m->n_all_gather,
                                  .n_reduce_scatter = m->n_reduce_scatter,
                                  .n_broadcast = m->n_broadcast,
                                  .n_exchange = m->n_exchange,
                                  .n_agree = m->n_agree};
}

static void self_close(struct zr_comm *c)
{
    if (!c)
        return;
    zr_arena_drop(self_of(c)->held);
    free(self_of(c));
}

static const struct zr_comm_ops self_ops = {
    .name = "self",
    .deterministic = true,
    .arena = self_arena,
    .attach = self_attach,
    .all_gather = self_all_gather,
    .reduce_scatter = self_reduce_scatter,
    .broadcast = self_broadcast,
    .exchange = self_exchange,
    .agree = self_agree,
    .abort = self_abort,
    .status = self_status,
    .stats = self_stats,
    .close = self_close,
};

int zr_self_open(struct zr_device *dev, enum zr_role role, struct zr_comm **out)
{
    struct self *m = calloc(1, sizeof *m);
    if (!m)
        return zr_fail(ZR_ERR_NOMEM, "self: no memory for a communicator of %zu bytes", sizeof *m);
    m->base =
        (struct zr_comm){.ops = &self_ops, .group = zr_group_of_all(0, 1), .role = role, .alarm = &m->alarm};
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
