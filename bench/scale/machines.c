/* SPDX-License-Identifier: Apache-2.0 */
/* machines.c: hosts of eight GPUs and their network. Sources of the figures:
 *
 *   A100    NVIDIA A100 Tensor Core GPU datasheet (SXM4): BF16 312 TFLOPS dense; 40 GB at 1,555 GB/s, 80 at
 *           2,039 GB/s; NVLink 600 GB/s, both directions. DGX A100 datasheet: eight single-port ConnectX-6 of
 *           200 Gb/s for the eight GPUs.
 *   H100    NVIDIA H100 Tensor Core GPU datasheet (SXM5): BF16 1,979 TFLOPS with sparsity, half of it dense;
 *           80 GB at 3.35 TB/s; NVLink 900 GB/s, both directions. DGX H100 datasheet: eight ConnectX-7 of
 *           400 Gb/s.
 *   H200    NVIDIA H200 Tensor Core GPU datasheet (SXM): as H100, but 141 GB at 4.8 TB/s. DGX H200 datasheet:
 *           eight ConnectX-7 of 400 Gb/s.
 *   B200    NVIDIA DGX B200 datasheet, of eight GPUs: 1,440 GB at 64 TB/s; NVLink 14.4 TB/s, both directions;
 *           eight ConnectX-7 of 400 Gb/s. NVIDIA Blackwell Architecture Technical Brief, HGX B200: BF16
 *           4.5 PFLOPS with sparsity a GPU, half of it dense.
 *   host_bytes_per_s
 *           The same datasheets: PCIe of 16 lanes, both directions, is 64 GB/s of generation 4 (A100) and
 *           128 GB/s of generation 5 (H100, H200, B200).
 *   near_ns, far_ns
 *           NVIDIA NCCL, src/graph/tuning.cc, hwLat: a step of a ring by LL128 takes 1.9 us over NVLink and
 *           4.0 us over a network, whatever the generation. */
#include "bench/scale/scale.h"

#include <string.h>

/* name, text, per_host, flop_per_s, memory_bytes, memory_bytes_per_s, near_bytes_per_s, far_bytes_per_s,
 * host_bytes_per_s, near_ns, far_ns (struct scale_machine) */
static const struct scale_machine machines[] = {
    {"a100-40", "8 x A100 SXM4 40 GB, 200 Gb/s a GPU", 8, 312e12, 40e9, 1555e9, 300e9, 25e9, 64e9, 1900,
     4000},
    {"a100-80", "8 x A100 SXM4 80 GB, 200 Gb/s a GPU", 8, 312e12, 80e9, 2039e9, 300e9, 25e9, 64e9, 1900,
     4000},
    {"h100", "8 x H100 SXM5, 400 Gb/s a GPU", 8, 989.5e12, 80e9, 3350e9, 450e9, 50e9, 128e9, 1900, 4000},
    {"h200", "8 x H200 SXM, 400 Gb/s a GPU", 8, 989.5e12, 141e9, 4800e9, 450e9, 50e9, 128e9, 1900, 4000},
    {"b200", "8 x B200 SXM, 400 Gb/s a GPU", 8, 2250e12, 180e9, 8000e9, 900e9, 50e9, 128e9, 1900, 4000},
};
enum { N_MACHINES = sizeof machines / sizeof *machines };

const char *scale_machine_names(void)
{
    static char text[128];
    if (text[0])
        return text;
    for (int i = 0; i < N_MACHINES; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? ", " : "", machines[i].name);
    return text;
}

const struct scale_machine *scale_machine_of(const char *name)
{
    for (int i = 0; i < N_MACHINES; i++)
        if (!strcmp(machines[i].name, name))
            return &machines[i];
    return NULL;
}
