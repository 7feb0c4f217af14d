/* train_parts.h: what tensor parallelism adds to zero-bench train: --tp N cuts each layer of the model into
 * parts (gpt2.h), on a rank each. */
#ifndef ZERO_BENCH_TRAIN_PARTS_H
#define ZERO_BENCH_TRAIN_PARTS_H

#include "bench/gpt2/gpt2.h"
#include "bench/state_hash.h"

/* Where a rank is on the mesh. */
struct train_place {
    /* the open one, to be closed; NULL: the model is whole */
    zero_mesh *mesh;
    /* this rank's number among the ranks that the data is dealt to, and how many they are */
    int32_t dp, n_dp;
};

/* Before zero_wrap: finds this rank's place for model->config.tp parts, and tells cfg and the model, whose
 * sums go to *z, once that is open. Groups of a hybrid: shard_group as of cfg. Without parts it does nothing.
 * Returns what a libzero call returned. */
int train_parts_open(struct train_place *p, struct gpt2 *model, zero_ctx **z, struct zero_config *cfg);

/* As gpt2_draw, of a part of the model: elements are counted as it has them, and have the values of the whole
 * model's. */
void train_draw_part(const struct gpt2_config *config, int32_t part, uint64_t seed, int t, int64_t first,
                     int64_t n, real *x);

/* The hash of this rank's part becomes one of all parts, on every rank of tp. Collective over them. */
int train_parts_hash(zero_ctx *z, int32_t part, int64_t n_parts, char hash[STATE_HASH_CHARS]);

#endif
