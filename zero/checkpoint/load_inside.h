/* SPDX-License-Identifier: Apache-2.0 */
/* load_inside.h: what the files of zero_load share. load.c has the order of steps. */
#ifndef ZR_ZERO_LOAD_INSIDE_H
#define ZR_ZERO_LOAD_INSIDE_H

#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/save.h"
#include "zero/checkpoint/shard_file.h"

/* A range of a tensor in a file. */
struct zr_load_range {
    int32_t tensor, file;
    int kind;
    /* Part of a tensor that was saved in parts; otherwise 0. */
    int32_t part;
    /* Elements of the tensor or part, and the byte of the file where they begin. */
    int64_t first, n, at;
};

struct zr_loading {
    struct zero_ctx *z;
    char folder[ZR_PATH_BYTES];
    struct zr_manifest manifest;
    struct zr_shard *shards;
    int32_t n_shards;
    /* Sorted by tensor, kind, part and first. */
    struct zr_load_range *ranges;
    int64_t n_ranges;
    const struct zr_tensor **by_name;
    /* (n_tensors) How each tensor was cut over tp when it was saved, and how it is cut here. */
    struct zr_tp_cut *saved, *here;
    /* (n_tensors) The manifest's entry of each tensor. */
    const struct zr_manifest_tensor **was;
    /* Memory for what is read, laid out as a snapshot. */
    char *staged;
    int64_t buffers_at;
    /* Values are read directly to their places, and staged holds only buffers. */
    bool direct;
    struct zr_extents own;
    /* The file of states that values are read to. It replaces the context's if the load succeeds. NULL: states
     * are in memory. */
    struct zr_state_file *states;
    struct zr_loaded_checkpoint *loaded;
};

/* unit_steps.c. Sets the step count of each unit to the largest count of its tensors. Call it after
 * zr_engine_set_step. */
void zr_unit_steps_load(const struct zr_loading *l);

/* load_read.c. Reads what this rank needs of the checkpoint in l->folder into l->staged, and checks it. The
 * manifest is open already. Local. Changes nothing, or with l->direct nothing that has values. */
int zr_loading_read(struct zr_loading *l);
void zr_loading_free(struct zr_loading *l);

/* load.c. Whether the checkpoint has values of this kind of the tensor. */
bool zr_loading_is_saved(const struct zr_loading *l, int32_t tensor, int kind);
/* Finds the saved values that an extent of this rank is read from, and the memory that they are read to.
 * Returns false if there are none, so that the extent begins at zero. */
bool zr_loading_source(const struct zr_loading *l, const struct zr_extent *x, struct zr_extent *from);
/* Makes fp32 masters of weights that were read into the masters' memory. Call it once everything is read. */
void zr_loading_widen(const struct zr_loading *l);

#endif
