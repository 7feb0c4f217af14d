/* SPDX-License-Identifier: Apache-2.0 */
/* host_memory.h: how much of the host's memory a process can still take. This depends on what the host has
 * available, and on what each memory control group (version 1 or 2) of this process leaves. Free swap counts
 * as memory, except for swap in compressed memory (zram), which takes as much as it gives.
 *
 * The kernel hands out pages of shared memory, and large private ones, until it has to kill a process for
 * them. So code that needs much memory asks here first. */
#ifndef ZR_KERNELS_HOST_MEMORY_H
#define ZR_KERNELS_HOST_MEMORY_H

#include <stdint.h>

enum { ZR_MAX_MEMORY_GROUPS = 16, ZR_GROUP_PATH_BYTES = 512 };

/* A memory control group that has a limit. */
struct zr_memory_group {
    /* identifier, the same in every process of the group; two machines may have the same */
    uint64_t id;
    int64_t free_bytes;
    char path[ZR_GROUP_PATH_BYTES];
};

struct zr_host_memory {
    /* free memory of the host; INT64_MAX: not known */
    int64_t free_bytes;
    /* most bytes of free_bytes, here and in every group, that are swap */
    int64_t swap_bytes;
    int32_t n_groups;
    /* this process's group first, then those around it */
    struct zr_memory_group group[ZR_MAX_MEMORY_GROUPS];
};

/* Reads the current state, as far as it can be read. root is "", or a folder that contains proc and sys. */
void zr_host_memory_look(const char *root, struct zr_host_memory *out);

/* Returns the bytes that this process could take if no other took any. INT64_MAX: not known. */
int64_t zr_host_memory_least(const struct zr_host_memory *m);

#endif
