/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_versions.c: known faults of NCCL's releases; see nccl_versions.h.
 *
 * Both uses are off unless copy_engine is on. A fault that gives wrong numbers turns its use off even then;
 * one that hangs is taken, with a warning (nccl_open.c, nccl_arena.c). */
#include "comm/nccl/nccl_versions.h"

#include <stddef.h>

static const struct zr_nccl_fault faults[] = {
    /* Release notes of 2.28.7; the aggregation came with 2.28.3. All segments of a unit are one group here.
     */
    {.use = ZR_NCCL_USE_WINDOWS,
     .from = 22803,
     .before = 22807,
     .what = "symmetric kernels that share a group may corrupt data",
     .source = "NCCL's release notes of 2.28.7"},
    /* NCCL launches them with programmatic serialization, and since 2.28.0 they no longer wait for the kernel
     * before them (cudaGridDependencySynchronize): 2.27 has that wait, and 2.30.7 has it again. Wrong numbers
     * were reported under CUDA graphs. A kernel that packs stands directly before such a collective here. */
    {.use = ZR_NCCL_USE_WINDOWS,
     .from = 22800,
     .before = 23007,
     .what = "symmetric kernels may start before the kernel that writes their data has ended",
     .source = "NCCL issue 1924, fixed in 2.30.7"},
    /* Before 2.29.7 both sides asked whether there is NVLS; since then the kernels' side prepares multicast
     * for more than two ranks only, and the copy engines' side does not know. Whether a machine has NVLS
     * cannot be asked, so it counts as there. */
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
