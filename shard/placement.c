/* SPDX-License-Identifier: Apache-2.0 */
/* placement.c: the table that says what is whole and what is cut. It has a row for each ZeRO stage and each
 * hybrid. */
#include "shard/placement.h"

#include <string.h>

#define W ZR_WHOLE
#define C ZR_CUT
#define L ZR_WHOLE_UNTIL_LAST_MICRO

/* The table before axes of size 1 are made whole. Each pair is the inner and the outer axis. A plain stage
 * has one group, so its outer values do not matter. HSDP is stage 3 in a group and stage 0 across groups.
 * HFSDP is stage 3 in a group and stage 1 across them. grad_in_place replaces grad if the model adds up a
 * step's micro-batches itself (zr_options.grad_in_place). The columns from model_holds on are fields of
 * struct zr_placement. */
static const struct row {
    int stage;
    enum zr_hybrid hybrid;
    uint8_t param[ZR_AXES], grad[ZR_AXES], grad_in_place[ZR_AXES], state[ZR_AXES];
    bool model_holds, shards_params, all_reduces;
    const char *name;
} rows[] = {
    {0, ZR_HYBRID_NONE, {W, W}, {W, W}, {W, W}, {W, W}, true, false, true, "stage 0"},
    {1, ZR_HYBRID_NONE, {W, W}, {W, W}, {W, W}, {C, C}, true, false, false, "stage 1"},
    {2, ZR_HYBRID_NONE, {W, W}, {C, C}, {L, L}, {C, C}, false, false, false, "stage 2"},
    {3, ZR_HYBRID_NONE, {C, C}, {C, C}, {L, L}, {C, C}, false, true, false, "stage 3"},
    {3, ZR_HSDP, {C, W}, {C, W}, {L, W}, {C, W}, false, true, false, "HSDP"},
    {3, ZR_HFSDP, {C, W}, {C, L}, {L, L}, {C, C}, false, true, false, "HFSDP"},
};

static const struct row *find(int stage, enum zr_hybrid hybrid)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].stage == stage && rows[i].hybrid == hybrid)
            return &rows[i];
    return NULL;
}

static void take(const struct row *r, bool grad_in_place, struct zr_placement *out)
{
    *out = (struct zr_placement){.model_holds = r->model_holds,
                                 .shards_params = r->shards_params,
                                 .all_reduces = r->all_reduces,
                                 .name = r->name};
    memcpy(out->param, r->param, sizeof out->param);
    memcpy(out->grad, grad_in_place ? r->grad_in_place : r->grad, sizeof out->grad);
    memcpy(out->state, r->state, sizeof out->state);
}

/* Moves the outer axis to the inner one, for groups of one rank: only the outer axis has several ranks
 * then. */
static void take_outer(struct zr_placement *p)
{
    p->param[ZR_INNER] = p->param[ZR_OUTER];
    p->grad[ZR_INNER] = p->grad[ZR_OUTER];
    p->state[ZR_INNER] = p->state[ZR_OUTER];
    p->size[ZR_INNER] = p->size[ZR_OUTER];
    p->size[ZR_OUTER] = 1;
}

int zr_placement_make(int stage, enum zr_hybrid hybrid, bool grad_in_place, int32_t inner, int32_t outer,
                      struct zr_placement *out)
{
    const struct row *r = find(stage, hybrid);
    if (!r)
        return zr_fail(ZERO_ERR_ARG, "a hybrid is set with stage %d; allowed: stage 3, or no hybrid", stage);
    take(r, grad_in_place, out);
    out->size[ZR_INNER] = inner;
    out->size[ZR_OUTER] = outer;
    if (inner == 1 && outer > 1)
        take_outer(out);
    for (int a = 0; a < ZR_AXES; a++)
        if (out->size[a] == 1)
            out->param[a] = out->grad[a] = out->state[a] = ZR_WHOLE;
    return 0;
}

int zr_placement_in(const struct zr_options *o, int32_t world, struct zr_placement *out)
{
    int32_t inner = o->hybrid == ZR_HYBRID_NONE ? world : o->dp_shard;
    if (inner < 1 || world % inner)
        return zr_fail(ZERO_ERR_ARG,
                       "dp_shard is %d, world is %d: a number that divides the world is allowed", inner,
                       world);
    return zr_placement_make(o->stage, o->hybrid, o->grad_in_place, inner, world / inner, out);
}

struct zr_placement zr_placement_asked(const struct zr_options *o)
{
    struct zr_placement p;
    take(find(o->stage, o->hybrid), o->grad_in_place, &p);
    return p;
}

enum zr_level zr_level_of(const uint8_t hold[ZR_AXES])
{
    if (hold[ZR_INNER] == ZR_WHOLE)
        return hold[ZR_OUTER] == ZR_WHOLE ? ZR_LEVEL_ALL : ZR_LEVEL_FINE;
    return hold[ZR_OUTER] == ZR_WHOLE ? ZR_LEVEL_INNER : ZR_LEVEL_FINE;
}

struct zr_where zr_where_of(const struct zr_placement *p, int32_t place)
{
    return (struct zr_where){.inner = place % p->size[ZR_INNER], .outer = place / p->size[ZR_INNER]};
}
