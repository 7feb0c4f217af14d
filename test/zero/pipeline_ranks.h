/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_ranks.h: helpers for tests of models with pipeline stages. They find a rank's place in the mesh,
 * divide layers over pipeline stages, write schedule files and compare layouts by hashes. */
#ifndef ZR_TEST_ZERO_PIPELINE_RANKS_H
#define ZR_TEST_ZERO_PIPELINE_RANKS_H

#include "test/zero/toy_net.h"

/* A rank's pipeline stage, data-parallel rank, number of data-parallel ranks, and tensor-parallel rank. */
struct place {
    int32_t pp, dp, n_dp, tp;
};

/* Sets cfg->mesh and finds the rank's place in it. A stage above 3 means a hybrid with groups of two
 * data-parallel ranks. */
int pipeline_place(struct zero_config *cfg, int stage, int pp, int dp, int tp, struct place *at);

/* Returns how many of n_layers come before the pipeline stage. Layers are divided evenly, and the first
 * pipeline stages get the remainder. */
int pipeline_layers_before(int n_layers, int pp, int stage);

/* Draws a random number in -1..1. */
double pipeline_draw(uint32_t *seed);

/* Fails the rank unless allocated memory equals planned memory, and unless zero_plan had predicted it. plan
 * is NULL for hybrids, because zero_plan does not know their hosts. */
void pipeline_check_memory(struct toy_rank *r, const struct zero_stats *stats,
                           const struct zero_plan_info *plan);

/* Writes text to a new file and its name to path. */
void pipeline_write_file(char path[64], const char *text);

/* Fails the test if a rank's hash differs from that of the first data-parallel rank of its pipeline stage.
 * Also fails it unless the hashes of all pipeline stages sum to want[k] for tensor-parallel rank k. If
 * want[k] is 0, it is set to the sum. */
void pipeline_compare(const struct toy_rank *r, int pp, int dp, int tp, uint64_t want[], const char *what);

#endif
