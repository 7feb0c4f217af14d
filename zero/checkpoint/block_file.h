/* SPDX-License-Identifier: Apache-2.0 */
/* block_file.h: a large file that several threads write or read, a block at a time.
 *
 * Blocks bypass the system's page cache (O_DIRECT) if the file system can do that. They are written once and
 * read once. Caching them would cost a copy and memory, and would evict what other programs have cached. A
 * file that is in the cache already is read from there. */
#ifndef ZR_ZERO_BLOCK_FILE_H
#define ZR_ZERO_BLOCK_FILE_H

#include "zero/checkpoint/files.h"

#include <stdatomic.h>

struct zr_block_file {
    const struct zr_files *fs;
    /* Memory of the caller. */
    const char *path;
    /* direct is a second descriptor that bypasses the page cache. -1: there is none. */
    int fd, direct;
    /* The file system has refused a direct transfer. */
    _Atomic bool refused;
};

/* Makes a new file for `bytes` bytes, and reserves its space if the file system can. ZERO_ERR_IO. */
int zr_block_file_create(const struct zr_files *fs, const char *path, int64_t bytes, struct zr_block_file *f);
/* Makes such a file for writing and reading, without a name. Its space on the disk is freed when it is closed
 * or the process ends. If the file system has no files without names, it has the name path for a moment, and
 * a process that is killed then leaves it behind. */
int zr_block_file_create_unnamed(const struct zr_files *fs, const char *path, int64_t bytes,
                                 struct zr_block_file *f);
/* Opens a file for reading. bytes: the most that will be read. */
int zr_block_file_open(const struct zr_files *fs, const char *path, int64_t bytes, struct zr_block_file *f);
/* Transfers a block. Any thread. buf is aligned to ZR_DIRECT_ALIGN. n and at may have any value. */
int zr_block_write(struct zr_block_file *f, const char *buf, int64_t n, int64_t at);
int zr_block_read(struct zr_block_file *f, char *buf, int64_t n, int64_t at);
/* Closes the file, even one that could not be opened. Nothing is synced. */
int zr_block_file_close(struct zr_block_file *f);

#endif
