/* SPDX-License-Identifier: Apache-2.0 */
/* engine.c: opens and closes an engine, and computes the address of every element that it holds. */
#include "comm/fork.h"
#include "kernels/alloc.h"
#include "shard/engine/issue.h"
#include "shard/engine/mesh_axis.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- addresses ---- */

int zr_flat_ranges(const struct zr_layout *l, const struct zr_flat *f, int64_t lo, int64_t hi, zr_range_fn fn,
                   void *arg)
{
    for (int32_t k = 0; k < f->n_pieces; k++) {
        const struct zr_piece *p = &l->pieces[f->first_piece + k];
        int64_t from = zr_max(lo, p->first), to = zr_min(hi, p->first + p->n);
        if (from >= to)
            continue;
        int err = fn(arg, f, p, from, to - from);
        if (err)
            return err;
    }
    return 0;
}

struct zr_span zr_engine_kept(const struct zr_engine *e, const struct zr_flat *f)
{
    return zr_flat_span(f, e->at, zr_level_of(e->plan->placement.state));
}

char *zr_engine_param_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    if (e->plan->resident[f->unit])
        return e->gather_base + zr_plan_param_full(e->plan, f, -1) + first * size;
    return e->gather_base + zr_plan_param_own(e->plan, f, e->at) +
           (first - zr_engine_inner(e, f).first) * size;
}

char *zr_engine_master_at(const struct zr_engine *e, const struct zr_flat *f, int64_t first)
{
    int64_t at = e->plan->master_at[f - e->layout->flats];
    if (at < 0)
        return zr_engine_param_at(e, f, first);
    if (e->i.parts)
        return zr_part_at(e, f, ZR_VALUE_MASTER, first);
    return e->master + at + (first - zr_engine_kept(e, f).first) * zr_plan_master_size(f);
}

char *zr_engine_state_at(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first)
{
    int64_t at = e->plan->state_at[i * e->layout->n_flats + (f - e->layout->flats)];
    if (e->i.parts)
        return zr_part_at(e, f, i, first);
    return e->state[i] + at + (first - zr_engine_kept(e, f).first) * zr_plan_state_size(f);
}

uint16_t *zr_engine_scales_at(const struct zr_engine *e, const struct zr_flat *f, int i, int64_t first)
{
    if (f->moments != ZERO_MOMENTS_Q8)
        return NULL;
    if (e->i.parts)
        return (uint16_t *)zr_part_at(e, f, ZR_SCALE(i), first);
    return (uint16_t *)(e->state[i] + zr_plan_scales_at(e->plan, f, i)) +
           (first - zr_engine_kept(e, f).first) / ZR_Q8_BLOCK;
}

char *zr_engine_value_at(const struct zr_engine *e, const struct zr_flat *f, int kind, int64_t first)
{
    if (kind >= ZR_SCALE(0))
        return (char *)zr_engine_scales_at(e, f, kind - ZR_SCALE(0), first);
    return kind == ZR_VALUE_PARAM    ? zr_engine_param_at(e, f, first)
           : kind == ZR_VALUE_MASTER ? zr_engine_master_at(e, f, first)
                                     : zr_engine_state_at(e, f, kind, first);
}

/* ---- opening ---- */

static int attach_role(struct zr_engine *e, enum zr_role role, struct zr_arena *a)
{
    struct zr_comm *c = e->role[role].comm;
    return c ? zr_comm_attach(c, a) : 0;
}

int zr_engine_open_arena(struct zr_engine *e, const enum zr_role *roles, int n_roles, int64_t bytes,
                         char **base)
{
    struct zr_arena *a;
    int err = zr_comm_arena(e->role[roles[0]].comm, bytes, &a);
    if (err)
        return err;
    *base = a->base;
    for (int i = 0; !err && i < n_roles; i++)
        err = attach_role(e, roles[i], a);
    zr_arena_drop(a); /* from here on the communicators own it */
    return err;
}

static int open_arenas(struct zr_engine *e)
{
    static const enum zr_role gather[] = {ZR_ROLE_GATHER, ZR_ROLE_GATHER_OUTER},
                              reduce[] = {ZR_ROLE_REDUCE, ZR_ROLE_REDUCE_OUTER, ZR_ROLE_WORLD},
                              control[] = {ZR_ROLE_CONTROL, ZR_ROLE_WORLD};
    const struct zr_plan *p = e->plan;
    const int n_reduce = p->control_bytes ? 2 : 3;
    ZR_TRY(zr_engine_open_arena(e, gather, 2, p->gather_bytes, &e->gather_base));
    ZR_TRY(zr_engine_open_arena(e, reduce, n_reduce, p->reduce_bytes, &e->reduce_base));
    e->control_base = e->reduce_base;
    if (p->control_bytes)
        ZR_TRY(zr_engine_open_arena(e, control, 2, p->control_bytes, &e->control_base));
    ZR_TRY(zr_axes_allocate(e));
    /* Without other ranks in the pipeline these are local, so they come after what all ranks do. */
    ZR_TRY(zr_pipe_allocate(e));
    return zr_tied_allocate(e);
}

/* Whether masters and states are in host memory, where a GPU's kernels read and write them. On the host all
 * memory is host memory. */
static bool states_on_host(const struct zr_engine *e)
{
    return e->plan->states == ZERO_STATES_HOST && !e->dev->ops->compute_on_caller;
}

/* Allocates masters, or states. */
static int alloc_states(struct zr_engine *e, int64_t bytes, char **out)
{
    const struct zr_device_ops *d = e->dev->ops;
    void *base = NULL;
    ZR_TRY((states_on_host(e) ? d->host_alloc : d->alloc)(e->dev, bytes, &base));
    *out = base;
    return 0;
}

static void free_states(struct zr_engine *e, char *at, int64_t bytes)
{
    const struct zr_device_ops *d = e->dev->ops;
    if (at)
        (states_on_host(e) ? d->host_free : d->free)(e->dev, at, bytes);
}

/* Allocates memory, and counts it. */
static int open_memory(struct zr_engine *e)
{
    const struct zr_plan *p = e->plan;
    void *base;
    ZR_TRY(open_arenas(e));
    if (p->master_bytes) {
        ZR_TRY(alloc_states(e, p->master_bytes, &e->master));
        e->m.allocated[ZR_MEM_MASTER] = p->master_bytes;
    }
    ZR_TRY(e->dev->ops->host_alloc(e->dev, p->words_bytes, &base));
    e->agreed = base;
    e->words = (char *)base + ZR_OUTCOME_BYTES;
    if (p->snapshot_bytes) {
        /* The device zeroes it, which touches its pages. So the first save does not wait for these. */
        ZR_TRY(e->dev->ops->host_alloc(e->dev, p->snapshot_bytes, &base));
        e->snapshot = base;
    }
    ZR_TRY(zr_parts_allocate(e));
    for (int i = 0; i < p->n_states; i++) {
        if (!p->state_bytes[i])
            continue;
        ZR_TRY(alloc_states(e, p->state_bytes[i], &e->state[i]));
        e->m.allocated[ZR_MEM_MOMENTS] += p->state_bytes[i];
        ZR_TRY(e->dev->ops->zero(e->compute, e->state[i], p->state_bytes[i]));
    }
    return e->dev->ops->stream_sync(e->compute);
}

/* Counts the arenas by category, from the offsets in use. The rest, to the last byte of all, is for
 * exchanges. */
static void count_arenas(struct zr_engine *e)
{
    const struct zr_plan *p = e->plan;
    int64_t slots = 0, slots_at = p->gather_bytes;
    for (int32_t i = 0; i < p->n_param_slots; i++) {
        slots += zr_round_up(p->param_slots[i].bytes, ZR_PIECE_ALIGN);
        slots_at = zr_min(slots_at, p->param_slots[i].at);
    }
    int64_t in_place = zr_round_up(e->layout->in_place_param_bytes, ZR_PIECE_ALIGN);
    int64_t shards = p->n_param_slots ? slots_at : p->in_place_param_at + in_place;
    int64_t sums = zr_round_up(p->n_sums * p->sum_bytes, ZR_PIECE_ALIGN);
    e->m.allocated[ZR_MEM_PARAM_SHARDS] = shards;
    e->m.allocated[ZR_MEM_PARAM_SLOTS] = slots;
    e->m.allocated[ZR_MEM_GRAD_SLOTS] = p->sums_at;
    int64_t further = (p->n_sums - 1) * p->sum_bytes;
    int64_t slots_of_sums = zr_round_up(p->reduce_slot_bytes, ZR_PIECE_ALIGN) +
                            zr_round_up(p->n_group_slots * p->group_slot_bytes, ZR_PIECE_ALIGN);
    int64_t gathered = zr_round_up(p->full_grad_bytes, ZR_PIECE_ALIGN);
    int64_t scratch = e->opt.gather_scratch_bytes + e->opt.reduce_scratch_bytes +
                      (p->control_bytes ? e->opt.control_scratch_bytes : 0);
    e->m.allocated[ZR_MEM_GRAD_SHARDS] = sums - further;
    e->m.allocated[ZR_MEM_GRAD_SUMS] = further + slots_of_sums;
    e->m.allocated[ZR_MEM_GRAD_GATHERED] = gathered;
    e->m.allocated[ZR_MEM_SNAPSHOT] = e->snapshot ? p->snapshot_bytes : 0;
    e->m.allocated[ZR_MEM_COMM] = scratch + p->tp_bytes + p->cp_bytes + p->pipe_bytes + p->tied_bytes;
    e->m.allocated[ZR_MEM_EXCHANGE] = p->gather_bytes - shards - slots + p->control_bytes + p->reduce_bytes -
                                      p->sums_at - sums - slots_of_sums - gathered - scratch + p->words_bytes;
}

int zr_engine_new(struct zr_engine **out)
{
    return ZR_ZALLOC(*out, 1, "an engine");
}

void zr_engine_free(struct zr_engine *e)
{
    free(e);
}

static int open_streams(struct zr_engine *e, void *native_stream)
{
    const struct zr_device_ops *d = e->dev->ops;
    /* A rank alone on the host waits for nobody. A second thread would only cost a wake-up per unit. */
    bool alone = !e->loop && d->compute_on_caller;
    enum zr_stream_kind kind = alone ? ZR_STREAM_CALLER : ZR_STREAM_QUEUE;
    ZR_TRY(d->stream_open(e->dev, ZR_STREAM_CALLER, "zero-compute", native_stream, &e->compute));
    ZR_TRY(d->stream_open(e->dev, kind, "zero-gather", NULL, &e->gather_stream));
    ZR_TRY(d->stream_open(e->dev, kind, "zero-reduce", NULL, &e->reduce_stream));
    if (e->plan->spec.outer_gathers)
        ZR_TRY(d->stream_open(e->dev, kind, "zero-gather-out", NULL, &e->gather_outer_stream));
    if (e->plan->spec.outer)
        ZR_TRY(d->stream_open(e->dev, kind, "zero-reduce-out", NULL, &e->reduce_outer_stream));
    zr_roles_streams(e);
    return 0;
}

static void take_parts(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    memset(e, 0, sizeof *e);
    e->dev = parts->dev;
    e->pid = (int)getpid();
    e->forks = zr_fork_depth();
    e->flight = parts->flight;
    e->name = parts->name ? parts->name : "";
    zr_roles_take(e, parts->comm);
    e->plan = parts->plan;
    e->layout = parts->plan->layout;
    e->at = zr_where_of(&e->plan->placement, e->dp_rank);
    e->opt = *parts->opt;
    e->loop = parts->loop;
    e->on_fail = parts->on_fail;
    e->on_fail_arg = parts->on_fail_arg;
}

static int open_local(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    ZR_TRY(open_streams(e, parts->native_stream));
    ZR_TRY(zr_tables_open(e));
    ZR_TRY(zr_parts_open(e, &parts->states));
    ZR_TRY(zr_pipe_open(e, &parts->pipe_room));
    ZR_TRY(zr_tied_open(e, &parts->pipe_room));
    ZR_TRY(zr_axes_open(e));
    ZR_TRY(zr_tp_open(e));
    ZR_TRY(zr_pointers_open(e));
    ZR_TRY(zr_jobs_open(e));
    ZR_TRY(zr_steps_open(e));
    ZR_TRY(zr_tuning_open(e));
    ZR_TRY(zr_rounding_open(e));
    ZR_TRY(zr_room_open(e));
    ZR_TRY(zr_events_open(e->dev, e->plan, &e->ev));
    if (e->plan->snapshot_bytes)
        ZR_TRY(zr_snapshot_listener_open(&e->s.listener));
    ZR_TRY(zr_timeline_open(e->dev, e->opt.trace ? 1 << 14 : 0, &e->timeline));
    return parts->open_observers ? parts->open_observers(e, parts) : 0;
}

int zr_engine_open(struct zr_engine *e, const struct zr_engine_parts *parts)
{
    take_parts(e, parts);
    int err = open_local(e, parts);
    zr_engine_guard_waits(e);
    if (err)
        zr_engine_close(e);
    return err;
}

int zr_engine_allocate(struct zr_engine *e)
{
    int err = open_memory(e);
    if (!err)
        count_arenas(e);
    return err;
}

void zr_engine_leave_streams(struct zr_engine *e)
{
    struct zr_stream *const all[] = {e->gather_stream,
                                     e->gather_outer_stream,
                                     e->reduce_outer_stream,
                                     e->reduce_stream,
                                     e->tied_stream,
                                     e->states_stream,
                                     e->m.cp_axis ? e->m.cp_axis->shift_stream : NULL};
    for (size_t i = 0; i < sizeof all / sizeof *all && e->dev->ops->stream_leave; i++)
        e->dev->ops->stream_leave(all[i]);
    for (int i = 0; i < ZR_PAIR_ROLES && e->dev->ops->stream_leave; i++)
        e->dev->ops->stream_leave(e->pair_stream[i]);
}

/* First finishes everything on the streams. */
static void close_device_side(struct zr_engine *e)
{
    const struct zr_device_ops *d = e->dev->ops;
    d->stream_close(e->gather_stream);
    d->stream_close(e->gather_outer_stream);
    d->stream_close(e->reduce_outer_stream);
    d->stream_close(e->reduce_stream);
    d->stream_close(e->compute);
    zr_parts_close(e);
    zr_pipe_close(e);
    zr_tied_close(e);
    zr_axes_close(e);
    zr_observers_give_back(e);
    zr_engine_all_close(e);
    for (int32_t i = 0; i < e->ev.n; i++)
        d->event_close(e->ev.all[i]);
    free_states(e, e->master, e->plan->master_bytes);
    if (e->snapshot)
        d->host_free(e->dev, e->snapshot, e->plan->snapshot_bytes);
    if (e->agreed)
        d->host_free(e->dev, e->agreed, e->plan->words_bytes);
    for (int i = 0; i < ZR_MAX_STATES; i++)
        free_states(e, e->state[i], e->plan->state_bytes[i]);
    zr_timeline_close(e->timeline);
}

bool zr_engine_close(struct zr_engine *e)
{
    if (!e || !e->dev)
        return true;
    if (e->dev->ops->ask_while_waiting)
        e->dev->ops->ask_while_waiting(e->dev, NULL, NULL);
    if (atomic_load(&e->s.left) || zr_roles_stuck(e)) {
        zr_engine_leave_streams(e);
        zr_snapshot_listener_close(e->s.listener);
        return false;
    }
    close_device_side(e);
    zr_snapshot_listener_close(e->s.listener);
    zr_observers_close(e);
    zr_tables_close(e);
    memset(e, 0, sizeof *e);
    return true;
}

/* ---- state and statistics ---- */

int32_t zr_engine_open_unit(const struct zr_engine *e)
{
    return zr_core_open_unit(e->m.core);
}

bool zr_engine_between_steps(const struct zr_engine *e)
{
    return zr_core_between_steps(e->m.core);
}

bool zr_engine_is_complete(const struct zr_engine *e)
{
    return zr_core_complete(e->m.core);
}

bool zr_engine_wrote_nothing(const struct zr_engine *e)
{
    return zr_core_wrote_nothing(e->m.core);
}

bool zr_engine_holds_all(const struct zr_engine *e)
{
    return zr_core_holds_all(e->m.core);
}

void zr_engine_facts(const struct zr_engine *e, struct zr_engine_facts *out)
{
    const struct zr_received received = zr_received_so_far(e);
    *out = (struct zr_engine_facts){.n_waits = e->m.n_waits,
                                    .wait_ns = e->m.wait_ns,
                                    .n_replans = zr_core_counts(e->m.core).n_replans,
                                    .n_gather = e->i.n_gather,
                                    .n_reduce = e->i.n_reduce,
                                    .n_outer_gather = e->i.n_outer_gather,
                                    .n_outer_reduce = e->i.n_outer_reduce,
                                    .wire_bytes = received.wire - e->m.not_counted.wire,
                                    .outer_bytes = received.outer - e->m.not_counted.outer,
                                    .tp_bytes = received.tp - e->m.not_counted.tp,
                                    .cp_bytes = received.cp - e->m.not_counted.cp,
                                    .pipe_bytes = zr_roles_pipe_bytes(e),
                                    .library_bytes = zr_roles_library_bytes(e),
                                    .backend = e->role[ZR_ROLE_GATHER].comm->ops->name,
                                    .device = e->dev->ops->name};
    zr_steps_facts(e, out);
    for (int i = 0; i < ZR_MEM_COUNT; i++)
        out->allocated[i] = e->m.allocated[i];
}

char *zr_engine_snapshot(const struct zr_engine *e)
{
    return e->snapshot;
}

struct zr_device *zr_engine_device(const struct zr_engine *e)
{
    return e->dev;
}

void zr_engine_report_least(struct zr_engine *e, uint64_t number)
{
    atomic_store(&e->s.reported_least, number);
}

int zr_engine_trace_write(struct zr_engine *e, const char *path)
{
    int err = zr_engine_drain(e);
    return err ? err : zr_timeline_write(e->timeline, e->rank, path);
}
