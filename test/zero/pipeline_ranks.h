/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_ranks.h: what tests of models in pipeline stages share: where a rank stands in the mesh, how
 * layers are divided over stages, schedule files, and the comparison of layouts by hashes. */
#ifndef ZR_TEST_ZERO_PIPELINE_RANKS_H
#define ZR_TEST_ZERO_PIPELINE_RANKS_H

#include "test/zero/toy_net.h"

/* A rank's stage, its data-parallel rank, how many of those there are, and its rank of tp. */
struct place {
    int32_t pp, dp, n_dp, tp;
};

/* Sets cfg->mesh, and finds the rank's place in it. Behind stage 3 the mesh is a hybrid, with groups of two
 * data-parallel ranks. */
int pipeline_place(struct zero_config *cfg, int stage, int pp, int dp, int tp, struct place *at);

/* How many of n_layers stand before the stage: they are dealt evenly, and the first stages have one more. */
int pipeline_layers_before(int n_layers, int pp, int stage);

/* A random number in -1..1. */
double pipeline_draw(uint32_t *seed);

/* Fails the rank unless allocated memory is planned memory, and unless the plan said so before the wrap. A
 * plan does not know the hosts of a hybrid; then plan is NULL. */
void pipeline_check_memory(struct toy_rank *r, const struct zero_stats *stats,
                           const struct zero_plan_info *plan);

/* Writes text to a new file, whose name goes to path. */
void pipeline_write_file(char path[64], const char *text);

/* Fails the test if a rank has another hash than the first data-parallel rank of its stage. Also fails it if
 * the hashes of all stages do not sum to want[k] for rank k of tp. A want[k] of 0 is not known yet, and is
 * set. */
void pipeline_compare(const struct toy_rank *r, int pp, int dp, int tp, uint64_t want[], const char *what);

#endif
