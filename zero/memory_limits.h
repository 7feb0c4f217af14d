/* memory_limits.h: what memory control groups leave this process. */
#ifndef ZR_ZERO_MEMORY_LIMITS_H
#define ZR_ZERO_MEMORY_LIMITS_H

#include <stdbool.h>
#include <stdint.h>

enum { ZR_MOST_MEMORY_LIMITS = 4, ZR_GROUP_PATH_BYTES = 512 };

/* A group that has a limit. */
struct zr_memory_limit {
    uint64_t group;     /* the same number in every process of this host that is in it */
    int64_t free_bytes; /* not taken by anybody in the group, page cache that can be taken back among it */
    int32_t n_ranks;    /* in the group, by who asks the others; 1 */
    char path[ZR_GROUP_PATH_BYTES];
};

/* To out[ZR_MOST_MEMORY_LIMITS], the process's own group first; returns how many. */
int zr_memory_limits(struct zr_memory_limit *out);

#endif
