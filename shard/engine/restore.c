/* SPDX-License-Identifier: Apache-2.0 */
/* restore.c: copies values from a checkpoint into the shards, and from there to all other memory that holds
 * them. */
#include "shard/engine/internal.h"

int zr_engine_restore_begin(struct zr_engine *e)
{
    /* A peer may still be gathering a shard that is about to be written. */
    return zr_engine_barrier(e);
}

int zr_engine_restore_run(struct zr_engine *e, const struct zr_run *run, const void *src)
{
    int err = run->n && run->at ? e->dev->ops->copy(e->reduce_stream, run->at, src, run->n * run->size) : 0;
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

static struct zr_tag restore_tag(const struct zr_engine *e, int32_t unit)
{
    return (struct zr_tag){.unit = unit, .step = zr_step_number(e), .call_hash = zr_core_hash(e->m.core)};
}

/* Gathers frozen flats too, which no other gather of resident units moves. */
static int gather_resident(struct zr_engine *e, int32_t unit)
{
    const struct zr_unit *u = &e->layout->units[unit];
    struct zr_tag tag = restore_tag(e, unit);
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[u->first_flat + i];
        int64_t full = zr_plan_param_full(e->plan, f, -1);
        e->m.segs[i] = (struct zr_gather_seg){.src = full, .dst = full, .in_place = true, .cut = f->inner};
    }
    int err = zr_roles_make_room(e);
    return err ? err : zr_role_gather(e, ZR_ROLE_GATHER, e->m.segs, u->n_flats, &tag);
}

static int gather_inner(struct zr_engine *e, int32_t unit)
{
    const struct zr_unit *u = &e->layout->units[unit];
    struct zr_tag tag = restore_tag(e, unit);
    for (int32_t i = 0; i < u->n_flats; i++)
        e->m.segs[i] = zr_outer_gather_seg(e, &e->layout->flats[u->first_flat + i]);
    int err = zr_roles_make_room(e);
    return err ? err : zr_role_gather(e, ZR_ROLE_GATHER_OUTER, e->m.segs, u->n_flats, &tag);
}

int zr_engine_gather_inner(struct zr_engine *e)
{
    if (!e->plan->spec.outer)
        return 0;
    int err = zr_engine_drain(e);
    for (int32_t u = 0; !err && u < e->layout->n_units; u++)
        err = gather_inner(e, u);
    /* The gather of residents that follows waits for this one, and ends with a barrier. */
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

static int gather_residents(struct zr_engine *e)
{
    int err = 0;
    for (int32_t u = 0; !err && e->plan->hop[ZR_INNER].size > 1 && u < e->layout->n_units; u++)
        if (e->plan->resident[u])
            err = gather_resident(e, u);
    return err;
}

/* At stage 0 every rank keeps all masters and states. This sends each rank's part of one of them to the other
 * ranks, through the staging buffer of zero_read. kind is ZR_VALUE_MASTER, a state, or ZR_SCALE of a state.
 * If these are in files, the parts are the same in the files of all ranks. */
static int spread(struct zr_engine *e, const struct zr_flat *f, int kind)
{
    const struct zr_device_ops *d = e->dev->ops;
    const int64_t size = zr_plan_saved_size(f, kind), per = kind < ZR_SCALE(0) ? 1 : ZR_Q8_BLOCK;
    struct zr_tag tag = restore_tag(e, f->unit);
    char *staging = zr_values_staging(e);
    for (int r = 0; r < e->dp; r++) {
        int64_t first, left = zr_flat_owned(f, r, &first);
        for (int64_t n; left > 0; first += n, left -= n) {
            n = zr_min(left, e->plan->values_bytes / size * per);
            ZR_TRY(zr_roles_make_room(e)); /* may drain, after which no part is open */
            ZR_TRY(zr_part_use(e, f, first, r != e->dp_rank, &n));
            int64_t bytes = (n + per - 1) / per * size;
            if (r == e->dp_rank)
                ZR_TRY(d->copy(e->reduce_stream, staging, zr_engine_value_at(e, f, kind, first), bytes));
            ZR_TRY(zr_role_broadcast(e, ZR_ROLE_CONTROL, e->plan->values_at, bytes, r, &tag));
            if (r != e->dp_rank)
                ZR_TRY(d->copy(e->reduce_stream, zr_engine_value_at(e, f, kind, first), staging, bytes));
        }
    }
    return 0;
}

static int spread_state(struct zr_engine *e, const struct zr_flat *f)
{
    int err = 0;
    if (!f->trainable)
        return 0;
    if (zr_plan_master_size(f)) /* otherwise the weights are the masters, and were gathered */
        err = spread(e, f, ZR_VALUE_MASTER);
    for (int i = 0; !err && i < f->n_states; i++) {
        err = spread(e, f, i);
        if (!err && f->moments == ZERO_MOMENTS_Q8)
            err = spread(e, f, ZR_SCALE(i));
    }
    return err;
}

int zr_engine_gather_residents(struct zr_engine *e)
{
    int err = zr_engine_drain(e);
    if (!err)
        err = gather_residents(e);
    /* Nobody's shard may change before everybody has gathered it. */
    return err ? zr_engine_fail(e, err, zr_error_text()) : zr_engine_barrier(e);
}

static int zero_run(void *arg, const struct zr_run *run)
{
    struct zr_engine *e = arg;
    return run->kind >= 0 && run->n && run->at
               ? e->dev->ops->zero(e->reduce_stream, run->at, run->n * run->size)
               : 0;
}

int zr_engine_zero_states(struct zr_engine *e)
{
    int err = zr_engine_runs_to_load(e, zero_run, e);
    return err ? zr_engine_fail(e, err, zr_error_text()) : zr_engine_drain(e);
}

int zr_engine_restore_end(struct zr_engine *e)
{
    int32_t n_actions;
    int err = zr_engine_drain(e);
    if (!err)
        err = gather_residents(e);
    for (int32_t i = 0; !err && e->plan->hop[ZR_INNER].sums_whole && i < e->layout->n_flats; i++)
        err = spread_state(e, &e->layout->flats[i]);
    for (int32_t u = 0; !err && u < e->layout->n_units; u++) {
        struct zr_core_event ev = {.kind = ZR_EV_REWRITE, .unit = u};
        err = zr_core_take(e->m.core, &ev, e->m.actions, &n_actions);
    }
    if (err)
        return zr_engine_fail(e, err, zr_error_text());
    /* Nobody's shard may change before everybody has gathered it. */
    return zr_engine_barrier(e);
}
