/* SPDX-License-Identifier: Apache-2.0 */
/* engine_facts.c: where an engine stands, and what it has done. */
#include "shard/engine/engine_inside.h"

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
    *out = (struct zr_engine_facts){.n_steps = e->m.step,
                                    .last_step = zr_last_step_number(e),
                                    .t = e->m.t,
                                    .left_out = e->m.left_out,
                                    .n_skipped = e->m.n_skipped,
                                    .n_dropped = e->m.n_dropped,
                                    .n_waits = e->m.n_waits,
                                    .wait_ns = e->m.wait_ns,
                                    .n_replans = zr_core_counts(e->m.core).n_replans,
                                    .n_gather = e->i.n_gather,
                                    .n_reduce = e->i.n_reduce,
                                    .n_outer_gather = e->i.n_outer_gather,
                                    .n_outer_reduce = e->i.n_outer_reduce,
                                    .wire_bytes = zr_roles_wire_bytes(e) - e->m.wire_at_open,
                                    .outer_bytes = zr_roles_outer_bytes(e) - e->m.outer_at_open,
                                    .model_bytes = zr_roles_model_bytes(e) - e->m.model_at_open,
                                    .pipe_bytes = zr_roles_pipe_bytes(e),
                                    .library_bytes = zr_roles_library_bytes(e),
                                    .backend = e->role[ZR_ROLE_GATHER].comm->ops->name,
                                    .device = e->dev->ops->name};
    for (int i = 0; i < ZR_MEM_COUNT; i++)
        out->allocated[i] = e->m.allocated[i];
}

void zr_engine_set_skipped(struct zr_engine *e, int64_t n)
{
    e->m.n_skipped = n;
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
    atomic_store(&e->s.own_least, number);
}

uint64_t zr_engine_least(const struct zr_engine *e)
{
    return e->m.least;
}

int zr_engine_trace_write(struct zr_engine *e, const char *path)
{
    int err = zr_engine_drain(e);
    return err ? err : zr_timeline_write(e->timeline, e->rank, path);
}
