/* SPDX-License-Identifier: Apache-2.0 */
/* verify_snapshot.c: takes a rank's snapshots as zero_save does, reads them as the thread that writes a
 * checkpoint does, and checks their contents. */
#include "shard/verify/verify_world.h"

#include <string.h>

static struct zr_line *reader_of(const struct zr_verify_rank *r)
{
    return zr_sim_line_at(r->v->sim, r->id, ZR_SIM_READER);
}

void zr_snapshot_complete(void *arg)
{
    struct zr_verify_rank *r = arg;
    zr_vclock_drop(r->complete);
    r->complete = zr_vclock_hold(zr_sim_line_of(r->engine.reduce_stream));
    r->readable = true;
}

struct reading {
    struct zr_verify_rank *r;
    const struct zr_run *run;
    struct zr_line *line;
};

/* Checks the elements of one piece. There is padding between pieces. */
static int expect_saved(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first,
                        int64_t n)
{
    const struct reading *g = arg;
    const struct zr_run *run = g->run;
    struct zr_content content =
        zr_compute_expected_param(g->r, (int32_t)(p - g->r->layout.pieces), g->r->n_saved);
    const bool remainder = run->kind == ZR_VALUE_MASTER && f->masters == ZERO_MASTERS_REMAINDER;
    content.kind = run->kind >= 0 || remainder ? ZR_CONTENT_STATE : ZR_CONTENT_PARAM;
    content.size = (uint8_t)run->size;
    content.first = first / run->per;
    zr_shadow_expect(zr_sim_recorder(g->r->v->sim), g->line,
                     g->r->engine.snapshot + run->snapshot_at + (content.first - run->first) * run->size,
                     (n + run->per - 1) / run->per * run->size, content);
    return 0;
}

static int read_run(void *arg, const struct zr_run *run)
{
    struct zr_verify_rank *r = arg;
    struct zr_recorder *rec = zr_sim_recorder(r->v->sim);
    struct reading g = {r, run, reader_of(r)};
    zr_shadow_read(rec, g.line, r->engine.snapshot + run->snapshot_at, run->n * run->size);
    return zr_flat_ranges(&r->layout, run->flat, run->first * run->per, (run->first + run->n) * run->per,
                          expect_saved, &g);
}

/* Simulates the thread that writes a checkpoint. */
void zr_snapshot_read(struct zr_verify_rank *r, bool waited)
{
    if (waited)
        zr_line_join(zr_sim_recorder(r->v->sim), reader_of(r), r->complete);
    zr_sim_begin(r->v->sim, reader_of(r), "read of a snapshot", -1, (uint32_t)r->saved_step);
    zr_engine_runs(&r->engine, read_run, r);
    r->reading = r->readable = false;
    r->v->n_snapshots++;
}

bool zr_snapshot_readable(const struct zr_verify_rank *r)
{
    return r->reading && r->readable && !r->dead && r->engine_open;
}

/* Waits until the previous snapshot was read, as zero_save and zero_unwrap do. */
int zr_snapshot_end(struct zr_verify_rank *r)
{
    int err = 0;
    while (r->reading && !err) {
        err = zr_engine_check(&r->engine);
        if (!err)
            zr_turn_yield(r->v, r->id);
    }
    if (!err)
        zr_line_join(zr_sim_recorder(r->v->sim), zr_sim_host(r->v->sim, r->id, ZR_SIM_MODEL),
                     reader_of(r)->clock);
    return err;
}

int zr_snapshot_take(struct zr_verify_rank *r)
{
    const struct zr_mutant *m = r->v->mutant;
    bool before = r->reading, alone = m && m->what == ZR_LESS_READER;
    int err = alone ? 0 : zr_snapshot_end(r);
    if (err)
        return err;
    r->v->n_acted += alone && before;
    if (before && alone && zr_snapshot_readable(r)) /* the reader continues later, and finds new bytes */
        r->readable = false;
    memcpy(r->n_saved, r->n_done, (size_t)r->layout.n_units * sizeof *r->n_saved);
    r->saved_step = (int32_t)zr_step_calls(&r->engine);
    r->reading = true;
    err = zr_engine_take_snapshot(&r->engine, zr_snapshot_complete, r);
    if (!err && m && m->what == ZR_EARLY_READER) {
        r->v->n_acted++;
        zr_snapshot_read(r, false);
    }
    return err;
}
