/* SPDX-License-Identifier: Apache-2.0 */
/* save.h: what a rank writes of a checkpoint, and the file it goes to.
 *
 * Canonical coordinates: (tensor, kind, elements). A file holds, as safetensors, every range that its rank
 * owns, named TENSOR/KIND/FIRST with shape [n]: KIND is model (weights in the model's dtype), master (fp32
 * weights; f32 weights are their own masters and are held once, as these) or state0, state1, ... Ranges that
 * follow each other are one entry. Of a part of a tensor that is cut over tp it is TENSOR/KIND/FIRST@PART,
 * FIRST being an element of the part (tp_cut.h); what is not cut then is in the files of part 0's ranks
 * alone. Buffers, of kind model, are in rank 0's file, or that of their stage's first rank. The program's own
 * data, if there is any, are the last entries: zr_data_names, U8 of shape [bytes]. */
#ifndef ZR_ZERO_SAVE_H
#define ZR_ZERO_SAVE_H

#include "shard/tp_cut.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/context.h"

/* A range of a tensor's elements, in this rank's memory. kind as in zr_engine_read. */
struct zr_extent {
    /* of the whole model's (struct zr_whole) */
    int32_t tensor;
    int kind;
    /* elements of that tensor, row-major */
    int64_t first, n;
    /* bytes of an element */
    int64_t size;
    char *at;
    /* to load: values of the last pipeline stage's copy of a tied tensor, which the first stage sends */
    bool given;
};

struct zr_extents {
    /* in order of tensor, kind, first */
    struct zr_extent *list;
    int64_t n;
    /* of a model in parts, this rank's of tensors that are cut; -1: it is whole */
    int32_t part;
    /* the program's own data, by enum zr_data_kind: in the host's memory, and in no extent */
    struct {
        const void *at;
        int64_t bytes;
    } data[ZR_N_DATA];
};

/* Lists the ranges that this rank owns, with their memory. base not NULL: memory laid out as the snapshot.
 * buffers_at: where buffers are in it. Negative: this rank does not save buffers. The caller frees out->list
 * with free(). ZR_ERR_NOMEM. */
int zr_extents_of(struct zero_ctx *z, char *base, int64_t buffers_at, struct zr_extents *out);
/* Lists the ranges that this rank reads; see zr_engine_runs_to_load. */
int zr_extents_to_load(struct zero_ctx *z, char *base, int64_t buffers_at, struct zr_extents *out);

/* safetensors' name of the dtype that a kind of the tensor has. */
const char *zr_kind_dtype(const struct zr_tensor *t, int kind);
#define ZR_KIND_CHARS 16
void zr_kind_print(int kind, char text[ZR_KIND_CHARS]);
bool zr_kind_parse(const char *text, size_t n, int *kind);
/* The name of an optimizer in checkpoints. ZR_OPTIMIZER_NONE: "user", the update of the program. */
const char *zr_optimizer_name(enum zr_optimizer kind);
int32_t zr_tensor_dims(const struct zr_tensor *t);

/* "shard-00001-of-00004.safetensors", counted from 1. */
void zr_shard_name(int rank, int world, char out[64]);

/* Checks that a file of these extents can be read again. tensors: the ones of the whole model. ZR_ERR_ARG:
 * its header would be larger than safetensors allows. */
int zr_shard_check(const struct zr_tensor *tensors, const struct zr_extents *extents);
/* Writes the rank's file and its table of blocks into folder, syncs both and the folder, and reads the head
 * and the table back as a load does. Any thread. dev: where the extents are, or NULL for the host's memory.
 * cancelled is looked at now and then: non-zero ends it with ZR_ERR_FAILED. */
int zr_shard_write(const struct zr_files *fs, const char *folder, const char *name,
                   const struct zr_tensor *tensors, const struct zr_extents *extents, struct zr_device *dev,
                   const _Atomic bool *cancelled);

#endif
