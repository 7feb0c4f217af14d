/* SPDX-License-Identifier: Apache-2.0 */
/* shared_memory.h: memory that other ranks of this host can map.
 *
 * It is a memfd and not a name in /dev/shm: it has no name to be left behind when ranks are killed, and it is
 * not bound by the 64 MiB that containers give /dev/shm by default. Peers open it through /proc/PID/fd/FD
 * while its owner keeps the descriptor open, which is the same code for ranks that are processes and for
 * ranks that are threads of one. The pages are reserved at once, so that a lack of memory is an error now and
 * not a SIGBUS in the middle of a step.
 *
 * Thread-safety: none is needed. */
#ifndef ZR_COMM_SHARED_MEMORY_H
#define ZR_COMM_SHARED_MEMORY_H

#include <stdint.h>

/* A file of that many bytes, or a page more, all zero, mapped to read and write. name: for /proc. *fd is
 * closed by the caller, also after a failure, where it is not -1. ZR_ERR_NOMEM, ZR_ERR_SYSTEM. */
int zr_shared_make(const char *name, int64_t bytes, int *fd, char **at);

/* What tells one from another file of the same process, of the same number later; of fd. ZR_ERR_SYSTEM. */
int zr_shared_inode(int fd, uint64_t *inode);

/* Where a rank has it. */
struct zr_shared_at {
    /* for messages */
    int32_t rank;
    int32_t pid, fd;
    /* 0: whatever its number */
    uint64_t inode;
};
/* What a peer keeps open, mapped with that protection (PROT_READ and so on). ZR_ERR_SYSTEM, ZR_ERR_NOMEM. */
int zr_shared_map(const struct zr_shared_at *where, int64_t bytes, int protection, char **at);

/* Of both. NULL is allowed. */
void zr_shared_unmap(void *at, int64_t bytes);

#endif
