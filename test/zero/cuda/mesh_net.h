/* SPDX-License-Identifier: Apache-2.0 */
/* mesh_net.h: a model that is cut over tp and divided over pipeline stages. It runs on the host or on the GPU
 * stand-in, where the CPU computes in device memory. */
#ifndef ZR_TEST_ZERO_MESH_NET_H
#define ZR_TEST_ZERO_MESH_NET_H

#include "test/zero/pipeline_ranks.h"

enum { NET_STEPS = 3, NET_WORLD = 8, NET_PARTS = 8 };

/* One run. A rank's r->arg points to it. */
struct net_run {
    int pp, dp, tp;
    /* as in pipeline_place */
    int stage;
    /* stages per rank; 0: one */
    int schedule, per_rank;
    int prefetch;
    bool gpu, deterministic, check;
    /* changes the configuration before zero_wrap; NULL: no change */
    void (*change)(struct zero_config *cfg);
    /* called after the training steps; NULL: nothing */
    int (*more)(struct toy_rank *r, zero_ctx *z, const struct zero_config *cfg);
};

/* What a rank found. */
struct net_found {
    double loss[NET_STEPS], norm[NET_STEPS];
    /* hash of the tensors that all ranks of tp have */
    uint64_t whole;
};
/* (NET_WORLD) */
extern struct net_found *net_found;

/* Runs one rank: wraps, trains, hashes all weights and states into r->hash, and unwraps. */
void net_rank(struct toy_rank *r);

/* Sums x over tp, through device memory on the GPU. Returns the first error. */
int net_sum(zero_ctx *z, const struct zero_config *cfg, float *x, int n);

/* Writes "pp 2 dp 2 tp 2, stage 3, schedule 0, ...". */
const char *net_text(const struct net_run *n, char text[160]);

/* Fails the test unless the run's bits, losses and norms are those of want. If exact is false, hashes and
 * losses need only be the same on the ranks of each axis, and losses near want's. */
void net_compare(const struct net_run *n, const struct toy_rank *r, uint64_t want[NET_PARTS],
                 const struct net_found *of, bool exact);

#endif
