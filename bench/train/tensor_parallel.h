/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_parallel.h: what --tp and --cp add to zero-bench train. --tp cuts each layer of the model (model.h)
 * over N ranks, which add up their partial results through libzero. --cp cuts each row of the batch, and
 * ranks share attention. */
#ifndef ZERO_BENCH_TRAIN_TENSOR_PARALLEL_H
#define ZERO_BENCH_TRAIN_TENSOR_PARALLEL_H

#include "bench/model/model.h"
#include "bench/train/state_hash.h"

/* The position of a rank on the mesh. */
struct train_place {
    /* this rank's number among those that read different data, and how many these are */
    int32_t dp, n_dp;
    /* rank on the cp and the tp axis; 0 without --cp or --tp */
    int32_t cp, tp;
    /* pipeline stage and number of them; 0 and 1 without --pp */
    int32_t stage, n_stages;
};

/* Tells the model its rank on the tp axis, and to communicate through *z, which zero_wrap will open. */
void train_join_tp(struct model *model, int32_t tp, zero_ctx **z);

/* Tells the model its rank on the cp axis and the rows of all its ranks, which must outlive it. */
void train_join_cp(struct model *model, int32_t cp, const struct model_rows *rows, zero_ctx **z);

/* Allocates the rows of every rank of cp, which the caller frees. Returns 0 or a zero_err. */
int train_cp_rows(struct model_rows **out, const struct model_config *config);

/* Replaces each of n values on the host by its sum over the tp ranks, or by the largest. Collective over tp,
 * between passes of the model. Waits for the model's stream. */
int train_reduce_tp(struct model *model, float *x, int64_t n, bool largest);

/* Replaces the hash of this rank's part of the state by one of all tp parts. Collective over tp. */
int train_hash_tp(struct model *model, char hash[STATE_HASH_CHARS]);

#endif
