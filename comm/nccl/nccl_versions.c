/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_versions.c: known faults of NCCL's releases.
 *
 * Both uses are off unless copy_engine is on. A fault that gives wrong numbers turns its use off even then. A
 * fault that hangs only causes a warning (nccl_open.c, nccl_arena.c). */
#include "comm/nccl/nccl_versions.h"

#include <stddef.h>

static const struct zr_nccl_fault faults[] = {
    /* From the release notes of 2.28.7; the aggregation came with 2.28.3. libzero puts all segments of a unit
     * in one group. */
    {.use = ZR_NCCL_USE_WINDOWS,
     .from = 22803,
     .before = 22807,
     .what = "symmetric kernels that share a group may corrupt data",
     .source = "NCCL's release notes of 2.28.7"},
    /* NCCL launches these kernels with programmatic serialization. From 2.28.0 on they do not wait for the
     * kernel before them (cudaGridDependencySynchronize). 2.27 has that wait, and 2.30.7 has it again. Wrong
     * numbers were reported under CUDA graphs. In libzero a kernel that packs runs directly before such a
     * collective. */
    {.use = ZR_NCCL_USE_WINDOWS,
     .from = 22800,
     .before = 23007,
     .what = "symmetric kernels may start before the kernel that writes their data has ended",
     .source = "NCCL issue 1924, fixed in 2.30.7"},
    /* Before 2.29.7 both sides asked whether there is NVLS. Since then the kernels' side prepares multicast
     * only for more than two ranks, and the copy engines' side is not aware of that. Whether a machine has
     * NVLS cannot be queried, so libzero assumes it has. */
    {.use = ZR_NCCL_USE_COPY_ENGINE,
     .from = 22907,
     .before = 23102,
     .world = 2,
     .what = "the first copy-engine collective of 2 ranks with NVLS may hang, and cannot be aborted then",
     .source = "NCCL issue 2241, fixed by pull request 2290 in 2.31.2"},
};

const struct zr_nccl_fault *zr_nccl_fault_of(enum zr_nccl_use use, int version, int world)
{
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        const struct zr_nccl_fault *f = &faults[i];
        if (f->use == use && version >= f->from && version < f->before && (!f->world || f->world == world))
            return f;
    }
    return NULL;
}
