/* SPDX-License-Identifier: Apache-2.0 */
/* weights_inside.h: what zero_export and zero_import share: a map of weights, resolved, and where each lies.
 */
#ifndef ZR_ZERO_WEIGHTS_INSIDE_H
#define ZR_ZERO_WEIGHTS_INSIDE_H

#include "zero/checkpoint/export_folder.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/save.h"
#include "zero/context.h"

#ifndef ZR_WEIGHTS_PIECE_BYTES /* a test may set another size */
#define ZR_WEIGHTS_PIECE_BYTES (4 << 20)
#endif

/* What a tensor of this rank's table has of a weight: n elements of those that are here, from begin on; at is
 * where they are in the tensor. */
struct zr_weight_own {
    int32_t tensor;
    int64_t begin, n, at;
};

/* One weight of the map, resolved. */
struct zr_weight {
    const char *name;
    /* of the whole model */
    int32_t tensor;
    int32_t file, entry;
    bool transposed;
    /* elements of the tensor, or of this rank's part of it */
    int64_t first, n;
    /* of the n, those of this rank's table: n_own of zr_weights.own from first_own on, in any order. Several
     * pipeline stages on a rank may each have some layers of one tensor. */
    int32_t first_own, n_own;
    /* the table's copy of it, on the last pipeline stage; -1: none */
    int32_t copy;
    /* in the file, of the whole */
    int64_t shape[8];
    int32_t n_dims;
    /* if it is transposed: of what is here */
    int64_t rows, columns;
    /* as it lies in the file, and how many elements are there */
    struct zr_tp_cut cut;
    int64_t n_whole;
};

struct zr_weights {
    struct zero_ctx *z;
    const char *dir;
    struct zr_weight *list;
    int32_t n, n_files;
    struct zr_weight_own *own;
    /* of a model in pipeline stages on several ranks: memory of what the weights are called */
    char *names;
};

/* weights_map.c. Resolves the map, or if it is NULL every tensor under its own name. Collective: all ranks
 * first compare the map, those of each pipeline stage theirs, and max_file_bytes; then the maps of pipeline
 * stages are put together. The caller frees out (zr_weights_free), in any case. ZR_ERR_ARG, ZR_ERR_NOMEM,
 * ZR_ERR_MISMATCH. */
int zr_weights_resolve(struct zero_ctx *z, const struct zero_weight *map, int32_t n, int64_t max_file_bytes,
                       struct zr_weights *out);
/* ZR_ERR_ARG for a name that two of them have, which no file can. */
int zr_weights_check_names(const struct zr_weights *ws);
void zr_weights_free(struct zr_weights *ws);
/* (rows, columns) -> (columns, rows), elements of size bytes; dst and src lie apart. */
void zr_weights_transpose(char *dst, const char *src, int64_t rows, int64_t columns, int64_t size);
/* This rank reads and writes files: rank 0, and of a model in parts or stages the first rank of each. */
bool zr_weights_has_files(const struct zero_ctx *z);
/* Checks the rules and the directory of either call, and records it. */
int zr_weights_check_call(struct zero_ctx *z, const char *dir, const char *call, enum zr_called_name name);

#endif
