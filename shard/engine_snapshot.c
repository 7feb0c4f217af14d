/* engine_snapshot.c: what of this rank's memory a checkpoint holds, and a copy of it taken while training
 * goes on.
 *
 * The copy is one more reader of the shards, on the stream of their only writer: it runs after the last
 * step's updates and before the next step's, and neither the model nor the gathers wait for it. */
#include "shard/engine.h"

int zr_engine_runs(struct zr_engine *e, int (*fn)(void *arg, const struct zr_run *run), void *arg)
{
    int64_t at = 0;
    for (int32_t i = 0; i < e->layout->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[i];
        for (int kind = ZR_VALUE_PARAM; kind < e->plan->n_states; kind++) {
            if (!zr_plan_saves(e->plan, f, kind))
                continue;
            struct zr_run run = {.flat = f, .kind = kind, .snapshot_at = at, .size = (int64_t)sizeof(float)};
            run.n = zr_flat_owned(f, e->rank, &run.first);
            if (kind == ZR_VALUE_PARAM) {
                run.size = zr_dtype_bytes(f->dtype);
                run.at = zr_engine_param_at(e, f, run.first);
            } else if (kind == ZR_VALUE_MASTER) {
                run.at = (char *)zr_engine_master_at(e, f, run.first);
            } else {
                run.at = (char *)zr_engine_state_at(e, f, kind, run.first);
            }
            at += zr_plan_snapshot_bytes(f, kind);
            int err = fn(arg, &run);
            if (err)
                return err;
        }
    }
    return 0;
}

static int copy_run(void *arg, const struct zr_run *run)
{
    struct zr_engine *e = arg;
    return run->n ? e->dev->ops->copy(e->reduce_stream, e->snapshot + run->snapshot_at, run->at,
                                      run->n * run->size)
                  : 0;
}

static void tell(void *arg)
{
    struct zr_engine *e = *(struct zr_engine **)arg;
    e->on_snapshot(e->on_snapshot_arg);
}

int zr_engine_carry_snapshot(struct zr_engine *e)
{
    int err = zr_engine_runs(e, copy_run, e);
    zr_watch_reader(e);
    return err ? err : e->dev->ops->call(e->reduce_stream, tell, &e, sizeof e);
}

void zr_engine_snapshot_read(struct zr_engine *e)
{
    zr_watch_reader_done(e->watch);
}

int zr_engine_take_snapshot(struct zr_engine *e)
{
    struct zr_core_event ev = {.kind = ZR_EV_SNAPSHOT, .unit = -1};
    return zr_engine_call(e, &ev);
}
