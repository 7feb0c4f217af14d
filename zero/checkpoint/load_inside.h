/* SPDX-License-Identifier: Apache-2.0 */
/* load_inside.h: what the files of zero_load share; in which order things happen is in load.c. */
#ifndef ZR_ZERO_LOAD_INSIDE_H
#define ZR_ZERO_LOAD_INSIDE_H

#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/save.h"
#include "zero/checkpoint/shard_file.h"

/* A range of a tensor in a file. */
struct zr_load_range {
    int32_t tensor, file;
    int kind;
    /* of a tensor that was saved in parts; else 0 */
    int32_t part;
    /* elements of the tensor, or of the part; byte of the file */
    int64_t first, n, at;
};

struct zr_loading {
    struct zero_ctx *z;
    char folder[ZR_PATH_BYTES];
    struct zr_manifest manifest;
    struct zr_shard *shards;
    int32_t n_shards;
    /* in order of tensor, kind, part, first */
    struct zr_load_range *ranges;
    int64_t n_ranges;
    const struct zr_tensor **by_name;
    /* (n_tensors) how each was cut over tp when it was saved, and is here */
    struct zr_tp_cut *saved, *here;
    /* (n_tensors) what the manifest says of each */
    const struct zr_manifest_tensor **was;
    /* laid out as a snapshot */
    char *staged;
    int64_t buffers_at;
    /* values go straight to where they belong: staged holds buffers alone */
    bool direct;
    struct zr_extents own;
    struct zr_loaded *loaded;
};

/* unit_steps.c: each unit takes the count of its tensors, the largest where they differ. After
 * zr_engine_set_step. */
void zr_unit_steps_load(const struct zr_loading *l);

/* Everything of the checkpoint in l->folder, whose manifest is open, that this rank needs: read, checked and
 * in l->staged. Needs no other rank, and changes nothing, or (l->direct) nothing that has values. */
int zr_loading_read(struct zr_loading *l);
void zr_loading_free(struct zr_loading *l);

/* load.c. Whether the checkpoint has values of this kind of a tensor. */
bool zr_loading_is_saved(const struct zr_loading *l, int32_t tensor, int kind);
/* Gives in *from which saved values are read for an extent of this rank, and to which memory. Returns false
 * if there are none: the extent begins at zero. */
bool zr_loading_source(const struct zr_loading *l, const struct zr_extent *x, struct zr_extent *from);
/* Once everything is read: makes masters of weights that were read in their place. */
void zr_loading_widen(const struct zr_loading *l);

#endif
