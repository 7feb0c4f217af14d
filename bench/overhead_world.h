/* SPDX-License-Identifier: Apache-2.0 */
/* overhead_world.h: what a bracket costs among many ranks, beside the same among two. */
#ifndef ZERO_BENCH_OVERHEAD_WORLD_H
#define ZERO_BENCH_OVERHEAD_WORLD_H

#include "zero/zero.h"

/* Forks the other ranks of a world of 2 and of a world of `world` (of shared memory, on this host), which
 * only wrap the tensors and sleep. This process, rank 0 of both, calls measure(arg, z, &ns) `passes` times in
 * each, by turns; ns[0] and ns[1] get the medians. No thread may run yet. Returns 0, or a code whose message
 * is set by zr_fail. */
int overhead_world(const struct zero_tensor *tensors, int32_t n, const struct zero_config *cfg, int world,
                   int64_t passes, int (*measure)(void *arg, zero_ctx *z, double *ns), void *arg,
                   double ns[2]);

#endif
