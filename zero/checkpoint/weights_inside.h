/* SPDX-License-Identifier: Apache-2.0 */
/* weights_inside.h: what zero_export and zero_import share: the resolved map of weights, and where each
 * weight lies. */
#ifndef ZR_ZERO_WEIGHTS_INSIDE_H
#define ZR_ZERO_WEIGHTS_INSIDE_H

#include "zero/checkpoint/export_folder.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/checkpoint/save.h"
#include "zero/context.h"

/* Weights are read and written in pieces of at most this size. */
#ifndef ZR_WEIGHTS_PIECE_BYTES /* a test may set another size */
#define ZR_WEIGHTS_PIECE_BYTES (4 << 20)
#endif

/* A range of a weight in one tensor of this rank's table. It is elements [begin, begin + n) of what this rank
 * has of the weight. `at` is its first element in the tensor. */
struct zr_weight_range {
    int32_t tensor;
    int64_t begin, n, at;
};

/* One weight of the map, resolved. */
struct zr_weight {
    const char *name;
    /* Tensor of the whole model. */
    int32_t tensor;
    /* The number of the file that it is in, and of its entry in that file. */
    int32_t file, entry;
    bool transposed;
    /* Elements [first, first + n) of the tensor, or, with tp, of this rank's part of it. */
    int64_t first, n;
    /* Its ranges in this rank's table: n_ranges elements of zr_weights.ranges from first_range on, in any
     * order. There may be several, because several pipeline stages on a rank may each have some layers of one
     * tensor. */
    int32_t first_range, n_ranges;
    /* This table's copy of a tied tensor, on the last pipeline stage. -1: none. */
    int32_t copy;
    /* Shape of the whole weight in the file. */
    int64_t shape[8];
    int32_t n_dims;
    /* If it is transposed: rows and columns of what is on this rank. */
    int64_t rows, columns;
    /* How the weight in the file is cut over tp, and how many elements the file has. */
    struct zr_tp_cut cut;
    int64_t n_whole;
};

struct zr_weights {
    struct zero_ctx *z;
    const char *dir;
    struct zr_weight *list;
    int32_t n, n_files;
    struct zr_weight_range *ranges;
    /* With pipeline stages on several ranks: memory of the weights' names. */
    char *names;
};

/* weights_map.c. Resolves the map; NULL means every tensor under its own name. Collective. First the ranks
 * compare max_file_bytes, and the ranks of each pipeline stage compare their map. Then the maps of all
 * pipeline stages are joined. The caller frees out with zr_weights_free, even after a failure. ZERO_ERR_ARG,
 * ZERO_ERR_NOMEM, ZERO_ERR_MISMATCH. */
int zr_weights_resolve(struct zero_ctx *z, const struct zero_weight *map, int32_t n, int64_t max_file_bytes,
                       struct zr_weights *out);
/* ZERO_ERR_ARG if two weights have the same name, which no file allows. */
int zr_weights_check_names(const struct zr_weights *ws);
void zr_weights_free(struct zr_weights *ws);
/* Transposes a matrix of rows x columns elements of size bytes. dst and src do not overlap. */
void zr_weights_transpose(char *dst, const char *src, int64_t rows, int64_t columns, int64_t size);
/* Whether this rank reads and writes files: rank 0, and with tp or pipeline stages the first rank of each
 * part or stage. */
bool zr_weights_has_files(const struct zero_ctx *z);
/* Checks the rules and the directory of zero_export or zero_import, and records the call. */
int zr_weights_check_call(struct zero_ctx *z, const char *dir, enum zr_call_name name);

#endif
