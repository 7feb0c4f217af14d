/* SPDX-License-Identifier: Apache-2.0 */
/* block_file.h: a large file, written or read a block at a time by several threads.
 *
 * Its blocks go past the system's page cache (O_DIRECT) where the file system can do that: they are written
 * once and read once, so keeping them would cost a copy and memory, and push out what others keep there. What
 * is in the cache already is read from it. */
#ifndef ZR_ZERO_BLOCK_FILE_H
#define ZR_ZERO_BLOCK_FILE_H

#include "zero/checkpoint/files.h"

#include <stdatomic.h>

struct zr_block_file {
    const struct zr_files *fs;
    /* memory of the caller's */
    const char *path;
    /* direct: a second descriptor, past the page cache, or -1 */
    int fd, direct;
    /* direct cannot be used after all */
    _Atomic bool refused;
};

/* A new file for `bytes` bytes, whose room is taken at once where the file system can do that. ZR_ERR_IO. */
int zr_block_file_create(const struct zr_files *fs, const char *path, int64_t bytes, struct zr_block_file *f);
/* For reading; bytes: what will be read of it at most. */
int zr_block_file_open(const struct zr_files *fs, const char *path, int64_t bytes, struct zr_block_file *f);
/* Any thread. buf is aligned to ZR_DIRECT_ALIGN; any n and at. */
int zr_block_write(struct zr_block_file *f, const char *buf, int64_t n, int64_t at);
int zr_block_read(struct zr_block_file *f, char *buf, int64_t n, int64_t at);
/* Also one that could not be opened; nothing is synced. */
int zr_block_file_close(struct zr_block_file *f);

#endif
