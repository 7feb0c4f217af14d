/* SPDX-License-Identifier: Apache-2.0 */
/* roles.c: the communicators by role, and the calls that go to all of them. */
#include "comm/flight.h"
#include "shard/engine/internal.h"

#include <stdio.h>

/* ---- opening ---- */

void zr_roles_take(struct zr_engine *e, struct zr_comm *const comm[ZR_ROLES])
{
    for (int r = 0; r < ZR_ROLES; r++) {
        int i = 0;
        e->role[r].comm = comm[r];
        while (i < e->n_distinct && e->distinct[i] != comm[r])
            i++;
        if (comm[r] && i == e->n_distinct)
            e->distinct[e->n_distinct++] = comm[r];
    }
    const struct zr_group *all = &comm[ZR_ROLE_CONTROL]->group;
    e->dp = all->size;
    e->dp_rank = all->rank;
    e->rank = zr_comm_rank(comm[ZR_ROLE_CONTROL], all->rank);
    e->tp = comm[ZR_ROLE_TP] ? comm[ZR_ROLE_TP]->group.size : 1;
    e->tp_rank = comm[ZR_ROLE_TP] ? comm[ZR_ROLE_TP]->group.rank : 0;
    e->n_all = comm[ZR_ROLE_WORLD] ? comm[ZR_ROLE_WORLD]->group.size : e->dp;
    e->pp = e->n_all / (e->dp * e->tp);
    e->pp_at = e->rank / (e->n_all / e->pp);
    for (int r = 0; r < ZR_ROLES; r++)
        if (comm[r])
            zr_flight_role(e->flight, (enum zr_role)r, &comm[r]->group);
}

void zr_roles_streams(struct zr_engine *e)
{
    for (int r = 0; r < ZR_ROLES; r++) {
        bool gathers = r == ZR_ROLE_GATHER || r == ZR_ROLE_GATHER_OUTER;
        e->role[r].stream = gathers ? e->gather_stream : e->reduce_stream;
    }
    if (e->gather_outer_stream)
        e->role[ZR_ROLE_GATHER_OUTER].stream = e->gather_outer_stream;
    if (e->reduce_outer_stream)
        e->role[ZR_ROLE_REDUCE_OUTER].stream = e->reduce_outer_stream;
    e->role[ZR_ROLE_TP].stream = e->role[ZR_ROLE_CP].stream = e->compute;
    for (int i = 0; i < ZR_PAIR_ROLES; i++)
        e->role[ZR_ROLE_EVEN_PAIR + i].stream = e->pair_stream[i];
    e->role[ZR_ROLE_TIED].stream = e->tied_stream;
}

/* ---- collectives ---- */

/* Records an operation that is about to be put on the role's communicator, when its turn has come. *marked:
 * the tag for the communicator. */
static int mark(struct zr_engine *e, enum zr_role role, enum zr_op op, int64_t bytes,
                const struct zr_tag *tag, struct zr_tag *marked)
{
    ZR_TRY(zr_jobs_take_turn(e));
    *marked = *tag;
    zr_flight_issue(e->flight, role, op, bytes, marked);
    return 0;
}

int zr_role_gather_on(struct zr_engine *e, enum zr_role role, struct zr_stream *s,
                      const struct zr_gather_seg *seg, int n, const struct zr_tag *tag)
{
    struct zr_comm *c = e->role[role].comm;
    int64_t bytes = 0;
    for (int i = 0; i < n; i++)
        bytes += seg[i].cut.total;
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_ALL_GATHER, bytes, tag, &marked));
    return zr_comm_all_gather(c, s, seg, n, &marked);
}

int zr_role_gather(struct zr_engine *e, enum zr_role role, const struct zr_gather_seg *seg, int n,
                   const struct zr_tag *tag)
{
    return zr_role_gather_on(e, role, e->role[role].stream, seg, n, tag);
}

int zr_role_reduce(struct zr_engine *e, enum zr_role role, const struct zr_reduce_seg *seg, int n,
                   const struct zr_tag *tag)
{
    const struct zr_role_run *r = &e->role[role];
    int64_t bytes = 0;
    for (int i = 0; i < n; i++)
        bytes += seg[i].cut.total;
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_REDUCE_SCATTER, bytes, tag, &marked));
    return zr_comm_reduce_scatter(r->comm, r->stream, seg, n, &marked);
}

int zr_role_arrays(struct zr_engine *e, enum zr_role role, struct zr_stream *s, enum zr_op op,
                   const struct zr_arrays *arrays, const struct zr_tag *tag)
{
    struct zr_comm *c = e->role[role].comm;
    const int64_t bytes = arrays->n * zr_dtype_bytes(arrays->dtype);
    const bool one = op == ZR_OP_ALL_REDUCE || op == ZR_OP_SHIFT;
    struct zr_tag marked;
    ZR_TRY(mark(e, role, op, one ? bytes : bytes * c->group.size, tag, &marked));
    return zr_comm_arrays(c, s, op, arrays, &marked);
}

int zr_role_all_to_all(struct zr_engine *e, enum zr_role role, int64_t src, int64_t dst, int64_t bytes,
                       const struct zr_tag *tag)
{
    const struct zr_role_run *r = &e->role[role];
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_ALL_TO_ALL, bytes * r->comm->group.size, tag, &marked));
    return zr_comm_all_to_all(r->comm, r->stream, src, dst, bytes, &marked);
}

int zr_role_shift(struct zr_engine *e, enum zr_role role, struct zr_stream *s, int64_t src, int64_t dst,
                  int64_t bytes, int32_t by, const struct zr_tag *tag)
{
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_SHIFT, bytes, tag, &marked));
    return zr_comm_shift(e->role[role].comm, s, src, dst, bytes, by, &marked);
}

int zr_role_exchange(struct zr_engine *e, enum zr_role role, int64_t off, int64_t slot_bytes,
                     const struct zr_tag *tag)
{
    const struct zr_role_run *r = &e->role[role];
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_EXCHANGE, slot_bytes * r->comm->group.size, tag, &marked));
    return zr_comm_exchange(r->comm, r->stream, off, slot_bytes, &marked);
}

int zr_role_barrier(struct zr_engine *e, enum zr_role role, const struct zr_tag *tag)
{
    const struct zr_role_run *r = &e->role[role];
    if (e->control_base == e->reduce_base || role == ZR_ROLE_CONTROL)
        return zr_role_exchange(e, role, e->plan->exchange_at, ZR_EXCHANGE_BYTES, tag);
    /* The arena of gradients then has no memory for exchanges, so this uses a word of the norm, which is
     * rewritten before its next use. The previous step's norm has been read by now, though that happens on
     * the reduce stream. A job with a barrier (DROP_SUMS) follows a REDUCE_OUTER of its step, which waits
     * for a REDUCE on that stream. Or it follows a norm that the host has waited for. */
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_AGREE, sizeof(uint64_t), tag, &marked));
    return zr_comm_agree(r->comm, r->stream, e->plan->norm_at, 0, 1, &marked);
}

int zr_role_broadcast(struct zr_engine *e, enum zr_role role, int64_t off, int64_t bytes, int root,
                      const struct zr_tag *tag)
{
    const struct zr_role_run *r = &e->role[role];
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_BROADCAST, bytes, tag, &marked));
    return zr_comm_broadcast(r->comm, r->stream, off, bytes, root, &marked);
}

int zr_world_agree(struct zr_engine *e, int64_t off, int32_t n_sum, int32_t n_max, const struct zr_tag *tag)
{
    const enum zr_role role = zr_widest_role(e);
    const struct zr_role_run *r = &e->role[role];
    struct zr_tag marked;
    ZR_TRY(mark(e, role, ZR_OP_AGREE, ((int64_t)n_sum + n_max) * (int64_t)sizeof(uint64_t), tag, &marked));
    return zr_comm_agree(r->comm, r->stream, off, n_sum, n_max, &marked);
}

/* ---- all communicators ---- */

bool zr_roles_alarmed(const struct zr_engine *e)
{
    uint32_t alarm = 0;
    for (int i = 0; i < e->n_distinct; i++)
        alarm |= atomic_load_explicit(e->distinct[i]->alarm, memory_order_acquire);
    return alarm != 0;
}

int zr_roles_status(const struct zr_engine *e, char *why, size_t n_why)
{
    int code = 0;
    for (int i = 0; !code && i < e->n_distinct; i++)
        code = zr_comm_status(e->distinct[i], why, n_why);
    return code;
}

void zr_roles_abort(struct zr_engine *e, int code, const char *text)
{
    for (int i = 0; i < e->n_distinct; i++)
        e->distinct[i]->ops->abort(e->distinct[i], code, text);
}

/* Whether the communicator moves activations over tp or cp, messages between pipeline stages, or tied
 * tensors. The model's thread issues these, when its turn comes (mark). */
static bool moves_activations(const struct zr_engine *e, const struct zr_comm *c)
{
    bool moves = c == e->role[ZR_ROLE_TP].comm || c == e->role[ZR_ROLE_CP].comm;
    for (int r = ZR_ROLE_EVEN_PAIR; r <= ZR_ROLE_TIED; r++)
        moves |= c == e->role[r].comm;
    return moves;
}

/* Leaves out communicators that the model's thread uses, because that thread may wait. */
bool zr_roles_have_room(const struct zr_engine *e, int n_ops)
{
    for (int i = 0; i < e->n_distinct; i++) {
        struct zr_comm *c = e->distinct[i];
        if (!moves_activations(e, c) && c->ops->has_room && !c->ops->has_room(c, n_ops, e->most_segs))
            return false;
    }
    return true;
}

/* Waits only for operations that this rank has issued before, as zr_engine_is_ready does. */
int zr_roles_make_room(struct zr_engine *e)
{
    return zr_roles_have_room(e, 1) ? 0 : zr_engine_drain(e);
}

/* Stops at the first one that is stuck, because each may wait for a while before it answers. */
bool zr_roles_stuck(const struct zr_engine *e)
{
    bool stuck = false;
    for (int i = 0; i < e->n_distinct && !stuck; i++) {
        struct zr_comm *c = e->distinct[i];
        stuck = c->ops->stuck && c->ops->stuck(c);
    }
    return stuck;
}

bool zr_roles_may_stick(const struct zr_engine *e)
{
    bool may = false;
    for (int i = 0; i < e->n_distinct; i++)
        may |= e->distinct[i]->ops->stuck != NULL;
    return may;
}

static int64_t wire_bytes(struct zr_comm *c)
{
    struct zr_comm_stats s;
    zr_comm_stats(c, &s);
    return s.wire_bytes;
}

int64_t zr_roles_wire_bytes(const struct zr_engine *e)
{
    int64_t bytes = 0;
    for (int i = 0; i < e->n_distinct; i++)
        if (!moves_activations(e, e->distinct[i]))
            bytes += wire_bytes(e->distinct[i]);
    return bytes;
}

int64_t zr_roles_axis_bytes(const struct zr_engine *e, enum zr_role role)
{
    return e->role[role].comm ? wire_bytes(e->role[role].comm) : 0;
}

int64_t zr_roles_pipe_bytes(const struct zr_engine *e)
{
    int64_t bytes = 0;
    for (int r = ZR_ROLE_EVEN_PAIR; r <= ZR_ROLE_TIED; r++)
        if (e->role[r].comm)
            bytes += wire_bytes(e->role[r].comm);
    return bytes;
}

int64_t zr_roles_library_bytes(const struct zr_engine *e)
{
    int64_t bytes = 0;
    struct zr_comm_stats s;
    for (int i = 0; i < e->n_distinct; i++) {
        zr_comm_stats(e->distinct[i], &s);
        bytes += s.library_bytes;
    }
    return bytes;
}

int64_t zr_roles_outer_bytes(const struct zr_engine *e)
{
    static const enum zr_role outer[] = {ZR_ROLE_GATHER_OUTER, ZR_ROLE_REDUCE_OUTER, ZR_ROLE_CONTROL,
                                         ZR_ROLE_WORLD};
    int64_t bytes = 0;
    for (size_t i = 0; e->plan->spec.outer && i < sizeof outer / sizeof *outer; i++)
        if (e->role[outer[i]].comm)
            bytes += wire_bytes(e->role[outer[i]].comm);
    return bytes;
}

struct zr_received zr_received_so_far(const struct zr_engine *e)
{
    return (struct zr_received){zr_roles_wire_bytes(e), zr_roles_outer_bytes(e),
                                zr_roles_axis_bytes(e, ZR_ROLE_TP), zr_roles_axis_bytes(e, ZR_ROLE_CP)};
}

void zr_do_not_count_since(struct zr_engine *e, struct zr_received before)
{
    struct zr_received now = zr_received_so_far(e);
    e->m.not_counted.wire += now.wire - before.wire;
    e->m.not_counted.outer += now.outer - before.outer;
    e->m.not_counted.tp += now.tp - before.tp;
    e->m.not_counted.cp += now.cp - before.cp;
}

void zr_do_not_count_axis(struct zr_engine *e, enum zr_role role, int64_t bytes)
{
    const int32_t others = e->role[role].comm ? e->role[role].comm->group.size - 1 : 0;
    *(role == ZR_ROLE_TP ? &e->m.not_counted.tp : &e->m.not_counted.cp) += others * bytes;
}

void zr_engine_last_op(const struct zr_engine *e, char *text, size_t n)
{
    char last[96];
    text[0] = 0;
    for (int i = 0; i < e->n_distinct; i++) {
        struct zr_comm *c = e->distinct[i];
        bool inside = c->ops->last && c->ops->last(c, last, sizeof last);
        if (c->ops->last && last[0] && (inside || !text[0]))
            snprintf(text, n, "%s %s", inside ? "during" : "after", last);
        if (inside)
            return;
    }
}
