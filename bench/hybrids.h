/* SPDX-License-Identifier: Apache-2.0 */
/* hybrids.h: HSDP, HFSDP or neither as one number, and its translation to and from cfg.mesh and
 * cfg.hybrid. */
#ifndef ZERO_BENCH_HYBRIDS_H
#define ZERO_BENCH_HYBRIDS_H

#include "zero/zero.h"

/* The numbers of enum zr_hybrid (shard/options.h). Unlike in the public enum, where ZERO_HSDP is 0, 0 means
 * none. */
enum hybrid { HYBRID_NONE = 0, HYBRID_HSDP = 1, HYBRID_HFSDP = 2 };

/* Sets the hybrid in cfg for n_dp data-parallel ranks. Each dp_shard of them share a copy of the parameters.
 * HYBRID_NONE leaves cfg as it is. If n_dp is at most dp_shard there is one copy. libzero refuses a
 * dp_shard above n_dp. */
static inline void hybrid_to_config(struct zero_config *cfg, int hybrid, int64_t n_dp, int64_t dp_shard)
{
    if (!hybrid)
        return;
    cfg->hybrid = hybrid == HYBRID_HFSDP ? ZERO_HFSDP : ZERO_HSDP;
    cfg->mesh.dp_replicate = n_dp > dp_shard ? (int32_t)(n_dp / dp_shard) : 1;
    cfg->mesh.dp_shard = (int32_t)dp_shard;
}

/* The hybrid of a run or a plan, from the hybrid and dp_shard that libzero reports for n_dp data-parallel
 * ranks. libzero reports ZERO_HSDP, which is 0, also without groups, so dp_shard decides. */
static inline int hybrid_of_run(int32_t hybrid, int32_t dp_shard, int32_t n_dp)
{
    return dp_shard == n_dp ? HYBRID_NONE : hybrid == ZERO_HFSDP ? HYBRID_HFSDP : HYBRID_HSDP;
}

#endif
