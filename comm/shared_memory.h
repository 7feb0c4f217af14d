/* SPDX-License-Identifier: Apache-2.0 */
/* shared_memory.h: memory that other ranks of this host can map, and the arenas of backends.
 *
 * It is a memfd and not a name in /dev/shm. So no name is left behind when ranks are killed, and the 64 MiB
 * that containers give /dev/shm by default do not limit it. Peers open it through /proc/PID/fd/FD while its
 * owner keeps the descriptor open. That is the same code whether ranks are processes or threads of one
 * process. The pages are reserved at once, so that a lack of memory is an error now and not a SIGBUS in the
 * middle of a step.
 *
 * Thread-safety: none is needed. */
#ifndef ZR_COMM_SHARED_MEMORY_H
#define ZR_COMM_SHARED_MEMORY_H

#include "comm/comm.h"

/* Makes a zeroed file of this many bytes, rounded up to pages, and maps it for reading and writing. name is
 * its name in /proc. The caller closes *fd unless it is -1, also after a failure. Returns ZERO_ERR_NOMEM or
 * ZERO_ERR_SYSTEM. */
int zr_shared_make(const char *name, int64_t bytes, int *fd, char **at);

/* Reads the inode of fd. It tells the file from a later one of the same process and number. Returns
 * ZERO_ERR_SYSTEM. */
int zr_shared_inode(int fd, uint64_t *inode);

/* The rank, process and descriptor of a file that peers may open. */
struct zr_shared_at {
    /* Used in messages. */
    int32_t rank;
    int32_t pid, fd;
    /* Inode that the file must have. 0: any. */
    uint64_t inode;
};
/* Maps a file that a peer keeps open, with this protection (PROT_READ and so on). Returns ZERO_ERR_SYSTEM or
 * ZERO_ERR_NOMEM. */
int zr_shared_map(const struct zr_shared_at *where, int64_t bytes, int protection, char **at);

/* Unmaps memory of zr_shared_make or zr_shared_map. NULL is allowed. */
void zr_shared_unmap(void *at, int64_t bytes);

/* ---- arenas ---- */

/* The two kinds of arenas that several backends use: memory of the device, which no other rank reads, and
 * memory that ranks of the same host map. Both functions make a zeroed arena, and neither is collective.
 * backend is the backend's name, for messages. Errors are ZERO_ERR_NOMEM, ZERO_ERR_SYSTEM, and those of the
 * device. */

/* The device must outlive the arena. Also returns ZERO_ERR_ARG if bytes is not more than 0. */
int zr_plain_arena(struct zr_device *dev, const char *backend, int64_t bytes, struct zr_arena **out);
/* name is the file's name in /proc. */
int zr_shared_arena(const char *backend, const char *name, int64_t bytes, struct zr_arena **out);

/* The file that other ranks map. -1 for a plain arena. */
int zr_arena_fd(const struct zr_arena *a);

/* Zeroes memory of the device. Blocks. */
int zr_plain_zero(struct zr_device *dev, void *at, int64_t bytes);

#endif
