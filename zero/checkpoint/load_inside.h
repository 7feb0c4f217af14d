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
    /* Elements of the tensor or part, or blocks for scales, and the byte of the file where they begin. */
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
    /* Temporary memory for what is read, laid out as a snapshot. */
    char *staged;
    /* The file that `staged` is a map of. NULL: it is not a map. */
    struct zr_state_file *staged_file;
    int64_t buffers_at;
    /* Values are read directly to their places, and staged holds only buffers. */
    bool direct;
    struct zr_extents own;
    /* The file of states that values are read to. It replaces the context's if the load succeeds. NULL:
     * states are in memory. */
    struct zr_state_file *states;
    /* Temporary memory for values that are converted through fp32, and their scales (zr_loading_room). */
    char *wide;
    /* The file that `wide` is a map of. NULL: it is not a map. */
    struct zr_state_file *wide_file;
    struct zr_loaded_checkpoint *loaded;
};

/* unit_steps.c. Sets the step count of each unit to the largest count of its tensors. Call it after
 * zr_engine_set_step. */
void zr_unit_steps_load(const struct zr_loading *l);

/* load_read.c. Reads what this rank needs of the checkpoint in l->folder into l->staged, and checks it. The
 * manifest is open already. Local. Changes nothing, or with l->direct nothing that has values. */
int zr_loading_read(struct zr_loading *l);
void zr_loading_free(struct zr_loading *l);

/* A run of saved values that follow each other in a part of a tensor as it was saved, and in this rank's
 * part. */
struct zr_saved_run {
    /* -1: padding, or another rank will send the values. */
    int32_t part;
    int64_t first, n;
};
/* Returns the run that begins with value number `at` of this rank's part of the tensor, which is in the
 * extent. */
struct zr_saved_run zr_loading_run(const struct zr_loading *l, const struct zr_extent *x, int64_t at);

/* ---- load_convert.c: values that are kept in another form than they were saved ---- */

/* How an extent of this rank is read. */
struct zr_load_source {
    enum {
        ZR_LOAD_AS_SAVED,
        /* Through fp32. */
        ZR_LOAD_CONVERTED,
        /* Nothing was saved. The extent begins at zero. */
        ZR_LOAD_ZEROS,
        /* The values are made with others: scales with their states, remainders with their weights. */
        ZR_LOAD_NOTHING
    } way;
    /* The saved values, and their bytes. */
    int kind;
    int64_t size;
    /* Scales are needed to convert them. */
    bool has_scales;
};

/* Whether the checkpoint has values of this kind of the tensor. */
bool zr_loading_is_saved(const struct zr_loading *l, int32_t tensor, int kind);
/* Returns how many values of this kind a part has in the checkpoint. */
int64_t zr_loading_saved_values(const struct zr_loading *l, int32_t tensor, int32_t part, int kind);
/* For states that were saved in 8 bits: the block that an element of a part is in, and the number of blocks
 * that a run has elements of. */
int64_t zr_loading_saved_block(const struct zr_loading *l, int32_t tensor, int64_t element);
int64_t zr_loading_run_scales(const struct zr_loading *l, int32_t tensor, const struct zr_saved_run *run);
/* Chooses how an extent is read. */
struct zr_load_source zr_loading_source(const struct zr_loading *l, const struct zr_extent *x);

/* Memory for the saved values of an extent that is converted. */
struct zr_load_room {
    char *values;
    /* The scales of all runs end to end, if there are any. */
    uint16_t *scales;
    /* Memory for fp32 values, which begins before `values` and ends with them. */
    float *wide;
};
/* Returns the room of a converted extent, and adds its bytes to *used, which counts the bytes of l->wide.
 * Call it for all converted extents in order. Before l->wide is allocated, it only counts. */
struct zr_load_room zr_loading_room(const struct zr_loading *l, const struct zr_extent *x,
                                    const struct zr_load_source *s, int64_t *used);
/* Converts all extents that need it. Call it once everything is read. */
void zr_loading_convert(const struct zr_loading *l);
/* Logs what was converted, and whether the seed is another one. Call it on rank 0. */
void zr_loading_report_precision(const struct zr_loading *l);

#endif
