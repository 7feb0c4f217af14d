/* SPDX-License-Identifier: Apache-2.0 */
/* tensor_parallel.h: what tensor parallelism adds to zero-bench train: --tp N cuts each layer of the model
 * into parts (gpt2.h), on a rank each; and the mesh, which has the stages of --pp (pipeline.h), too. */
#ifndef ZERO_BENCH_TRAIN_PARTS_H
#define ZERO_BENCH_TRAIN_PARTS_H

#include "bench/gpt2/gpt2.h"
#include "bench/train/state_hash.h"

/* Where a rank is on the mesh. */
struct train_place {
    /* this rank's number among the ranks that the data is dealt to, and how many they are */
    int32_t dp, n_dp;
    /* its part of each layer; without parts 0 */
    int32_t part;
    /* its stage of the pipeline, and how many there are; without --pp 0 and 1 */
    int32_t stage, n_stages;
};

/* Before zero_wrap, and before the model is open: finds this rank's place and its part on the mesh of pp
 * stages and tp parts, and tells cfg. With one of both it does nothing. Returns 0 or a code, as failed()
 * does. */
int train_place_open(struct train_place *p, int64_t pp, int64_t tp, struct zero_config *cfg);

/* The same once zero_wrap has found it, of zero_get_stats. Refuses a mesh of the environment's that is not of
 * pp stages and tp parts. */
int train_place_wrapped(struct train_place *p, int64_t pp, int64_t tp, const struct zero_stats *stats);

/* Tells the model which part it is, and to add up by *z, which zero_wrap is to open. */
void train_parts_join(const struct train_place *p, struct gpt2 *model, zero_ctx **z);

/* The hash of this rank's part becomes one of all parts, on every rank of tp. Collective over them. */
int train_parts_hash(zero_ctx *z, int32_t part, int64_t n_parts, char hash[STATE_HASH_CHARS]);

#endif
