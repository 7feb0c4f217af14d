/* SPDX-License-Identifier: Apache-2.0 */
/* snapshot.c: which of this rank's memory a checkpoint holds, and a copy of it that is taken while training
 * goes on.
 *
 * The copy is one more reader of the shards, on the stream of their only writer. It runs after the last
 * step's updates and before the next step's. Neither the model nor the gathers wait for it. */
#include "kernels/alloc.h"
#include "kernels/asserts.h"
#include "shard/engine/internal.h"

#include <stdlib.h>

/* Receives the report that a snapshot is complete. A call on a stream cannot be taken back. On a GPU that has
 * lost a peer it may run at any later time, or never. So the call holds this object, and not what its owner
 * may free. */
struct zr_snapshot_listener {
    uv_mutex_t lock;
    int64_t n_holders; /* the engine, and each call on the stream */
    uint64_t number;   /* of the last snapshot that was requested */
    void (*complete)(void *arg);
    void *arg;
};

int zr_snapshot_listener_open(struct zr_snapshot_listener **out)
{
    struct zr_snapshot_listener *l;
    ZR_TRY(ZR_ZALLOC(l, 1, "the listener of snapshots"));
    if (uv_mutex_init(&l->lock)) {
        free(l);
        return zr_fail(ZERO_ERR_SYSTEM, "a mutex could not be made");
    }
    l->n_holders = 1;
    *out = l;
    return 0;
}

/* Drops one holder, and releases the lock. */
static void drop_holder(struct zr_snapshot_listener *l)
{
    bool last = --l->n_holders == 0;
    uv_mutex_unlock(&l->lock);
    if (!last)
        return;
    uv_mutex_destroy(&l->lock);
    free(l);
}

/* Sets whom the next snapshot is reported to, or nobody. */
static void set_listener(struct zr_snapshot_listener *l, void (*complete)(void *arg), void *arg)
{
    uv_mutex_lock(&l->lock);
    l->number += complete != NULL;
    l->complete = complete;
    l->arg = arg;
    uv_mutex_unlock(&l->lock);
}

void zr_snapshot_listener_close(struct zr_snapshot_listener *l)
{
    if (!l)
        return;
    set_listener(l, NULL, NULL);
    uv_mutex_lock(&l->lock);
    drop_holder(l);
}

/* Returns what this rank reads of a value: its slice within its shard group (ZR_LEVEL_INNER) if every group
 * has a copy of the value, else its slice within the world (ZR_LEVEL_FINE). */
static enum zr_level level_to_load(const struct zr_engine *e, const struct zr_flat *f, int kind)
{
    bool param = kind == ZR_VALUE_PARAM || (kind == ZR_VALUE_MASTER && !zr_plan_master_size(f));
    return !param && e->plan->placement.state[ZR_OUTER] == ZR_CUT ? ZR_LEVEL_FINE : ZR_LEVEL_INNER;
}

/* Fills in which values of the flat the run has, and where they are now and in a snapshot. */
static void fill_run(struct zr_engine *e, struct zr_run *run, enum zr_level level)
{
    const struct zr_flat *f = run->flat;
    struct zr_span span = zr_flat_span(f, e->at, level);
    run->per = run->kind < ZR_SCALE(0) ? 1 : ZR_Q8_BLOCK;
    run->first = span.first / run->per;
    run->n = (span.n + run->per - 1) / run->per;
    run->size = zr_plan_saved_size(f, run->kind);
    run->snapshot_bytes =
        zr_plan_snapshot_bytes(f, run->kind, level == ZR_LEVEL_FINE ? f->fine_elems : f->inner_elems);
}

/* Fills in where the run is, and calls fn. A run in the file of states is given part by part. Snapshots do
 * not contain it. */
static int give_run(struct zr_engine *e, struct zr_run *run, int (*fn)(void *arg, const struct zr_run *run),
                    void *arg)
{
    int64_t end = run->first + run->n;
    int err = 0;
    if (!zr_part_has(e, run->flat, run->kind)) {
        run->at = zr_engine_value_at(e, run->flat, run->kind, run->first * run->per);
        return fn(arg, run);
    }
    run->snapshot_bytes = 0;
    for (int64_t n; !err && run->first < end; run->first += run->n) {
        n = (end - run->first) * run->per;
        run->file_at = zr_part_place(e, run->flat, run->kind, run->first * run->per, &n);
        run->n = (n + run->per - 1) / run->per;
        err = fn(arg, run);
    }
    return err;
}

/* Calls fn for each run: the elements of one flat and one kind of value that this rank saves or loads. */
static int for_runs(struct zr_engine *e, bool to_load, int (*fn)(void *arg, const struct zr_run *run),
                    void *arg)
{
    int64_t at = 0;
    for (int32_t i = 0; i < e->layout->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[i];
        for (int kind = ZR_VALUE_PARAM; kind < ZR_N_KINDS; kind++) {
            if (!zr_plan_saves(f, kind) || (f->copy && !to_load))
                continue;
            struct zr_run run = {.flat = f, .kind = kind, .snapshot_at = at};
            fill_run(e, &run, to_load ? level_to_load(e, f, kind) : ZR_LEVEL_FINE);
            ZR_TRY(give_run(e, &run, fn, arg));
            at += run.snapshot_bytes;
        }
    }
    return 0;
}

int zr_engine_runs(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg)
{
    return for_runs(e, false, fn, arg);
}

int zr_engine_runs_to_load(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg)
{
    return for_runs(e, true, fn, arg);
}

static int copy_run(void *arg, const struct zr_run *run)
{
    struct zr_engine *e = arg;
    ZR_ASSERT(run->snapshot_at >= 0 && run->snapshot_at + run->n * run->size <= e->plan->snapshot_bytes);
    return run->n ? e->dev->ops->copy(e->reduce_stream, e->snapshot + run->snapshot_at, run->at,
                                      run->n * run->size)
                  : 0;
}

/* What a call on the stream holds: the snapshot that it reports. */
struct snapshot_report {
    struct zr_snapshot_listener *listener;
    uint64_t number;
};

static void report_snapshot(void *arg)
{
    const struct snapshot_report *report = arg;
    struct zr_snapshot_listener *l = report->listener;
    uv_mutex_lock(&l->lock);
    if (l->complete && l->number == report->number)
        l->complete(l->arg);
    drop_holder(l);
}

int zr_engine_issue_snapshot(struct zr_engine *e)
{
    struct zr_snapshot_listener *l = e->s.listener;
    int err = zr_engine_runs(e, copy_run, e);
    zr_observe_snapshot(e, ZR_SNAPSHOT_ISSUED);
    if (err)
        return err;
    uv_mutex_lock(&l->lock);
    struct snapshot_report report = {l, l->number};
    l->n_holders++;
    uv_mutex_unlock(&l->lock);
    err = e->dev->ops->call(e->reduce_stream, report_snapshot, &report, sizeof report);
    if (err) {
        uv_mutex_lock(&l->lock);
        drop_holder(l);
    }
    return err;
}

void zr_engine_snapshot_read(struct zr_engine *e)
{
    zr_observe_snapshot(e, ZR_SNAPSHOT_READ);
}

int zr_engine_take_snapshot(struct zr_engine *e, void (*complete)(void *arg), void *arg)
{
    struct zr_core_event ev = {.kind = ZR_EV_SNAPSHOT, .unit = -1};
    set_listener(e->s.listener, complete, arg);
    return zr_engine_call(e, &ev);
}

void zr_engine_forget_snapshot(struct zr_engine *e)
{
    if (e->s.listener)
        set_listener(e->s.listener, NULL, NULL);
}
