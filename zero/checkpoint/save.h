/* SPDX-License-Identifier: Apache-2.0 */
/* save.h: what a rank writes into a checkpoint, and the format of its file.
 *
 * A file is in the safetensors format. It holds every range of values that its rank owns, as an entry
 * TENSOR/KIND/FIRST of shape [n]. FIRST is the index of the first element in the tensor. KIND is one of
 * these:
 *
 *     model        weights in the model's dtype, and buffers
 *     master       fp32 weights; f32 weights are their own masters, and are stored once, as master
 *     state0, ...  optimizer states, in the precision in which they are kept
 *     scale0, ...  scales of states in 8 bits, one for each block of ZR_Q8_BLOCK elements of a layer
 *
 * For scales, FIRST and n count blocks: the last block of a layer may be shorter, and the next layer begins a
 * block. Masters that are kept as 16 more bits are stored in fp32, and joined when they are written.
 *
 * Consecutive ranges are one entry. A range of a tensor that is cut over tp is named TENSOR/KIND/FIRST@PART,
 * and FIRST is an index in the part (tp_cut.h). With tp, tensors that are not cut are in the files of part
 * 0's ranks only. Buffers are in the file of rank 0, or of the first rank of their pipeline stage. The
 * program's own data, if there is any, is in the last entries: zr_data_names, U8 of shape [bytes]. */
#ifndef ZR_ZERO_SAVE_H
#define ZR_ZERO_SAVE_H

#include "shard/tp_cut.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/context.h"

/* A range of a tensor's elements, in this rank's memory. kind is as in zr_engine_read. */
struct zr_extent {
    /* Tensor of the whole model (struct zr_whole). */
    int32_t tensor;
    int kind;
    /* Elements [first, first + n) of that tensor, row-major, or blocks of them if the values are scales. */
    int64_t first, n;
    /* Bytes of a value in the file, or for a load in this rank's memory. */
    int64_t size;
    char *at;
    /* For a save of masters that are kept as 16 more bits: the weights, in bf16. The bits are at `at`. */
    const char *weights;
    /* For a load: values of the last pipeline stage's copy of a tied tensor, which the first stage sends. */
    bool given;
};

struct zr_extents {
    /* Sorted by tensor, kind and first. */
    struct zr_extent *list;
    int64_t n;
    /* With tp, this rank's part of tensors that are cut. -1: tp is 1. */
    int32_t part;
    /* The program's own data by enum zr_data_kind, in host memory. It is in no extent. */
    struct {
        const void *at;
        int64_t bytes;
    } data[ZR_N_DATA];
};

/* Lists the ranges that this rank owns, with their memory. If base is not NULL, it is memory laid out as the
 * snapshot; otherwise it is the memory of the values. buffers_at is the offset of buffers in base, or
 * negative if this rank does not save buffers. The caller frees out->list with free(). ZERO_ERR_NOMEM. */
int zr_extents_of(struct zero_ctx *z, char *base, int64_t buffers_at, struct zr_extents *out);
/* Lists the ranges that this rank reads; see zr_engine_runs_to_load. */
int zr_extents_to_load(struct zero_ctx *z, char *base, int64_t buffers_at, struct zr_extents *out);

/* Returns safetensors' name for the dtype of this kind of values. moments: the form of the states. */
const char *zr_kind_dtype(const struct zr_tensor *t, enum zero_moments moments, int kind);
/* Returns the block of 8-bit states that an element is in. Each layer has layer_elems elements. */
int64_t zr_block_of(int64_t layer_elems, int64_t element);
/* Returns the range of a kind that begins at `first`, or NULL. */
const struct zr_extent *zr_extent_find(const struct zr_extents *x, int32_t tensor, int kind, int64_t first);
#define ZR_KIND_CHARS 16
void zr_kind_print(int kind, char text[ZR_KIND_CHARS]);
bool zr_kind_parse(const char *text, size_t n, int *kind);
/* Returns the name of an optimizer in checkpoints. ZR_OPTIMIZER_NONE, the update of the program, is
 * "user". */
const char *zr_optimizer_name(enum zero_optimizer kind);
/* save.c. Whether steps round anything at random. */
bool zr_rounds_at_random(const struct zero_ctx *z);
int32_t zr_tensor_dims(const struct zr_tensor *t);

/* Writes "shard-00001-of-00004.safetensors". Files count from 1. */
void zr_shard_name(int rank, int world, char out[64]);

/* Checks that a file of these extents can be read again. tensors: those of the whole model. ZERO_ERR_ARG if
 * its header would be larger than safetensors allows. */
int zr_shard_check(const struct zr_tensor *tensors, const struct zr_extents *extents);
/* Writes the rank's file and its table of blocks into folder, and syncs both and the folder. Then reads the
 * head and the table back as a load does. Any thread. dev: the device that has the extents; NULL: they are in
 * host memory. cancelled is read before each block; if it is set, the call ends with ZERO_ERR_FAILED. */
int zr_shard_write(const struct zr_files *fs, const char *folder, const char *name,
                   const struct zr_tensor *tensors, const struct zr_extents *extents, struct zr_device *dev,
                   const _Atomic bool *cancelled);

#endif
