/* SPDX-License-Identifier: Apache-2.0 */
/* placement.h: what is whole and what is cut, for parameters, gradients and optimizer state, on each axis of
 * data parallelism.
 *
 * The inner axis is dp_shard: the ranks of a shard group, which share one copy of the parameters. The outer
 * axis is dp_replicate: the ranks with the same slice in all shard groups. Without a hybrid there is one
 * shard group, and the outer axis has size 1. Each stage and hybrid is one row of a table (placement.c). Only
 * that table knows what a stage means. The plan, the schedule and the engine ask what is whole. */
#ifndef ZR_SHARD_PLACEMENT_H
#define ZR_SHARD_PLACEMENT_H

#include "shard/options.h"

/* ZR_INNER: inside a shard group. ZR_OUTER: between shard groups. */
enum zr_axis { ZR_INNER, ZR_OUTER, ZR_AXES };

/* How a rank holds data on one axis. */
enum zr_hold {
    /* all of it, like every rank of the axis */
    ZR_WHOLE,
    /* its slice */
    ZR_CUT,
    /* Gradients only: all of it, summed without the other ranks of the axis, until the step's last
     * micro-batch is reduced; then its slice of the sum over the axis. */
    ZR_WHOLE_UNTIL_LAST_MICRO
};

/* A row of the table, for a world. */
struct zr_placement {
    /* Ranks of each axis; their product is the world. With shard groups of one rank, the world is the inner
     * axis and has the outer values of the row. */
    int32_t size[ZR_AXES];
    /* enum zr_hold, by axis. ZR_WHOLE on an axis of size 1. */
    uint8_t param[ZR_AXES], grad[ZR_AXES], state[ZR_AXES];
    /* Properties of the row that was asked for. They are the same on one rank, where nothing is cut, so a
     * program that trains there also trains on many ranks. */
    /* Stages 0 and 1: the model's pointers to parameters and gradients are valid at all times, so it may
     * train without brackets. At the other stages they are valid only in brackets. */
    bool model_holds;
    /* Stage 3: a rank keeps a shard of the parameters, and has a whole unit only while a slot holds it,
     * unless the unit is resident. At the other stages every rank keeps all parameters. */
    bool shards_params;
    /* Stage 0: every rank gets the whole sum of each unit's gradients, so struct zero_traffic counts a
     * reduction as an all-reduce. HSDP does not count as such: zero_traffic counts the reductions inside a
     * shard group, which are reduce-scatters. */
    bool all_reduces;
    /* "stage 0" to "stage 3", "HSDP" or "HFSDP": for messages, not for comparisons. */
    const char *name;
};

/* Finds the row, for `outer` shard groups of `inner` ranks (>= 1). Returns ZERO_ERR_ARG if there is no such
 * row. */
int zr_placement_make(int stage, enum zr_hybrid hybrid, bool grad_in_place, int32_t inner, int32_t outer,
                      struct zr_placement *out);

/* The same for options in a world. Returns ZERO_ERR_ARG if dp_shard does not divide the world. */
int zr_placement_in(const struct zr_options *o, int32_t world, struct zr_placement *out);

/* Returns the row of resolved options as asked for, for no particular world. */
struct zr_placement zr_placement_asked(const struct zr_options *o);

/* How far a flat is divided. A level and a rank select a part of the flat (zr_flat_span). */
enum zr_level {
    ZR_LEVEL_ALL,   /* not at all: the part is the whole flat */
    ZR_LEVEL_INNER, /* over the inner axis: the rank's inner slice, which it owns in its shard group */
    ZR_LEVEL_FINE   /* over both axes: the rank's fine slice, which no other rank of the world owns */
};

/* The position of a rank on the axes. */
struct zr_where {
    int32_t inner, outer;
};

/* Returns the position of a rank from its number. Ranks are numbered group by group. */
struct zr_where zr_where_of(const struct zr_placement *p, int32_t place);

/* Returns the level of data that is held this way. `hold` is the param or the state of a placement. */
enum zr_level zr_level_of(const uint8_t hold[ZR_AXES]);

#endif
