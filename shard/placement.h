/* SPDX-License-Identifier: Apache-2.0 */
/* placement.h: what is whole and what is cut: for parameters, gradients and optimizer state, on each axis of
 * data parallelism.
 *
 * The ranks that share one copy of the parameters are the inner axis, and the groups of them the outer one.
 * What a stage or a hybrid means is one row of a table (placement.c), and nothing but that table knows it:
 * the plan, the schedule and the engine ask what is whole. Without a hybrid there is one group, and the outer
 * axis has size 1. */
#ifndef ZR_SHARD_PLACEMENT_H
#define ZR_SHARD_PLACEMENT_H

#include "shard/options.h"

enum zr_axis { ZR_INNER, ZR_OUTER, ZR_AXES };

/* How a rank holds data on one axis. */
enum zr_hold {
    ZR_WHOLE,      /* as every rank of the axis does */
    ZR_CUT,        /* its slice */
    ZR_CUT_AT_LAST /* whole, as a sum of its own, until the last micro-batch; then its slice of all sums */
};

struct zr_placement {
    /* Ranks of each axis; their product is the world. Groups of one rank are no axis: the world is the inner
     * one then, and what the row says of the outer axis holds there. */
    int32_t size[ZR_AXES];
    /* enum zr_hold, by axis; ZR_WHOLE on an axis of size 1 */
    uint8_t param[ZR_AXES], grad[ZR_AXES], state[ZR_AXES];
    /* Of the row as it was asked for, also on one rank, where nothing is cut: what trains there trains on
     * many. */
    /* the model has its parameters and gradients for good, brackets or not */
    bool model_holds;
    /* parameters are there in brackets only, unless they are resident */
    bool shards_params;
    /* every rank has what a reduction gives */
    bool all_reduces;
    /* "stage 0" .. "stage 3", "HSDP", "HFSDP": for messages, not to be compared */
    const char *name;
};

/* The row of the table, in `outer` groups of `inner` ranks (>= 1). ZR_ERR_ARG: there is no such row. */
int zr_placement_make(int stage, enum zr_hybrid hybrid, bool grad_in_place, int32_t inner, int32_t outer,
                      struct zr_placement *out);

/* That of the options in a world. ZR_ERR_ARG: dp_shard does not divide it. */
int zr_placement_in(const struct zr_options *o, int32_t world, struct zr_placement *out);

/* As asked for, whatever the world; of resolved options, so there is such a row. */
struct zr_placement zr_placement_asked(const struct zr_options *o);

/* Which part of a flat. */
enum zr_level {
    ZR_LEVEL_ALL,
    ZR_LEVEL_INNER, /* the slice of a rank's inner index */
    ZR_LEVEL_FINE   /* the slice that it alone owns, or its copies do */
};

/* A rank on the axes. */
struct zr_where {
    int32_t inner, outer;
};

/* Of its place: places are numbered group by group. */
struct zr_where zr_where_of(const struct zr_placement *p, int32_t place);

/* What a rank holds that holds it so. */
enum zr_level zr_level_of(const uint8_t hold[ZR_AXES]);

#endif
