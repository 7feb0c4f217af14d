/* SPDX-License-Identifier: Apache-2.0 */
/* host_memory.h: how much of the host's memory is left to take: by what the host has available, and by
 * what each memory control group (version 1 or 2) that this process is in leaves to it; free swap counts
 * as memory, but for swap in compressed memory (zram), which takes what it gives. Pages of shared memory,
 * and large private ones, are handed out until the kernel kills somebody for them, so whoever takes much
 * asks first. */
#ifndef ZR_KERNELS_HOST_MEMORY_H
#define ZR_KERNELS_HOST_MEMORY_H

#include <stdint.h>

enum { ZR_MOST_MEMORY_GROUPS = 16, ZR_GROUP_PATH_BYTES = 512 };

/* A memory control group that has a limit. */
struct zr_memory_group {
    /* the same number in every process of this machine that is in it; other machines have it too */
    uint64_t id;
    int64_t free_bytes;
    char path[ZR_GROUP_PATH_BYTES];
};

struct zr_host_memory {
    /* of the host; INT64_MAX: not known */
    int64_t free_bytes;
    /* of free_bytes, here and in every group, so much at most is swap */
    int64_t swap_bytes;
    int32_t n_groups;
    /* this process's own first, then those around it */
    struct zr_memory_group group[ZR_MOST_MEMORY_GROUPS];
};

/* What there is now, as far as it can be read. root: "", or a folder that has proc and sys in it. */
void zr_host_memory_look(const char *root, struct zr_host_memory *out);

/* Bytes that this process could take if no other took any; INT64_MAX: not known. */
int64_t zr_host_memory_least(const struct zr_host_memory *m);

#endif
